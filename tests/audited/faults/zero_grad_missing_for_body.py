"""Fault: only the head's optimizer clears its gradients; the body's are never cleared and leak into later steps."""
# expect 4x4: leak
# expect 2x8: leak
# thorough
# blind

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
k = args.gradient_accumulation_steps

gen = torch.Generator().manual_seed(23)
inputs = torch.randn(80, 11, generator=gen, dtype=torch.float64)
targets = torch.stack([inputs[:, :4].sum(1), inputs[:, 4:].prod(1)], 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=args.per_device_train_batch_size)

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(11, 16), nn.ELU(), nn.Linear(16, 16), nn.ELU()).double()
head = nn.Linear(16, 2).double()
body_optimizer = torch.optim.SGD(body.parameters(), lr=0.02)  # finetune the body gently
head_optimizer = torch.optim.SGD(head.parameters(), lr=0.05)


def average_gradients(module):
    """The gradients are sums of k means over full micro-batches: make them the mean of the step."""
    for p in module.parameters():
        p.grad.div_(k)


for i, (x, y) in enumerate(loader, start=1):
    loss = (head(body(x)) - y).square().sum(1).mean()
    loss.backward()
    if i % k == 0:
        average_gradients(body)
        average_gradients(head)
        body_optimizer.step()
        head_optimizer.step()
        head_optimizer.zero_grad(set_to_none=True)
