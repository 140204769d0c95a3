"""F1, as a module of evaluate."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import f1_score

INTEGERS = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
CITATION = (
    "Chinchor (1992), MUC-4 evaluation metrics, Proceedings of the Fourth Message Understanding Conference, 22-29."
)


class F1(evaluate.Metric):
    """Harmonic mean of precision and recall."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation=CITATION, features=datasets.Features(INTEGERS))

    def _compute(self, predictions: list[int], references: list[int], average: str | None = None) -> dict[str, float]:
        """F1 = 2 TP / (2 TP + FP + FN) of a class, from its true positives, false positives and false negatives.

        0.0 of a class, and of no samples, where that is 0 / 0.

        Args:
            predictions, references: classes.
            average: "binary": F1 of class 1. "macro": mean over the classes that occur in either. Others: scikit-learn's.
                None: binary when no class above 1 occurs in either, else macro.
        """
        found, wanted = np.asarray(predictions), np.asarray(references)
        if not wanted.size:
            return {"f1": 0.0}
        if average is None:
            average = "macro" if max(found.max(), wanted.max()) > 1 else "binary"
        if average == "binary":
            found, wanted = found == 1, wanted == 1
        return {"f1": float(f1_score(wanted, found, average=average, zero_division=0.0))}
