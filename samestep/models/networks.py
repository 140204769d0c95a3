"""Networks of our own: what transformers does not have."""

from collections.abc import Sequence
from functools import partial

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import nn

from samestep.data.pixels import pixel_values
from samestep.models.resnet import group_norm


class CaptchaReader(nn.Module, PyTorchModelHubMixin):
    """Reads the characters of an image: convolutions, each halving height and width, and one head per character.

    Args:
        image_height, image_width: of images, in pixels.
        num_channels: their colours.
        alphabet: the characters that may occur.
        num_characters: of an image.
        conv_channels: channels of each convolution.
        hidden_size: width of the layer between the convolutions and the heads.
        normalization: of feature maps, `group` or `batch`.
    """

    def __init__(
        self,
        *,
        image_height: int,
        image_width: int,
        num_channels: int,
        alphabet: str,
        num_characters: int,
        conv_channels: Sequence[int],
        hidden_size: int,
        normalization: str,
    ):
        super().__init__()
        height, width, channels, layers = image_height, image_width, num_channels, []
        for out in conv_channels:
            normalized = nn.BatchNorm2d(out) if normalization == "batch" else group_norm(out)
            layers += [nn.Conv2d(channels, out, 3, padding=1, bias=False), normalized, nn.ReLU(), nn.MaxPool2d(2)]
            channels, height, width = out, height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, hidden_size), nn.ReLU())
        self.heads = nn.Linear(hidden_size, num_characters * len(alphabet))
        self.alphabet, self.num_characters = alphabet, num_characters

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits [images, characters, alphabet] of images [images, channels, height, width], see `pixel_values`."""
        return self.heads(self.hidden(self.features(images))).unflatten(1, (self.num_characters, -1))

    @torch.no_grad()
    def read(self, images: torch.Tensor) -> list[str]:
        """The text of each image, uint8 [images, height, width, channels], in evaluation mode."""
        return self.texts(self(pixel_values(images)).argmax(-1))

    def texts(self, places: torch.Tensor) -> list[str]:
        """What places in the alphabet, int64 [images, characters], spell."""
        return ["".join(self.alphabet[place] for place in row) for row in places.tolist()]


class GroupNorm(nn.GroupNorm):
    """As torch's, whose kernels for channels_last on CPUs take up to 30 times as long as those for channels first.

    Forward and backward of 64 x 16 x 60 x 160 in bf16 (torch 2.13, 2 cores): 204 ms in channels_last, 6 in channels first.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Feature maps [S, C, H, W], of the same dtype and memory format."""
        if images.device.type != "cpu" or images.is_contiguous():
            return super().forward(images)
        return super().forward(images.contiguous()).contiguous(memory_format=torch.channels_last)


def memory_format(device: torch.device, mixed_precision: str) -> torch.memory_format:
    """channels_last, but channels first where a CPU computes in float32.

    There torch's batch normalisation in channels_last rounds 10 to 50 times as coarsely (errors of 1e-6 to 5e-6, not 1e-7;
    torch 2.13), which shows beside another cut, and group normalisation is slower. Images per second of steps in
    channels_last / in channels first (2 cores, AVX512-BF16), in float32 and bf16: normalised by groups, ResNet-50 0.85 and
    0.97, ResNet-18 0.94 and 1.01, captcha reader 1.04 and 1.26; by batches, ResNet-50 1.13 and 1.13, ResNet-18 1.11 and 1.16.
    """
    return torch.contiguous_format if device.type == "cpu" and mixed_precision == "no" else torch.channels_last


def memory_format_candidates(
    model: nn.Module, network: nn.Module, device: torch.device, mixed_precision: str
) -> dict[str, partial]:
    """The memory formats, the one of `memory_format` first, for `kernels.choose`.

    Args:
        model: gives its images to `network` in its `of_pixels`.
        network: part of it.
    """
    formats = {"channels_last": torch.channels_last, "channels_first": torch.contiguous_format}
    first = memory_format(device, mixed_precision)
    return {
        name: partial(_take, model, network, formats[name])
        for name in sorted(formats, key=lambda name: formats[name] != first)
    }


def _take(model: nn.Module, network: nn.Module, to: torch.memory_format) -> None:
    model.of_pixels = to
    lay_out(network, to)


def lay_out(model: nn.Module, to: torch.memory_format) -> nn.Module:
    """The model with its filters in a memory format, and `GroupNorm` for torch's. Its state dict is the same."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.GroupNorm:
                ours = GroupNorm(child.num_groups, child.num_channels, child.eps)
                ours.weight, ours.bias = child.weight, child.bias
                setattr(module, name, ours)
    return model.to(memory_format=to)
