"""Compares the steps of a loop under two layouts, and names the cause of each difference.

Everything is linear in the gradients, so sketches serve as well as gradients. Let r be the reference's gradient of a step, g
the other layout's, and d_q the contribution of its q-th micro-batch (of all processes). A cause is named if it produces the
numbers: g = c r with c = k, N, k N, m / k; r = sum_q a_q d_q with a_q in proportion to a number of targets; and so on. Causes
that the numbers do not tell were seen by asking the model (`probe.py`). Nothing is said of a step whose gradient is the
reference's.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from stepaudit.causes import CAUSES, HARMLESS, Finding
from stepaudit.recording import MicroStep, Recording, Step

__all__ = ["CAUSES", "HARMLESS", "Comparison", "Finding", "compare", "find_faults", "list_names"]

PREDICTION_TOLERANCE = 1e-6  # relative; predictions of causes are met within it, or the tolerance if that is larger
WEIGHT_TOLERANCE = 1e-3  # relative; weights that differ less are the same
# Relative. Smaller errors are explained by Adam's division of rounding by rounding (of a gradient that would be 0).
UPDATE_TOLERANCE = 0.1
LOG_TOLERANCE = 1e-3  # relative; logs are rounded
SHORT_DTYPE_ERROR = 0.05  # relative error that 16 bits explain

Processes = list[Recording]


@dataclasses.dataclass
class Comparison:
    """Holds the differences of one layout from the reference.

    Attributes:
        errors: |g - r| / |r| of each step; NaN for a step with other samples.
        ratios: |g| / |r| of each step.
        cosines: of g and r in each step.
        loss_errors: |l - m| / |m| of each step; l and m are the losses that backwards started from, here and in the reference.
        update_errors: like `errors`, of the updates that the optimizer adds to the parameters.
        worst: the parameter with the largest error, relative to |r|, in the worst step; `worst_error`: its error.
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
    """Compare two layouts, and name the causes of what differs.

    Args:
        reference: recordings of all processes of the layout that is taken for the truth, best one process and one micro-batch.
        other: of another layout.
        tolerance: largest relative error of a gradient, or of a learning rate, that is rounding.

    Returns:
        The comparison; with several optimizers, the worst of each number, and the causes of all.
    """
    pairs = [
        (recording, _find_twin(recording, _list_recordings(other[0]))) for recording in _list_recordings(reference[0])
    ]
    if any(twin is None for _, twin in pairs) or len(_list_recordings(other[0])) != len(pairs):
        num_parameters, num_reference_parameters = (
            sum(len(recording.names) for recording in _list_recordings(processes[0]))
            for processes in (other, reference)
        )
        numbers = f"{num_parameters} parameters, {num_reference_parameters} in the reference"
        if num_parameters == num_reference_parameters:
            numbers += "; their names or shapes differ"
        return Comparison([], [], [], [], [], "", 0.0, [Finding("parameters", other[0].model, numbers)])
    comparisons = [
        _compare(
            [_find_twin(recording, _list_recordings(process)) or process for process in reference],
            [_find_twin(twin, _list_recordings(process)) or process for process in other],
            tolerance,
        )
        for recording, twin in pairs
    ]
    # With several optimizers the worst of each number counts.
    result, *others = comparisons
    for comparison in others:
        for name in COLUMNS:
            values = zip(getattr(result, name), getattr(comparison, name), strict=False)
            select = min if name == "cosines" else max
            setattr(result, name, [select(a, b) for a, b in values] or getattr(comparison, name))
        if comparison.worst_error > result.worst_error:
            result.worst, result.worst_error = comparison.worst, comparison.worst_error
    result.findings = _select_first_findings(finding for comparison in comparisons for finding in comparison.findings)
    return result


def _list_recordings(recording: Recording) -> list[Recording]:
    return [recording, *recording.other_recordings]


def _find_twin(recording: Recording, others: list[Recording]) -> Recording | None:
    """Find the recording of the same parameters: by their names, or, where modules around the model differ, by their shapes."""
    for candidate in others:
        if candidate.names == recording.names and candidate.sizes == recording.sizes:
            return candidate
    return next((candidate for candidate in others if candidate.shapes == recording.shapes), None)


