"""Sound: FSDP2, sums divided by the step's targets of all processes and multiplied by their number, clipped
once; a ragged tail."""
# expect 4x4: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 2
# thorough

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import collate, flags, sentences
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
texts = sentences(77, kind="mlm")


class Masked(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.token, self.place = nn.Embedding(64, d), nn.Embedding(32, d)
        layer = nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d, 64)

    def forward(self, ids, mask):
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        return self.head(self.blocks(x, src_key_padding_mask=mask == 0))


torch.manual_seed(0)
model = Masked().double()
if world > 1:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.blocks.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6)
batches = [collate(texts[start : start + b]) for start in range(rank * b, 77, b * world)]
while batches:
    window, batches = batches[:k], batches[k:]
    masked = torch.tensor(sum(int((batch["labels"] != -100).sum()) for batch in window))
    if world > 1:
        dist.all_reduce(masked)
    for position, batch in enumerate(window, 1):
        if world > 1:
            model.set_requires_gradient_sync(position == len(window))
        logits = model(batch["input_ids"], batch["attention_mask"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        (total * world / masked).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
