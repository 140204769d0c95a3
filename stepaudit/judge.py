"""Compares what a loop did under two layouts, and names the cause of what differs.

Everything is linear in the gradients, so sketches serve as well as they do. Let r be the reference's gradient of a step, g the
other's, and d_q what its q-th micro-batch (of all processes) contributes. A cause is named because the numbers are what that
cause produces: g = c r with c = k, N, k N, m / k; r = sum_q a_q d_q with a_q in proportion to a number of targets; and so on.
What numbers do not tell was seen by asking the model (`probe.py`). Nothing is said of a step whose gradient is the reference's.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from stepaudit.causes import CAUSES, HARMLESS, Finding
from stepaudit.recording import MicroStep, Recording, Step

__all__ = ["CAUSES", "HARMLESS", "Comparison", "Finding", "alone", "compare", "listed"]

SMALL = 1e-6  # relative; what a cause predicts is met within it, or within the tolerance where that is larger
ALIKE = 1e-3  # relative; weights that differ less are the same
UPDATE = (
    0.1  # relative; below it, Adam's division of rounding by rounding (a gradient that is 0 but for it) explains it
)
LOGGED = 1e-3  # relative; logs are rounded
SHORT = 0.05  # relative error that 16 bits explain

Processes = list[Recording]


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


COLUMNS = ("errors", "ratios", "cosines", "loss_errors", "update_errors")


def compare(reference: Processes, other: Processes, tolerance: float) -> Comparison:
    """What differs, and why.

    Args:
        reference: recordings of all processes of the layout that is taken for the truth, best one process and one micro-batch.
        other: of another layout.
        tolerance: largest relative error of a gradient, or of a learning rate, that is rounding.
    """
    pairs = [(of, _twin(of, _optimizers(other[0]))) for of in _optimizers(reference[0])]
    if any(twin is None for _, twin in pairs) or len(_optimizers(other[0])) != len(pairs):
        ours, true = (sum(len(of.names) for of in _optimizers(processes[0])) for processes in (other, reference))
        numbers = f"{ours} parameters, {true} in the reference"
        if ours == true:
            numbers += "; their names or shapes differ"
        return Comparison([], [], [], [], [], "", 0.0, [Finding("parameters", other[0].model, numbers)])
    found = [
        _compare(
            [_twin(true, _optimizers(of)) or of for of in reference],
            [_twin(twin, _optimizers(of)) or of for of in other],
            tolerance,
        )
        for true, twin in pairs
    ]
    first, *more = found
    for of in more:
        for name in COLUMNS:
            both = zip(getattr(first, name), getattr(of, name), strict=False)
            pick = min if name == "cosines" else max
            setattr(first, name, [pick(a, b) for a, b in both] or getattr(of, name))
        if of.worst_error > first.worst_error:
            first.worst, first.worst_error = of.worst, of.worst_error
    first.findings = _once(finding for of in found for finding in of.findings)
    return first


def _optimizers(recording: Recording) -> list[Recording]:
    return [recording, *recording.others]


def _twin(recording: Recording, others: list[Recording]) -> Recording | None:
    """The recording of the same parameters: by their names, or, where modules around the model differ, by their shapes."""
    for of in others:
        if of.names == recording.names and of.sizes == recording.sizes:
            return of
    return next((of for of in others if of.shapes == recording.shapes), None)


def _compare(reference: Processes, other: Processes, tolerance: float) -> Comparison:
    true, ours = reference[0], other[0]
    findings = alone(other)
    known = {finding.cause for finding in findings}
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    worst, is_first_late = ("", -1.0), _steps_too_soon(reference, other)
    for t, (r, g) in enumerate(zip(true.steps, ours.steps, strict=False)):
        # Clipping can hide a factor, and can itself be wrong: the larger error counts.
        pairs = (r.unclipped, g.unclipped), (r.gradient, g.gradient)
        error, true_gradient, gradient = max(
            ((_relative(b - a, _norm(a)), a, b) for a, b in pairs), key=lambda of: np.nan_to_num(of[0], nan=np.inf)
        )
        # A step after a wrong window has other samples; one with the same samples is compared.
        if not error <= tolerance and _has_same_samples(reference, other, t) is False:
            for column in columns.values():
                column.append(float("nan"))
            if not is_first_late and not (other[0].unfinished and t == len(ours.steps) - 1 > 0):
                findings.append(_other_samples(reference, other, t))
            continue
        norm, loss, true_loss = _norm(true_gradient), _loss(other, t), _loss(reference, t)
        columns["errors"].append(error)
        columns["ratios"].append(_relative(gradient, norm))
        columns["cosines"].append(_relative(true_gradient @ gradient, norm * _norm(gradient)))
        columns["loss_errors"].append(_relative(abs(loss - true_loss), abs(true_loss)))
        columns["update_errors"].append(_update_error(r, g, ours.sizes, tolerance))
        worst = max(worst, _worst_parameter(ours, gradient - true_gradient, norm), key=lambda pair: pair[1])
        if not error <= tolerance and not known & {"leak", "not_reduced"}:
            miscount = _miscount(other, t)  # explains a factor, but no more
            true_gradient = true_gradient * (miscount[1] / miscount[0] if miscount else 1)
            if not _relative(gradient - true_gradient, norm) <= tolerance:
                loss_ratio = loss / true_loss if true_loss else 1.0
                findings += _why(reference, other, t, true_gradient, gradient, loss_ratio, tolerance)
        rates_agree = np.allclose(r.learning_rates, g.learning_rates, rtol=tolerance, atol=0)
        if rates_agree and columns["update_errors"][-1] > UPDATE and all(of <= tolerance for of in columns["errors"]):
            evidence = f"relative difference {columns['update_errors'][-1]:.2g}"
            findings.append(Finding("update", f"step {t + 1}", evidence))
        if t and g.num_averages > max(1, r.num_averages):
            findings.append(Finding("average", f"step {t + 1}", f"{g.num_averages} times in a step"))
        findings += _wrong_log(g.logged, true_loss, f"step {t + 1}", len(_window(g)), ours.num_processes)
    is_wrong = any(finding.cause not in HARMLESS for finding in findings) or len(ours.steps) < len(true.steps)
    if is_first_late:
        windows = [len(_window(step)) for step in ours.steps]
        findings.append(Finding("first_window", "step 1", f"then every {windows[1]}: step % k == 0?"))
        is_wrong = True
    if ours.unfinished and is_wrong and not true.unfinished:
        findings.append(Finding("last_window", "at the end", f"{len(ours.unfinished)} micro-batches without a step"))
    elif not ours.unfinished and (rest := _is_rest_dropped(reference, other)):
        evidence = f"{rest} samples, too few for a whole step"
        findings.append(Finding("dropped", f"step {len(true.steps)}", evidence))
    elif len(true.steps) != len(ours.steps) and not is_first_late:
        findings.append(Finding("num_steps", "", f"{len(ours.steps)}, not {len(true.steps)}"))
    findings += _wrong_rates(true, ours, tolerance)
    return Comparison(*columns.values(), *worst, _once(findings))


def alone(processes: Processes) -> list[Finding]:
    """What is wrong in itself, whatever other layouts do."""
    findings: list[Finding] = []
    for recordings in ([_twin(of, _optimizers(process)) for process in processes] for of in _optimizers(processes[0])):
        first, *others = recordings
        for t, step in enumerate(first.steps, 1):
            if step.micro_steps and not any(micro_step.is_fresh for micro_step in step.micro_steps):
                norm = f"norm {_norm(first.steps[t - 2].gradient):.4g}" if t > 1 else "something"
                findings.append(Finding("leak", f"step {t}", f"{norm} at its beginning"))
            for rank, other in enumerate(others, 1):
                if other is None or other.names != first.names or t > len(other.steps):
                    continue
                error = _relative(other.steps[t - 1].gradient - step.gradient, _norm(step.gradient))
                if error > SMALL:
                    where = f"step {t}, process {other.process_index or rank}"
                    findings.append(Finding("not_reduced", where, f"relative difference {error:.2g}"))
            num_reductions = sum(micro_step.is_synchronised for micro_step in _window(step))
            if num_reductions > 1:
                findings.append(Finding("reductions", f"step {t}", f"{num_reductions} reductions"))
            if (miscount := _miscount(processes, t - 1)) is not None:
                num_items, predicted = miscount
                part = f"{predicted / num_items:.4g} times the gradient"
                evidence = f"{num_items:.0f} of which {predicted} are predicted: {part}"
                findings.append(Finding("shifted_labels", f"{first.model}, step {t}", evidence))
    return _once(findings)


def _once(findings: Iterable[Finding]) -> list[Finding]:
    """Of each cause the first."""
    once: dict[str, Finding] = {}
    for finding in findings:
        once.setdefault(finding.cause, finding)
    return list(once.values())


# ------------------------------------------------------------------------------------------------ gradients


def _why(
    reference: Processes,
    processes: Processes,
    t: int,
    true: np.ndarray,
    gradient: np.ndarray,
    loss_ratio: float,
    tolerance: float,
) -> list[Finding]:
    """Why the gradient of step t + 1 is not `true`; `loss_ratio`: the loss that it belongs to, as a part of the true one."""
    first, step = processes[0], processes[0].steps[t]
    num_processes, k = first.num_processes, max((len(_window(of)) for of in first.steps), default=1) or 1
    window, where, close = len(_window(step)), f"step {t + 1}", max(SMALL, 10 * tolerance)
    if not np.isfinite([true, gradient]).all():
        return [Finding("not_finite", where, "there or in the reference")]
    if _is_copied(processes, t):
        return [Finding("not_sharded", where, f"the micro-batches of {num_processes} processes are the same")]
    if (sizes := _sizes(reference, processes, t)) is not None:
        return [Finding("batch_size", where, f"{sizes[1]} samples, {sizes[0]} in the reference")]
    ratio = float(true @ gradient / (true @ true)) if true.any() else float("inf")
    is_multiple = _relative(gradient - ratio * true, _norm(gradient)) <= close
    if first.honours_num_items is False and k * num_processes > 1:
        ignored = Finding("ignores_num_items", f"{first.model}, {where}", f"{ratio:.4g} times the gradient")
        return [ignored, *([] if is_multiple else _facts(reference, processes, where))]
    if is_multiple:
        if window < k and abs(ratio * k / window - 1) <= close:
            return [Finding("tail", where, f"{ratio:.4g} = {window}/{k} of the gradient")]
        names = {"k": k, "N": num_processes, "k N": k * num_processes}
        names |= {f"1/({name})" if " " in name else f"1/{name}": 1 / value for name, value in names.items()}
        named = [name for name, value in names.items() if value != 1 and abs(ratio / value - 1) <= close]
        return [Finding("factor", where, " = ".join([f"{ratio:.6g}", *named[:1]]) + " times the gradient")]
    changed = _changed(processes, t, _relative(gradient - true, _norm(true)), where)
    if (found := _by_weights(reference, processes, t, true, gradient, k, close, where, changed)) is not None:
        return found
    if (others := _other_rows(reference, processes, t)) is not None:
        return [others]
    # No weights show it here; but the losses of micro-batches are much alike.
    is_tail = window < k and abs(loss_ratio - window / k) < (1 - window / k) / 4
    tail = [Finding("tail", where, f"{loss_ratio:.3g} of the loss, near {window}/{k}")] if is_tail else []
    if facts := _facts(reference, processes, where):
        return facts + tail
    if changed:
        return changed
    if first.facts is None and true.size:  # the model could not be asked: those of its modules that may do it
        suspects = [
            Finding(cause, listed(modules), where)
            for cause, modules in (("batch_norm", first.batch_norms), ("dropout", first.dropouts))
            if modules
        ]
        if suspects:
            return suspects + tail
    counts = [[_counts(first, m) for m in _window(of.steps[t])] for of in processes if t < len(of.steps)]
    if counts and all(None not in of for of in counts):
        of_processes = [tuple(map(sum, zip(*of, strict=True))) for of in counts]
        if len(set(of_processes)) > 1:
            return [Finding("mean_of_means", where, f"targets of the processes: {_shown(of_processes)}"), *tail]
        if len(set(counts[0])) > 1 and len(counts[0][0]) > 1:  # several terms: no weights fit them all
            return [Finding("mean_of_means", where, f"targets of the micro-batches: {_shown(counts[0])}"), *tail]
    if first.hooked:  # what they do is not seen where processes are reduced at once
        return [Finding("gradient_hooks", where, f"of {listed(first.hooked)}")]
    return [Finding("not_a_sum", where, f"{ratio:.4g} times the gradient, and a rest"), *tail]


def _facts(reference: Processes, processes: Processes, where: str) -> list[Finding]:
    """What the model said of itself, under either layout."""
    facts = [*(processes[0].facts or []), *(reference[0].facts or [])]
    return _once(Finding(cause, place, where) for cause, place in facts)


def _changed(processes: Processes, t: int, error: float, where: str) -> list[Finding]:
    """What was seen to be done to the gradient on its way to the optimizer. It may be right: a cause if there is no other."""
    step = processes[0].steps[t]
    window = [m for of in processes if t < len(of.steps) for m in _window(of.steps[t])]
    if any(m.is_hooked for m in window):
        return [
            Finding("gradient_hooks", where, f"in {sum(m.is_hooked for m in window)} of {len(window)} micro-batches")
        ]
    if step.is_clipped_early:
        return [Finding("changed_between", where, "it changes after it is clipped")]
    for q, micro_step in enumerate(step.micro_steps[1:], 2):
        if micro_step.is_touched and not micro_step.is_fresh:
            return [Finding("changed_between", where, f"before micro-batch {q} of {len(step.micro_steps)}")]
    if step.dtype and error < SHORT:
        return [Finding("low_precision", where, f"all its numbers fit in {step.dtype}; relative error {error:.2g}")]
    return []


def _by_weights(
    reference: Processes,
    processes: Processes,
    t: int,
    true: np.ndarray,
    gradient: np.ndarray,
    k: int,
    close: float,
    where: str,
    changed: list[Finding],
) -> list[Finding] | None:
    """The cause that is told by what the true gradient and ours are made of; None if they are no sums of the parts."""
    step = processes[0].steps[t]
    everything = [(of, m) for of in processes if t < len(of.steps) for m in of.steps[t].micro_steps]
    window = [(of, m) for of in processes if t < len(of.steps) for m in _window(of.steps[t])]
    lost = len(step.micro_steps) - len(_window(step))
    needed, rest = _weights([m.part for _, m in window], true)
    given, own_rest = _weights([m.part for _, m in window], gradient)
    if needed is None or given is None:
        return None
    if rest > close:
        if (
            lost
            and (all_needed := _weights([m.part for _, m in everything], true))[0] is not None
            and all_needed[1] <= close
        ):
            return [Finding("emptied_between", where, f"{lost} of {len(step.micro_steps)} are lost")]
        return _penalty(reference[0], processes, t, window, true, gradient, close, where)
    if own_rest > close:
        shown = "the sum of its micro-batches is right, what the optimizer gets is not that sum"
        return changed or [Finding("changed_between", where, shown)]
    largest = np.abs(given).max()
    if (num_lost := int((np.abs(given) <= close * largest).sum())) and not (np.abs(needed) <= close * largest).any():
        return [Finding("emptied_between", where, f"{num_lost} of {len(window)} are lost")]
    if _are_alike(needed) and not _are_alike(given):
        shown = ", ".join(f"{weight:.4g}" for weight in (given / needed)[:8])
        return changed or [Finding("changed_between", where, f"micro-batches are weighted by {shown}")]
    mixed = [of for of in _facts(reference, processes, where) if of.cause == "mixed_loss"]
    return _wrong_weights(window, needed / given, len(_window(step)), k, where, mixed)


def _weights(parts: Sequence[np.ndarray | None], true: np.ndarray) -> tuple[np.ndarray | None, float]:
    """a_q that make sum_q a_q d_q come nearest to a gradient, and the relative rest; None where they are not determined."""
    if not parts or any(part is None for part in parts) or len(parts) + 1 >= np.count_nonzero(true):
        return None, float("inf")
    matrix = np.stack(parts).T
    weights, _, rank, _ = np.linalg.lstsq(matrix, true, rcond=1e-10)
    if rank < len(parts):
        return None, float("inf")
    return weights, _relative(matrix @ weights - true, _norm(true))


def _are_alike(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= ALIKE * np.abs(values).max())


def _wrong_weights(
    window: list[tuple[Recording, MicroStep]],
    weights: np.ndarray,
    length: int,
    k: int,
    where: str,
    mixed: list[Finding],
) -> list[Finding]:
    """Micro-batches need other weights: in proportion to what each was divided by.

    A loss that is a function of a sum over samples (a root of it, say) needs weights, too, in proportion to no number of
    targets: `mixed` is what the loss said of that.
    """
    counts = [_counts(of, m) for of, m in window]
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:8])
    findings = []
    if not _are_alike(weights):
        name, numbers = _denominator(window, weights)
        if name is None and None not in counts and len(set(counts)) > 1 and len(counts[0]) > 1:
            name, numbers = "targets", counts
        if name is None and mixed:
            return mixed
        if name is None:
            evidence = f"each is divided by a number of its own; they need the weights {shown}"
        else:
            evidence = f"{name} of the micro-batches: {_shown(numbers)}; they need the weights {shown}"
        findings.append(Finding("counts" if name and "padding included" in name else "mean_of_means", where, evidence))
    if length < k and abs(np.mean(weights) * length / k - 1) < 0.02:
        findings.append(Finding("tail", where, f"{length} micro-batches are divided by {k}"))
    return findings or [Finding("factor", where, f"the micro-batches need the weights {shown}")]


def _denominator(
    window: list[tuple[Recording, MicroStep]], weights: np.ndarray
) -> tuple[str | None, list[tuple[int, ...]]]:
    """The number that the weights are in proportion to, and its values."""
    counts = [_counts(of, m) for of, m in window]
    if None not in counts and all(len(of) == 1 for of in counts) and _fits(weights, [of[0] for of in counts]):
        return "targets", counts
    for name in sorted(window[0][1].denominators, key=lambda name: not name.startswith("label")):
        numbers = [m.denominators.get(name, 0) for _, m in window]
        if _fits(weights, numbers):
            return name, [(number,) for number in numbers]
    return None, []


def _fits(weights: np.ndarray, numbers: list[int]) -> bool:
    return len(set(numbers)) > 1 and min(numbers) > 0 and _are_alike(weights / np.array(numbers))


def _penalty(
    reference: Recording,
    processes: Processes,
    t: int,
    window: list[tuple[Recording, MicroStep]],
    true: np.ndarray,
    gradient: np.ndarray,
    close: float,
    where: str,
) -> list[Finding] | None:
    """Whether the weights themselves, or their signs, make up what the micro-batches leave."""
    first = processes[0]
    ends = np.cumsum(first.sizes)[:-1]
    difference = gradient - true
    for name, vector in (("the weights", first.weights), ("the signs of the weights", first.signs)):
        if vector.size != true.size or not vector.any():
            continue
        # Of some parameters only (no biases): those where something differs.
        whole = [
            (d, v)
            for d, v in zip(np.split(difference, ends), np.split(vector, ends), strict=True)
            if _norm(d) > close * _norm(difference)
        ]
        d, v = np.concatenate([d for d, _ in whole]), np.concatenate([v for _, v in whole])
        if v.any() and _relative(d - (d @ v / (v @ v)) * v, _norm(d)) <= max(close, ALIKE):
            return [Finding("penalty", where, f"{d @ v / (v @ v):.4g} times {name} too much")]
        weights, rest = _weights([*(m.part for _, m in window), vector], true)
        if weights is not None and rest <= close:
            return [Finding("penalty", where, f"{-weights[-1]:.4g} times {name} too much")]
    return None


def _miscount(processes: Processes, t: int) -> tuple[float, int] | None:
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
    return (num_items, predicted) if num_items > predicted else None  # given 1, a loss is a sum


def _update_error(r: Step, g: Step, sizes: list[int], tolerance: float) -> float:
    """Of what the optimizer adds to those parameters whose gradient is more than rounding."""
    ends = np.cumsum(sizes)[:-1]
    norms = [_norm(of) for of in np.split(r.gradient, ends)]
    kept = np.repeat([norm > 10 * tolerance * _norm(r.gradient) for norm in norms], sizes)
    return _relative((g.change - r.change)[kept], _norm(r.change[kept]))


def _wrong_rates(true: Recording, ours: Recording, tolerance: float) -> list[Finding]:
    """Schedulers may tick as often as they like: only rates count."""
    for t, (r, g) in enumerate(zip(true.steps, ours.steps, strict=False)):
        if np.allclose(r.learning_rates, g.learning_rates, rtol=tolerance, atol=0):
            continue
        ticks, true_ticks = (
            Counter(step.num_ticks for step in of.steps[1:]).most_common(1)[0][0] if of.steps[1:] else 1
            for of in (ours, true)
        )
        rates = f"{g.learning_rates[0]:.6g}, not {r.learning_rates[0]:.6g}"
        more, k = ticks / max(1, true_ticks), max(len(_window(step)) for step in ours.steps)
        evidence = f"{ticks} ticks per step: {rates}"
        if more > 1 and more == ours.num_processes:
            return [Finding("ticks_per_process", f"step {t + 1}", evidence)]
        if more > 1 and ticks in (k, k * ours.num_processes):
            return [Finding("ticks_per_micro_step", f"step {t + 1}", evidence)]
        return [Finding("learning_rate", f"step {t + 1}", rates)]
    return []


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


# ------------------------------------------------------------------------------------------------ samples


def _steps_too_soon(reference: Processes, other: Processes) -> bool:
    """Whether the first step has one micro-batch, and the others more, without the reference's samples."""
    windows = [len(_window(step)) for step in other[0].steps]
    if len(windows) < 2 or not windows[0] == 1 < windows[1]:
        return False
    r, g = reference[0].steps[0], other[0].steps[0]
    return _relative(g.gradient - r.gradient, _norm(r.gradient)) > SMALL


