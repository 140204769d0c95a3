"""Compares what a loop did under two layouts, and names the cause of what differs.

Everything is linear in the gradients, so sketches serve as well as they do. Let r be the reference's gradient of a step, g the
other's, and d_q what its q-th micro-step added to it. A cause is named because the numbers are what that cause produces:
g = c r with c = k, N, k N, m / k; r = sum_q a_q d_q with a_q in proportion to the number of targets of micro-step q; and so on.
"""

import dataclasses
from collections import Counter

import numpy as np

from recipes.audit.recording import MicroStep, Recording, Step

SMALL = 1e-6  # relative; what a cause predicts is met within it, or within the tolerance where that is larger


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is wrong with a loop.

    Attributes:
        cause: see `CAUSES`.
        where: modules, or steps.
        evidence: the numbers that show it.
    """

    cause: str
    where: str
    evidence: str

    def __str__(self) -> str:
        return f"{CAUSES[self.cause]}: {self.where}: {self.evidence}"


CAUSES = {
    "batch_norm": "statistics of the micro-batch instead of the global batch",
    "dropout": "noise is drawn anew for every cut (with a dropout of 0 the audit sees the rest)",
    "mean_of_means": "mean of the micro-batches' means, though they have different numbers of targets",
    "ignores_num_items": "the model's loss ignores num_items_in_batch",
    "shifted_labels": "num_items_in_batch counts labels that are never predicted",
    "factor": "the gradient is too large or too small by a factor",
    "tail": "a window that is not full is divided by the k of a full one",
    "last_window": "the last window never steps",
    "first_window": "the first step comes after a single micro-step",
    "duplicated": "samples are used twice",
    "dropped": "samples are left out",
    "other_samples": "the samples of a step depend on the layout",
    "other_inputs": "what the model is given in a step depends on the layout (other samples, or masks drawn anew?)",
    "changed_between": "the gradient is changed between micro-steps, before it is complete (clipping?)",
    "emptied_between": "the gradient is emptied between micro-steps: only the last one counts",
    "leak": "the gradient of the step before is still there (zero_grad is missing)",
    "ticks_per_process": "the scheduler ticks once per process in every step (a prepared scheduler)",
    "ticks_per_micro_step": "the scheduler ticks at every micro-step",
    "learning_rate": "the learning rate depends on the layout",
    "reductions": "the gradient is reduced more than once per step (no_sync is missing): exact, but slow",
    "not_reduced": "the processes take different gradients: they are not reduced",
    "num_steps": "another number of steps",
    "rounding": "the rounding is larger than the tolerance",
    "not_finite": "the gradient is not finite",
    "parameters": "other parameters are trained",
    "update": "the optimizer makes another step of the same gradients and rates",
    "logged_loss": "the logged loss is not the loss of the step (the step itself is not concerned)",
    "random_collate": "collate draws: the same samples do not give the same batch",
    "mixed_samples": "a sample's output depends on the other samples of its micro-batch",
    "padding": "a sample's output depends on how far it is padded (is the padding masked?)",
    "counts": "the numbers of targets of samples do not add up to that of their batch (is padding counted?)",
    "not_summed": "the loss is no sum over samples (a mean?)",
    "not_a_sum": "the gradient is no sum of the micro-steps' (samples are mixed, counts are several, or targets are others)",
}
HARMLESS = {"reductions", "logged_loss"}
UPDATE = (
    0.1  # relative; below it, Adam's division of rounding by rounding (a gradient that is 0 but for it) explains it
)
LOGGED = 1e-3  # relative; logs are rounded


@dataclasses.dataclass
class Comparison:
    """Of one layout with the reference.

    Attributes:
        errors: |g - r| / |r| of each step; NaN where the samples are others.
        ratios: |g| / |r|.
        cosines: of g and r.
        loss_errors: |l - m| / |m| of each step, where backwards started from the losses l, in the reference m.
        update_errors: of what the optimizer adds to the parameters, like `errors`.
        worst: the parameter with the largest error, relative to |r|, in the worst step; `worst_error`: that error.
        findings: each cause once.
    """

    errors: list[float]
    ratios: list[float]
    cosines: list[float]
    loss_errors: list[float]
    update_errors: list[float]
    worst: str
    worst_error: float
    findings: list[Finding]

    @property
    def is_exact(self) -> bool:
        return all(finding.cause in HARMLESS for finding in self.findings)


def compare(reference: list[Recording], other: list[Recording], tolerance: float) -> Comparison:
    """What differs, and why.

    Args:
        reference: recordings of all processes of the layout that is taken for the truth, best one process and one micro-step.
        other: of another layout.
        tolerance: largest relative error of a gradient, or of a learning rate, that is rounding.
    """
    true, ours = reference[0], other[0]
    if (true.names, true.sizes) != (ours.names, ours.sizes):
        numbers = f"{len(ours.names)} parameters, {len(true.names)} in the reference"
        return Comparison([], [], [], [], [], "", 0.0, [Finding("parameters", ours.model, numbers)])
    findings = alone(other)
    known = {finding.cause for finding in findings}
    errors, ratios, cosines, loss_errors, update_errors, worst = [], [], [], [], [], ("", -1.0)
    for t, (r, g) in enumerate(zip(true.steps, ours.steps, strict=False)):
        # A step after a wrong window has other samples; one with the same samples is compared.
        difference = _samples(other, t) - _samples(reference, t), _samples(reference, t) - _samples(other, t)
        if any(difference):
            if not known & {"first_window", "last_window"}:
                findings.append(_other_samples(reference, other, t))
            for column in (errors, ratios, cosines, loss_errors, update_errors):
                column.append(float("nan"))
            continue
        # Clipping can hide a factor, and can itself be wrong: the larger error counts.
        pairs = (r.unclipped, g.unclipped), (r.gradient, g.gradient)
        error, true_gradient, gradient = max(
            ((_relative(b - a, _norm(a)), a, b) for a, b in pairs), key=lambda of: np.nan_to_num(of[0], nan=np.inf)
        )
        norm = _norm(true_gradient)
        errors.append(error)
        ratios.append(_relative(gradient, norm))
        cosines.append(_relative(true_gradient @ gradient, norm * _norm(gradient)))
        loss, true_loss = _loss(other, t), _loss(reference, t)
        loss_errors.append(_relative(abs(loss - true_loss), abs(true_loss)))
        update_errors.append(_relative(g.change - r.change, _norm(r.change)))
        name, of_name = _worst_parameter(ours, gradient - true_gradient, norm)
        worst = max(worst, (name, of_name), key=lambda pair: pair[1])
        if not error <= tolerance and not known & {"changed_between", "leak"}:
            miscount = _miscount(other, t)  # explains a factor, but no more
            true_gradient = true_gradient * (miscount[1] / miscount[0] if miscount else 1)
            if not _relative(gradient - true_gradient, norm) <= tolerance:
                others = _other_rows(reference, other, t)
                loss_ratio = loss / true_loss if true_loss else 1.0
                findings += [others] if others else _why(other, t, true_gradient, gradient, loss_ratio, tolerance)
        rates_agree = np.allclose(r.learning_rates, g.learning_rates, rtol=tolerance, atol=0)
        if rates_agree and update_errors[-1] > UPDATE and all(error <= tolerance for error in errors):
            findings.append(Finding("update", f"step {t + 1}", f"relative difference {update_errors[-1]:.2g}"))
        findings += _wrong_log(g.logged, true_loss, f"step {t + 1}", len(_window(g)), ours.num_processes)
    if len(true.steps) != len(ours.steps) and not known & {"last_window", "first_window"}:
        findings.append(Finding("num_steps", "", f"{len(ours.steps)}, not {len(true.steps)}"))
    for t, (r, g) in enumerate(zip(true.steps, ours.steps, strict=False)):
        if not np.allclose(r.learning_rates, g.learning_rates, rtol=tolerance, atol=0):
            if not known & {"ticks_per_process", "ticks_per_micro_step"}:
                rates = f"{g.learning_rates[0]:.6g}, not {r.learning_rates[0]:.6g}"
                findings.append(Finding("learning_rate", f"step {t + 1}", rates))
            break
    once = {finding.cause: finding for finding in reversed(findings)}
    return Comparison(errors, ratios, cosines, loss_errors, update_errors, *worst, list(reversed(once.values())))


def alone(processes: list[Recording]) -> list[Finding]:
    """What is wrong in itself, whatever other layouts do."""
    findings, (first, *others) = [], processes
    windows = [len(_window(step)) for step in first.steps]
    for t, step in enumerate(first.steps, 1):
        begin, *later = step.micro_steps or [None]
        if begin is not None and not begin.is_fresh:
            norm = f"norm {_norm(first.steps[t - 2].gradient):.4g}" if t > 1 else "something"
            findings.append(Finding("leak", f"step {t}", f"{norm} at its beginning"))
        for q, micro_step in enumerate(later, 2):
            if micro_step.is_touched and not micro_step.is_fresh:
                evidence = f"before micro-step {q} of {len(step.micro_steps)}"
                findings.append(Finding("changed_between", f"step {t}", evidence))
        for other in others[: None if t <= min(len(other.steps) for other in processes) else 0]:
            error = _relative(other.steps[t - 1].gradient - step.gradient, _norm(step.gradient))
            if error > SMALL:
                where = f"step {t}, process {other.process_index}"
                findings.append(Finding("not_reduced", where, f"relative difference {error:.2g}"))
        num_reductions = sum(micro_step.is_synchronised for micro_step in _window(step))
        if num_reductions > 1:
            findings.append(Finding("reductions", f"step {t}", f"{num_reductions} reductions"))
        if (miscount := _miscount(processes, t - 1)) is not None:
            num_items, predicted = miscount
            evidence = (
                f"{num_items:.0f} of which {predicted} are predicted: {predicted / num_items:.4g} times the gradient"
            )
            findings.append(Finding("shifted_labels", f"{first.model}, step {t}", evidence))
    if first.unfinished:
        findings.append(Finding("last_window", "at the end", f"{len(first.unfinished)} micro-steps without a step"))
    if len(windows) > 1 and windows[0] == 1 < windows[1]:
        findings.append(Finding("first_window", "step 1", f"then every {windows[1]}: step % k == 0?"))
    ticks = Counter(step.num_ticks for step in first.steps[1:]).most_common(1)
    num_ticks = ticks[0][0] if ticks else 0
    if num_ticks > 1:
        cause = "ticks_per_process" if num_ticks == first.num_processes else "ticks_per_micro_step"
        if num_ticks in (first.num_processes, max(windows)):
            findings.append(Finding(cause, "learning rate", f"{num_ticks} ticks per step"))
    return list({finding.cause: finding for finding in reversed(findings)}.values())[::-1]


def _why(
    processes: list[Recording], t: int, true: np.ndarray, gradient: np.ndarray, loss_ratio: float, tolerance: float
) -> list[Finding]:
    """Why the gradient of step t + 1 is not `true`; `loss_ratio`: the loss that it belongs to, as a part of the true one."""
    first, step = processes[0], processes[0].steps[t]
    num_processes, k = first.num_processes, max(len(_window(step)) for step in first.steps)
    window, where, close = len(_window(step)), f"step {t + 1}", max(SMALL, 10 * tolerance)
    if not np.isfinite([true, gradient]).all():
        return [Finding("not_finite", where, "there or in the reference")]
    ratio = float(true @ gradient / (true @ true))
    if window < len(step.micro_steps):
        return [
            Finding("emptied_between", where, f"{len(step.micro_steps) - window} of {len(step.micro_steps)} are lost")
        ]
    is_multiple = _relative(gradient - ratio * true, _norm(gradient)) <= close
    suspects = [
        Finding(cause, listed(modules), where)
        for cause, modules in (("batch_norm", first.batch_norms), ("dropout", first.dropouts))
        if modules and not is_multiple
    ]
    if first.honours_num_items is False and k * num_processes > 1:
        return [Finding("ignores_num_items", f"{first.model}, {where}", f"{ratio:.4g} times the gradient"), *suspects]
    if is_multiple:
        if window < k and abs(ratio * k / window - 1) <= close:
            return [Finding("tail", where, f"{ratio:.4g} = {window}/{k} of the gradient")]
        names = {"k": k, "N": num_processes, "k N": k * num_processes}
        names |= {f"1/({name})" if " " in name else f"1/{name}": 1 / value for name, value in names.items()}
        named = [name for name, value in names.items() if value != 1 and abs(ratio / value - 1) <= close]
        return [Finding("factor", where, " = ".join([f"{ratio:.6g}", *named[:1]]) + " times the gradient")]
    if num_processes == 1 and window > 1:
        weights, residual = _weights(step, true)
        if residual <= close:
            return _wrong_weights(first, step, weights, k, where)
    # No weights show it here; but the losses of micro-steps are much alike.
    is_tail = abs(loss_ratio - window / k) < (1 - window / k) / 4
    tail = [Finding("tail", where, f"{loss_ratio:.3g} of the loss, near {window}/{k}")] if is_tail else []
    if suspects:
        return suspects + tail
    counts = [[_counts(first, m) for m in _window(of.steps[t])] for of in processes]
    if all(None not in of for of in counts):
        of_processes = [tuple(map(sum, zip(*of, strict=True))) for of in counts]
        if len(set(of_processes)) > 1:
            return [Finding("mean_of_means", where, f"targets of the processes: {_shown(of_processes)}"), *tail]
        if len(set(counts[0])) > 1 and len(counts[0][0]) > 1:  # several terms: no weights fit them all
            return [Finding("mean_of_means", where, f"targets of the micro-steps: {_shown(counts[0])}"), *tail]
    return [Finding("not_a_sum", where, f"{ratio:.4g} times the gradient, and a rest"), *tail]


def listed(names: list[str]) -> str:
    """The first three, and how many more.

    >>> listed(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _weights(step: Step, true: np.ndarray) -> tuple[np.ndarray, float]:
    """a_q that make sum_q a_q d_q come nearest to the true gradient, and the relative rest."""
    sums = np.stack([micro_step.gradient for micro_step in _window(step)])
    parts = np.diff(sums, axis=0, prepend=0)
    weights, *_ = np.linalg.lstsq(parts.T, true, rcond=None)
    return weights, _relative(parts.T @ weights - true, _norm(true))


def _wrong_weights(recording: Recording, step: Step, weights: np.ndarray, k: int, where: str) -> list[Finding]:
    counts = [_counts(recording, micro_step) for micro_step in _window(step)]
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:8])
    findings = []
    if len(set(counts)) > 1 and None not in counts:
        evidence = f"targets of the micro-steps: {_shown(counts)}; they need the weights {shown}"
        findings.append(Finding("mean_of_means", where, evidence))
    if len(weights) < k and abs(np.mean(weights) * len(weights) / k - 1) < 0.02:
        findings.append(Finding("tail", where, f"{len(weights)} micro-steps are divided by {k}"))
    return findings or [Finding("factor", where, f"the micro-steps need the weights {shown}")]


