"""Explains why the gradient of a step is not the reference's: a table of explanations, of which the first that fits is given.

Let r be the reference's gradient of a step, g the other layout's, and d_q the contribution of its q-th micro-batch (of all
processes). A cause is named if it produces the numbers: g = c r with c = k, N, k N, m / k; r = sum_q a_q d_q with a_q in
proportion to a number of targets; and so on. Causes that the numbers do not tell were seen by asking the model (`probe.py`).
"""

import dataclasses
from collections.abc import Callable
from functools import cached_property

import numpy as np

from stepaudit.causes import DRAWS, Finding, list_names, select_first_findings
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.samples import (
    PREDICTION_TOLERANCE,
    compare_sizes,
    explain_rows,
    explain_shared,
    explain_values,
    is_copied,
)
from stepaudit.together import explain_norm, explain_times
from stepaudit.vectors import WEIGHT_TOLERANCE, are_alike, compute_rest, norm_of, relative, solve_weights
from stepaudit.windows import Processes, format_counts, get_counts, get_window, list_all_micro_steps, list_micro_steps

SHORT_DTYPE_ERROR = 0.05  # relative error that 16 bits explain
UNKNOWN_WEIGHTS = "the micro-batches need the weights"
Findings = list[Finding] | None


@dataclasses.dataclass
class Question:
    """A step whose gradient is not the reference's.

    Attributes:
        reference, processes: recordings of all processes of the two layouts.
        t: number of the step, from 0.
        true_gradient, gradient: float64 [numbers of the sketch], of the reference and of the layout.
        loss_ratio: the step's loss, divided by the reference's.
        tolerance: relative error of a gradient that is rounding.
    """

    reference: Processes
    processes: Processes
    t: int
    true_gradient: np.ndarray
    gradient: np.ndarray
    loss_ratio: float
    tolerance: float

    @property
    def recording(self) -> Recording:
        """Recording of the layout's first process."""
        return self.processes[0]

    @property
    def place(self) -> str:
        return f"step {self.t + 1}"

    @cached_property
    def margin(self) -> float:
        """Relative error within which a prediction is met: it leaves less than half of the error that it explains."""
        error = relative(self.gradient - self.true_gradient, norm_of(self.true_gradient))
        return max(PREDICTION_TOLERANCE, min(10 * self.tolerance, error / 2))

    @cached_property
    def k(self) -> int:
        """Micro-batches of the layout's longest window, on one process."""
        return max((len(get_window(step)) for step in self.recording.steps), default=1) or 1

    @property
    def window(self) -> int:
        """Micro-batches of this step's window, on one process."""
        return len(get_window(self.recording.steps[self.t]))

    @cached_property
    def ratio(self) -> float:
        """Factor c for which c r comes nearest to g; infinite where r is 0."""
        r = self.true_gradient
        return float(r @ self.gradient / (r @ r)) if r.any() else float("inf")

    @cached_property
    def is_multiple(self) -> bool:
        rest = self.gradient - self.ratio * self.true_gradient if np.isfinite(self.ratio) else self.gradient
        return relative(rest, norm_of(self.gradient)) <= self.margin

    @cached_property
    def facts(self) -> list[Finding]:
        return _find_facts(self.reference, self.processes, self.place)

    @cached_property
    def changes(self) -> list[Finding]:
        error = relative(self.gradient - self.true_gradient, norm_of(self.true_gradient))
        return _find_changes(self.processes, self.t, error, self.place)

    @cached_property
    def tail(self) -> list[Finding]:
        """No weights may show a tail; but the losses of micro-batches are much alike."""
        share = self.window / self.k
        is_tail = self.window < self.k and abs(self.loss_ratio - share) < (1 - share) / 4
        evidence = f"{self.loss_ratio:.3g} of the loss, near {self.window}/{self.k}"
        return [Finding("tail", self.place, evidence)] if is_tail else []


def explain_gradient(question: Question) -> list[Finding]:
    """Explain why the gradient of a step is not the reference's.

    Returns:
        What the first of `EXPLANATIONS` says that says anything: one cause, and what is true beside it.
    """
    for explanation in EXPLANATIONS:
        if findings := explanation.explain(question):
            return findings
    return [_admit(question), *question.tail]


def _as_list(finding: Finding | None) -> Findings:
    return None if finding is None else [finding]