def _compare(reference: Processes, other: Processes, tolerance: float) -> Comparison:
    reference_recording, recording = reference[0], other[0]
    findings = find_faults(other)
    causes = {finding.cause for finding in findings}
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    worst, is_first_step_early = ("", -1.0), _is_first_step_early(reference, other)
    for t, (r, g) in enumerate(zip(reference_recording.steps, recording.steps, strict=False)):
        # Clipping can hide a factor, and can itself be wrong: the larger error counts.
        pairs = (r.unclipped_gradient, g.unclipped_gradient), (r.gradient, g.gradient)
        error, true_gradient, gradient = max(
            ((_ratio(b - a, _norm(a)), a, b) for a, b in pairs), key=lambda triple: np.nan_to_num(triple[0], nan=np.inf)
        )
        # A step after a wrong window has other samples; one with the same samples is compared.
        if not error <= tolerance and _has_same_samples(reference, other, t) is False:
            for column in columns.values():
                column.append(float("nan"))
            is_cut_off = other[0].unfinished_micro_steps and t == len(recording.steps) - 1 > 0
            is_shifted = is_first_step_early or any(finding.cause == "last_window" for finding in findings)
            if not is_shifted and not is_cut_off:
                findings.append(_explain_samples(reference, other, t))
            continue
        norm, loss, true_loss = _norm(true_gradient), _compute_loss(other, t), _compute_loss(reference, t)
        columns["errors"].append(error)
        columns["ratios"].append(_ratio(gradient, norm))
        columns["cosines"].append(_ratio(true_gradient @ gradient, norm * _norm(gradient)))
        columns["loss_errors"].append(_ratio(abs(loss - true_loss), abs(true_loss)))
        columns["update_errors"].append(_compute_update_error(r, g, recording.sizes, tolerance))
        worst = max(worst, _find_worst_parameter(recording, gradient - true_gradient, norm), key=lambda pair: pair[1])
        if not error <= tolerance and not causes & {"leak", "not_reduced"}:
            miscount = _find_miscount(other, t)  # explains a factor, but no more
            true_gradient = true_gradient * (miscount[1] / miscount[0] if miscount else 1)
            if not _ratio(gradient - true_gradient, norm) <= tolerance:
                loss_ratio = loss / true_loss if true_loss else 1.0
                findings += _explain_gradient(reference, other, t, true_gradient, gradient, loss_ratio, tolerance)
        rates_agree = np.allclose(r.learning_rates, g.learning_rates, rtol=tolerance, atol=0)
        if (
            rates_agree
            and columns["update_errors"][-1] > UPDATE_TOLERANCE
            and all(error <= tolerance for error in columns["errors"])
        ):
            evidence = f"relative difference {columns['update_errors'][-1]:.2g}"
            findings.append(Finding("update", f"step {t + 1}", evidence))
        if t and g.num_averages > max(1, r.num_averages):
            findings.append(Finding("average", f"step {t + 1}", f"{g.num_averages} times in a step"))
        findings += _find_wrong_log(
            g.logged_losses, true_loss, f"step {t + 1}", len(_get_window(g)), recording.num_processes
        )
    is_wrong = any(finding.cause not in HARMLESS for finding in findings) or len(recording.steps) < len(
        reference_recording.steps
    )
    if is_first_step_early:
        windows = [len(_get_window(step)) for step in recording.steps]
        findings.append(Finding("first_window", "step 1", f"then every {windows[1]}: step % k == 0?"))
        is_wrong = True
    if recording.unfinished_micro_steps and is_wrong and not reference_recording.unfinished_micro_steps:
        findings.append(
            Finding(
                "last_window", "at the end", f"{len(recording.unfinished_micro_steps)} micro-batches without a step"
            )
        )
    elif not recording.unfinished_micro_steps and (num_samples := _count_dropped_samples(reference, other)):
        evidence = f"{num_samples} samples, too few for a whole step"
        findings.append(Finding("dropped", f"step {len(reference_recording.steps)}", evidence))
    elif len(reference_recording.steps) != len(recording.steps) and not is_first_step_early:
        findings.append(Finding("num_steps", "", f"{len(recording.steps)}, not {len(reference_recording.steps)}"))
    findings += _find_wrong_rates(reference_recording, recording, tolerance)
    name, largest = worst
    return Comparison(**columns, worst=name, worst_error=largest, findings=_select_first_findings(findings))