def _miscount(processes: list[Recording], t: int) -> tuple[float, int] | None:
    """`num_items_in_batch`, and the labels that a causal model predicts, if these are fewer: the first of a row is none."""
    first = processes[0]
    is_causal = "CausalLM" in first.model or "LMHead" in first.model
    micro_steps = [m for of in processes if t < len(of.steps) for m in of.steps[t].micro_steps]
    given = {m.num_items for m in micro_steps}
    if not first.honours_num_items or not is_causal or len(given) != 1 or None in given:
        return None
    if any(m.num_shifted is None for m in micro_steps):
        return None
    (num_items,), predicted = given, sum(m.num_shifted for m in micro_steps)
    return (num_items, predicted) if num_items != predicted else None


def _wrong_log(logged: list[float], true: float, where: str, k: int, num_processes: int) -> list[Finding]:
    """Losses that were logged after a step, beside the step's loss in the reference."""
    wrong = [loss for loss in logged if not abs(loss - true) <= LOGGED * abs(true)]
    if not wrong or not np.isfinite(true):
        return []
    names = {"k": k, "N": num_processes, "k N": k * num_processes}
    named = [
        name for name, value in names.items() if value != 1 and abs(wrong[0] - value * true) <= LOGGED * value * true
    ]
    evidence = f"{wrong[0]:.6g}, not {true:.6g}" + (f": {named[0]} times" if named else "")
    return [Finding("logged_loss", where, evidence)]


