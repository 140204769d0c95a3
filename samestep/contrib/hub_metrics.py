"""Metrics of Hugging Face evaluate, from the hub or from files, for whom --trust_metric_code lets their programs run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from samestep.errors import UsageError, nearest
from samestep.training.metrics import METRICS


def load_metrics(names: Sequence[str]) -> dict[str, Any]:
    """Load metrics by their names on the hub or their paths.

    The modules keep their samples in memory, so that runs at the same time have no file in common.

    Raises:
        UsageError: a line for each that does not load.
    """
    import evaluate

    modules, problems = {}, []
    for name in names:
        try:
            with _offline_and_quiet():
                modules[name] = evaluate.load(name, module_type="metric", keep_in_memory=True)
        except Exception as error:  # of any kind: a module of the hub is somebody's program
            problems.append(
                f"metrics is {name!r}, which is not local ({nearest(name, METRICS)}). Metrics of the hub need the network, "
                f"and this one did not load: {type(error).__name__}: {' '.join(str(error).split())}"
            )
    if problems:
        raise UsageError(problems)
    return modules


@contextmanager
def _offline_and_quiet() -> Iterator[None]:
    """Keep evaluate off the network when huggingface_hub is offline, which it ignores by itself, and from drawing bars."""
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
