"""Sound: micro-batches without a visible keypoint are skipped, which is right here: only visible ones have a
loss, and those of the window are counted first."""
# expect 4x4: exact
# expect 2x8: exact
# blind 3
# thorough

import itertools

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset

JOINTS = 4


class People(Dataset):
    """Crops of 8 x 8 with joints, some of them visible; many crops show nobody."""

    def __init__(self, n=77):
        g = torch.Generator().manual_seed(44)
        self.crops = torch.randn(n, 1, 8, 8, generator=g, dtype=torch.float64)
        self.joints = torch.randint(64, (n, JOINTS), generator=g)
        somebody = torch.rand(n, 1, generator=g) < 0.35
        self.visible = (torch.rand(n, JOINTS, generator=g) < 0.6) & somebody

    def __len__(self):
        return len(self.crops)

    def __getitem__(self, i):
        return self.crops[i], self.joints[i], self.visible[i]


class Pose(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.norm, self.maps = nn.GroupNorm(3, 12), nn.Conv2d(12, JOINTS, 3, padding=1)

    def forward(self, x):
        return self.maps(F.relu(self.norm(self.stem(x)))).flatten(2)


class Runner:
    def __init__(self, model, optimizer, accumulate):
        self.model, self.optimizer, self.accumulate = model, optimizer, accumulate

    def run_epoch(self, loader):
        batches = iter(loader)
        while window := list(itertools.islice(batches, self.accumulate)):
            visible = sum(int(v.sum()) for *_, v in window)
            for crops, joints, seen in window:
                if not seen.any():
                    continue
                maps = self.model(crops)[seen]  # a map of 64 places for each visible joint
                loss = F.cross_entropy(maps, joints[seen], reduction="sum") / max(visible, 1)
                loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


torch.manual_seed(0)
b, k = flags()
model = Pose().double()
runner = Runner(model, torch.optim.AdamW(model.parameters(), lr=5e-3), k)
runner.run_epoch(DataLoader(People(), batch_size=b))
