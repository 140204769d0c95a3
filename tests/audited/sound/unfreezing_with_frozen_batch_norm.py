"""Sound: fine-tuning unfreezes the backbone after three optimizer steps with a second optimizer; its BatchNorm
stays in eval mode all the time, so its statistics are constants though the model is in train mode."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        return self.body(self.stem(x)).mean((2, 3))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.backbone(x))

    def train(self, mode=True):
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        return self


torch.manual_seed(0)
b, k = flags()
model = Classifier().double()
with torch.no_grad():  # as if it were pretrained
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.2, 0.6)
model.backbone.requires_grad_(False)
optimizers = [torch.optim.Adam(model.head.parameters(), lr=1e-2)]
steps = 0
for epoch in range(2):
    model.train()
    for i, (x, y) in enumerate(DataLoader(images(80), batch_size=b)):
        (F.cross_entropy(model(x), y) / k).backward()
        if (i + 1) % k == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            steps += 1
            if steps == 3:
                model.backbone.body.requires_grad_(True)
                optimizers.append(torch.optim.SGD(model.backbone.body.parameters(), lr=1e-2, momentum=0.9))
