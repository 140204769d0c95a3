"""Turns images into numbers that a network takes."""

import torch


def pixel_values(images: torch.Tensor) -> torch.Tensor:
    """float32 in [-1, 1], [images, channels, height, width] in channels_last, of uint8 [images, height, width, channels]."""
    return images.permute(0, 3, 1, 2).to(torch.float32).div_(127.5).sub_(1)
