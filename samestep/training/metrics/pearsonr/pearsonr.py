"""Pearson's correlation, as a module of evaluate."""

import datasets
import evaluate
import numpy as np
from scipy.stats import pearsonr

FLOATS = {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
CITATION = (
    "Pearson (1895), Note on regression and inheritance in the case of two parents, "
    "Proceedings of the Royal Society of London 58, 240-242."
)


class Pearsonr(evaluate.Metric):
    """How near predictions and references lie to a straight line: 1.0 on a rising one, -1.0 on a falling one."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation=CITATION, features=datasets.Features(FLOATS))

    def _compute(self, predictions: list[float], references: list[float]) -> dict[str, float]:
        """r = sum_i (x_i - mean x) (y_i - mean y) / sqrt(sum_i (x_i - mean x)^2 sum_i (y_i - mean y)^2).

        0.0 where that is 0 / 0: all predictions are equal, or all references, or there are fewer than two samples. nan when
        one of them is nan.
        """
        if len(references) < 2 or any(np.min(values) == np.max(values) for values in (predictions, references)):
            return {"pearsonr": 0.0}
        return {"pearsonr": float(pearsonr(predictions, references).statistic)}
