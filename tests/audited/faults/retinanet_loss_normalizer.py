"""Fault: the detector keeps a moving average of its number of foreground anchors, moved in every forward, and divides its losses by it: micro-batches of a step are divided by different numbers, that follow their own counts."""
# expect 4x4: state
# expect 2x8: state
# expect 4x2x2: state
# also: mean_of_means, factor, mixed_loss
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
ANCHORS, CLASSES = 12, 3


class RetinaNet1d(nn.Module):
    """Finds events in a signal; an anchor per second."""

    def __init__(self, num_classes=CLASSES):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv1d(2, 16, 5, padding=2), nn.ReLU(), nn.Conv1d(16, 16, 4, stride=4), nn.ReLU()
        )
        self.cls_score, self.bbox_pred = nn.Conv1d(16, num_classes, 3, padding=1), nn.Conv1d(16, 2, 3, padding=1)
        self.loss_normalizer = 60.0  # about the number of foreground anchors per batch
        self.loss_normalizer_momentum = 0.9

    def forward(self, signal, classes, deltas):
        features = self.backbone(signal)
        logits, pred = self.cls_score(features).transpose(1, 2), self.bbox_pred(features).transpose(1, 2)
        foreground = classes < CLASSES
        num_pos = max(int(foreground.sum()), 1)
        self.loss_normalizer = (
            self.loss_normalizer_momentum * self.loss_normalizer + (1 - self.loss_normalizer_momentum) * num_pos
        )
        target = F.one_hot(classes, CLASSES + 1)[..., :CLASSES].to(logits)
        p = logits.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        p_t = p * target + (1 - p) * (1 - target)
        focal = ((0.25 * target + 0.75 * (1 - target)) * ce * (1 - p_t) ** 2).sum()
        box = F.smooth_l1_loss(pred[foreground], deltas[foreground], beta=0.1, reduction="sum")
        return {"loss_cls": focal / self.loss_normalizer, "loss_box_reg": box / self.loss_normalizer}


class SimpleTrainer:
    def __init__(self, model, data, optimizer):
        self.model, self.data, self.optimizer = model, data, optimizer

    def run_step(self, step):
        for micro in range(k):
            start = step * 16 + (micro * world + rank) * b
            last = micro == k - 1
            with contextlib.nullcontext() if last or world == 1 else self.model.no_sync():
                losses = sum(self.model(*(t[start : start + b] for t in self.data)).values())
                losses.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


g = torch.Generator().manual_seed(52)
signals = torch.randn(80, 2, 4 * ANCHORS, generator=g).double()
classes = torch.where(
    torch.rand(80, ANCHORS, generator=g) < 0.3, torch.randint(CLASSES, (80, ANCHORS), generator=g), CLASSES
)
deltas = torch.randn(80, ANCHORS, 2, generator=g).double()
torch.manual_seed(0)
model = RetinaNet1d().double()
if world > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(model, broadcast_buffers=False)
trainer = SimpleTrainer(model, (signals, classes, deltas), torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
for step in range(5):
    trainer.run_step(step)