def _explain_numbers(q: Question) -> Findings:
    is_finite = np.isfinite([q.true_gradient, q.gradient]).all()
    return None if is_finite else [Finding("not_finite", q.place, "there or in the reference")]


def _explain_copies(q: Question) -> Findings:
    evidence = f"the micro-batches of {q.recording.num_processes} processes are the same"
    return [Finding("not_sharded", q.place, evidence)] if is_copied(q.processes, q.t) else None


def _explain_size(q: Question) -> Findings:
    if (sizes := compare_sizes(q.reference, q.processes, q.t)) is None:
        return None
    return [Finding("batch_size", q.place, sizes)]


def _explain_gather(q: Question) -> Findings:
    is_mixed = any(finding.cause == "mixed_loss" for finding in q.facts)
    if not is_mixed or q.recording.num_processes == 1 or abs(q.loss_ratio - 1) > q.tolerance:
        return None
    lines = [text for text in q.recording.collectives if "gather" in text]
    evidence = f"{q.ratio:.4g} times the gradient, and the whole loss"
    return [Finding("gathered_without_gradient", ", ".join([q.place, *lines[:1]]), evidence)]


def _explain_num_items(q: Question) -> Findings:
    if q.recording.honours_num_items is not False or q.k * q.recording.num_processes == 1:
        return None
    finding = Finding("ignores_num_items", f"{q.recording.model}, {q.place}", f"{q.ratio:.4g} times the gradient")
    return [finding, *([] if q.is_multiple else q.facts)]


def _explain_factor(q: Question) -> Findings:
    if not q.is_multiple:
        return None
    return [_explain_multiple(q.ratio, q.k, q.recording.num_processes, q.window, q.place, q.margin)]


def _explain_drawing(q: Question) -> Findings:
    return _as_list(explain_shared(q.reference, q.processes, q.t)) if q.recording.draws_in_collate else None


def _explain_all_terms(q: Question) -> Findings:
    finding = _explain_terms(q.processes, q.t, q.true_gradient, q.gradient, q.margin, bool(q.facts))
    if finding is None or finding.cause != "mean_of_means":
        return _as_list(finding)
    return [_explain_counts(q.processes, q.t, q.place) or finding, *q.tail]  # known counts say more than weights


def _explain_suspects(q: Question) -> Findings:
    """Name modules that may do it, where the model could not be asked."""
    kinds = (("batch_norm", q.recording.batch_norms), ("dropout", q.recording.dropouts))
    suspects = [Finding(cause, list_names(modules), q.place) for cause, modules in kinds if modules]
    is_asked = q.recording.facts is not None or not q.true_gradient.size
    return None if is_asked or not suspects else suspects + q.tail


def _explain_facts(q: Question) -> Findings:
    is_mixed = any(finding.cause == "mixed_loss" for finding in q.facts)  # no sum: its size tells no tail
    return [*q.facts, *([] if is_mixed else q.tail)] or None


def _explain_foreign_noise(q: Question) -> Findings:
    """Name a model that draws from the generator of another library, for all samples of a micro-batch."""
    return [finding for finding in q.facts if finding.cause == "dropout" and DRAWS in finding.where] or None


def _explain_hooks(q: Question) -> Findings:
    names, lines = q.recording.hooked_parameters, q.recording.hook_lines
    hooks = f"of {list_names(names)}" if names else f"registered at {list_names(lines)}" if lines else ""
    return [Finding("gradient_hooks", q.place, hooks)] if hooks else None


def _explain_own_dropouts(q: Question) -> Findings:
    dropouts = q.recording.dropouts
    return [Finding("dropout", list_names(dropouts), q.place), *q.tail] if dropouts else None


def _explain_frozen(q: Question) -> Findings:
    """Find parameters that are trained under one layout and not under the other, where all others are right."""
    ends = np.cumsum(q.recording.sizes)[:-1]
    parts = zip(q.recording.names, np.split(q.true_gradient, ends), np.split(q.gradient, ends), strict=True)
    wrong = [(name, r.any(), g.any()) for name, r, g in parts if relative(g - r, norm_of(q.true_gradient)) > q.margin]
    if not wrong or any(in_reference == is_here for _, in_reference, is_here in wrong):
        return None
    where = "have no gradient in the reference" if wrong[0][2] else "have none, as they have in the reference"
    names = list_names([name for name, *_ in wrong])
    return [Finding("parameters", q.place, f"{names} {where}; all others are right")]