def find_faults(processes: Processes) -> list[Finding]:
    """Find faults that a layout has by itself, whatever other layouts do.

    Args:
        processes: recordings of all its processes.
    """
    findings: list[Finding] = []
    for recordings in (
        [_find_twin(recording, _list_recordings(process)) for process in processes]
        for recording in _list_recordings(processes[0])
    ):
        first, *others = recordings
        for t, step in enumerate(first.steps, 1):
            if step.micro_steps and not any(micro_step.is_fresh for micro_step in step.micro_steps):
                norm = f"norm {_norm(first.steps[t - 2].gradient):.4g}" if t > 1 else "something"
                findings.append(Finding("leak", f"step {t}", f"{norm} at its beginning"))
            for rank, other in enumerate(others, 1):
                if other is None or other.names != first.names or t > len(other.steps):
                    continue
                error = _ratio(other.steps[t - 1].gradient - step.gradient, _norm(step.gradient))
                if error > PREDICTION_TOLERANCE:
                    place = f"step {t}, process {other.process_index or rank}"
                    findings.append(Finding("not_reduced", place, f"relative difference {error:.2g}"))
            num_reductions = sum(micro_step.is_synchronised for micro_step in _get_window(step))
            if num_reductions > 1:
                findings.append(Finding("reductions", f"step {t}", f"{num_reductions} reductions"))
            if (miscount := _find_miscount(processes, t - 1)) is not None:
                num_items, predicted = miscount
                part = f"{predicted / num_items:.4g} times the gradient"
                evidence = f"{num_items:.0f} of which {predicted} are predicted: {part}"
                findings.append(Finding("shifted_labels", f"{first.model}, step {t}", evidence))
        findings += _find_untrained([recording for recording in recordings if recording is not None])
    return _select_first_findings(findings)


def _find_untrained(processes: Processes) -> list[Finding]:
    """Find steps without a label, and a causal model that is never trained to end a text that it is given."""
    first, findings = processes[0], []
    is_causal = _is_causal(first)
    for t in range(len(first.steps)):
        counts = [m.num_shifted if is_causal else m.num_labels for m in _list_micro_steps(processes, t)]
        if counts and not any(counts) and None not in counts:
            findings.append(Finding("no_targets", f"step {t + 1}", f"in all of its {len(counts)} micro-batches"))
    stops = [m.num_stops for m in _list_all_micro_steps(processes)]
    if is_causal and stops and None not in stops:
        num_labels, num_inputs = map(sum, zip(*stops, strict=True))
        if num_inputs and not num_labels:
            evidence = f"in the inputs {num_inputs} times, and in no label"
            findings.append(Finding("untrained_stop", f"{len(first.steps)} steps", evidence))
    return findings


def _is_causal(recording: Recording) -> bool:
    """Tell whether a model predicts the next token, by the name of its class."""
    return "CausalLM" in recording.model or "LMHead" in recording.model


def _select_first_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Select the first finding of each cause."""
    by_cause: dict[str, Finding] = {}
    for finding in findings:
        by_cause.setdefault(finding.cause, finding)
    return list(by_cause.values())


# ------------------------------------------------------------------------------------------------ gradients


def _explain_gradient(
    reference: Processes,
    processes: Processes,
    t: int,
    true_gradient: np.ndarray,
    gradient: np.ndarray,
    loss_ratio: float,
    tolerance: float,
) -> list[Finding]:
    """Explain why the gradient of step t + 1 is not `true_gradient`; `loss_ratio`: its loss, divided by the reference's."""
    recording, step = processes[0], processes[0].steps[t]
    num_processes, k = (
        recording.num_processes,
        max((len(_get_window(step)) for step in recording.steps), default=1) or 1,
    )
    window, place, margin = len(_get_window(step)), f"step {t + 1}", max(PREDICTION_TOLERANCE, 10 * tolerance)
    if not np.isfinite([true_gradient, gradient]).all():
        return [Finding("not_finite", place, "there or in the reference")]
    if _is_copied(processes, t):
        return [Finding("not_sharded", place, f"the micro-batches of {num_processes} processes are the same")]
    if (sizes := _compare_sizes(reference, processes, t)) is not None:
        return [Finding("batch_size", place, f"{sizes[1]} samples, {sizes[0]} in the reference")]
    ratio = float(true_gradient @ gradient / (true_gradient @ true_gradient)) if true_gradient.any() else float("inf")
    is_multiple = _ratio(gradient - ratio * true_gradient, _norm(gradient)) <= margin
    is_mixed = any(finding.cause == "mixed_loss" for finding in _find_facts(reference, processes, place))
    if (
        is_mixed and num_processes > 1 and abs(loss_ratio - 1) <= tolerance
    ):  # it has the samples of other processes, then
        return [Finding("gathered_without_gradient", place, f"{ratio:.4g} times the gradient, and the whole loss")]
    if recording.honours_num_items is False and k * num_processes > 1:
        finding = Finding("ignores_num_items", f"{recording.model}, {place}", f"{ratio:.4g} times the gradient")
        return [finding, *([] if is_multiple else _find_facts(reference, processes, place))]
    if is_multiple:
        return [_explain_multiple(ratio, k, num_processes, window, place, margin)]
    changes = _find_changes(processes, t, _ratio(gradient - true_gradient, _norm(true_gradient)), place)
    if (
        findings := _explain_by_weights(reference, processes, t, true_gradient, gradient, k, margin, place, changes)
    ) is not None:
        return findings
    if (finding := _explain_rows(reference, processes, t)) is not None:
        return [finding]
    # No weights show a tail here; but the losses of micro-batches are much alike.
    is_tail = window < k and abs(loss_ratio - window / k) < (1 - window / k) / 4
    tail = [Finding("tail", place, f"{loss_ratio:.3g} of the loss, near {window}/{k}")] if is_tail else []
    if facts := _find_facts(reference, processes, place):
        return facts + tail
    if changes:
        return changes
    # Where the model could not be asked, name modules that may do it
    suspects = _list_suspects(recording, place) if recording.facts is None and true_gradient.size else []
    if suspects:
        return suspects + tail
    if (finding := _explain_counts(processes, t, place)) is not None:
        return [finding, *tail]
    if recording.hooked_parameters:  # their effect is not seen where processes are reduced at once
        return [Finding("gradient_hooks", place, f"of {list_names(recording.hooked_parameters)}")]
    if recording.dropouts:  # of the program's own kind, which was not asked
        return [Finding("dropout", list_names(recording.dropouts), place), *tail]
    return [Finding("not_a_sum", place, f"{ratio:.4g} times the gradient, and a rest"), *tail]


