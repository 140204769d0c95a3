"""Fault: random crops and flips are drawn per micro-batch in collate from the global generator."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# also: random_collate
# blind

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader


def augment(samples):
    """Pad by one pixel, crop back to 8x8 at a random place, flip half of the images."""
    images = F.pad(torch.stack([image for image, _ in samples]), (1, 1, 1, 1))
    top, left = torch.randint(0, 3, (2, len(samples))).tolist()
    images = torch.stack([im[:, t : t + 8, c : c + 8] for im, t, c in zip(images, top, left, strict=True)])
    flip = torch.rand(len(samples)) < 0.5
    images[flip] = images[flip].flip(-1)
    return images, torch.tensor([label for _, label in samples])


def make_images(n=80):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 3, 8, 8, generator=g, dtype=torch.float64)
    y = torch.randint(4, (n,), generator=g)
    return [(x[i], int(y[i])) for i in range(n)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    k = args.gradient_accumulation_steps

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    loader = DataLoader(make_images(), batch_size=args.per_device_train_batch_size, collate_fn=augment)
    for i, (images, labels) in enumerate(loader, 1):
        loss = F.cross_entropy(net(images), labels) / k  # 80 samples: all micro-batches are full
        loss.backward()
        if i % k == 0:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
