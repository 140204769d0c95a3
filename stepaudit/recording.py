"""Holds the first optimizer steps of a training loop as numbers: one program writes them, another compares them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass
class MicroStep:
    """Holds one backward.

    Attributes:
        gradient: float64 [numbers of the sketch], sketch of `.grad` after the backward (on this process, reduced or not).
        part: float64 [numbers of the sketch], sketch of the gradient that the backward adds on this process, before processes
            are reduced; None if unknown.
        is_fresh: `.grad` was empty or zero before the backward.
        is_touched: `.grad` was changed since the previous backward, and not by a backward.
        is_synchronised: DistributedDataParallel reduced the gradient in this backward.
        is_hooked: hooks of the program changed the gradient on its way into `.grad`.
        loss: the number that the backward started from; None if it was not a single number.
        samples: indices in the dataset, if a DataLoader made the batch of them; else None.
        digests: hashes of the samples before they were collated, if these could be seen; else None.
        epoch: how many times the program had begun the dataset before; None if no DataLoader made the batch.
        num_rows: samples given to the model; None if unknown.
        rows: for each sample the shape and hashes of its row in the first tensor that the model was given: whole, and without
            padding (`describe_row`); None if unknown.
        num_labels: labels that are not -100, None if unknown; `num_shifted`: without the first label of each row.
        num_stops: labels that end a text, and such tokens in the input; None if unknown.
        num_media: labels that stand for a picture or a sound.
        shift: what `masks.find_shift` says of the labels that the model was given.
        num_items: the `num_items_in_batch` that the model was given.
        counts: [terms], targets of each loss term, where these are known.
        denominators: other numbers by which a mean may have been divided: name -> number.
        terms: sketch of the gradient of each term of the loss, where it has several and they were asked; else None.
        factors: [terms], the numbers by which the loss multiplies its terms; None as `terms`.
        drift: relative change of the parameters between the last step and this backward; None: not looked at.
        training_share: modules in training, of all in the modules that were called; None: none was called.
        num_numbers: of the first tensor that the model was given; `values`: a number that depends on all of them, in any order.
        other_rows: like `rows`, of further tensors with rows; `shared`: shape and hash of tensors without.
        is_assigned: the program assigned the gradient itself; `part` is what it added to that before.
        length: of the gradient that this process holds, parts of DTensors as parts; None: not measured.
        line: of a program on several processes, that has computed the gradient.
        initial_gradient: like `gradient`, before the backward; None once the optimizer has stepped.
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
    epoch: int | None = None
    num_rows: int | None = None
    rows: list[list[str]] | None = None
    num_labels: int | None = None
    num_shifted: int | None = None
    num_stops: list[int] | None = None
    num_media: int = 0
    shift: str = ""
    num_items: float | None = None
    counts: list[int] | None = None
    denominators: dict[str, int] = dataclasses.field(default_factory=dict)
    terms: list[np.ndarray] | None = None
    factors: list[float] | None = None
    drift: float | None = None
    training_share: float | None = None
    num_numbers: int | None = None
    values: int | None = None
    other_rows: list[list[list[str]]] = dataclasses.field(default_factory=list)
    shared: list[list[str]] = dataclasses.field(default_factory=list)
    is_assigned: bool = False
    length: float | None = None
    line: str = ""
    initial_gradient: np.ndarray | None = None


