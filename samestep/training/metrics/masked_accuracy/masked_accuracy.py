"""Accuracy over the places that have a label, as a module of evaluate."""

import datasets
import evaluate
import numpy as np

INTEGERS = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
IGNORED = -100  # reference of a place where nothing is to be predicted


class MaskedAccuracy(evaluate.Metric):
    """Share of the places to be predicted whose prediction is right; a reference of -100 is no such place."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=datasets.Features(INTEGERS))

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        """masked accuracy = sum_i [prediction_i = reference_i] / n, over the n places i with reference_i != -100.

        0.0 when there are none.
        """
        found, wanted = np.asarray(predictions), np.asarray(references)
        counted = wanted != IGNORED
        right = (found == wanted)[counted]
        return {"masked_accuracy": float(right.mean()) if right.size else 0.0}
