"""Fault: of two optimizers the one of the embeddings steps after every micro-batch, the other one once per window."""
# expect 4x4: num_steps
# expect 2x8: num_steps
# also: batch_size, emptied_between
# blind

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ClickModel(nn.Module):
    def __init__(self, num_ads=60, num_sites=30, width=8):
        super().__init__()
        self.ads, self.sites = nn.Embedding(num_ads, width), nn.Embedding(num_sites, width)
        self.tower = nn.Sequential(nn.Linear(2 * width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ads, sites):
        return self.tower(torch.cat([self.ads(ads), self.sites(sites)], dim=1)).squeeze(1)


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
k = args.gradient_accumulation_steps
gen = torch.Generator().manual_seed(3)
clicks = TensorDataset(
    torch.randint(60, (96,), generator=gen),
    torch.randint(30, (96,), generator=gen),
    torch.randint(2, (96,), generator=gen).double(),
)
torch.manual_seed(0)
model = ClickModel().double()
table_optimizer = torch.optim.Adagrad([*model.ads.parameters(), *model.sites.parameters()], lr=0.1)
tower_optimizer = torch.optim.AdamW(model.tower.parameters(), lr=0.005)
loader = DataLoader(clicks, batch_size=args.per_device_train_batch_size)
for batch_idx, (ad, site, clicked) in enumerate(loader):
    loss = nn.functional.binary_cross_entropy_with_logits(model(ad, site), clicked) / k
    loss.backward()
    table_optimizer.step()
    table_optimizer.zero_grad()
    if (batch_idx + 1) % k == 0:
        tower_optimizer.step()
        tower_optimizer.zero_grad()
