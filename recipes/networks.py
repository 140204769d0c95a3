"""Networks of our own: what transformers does not have."""

import torch
from torch import nn

from recipes.recipe import CaptchaRecognition

GROUPS = 32
"""Of group normalisation (Wu and He, 2018, arXiv:1803.08494); fewer where the channels are no multiple of it."""


class CaptchaReader(nn.Module):
    """Reads the characters of an image: convolutions, each halving height and width, and one head per character.

    Args:
        recipe: decides the image's size, the layers and the alphabet.
    """

    def __init__(self, recipe: CaptchaRecognition):
        super().__init__()
        height, width, channels, layers = recipe.image_height, recipe.image_width, recipe.num_channels, []
        for out in recipe.conv_channels:
            convolution = nn.Conv2d(channels, out, 3, padding=1, bias=False)
            layers += [convolution, normalization(recipe.normalization, out), nn.ReLU(), nn.MaxPool2d(2)]
            channels, height, width = out, height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, recipe.hidden_size), nn.ReLU())
        self.heads = nn.Linear(recipe.hidden_size, recipe.num_characters * len(recipe.alphabet))
        self.num_characters = recipe.num_characters

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [images, characters, alphabet] of images [images, channels, height, width]."""
        return self.heads(self.hidden(self.features(images))).unflatten(1, (self.num_characters, -1))


def normalization(kind: str, channels: int) -> nn.Module:
    """`group` or `batch` normalisation of feature maps."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(next(groups for groups in range(GROUPS, 0, -1) if channels % groups == 0), channels)


def normalize_by_groups(model: nn.Module) -> None:
    """Replace every batch normalisation of feature maps by group normalisation, whose samples do not see each other."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, normalization("group", child.num_features))
