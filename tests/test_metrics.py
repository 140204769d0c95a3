"""Metrics: their values, several at once, those of the hub and of files beside them, no network."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import requests
import scipy.stats
import sklearn.metrics
import torch

from samestep.errors import UsageError
from samestep.training import metrics

RNG = np.random.default_rng(0)
CLASSES = RNG.integers(0, 4, (2, 200))  # predictions, references
TWO = (CLASSES > 1).astype(int)
FLOATS = RNG.normal(size=(2, 50)).round(1) + np.linspace(0, 3, 50).round(1)
EMPTY = np.zeros((2, 0), int)
ALL_IGNORED = -100 * np.ones(2, int)


def value(name: str, predictions, references) -> float:
    """Compute a metric, which may not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = metrics.compute([name], predictions, references)
    assert list(values) == [name]
    assert type(values[name]) is float
    return values[name]


def f1(average):
    return lambda a, b: sklearn.metrics.f1_score(b, a, average=average)


@pytest.mark.parametrize(
    ("name", "samples", "expected"),
    [
        ("accuracy", CLASSES, lambda a, b: (a == b).mean()),
        ("f1", TWO, f1("binary")),
        ("f1", CLASSES, f1("macro")),
        ("matthews_correlation", TWO, lambda a, b: np.corrcoef(a, b)[0, 1]),
        ("matthews_correlation", CLASSES, lambda a, b: sklearn.metrics.matthews_corrcoef(b, a)),
        ("pearsonr", FLOATS, lambda a, b: np.corrcoef(a, b)[0, 1]),
        ("spearmanr", FLOATS, lambda a, b: np.corrcoef(*map(scipy.stats.rankdata, (a, b)))[0, 1]),
        ("masked_accuracy", CLASSES, lambda a, b: (a == b).mean()),
        ("perplexity", (abs(FLOATS[0]), CLASSES[1, :50]), lambda sums, n: np.exp(sums.sum() / n.sum())),
    ],
)
def test_values(name, samples, expected):
    actual = value(name, *samples)
    assert actual == pytest.approx(expected(*samples), rel=1e-12)
    assert abs(actual - 1) > 0.01  # no trivial example


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        ("accuracy", [1], [1], 1.0),
        ("accuracy", *EMPTY, 0.0),
        ("f1", [1, 1, 0, 0], [1, 0, 1, 1], 2 / 5),  # 1 true positive, 1 false positive, 2 false negatives
        ("f1", [1, 2, 0], [1, 0, 0], (1 + 2 / 3 + 0) / 3),  # class 2 occurs in the predictions alone
        ("f1", [0, 2, 2], [0, 2, 0], (2 / 3 + 2 / 3) / 2),  # there is no class 1, which would count as 0
        ("f1", [0, 0], [0, 0], 0.0),
        ("f1", [1, 1], [1, 1], 1.0),
        ("f1", [-1, 1], [-1, -1], 0.0),
        ("f1", *EMPTY, 0.0),
        ("matthews_correlation", [1, 0, 1], [0, 1, 0], -1.0),
        ("matthews_correlation", [1, 1, 1], [0, 1, 0], 0.0),
        ("matthews_correlation", [2, 1, 1], [3, 3, 3], 0.0),
        ("matthews_correlation", [1, 1], [1, 1], 0.0),
        ("matthews_correlation", *EMPTY, 0.0),
        ("pearsonr", [1.5, 2.5, 3.5], [30.0, 20.0, 10.0], -1.0),
        ("pearsonr", [0.5, 0.5, 0.5], [1.0, 2.0, 3.0], 0.0),
        ("pearsonr", [1.0, 2.0, 3.0], [0.5, 0.5, 0.5], 0.0),
        ("pearsonr", [1.0], [2.0], 0.0),
        ("pearsonr", *EMPTY, 0.0),
        ("pearsonr", [math.nan] * 3, [1.0, 2.0, 3.0], math.nan),
        ("pearsonr", [1.0, math.nan, 1.0], [1.0, 2.0, 3.0], math.nan),
        ("spearmanr", [1.0, 2.0, 300.0], [0.1, 0.2, 0.3], 1.0),
        ("spearmanr", [1.0, 1.0, 2.0], [1.0, 2.0, 3.0], math.sqrt(3) / 2),  # ranks 1.5, 1.5, 3
        ("spearmanr", [0.1, 0.1], [1.0, 2.0], 0.0),
        ("spearmanr", [1.0, 2.0], [0.1, 0.1], 0.0),
        ("spearmanr", *EMPTY, 0.0),
        ("spearmanr", [1.0, math.nan, 1.0], [1.0, 2.0, 3.0], math.nan),
        ("masked_accuracy", [1, -100, 2, 3, 0], [1, -100, 2, 4, -100], 2 / 3),
        ("masked_accuracy", ALL_IGNORED, ALL_IGNORED, 0.0),
        ("masked_accuracy", *EMPTY, 0.0),
        ("perplexity", [3 * math.log(5), 0.0], [2, 1], 5.0),  # not the mean of the samples' perplexities
        ("perplexity", [701.0], [1], math.exp(700)),
        ("perplexity", [math.inf], [1], math.exp(700)),
        ("perplexity", [math.nan], [1], math.nan),
        ("perplexity", [0.0], [0], math.nan),
        ("perplexity", *EMPTY, math.nan),
    ],
)
def test_by_hand_and_edges(name, predictions, references, expected):
    assert value(name, predictions, references) == pytest.approx(expected, rel=1e-12, nan_ok=True)


