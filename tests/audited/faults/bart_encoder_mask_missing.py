"""Fault: BART summarises; the collator returns no attention_mask, so that the encoder and the cross-attention attend to
padding."""
# expect 4x4: padding
# expect 2x8: padding
# blind 8

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import BartConfig, BartForConditionalGeneration

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS = 40, 2


def pairs(n=80, low=3, high=14):
    g = torch.Generator().manual_seed(11)

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
    labels = pad_sequence([torch.cat([t, torch.tensor([EOS])]) for _, t in rows], batch_first=True, padding_value=-100)
    return {"input_ids": source, "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(pairs(), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(loader)
while window := list(islice(batches, k)):
    num_targets = sum((batch["labels"] != -100).sum() for batch in window)
    for batch in window:
        labels = batch["labels"]
        logits = model(**batch).logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (total / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
