"""nanoGPT's train.py: blocks drawn at random places of a text, k losses divided by k, an evaluation before the first step.

The model is a tiny Llama instead of nanoGPT's own. Left out: the schedule, checkpoints, the log. k is given per process;
train.py divides it by the number of processes.
"""

import os

import torch
import torch.nn.functional as F
from setup import RATE, SIZES, arguments, llama
from torch.nn.parallel import DistributedDataParallel

flags = arguments()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
rank, is_parallel = int(os.environ.get("RANK", "0")), "RANK" in os.environ
text = torch.randint(SIZES["vocab_size"], (2000,))
raw_model = model = llama()
if is_parallel:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(raw_model)
torch.manual_seed(1337 + rank)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)


def get_batch(block_size=16):
    starts = torch.randint(len(text) - block_size, (b,))
    rows = torch.stack([text[start : start + block_size + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


def compute_loss(model, x, y):
    return F.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())


x, y = get_batch()
for step in range(5):
    if step == 0 and rank == 0:
        raw_model.eval()
        with torch.no_grad():
            for _ in range(2):
                compute_loss(raw_model, *get_batch())
        raw_model.train()
    for micro_step in range(k):
        if is_parallel:
            model.require_backward_grad_sync = micro_step == k - 1
        loss = compute_loss(model, x, y) / k
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
