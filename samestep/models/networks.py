"""Define networks that transformers does not have."""

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
        normalization: of the feature maps, `group` or `batch`.
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
        for out_channels in conv_channels:
            convolution = nn.Conv2d(channels, out_channels, 3, padding=1, bias=False)
            norm = nn.BatchNorm2d(out_channels) if normalization == "batch" else group_norm(out_channels)
            layers += [convolution, norm, nn.ReLU(), nn.MaxPool2d(2)]
            channels, height, width = out_channels, height // 2, width // 2
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(channels * height * width, hidden_size), nn.ReLU())
        self.heads = nn.Linear(hidden_size, num_characters * len(alphabet))
        self.alphabet, self.num_characters = alphabet, num_characters

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute logits [images, characters, alphabet] of images [images, channels, height, width], see `pixel_values`."""
        return self.heads(self.hidden(self.features(images))).unflatten(1, (self.num_characters, -1))

    @torch.no_grad()
    def read(self, images: torch.Tensor) -> list[str]:
        """Read the text of each image, uint8 [images, height, width, channels]; the reader must be in evaluation mode."""
        return self.texts(self(pixel_values(images)).argmax(-1))

    def texts(self, places: torch.Tensor) -> list[str]:
        """Spell the texts of places in the alphabet, int64 [images, characters]."""
        return ["".join(self.alphabet[place] for place in row) for row in places.tolist()]


class GroupNorm(nn.GroupNorm):
    """Normalises as torch's, whose kernels for channels_last on CPUs take up to 30 times as long as those for channels first.

    Forward and backward of 64 x 16 x 60 x 160 in bf16 (torch 2.13, 2 cores): 204 ms in channels_last, 6 in channels first.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalise feature maps [S, C, H, W]: the same dtype and memory format."""
        if images.device.type != "cpu" or images.is_contiguous():
            return super().forward(images)
        return super().forward(images.contiguous()).contiguous(memory_format=torch.channels_last)


def memory_format(device: torch.device, mixed_precision: str) -> torch.memory_format:
    """Return the memory format that is fast here: channels_last, but channels first where a CPU computes in float32.

    There torch's batch normalisation in channels_last rounds 10 to 50 times as coarsely (errors of 1e-6 to 5e-6, not 1e-7;
    torch 2.13), which makes cuts differ visibly, and group normalisation is slower. Images per second of steps in
    channels_last / in channels first (2 cores, AVX512-BF16), in float32 and bf16: normalised by groups, ResNet-50 0.85 and
    0.97, ResNet-18 0.94 and 1.01, captcha reader 1.04 and 1.26; by batches, ResNet-50 1.13 and 1.13, ResNet-18 1.11 and 1.16.
    """
    return torch.contiguous_format if device.type == "cpu" and mixed_precision == "no" else torch.channels_last


def memory_format_candidates(
    model: nn.Module, network: nn.Module, device: torch.device, mixed_precision: str
) -> dict[str, partial]:
    """List the memory formats, the one of `memory_format` first, as `SummedLosses.kernel_candidates`.

    The model passes images to its `network` in the format of its attribute `memory_format`.
    """
    formats = {"channels_last": torch.channels_last, "channels_first": torch.contiguous_format}
    first = memory_format(device, mixed_precision)
    return {
        name: partial(_use_memory_format, model, network, formats[name])
        for name in sorted(formats, key=lambda name: formats[name] != first)
    }


def _use_memory_format(model: nn.Module, network: nn.Module, memory_format: torch.memory_format) -> None:
    model.memory_format = memory_format
    lay_out(network, memory_format)


def lay_out(model: nn.Module, memory_format: torch.memory_format) -> nn.Module:
    """Put the model's filters in a memory format, and replace torch's group normalisation by `GroupNorm`; return the model.

    The model is changed in place; its state dict stays the same.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.GroupNorm:
                group_normalization = GroupNorm(child.num_groups, child.num_channels, child.eps)
                group_normalization.weight, group_normalization.bias = child.weight, child.bias
                setattr(module, name, group_normalization)
    return model.to(memory_format=memory_format)