def test_floats_are_not_rounded():
    """1 + 1e-9 is 1 in float32."""
    for name in ("pearsonr", "spearmanr"):
        assert value(name, [1.0, 1 + 1e-9], [1.0, 2.0]) == pytest.approx(1.0)
        assert value(name, [1.0, 2.0], [1.0, 1 + 1e-9]) == pytest.approx(1.0)
    assert value("perplexity", [1 + 1e-9], [1]) > value("perplexity", [1.0], [1])


@pytest.mark.parametrize("kind", [list, np.asarray, torch.tensor], ids=["list", "array", "tensor"])
def test_several_at_once_in_the_order_of_their_names(kind):
    names = ["masked_accuracy", "f1", "accuracy", "f1"]
    values = metrics.compute(names, kind([1, 0, 1, 3]), kind([1, 0, 0, -100]))
    assert list(values) == ["masked_accuracy", "f1", "accuracy"]
    assert values == pytest.approx({"masked_accuracy": 2 / 3, "f1": (2 / 3 + 2 / 3) / 4, "accuracy": 1 / 2})
    assert {type(number) for number in values.values()} == {float}


def test_all_are_described():
    for name, (metric, _) in metrics.METRICS.items():
        assert metric.__name__ == name
        assert "=" in metric.__doc__


@pytest.mark.parametrize("name", metrics.METRICS)
def test_numbers_of_samples_differ(name):
    with pytest.raises(ValueError, match="2 predictions of 1 references"):
        metrics.compute([name], [1, 0], [1])


SHARE = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(features))

    def _compute(self, predictions, references):
        return {"each": [1.0], "share": sum(map(int.__eq__, predictions, references)) / len(references), "f1": 7}
"""


def test_a_metric_by_its_path_beside_local_ones(tmp_path):
    """What is no number is left out; a name that a local metric has is not taken from it."""
    folder = tmp_path / "share"
    folder.mkdir()
    (folder / "share.py").write_text(SHARE)
    samples = [[1, 0], [1, 1]]
    assert metrics.compute([str(folder)], *samples, trust_code=True) == {"share": 0.5, "f1": 7.0}
    expected = {"f1": pytest.approx(2 / 3), "share": 0.5, f"{folder}_f1": 7.0}
    assert metrics.compute(["f1", str(folder)], *samples, trust_code=True) == expected
    assert metrics.compute([str(folder), "f1"], *samples, trust_code=True) == expected
    with pytest.raises(UsageError, match="set --trust_metric_code"):
        metrics.compute(["f1", str(folder)], *samples)


@pytest.fixture
def requested_urls(monkeypatch) -> list[str]:
    """Record the requested addresses; there is no network."""
    urls = []

    def request(method, url, **settings):
        urls.append(url)
        raise requests.ConnectionError("no network")

    monkeypatch.setattr(requests, "request", request)
    return urls


@pytest.mark.rooms
def test_unknown_names_offline(requested_urls):
    import evaluate

    with pytest.raises(UsageError) as caught:
        metrics.compute(["acuracy", "accuracy", "zzz/zzz", ""], [1], [1], trust_code=True)
    assert requested_urls == []
    assert not evaluate.config.HF_EVALUATE_OFFLINE
    assert evaluate.is_progress_bar_enabled()
    first, second, _ = caught.value.problems
    assert first.startswith("metrics is 'acuracy', which is not local (did you mean accuracy or masked_accuracy?). ")
    assert f"which is not local (valid names: {', '.join(sorted(metrics.METRICS))}). " in second
    for problem in caught.value.problems:
        assert "Metrics of the hub need the network" in problem
        assert "\n" not in problem


def test_other_names_are_asked_for_where_there_is_a_network(requested_urls, monkeypatch):
    monkeypatch.setattr("huggingface_hub.is_offline_mode", lambda: False)
    with pytest.raises(UsageError, match="metrics is 'zzz'"):
        metrics.load(["zzz"], trust_code=True)
    assert {url.split("/resolve/")[0].split("/spaces/")[1] for url in requested_urls if "/spaces/" in url} == {
        "evaluate-metric/zzz"
    }


def test_nothing_is_imported_before_it_is_needed():
    """evaluate and datasets for no local metric at all."""
    heavy = {"evaluate", "datasets", "sklearn", "scipy", "torch"}
    code = f"""
import sys, samestep.training.metrics as metrics
print({heavy} & set(sys.modules))
metrics.compute(metrics.METRICS, [0, 1, 1], [1, 0, 1])
print(sorted({heavy} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("set()\n['scipy', 'sklearn']\n", "")
