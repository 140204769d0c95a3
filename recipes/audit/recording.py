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
        is_fresh: `.grad` was empty or zero before it.
        is_touched: something else than a backward changed `.grad` since the backward before it.
        is_synchronised: DistributedDataParallel reduced the gradient in it.
        loss: what the backward started from; None if that was not one number.
        samples: indices in the dataset, when a DataLoader made the batch of them; else None.
        num_rows: samples given to the model; None if unknown.
        rows: of each, shape and hash of its row in the first tensor that the model was given; None if unknown.
        num_labels: labels that are not -100, None if unknown; `num_shifted` without the first of each row.
        num_items: the `num_items_in_batch` that the model was given.
        counts: [terms], targets of each loss term, where these are known.
    """

    gradient: np.ndarray
    is_fresh: bool
    is_touched: bool
    is_synchronised: bool
    loss: float | None = None
    samples: list[int] | None = None
    num_rows: int | None = None
    rows: list[list[str]] | None = None
    num_labels: int | None = None
    num_shifted: int | None = None
    num_items: float | None = None
    counts: list[int] | None = None


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
    """

    gradient: np.ndarray
    unclipped: np.ndarray
    change: np.ndarray
    learning_rates: list[float]
    num_ticks: int
    micro_steps: list[MicroStep]
    logged: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Recording:
    """What one process did.

    Attributes:
        names: of the parameters, in the order of the sketches.
        sizes: how many numbers of a sketch belong to each parameter.
        model: class of the model.
        batch_norms: modules that compute statistics of their batch.
        dropouts: modules that draw noise.
        honours_num_items: whether the model's loss follows the `num_items_in_batch` that it is given; None: it is given none.
        steps: in order.
        unfinished: backwards after the last step.
    """

    num_processes: int = 1
    process_index: int = 0
    names: list[str] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    model: str = ""
    batch_norms: list[str] = dataclasses.field(default_factory=list)
    dropouts: list[str] = dataclasses.field(default_factory=list)
    honours_num_items: bool | None = None
    steps: list[Step] = dataclasses.field(default_factory=list)
    unfinished: list[MicroStep] = dataclasses.field(default_factory=list)

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
        record = json.loads(str(arrays.pop("record")))

        def micro_step(plain: dict) -> MicroStep:
            return MicroStep(**plain | {"gradient": arrays[str(plain["gradient"]["array"])]})

        def step(plain: dict) -> Step:
            micro_steps = [micro_step(of) for of in plain["micro_steps"]]
            vectors = {name: arrays[str(plain[name]["array"])] for name in ("gradient", "unclipped", "change")}
            return Step(**plain | vectors | {"micro_steps": micro_steps})

        record["steps"] = [step(plain) for plain in record["steps"]]
        record["unfinished"] = [micro_step(plain) for plain in record["unfinished"]]
        return cls(**record)