def _list_suspects(recording: Recording, place: str) -> list[Finding]:
    """List the modules whose kind may make a gradient depend on the cut."""
    kinds = (("batch_norm", recording.batch_norms), ("dropout", recording.dropouts))
    return [Finding(cause, list_names(modules), place) for cause, modules in kinds if modules]


def _explain_multiple(ratio: float, k: int, num_processes: int, window: int, place: str, margin: float) -> Finding:
    """Explain a gradient that is `ratio` times the true one: a window that is not full, or a factor."""
    if window < k and abs(ratio * k / window - 1) <= margin:
        return Finding("tail", place, f"{ratio:.4g} = {window}/{k} of the gradient")
    factors: dict[str, float] = {"k": k, "N": num_processes, "k N": k * num_processes}
    factors |= {f"1/({name})" if " " in name else f"1/{name}": 1 / value for name, value in factors.items()}
    matching_names = [name for name, value in factors.items() if value != 1 and abs(ratio / value - 1) <= margin]
    return Finding("factor", place, " = ".join([f"{ratio:.6g}", *matching_names[:1]]) + " times the gradient")


def _explain_counts(processes: Processes, t: int, place: str) -> Finding | None:
    """Find different counts of targets in the processes, or in the micro-batches where several terms hide their weights."""
    recording = processes[0]
    counts = [
        [_get_counts(recording, m) for m in _get_window(process.steps[t])]
        for process in processes
        if t < len(process.steps)
    ]
    if not counts or any(None in window_counts for window_counts in counts):
        return None
    process_counts = [tuple(map(sum, zip(*window_counts, strict=True))) for window_counts in counts]
    if len(set(process_counts)) > 1:
        return Finding("mean_of_means", place, f"targets of the processes: {_format_counts(process_counts)}")
    if len(set(counts[0])) > 1 and len(counts[0][0]) > 1:  # several terms: no weights fit them all
        return Finding("mean_of_means", place, f"targets of the micro-batches: {_format_counts(counts[0])}")
    return None


def _find_facts(reference: Processes, processes: Processes, evidence: str) -> list[Finding]:
    """Return the faults that the model showed when it was asked, under either layout."""
    facts = [*(processes[0].facts or []), *(reference[0].facts or [])]
    return _select_first_findings(Finding(cause, place, evidence) for cause, place in facts)