def _explain_constants(q: Question) -> Findings:
    """Conclude by exclusion that the loss is given something that was computed without gradient from the micro-batch.

    The model and the loss have answered that they mix nothing that has a gradient, and the model was given the same.
    """
    answers = [layout[0].facts for layout in (q.processes, q.reference)]
    window = [m for process in q.processes if q.t < len(process.steps) for m in get_window(process.steps[q.t])]
    is_odd = any(m.is_assigned or m.part is None for m in window) or q.recording.steps[q.t].is_by_closure
    is_odd |= bool(q.recording.unasked or q.reference[0].unasked)  # a part of the model has not answered
    if answers[0] != [] or answers[1] not in ([], None) or is_odd or q.changes or not q.true_gradient.any():
        return None
    evidence = "targets, weights or statistics without a gradient are computed from the micro-batch (no_grad, detach)"
    return [Finding("mixed_loss", q.place, f"neither the model nor the loss mixes what has a gradient: {evidence}")]


def _admit(q: Question) -> Finding:
    evidence = f"{q.ratio:.4g} times the gradient, and a rest" if np.isfinite(q.ratio) else "it is 0 in the reference"
    reason = q.recording.unasked or q.reference[0].unasked
    if q.recording.facts is None and reason:
        evidence += f"; {q.recording.model or 'the model'} was not asked: {reason}"
    return Finding("not_a_sum", q.place, evidence)


def _explain_parameters(
    recording: Recording, t: int, true_gradient: np.ndarray, gradient: np.ndarray, k: int, margin: float
) -> Finding | None:
    """Explain a gradient of which some parameters' parts are right, and all others a multiple of what they should be."""
    ends, norm = np.cumsum(recording.sizes)[:-1], norm_of(true_gradient)
    triples = zip(recording.names, np.split(true_gradient, ends), np.split(gradient, ends), strict=True)
    wrong = [(name, r, g) for name, r, g in triples if relative(g - r, norm) > margin]
    if not wrong or len(wrong) == len(recording.names) or not all(r.any() for _, r, _ in wrong):
        return None
    r, g = (np.concatenate(parts) for parts in zip(*((r, g) for _, r, g in wrong), strict=True))
    ratio = float(r @ g / (r @ r))
    if relative(g - ratio * r, norm_of(g)) > margin:
        return None
    names = list_names([name for name, *_ in wrong])
    place, num_processes = f"{names}, step {t + 1}", recording.num_processes
    finding = _explain_multiple(ratio, k, num_processes, len(get_window(recording.steps[t])), place, margin)
    # One number is a multiple of any other: it must be a number that a loop multiplies by
    if len(r) == 1 and finding.cause == "factor" and " = " not in finding.evidence:
        return None
    return dataclasses.replace(finding, evidence=f"{finding.evidence}; all other parameters are right")


def _explain_moves(q: Question) -> Findings:
    """Find out whether gradients are taken at other parameters than the reference's: another process's, or changed ones."""
    weights = [process.weights for process in q.processes if process.names == q.recording.names]
    for rank, own in enumerate(weights):
        if own.shape == weights[0].shape and relative(own - weights[0], norm_of(weights[0])) > PREDICTION_TOLERANCE:
            error = relative(own - weights[0], norm_of(weights[0]))
            evidence = f"they begin with other numbers than those of process 0, relative difference {error:.2g}"
            return [Finding("parameters", f"process {rank}", evidence)]
    if (finding := _compare_moves(q.reference[0].steps[q.t], q.recording.steps[q.t], q.place)) is not None:
        return [finding]
    drifts = [m.drift for process in q.processes if q.t < len(process.steps) for m in get_window(process.steps[q.t])]
    if None in drifts or not np.ptp(drifts or [0.0]) > PREDICTION_TOLERANCE:
        return None
    numbers = ", ".join(f"{drift:.2g}" for drift in drifts[:8])
    evidence = f"parameters are changed between its micro-batches, not by a step: relative changes {numbers}"
    return [Finding("state", q.place, evidence)]


