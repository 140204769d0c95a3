"""Classify images: transformers' ResNet that returns the sum over a micro-batch."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from transformers import ResNetConfig, ResNetForImageClassification

from samestep.models import networks
from samestep.models.pretrained import initial_model
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.task_settings import DataSettings
from samestep.recipe.tasks.image_classification import ImageClassification
from samestep.step import losses


def build_model(recipe: ImageClassification, classes: Sequence[str]) -> ResNetForImageClassification:
    """Build the recipe's architecture, with random weights or those of `model_name_or_path`."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: place for place, name in enumerate(classes)}}
    if recipe.normalization == "group":
        model_class, config = GroupNormResNet, GroupNormResNetConfig(**recipe.architecture, **names)
    else:
        model_class, config = ResNetForImageClassification, ResNetConfig(**recipe.architecture, **names)
    return initial_model(model_class, config, recipe.model_name_or_path, head="classifier")


class ClassificationSums(SummedLosses):
    """Sums the cross-entropy of classes."""

    def __init__(self, resnet: ResNetForImageClassification, label_smoothing: float):
        super().__init__()
        self.resnet, self.memory_format, self.label_smoothing = resnet, torch.contiguous_format, label_smoothing

    @classmethod
    def from_recipe(cls, recipe: ImageClassification, source: Any = None) -> Self:
        numbers = [str(number) for number in range(recipe.num_labels)]
        return cls(build_model(recipe, numbers if source is None else source.classes), recipe.label_smoothing)

    @classmethod
    def example(cls, recipe: ImageClassification, num_samples: int) -> dict[str, torch.Tensor | None]:
        pixels = torch.zeros(num_samples, recipe.num_channels, recipe.image_height, recipe.image_width)
        return {"pixel_values": pixels, "labels": torch.zeros(num_samples, dtype=torch.int64)}

    def forward(self, pixel_values, labels) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum the loss and, when evaluating, count correct predictions, both [1]. See Images.collate."""
        logits = self.resnet(pixel_values.to(self.resnet.dtype, memory_format=self.memory_format)).logits
        loss_sum = losses.cross_entropy_sum(logits, labels, self.label_smoothing)
        return torch.stack([loss_sum]), None if self.training else losses.num_correct(logits, labels)[None]

    def kernel_candidates(self, device: torch.device, mixed_precision: str, settings: DataSettings) -> dict:
        return networks.memory_format_candidates(self, self.resnet, device, mixed_precision)

    def compile_layers(self) -> None:
        network = self.resnet.resnet
        for layer in (network.embedder, *(layer for stage in network.encoder.stages for layer in stage.layers)):
            layer.compile(dynamic=False)