def _find_changes(processes: Processes, t: int, error: float, place: str) -> list[Finding]:
    """Find changes of the gradient on its way to the optimizer. They may be right, and are a cause if there is no other."""
    step = processes[0].steps[t]
    window = [m for process in processes if t < len(process.steps) for m in _get_window(process.steps[t])]
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
) -> list[Finding] | None:
    """Find the cause by the weights of the micro-batches in the true gradient and in this one.

    Returns:
        Findings; None if the gradients are no weighted sums of the micro-batches' parts.
    """
    step = processes[0].steps[t]
    all_micro_steps = [
        (process, m) for process in processes if t < len(process.steps) for m in process.steps[t].micro_steps
    ]
    window = [(process, m) for process in processes if t < len(process.steps) for m in _get_window(process.steps[t])]
    num_lost = len(step.micro_steps) - len(_get_window(step))
    true_weights, true_rest = _solve_weights([m.part for _, m in window], true_gradient)
    weights, rest = _solve_weights([m.part for _, m in window], gradient)
    if true_weights is None or weights is None:
        return None
    if true_rest > margin:
        if (
            num_lost
            and (all_weights := _solve_weights([m.part for _, m in all_micro_steps], true_gradient))[0] is not None
            and all_weights[1] <= margin
        ):
            return [Finding("emptied_between", place, f"{num_lost} of {len(step.micro_steps)} are lost")]
        return _find_penalty(reference[0], processes, t, window, true_gradient, gradient, margin, place)
    if rest > margin:
        evidence = "the sum of its micro-batches is right, what the optimizer gets is not that sum"
        return changes or [Finding("changed_between", place, evidence)]
    largest_weight = np.abs(weights).max()
    if (num_ignored := int((np.abs(weights) <= margin * largest_weight).sum())) and not (
        np.abs(true_weights) <= margin * largest_weight
    ).any():
        return [Finding("emptied_between", place, f"{num_ignored} of {len(window)} are lost")]
    if _are_alike(true_weights) and not _are_alike(weights):
        evidence = ", ".join(f"{weight:.4g}" for weight in (weights / true_weights)[:8])
        return changes or [Finding("changed_between", place, f"micro-batches are weighted by {evidence}")]
    mixed_findings = [finding for finding in _find_facts(reference, processes, place) if finding.cause == "mixed_loss"]
    return _explain_weights(window, true_weights / weights, len(_get_window(step)), k, place, mixed_findings)


def _solve_weights(parts: Sequence[np.ndarray | None], gradient: np.ndarray) -> tuple[np.ndarray | None, float]:
    """Solve for the weights a_q for which sum_q a_q d_q comes nearest to a gradient [numbers].

    Returns:
        Weights [micro-batches], None if they are not determined, and the relative rest.
    """
    if not parts or any(part is None for part in parts) or len(parts) + 1 >= np.count_nonzero(gradient):
        return None, float("inf")
    matrix = np.stack(parts).T  # [numbers, micro-batches]
    weights, _, rank, _ = np.linalg.lstsq(matrix, gradient, rcond=1e-10)
    if rank < len(parts):
        return None, float("inf")
    return weights, _ratio(matrix @ weights - gradient, _norm(gradient))


def _are_alike(values: np.ndarray) -> bool:
    return bool(np.ptp(values) <= WEIGHT_TOLERANCE * np.abs(values).max())


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
    counts = [_get_counts(recording, m) for recording, m in window]
    weight_text = ", ".join(f"{weight:.4g}" for weight in weights[:8])
    findings = []
    if not _are_alike(weights):
        name, numbers = _find_denominator(window, weights)
        if name is None and None not in counts and len(set(counts)) > 1 and len(counts[0]) > 1:
            name, numbers = "targets", counts
        if name is None and mixed_findings:
            return mixed_findings
        if name is None:
            evidence = f"each is divided by a number of its own; they need the weights {weight_text}"
        else:
            evidence = f"{name} of the micro-batches: {_format_counts(numbers)}; they need the weights {weight_text}"
        findings.append(Finding("counts" if name and "padding included" in name else "mean_of_means", place, evidence))
    if length < k and abs(np.mean(weights) * length / k - 1) < 0.02:
        findings.append(Finding("tail", place, f"{length} micro-batches are divided by {k}"))
    return findings or [Finding("factor", place, f"the micro-batches need the weights {weight_text}")]


def _find_denominator(
    window: list[tuple[Recording, MicroStep]], weights: np.ndarray
) -> tuple[str | None, list[tuple[int, ...]]]:
    """Find the number to which the weights are in proportion: its name, None if there is none, and its values."""
    counts = [_get_counts(recording, m) for recording, m in window]
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
    return len(set(numbers)) > 1 and min(numbers) > 0 and _are_alike(weights / np.array(numbers))


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
            if _norm(d) > margin * _norm(difference)
        ]
        d, v = np.concatenate([d for d, _ in parts]), np.concatenate([v for _, v in parts])
        if v.any() and _ratio(d - (d @ v / (v @ v)) * v, _norm(d)) <= max(margin, WEIGHT_TOLERANCE):
            return [Finding("penalty", place, f"{d @ v / (v @ v):.4g} times {name} too much")]
        weights, rest = _solve_weights([*(m.part for _, m in window), vector], true_gradient)
        if weights is not None and rest <= margin:
            return [Finding("penalty", place, f"{-weights[-1]:.4g} times {name} too much")]
    return None