def _explain_modes(q: Question) -> Findings:
    """Find out whether other modules were in training (`module.train()`) than in the reference."""
    own, truth = ({m.training_share for m in list_micro_steps(layout, q.t)} for layout in (q.processes, q.reference))
    if not own or not truth or None in own | truth or own == truth:
        return None
    shares = [" or ".join(f"{share:.0%}" for share in sorted(group)) for group in (own, truth)]
    evidence = (
        f"{shares[0]} of the modules are in training in a micro-batch, {shares[1]} in the reference (train, eval)"
    )
    return [Finding("state", q.place, evidence)]


def _compare_moves(r: Step, g: Step, place: str) -> Finding | None:
    """Find out whether the parameters were changed before a step, and otherwise than in the reference."""
    if g.moved is None or r.moved is None or r.moved.shape != g.moved.shape:
        return None
    error = relative(g.moved - r.moved, norm_of(r.moved))
    if not error > PREDICTION_TOLERANCE:
        return None
    return Finding("state", place, f"parameters were changed before it, not by a step: relative difference {error:.2g}")


def _explain_terms(
    processes: Processes, t: int, true_gradient: np.ndarray, gradient: np.ndarray, margin: float, is_answered: bool
) -> Finding | None:
    """Explain a gradient by the terms of the loss: one is the same in all micro-batches, or has weights of its own.

    Weights that are no multiple for a whole term may belong to a loss that mixes samples: not where the model has answered so.
    """
    place = f"step {t + 1}"
    window = [m for process in processes if t < len(process.steps) for m in get_window(process.steps[t])]
    terms = [m.terms for m in window]
    has_terms = all(own and len(own) == len(terms[0] or []) and any(part.any() for part in own) for own in terms)
    if len(window) < 2 or not has_terms:
        return None
    # Of each term [micro-batches, numbers]
    columns = [np.stack([(own or [])[number] for own in terms]) for number in range(len(terms[0] or []))]
    constant = [c[0] for c in columns if norm_of(c - c[0]) <= PREDICTION_TOLERANCE * norm_of(c) and c.any()]
    difference = gradient - true_gradient
    if constant:
        weights, rest = solve_weights(constant, difference)
        if weights is not None and rest * norm_of(difference) <= margin * norm_of(true_gradient):
            times = ", ".join(f"{weight:.4g}" for weight in weights)
            return Finding(
                "penalty", place, f"a term is the same in all {len(window)} micro-batches: {times} times too much"
            )
    numbers, parts = zip(*[(n, part) for n, column in enumerate(columns) for part in column if part.any()], strict=True)
    true_weights, rest = solve_weights(parts, true_gradient)
    weights, own_rest = solve_weights(parts, gradient)
    if true_weights is None or weights is None or rest > margin or own_rest > margin:
        return None
    if (
        finding := find_schedule([m.factors for m in window], np.array(numbers), columns, true_weights, place)
    ) is not None:
        return finding
    ratios = [(weights / true_weights)[np.array(numbers) == number] for number in range(len(columns))]
    for number, ratio in enumerate(ratios, 1):
        if not are_alike(ratio):
            if is_answered:
                return None
            needed = ", ".join(f"{1 / value:.4g}" for value in ratio[:8])
            return Finding("mean_of_means", place, f"term {number} of {len(ratios)} needs the weights {needed}")
    k, own = max(len(get_window(step)) for step in processes[0].steps), len(get_window(processes[0].steps[t]))
    for number, ratio in enumerate(ratios, 1):
        if abs(ratio.mean() - 1) > WEIGHT_TOLERANCE:
            finding = _explain_multiple(float(ratio.mean()), k, len(processes), own, place, margin)
            return dataclasses.replace(finding, evidence=f"term {number} of {len(ratios)}: {finding.evidence}")
    return None