def _loss(processes: list[Recording], t: int) -> float:
    """That the gradient of step t + 1 belongs to: added up over the micro-steps, the mean over the processes."""
    losses = [[m.loss for m in _window(of.steps[t])] for of in processes if t < len(of.steps)]
    if any(None in of for of in losses):
        return float("nan")
    return float(np.mean([sum(of) for of in losses]))


def _window(step: Step) -> list[MicroStep]:
    """The micro-steps that the step is made of: those since its gradient was empty."""
    first = max((q for q, micro_step in enumerate(step.micro_steps) if micro_step.is_fresh), default=0)
    return step.micro_steps[first:]


def _counts(recording: Recording, micro_step: MicroStep) -> tuple[int, ...] | None:
    """Targets of a micro-step, as far as they can be seen: of each loss term, or of the one that there is."""
    if micro_step.counts is not None:
        return tuple(micro_step.counts)
    is_causal = "CausalLM" in recording.model or "LMHead" in recording.model
    for count in (micro_step.num_shifted if is_causal else None, micro_step.num_labels, micro_step.num_rows):
        if count is not None:
            return (count,)
    return None


def _shown(counts: list[tuple[int, ...]]) -> str:
    return ", ".join("+".join(map(str, of)) for of in counts[:8])


def _samples(processes: list[Recording], t: int) -> Counter:
    """Samples of step t + 1 over all processes; empty if they are unknown."""
    micro_steps = [m for of in processes if t < len(of.steps) for m in of.steps[t].micro_steps]
    if any(m.samples is None for m in micro_steps):
        return Counter()
    return Counter(sample for m in micro_steps for sample in m.samples)


