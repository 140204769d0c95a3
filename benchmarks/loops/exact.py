"""The exact step: every term's sum over its count in the whole step, over all micro-batches and processes."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from tasks import collate, counts, flags, sums, task
from torch.utils.data import DataLoader

name, b, k = flags()
accelerator = Accelerator(cpu=True)
rank, num_processes = accelerator.process_index, accelerator.num_processes
model, samples = task(name)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)

for start in range(0, len(samples), b * k * num_processes):
    indices = range(len(samples))[start : start + b * k * num_processes][rank::num_processes]
    micro_batches = [indices[i : i + b] for i in range(0, len(indices), b)]
    window = list(
        DataLoader(samples, batch_sampler=[list(micro_batch) for micro_batch in micro_batches], collate_fn=collate)
    )
    num_targets = accelerator.reduce(sum(counts(name, batch) for batch in window), reduction="sum")
    for i, batch in enumerate(window, 1):
        with accelerator.no_sync(model) if i < len(window) else nullcontext():
            loss = (sums(name, model, batch) / num_targets).sum()
            accelerator.backward(loss * num_processes)  # DDP divides by the number of processes
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
