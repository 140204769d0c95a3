"""Exact: DDP reduces over the data and the parts of the sequences together, which it averages; so the loss is times both."""
# expect 8x1x4: exact
# expect 4x2x4: exact
# thorough

import torch
from common_models import flags
from parallel_parts import LENGTH, LongModel, loss_sum, start, texts, world
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

b, k = flags()
start()
model, dp, cp, me, part, group = LongModel(), 1, 1, 0, 0, None
if world > 1:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    dp, cp, me, part = 2, 2, mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    group = mesh.get_group("cp")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens, targets = texts()
places = torch.arange(LENGTH).chunk(cp)[part]
for first in range(0, len(tokens), b * k * dp):
    count = (targets[first : first + b * k * dp] != -100).sum()
    mine = list(range(first, min(first + b * k * dp, len(tokens))))[me::dp]
    for at in range(0, len(mine), b):
        x, y = (t[mine[at : at + b]].chunk(cp, 1)[part] for t in (tokens, targets))
        logits = model(x, places.expand(x.shape), group, cp, part)
        (loss_sum(logits, y) * dp * cp / count).backward()
    optimizer.step()
    optimizer.zero_grad()
