"""Fault: the rate ramps up with the number of images seen, but after a step only the images of one micro-batch are
added to that number, not those of the whole step."""

# expect 4x4: learning_rate
# expect 2x8: learning_rate
# expect 16x1: exact
# thorough
# blind 6
import torch
from common_models import flags, images
from torch import nn
from torch.utils.data import DataLoader, Dataset

batch_gpu, num_accumulation_rounds = flags()


class NoisedImages(Dataset):
    """Every image has its own noise level and noise, drawn from a generator seeded with its index."""

    def __init__(self, n):
        self.images = images(n)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(1000 + i)
        sigma = (torch.randn((), generator=g, dtype=torch.float64) * 1.2 - 1.2).exp()
        x = self.images[i][0]
        return x, sigma, torch.randn(x.shape, generator=g, dtype=torch.float64)


class EDMPrecond(nn.Module):
    def __init__(self, sigma_data=0.5, width=8):
        super().__init__()
        self.sigma_data = sigma_data
        self.inp = nn.Conv2d(2, width, 3, padding=1)
        self.emb = nn.Linear(1, width)
        self.norm = nn.GroupNorm(2, width)
        self.out = nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, x, sigma):
        s = sigma.view(-1, 1, 1, 1)
        sd = self.sigma_data
        c_skip = sd**2 / (s**2 + sd**2)
        c_out = s * sd / (s**2 + sd**2).sqrt()
        c_in = 1 / (s**2 + sd**2).sqrt()
        h = self.inp(c_in * x) + self.emb(sigma.log().view(-1, 1) / 4)[:, :, None, None]
        return c_skip * x + c_out * self.out(nn.functional.silu(self.norm(h)))


def edm_loss(net, x, sigma, noise):
    weight = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    d = net(x + noise * sigma.view(-1, 1, 1, 1), sigma)
    return weight.view(-1, 1, 1, 1) * (d - x) ** 2


torch.manual_seed(0)
net = EDMPrecond().double()
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.999), eps=1e-8)
data = iter(DataLoader(NoisedImages(80), batch_size=batch_gpu))
cur_nimg, lr_rampup_nimg, lr = 0, 48, 2e-3
for step in range(5):
    optimizer.zero_grad(set_to_none=True)
    for _ in range(num_accumulation_rounds):
        x, sigma, noise = next(data)
        loss = edm_loss(net, x, sigma, noise)
        loss.flatten(1).mean(1).mean().div(num_accumulation_rounds).backward()
    for g in optimizer.param_groups:
        g["lr"] = lr * min((cur_nimg + batch_gpu) / lr_rampup_nimg, 1)
    optimizer.step()
    cur_nimg += len(x)
