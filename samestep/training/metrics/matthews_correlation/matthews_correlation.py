"""Matthews correlation, as a module of evaluate."""

import datasets
import evaluate
from sklearn.metrics import matthews_corrcoef

INTEGERS = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
CITATION = (
    "Matthews (1975), Comparison of the predicted and observed secondary structure of T4 phage lysozyme, "
    "Biochimica et Biophysica Acta 405(2), 442-451."
)


class MatthewsCorrelation(evaluate.Metric):
    """Correlation of predicted and true classes, which classes of unequal size do not inflate."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation=CITATION, features=datasets.Features(INTEGERS))

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        """MCC = (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)), of two classes.

        Of more classes k, with p_k samples predicted as k, t_k samples of k, c correct ones, and s in all:

            MCC = (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))

        0.0 where that is 0 / 0: a single class is predicted, or true, or there are no samples.
        """
        if len({*predictions, *references}) < 2:  # of which scikit-learn warns
            return {"matthews_correlation": 0.0}
        return {"matthews_correlation": float(matthews_corrcoef(references, predictions))}