@dataclasses.dataclass
class Step:
    """Holds one step of the optimizer.

    Attributes:
        gradient: float64 [numbers of the sketch], as the optimizer takes it.
        unclipped_gradient: the gradient before torch clipped it; `gradient` where nothing was clipped.
        change: float64 [numbers of the sketch], sketch of the update that the optimizer adds to the parameters.
        learning_rates: of the parameter groups.
        num_ticks: steps of learning rate schedulers since the previous step.
        micro_steps: the backwards since the previous step.
        options: of the parameter groups, other than rates: name -> numbers (betas, momentum, weight_decay).
        logged_losses: losses that the program logged after the step.
        is_clipped_early: torch clipped the gradient, and something changed it between the clipping and the step.
        dtype: of 16 bits, if all numbers of the gradient fit in it; else empty.
        num_averages: changes of an average of the weights that were seen since the previous step.
        averages: float64, random sums of all modules that follow the weights, after the step.
        moved: float64 [numbers of the sketch], the parameters before the step, if not the step before has left them so.
        is_by_closure: the gradient is the first that the optimizer asked a closure for.
        numbers: single numbers that a program on several processes has read or reduced, from the step's first backward on.
        lines: of the program, at which each of the numbers was.
        returned: norms that functions which clip have returned.
        lengths: of what each process holds of the gradient before it was clipped, where processes are put together.
    """

    gradient: np.ndarray
    unclipped_gradient: np.ndarray
    change: np.ndarray
    learning_rates: list[float]
    num_ticks: int
    micro_steps: list[MicroStep]
    logged_losses: list[float] = dataclasses.field(default_factory=list)
    is_clipped_early: bool = False
    dtype: str = ""
    num_averages: int = 0
    averages: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    moved: np.ndarray | None = None
    is_by_closure: bool = False
    options: list[dict[str, list[float]]] = dataclasses.field(default_factory=list)
    numbers: list[float] = dataclasses.field(default_factory=list)
    lines: list[str] = dataclasses.field(default_factory=list)
    returned: list[float] = dataclasses.field(default_factory=list)
    lengths: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Recording:
    """Holds the steps that one process took with the parameters of one optimizer.

    Attributes:
        names: of the parameters, in the order of the sketches.
        shapes: of the parameters.
        sizes: numbers of a sketch that belong to each parameter.
        model: class of the model.
        batch_norms: modules that compute statistics of their batch.
        dropouts: modules that draw noise.
        hooked_parameters: parameters with hooks of the program on their gradients.
        hook_lines: where the program registers hooks on the gradients of other tensors, or of modules.
        facts: [cause, place] of each fault that the model showed when it was asked again (`probe.py`); None: it was not asked.
        unasked: why the model was not asked, or could not answer; else empty.
        honours_num_items: whether the model's loss follows the `num_items_in_batch` that it is given; None: it is given none.
        weights: float64 [numbers of the sketch], the parameters before the first step; `signs`: their signs.
        has_moved: parameters were not put back after each step, as something follows them: errors go on into later steps.
        draws_in_collate: collate draws random numbers.
        library: that keeps parameters in parts of its own, with version and mode; else empty.
        collectives: name and line of each collective between a forward and its backward.
        short_dtypes: of 16 bits, in which the program has computed, or in which its parameters are.
        reads_numbers: the program reads numbers of tensors, by which it may decide what it computes.
        num_children: processes that the program started, not counting those that load data.
        steps: in order.
        unfinished_micro_steps: backwards after the last step.
        is_cut_off: the audit has ended the program, so that a step may be missing that would have come.
        other_recordings: of further optimizers.
        axes: dimensions of the mesh of processes, name -> size; `places`: this process's coordinates.
        cuts: for each parameter the dimensions along which it is cut.
        frozen: names of parameters that need no gradient.
    """

    num_processes: int = 1
    process_index: int = 0
    names: list[str] = dataclasses.field(default_factory=list)
    shapes: list[list[int]] = dataclasses.field(default_factory=list)
    sizes: list[int] = dataclasses.field(default_factory=list)
    model: str = ""
    batch_norms: list[str] = dataclasses.field(default_factory=list)
    dropouts: list[str] = dataclasses.field(default_factory=list)
    hooked_parameters: list[str] = dataclasses.field(default_factory=list)
    hook_lines: list[str] = dataclasses.field(default_factory=list)
    facts: list[list[str]] | None = None
    unasked: str = ""
    honours_num_items: bool | None = None
    weights: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    signs: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0))
    has_moved: bool = False
    draws_in_collate: bool = False
    library: str = ""
    collectives: list[str] = dataclasses.field(default_factory=list)
    short_dtypes: list[str] = dataclasses.field(default_factory=list)
    reads_numbers: bool = False
    num_children: int = 0
    steps: list[Step] = dataclasses.field(default_factory=list)
    unfinished_micro_steps: list[MicroStep] = dataclasses.field(default_factory=list)
    is_cut_off: bool = False
    other_recordings: list["Recording"] = dataclasses.field(default_factory=list)
    axes: dict[str, int] = dataclasses.field(default_factory=dict)
    places: dict[str, int] = dataclasses.field(default_factory=dict)
    cuts: list[list[str]] = dataclasses.field(default_factory=list)
    frozen: list[str] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the recording as .npz: arrays, and all else as JSON."""
        arrays: list[np.ndarray] = []

        def to_plain(value: Any) -> Any:
            """Replace each array by its number, and each dataclass by a dictionary."""
            if isinstance(value, np.ndarray):
                arrays.append(value)
                return {"array": len(arrays) - 1}
            if dataclasses.is_dataclass(value):
                return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
            return [to_plain(item) for item in value] if isinstance(value, list) else value

        record = json.dumps(to_plain(self))
        parts: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
        np.savez(path, record=np.array(record), **parts)

    @classmethod
    def load(cls, path: Path) -> "Recording":
        """Read a recording that `save` wrote."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}

        def insert_arrays(value: Any) -> Any:
            """Put the arrays into the places of their numbers."""
            if isinstance(value, dict) and value.keys() == {"array"}:
                return arrays[str(value["array"])]
            if isinstance(value, dict):
                return {name: insert_arrays(item) for name, item in value.items()}
            return [insert_arrays(item) for item in value] if isinstance(value, list) else value

        def make_recording(fields: dict) -> "Recording":
            steps = [
                Step(**step | {"micro_steps": [MicroStep(**m) for m in step["micro_steps"]]})
                for step in fields["steps"]
            ]
            unfinished = [MicroStep(**m) for m in fields["unfinished_micro_steps"]]
            others = [make_recording(recording) for recording in fields["other_recordings"]]
            return cls(**fields | {"steps": steps, "unfinished_micro_steps": unfinished, "other_recordings": others})

        return make_recording(insert_arrays(json.loads(str(arrays["record"]))))
