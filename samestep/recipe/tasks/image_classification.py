"""Recipes that train a ResNet to classify images."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import Rule, each, rows
from samestep.recipe.settings import FRACTION, VOCABULARY, WIDTH, choice, setting
from samestep.recipe.tasks.images import STAGES, ImageRecipe

BLOCKS = ("must be up to 64 numbers up to 1,000", lambda values: len(values) <= 64 and max(values, default=1) <= 1000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageClassification(ImageRecipe):
    """Image classification by a ResNet."""

    # Data
    train_dir: str | None = setting(
        "training images: CLASS/NAME.jpg, png, bmp or webp; or CIFAR-10's data_batch_1.bin to 5", decides=False
    )
    validation_dir: str | None = setting("held-out images, as train_dir; null: validation_fraction", decides=False)
    dataset_name: str | None = setting("builtin/digits, or a dataset of the hub", decides=False)
    dataset_config_name: str | None = setting("configuration of the hub dataset", decides=False)
    validation_fraction: float = setting(
        "fraction of the images held out, drawn by the seed; not used with validation_dir or a validation split of the hub",
        FRACTION,
    )
    image_mean: tuple[float, ...] = setting("subtracted from each channel, whose values lie in [0, 1]")
    image_std: tuple[float, ...] = setting("each channel is divided by it, after that")
    augmentation: str = setting(
        "of training images, drawn anew in every epoch. none; shift: by up to 1/8, zeros move in. "
        "shift_flip: half of them mirrored, too. imagenet: random crop and flip, of held-out images 7/8 of the short side",
        choice("none", "shift", "shift_flip", "imagenet"),
    )

    # Loss
    label_smoothing: float = setting("share of the target that all classes divide between them", FRACTION)

    # Model
    model_name_or_path: str | None = setting(
        "weights to start from, but for a head of another num_labels; null: random", decides=False
    )
    num_labels: int = setting("classes", VOCABULARY)
    layer_type: str = setting(
        "basic (two 3x3 convolutions) or bottleneck (1x1, 3x3, 1x1)", choice("basic", "bottleneck")
    )
    embedding_size: int = setting("channels of the first convolution", WIDTH)
    hidden_sizes: tuple[int, ...] = setting("channels that each stage ends with", STAGES)
    depths: tuple[int, ...] = setting("blocks of each stage", BLOCKS)

    rules = rows(
        Rule(
            lambda f: f.validation_dir is not None and f.train_dir is None,
            "validation_dir is {f.validation_dir}, but train_dir is not set",
            "set both or neither",
        ),
        Rule(
            lambda f: f.num_channels not in (1, 3),
            "num_channels is {f.num_channels}, must be 1 (grey) or 3 (red, green, blue)",
        ),
        *each(
            ("image_mean", "image_std"),
            lambda name: Rule(
                lambda f: len(f[name]) != f.num_channels,
                f"{name} {{f[{name}]}} must hold one number for each of num_channels {{f.num_channels}}",
                "photographs have --image_mean 0.485 0.456 0.406 --image_std 0.229 0.224 0.225, grey ones 0.45 and 0.23",
            ),
        ),
        Rule(lambda f: min(f.image_std, default=1) <= 0, "image_std {f.image_std} must be positive numbers"),
        Rule(
            lambda f: len(f.hidden_sizes) != len(f.depths) or min([*f.hidden_sizes, *f.depths, 1]) < 1,
            "hidden_sizes {f.hidden_sizes} and depths {f.depths} must be positive, one each per stage",
        ),
        Rule(
            lambda f: f.layer_type == "bottleneck" and any(size % 4 for size in f.hidden_sizes),
            "hidden_sizes {f.hidden_sizes} must be multiples of 4 with layer_type bottleneck",
        ),
        Rule(
            lambda f: f.normalization == "frozen" and f.model_name_or_path is None,
            "normalization is frozen, but model_name_or_path, whose statistics it takes, is not set",
        ),
    )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of the only loss term."""
        return {"class": 1.0}

    def find_fields_of_data(self, typed: Mapping[str, Any]) -> dict[str, Any]:
        """Count the class folders and their files; a folder without class folders says nothing."""
        if not isinstance(typed.get("train_dir"), str):
            return {}
        folder = Path(typed["train_dir"]).expanduser()
        try:
            classes = [entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")]
            num_files = sum(not file.name.startswith(".") for entry in classes for file in entry.iterdir())
        except OSError:  # said where the images are read
            return {}
        num_held_out = 0 if self.validation_dir else round(num_files * self.validation_fraction)
        found = {"num_labels": len(classes), "num_train_samples": num_files - num_held_out}
        return {name: value for name, value in found.items() if name not in typed and value > 0}

    @property
    def small_shape(self) -> dict[str, Any]:
        shape = {"embedding_size": min(16, self.embedding_size), "depths": (1,) * len(self.depths)}
        shape |= {"hidden_sizes": tuple(min(32, size) for size in self.hidden_sizes), "model_name_or_path": None}
        return shape | ({"normalization": "group"} if self.normalization == "frozen" else {})

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `transformers.ResNetConfig` takes it; `normalization` comes on top."""
        names = ("num_channels", "num_labels", "layer_type", "embedding_size")
        lists = {"hidden_sizes": list(self.hidden_sizes), "depths": list(self.depths)}
        return {name: getattr(self, name) for name in names} | lists


register(
    "image_classification",
    ImageClassification,
    Parts(
        settings="samestep.recipe.task_settings:DataSettings",
        data="samestep.data.images:build",
        model="samestep.models.image_classification:ClassificationSums",
        shape="stepplan.memory:image_classification",
        script="train_image_classifier.py",
        pipeline_tag="image-classification",
    ),
)