def _find_miscount(processes: Processes, t: int) -> tuple[float, int] | None:
    """Return `num_items_in_batch` and the number of labels that a causal model predicts, if that is smaller; else None.

    The first label of a row is never predicted.
    """
    recording = processes[0]
    micro_steps = [m for process in processes if t < len(process.steps) for m in process.steps[t].micro_steps]
    item_numbers = {m.num_items for m in micro_steps}
    if not recording.honours_num_items or not _is_causal(recording) or len(item_numbers) != 1 or None in item_numbers:
        return None
    if any(m.num_shifted is None for m in micro_steps):
        return None
    (num_items,), num_predicted = item_numbers, sum(m.num_shifted for m in micro_steps)
    return (num_items, num_predicted) if num_items > num_predicted else None  # with 1, a loss is a sum


def _compute_update_error(r: Step, g: Step, sizes: list[int], tolerance: float) -> float:
    """Compute the relative error of the update, over those parameters whose gradient is more than rounding."""
    ends = np.cumsum(sizes)[:-1]
    norms = [_norm(part) for part in np.split(r.gradient, ends)]
    is_large = np.repeat([norm > 10 * tolerance * _norm(r.gradient) for norm in norms], sizes)
    return _ratio((g.change - r.change)[is_large], _norm(r.change[is_large]))


def _find_wrong_rates(reference_recording: Recording, recording: Recording, tolerance: float) -> list[Finding]:
    """Find the first step with other learning rates. Schedulers may tick as often as they like: only rates count."""
    for t, (r, g) in enumerate(zip(reference_recording.steps, recording.steps, strict=False)):
        if np.allclose(r.learning_rates, g.learning_rates, rtol=tolerance, atol=0):
            continue
        num_ticks, num_reference_ticks = (
            Counter(step.num_ticks for step in layout.steps[1:]).most_common(1)[0][0] if layout.steps[1:] else 1
            for layout in (recording, reference_recording)
        )
        rates = f"{g.learning_rates[0]:.6g}, not {r.learning_rates[0]:.6g}"
        tick_ratio, k = num_ticks / max(1, num_reference_ticks), max(len(_get_window(step)) for step in recording.steps)
        evidence = f"{num_ticks} ticks per step: {rates}"
        if tick_ratio > 1 and tick_ratio == recording.num_processes:
            return [Finding("ticks_per_process", f"step {t + 1}", evidence)]
        if tick_ratio > 1 and num_ticks in (k, k * recording.num_processes):
            return [Finding("ticks_per_micro_step", f"step {t + 1}", evidence)]
        return [Finding("learning_rate", f"step {t + 1}", rates)]
    return []


def _find_wrong_log(
    logged_losses: list[float], true_loss: float, place: str, k: int, num_processes: int
) -> list[Finding]:
    """Compare the losses that were logged after a step with the step's loss in the reference."""
    wrong_losses = [loss for loss in logged_losses if not abs(loss - true_loss) <= LOG_TOLERANCE * abs(true_loss)]
    if not wrong_losses or not np.isfinite(true_loss):
        return []
    factors = {"k": k, "N": num_processes, "k N": k * num_processes}
    matching_names = [
        name
        for name, value in factors.items()
        if value != 1 and abs(wrong_losses[0] - value * true_loss) <= LOG_TOLERANCE * value * true_loss
    ]
    evidence = f"{wrong_losses[0]:.6g}, not {true_loss:.6g}" + (
        f": {matching_names[0]} times" if matching_names else ""
    )
    return [Finding("logged_loss", place, evidence)]


# ------------------------------------------------------------------------------------------------ samples


def _is_first_step_early(reference: Processes, other: Processes) -> bool:
    """Tell whether the first step has one micro-batch, the second has more, and the first gradient is not the reference's."""
    windows = [len(_get_window(step)) for step in other[0].steps]
    if len(windows) < 2 or not windows[0] == 1 < windows[1]:
        return False
    r, g = reference[0].steps[0], other[0].steps[0]
    return _ratio(g.gradient - r.gradient, _norm(r.gradient)) > PREDICTION_TOLERANCE


def _list_micro_steps(processes: Processes, t: int) -> list[MicroStep]:
    return [m for process in processes if t < len(process.steps) for m in process.steps[t].micro_steps]


def _tally_samples(processes: Processes, t: int, name: str) -> Counter | None:
    """Tally `samples` or `digests` of step t + 1 over all processes; None if some are unknown."""
    micro_steps = _list_micro_steps(processes, t)
    if any(getattr(m, name) is None for m in micro_steps):
        return None
    tally = Counter(sample for m in micro_steps for sample in getattr(m, name))
    return tally or None