def find_schedule(
    factors: list[list[float] | None], numbers: np.ndarray, columns: list[np.ndarray], weights: np.ndarray, place: str
) -> Finding | None:
    """Find a term that is multiplied by another number in each micro-batch, none smaller or none larger than the one before it,
    where the reference multiplies it by one number; a mean that is divided by other counts is multiplied by the same one.

    Args:
        factors: of each micro-batch, the numbers of its terms.
        numbers: of each part that is not 0, that of its term; the true weight of each part is one of `weights`.
        columns: of each term its parts [micro-batches, numbers].
    """
    for number, column in enumerate(columns):
        values = np.array([own[number] for own in factors if own and len(own) == len(columns)])
        if len(values) < max(2, len(factors)):
            continue
        true_values = weights[numbers == number] * values[column.any(1)]
        changes, size = np.diff(values), np.abs(values).max()
        rises, falls = changes > WEIGHT_TOLERANCE * size, changes < -WEIGHT_TOLERANCE * size
        if rises.any() != falls.any() and np.ptp(true_values) <= WEIGHT_TOLERANCE * size:
            texts = [
                ", ".join(f"{value * len(values):.4g}" for value in values[:8]),
                f"{true_values.mean() * len(values):.4f}",
            ]
            evidence = (
                f"term {number + 1} of {len(columns)} is multiplied by {texts[0]}, in the reference by {texts[1]}"
            )
            return Finding("ticks_per_micro_step", place, evidence)
    return None


def _explain_multiple(ratio: float, k: int, num_processes: int, window: int, place: str, margin: float) -> Finding:
    """Explain a gradient that is `ratio` times the true one: a window that is not full, or a factor."""
    if 0 < window < k and abs(ratio * k / window - 1) <= margin:
        return Finding("tail", place, f"{ratio:.4g} = {window}/{k} of the gradient")
    factors: dict[str, float] = {"k": k, "N": num_processes, "k N": k * num_processes}
    factors |= {f"1/({name})" if " " in name else f"1/{name}": 1 / value for name, value in factors.items()}
    matching_names = [name for name, value in factors.items() if value != 1 and abs(ratio / value - 1) <= margin]
    return Finding("factor", place, " = ".join([f"{ratio:.6g}", *matching_names[:1]]) + " times the gradient")


def _explain_counts(processes: Processes, t: int, place: str) -> Finding | None:
    """Find different counts of targets in the processes, or in the micro-batches where several terms hide their weights."""
    recording = processes[0]
    counts = [
        [get_counts(recording, m) for m in get_window(process.steps[t])]
        for process in processes
        if t < len(process.steps)
    ]
    if not counts or any(None in window_counts for window_counts in counts):
        return None
    process_counts = [tuple(map(sum, zip(*window_counts, strict=True))) for window_counts in counts]
    if len(set(process_counts)) > 1:
        return Finding("mean_of_means", place, f"targets of the processes: {format_counts(process_counts)}")
    if len(set(counts[0])) > 1 and len(counts[0][0]) > 1:  # several terms: no weights fit them all
        return Finding("mean_of_means", place, f"targets of the micro-batches: {format_counts(counts[0])}")
    return None


def _find_facts(reference: Processes, processes: Processes, evidence: str) -> list[Finding]:
    """Return the faults that the model showed when it was asked, under either layout.

    Padding is no cause where all rows of both have one length.
    """
    facts = [*(processes[0].facts or []), *(reference[0].facts or [])]
    shapes = {row[0] for layout in (processes, reference) for m in list_all_micro_steps(layout) for row in m.rows or []}
    if len(shapes) == 1:
        facts = [fact for fact in facts if fact[0] != "padding"]
    return select_first_findings(Finding(cause, place, evidence) for cause, place in facts)


def _find_changes(processes: Processes, t: int, error: float, place: str) -> list[Finding]:
    """Find changes of the gradient on its way to the optimizer. They may be right, and are a cause if there is no other."""
    step = processes[0].steps[t]
    window = [m for process in processes if t < len(process.steps) for m in get_window(process.steps[t])]
    if any(m.is_hooked for m in window):
        return [
            Finding("gradient_hooks", place, f"in {sum(m.is_hooked for m in window)} of {len(window)} micro-batches")
        ]
    if step.is_clipped_early:
        return [Finding("changed_between", place, "it changes after it is clipped")]
    for q, micro_step in enumerate(step.micro_steps[1:], 2):
        if micro_step.is_touched and not micro_step.is_fresh:
            return [Finding("changed_between", place, f"before micro-batch {q} of {len(step.micro_steps)}")]
    if step.dtype and error < SHORT_DTYPE_ERROR:
        return [Finding("low_precision", place, f"all its numbers fit in {step.dtype}; relative error {error:.2g}")]
    return []


