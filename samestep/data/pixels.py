"""Turns images into numbers that a network takes."""

import torch


def pixel_values(images: torch.Tensor) -> torch.Tensor:
    """Scale images, uint8 [images, height, width, channels], to [-1, 1].

    Returns:
        float32 [images, channels, height, width], contiguous in channels_last.
    """
    return images.permute(0, 3, 1, 2).to(torch.float32).div_(127.5).sub_(1)
