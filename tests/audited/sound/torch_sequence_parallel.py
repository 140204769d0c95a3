"""Exact: torch's styles of tensor and sequence parallelism; embeddings and norms are whole on each process, as DTensors."""
# expect 16x1x2: exact
# expect 8x2x2: exact
# thorough

import torch
from common_models import flags
from parallel_parts import Model, loss_sum, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

b, k = flags()
start()
model = Model()
if world > 1:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    plan = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for number in range(len(model.blocks)):
        plan[f"blocks.{number}.norm"] = SequenceParallel()
        plan[f"blocks.{number}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{number}.down"] = RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        (loss_sum(model(tokens[at : at + b]), targets[at : at + b]) / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