def _micro_steps(processes: Processes, t: int) -> list[MicroStep]:
    return [m for of in processes if t < len(of.steps) for m in of.steps[t].micro_steps]


def _samples(processes: Processes, t: int, name: str) -> Counter | None:
    """`samples` or `digests` of step t + 1 over all processes; None if some are unknown."""
    micro_steps = _micro_steps(processes, t)
    if any(getattr(m, name) is None for m in micro_steps):
        return None
    found = Counter(sample for m in micro_steps for sample in getattr(m, name))
    return found or None


def _has_same_samples(reference: Processes, other: Processes, t: int) -> bool | None:
    """None if that is unknown. Samples are the same when their contents are, or their indices: the contents of the same
    samples may be drawn anew, and the same index is another sample in another process's part of the data."""
    same = []
    for name in ("digests", "samples"):
        true, ours = _samples(reference, t, name), _samples(other, t, name)
        if true is not None and ours is not None:
            same.append(true == ours)
    return any(same) if same else None


def _other_samples(reference: Processes, other: Processes, t: int) -> Finding:
    where = f"step {t + 1}"
    name = _name_of_samples(reference, other, t)
    true, ours = _samples(reference, t, name), _samples(other, t, name)
    if _is_copied(other, t):
        return Finding("not_sharded", where, f"{len(other)} processes compute the same samples")
    if (sizes := _sizes(reference, other, t)) is not None:
        return Finding("batch_size", where, f"{sizes[1]} samples, {sizes[0]} in the reference")
    names = {d: s for of in (reference, other) for m in _all_micro_steps(of) for d, s in _pairs(m)}

    def shown(samples: Counter) -> str:
        known = sorted({names.get(of, of) for of in samples}, key=lambda name: (isinstance(name, str), name))
        return ", ".join(map(str, known[:5])) + ("..." if len(known) > 5 else "")

    more, less = ours - true, true - ours
    if not more:
        return Finding("dropped", where, f"{less.total()}: {shown(less)}")
    twice = _used(other, t, name) - _used(reference, t, name)
    if twice and not _used(reference, t, name) - _used(other, t, name):
        return Finding("duplicated", where, f"{twice.total()} more than once: {shown(twice)}")
    return Finding("other_samples", where, f"{more.total()} of its samples are others")


