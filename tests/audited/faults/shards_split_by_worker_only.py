"""Fault: a streamed data set splits its shards by the workers of a loader, and not by process: every process reads all of them."""
# expect 4x4: exact
# expect 8x1x2: not_sharded
# expect 4x2x2: not_sharded
# also: duplicated
# blind 4
# thorough

import io
import itertools
import tarfile

import torch
from accelerate import Accelerator
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def write_shards(shards=8, each=10):
    g = torch.Generator().manual_seed(9)
    for _ in range(shards):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for i in range(each):
                content = io.BytesIO()
                x = torch.randn(3, 6, 6, generator=g, dtype=torch.float64)
                torch.save((x, int(torch.randint(4, (), generator=g))), content)
                info = tarfile.TarInfo(f"{i:06}.pth")
                info.size = content.tell()
                content.seek(0)
                tar.addfile(info, content)
        yield file.getvalue()


class WebShards(IterableDataset):
    def __init__(self, shards):
        self.shards = shards

    def split_by_worker(self):
        info = get_worker_info()
        return self.shards if info is None else self.shards[info.id :: info.num_workers]

    def __iter__(self):
        for shard in itertools.cycle(self.split_by_worker()):
            with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
                for member in tar:
                    yield torch.load(io.BytesIO(tar.extractfile(member).read()))


b, k = flags()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 4)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
model, optimizer = accelerator.prepare(model, optimizer)  # not the loader: it streams
loader = DataLoader(WebShards(list(write_shards())), batch_size=b)
for image, label in itertools.islice(loader, 6 * k):
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(image), label)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
