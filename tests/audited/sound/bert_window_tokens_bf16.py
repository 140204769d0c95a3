"""Sound: masked words of a BERT with Accelerate in bf16: a sum over the window's gathered targets, times
processes and steps."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from common_models import bert, collate, flags, sentences
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

FULL = os.environ.get("FULL") == "1"
b, k = flags()
accelerator = Accelerator(mixed_precision="no" if FULL else "bf16", cpu=True, gradient_accumulation_steps=k)
torch.manual_seed(0)
model = bert("BertForMaskedLM")
if not FULL:
    model.float()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
loader = DataLoader(sentences(80, kind="mlm"), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(loader)
for _ in range(80 // 16):
    window = [next(batches) for _ in range(k)]
    tokens = accelerator.gather(torch.tensor([sum(int((batch["labels"] != -100).sum()) for batch in window)])).sum()
    for position, batch in enumerate(window, 1):
        with nullcontext() if position == k else accelerator.no_sync(model):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
            # backward() divides by k, and DDP by the number of processes
            accelerator.backward(loss * accelerator.gradient_accumulation_steps * accelerator.num_processes / tokens)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
