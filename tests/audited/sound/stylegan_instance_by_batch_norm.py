"""Sound: samples are folded into channels, (1, b * c, h, w), for convolutions with a kernel per sample (groups = b), and F.batch_norm on them takes the statistics of each sample alone."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ModulatedConv2d(nn.Module):
    def __init__(self, n_in, n_out, style_dim, kernel=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n_out, n_in, kernel, kernel) / (n_in * kernel**2) ** 0.5)
        self.modulation, self.padding = nn.Linear(style_dim, n_in), kernel // 2

    def forward(self, x, style):
        batch, channels, height, width = x.shape
        weight = self.weight[None] * (1 + self.modulation(style))[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        x = F.conv2d(x.reshape(1, -1, height, width), weight.flatten(0, 1), padding=self.padding, groups=batch)
        x = F.batch_norm(x, None, None, training=True)  # of each sample's own channels
        return F.leaky_relu(x.view(batch, -1, height, width), 0.2)


class StyleTransfer(nn.Module):
    def __init__(self, style_dim=6):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(style_dim, 12), nn.LeakyReLU(0.2), nn.Linear(12, 12))
        self.convs = nn.ModuleList([ModulatedConv2d(3, 8, 12), ModulatedConv2d(8, 8, 12)])
        self.to_rgb = nn.Conv2d(8, 3, 1)

    def forward(self, image, z):
        style = self.mapping(z)
        x = image
        for conv in self.convs:
            x = conv(x, style)
        return self.to_rgb(x)


def gram(x):
    x = x.flatten(2)
    return x @ x.transpose(1, 2) / x.shape[-1]


b, k = flags()
g = torch.Generator().manual_seed(80)
content, painting = torch.rand(2, 80, 3, 8, 8, generator=g, dtype=torch.float64)
z = torch.randn(80, 6, generator=g, dtype=torch.float64)
torch.manual_seed(0)
model = StyleTransfer().double()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.0, 0.99), eps=1e-5)
for i, (image, style_image, code) in enumerate(DataLoader(TensorDataset(content, painting, z), batch_size=b), 1):
    result = model(image, code)
    loss = F.mse_loss(result, image) + 0.5 * F.mse_loss(gram(result), gram(style_image))
    (loss / k).backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
