"""Read captchas: a CaptchaReader that returns sums over a micro-batch."""

from typing import Any, Self

import torch

from samestep.models import networks
from samestep.models.networks import CaptchaReader
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.run_settings import RunSettings
from samestep.recipe.tasks.captcha_recognition import CaptchaRecognition
from samestep.step import losses


class ReadingSums(SummedLosses):
    """Sums the losses of characters and, only to be logged, of strings."""

    def __init__(self, reader: CaptchaReader):
        super().__init__()
        self.reader, self.memory_format = reader, torch.contiguous_format

    @classmethod
    def from_recipe(cls, recipe: CaptchaRecognition, source: Any = None) -> Self:
        return cls(CaptchaReader(**recipe.architecture))

    @classmethod
    def example(cls, recipe: CaptchaRecognition, num_samples: int) -> dict[str, torch.Tensor | None]:
        pixels = torch.zeros(num_samples, recipe.num_channels, recipe.image_height, recipe.image_width)
        return {"pixel_values": pixels, "labels": torch.zeros(num_samples, recipe.num_characters, dtype=torch.int64)}

    def forward(self, pixel_values, labels) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the losses and, when evaluating, count correct predictions: [characters, strings]. See Captchas.collate."""
        logits = self.reader(pixel_values.to(self.reader.heads.weight.dtype, memory_format=self.memory_format))
        # -log p of a string is the sum of its characters': the second loss is the first, per string.
        loss_sum = losses.cross_entropy_sum(logits.flatten(0, 1), labels.flatten())
        is_right = logits.argmax(-1) == labels  # bool [images, characters]
        return torch.stack([loss_sum, loss_sum]), None if self.training else torch.stack(
            [is_right.sum(), is_right.all(1).sum()]
        )

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: RunSettings) -> dict:
        return networks.memory_format_candidates(self, self.reader, device, mixed_precision)
