"""Audits whether a model with its loss, or a training loop, takes the same step however its samples are cut: `audit_step`."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from stepaudit import processes as process_runner
from stepaudit._internals import tree_map
from stepaudit.causes import Finding
from stepaudit.entrance import MAX_SAMPLES, find_entrances, fix_noise
from stepaudit.errors import UsageError
from stepaudit.judge import Comparison, compare, find_faults
from stepaudit.loops import Loop, exact_loop, own_loss_loop, terms, trainer_loop
from stepaudit.record import Recorder
from stepaudit.recording import Recording
from stepaudit.table import table

# Largest relative error of a gradient that is rounding. float64: many losses compute in float32 inside.
TOLERANCES = {"float64": 1e-7, "float32": 1e-5, "bfloat16": 5e-2}
SUSPECTED_CAUSES = {"batch_norm", "dropout", "not_a_sum"}  # causes that gradients and lists of modules only suggest


@dataclasses.dataclass(frozen=True)
class Cut:
    """Describes how the samples of a step are cut into micro-batches.

    Attributes:
        per_device_train_batch_size: largest number of samples in a forward (b). Uneven where it does not divide.
        num_processes: N, each with every N-th sample.
        dtype: "float64", "float32", or "bfloat16": autocast of float32 weights.
        is_shuffled: the samples of each step in another order.
    """

    per_device_train_batch_size: int
    num_processes: int = 1
    dtype: str = "float64"
    is_shuffled: bool = False

    def micro_batches(self, num_samples: int, global_batch_size: int, process_index: int) -> list[list[list[int]]]:
        """Return the sample ids of each micro-batch of each step, on one process.

        All processes have the same number of micro-batches, as most loops need it, and no micro-batch is empty: where a process
        has too few samples for that, another process takes one more than b at once.

        >>> Cut(3).micro_batches(10, 7, 0)
        [[[0, 1, 2], [3, 4, 5], [6]], [[7, 8, 9]]]
        >>> Cut(2, num_processes=2).micro_batches(5, 5, 0), Cut(2, num_processes=2).micro_batches(5, 5, 1)
        ([[[0, 2], [4]]], [[[1], [3]]])
        >>> Cut(1, num_processes=2).micro_batches(3, 3, 0), Cut(1, num_processes=2).micro_batches(3, 3, 1)
        ([[[0, 2]]], [[[1]]])
        """
        b, num_processes, steps = self.per_device_train_batch_size, self.num_processes, []
        for start in range(0, num_samples, global_batch_size):
            ids = np.arange(start, min(start + global_batch_size, num_samples))
            if self.is_shuffled:
                ids = np.random.default_rng(start).permutation(ids)
            process_ids = ids[process_index::num_processes]
            # As many micro-batches as the largest share needs, and at most as many as the smallest share has samples.
            k = min(math.ceil(math.ceil(len(ids) / num_processes) / b), len(ids) // num_processes)
            parts = [process_ids[first : first + b] for first in range(0, len(process_ids), b)]
            steps.append([part.tolist() for part in (parts if len(parts) == k else np.array_split(process_ids, k))])
        return steps

    def __str__(self) -> str:
        text = f"b {self.per_device_train_batch_size}, N {self.num_processes}, {self.dtype}"
        return text + (", shuffled" if self.is_shuffled else "")


@dataclasses.dataclass
class Audit:
    """Holds the result of `audit_step`.

    Attributes:
        cuts: compared with one batch of all samples of a step, on one process, in float64.
        comparisons, tolerances: one for each cut.
        findings: faults of the loop by itself.
    """

    cuts: list[Cut]
    comparisons: list[Comparison]
    tolerances: list[float]
    findings: list[Finding]

    @property
    def is_exact(self) -> bool:
        """Whether every cut takes the same step, within its tolerance."""
        harmless = all(finding.is_harmless for finding in self.findings)
        return harmless and all(comparison.is_exact for comparison in self.comparisons)

    @property
    def causes(self) -> set[str]:
        """Keys of `stepaudit.CAUSES`, over all cuts."""
        of_cuts = {finding.cause for comparison in self.comparisons for finding in comparison.findings}
        return of_cuts | {finding.cause for finding in self.findings}

    def __str__(self) -> str:
        """Write the table, the causes below it, and the verdict."""
        labels = ["all samples at once, N 1, float64", *self.cuts]
        text = table(labels, self.findings, self.comparisons, self.tolerances)
        return f"{text}\n{'exact' if self.is_exact else 'NOT exact'}"


@dataclasses.dataclass
class Subject:
    """Holds the audited loop, and all that a process needs to take its steps."""

    model: nn.Module
    samples: Sequence[Any]
    collate: Callable[[list], Any]
    loss: Callable[[nn.Module, Any], Any] | None
    loop: Loop
    global_batch_size: int
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

    def take_steps(self, cut: Cut, loop: Loop, process_index: int = 0) -> Recording:
        """Record `loop` on a copy of the model."""
        model = copy.deepcopy(self.model).to(torch.float64 if cut.dtype == "float64" else torch.float32).train()
        device = next(model.parameters()).device
        steps = cut.micro_batches(len(self.samples), self.global_batch_size, process_index)
        k = max(len(step) for step in steps)
        all_micro_batches = [micro_batch for step in steps for micro_batch in step]
        loader = DataLoader(
            self.samples, batch_sampler=all_micro_batches, collate_fn=PlacedCollate(self.collate, model)
        )
        bf16 = torch.autocast(device.type, torch.bfloat16) if cut.dtype == "bfloat16" else contextlib.nullcontext()
        optimizer = self.optimizer(parameter for parameter in model.parameters() if parameter.requires_grad)
        with fix_noise(process_index), Recorder(model=model) as recorder, bf16:
            loop(model, optimizer, loader, k)
        return recorder.recording

    def objective(self, model: nn.Module, batch: Any) -> torch.Tensor | None:
        """Compute the loss of one batch; without a loss, let the loop take a step on it, at a rate of 0, and return None."""
        if self.loss:
            return terms(self.loss(model, batch))[0].sum()
        self.loop(model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader([batch], batch_size=None), 1)
        return None


@dataclasses.dataclass
class PlacedCollate:
    """Collates, then moves batches to the model's device, and floating point numbers to its dtype."""

    collate: Callable[[list], Any]
    model: nn.Module

    def __call__(self, samples: list) -> Any:
        parameter = next(self.model.parameters())

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            return leaf.to(parameter.device, parameter.dtype if leaf.is_floating_point() else None)

        batch = self.collate(samples)
        return tree_map(place, dict(batch) if isinstance(batch, Mapping) else batch)


