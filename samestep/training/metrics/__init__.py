"""Metrics as modules of Hugging Face evaluate that need no network: one folder each, `evaluate.load(FOLDER)` loads it.

A metric that is not among them, a name on the hub or a path, is somebody's program: it runs only where the user says so.
evaluate is imported when a metric is loaded.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from samestep.errors import UsageError, nearest
from samestep.extras import require

if TYPE_CHECKING:
    import evaluate

LOCAL = ("accuracy", "f1", "matthews_correlation", "pearsonr", "spearmanr", "masked_accuracy", "perplexity")
FOLDER = Path(__file__).parent


def load(names: Sequence[str], trust_code: bool = False) -> "evaluate.CombinedEvaluations":
    """The metrics of these names, as one module of evaluate; a name given twice counts once.

    They keep their samples in memory, so that runs at the same time have no file in common.

    Args:
        names: of local metrics; with `trust_code` names on the hub and paths as well.
        trust_code: run the code of metrics that are not local.

    Raises:
        UsageError: names that are not local and not trusted, or that do not load; packages that are not installed.
    """
    problems = [
        f"metrics is {name!r}, which is not local ({nearest(name, LOCAL)}) but code of a file or of the hub, which would run "
        "here: name a local one, or, if you trust the code, set --trust_metric_code"
        for name in dict.fromkeys(names)
        if name not in LOCAL and not trust_code
    ]
    if problems:
        raise UsageError(problems)
    require("text", "a metric")
    import evaluate

    modules = []
    for name in dict.fromkeys(names):
        try:
            modules.append(_load_local(name) if name in LOCAL else _load_other(name))
        except Exception as error:  # of any kind: a module of the hub is somebody's program
            if name in LOCAL:
                raise
            problems.append(
                f"metrics is {name!r}, which is not local ({nearest(name, LOCAL)}). Metrics of the hub need the network, "
                f"and this one did not load: {type(error).__name__}: {' '.join(str(error).split())}"
            )
    if problems:
        raise UsageError(problems)
    return evaluate.combine(modules)


def compute(names: Sequence[str], predictions: Any, references: Any, trust_code: bool = False) -> dict[str, float]:
    """Metrics over samples, each used once, in the order of the names.

    Args:
        names, trust_code: see `load`.
        predictions, references: [samples]: lists, arrays or tensors on the host.

    Returns:
        Value of each result. What is no single number, as some metrics of the hub return, is left out.
    """
    found = load(names, trust_code).compute(predictions=predictions, references=references)
    return {key: float(value) for key, value in found.items() if isinstance(value, Real)}


def _load_local(name: str) -> "evaluate.EvaluationModule":
    import evaluate

    with TemporaryDirectory(prefix="metrics-") as folder:  # which evaluate makes folders in, and then leaves empty
        return evaluate.load(str(FOLDER / name), keep_in_memory=True, cache_dir=folder)


def _load_other(name: str) -> "evaluate.EvaluationModule":
    import evaluate

    with _offline_and_quiet():
        return evaluate.load(name, module_type="metric", keep_in_memory=True)


@contextmanager
def _offline_and_quiet() -> Iterator[None]:
    """evaluate stays off the network when huggingface_hub is offline, which it does not do by itself, and draws no bars."""
    import evaluate
    from huggingface_hub import is_offline_mode

    offline, drew_bars = evaluate.config.HF_EVALUATE_OFFLINE, evaluate.is_progress_bar_enabled()
    evaluate.config.HF_EVALUATE_OFFLINE = offline or is_offline_mode()
    evaluate.disable_progress_bar()
    try:
        yield
    finally:
        evaluate.config.HF_EVALUATE_OFFLINE = offline
        if drew_bars:
            evaluate.enable_progress_bar()