def _explain_by_weights(
    reference: Processes,
    processes: Processes,
    t: int,
    true_gradient: np.ndarray,
    gradient: np.ndarray,
    k: int,
    margin: float,
    place: str,
    changes: list[Finding],
    facts: list[Finding],
) -> list[Finding] | None:
    """Find the cause by the weights of the micro-batches in the true gradient and in this one.

    Returns:
        Findings; None if the gradients are no weighted sums of the micro-batches' parts.
    """
    step = processes[0].steps[t]
    all_micro_steps = [
        (process, m) for process in processes if t < len(process.steps) for m in process.steps[t].micro_steps
    ]
    window = [(process, m) for process in processes if t < len(process.steps) for m in get_window(process.steps[t])]
    num_lost = len(all_micro_steps) - len(window)
    if all(
        m.is_assigned for _, m in window
    ):  # each is a gradient that took the place of the one before, or the sum so far
        replaced, replaced_rest = solve_weights([m.gradient for _, m in window], true_gradient)
        if replaced is not None and replaced_rest <= margin and len(window) > 1 and are_alike(replaced):
            evidence = f"p.grad is assigned anew {len(window)} times, {len(window) - 1} of which are lost"
            return [Finding("emptied_between", place, evidence)]
    true_weights, true_rest = solve_weights([m.part for _, m in window], true_gradient)
    weights, rest = solve_weights([m.part for _, m in window], gradient)
    if true_weights is None or weights is None:
        return None
    if true_rest > margin:
        if num_lost and (dropped := _find_dropped(all_micro_steps, window, true_gradient, gradient, margin, place)):
            return dropped
        if num_lost and compute_rest([m.part for _, m in all_micro_steps], true_gradient) <= margin:
            return [Finding("emptied_between", place, f"{num_lost} of {len(all_micro_steps)} are lost")]
        return _find_penalty(reference[0], processes, t, window, true_gradient, gradient, margin, place)
    if rest > margin:
        evidence = "the sum of its micro-batches is right, what the optimizer gets is not that sum"
        return changes or [Finding("changed_between", place, evidence)]
    largest_weight = np.abs(weights).max()
    if (num_ignored := int((np.abs(weights) <= margin * largest_weight).sum())) and not (
        np.abs(true_weights) <= margin * largest_weight
    ).any():
        if any(m.is_touched and not m.is_fresh for _, m in window):  # made small, and not emptied
            return changes or [Finding("emptied_between", place, f"{num_ignored} of {len(window)} are lost")]
        return [_describe_dropped(processes[0].library, weights, true_weights, margin, place)]
    if (num_again := int((np.abs(true_weights) <= margin * np.abs(true_weights).max()).sum())) and are_alike(weights):
        evidence = f"{num_again} of {len(window)} are in the backward of a later one, too"
        return [Finding("counted_again", place, evidence)]
    if not changes and _counts_down(window, weights / true_weights):
        numbers = ", ".join(f"{weight:.4g}" for weight in (weights / true_weights)[:8])
        return [Finding("counted_again", place, f"micro-batches count {numbers} times: sums so far are added up")]
    if are_alike(true_weights) and not are_alike(weights):
        evidence = ", ".join(f"{weight:.4g}" for weight in (weights / true_weights)[:8])
        return changes or [Finding("changed_between", place, f"micro-batches are weighted by {evidence}")]
    mixed_findings = [finding for finding in facts if finding.cause == "mixed_loss"]
    findings = _explain_weights(window, true_weights / weights, len(get_window(step)), k, place, mixed_findings)
    is_unknown = [finding.evidence.startswith(UNKNOWN_WEIGHTS) for finding in findings] == [True]
    return changes if changes and is_unknown else findings


def _find_dropped(
    all_micro_steps: list[tuple[Recording, MicroStep]],
    window: list[tuple[Recording, MicroStep]],
    true_gradient: np.ndarray,
    gradient: np.ndarray,
    margin: float,
    place: str,
) -> list[Finding] | None:
    """Find micro-batches that are lost, while a sum of the program's own has carried others past an empty `.grad`."""
    parts = [m.part for _, m in all_micro_steps]
    (true_weights, true_rest), (weights, rest) = solve_weights(parts, true_gradient), solve_weights(parts, gradient)
    if true_weights is None or weights is None or max(true_rest, rest) > margin:
        return None
    window_ids = {id(m) for _, m in window}
    is_earlier = np.array([id(m) not in window_ids for _, m in all_micro_steps])
    is_lost, is_no_part = (np.abs(w) <= margin * np.abs(w).max() for w in (weights, true_weights))
    if is_no_part.any() or not is_lost.any() or is_lost[is_earlier].all():
        return None
    return [_describe_dropped(all_micro_steps[0][0].library, weights, true_weights, margin, place)]


