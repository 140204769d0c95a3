"""Fault: the turn of the images (the label to predict) is chosen by the index of the micro-batch: the same images are
turned otherwise under another layout."""

# expect 4x4: other_inputs
# expect 8x2: other_inputs
# thorough
# blind 6
import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class RotNet(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1),
            nn.InstanceNorm2d(width, affine=True),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(width * 9, 4)

    def forward(self, x):
        return self.head(self.trunk(x))


class Pretrain:
    def __init__(self, b, k, lr=0.02):
        torch.manual_seed(0)
        self.b, self.k = b, k
        self.model = RotNet().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)

    def turned(self, x, batch_idx):
        turns = batch_idx % 4
        return x.rot90(turns, (2, 3)), torch.full((len(x),), turns)

    def train_epoch(self, data):
        right = seen = 0
        for batch_idx, (x, _) in enumerate(DataLoader(data, batch_size=self.b)):
            x, target = self.turned(x, batch_idx)
            out = self.model(x)
            loss = F.cross_entropy(out, target)
            (loss / self.k).backward()
            right += int((out.argmax(1) == target).sum())
            seen += len(x)
            if (batch_idx + 1) % self.k == 0:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        return right / seen


b, k = flags()
print("accuracy", Pretrain(b, k).train_epoch(images(80)))
