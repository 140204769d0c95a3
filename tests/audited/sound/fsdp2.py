"""Exact: weights sharded by FSDP2; sums times N over the count of the whole step; 77 ragged samples."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact

import os

import torch
import torch.distributed as dist
from common_models import collate, flags, llama, next_token_sum, sentences, targets
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
model = llama()
if world > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = sentences(77)
for start in range(0, len(data), b * k * world):
    mine = data[start : start + b * k * world][rank::world]
    parts = [mine[j : j + b] for j in range(0, len(mine), b)]
    num = torch.tensor([len(parts), sum(targets(collate(part)) for part in parts)])
    if world > 1:
        most = num[:1].clone()
        dist.all_reduce(num[1:])
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        parts += [mine[:1]] * (int(most) - len(parts))  # an idle process takes part, for nothing
    for j, part in enumerate(parts):
        m = collate(part)
        if world > 1:
            model.set_requires_gradient_sync(j + 1 == len(parts))
        logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
        is_real = j < int(num[0])
        (next_token_sum(logits, m) * is_real * world / num[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
