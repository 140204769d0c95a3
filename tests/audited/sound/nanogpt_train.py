"""Sound: nanoGPT's loop: offsets drawn for the whole step and cut by process and micro-step, learning rate by
iteration, clipping at the end."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 8x1x2: exact
# blind 1
# thorough

import math
import os

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

batch_size, gradient_accumulation_steps = flags()
block_size, vocab_size, n_embd = 12, 40, 16
max_iters, warmup_iters, learning_rate, min_lr = 6, 2, 0.02, 0.002
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ddp = world > 1
if ddp:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(1337)
data = torch.randint(vocab_size, (2000,), generator=torch.Generator().manual_seed(1))


def get_batch(it, micro_step):
    ix = torch.randint(len(data) - block_size, (16,), generator=torch.Generator().manual_seed(1000 + it))
    mine = ix.view(world, gradient_accumulation_steps, batch_size)[rank, micro_step]
    x = torch.stack([data[i : i + block_size] for i in mine])
    return x, torch.stack([data[i + 1 : i + 1 + block_size] for i in mine])


def get_lr(it):
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    decayed = min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)
    return learning_rate * (it + 1) / warmup_iters if it < warmup_iters else decayed


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.ln_1, self.ln_f = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = (nn.Linear(n_embd, n * n_embd, bias=False) for n in (3, 1))

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[: idx.size(1)]
        q, k, v = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return F.cross_entropy((self.ln_f(x) @ self.wte.weight.T).flatten(0, 1), targets.flatten())


model = GPT().double()
groups = [
    {"params": [p for p in model.parameters() if (p.dim() >= 2) == (wd > 0)], "weight_decay": wd} for wd in (0.1, 0)
]
optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
model, (X, Y) = DDP(model) if ddp else model, get_batch(0, 0)
for iter_num in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    for micro_step in range(gradient_accumulation_steps):
        last = micro_step == gradient_accumulation_steps - 1
        if ddp:
            model.require_backward_grad_sync = last
        loss = model(X, Y) / gradient_accumulation_steps
        X, Y = get_batch(iter_num + last, 0 if last else micro_step + 1)  # prefetch the next one
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
