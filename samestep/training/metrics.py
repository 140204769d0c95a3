"""Metrics of predictions: a table of functions that use scikit-learn and SciPy, and the metrics of Hugging Face evaluate.

A metric that is not in the table, a name on the hub or a path, is somebody's program: it runs only where the user says so.
scikit-learn and SciPy are imported when a metric needs them.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from samestep.errors import UsageError, nearest

IGNORED = -100
"""Reference that says: nothing is to be predicted at this place."""
MAX_EXPONENT = 700.0
"""Largest exponent that is taken; exp(710) is above the largest float."""


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the share of the samples whose predicted class is the true one.

    accuracy = sum_i [prediction_i = reference_i] / n, over the n samples i; 0.0 of none.

    Args:
        predictions, references: classes, int64 [samples].
    """
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions)) if references.size else 0.0


def f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the harmonic mean of precision and recall (Chinchor 1992, MUC-4 evaluation metrics).

    F1 = 2 TP / (2 TP + FP + FN) of a class, from its true positives, false positives and false negatives: of class 1, or the
    mean over the classes that occur in either, if one is above 1. 0.0 of a class, and of no samples, where that is 0 / 0.

    Args:
        predictions, references: classes, int64 [samples].
    """
    from sklearn.metrics import f1_score

    if not references.size:
        return 0.0
    if max(predictions.max(), references.max()) > 1:
        return float(f1_score(references, predictions, average="macro", zero_division=0.0))
    return float(f1_score(references == 1, predictions == 1, zero_division=0.0))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the correlation of predicted and true classes, which classes of unequal size do not inflate.

    MCC = (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)), of two classes (Matthews 1975, Biochimica et
    Biophysica Acta 405(2), 442-451). Of more classes k, with p_k samples predicted as k, t_k samples of k, c correct ones, and
    s in all:

        MCC = (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))

    0.0 where that is 0 / 0: a single class is predicted, or true, or there are no samples.

    Args:
        predictions, references: classes, int64 [samples].
    """
    from sklearn.metrics import matthews_corrcoef

    if len({*predictions.tolist(), *references.tolist()}) < 2:  # of which scikit-learn warns
        return 0.0
    return float(matthews_corrcoef(references, predictions))


def pearsonr(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return how near predictions and references lie to a straight line: 1.0 on a rising one, -1.0 on a falling one.

    r = sum_i (x_i - mean x) (y_i - mean y) / sqrt(sum_i (x_i - mean x)^2 sum_i (y_i - mean y)^2) (Pearson 1895, Proceedings of
    the Royal Society of London 58, 240-242). 0.0 where that is 0 / 0: all predictions are equal, or all references, or there
    are fewer than two samples. nan when one of them is nan.

    Args:
        predictions, references: float64 [samples].
    """
    from scipy import stats

    return 0.0 if _is_constant(predictions, references) else float(stats.pearsonr(predictions, references).statistic)


def spearmanr(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return how well predictions have the order of references: 1.0 for the same order, -1.0 for the reverse.

    rho = `pearsonr` of the ranks; equal values share the mean of their ranks (Spearman 1904, American Journal of Psychology
    15(1), 72-101). 0.0 and nan as of `pearsonr`.

    Args:
        predictions, references: float64 [samples].
    """
    from scipy import stats

    return 0.0 if _is_constant(predictions, references) else float(stats.spearmanr(predictions, references).statistic)


def masked_accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the share of the places to be predicted whose prediction is right; a reference of -100 is no such place.

    masked accuracy = sum_i [prediction_i = reference_i] / n, over the n places i with reference_i != -100; 0.0 of none.

    Args:
        predictions, references: classes, int64 [places].
    """
    is_counted = references != IGNORED
    return accuracy(predictions[is_counted], references[is_counted])


def perplexity(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return how many equally likely tokens a language model is as uncertain between.

    perplexity = exp(min(sum_i nll_i / sum_i n_i, 700)); nan when there are no tokens (Jelinek, Mercer, Bahl and Baker 1977,
    Journal of the Acoustical Society of America 62(S1), S63).

    Args:
        predictions: nll_i, the summed negative log-likelihood of a sample's or dataset's tokens, in nats, float64 [samples].
        references: n_i, the number of its tokens, int64 [samples].
    """
    num_tokens = int(references.sum())
    mean = math.fsum(predictions) / num_tokens if num_tokens else math.nan
    return math.exp(min(mean, MAX_EXPONENT))  # min in this order keeps a nan


def _is_constant(*samples: np.ndarray) -> bool:
    return any(len(values) < 2 or values.min() == values.max() for values in samples)


CLASSES, NUMBERS, LOSSES = (np.int64, np.int64), (np.float64, np.float64), (np.float64, np.int64)
METRICS: dict[str, tuple[Callable[..., float], tuple[type, type]]] = {
    "accuracy": (accuracy, CLASSES),
    "f1": (f1, CLASSES),
    "matthews_correlation": (matthews_correlation, CLASSES),
    "pearsonr": (pearsonr, NUMBERS),
    "spearmanr": (spearmanr, NUMBERS),
    "masked_accuracy": (masked_accuracy, CLASSES),
    "perplexity": (perplexity, LOSSES),
}
"""Metrics by their names, and the types of their predictions and references."""


def compute(names: Sequence[str], predictions: Any, references: Any, trust_code: bool = False) -> dict[str, float]:
    """Compute metrics over samples, each used once, in the order of the names; a name given twice counts once.

    Args:
        names: of `METRICS`; with `trust_code` names on the hub and paths as well.
        predictions, references: [samples]: lists, arrays or tensors on the host. Metrics of classes cut digits after the point
            off.
        trust_code: run the code of metrics that are not local.

    Returns:
        Value of each result. Results that are no single number, as some metrics of the hub return, are left out. Where a result
        of a metric of the hub is called like an earlier one, or like a local metric among the names, the metric's name is put
        before it.

    Raises:
        UsageError: as `load`.
        ValueError: not as many predictions as references.
    """
    modules, values = load(names, trust_code), {}
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions of {len(references)} references")
    for name in dict.fromkeys(names):
        if name in METRICS:
            metric, types = METRICS[name]
            values[name] = metric(*map(np.asarray, (predictions, references), types))
            continue
        for key, value in modules[name].compute(predictions=predictions, references=references).items():
            if isinstance(value, Real):
                is_duplicate = key in values or (key in METRICS and key in names)
                values[f"{name}_{key}" if is_duplicate else key] = float(value)
    return values


def load(names: Sequence[str], trust_code: bool = False) -> dict[str, Any]:
    """Load the metrics that are not local, as modules of Hugging Face evaluate, by their names.

    Raises:
        UsageError: names that are not local and not trusted, or that do not load.
    """
    external_names = [name for name in dict.fromkeys(names) if name not in METRICS]
    if not trust_code and external_names:
        raise UsageError(
            [
                f"metrics is {name!r}, which is not local ({nearest(name, METRICS)}) but code of a file or of the hub, which "
                "would run here. Name a local one, or, if you trust the code, set --trust_metric_code"
                for name in external_names
            ]
        )
    if not external_names:
        return {}
    from samestep.training import ways  # with torch, which local metrics do not need

    return ways.load_metrics(external_names)