def _describe_dropped(
    library: str, weights: np.ndarray, true_weights: np.ndarray, margin: float, place: str
) -> Finding:
    """Say which weights the micro-batches of a window have in its gradient, and which ones they ought to have: 1 in all."""
    total = true_weights.sum()
    weights = np.where(np.abs(weights) <= margin * np.abs(weights).max(), 0.0, weights)
    shares, own = (", ".join(f"{weight:.3g}" for weight in w[:8] / total) for w in (true_weights, weights))
    ought = (
        f"each ought to have {true_weights[0] / total:.3g}"
        if are_alike(true_weights)
        else f"they ought to have {shares}"
    )
    return Finding("dropped_micro_batches", ", ".join(filter(None, [place, library])), f"weights {own}, where {ought}")


def _counts_down(window: list[tuple[Recording, MicroStep]], weights: np.ndarray) -> bool:
    """Tell whether the micro-batches of each process count k, k - 1, ..., 1 times, whatever the last one's weight is."""
    for process in {id(recording): recording for recording, _ in window}.values():
        own = weights[[recording is process for recording, _ in window]]
        if len(own) < 2 or not np.allclose(own / own[-1], np.arange(len(own), 0, -1), rtol=WEIGHT_TOLERANCE, atol=0):
            return False
    return True


def _explain_weights(
    window: list[tuple[Recording, MicroStep]],
    weights: np.ndarray,
    length: int,
    k: int,
    place: str,
    mixed_findings: list[Finding],
) -> list[Finding]:
    """Name the cause for which micro-batches need other weights: weights in proportion to the number that divided each.

    A loss that is a function of a sum over samples (its root, say) needs weights, too, in proportion to no number of targets:
    `mixed_findings` hold what asking the loss has shown.
    """
    counts = [get_counts(recording, m) for recording, m in window]
    weight_text = ", ".join(f"{weight:.4g}" for weight in weights[:8])
    findings = []
    if not are_alike(weights):
        name, numbers = _find_denominator(window, weights)
        if name is None and None not in counts and len(set(counts)) > 1 and len(counts[0]) > 1:
            name, numbers = "targets", counts
        if name is None and mixed_findings:
            return mixed_findings
        if name is None:
            evidence = f"each is divided by a number of its own; they need the weights {weight_text}"
        else:
            evidence = f"{name} of the micro-batches: {format_counts(numbers)}; they need the weights {weight_text}"
        findings.append(Finding("counts" if name and "padding included" in name else "mean_of_means", place, evidence))
    if length < k and abs(np.mean(weights) * length / k - 1) < 0.02:
        findings.append(Finding("tail", place, f"{length} micro-batches are divided by {k}"))
    return findings or [Finding("factor", place, f"{UNKNOWN_WEIGHTS} {weight_text}")]


def _find_denominator(
    window: list[tuple[Recording, MicroStep]], weights: np.ndarray
) -> tuple[str | None, list[tuple[int, ...]]]:
    """Find the number to which the weights are in proportion: its name, None if there is none, and its values."""
    counts = [get_counts(recording, m) for recording, m in window]
    if (
        None not in counts
        and all(len(terms) == 1 for terms in counts)
        and _fits(weights, [terms[0] for terms in counts])
    ):
        return "targets", counts
    for name in sorted(window[0][1].denominators, key=lambda name: not name.startswith("label")):
        numbers = [m.denominators.get(name, 0) for _, m in window]
        if _fits(weights, numbers):
            return name, [(number,) for number in numbers]
    return None, []


def _fits(weights: np.ndarray, numbers: list[int]) -> bool:
    return len(set(numbers)) > 1 and min(numbers) > 0 and are_alike(weights / np.array(numbers))