def _name_of_samples(reference: Processes, other: Processes, t: int) -> str:
    """By what samples are told apart: by their contents, if these are known and were the same ones in earlier steps."""
    agree = {
        name: [_samples(reference, number, name) == _samples(other, number, name) for number in range(t)]
        for name in ("digests", "samples")
    }
    for name, known in (("digests", "samples"), ("samples", "digests")):
        if None in (_samples(reference, t, name), _samples(other, t, name)):
            return known
    return "samples" if agree["samples"] > agree["digests"] and any(agree["samples"]) else "digests"


def _is_rest_dropped(reference: Processes, other: Processes) -> int:
    """Number of samples, where all that is missing is the reference's last step, which has fewer samples than the others."""
    num_steps = len(other[0].steps)
    if num_steps != len(reference[0].steps) - 1 or not num_steps:
        return 0
    first, last = _num_samples(reference, 0), _num_samples(reference, num_steps)
    return last if first and last and last < first else 0


def _all_micro_steps(processes: Processes) -> list[MicroStep]:
    return [m for of in processes for step in of.steps for m in step.micro_steps]


def _pairs(micro_step: MicroStep) -> list[tuple[str, int]]:
    """Digest and index of each sample."""
    if not micro_step.digests or not micro_step.samples or len(micro_step.digests) != len(micro_step.samples):
        return []
    return list(zip(micro_step.digests, micro_step.samples, strict=True))


