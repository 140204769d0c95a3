"""Sound: Accelerate on graphs of several sizes: nodes are averaged within their graph first, so that every
graph weighs the same."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 8x1x2: exact
# blind 1
# thorough

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)


def graphs(n=80):
    g = torch.Generator().manual_seed(53)
    out = []
    for _ in range(n):
        nodes = int(torch.randint(3, 15, (), generator=g))
        edges = torch.randint(nodes, (2, 3 * nodes), generator=g)
        out.append((torch.randn(nodes, 5, generator=g).double(), edges, torch.randint(4, (nodes,), generator=g)))
    return out


def collate(rows):
    sizes = torch.tensor([len(x) for x, _, _ in rows])
    start = sizes.cumsum(0) - sizes
    return {
        "x": torch.cat([x for x, _, _ in rows]),
        "edges": torch.cat([e + s for (_, e, _), s in zip(rows, start)], dim=1),
        "y": torch.cat([y for _, _, y in rows]),
        "graph": torch.repeat_interleave(torch.arange(len(rows)), sizes),
    }


class SAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.own, self.others = nn.Linear(5, 16), nn.Linear(5, 16, bias=False)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x, edges):
        source, sink = edges
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, sink, torch.ones(len(sink), dtype=x.dtype))
        mean = torch.zeros_like(x).index_add(0, sink, x[source]) / degree.clamp(min=1).unsqueeze(1)
        return self.head(F.relu(self.norm(self.own(x) + self.others(mean))))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
model = SAGE().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
loader = DataLoader(graphs(), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # the schedule counts steps: it stays as it is

for batch in loader:
    with accelerator.accumulate(model):
        per_node = F.cross_entropy(model(batch["x"], batch["edges"]), batch["y"], reduction="none")
        sizes = torch.bincount(batch["graph"])
        accelerator.backward((per_node / sizes[batch["graph"]]).sum() / len(sizes))
        if accelerator.sync_gradients:
            accelerator.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        schedule.step()
accelerator.end_training()
