"""Accuracy, as a module of evaluate."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score

INTEGERS = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}


class Accuracy(evaluate.Metric):
    """Share of the samples whose predicted class is the true one."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=datasets.Features(INTEGERS))

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        """accuracy = sum_i [prediction_i = reference_i] / n, over the n samples i; 0.0 of none."""
        return {"accuracy": float(accuracy_score(references, predictions)) if references else 0.0}