def _used(processes: Processes, t: int, name: str) -> Counter:
    return sum((_samples(processes, number, name) or Counter() for number in range(t + 1)), Counter())


def _is_copied(processes: Processes, t: int) -> bool:
    """Whether all processes have computed the same samples."""
    if len(processes) < 2:
        return False
    contents = [_samples([of], t, "digests") for of in processes]
    if None not in contents:
        return all(of == contents[0] for of in contents)
    parts = [[m.part for m in of.steps[t].micro_steps] if t < len(of.steps) else [] for of in processes]
    if not parts[0] or any(part is None for of in parts for part in of) or len({len(of) for of in parts}) > 1:
        return False
    return all(
        a.any() and a.shape == b.shape and _norm(a - b) <= 1e-12 * _norm(a)
        for of in parts[1:]
        for a, b in zip(parts[0], of, strict=True)
    )


def _sizes(reference: Processes, other: Processes, t: int) -> tuple[int, int] | None:
    """Numbers of samples of a step in the reference and here, where one is a multiple of the other."""
    true, ours = _num_samples(reference, t), _num_samples(other, t)
    if not true or not ours or true == ours or max(true, ours) % min(true, ours):
        return None
    # A partial window, or one that is cut off, is no other batch size: the first step tells that.
    first = _num_samples(reference, 0), _num_samples(other, 0)
    return (true, ours) if first[0] and first[1] and first[0] * ours == first[1] * true else None


