"""Fault: an extra loss over the hardest quarter of the landmarks of a micro-batch: which ones are the hardest depends on what they are compared with."""
# expect 4x4: mixed_loss
# expect 2x8: mixed_loss
# also: not_summed, not_a_sum
# blind 4
# thorough

import os

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
POINTS = 8


class FaceNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.block = nn.Sequential(nn.GroupNorm(3, 12), nn.SiLU(), nn.Conv2d(12, 12, 3, padding=1))
        self.head = nn.Linear(12 * 36, POINTS * 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(x.flatten(1)).unflatten(1, (POINTS, 2))


def wing(distance, w=0.3, epsilon=0.1):
    inside = w * torch.log1p(distance / epsilon)
    return torch.where(distance < w, inside, distance - w + w * torch.log1p(torch.tensor(w / epsilon)))


def landmark_loss(predicted, truth, share=0.25, weight=0.02):
    per_point = wing((predicted - truth).abs()).sum(-1)  # (faces, points)
    hard = per_point.flatten().topk(int(share * per_point.numel())).values
    return per_point.mean() + weight * hard.mean()


g = torch.Generator().manual_seed(61)
points = torch.rand(80, POINTS, 2, generator=g)
faces = torch.zeros(80, 1, 12, 12)
for i, face in enumerate(points):
    for x, y in (face * 12).long().tolist():
        faces[i, 0, x, y] += 1
faces += 0.1 * torch.randn(faces.shape, generator=g)

torch.manual_seed(0)
b, k = flags()
model = FaceNet().to(dtype)
optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9)
loader = DataLoader(TensorDataset(faces.to(dtype), points.to(dtype)), batch_size=b)
for i, (x, y) in enumerate(loader):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not FULL):
        predicted = model(x)
    loss = landmark_loss(predicted.to(dtype), y)
    (loss / k).backward()
    if (i + 1) % k == 0:
        optimizer.step()
        optimizer.zero_grad()