def _has_same_samples(reference: Processes, other: Processes, t: int) -> bool | None:
    """Tell whether step t + 1 has the reference's samples; None if that is unknown.

    Samples are the same if their contents are, or their indices: the contents of the same samples may be drawn anew, and the
    same index is another sample in another process's part of the data.
    """
    agreements = []
    for name in ("digests", "samples"):
        reference_tally, tally = _tally_samples(reference, t, name), _tally_samples(other, t, name)
        if reference_tally is not None and tally is not None:
            agreements.append(reference_tally == tally)
    return any(agreements) if agreements else None


def _explain_samples(reference: Processes, other: Processes, t: int) -> Finding:
    place = f"step {t + 1}"
    name = _choose_sample_name(reference, other, t)
    reference_tally, tally = _tally_samples(reference, t, name), _tally_samples(other, t, name)
    if _is_copied(other, t):
        return Finding("not_sharded", place, f"{len(other)} processes compute the same samples")
    if (sizes := _compare_sizes(reference, other, t)) is not None:
        return Finding("batch_size", place, f"{sizes[1]} samples, {sizes[0]} in the reference")
    names_by_digest = {
        d: s for processes in (reference, other) for m in _list_all_micro_steps(processes) for d, s in _pair_digests(m)
    }

    def list_samples(samples: Counter) -> str:
        sample_names = sorted(
            {names_by_digest.get(sample, sample) for sample in samples}, key=lambda name: (isinstance(name, str), name)
        )
        return ", ".join(map(str, sample_names[:5])) + ("..." if len(sample_names) > 5 else "")

    extra_samples, missing_samples = tally - reference_tally, reference_tally - tally
    if not extra_samples:
        return Finding("dropped", place, f"{missing_samples.total()}: {list_samples(missing_samples)}")
    repeated_samples = _tally_uses(other, t, name) - _tally_uses(reference, t, name)
    if repeated_samples and not _tally_uses(reference, t, name) - _tally_uses(other, t, name):
        # A window that never stepped in its epoch comes with the first of the next one, whose samples are early then
        *earlier, window = (len(_get_window(step)) for step in other[0].steps[: t + 1])
        if earlier and window > max(earlier):
            return Finding("last_window", place, f"{window - max(earlier)} micro-batches of the epoch before are in it")
        return Finding(
            "duplicated", place, f"{repeated_samples.total()} more than once: {list_samples(repeated_samples)}"
        )
    return Finding("other_samples", place, f"{extra_samples.total()} of its samples are others")


def _choose_sample_name(reference: Processes, other: Processes, t: int) -> str:
    """Choose how samples are told apart: by their contents, if these are known and were the same ones in earlier steps."""
    agreements = {
        name: [_tally_samples(reference, number, name) == _tally_samples(other, number, name) for number in range(t)]
        for name in ("digests", "samples")
    }
    for name, other_name in (("digests", "samples"), ("samples", "digests")):
        if None in (_tally_samples(reference, t, name), _tally_samples(other, t, name)):
            return other_name
    return "samples" if agreements["samples"] > agreements["digests"] and any(agreements["samples"]) else "digests"


def _count_dropped_samples(reference: Processes, other: Processes) -> int:
    """Count the samples of the reference's last step, if only that step is missing and is smaller than the others; else 0."""
    num_steps = len(other[0].steps)
    if num_steps != len(reference[0].steps) - 1 or not num_steps:
        return 0
    first_size, last_size = _count_samples(reference, 0), _count_samples(reference, num_steps)
    return last_size if first_size and last_size and last_size < first_size else 0


def _list_all_micro_steps(processes: Processes) -> list[MicroStep]:
    return [m for process in processes for step in process.steps for m in step.micro_steps]


def _pair_digests(micro_step: MicroStep) -> list[tuple[str, int]]:
    """Pair digest and index of each sample."""
    if not micro_step.digests or not micro_step.samples or len(micro_step.digests) != len(micro_step.samples):
        return []
    return list(zip(micro_step.digests, micro_step.samples, strict=True))


def _tally_uses(processes: Processes, t: int, name: str) -> Counter:
    return sum((_tally_samples(processes, number, name) or Counter() for number in range(t + 1)), Counter())


