"""What a training loop did in its first optimizer steps, as numbers: written by one program, compared by another."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass
class MicroStep:
    """One backward.

    Attributes:
        gradient: float64 [numbers of the sketch], of what `.grad` holds after it (on this process, reduced or not).
        part: float64 [numbers of the sketch], what it adds on this process, before processes are reduced; None if unknown.
        is_fresh: `.grad` was empty or zero before it.
        is_touched: something else than a backward changed `.grad` since the backward before it.
        is_synchronised: DistributedDataParallel reduced the gradient in it.
        is_hooked: hooks of the program changed the gradient on its way into `.grad`.
        loss: what the backward started from; None if that was not one number.
        samples: indices in the dataset, when a DataLoader made the batch of them; else None.
        digests: hashes of the samples before they were collated, where these could be seen; else None.
        num_rows: samples given to the model; None if unknown.
        rows: of each, the shape and three hashes of its row in the first tensor that the model was given: whole, and without
            the padding on the right or on the left; None if unknown.
        num_labels: labels that are not -100, None if unknown; `num_shifted` without the first of each row.
        num_items: the `num_items_in_batch` that the model was given.
        counts: [terms], targets of each loss term, where these are known.
        denominators: what else a mean may have been divided by: name -> number.
    """

    gradient: np.ndarray
    is_fresh: bool
    is_touched: bool
    is_synchronised: bool
    part: np.ndarray | None = None
    is_hooked: bool = False
    loss: float | None = None
    samples: list[int] | None = None
    digests: list[str] | None = None
    num_rows: int | None = None
    rows: list[list[str]] | None = None
    num_labels: int | None = None
    num_shifted: int | None = None
    num_items: float | None = None
    counts: list[int] | None = None
    denominators: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Step:
    """One step of the optimizer.

    Attributes:
        gradient: float64 [numbers of the sketch], as the optimizer takes it.
        unclipped: the same, before torch clipped it; `gradient` where nothing was clipped.
        change: float64 [numbers of the sketch], what the optimizer adds to the parameters.
        learning_rates: of the parameter groups.
        num_ticks: steps of learning rate schedulers since the step before.
        micro_steps: the backwards since the step before.
        logged: losses that the program logged after it.
        is_clipped_early: torch clipped the gradient, and something changed it between that and the step.
        dtype: of 16 bits, when all numbers of the gradient fit in it; else empty.
        num_averages: how often an average of the weights was seen to change since the step before.
    """

    gradient: np.ndarray
    unclipped: np.ndarray
    change: np.ndarray
    learning_rates: list[float]
    num_ticks: int
    micro_steps: list[MicroStep]
    logged: list[float] = dataclasses.field(default_factory=list)
    is_clipped_early: bool = False
    dtype: str = ""
    num_averages: int = 0


@dataclasses.dataclass
class Recording:
    """What one process did with the parameters of one optimizer.

    Attributes:
        names: of the parameters, in the order of the sketches.
        shapes: of the parameters.
        sizes: how many numbers of a sketch belong to each parameter.
        model: class of the model.
        batch_norms: modules that compute statistics of their batch.
        dropouts: modules that draw noise.
        hooked: parameters with hooks of the program on their gradients.
        facts: [cause, where] of what was seen by asking the model again (`probe.py`); None: it could not be asked.
        honours_num_items: whether the model's loss follows the `num_items_in_batch` that it is given; None: it is given none.
        weights: float64 [numbers of the sketch], the parameters before the first step; `signs`: their signs.
        num_children: processes that the program started, not counting those that load data.
        steps: in order.
        unfinished: backwards after the last step.
        others: of further optimizers.
    """

    num_processes: int = 1
    process_index: int = 0
    names: list[str] = dataclasses.field(default_factory=list)
    shapes: list[list[int]] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    model: str = ""
    batch_norms: list[str] = dataclasses.field(default_factory=list)
    dropouts: list[str] = dataclasses.field(default_factory=list)
    hooked: list[str] = dataclasses.field(default_factory=list)
    facts: list[list[str]] | None = None
    honours_num_items: bool | None = None
    weights: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    signs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    num_children: int = 0
    steps: list[Step] = dataclasses.field(default_factory=list)
    unfinished: list[MicroStep] = dataclasses.field(default_factory=list)
    others: list["Recording"] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write it as .npz: arrays, and the rest as JSON."""
        arrays: list[np.ndarray] = []

        def plain(value: Any) -> Any:
            if isinstance(value, np.ndarray):
                arrays.append(value)
                return {"array": len(arrays) - 1}
            if dataclasses.is_dataclass(value):
                return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return [plain(item) for item in value] if isinstance(value, list) else value

        record = json.dumps(plain(self))
        np.savez(path, record=np.array(record), **{str(number): array for number, array in enumerate(arrays)})

    @classmethod
    def load(cls, path: Path) -> "Recording":
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}

        def whole(plain: Any) -> Any:
            """With its arrays in their places."""
            if isinstance(plain, dict) and plain.keys() == {"array"}:
                return arrays[str(plain["array"])]
            if isinstance(plain, dict):
                return {name: whole(value) for name, value in plain.items()}
            return [whole(value) for value in plain] if isinstance(plain, list) else plain

        def recording(fields: dict) -> "Recording":
            steps = [
                Step(**of | {"micro_steps": [MicroStep(**m) for m in of["micro_steps"]]}) for of in fields["steps"]
            ]
            unfinished = [MicroStep(**m) for m in fields["unfinished"]]
            others = [recording(of) for of in fields["others"]]
            return cls(**fields | {"steps": steps, "unfinished": unfinished, "others": others})

        return recording(whole(json.loads(str(arrays["record"]))))
