"""The fields that recipes of images share."""

import dataclasses
from typing import ClassVar

from samestep.recipe.recipe import Recipe
from samestep.recipe.rules import Rule, belongs_to, rows
from samestep.recipe.settings import FRACTION, PIXELS, POSITIVE, choice, setting

STAGES = (
    "must be up to 64 numbers up to 131,072",
    lambda values: len(values) <= 64 and max(values, default=1) <= 2**17,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageRecipe(Recipe):
    """The fields that recipes of images share: SGD beside AdamW, the size of an image, the normalisation."""

    unit: ClassVar[str] = "image"
    extra: ClassVar[str | None] = "images"

    # Optimizer
    optimizer: str = setting("sgd (with momentum) or adamw", choice("sgd", "adamw"))
    sgd_momentum: float | None = setting("decay of SGD's momentum per step; null with adamw", FRACTION)
    # Wider than those of `Recipe`, which mypy refuses
    adam_beta1: float | None = setting(  # type: ignore[assignment]
        "decay of the first moment per step; null with sgd", FRACTION
    )
    adam_beta2: float | None = setting(  # type: ignore[assignment]
        "decay of the second moment per step; null with sgd", FRACTION
    )
    adam_epsilon: float | None = setting(  # type: ignore[assignment]
        "added to the root of the second moment; null with sgd", POSITIVE
    )

    # Data
    num_train_samples: int = setting("images of the training data", POSITIVE)
    image_height: int = setting("pixels", PIXELS)
    image_width: int = setting("pixels", PIXELS)
    num_channels: int = setting("colours of a pixel", PIXELS)

    # Model
    normalization: str = setting(
        "group; batch: its statistics depend on how the step is cut, so the cut is not exact; frozen: batch with the "
        "statistics of model_name_or_path",
        choice("batch", "group", "frozen"),
    )
    exact_batch_norm: bool = setting(
        "batch normalisation by statistics of the whole step, however it is cut: exact, and 9 times slower and more"
    )

    rules = rows(
        *belongs_to("sgd", "sgd_momentum"),
        *belongs_to("adamw", "adam_beta1", "adam_beta2", "adam_epsilon"),
        Rule(
            lambda f: f.exact_batch_norm and f.normalization != "batch",
            "exact_batch_norm is true, but normalization is {f.normalization}, which is exact",
            "set it to false",
        ),
    )
