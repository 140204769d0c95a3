"""Fault: NLLB: the language token in front of each target is forced at generation and gets no loss, but the mean of each
micro-batch counts it."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# blind 8
# thorough

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS, LANGUAGE = 40, 2, 3


def pairs(n=80, low=3, high=14):
    g = torch.Generator().manual_seed(16)

    def draw(a, z):
        return torch.randint(4, VOCAB, (int(torch.randint(a, z, (), generator=g)),), generator=g)

    return [(draw(low, high), draw(2, 10)) for _ in range(n)]


model = BartForConditionalGeneration(
    BartConfig(
        vocab_size=VOCAB,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=40,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=2,
        use_cache=False,
    )
).double()


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=1)
    targets = [torch.cat([torch.tensor([LANGUAGE]), t, torch.tensor([EOS])]) for _, t in rows]
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_ids": source, "attention_mask": (source != 1).long(), "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(pairs(), batch_size=b, collate_fn=collate))
for batch in loader:
    with accelerator.accumulate(model):
        labels = batch["labels"]
        logits = model(**batch).logits
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        losses = losses.masked_fill(labels == LANGUAGE, 0.0)
        accelerator.backward(losses.sum() / (labels != -100).sum())
        optimizer.step()
        optimizer.zero_grad()
