"""Reads what a run left into arrays: its steps, evaluations and layers, of an output folder, or of transformers' Trainer.

Needs no torch. A step whose number is missing, or is not finite, has NaN.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from samestep.errors import UsageError
from samestep.recipe import batch_size
from samestep.recipe.reading import format_name, read_json
from samestep.recipe.run_fields import is_finite
from samestep.recipe.run_files import read_lines, read_plain

TRAINER_FILE = "trainer_state.json"
LAYER_FIELDS = ("grad_norm", "weight_norm", "update_ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """The numbers of a run.

    Attributes:
        steps: numbers of the steps, int64 [steps], in order.
        columns: name -> float64 [steps]: loss, learning_rate, grad_norm, epoch, samples.
        eval_steps: steps after which the model was evaluated, int64 [evaluations].
        eval_losses: float64 [evaluations].
        layer_names: names of the layers that were measured; none where they were not.
        layer_steps: steps in which they were, int64 [measurements].
        layers: one of `LAYER_FIELDS` -> float64 [measurements, layers].
        facts: fields of the recipe; empty where there is none.
        noise: the gradient noise scale, in samples, where it was measured.
        results: of a finished run, as in all_results.json; empty where there are none.
    """

    steps: np.ndarray
    columns: dict[str, np.ndarray]
    eval_steps: np.ndarray
    eval_losses: np.ndarray
    layer_names: tuple[str, ...] = ()
    layer_steps: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    layers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    noise: batch_size.Estimate | None = None
    results: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> np.ndarray:
        return self.columns["loss"]


def make_history(
    lines: Sequence[Mapping[str, Any]],
    layers: Sequence[Mapping[str, Any]] = (),
    facts: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
) -> History:
    """Make the history of lines as metrics.jsonl has them, steps and evaluations mixed, and of lines of layers.jsonl.

    >>> history = make_history([{"step": 1, "loss": 2.0}, {"step": 1, "eval_loss": 2.5}, {"step": 2, "loss": None}])
    >>> history.steps.tolist(), history.loss.tolist(), history.eval_losses.tolist()
    ([1, 2], [2.0, nan], [2.5])
    """
    by_step = {
        line["step"]: line for line in lines if "loss" in line
    }  # a step that came twice counts as it was at last
    ordered = [by_step[step] for step in sorted(by_step)]
    names = ("loss", "learning_rate", "grad_norm", "epoch", "samples")
    columns = {name: np.array([_to_float(line.get(name)) for line in ordered]) for name in names}
    evaluations = {line["step"]: _to_float(line["eval_loss"]) for line in lines if "eval_loss" in line}
    measurements = batch_size.read_measurements(ordered)
    layer_names = tuple(layers[-1]["layers"]) if layers else ()
    layers = [line for line in layers if all(name in line["layers"] for name in layer_names)]
    tables = {
        field: np.array([[line["layers"][name][field] for name in layer_names] for line in layers], float)
        for field in LAYER_FIELDS
    }
    return History(
        steps=np.array(sorted(by_step), np.int64),
        columns=columns,
        eval_steps=np.array(sorted(evaluations), np.int64),
        eval_losses=np.array([evaluations[step] for step in sorted(evaluations)]),
        layer_names=layer_names,
        layer_steps=np.array([line["step"] for line in layers], np.int64),
        layers=tables if layers else {},
        facts=facts or {},
        results=results or {},
        noise=batch_size.estimate(measurements) if len(measurements) >= batch_size.MIN_MEASUREMENTS else None,
    )


def _to_float(value: Any) -> float:
    return float(value) if is_finite(value) else math.nan


def read_history(name: str) -> History:
    """Read the history of a run.

    Args:
        name: output folder of a run; or of Trainer, one of its checkpoints, or a trainer_state.json.

    Raises:
        UsageError: there is neither, or it breaks a rule.
    """
    path = Path(name)
    if (path / "metrics.jsonl").is_file():
        recipe, file = path / "recipe.yaml", path / "all_results.json"
        facts = read_plain(recipe) if recipe.is_file() else {}
        results = read_json(file, format_name(file)) if file.is_file() else {}
        lines, layers = (list(read_lines(path / f"{name}.jsonl")) for name in ("metrics", "layers"))
        return make_history(lines, layers, facts, results)
    state = _find_trainer_state(path)
    if state is None:
        raise UsageError(
            f"{format_name(name)} holds no metrics.jsonl and no {TRAINER_FILE}: give the output folder of a run, or of Trainer"
        )
    return read_trainer_state(state)


def _find_trainer_state(path: Path) -> Path | None:
    """Find the trainer_state.json of a folder, or of its last checkpoint."""
    if path.is_file() and path.suffix == ".json":
        return path
    places = [path / TRAINER_FILE, *sorted(path.glob(f"checkpoint-*/{TRAINER_FILE}"), key=_find_number, reverse=True)]
    return next((place for place in places if place.is_file()), None)


def _find_number(path: Path) -> int:
    number = path.parent.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and len(number) < 16 else -1


def read_trainer_state(path: Path) -> History:
    """Read the log_history of transformers' Trainer.

    Raises:
        UsageError: it has none, or a line of it breaks a rule.
    """
    state = read_json(path, format_name(path))
    lines = state.get("log_history")
    if not isinstance(lines, list) or not all(isinstance(line, dict) for line in lines):
        raise UsageError(
            f"{format_name(path)}: log_history must be a list of objects: give a {TRAINER_FILE} of Trainer"
        )
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int or not 0 <= line["step"] < 2**53:
            remedy = "mend the file"
            raise UsageError(
                f"{format_name(path)}, log_history, line {number}: step must be a whole number from 0 to 2^53 - 1: {remedy}"
            )
    return make_history(lines)