def audit_step(
    model: nn.Module,
    samples: Sequence[Any],
    collate: Callable[[list], Any],
    loss: Callable[[nn.Module, Any], Any] | None = None,
    *,
    loop: Loop | None = None,
    global_batch_size: int | None = None,
    cuts: Sequence[Cut] | None = None,
    processes: Sequence[int] = (1,),
    tolerance: float | Mapping[str, float] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> Audit:
    """Compare one large batch with every cut of it, and name the cause where they differ.

    The arguments decide which loop is audited:

    - A `loss` without a `loop`: whether sums and counts make the step exact, by
      L = sum_j (sum_{i in S} s_j(i)) / (sum_{i in S} c_j(i)) over the samples S of a step, each micro-batch adding its part.
    - A `loop`: that training loop. The truth is the step by `loss`, or, without a loss, the loop itself on one large batch.
    - Neither: a Hugging Face model whose batches have `labels`, accumulated as transformers' Trainer does it.

    The model is copied, and left as it is; dropout and BatchNorm are as in training. Noise has the same seed for each cut.

    Args:
        model: on any device; several processes compute on the CPU.
        samples: of one step, or, with `global_batch_size`, of several. A few ragged samples show more than many equal ones.
        collate: list of samples -> batch (tensors in any nesting).
        loss: (model, batch) -> (sum, count), or ([sum of each term], [count of each term]), or {term: (sum, count)}.
            sum: scalar tensor, with a gradient; count: number of targets, int or integer tensor.
        loop: (model, optimizer, batches, k) -> None: takes steps of k micro-batches each; the last step may have fewer.
            `batches` is a DataLoader of this process's samples. On several processes the process group exists, and the loop
            wraps the model.
        global_batch_size: samples per step (B); default: all; with a loop two fifths of them, so that the last step is
            partial.
        cuts: default `default_cuts`.
        processes: numbers of processes for the default cuts; the float32 and bfloat16 cuts are on one process.
        tolerance: largest relative error of a gradient that is rounding: for all dtypes, or {dtype: tolerance}; default
            `TOLERANCES`.
        optimizer: (parameters) -> optimizer for the loop; default SGD.

    Returns:
        The comparisons of all cuts with the truth, and the causes of their differences.

    Raises:
        UsageError: arguments of the wrong kind, a loss that does not return sums and counts, processes that fail.
    """
    if not (hasattr(samples, "__len__") and hasattr(samples, "__getitem__")):
        raise UsageError(f"samples are {type(samples).__name__}: give a list, which has a length and can be indexed")
    subject = Subject(
        model,
        samples,
        collate,
        loss,
        loop or (exact_loop(loss) if loss else trainer_loop),
        global_batch_size or (math.ceil(len(samples) * 2 / 5) if loop else len(samples)),
        optimizer or _make_sgd,
    )
    cuts = list(dict.fromkeys(cuts or default_cuts(subject.global_batch_size, processes)))
    tolerances = {**TOLERANCES, **_read_tolerances(tolerance)}
    _check_arguments(subject, cuts)

    true_loop = exact_loop(loss) if loss else loop or own_loss_loop
    reference = [subject.take_steps(Cut(subject.global_batch_size), true_loop)]
    recordings = {cut: [subject.take_steps(cut, subject.loop)] for cut in cuts if cut.num_processes == 1}
    for num_processes in sorted({cut.num_processes for cut in cuts} - {1}):
        process_cuts = [cut for cut in cuts if cut.num_processes == num_processes]
        recordings |= zip(process_cuts, process_runner.take_steps(subject, process_cuts, num_processes), strict=True)
    if not all(recording.steps for group in (reference, *recordings.values()) for recording in group):
        raise UsageError("the loop takes no step of the optimizer that it is given: it must call optimizer.step()")
    if loss and loop:
        _note_counts(subject, recordings.values())
    comparisons = [compare(reference, recordings[cut], tolerances[cut.dtype]) for cut in cuts]
    _name_causes(subject, cuts, comparisons, is_own_loop=loop is not None or loss is None)
    return Audit(cuts, comparisons, [tolerances[cut.dtype] for cut in cuts], find_faults(reference))


def assert_same_step(*args: Any, **kwargs: Any) -> Audit:
    """Run `audit_step` in a test, with the same arguments.

    Raises:
        AssertionError: a cut is not exact; the message is the table and the causes.
    """
    audit = audit_step(*args, **kwargs)
    if not audit.is_exact:
        raise AssertionError(f"the step depends on how it is cut\n{audit}")
    return audit


def default_cuts(global_batch_size: int, processes: Sequence[int] = (1,)) -> list[Cut]:
    """Return cuts into halves, quarters, single samples, uneven parts, another order; quarters in float32 and bfloat16.

    >>> print(*default_cuts(16), sep="; ")  # doctest: +NORMALIZE_WHITESPACE
    b 8, N 1, float64; b 4, N 1, float64; b 1, N 1, float64; b 7, N 1, float64;
    b 4, N 1, float64, shuffled; b 4, N 1, float32; b 4, N 1, bfloat16
    """
    cuts = []
    for num_processes in processes:
        share = math.ceil(global_batch_size / num_processes)
        half, quarter = math.ceil(share / 2), math.ceil(share / 4)
        uneven = next((b for b in range(half - 1, 1, -1) if share % b), 1)
        if num_processes > 1:
            cuts.append(Cut(share, num_processes))
        cuts += [Cut(b, num_processes) for b in (half, quarter, 1, uneven)]
        cuts.append(Cut(quarter, num_processes, is_shuffled=True))
    cuts += [Cut(math.ceil(global_batch_size / 4), dtype=dtype) for dtype in ("float32", "bfloat16")]
    return list(dict.fromkeys(cuts))


def _make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


# ------------------------------------------------------------------------------------------------ causes


def _name_causes(subject: Subject, cuts: list[Cut], comparisons: list[Comparison], is_own_loop: bool) -> None:
    """Replace causes that the gradients only suggest by the module, or the loss, at which the samples mix."""
    by_cut = dict(zip(cuts, comparisons, strict=True))
    wrong_comparisons = [comparison for comparison in comparisons if not comparison.is_exact]
    if not wrong_comparisons:
        return
    model = copy.deepcopy(subject.model).double().train()
    samples = [subject.samples[number] for number in range(min(MAX_SAMPLES, len(subject.samples)))]
    collate = PlacedCollate(subject.collate, model)
    findings = find_entrances(model, samples, collate, subject.objective)
    if subject.loss and not findings:
        findings = _check_additivity(model, samples, collate, subject.loss)
    for comparison in wrong_comparisons if findings else []:
        if not is_own_loop or findings[0].cause == "random_collate":
            comparison.findings[:] = findings
        elif {finding.cause for finding in comparison.findings} & SUSPECTED_CAUSES:
            comparison.findings[:] = findings + [
                finding for finding in comparison.findings if finding.cause not in SUSPECTED_CAUSES
            ]
    for cut, comparison in by_cut.items():
        twin = by_cut.get(dataclasses.replace(cut, dtype="float64"))
        if cut.dtype != "float64" and not comparison.is_exact and twin is not None:
            finding = Finding("rounding", cut.dtype, f"relative error {max(comparison.errors):.2g}")
            comparison.findings[:] = [finding] if twin.is_exact else twin.findings


def _check_additivity(
    model: nn.Module, samples: list, collate: Callable[[list], Any], loss: Callable[[nn.Module, Any], Any]
) -> list[Finding]:
    """Check that sums and counts of single samples add up to the sums and counts of their batch."""
    with torch.no_grad(), fix_noise(1):
        sums, counts = terms(loss(model, collate(samples)))
        single_sums, single_counts = (
            sum(values) for values in zip(*(terms(loss(model, collate([s]))) for s in samples), strict=True)
        )
    findings, num_samples = [], len(samples)
    for j in range(len(sums)):
        place = getattr(loss, "__qualname__", "loss") + (f", term {j + 1}" if len(sums) > 1 else "")
        if counts[j] != single_counts[j]:
            evidence = f"{counts[j]} in a batch of {num_samples}, {single_counts[j]} one by one"
            findings.append(Finding("counts", place, evidence))
        if not (sums[j] - single_sums[j]).abs() <= 1e-6 * single_sums[j].abs():
            evidence = f"{sums[j]:.6g} for a batch of {num_samples}, {single_sums[j]:.6g} one by one"
            findings.append(Finding("not_summed", place, evidence))
    return findings


def _note_counts(subject: Subject, recordings: Iterable[list[Recording]]) -> None:
    """Note in every micro-batch whose samples are known the numbers of its targets, computed by the loss."""
    model = copy.deepcopy(subject.model).double().train()
    collate, counts = PlacedCollate(subject.collate, model), []
    with torch.no_grad(), fix_noise(1):
        for number in range(len(subject.samples)):
            counts.append(terms(subject.loss(model, collate([subject.samples[number]])))[1])
    for recording in (recording for processes in recordings for recording in processes):
        for micro_step in (micro_step for step in recording.steps for micro_step in step.micro_steps):
            if micro_step.samples:
                micro_step.counts = sum(counts[number] for number in micro_step.samples).tolist()


# ------------------------------------------------------------------------------------------------ bad input


def _check_arguments(subject: Subject, cuts: list[Cut]) -> None:
    """Check the arguments of `audit_step`.

    Raises:
        UsageError: with all problems at once.
    """
    problems = []
    if not isinstance(subject.model, nn.Module) or not any(p.requires_grad for p in subject.model.parameters()):
        problems.append(
            f"model is {type(subject.model).__name__}: it must be a torch module with parameters to be trained"
        )
    if len(subject.samples) < 2:
        problems.append(f"samples are {len(subject.samples)}: at least 2 are needed to be cut")
    if subject.global_batch_size < 2:
        problems.append(f"global_batch_size is {subject.global_batch_size}: a step of at least 2 samples can be cut")
    smallest = len(subject.samples) % subject.global_batch_size or subject.global_batch_size
    for cut in cuts:
        if cut.dtype not in TOLERANCES:
            problems.append(f"dtype of a cut is {cut.dtype!r}: it is one of {', '.join(TOLERANCES)}")
        if cut.per_device_train_batch_size < 1 or cut.num_processes < 1:
            problems.append(
                f"a cut has b {cut.per_device_train_batch_size}, N {cut.num_processes}: both must be positive"
            )
        elif cut.num_processes > smallest:
            problems.append(
                f"a cut has {cut.num_processes} processes, but a step has only {smallest} samples: "
                "give more samples, fewer processes, or another global_batch_size"
            )
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    if subject.loop is trainer_loop:
        batch = subject.collate([subject.samples[0], subject.samples[1]])
        if not isinstance(batch, Mapping) or "labels" not in batch:
            raise UsageError(
                'without a loss or a loop, batches must be mappings with "labels", for a Hugging Face model'
            )


def _read_tolerances(tolerance: float | Mapping[str, float] | None) -> Mapping[str, float]:
    tolerances = dict.fromkeys(TOLERANCES, tolerance) if isinstance(tolerance, (int, float)) else dict(tolerance or {})
    wrong_names = [name for name, value in tolerances.items() if name not in TOLERANCES or not value >= 0]
    if wrong_names:
        raise UsageError(f"tolerance is {tolerance}: a number that is not negative, or one for {', '.join(TOLERANCES)}")
    return tolerances
