"""Fault: the shard loader starts at B*T*rank but moves on by B*T instead of B*T*world: the second process reads
what the first reads next."""
# expect 4x4: exact
# expect 4x2x2: duplicated
# expect 8x1x2: duplicated
# also: other_samples, other_inputs, dropped
# blind 1
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

B, grad_accum_steps = flags()
T, V, C = 16, 48, 16
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.manual_seed(1337)


class DataLoaderLite:
    def __init__(self, B, T, process_rank):
        self.B, self.T = B, T
        self.tokens = torch.randint(V, (16 * 5 * T + 1,), generator=torch.Generator().manual_seed(42))
        self.current_position = B * T * process_rank

    def next_batch(self):
        B, T = self.B, self.T
        buf = self.tokens[self.current_position : self.current_position + B * T + 1]
        self.current_position += B * T
        if self.current_position + B * T + 1 > len(self.tokens):
            self.current_position = 0
        return buf[:-1].view(B, T), buf[1:].view(B, T)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.ln, self.ln_f = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        q, k, v = self.qkv(self.ln(x)).split(C, dim=-1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return F.cross_entropy((self.ln_f(x) @ self.wte.weight.T).flatten(0, 1), targets.flatten())


model = GPT().double()
if world > 1:
    model = DDP(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
train_loader = DataLoaderLite(B, T, rank)
for step in range(5):
    for micro_step in range(grad_accum_steps):
        x, y = train_loader.next_batch()
        if world > 1:
            model.require_backward_grad_sync = micro_step == grad_accum_steps - 1
        (model(x, y) / grad_accum_steps).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if world > 1:
    dist.destroy_process_group()
