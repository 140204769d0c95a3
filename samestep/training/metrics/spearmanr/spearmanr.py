"""Spearman's rank correlation, as a module of evaluate."""

import datasets
import evaluate
import numpy as np
from scipy.stats import spearmanr

FLOATS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
CITATION = (
    "Spearman (1904), The proof and measurement of association between two things, "
    "American Journal of Psychology 15(1), 72-101."
)


class Spearmanr(evaluate.Metric):
    """How well the order of predictions is that of references: 1.0 for the same order, -1.0 for the reverse."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation=CITATION, features=datasets.Features(FLOATS))

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        """rho = Pearson's correlation of the ranks; equal values share the mean of their ranks.

        0.0 where that is 0 / 0: all predictions are equal, or all references, or there are fewer than two samples. nan when
        one of them is nan.
        """
        if len(references) < 2 or any(np.min(values) == np.max(values) for values in (predictions, references)):
            return {"spearmanr": 0.0}
        return {"spearmanr": float(spearmanr(predictions, references).statistic)}