def _find_penalty(
    reference: Recording,
    processes: Processes,
    t: int,
    window: list[tuple[Recording, MicroStep]],
    true_gradient: np.ndarray,
    gradient: np.ndarray,
    margin: float,
    place: str,
) -> list[Finding] | None:
    """Find out whether the weights themselves, or their signs, make up the difference that the micro-batches leave."""
    recording = processes[0]
    ends = np.cumsum(recording.sizes)[:-1]
    difference = gradient - true_gradient
    for name, vector in (("the weights", recording.weights), ("the signs of the weights", recording.signs)):
        if vector.size != true_gradient.size or not vector.any():
            continue
        # A penalty may concern some parameters only (no biases): take the parts of the sketch that differ.
        parts = [
            (d, v)
            for d, v in zip(np.split(difference, ends), np.split(vector, ends), strict=True)
            if norm_of(d) > margin * norm_of(difference)
        ]
        d, v = np.concatenate([d for d, _ in parts]), np.concatenate([v for _, v in parts])
        if np.count_nonzero(v) > 1 and relative(d - (d @ v / (v @ v)) * v, norm_of(d)) <= max(margin, WEIGHT_TOLERANCE):
            return [Finding("penalty", place, f"{d @ v / (v @ v):.4g} times {name} too much")]
        weights, rest = solve_weights([*(m.part for _, m in window), vector], true_gradient)
        if weights is not None and rest <= margin:
            return [Finding("penalty", place, f"{-weights[-1]:.4g} times {name} too much")]
    return None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One way to explain a gradient.

    Attributes:
        explain: gives findings, or nothing.
        reason: why it has its place among the others.
    """

    explain: Callable[[Question], Findings]
    reason: str


EXPLANATIONS = (
    Explanation(_explain_numbers, "nothing can be computed with numbers that are not finite"),
    Explanation(_explain_copies, "other samples: whatever else differs may follow from them"),
    Explanation(_explain_size, "so do more samples"),
    Explanation(explain_norm, "a norm that counts replicas has a root in it, which no other factor has"),
    Explanation(explain_times, "the size of a dimension of the mesh is a factor that a kind of parallelism explains"),
    Explanation(_explain_gather, "the whole loss and a part of the gradient is nothing else, though a factor may fit"),
    Explanation(
        _explain_num_items, "Trainer's division by a number that the model does not know is what its factor comes of"
    ),
    Explanation(_explain_factor, "one number explains all parameters"),
    Explanation(
        lambda q: _as_list(_explain_parameters(q.recording, q.t, q.true_gradient, q.gradient, q.k, q.margin)),
        "one number explains some parameters, and the others are right",
    ),
    Explanation(
        _explain_moves,
        "gradients at other parameters need no further reason",
    ),
    Explanation(
        lambda q: _explain_by_weights(
            q.reference, q.processes, q.t, q.true_gradient, q.gradient, q.k, q.margin, q.place, q.changes, q.facts
        ),
        "few weights produce all numbers",
    ),
    Explanation(
        _explain_all_terms,
        "so do weights of terms of the loss, of which there are more",
    ),
    Explanation(_explain_foreign_noise, "a model may change its inputs in place by what it draws"),
    Explanation(lambda q: _as_list(explain_rows(q.reference, q.processes, q.t)), "other inputs have other gradients"),
    Explanation(lambda q: _as_list(explain_values(q.reference, q.processes, q.t)), "so do other numbers in other rows"),
    Explanation(_explain_drawing, "so does what collate draws for all rows"),
    Explanation(_explain_facts, "the model showed it when it was asked"),
    Explanation(
        lambda q: q.changes, "a change on the way to the optimizer may be right: it is a cause if there is no other"
    ),
    Explanation(
        lambda q: _as_list(explain_shared(q.reference, q.processes, q.t)), "tensors for all rows may differ rightly"
    ),
    Explanation(_explain_suspects, "a kind of module is less than an answer"),
    Explanation(
        lambda q: [finding, *q.tail] if (finding := _explain_counts(q.processes, q.t, q.place)) else None,
        "unequal counts are no proof that something was divided by them",
    ),
    Explanation(_explain_hooks, "where processes are reduced at once, the effect of hooks is not seen"),
    Explanation(_explain_own_dropouts, "the program's own noise was not asked"),
    Explanation(_explain_frozen, "no gradient at all is a fact, but it may follow from other samples or inputs"),
    Explanation(_explain_modes, "modes may differ rightly, or follow from other samples"),
    Explanation(_explain_constants, "nothing else is left"),
)
"""Explanations in their order: the first that fits is given, so that what follows from one cause is not named as another."""