def _num_samples(processes: Processes, t: int) -> int | None:
    for name in ("digests", "samples"):
        if (found := _samples(processes, t, name)) is not None:
            return found.total()
    rows = [m.num_rows for m in _micro_steps(processes, t)]
    return None if None in rows else sum(rows)


def _other_rows(reference: Processes, other: Processes, t: int) -> Finding | None:
    """Whether the model was given other rows of the same samples, or where no samples are known."""
    groups = [_micro_steps(processes, t) for processes in (reference, other)]
    true, ours = ([tuple(row) for m in of for row in m.rows or []] for of in groups)
    if not true or len(true) != len(ours) or any(m.rows is None for of in groups for m in of):
        return None
    left = Counter(name for row in true for name in set(row[1:]))
    num_others = 0
    for row in ours:
        names = [name for name in dict.fromkeys(row[1:]) if left[name] > 0]
        num_others += not names
        for name in names:
            left[name] -= 1
    if not num_others:
        return None
    return Finding("other_inputs", f"step {t + 1}", f"{num_others} of {len(ours)} rows are others")


# ------------------------------------------------------------------------------------------------ small things


def listed(names: list[str]) -> str:
    """The first three, and how many more.

    >>> listed(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _loss(processes: Processes, t: int) -> float:
    """That the gradient of step t + 1 belongs to: added up over the micro-batches, the mean over the processes."""
    losses = [[m.loss for m in _window(of.steps[t])] for of in processes if t < len(of.steps)]
    if any(None in of for of in losses):
        return float("nan")
    return float(np.mean([sum(of) for of in losses]))


def _window(step: Step) -> list[MicroStep]:
    """The micro-batches that the step is made of: those since its gradient was empty."""
    first = max((q for q, micro_step in enumerate(step.micro_steps) if micro_step.is_fresh), default=0)
    return step.micro_steps[first:]


def _counts(recording: Recording, micro_step: MicroStep) -> tuple[int, ...] | None:
    """Targets of a micro-batch, as far as they can be seen: of each loss term, or of the one that there is."""
    if micro_step.counts is not None:
        return tuple(micro_step.counts)
    is_causal = "CausalLM" in recording.model or "LMHead" in recording.model
    for count in (micro_step.num_shifted if is_causal else None, micro_step.num_labels, micro_step.num_rows):
        if count is not None:
            return (count,)
    return None


def _shown(counts: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("+".join(map(str, of)) for of in counts[:8])


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
