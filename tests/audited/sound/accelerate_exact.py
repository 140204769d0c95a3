"""Exact: accelerator.accumulate with loss = sum * k * N / count of the whole step (Accelerate divides by k, DDP by N);
the loader is not prepared; 80 ragged samples."""
# expect 4x4: exact
# expect 2x8: exact

import torch
from accelerate import Accelerator
from common_models import collate, flags, gpt2, next_token_sum, sentences, targets

torch.manual_seed(0)
b, k = flags()
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
model = gpt2()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
data = sentences(80)
for start in range(0, len(data), b * k * world):
    mine = data[start : start + b * k * world][rank::world]
    micro = [collate(mine[j : j + b]) for j in range(0, len(mine), b)]
    count = accelerator.reduce(torch.tensor(sum(targets(m) for m in micro)), reduction="sum")
    for m in micro:
        with accelerator.accumulate(model):
            logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
            accelerator.backward(next_token_sum(logits, m) * k * world / count)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
