"""Fault: T5 translates; labels are padded with the pad token and not with -100, so that the mean counts padding."""
# expect 4x4: padding
# expect 2x8: padding
# also: counts, mean_of_means
# blind 8

import torch
from accelerate import Accelerator
from common_models import flags
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import T5Config, T5ForConditionalGeneration

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS = 40, 1


def pairs(n=80, low=3, high=14):
    g = torch.Generator().manual_seed(12)

    def draw(a, z):
        return torch.randint(4, VOCAB, (int(torch.randint(a, z, (), generator=g)),), generator=g)

    return [(draw(low, high), draw(2, 10)) for _ in range(n)]


model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=VOCAB,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
).double()


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=0)
    labels = pad_sequence([torch.cat([t, torch.tensor([EOS])]) for _, t in rows], batch_first=True, padding_value=0)
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(pairs(), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
