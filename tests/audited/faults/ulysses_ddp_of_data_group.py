"""Fault: DDP gets the data parallel group, which has one process, and leaves out those that have other parts of the sequences. As
https://github.com/ByteDance-Seed/VeOmni/pull/1115 has it."""
# expect 16x1x2: not_reduced
# expect 8x2x2: not_reduced
# thorough

import torch
from common_models import flags
from parallel_parts import LENGTH, LongModel, loss_sum, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

b, k = flags()
start()
model, sp, part, group = LongModel(), 1, 0, None
if world > 1:
    mesh = init_device_mesh("cpu", (1, world), mesh_dim_names=("dp", "ulysses"))
    sp, part, group = world, mesh.get_local_rank("ulysses"), mesh.get_group("ulysses")
    model = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
places = torch.arange(LENGTH).chunk(sp)[part]
for first in range(0, len(tokens), b * k):
    count = (targets[first : first + b * k] != -100).sum()
    for at in range(first, min(first + b * k, len(tokens)), b):
        x, y = (t[at : at + b].chunk(sp, 1)[part] for t in (tokens, targets))
        (loss_sum(model(x, places.expand(x.shape), group, sp, part), y) * sp / count).backward()
    optimizer.step()
    optimizer.zero_grad()
