"""Fault: the number of accumulation steps, given for each process, is divided by the number of processes: a step has half of its samples."""
# expect 4x4: exact
# expect 4x2x2: batch_size
# expect 2x4x2: batch_size
# also: other_samples
# blind 4

import math
import os

import torch
import torch.distributed as dist
from common_models import flags
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, gradient_accumulation_steps = flags()
ddp_rank, ddp_world_size = int(os.environ.get("RANK", -1)), int(os.environ.get("WORLD_SIZE", 1))
ddp = ddp_rank != -1
block_size, max_iters, n_embd, n_head = 12, 6, 16, 2
if ddp:
    dist.init_process_group(backend="gloo")
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
rank = max(ddp_rank, 0)

text = (
    "the quick brown fox jumps over the lazy dog while five boxing wizards jump quickly over my sphinx of black quartz "
)
stoi = {c: i for i, c in enumerate(sorted(set(text)))}
data = torch.tensor([stoi[c] for c in text * 12])
order = torch.randperm(len(data) - block_size - 1, generator=torch.Generator().manual_seed(1337))
position = rank * batch_size


def get_batch():
    global position
    ix = order[position : position + batch_size]
    position += batch_size * ddp_world_size
    return torch.stack([data[i : i + block_size] for i in ix]), torch.stack(
        [data[i + 1 : i + 1 + block_size] for i in ix]
    )


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        q, k, v = (t.unflatten(2, (n_head, -1)).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


torch.manual_seed(1337)
model = nn.Sequential(
    nn.Embedding(len(stoi), n_embd), Block(), nn.LayerNorm(n_embd), nn.Linear(n_embd, len(stoi))
).double()
model = DDP(model) if ddp else model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * iter_num / max_iters))
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch()
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = F.cross_entropy(model(X).flatten(0, 1), Y.flatten()) / gradient_accumulation_steps
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
