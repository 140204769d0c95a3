"""scikit-learn's handwritten digits."""

from typing import TYPE_CHECKING

import numpy as np

from samestep.data.arrow import hash_parts
from samestep.data.images import Store
from samestep.recipe.extras import optional

if TYPE_CHECKING:
    from PIL import Image
else:
    Image = optional("PIL.Image")


class Digits(Store):
    """1,797 handwritten digits of scikit-learn, 8 x 8; grey levels 0 to 16 become 0 to 255."""

    description = "builtin/digits"
    is_encoded = False

    def __init__(self):
        from sklearn.datasets import load_digits  # here: it takes a second, and nothing else needs it

        digits = load_digits()
        self.images = np.round(digits.images * (255 / 16)).astype(np.uint8)
        self.labels = digits.target.astype(np.int64)
        self.classes = [str(name) for name in digits.target_names]

    def open(self, row: int) -> Image.Image:
        return Image.fromarray(self.images[row])

    def digest(self, rows: np.ndarray) -> str:
        return hash_parts(self.images[rows].tobytes(), self.labels[rows].tobytes())
