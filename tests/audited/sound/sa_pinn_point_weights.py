"""A PINN with a weight for every collocation point, which climbs (maximize) while the network descends; both step once per
window. The data term of the boundary enters once per step, before the micro-batches."""

# expect 4x4: exact
# expect 2x8: exact
# thorough
# blind 6
import torch
from common_models import flags
from torch import nn
from torch.func import hessian, vmap
from torch.utils.data import DataLoader, TensorDataset


class Poisson(nn.Module):
    def __init__(self, n_points, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )
        self.point_weight = nn.Parameter(torch.zeros(n_points))

    def u(self, xy):
        return self.net(xy).squeeze(-1)

    def residual(self, xy):
        laplace = vmap(lambda p: hessian(self.u)(p).diagonal().sum())(xy)
        source = -2 * torch.pi**2 * torch.sin(torch.pi * xy[:, 0]) * torch.sin(torch.pi * xy[:, 1])
        return laplace - source

    def interior(self, index, xy):
        mask = nn.functional.softplus(self.point_weight[index])
        return (mask * self.residual(xy) ** 2).sum()


def boundary(n=20):
    s = torch.linspace(0, 1, n, dtype=torch.float64)
    o, e = torch.zeros_like(s), torch.ones_like(s)
    sides = [torch.stack(p, 1) for p in ((s, o), (s, e), (o, s), (e, s))]
    return torch.cat(sides)


b, k = flags()
torch.manual_seed(0)
g = torch.Generator().manual_seed(13)
points = torch.rand(48, 2, generator=g, dtype=torch.float64)
model = Poisson(len(points)).double()
descent = torch.optim.Adam(model.net.parameters(), lr=2e-3)
ascent = torch.optim.SGD([model.point_weight], lr=0.05, maximize=True)
edge = boundary()
loader = DataLoader(TensorDataset(torch.arange(len(points)), points), batch_size=b)
for epoch in range(2):
    for i, (index, xy) in enumerate(loader):
        if i % k == 0:
            descent.zero_grad()
            ascent.zero_grad()
            (10 * model.u(edge).pow(2).mean()).backward()
        (model.interior(index, xy) / (b * k)).backward()
        if (i + 1) % k == 0:
            nn.utils.clip_grad_norm_(model.net.parameters(), 50.0)
            descent.step()
            ascent.step()