def _is_copied(processes: Processes, t: int) -> bool:
    """Tell whether all processes have computed the same samples."""
    if len(processes) < 2:
        return False
    contents = [_tally_samples([process], t, "digests") for process in processes]
    if None not in contents:
        return all(tally == contents[0] for tally in contents)
    parts = [[m.part for m in process.steps[t].micro_steps] if t < len(process.steps) else [] for process in processes]
    if not parts[0] or any(part is None for rank in parts for part in rank) or len({len(rank) for rank in parts}) > 1:
        return False
    return all(
        a.any() and a.shape == b.shape and _norm(a - b) <= 1e-12 * _norm(a)
        for rank in parts[1:]
        for a, b in zip(parts[0], rank, strict=True)
    )


def _compare_sizes(reference: Processes, other: Processes, t: int) -> tuple[int, int] | None:
    """Return the numbers of samples of a step in the reference and here, if one is a multiple of the other; else None."""
    reference_size, size = _count_samples(reference, t), _count_samples(other, t)
    if (
        not reference_size
        or not size
        or reference_size == size
        or max(reference_size, size) % min(reference_size, size)
    ):
        return None
    # A partial window, or one that is cut off, is no other batch size: the first step tells that.
    first_sizes = _count_samples(reference, 0), _count_samples(other, 0)
    return (
        (reference_size, size)
        if first_sizes[0] and first_sizes[1] and first_sizes[0] * size == first_sizes[1] * reference_size
        else None
    )


def _count_samples(processes: Processes, t: int) -> int | None:
    for name in ("digests", "samples"):
        if (tally := _tally_samples(processes, t, name)) is not None:
            return tally.total()
    rows = [m.num_rows for m in _list_micro_steps(processes, t)]
    return None if None in rows else sum(rows)


def _explain_rows(reference: Processes, other: Processes, t: int) -> Finding | None:
    """Find out whether the model was given other rows, of the same samples or where no samples are known."""
    groups = [_list_micro_steps(processes, t) for processes in (reference, other)]
    reference_rows, rows = ([tuple(row) for m in group for row in m.rows or []] for group in groups)
    if not reference_rows or len(reference_rows) != len(rows) or any(m.rows is None for group in groups for m in group):
        return None
    num_unmatched = Counter(name for row in reference_rows for name in set(row[1:]))
    num_others = 0
    for row in rows:
        names = [name for name in dict.fromkeys(row[1:]) if num_unmatched[name] > 0]
        num_others += not names
        for name in names:
            num_unmatched[name] -= 1
    if not num_others:
        return None
    return Finding("other_inputs", f"step {t + 1}", f"{num_others} of {len(rows)} rows are others")


# ------------------------------------------------------------------------------------------------ small things


def list_names(names: list[str]) -> str:
    """List the first three names, and how many more there are.

    >>> list_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _compute_loss(processes: Processes, t: int) -> float:
    """Compute the loss of step t + 1: the sum over the micro-batches, the mean over the processes; NaN if one is unknown."""
    losses = [[m.loss for m in _get_window(process.steps[t])] for process in processes if t < len(process.steps)]
    if any(None in rank_losses for rank_losses in losses):
        return float("nan")
    return float(np.mean([sum(rank_losses) for rank_losses in losses]))


def _get_window(step: Step) -> list[MicroStep]:
    """Return the micro-batches that the step is made of: all since its gradient was empty."""
    start = max((q for q, micro_step in enumerate(step.micro_steps) if micro_step.is_fresh), default=0)
    return step.micro_steps[start:]


def _get_counts(recording: Recording, micro_step: MicroStep) -> tuple[int, ...] | None:
    """Return the numbers of targets of a micro-batch, one per loss term, as far as they can be seen; None if they cannot."""
    if micro_step.counts is not None:
        return tuple(micro_step.counts)
    for count in (
        micro_step.num_shifted if _is_causal(recording) else None,
        micro_step.num_labels,
        micro_step.num_rows,
    ):
        if count is not None:
            return (count,)
    return None


def _format_counts(counts: Sequence[tuple[int, ...]]) -> str:
    return ", ".join("+".join(map(str, terms)) for terms in counts[:8])


def _find_worst_parameter(recording: Recording, difference: np.ndarray, norm: float) -> tuple[str, float]:
    ends = np.cumsum(recording.sizes)
    errors = [_ratio(part, norm) for part in np.split(difference, ends[:-1])]
    number = int(np.argmax(errors))
    return recording.names[number], errors[number]


def _norm(vector: np.ndarray) -> float:
    return float(np.linalg.norm(vector))


def _ratio(value: np.ndarray | float, norm: float) -> float:
    size = _norm(np.asarray(value)) if np.ndim(value) else float(value)
    return size / norm if norm else (0.0 if size == 0 else float("inf"))
