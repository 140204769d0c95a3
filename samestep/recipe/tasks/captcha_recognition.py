"""Recipes that train a reader of captchas."""

import dataclasses
from typing import Any

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import Rule, rows
from samestep.recipe.settings import POSITIVE, WIDTH, limit, setting
from samestep.recipe.tasks.images import STAGES, ImageRecipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptchaRecognition(ImageRecipe):
    """Reading the characters of a captcha: convolutions, each halving height and width, and one head per character."""

    num_validation_samples: int = setting("held-out images, drawn beside the training data", POSITIVE, decides=False)
    alphabet: str = setting("the characters that may occur")
    num_characters: int = setting("characters of an image", limit(1000))
    conv_channels: tuple[int, ...] = setting("channels of each convolution", STAGES)
    hidden_size: int = setting("width of the layer between the convolutions and the heads", WIDTH)

    rules = rows(
        Rule(
            lambda f: min(f.conv_channels, default=0) < 1,
            "conv_channels {f.conv_channels} must be positive numbers, at least one",
        ),
        Rule(
            lambda f: (
                min(f.conv_channels, default=0) > 0
                and min(f.image_height, f.image_width) < 2 ** len(f.conv_channels)
                and len(f.conv_channels)
            ),
            "image_height {f.image_height} and image_width {f.image_width} cannot be halved by each of {found} conv_channels",
            "give fewer, or larger images",
        ),
        Rule(
            lambda f: len(set(f.alphabet)) != len(f.alphabet) or not f.alphabet,
            "alphabet {f.alphabet!r} must hold each character once, and at least one",
        ),
        Rule(
            lambda f: f.num_channels != 3,
            "num_channels is {f.num_channels}, but captchas are drawn in red, green and blue",
            "set it to 3",
        ),
        Rule(
            lambda f: f.normalization == "frozen",
            "normalization is frozen, but no trained statistics exist for captchas",
            "set it to group or batch",
        ),
    )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term: a whole string's loss is the sum of its characters', and only logged."""
        return {"character": 1.0, "string": 0.0}

    @property
    def small_shape(self) -> dict[str, Any]:
        channels = tuple(min(8, channels) for channels in self.conv_channels)
        return {"conv_channels": channels, "hidden_size": min(32, self.hidden_size)}

    @property
    def architecture(self) -> dict[str, Any]:
        """The model's shape, as `networks.CaptchaReader` takes it."""
        names = (
            "image_height",
            "image_width",
            "num_channels",
            "alphabet",
            "num_characters",
            "hidden_size",
            "normalization",
        )
        return {name: getattr(self, name) for name in names} | {"conv_channels": list(self.conv_channels)}


register(
    "captcha_recognition",
    CaptchaRecognition,
    Parts(
        data="samestep.data.captchas:build",
        model="samestep.models.captcha_recognition:ReadingSums",
        shape="stepplan.memory:captcha_recognition",
        script="train_captcha.py",
    ),
)