def _other_samples(reference: list[Recording], other: list[Recording], t: int) -> Finding:
    more, less = _samples(other, t) - _samples(reference, t), _samples(reference, t) - _samples(other, t)
    if not more:
        shown = ", ".join(map(str, sorted(less)[:5]))
        return Finding("dropped", f"step {t + 1}", f"{less.total()}: {shown}{'...' if less.total() > 5 else ''}")
    twice = _used(other, t) - _used(reference, t)
    if twice and not _used(reference, t) - _used(other, t):
        shown = ", ".join(map(str, sorted(twice)[:5]))
        return Finding("duplicated", f"step {t + 1}", f"{twice.total()} more than once: {shown}...")
    return Finding("other_samples", f"step {t + 1}", f"{more.total()} of its samples are others")


def _other_rows(reference: list[Recording], other: list[Recording], t: int) -> Finding | None:
    """Whether the model was given other rows, where no samples are known, and padding does not change the rows."""
    micro_steps = [
        [m for of in processes if t < len(of.steps) for m in of.steps[t].micro_steps]
        for processes in (reference, other)
    ]
    if any(m.samples is not None or not m.rows for of in micro_steps for m in of):
        return None
    if len({shape for of in micro_steps for m in of for shape, _ in m.rows}) > 1:
        return None
    true, ours = (Counter(name for m in of for _, name in m.rows) for of in micro_steps)
    if true == ours:
        return None
    return Finding("other_inputs", f"step {t + 1}", f"{(ours - true).total()} of {ours.total()} rows are others")


def _used(processes: list[Recording], t: int) -> Counter:
    return sum((_samples(processes, number) for number in range(t + 1)), Counter())


def _worst_parameter(recording: Recording, difference: np.ndarray, norm: float) -> tuple[str, float]:
    ends = np.cumsum(recording.sizes)
    errors = [_relative(part, norm) for part in np.split(difference, ends[:-1])]
    number = int(np.argmax(errors))
    return recording.names[number], errors[number]


def _norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def _relative(value: np.ndarray | float, norm: float) -> float:
    size = _norm(value) if np.ndim(value) else float(value)
    return size / norm if norm else (0.0 if size == 0 else float("inf"))
