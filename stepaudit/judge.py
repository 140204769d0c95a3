"""Compares the steps of a loop under two layouts, and names the cause of each difference.

Everything is linear in the gradients, so sketches serve as well as gradients. `explain.py` has the causes of a gradient,
`samples.py` those of other samples. Nothing is said of a step whose gradient is the reference's.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np

from stepaudit.alignment import align
from stepaudit.causes import CAUSES, HARMLESS, Finding, list_names, select_first_findings
from stepaudit.explain import Question, explain_gradient
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.samples import (
    PREDICTION_TOLERANCE,
    count_dropped_samples,
    explain_samples,
    has_as_many_in_steps,
    has_fewer_samples,
    has_same_samples,
    is_first_step_early,
)
from stepaudit.together import find_reported_norm, put_together
from stepaudit.vectors import norm_of, relative
from stepaudit.windows import Processes, compute_loss, get_window, is_causal, list_all_micro_steps, list_micro_steps

__all__ = ["CAUSES", "HARMLESS", "Comparison", "Finding", "compare", "find_faults"]

# Relative. Smaller errors are explained by Adam's division of rounding by rounding (of a gradient that would be 0).
UPDATE_TOLERANCE = 0.1
AVERAGE_TOLERANCE = 0.01  # relative, of the change of an average since the first step
LOG_TOLERANCE = 1e-3  # relative; logs are rounded
LOG_ROUNDING = 1e-6  # of terms that cancel, as advantages do
# Causes that come of asking the model, or of knowing no other one: less than one that produces the numbers of a step.
ASKED = {"not_a_sum", "mixed_samples", "mixed_loss", "padding", "batch_norm", "dropout", "state", "expert_balance"}
# Where samples are others, so are their losses.
INPUTS = {
    "other_samples",
    "other_inputs",
    "random_collate",
    "batch_size",
    "duplicated",
    "dropped",
    "not_sharded",
    "num_steps",
}
COLUMNS = ("errors", "ratios", "cosines", "loss_errors", "update_errors")


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
        num_unfinished: micro-batches that ended in no step of an optimizer that was seen, under either layout.
    """

    errors: list[float]
    ratios: list[float]
    cosines: list[float]
    loss_errors: list[float]
    update_errors: list[float]
    worst: str
    worst_error: float
    findings: list[Finding]
    num_unfinished: int = 0

    @property
    def is_exact(self) -> bool:
        return all(finding.is_harmless for finding in self.findings)


def compare(reference: Processes, other: Processes, tolerance: float) -> Comparison:
    """Compare two layouts, and name the causes of what differs.

    Args:
        reference: recordings of all processes of the layout that is taken for the truth, best one process and one micro-batch.
        other: of another layout.
        tolerance: largest relative error of a gradient, or of a learning rate, that is rounding.

    Returns:
        The comparison; with several optimizers, the worst of each number, and the causes of all.
    """
    reference, _ = put_together(reference, reference)
    other, said = put_together(reference, other)
    if any(finding.cause == "parameters" for finding in said):
        return Comparison([], [], [], [], [], "", 0.0, said)
    pairs = _pair_recordings(_list_recordings(reference[0]), _list_recordings(other[0]))
    if any(twin is None for _, twin in pairs) or len(_list_recordings(other[0])) != len(pairs):
        num_parameters, num_reference_parameters = (
            sum(len(recording.names) for recording in _list_recordings(processes[0]))
            for processes in (other, reference)
        )
        numbers = f"{num_parameters} parameters, {num_reference_parameters} in the reference"
        if num_parameters == num_reference_parameters:
            numbers += "; their names or shapes differ"
        return Comparison([], [], [], [], [], "", 0.0, [Finding("parameters", other[0].model, numbers)])
    if idle := [pair for pair in pairs if _is_idle(*pair) or _is_idle(*pair[::-1])]:
        recording = idle[0][0]
        where = "no step takes them" + ("" if recording.steps else ", in the reference")
        return Comparison([], [], [], [], [], "", 0.0, [Finding("parameters", list_names(recording.names), where)])
    for recording, twin in pairs:
        error = relative(twin.weights - recording.weights, norm_of(recording.weights))
        has_moved = recording.has_moved or twin.has_moved  # then a resumed run begins elsewhere, and rightly so
        if not has_moved and error > PREDICTION_TOLERANCE:  # no gradient says anything then
            evidence = f"they begin with other numbers, relative difference {error:.2g}: is the program seeded?"
            return Comparison([], [], [], [], [], "", 0.0, [Finding("parameters", twin.model, evidence)])
    comparisons = [
        _compare(
            [_find_same(recording, reference[0], process) for process in reference],
            [_find_same(twin, other[0], process) for process in other],
            tolerance,
            said,
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
        result.num_unfinished = max(result.num_unfinished, comparison.num_unfinished)
        if comparison.worst_error > result.worst_error:
            result.worst, result.worst_error = comparison.worst, comparison.worst_error
    result.findings = select_first_findings(finding for comparison in comparisons for finding in comparison.findings)
    return result


def _list_recordings(recording: Recording) -> list[Recording]:
    return [recording, *recording.other_recordings]


def _is_idle(recording: Recording, other: Recording) -> bool:
    """Tell whether no step takes a layout's parameters, after two times the samples of a step of the other layout."""
    if recording.steps or not other.steps:
        return False
    counts = [
        sum(m.num_rows or 0 for m in micro_steps)
        for micro_steps in (recording.unfinished_micro_steps, other.steps[0].micro_steps)
    ]
    return counts[0] >= 2 * counts[1] > 0


def _list_unfinished(recording: Recording) -> list[MicroStep]:
    """List the micro-batches behind the last step, unless a step might have come."""
    return [] if recording.is_cut_off else recording.unfinished_micro_steps


def _pair_recordings(recordings: list[Recording], others: list[Recording]) -> list[tuple[Recording, Recording | None]]:
    """Pair the recordings of two layouts by their parameters, each once: a program may build the same model again."""
    remaining, pairs = list(others), []
    for recording in recordings:
        twin = _find_twin(recording, remaining)
        remaining = [other for other in remaining if other is not twin]
        pairs.append((recording, twin))
    return pairs


def _is_vague(finding: Finding) -> bool:
    """Tell whether a finding explains little: the model was asked, or a factor is no number that a loop multiplies by."""
    return finding.cause in ASKED or (finding.cause == "factor" and " = " not in finding.evidence)


def _find_same(recording: Recording, first: Recording, process: Recording) -> Recording:
    """Find the recording of another process that is of the same parameters as one of the first process; else its largest."""
    if first is process:
        return recording
    pairs = _pair_recordings(_list_recordings(first), _list_recordings(process))
    return next((twin for own, twin in pairs if own is recording and twin is not None), process)


def _find_twin(recording: Recording, others: list[Recording]) -> Recording | None:
    """Find the recording of the same parameters: by their names, or, where modules around the model differ, by their shapes."""
    for candidate in others:
        if candidate.names == recording.names and candidate.sizes == recording.sizes:
            return candidate
    return next((candidate for candidate in others if candidate.shapes == recording.shapes), None)


def _compare(reference: Processes, other: Processes, tolerance: float, said: Sequence[Finding] = ()) -> Comparison:
    is_short, findings = has_fewer_samples(reference, other), [*said, *find_faults(other)]
    reference, other, shifts, num_before = align(reference, other)
    reference_recording, recording = reference[0], other[0]
    findings += shifts
    alone, causes = list(findings), {finding.cause for finding in findings}
    columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
    worst, is_early = ("", -1.0), is_first_step_early(reference, other)
    balanced: list[int] = []  # steps whose rate makes up for a factor of the gradient
    for t, (r, g) in enumerate(zip(reference_recording.steps, recording.steps, strict=False)):
        # Clipping can hide a factor, and can itself be wrong: the larger error counts.
        pairs = (r.unclipped_gradient, g.unclipped_gradient), (r.gradient, g.gradient)
        error, true_gradient, gradient = max(
            ((relative(b - a, norm_of(a)), a, b) for a, b in pairs),
            key=lambda triple: np.nan_to_num(triple[0], nan=np.inf),
        )
        # A step after a wrong window has other samples; one with the same samples is compared.
        if not error <= tolerance and has_same_samples(reference, other, t) is False:
            for column in columns.values():
                column.append(float("nan"))
            is_cut_off = _list_unfinished(other[0]) and t == len(recording.steps) - 1 > 0
            is_shifted = is_early or any(finding.cause == "last_window" for finding in findings)
            is_named = any(finding.cause in INPUTS for finding in findings)  # from then on samples may be others
            if not is_shifted and not is_cut_off and not is_named:
                findings.append(explain_samples(reference, other, t))
            continue
        norm, loss, true_loss = norm_of(true_gradient), compute_loss(other, t), compute_loss(reference, t)
        columns["errors"].append(error)
        columns["ratios"].append(relative(gradient, norm))
        columns["cosines"].append(relative(true_gradient @ gradient, norm * norm_of(gradient)))
        columns["loss_errors"].append(relative(abs(loss - true_loss), abs(true_loss)))
        columns["update_errors"].append(_compute_update_error(r, g, recording.sizes, tolerance))
        worst = max(worst, _find_worst_parameter(recording, gradient - true_gradient, norm), key=lambda pair: pair[1])
        averages = _find_wrong_average(reference_recording, recording, t) if t < num_before else []
        findings += averages
        if not error <= tolerance and not averages and not causes & {"leak", "not_reduced"}:
            miscount = _find_miscount(other, t)  # explains a factor, but no more
            true_gradient = true_gradient * (miscount[1] / miscount[0] if miscount else 1)
            if not relative(gradient - true_gradient, norm) <= tolerance:
                loss_ratio = loss / true_loss if true_loss else 1.0
                question = Question(reference, other, t, true_gradient, gradient, loss_ratio, tolerance)
                if columns["update_errors"][-1] <= UPDATE_TOLERANCE / 100 and _is_balanced(r, g, question):
                    balanced.append(t)
                    continue
                # A fault that an earlier step's numbers have named is not another one here
                is_named = any(not finding.is_harmless for finding in findings)
                is_fed_wrong = any(
                    finding.cause in INPUTS for finding in findings
                )  # from then on samples may be others
                known = [f for f in explain_gradient(question) if not (is_named and _is_vague(f))]
                findings += [f for f in known if not (is_fed_wrong and f.cause in INPUTS)]
        if error <= tolerance and recording.axes:
            norms = find_reported_norm(g, recording, f"step {t + 1}") or []
            findings += [dataclasses.replace(finding, is_harmless=True) for finding in norms]
        if (
            t < num_before  # behind it the moments are others
            and _rates_agree(r, g, tolerance)
            and columns["update_errors"][-1] > UPDATE_TOLERANCE
            and all(error <= tolerance for error in columns["errors"])
        ):
            evidence = f"relative difference {columns['update_errors'][-1]:.2g}"
            findings.append(Finding("update", f"step {t + 1}", evidence))
        if not {finding.cause for finding in findings} & INPUTS:
            place, k = f"step {t + 1}", len(get_window(g))
            findings += _find_wrong_log(g.logged_losses, true_loss, place, k, recording.num_processes)
        if recording.has_moved and not (error <= tolerance and _rates_agree(r, g, tolerance)):
            break  # later steps are taken from other parameters
    is_wrong = any(not finding.is_harmless for finding in findings)
    # Where steps were left out, or samples were, the end follows from that
    if not (shifts or (is_wrong and is_short)):
        findings += _find_wrong_end(reference, other, is_early, is_wrong)
    if balanced:
        evidence = "the gradient times a factor, and the rate divided by it: the update is the same"
        findings.append(Finding("factor", f"step {balanced[0] + 1}", evidence, is_harmless=True))
    is_all_balanced = len(balanced) == len(recording.steps) > 0
    truth, own = (dataclasses.replace(r, steps=r.steps[:num_before]) for r in (reference_recording, recording))
    wrong_rates = [] if is_all_balanced else _find_wrong_rates(truth, own, tolerance)
    findings += wrong_rates or _find_wrong_options(truth, own, tolerance)
    name, largest = worst
    num_unfinished = max(len(_list_unfinished(recording)), len(_list_unfinished(reference_recording)))
    if any(finding.cause not in {"not_a_sum"} | HARMLESS for finding in findings):
        findings = [finding for finding in findings if finding.cause != "not_a_sum"]
    findings = _leave_out_followers(select_first_findings(findings), alone)
    return Comparison(**columns, worst=name, worst_error=largest, findings=findings, num_unfinished=num_unfinished)


def _leave_out_followers(findings: list[Finding], alone: Sequence[Finding]) -> list[Finding]:
    """Leave out what follows from another number of samples in a step, but not what a layout shows by itself (`alone`)."""
    if not any(finding.cause == "batch_size" for finding in findings):
        return findings
    return [finding for finding in findings if finding.cause == "batch_size" or finding in alone]


def _find_wrong_end(reference: Processes, other: Processes, is_early: bool, is_wrong: bool) -> list[Finding]:
    """Find out why there are more steps, or fewer, or micro-batches behind the last one; `is_wrong`: steps differ already."""
    recording, steps, true_steps = other[0], other[0].steps, reference[0].steps
    if is_early:  # what is left at the end follows from it
        return [Finding("first_window", "step 1", f"then every {len(get_window(steps[1]))}: step % k == 0?")]
    num_left = len(_list_unfinished(recording))
    is_lost = len(steps) < len(true_steps) or (is_wrong and not has_as_many_in_steps(reference, other))
    if num_left and is_lost and not _list_unfinished(reference[0]):
        return [Finding("last_window", "at the end", f"{num_left} micro-batches without a step")]
    if not num_left and (num_samples := count_dropped_samples(reference, other)):
        return [Finding("dropped", f"step {len(true_steps)}", f"{num_samples} samples, too few for a whole step")]
    return [Finding("num_steps", "", f"{len(steps)}, not {len(true_steps)}")] if len(steps) != len(true_steps) else []


def find_faults(processes: Processes) -> list[Finding]:
    """Find faults that a layout has by itself, whatever other layouts do.

    Args:
        processes: recordings of all its processes.
    """
    findings: list[Finding] = []
    for recordings in (
        [_find_same(recording, processes[0], process) for process in processes]
        for recording in _list_recordings(processes[0])
    ):
        first, *others = recordings
        for t, step in enumerate(first.steps, 1):
            if step.micro_steps and not any(micro_step.is_fresh for micro_step in step.micro_steps):
                norm = f"norm {norm_of(first.steps[t - 2].gradient):.4g}" if t > 1 else "something"
                findings.append(Finding("leak", f"step {t}", f"{norm} at its beginning"))
            for rank, other in enumerate(others, 1):
                if other.names != first.names or t > len(other.steps):
                    continue
                error = relative(other.steps[t - 1].gradient - step.gradient, norm_of(step.gradient))
                if error > PREDICTION_TOLERANCE:
                    place = f"step {t}, process {other.process_index or rank}"
                    findings.append(Finding("not_reduced", place, f"relative difference {error:.2g}"))
            num_reductions = sum(micro_step.is_synchronised for micro_step in get_window(step))
            if num_reductions > 1:
                findings.append(Finding("reductions", f"step {t}", f"{num_reductions} reductions"))
            if (miscount := _find_miscount(processes, t - 1)) is not None:
                num_items, predicted = miscount
                part = f"{predicted / num_items:.4g} times the gradient"
                evidence = f"{num_items:.0f} of which {predicted} are predicted: {part}"
                findings.append(Finding("shifted_labels", f"{first.model}, step {t}", evidence))
        findings += _find_untrained(recordings)
    return select_first_findings(findings)


def _find_untrained(processes: Processes) -> list[Finding]:
    """Find steps without a label, and a causal model that is never trained to end a text that it is given."""
    first, findings = processes[0], []
    is_causal_model = is_causal(first)
    for t in range(len(first.steps)):
        counts = [m.num_shifted if is_causal_model else m.num_labels for m in list_micro_steps(processes, t)]
        if counts and not any(counts) and None not in counts:
            findings.append(Finding("no_targets", f"step {t + 1}", f"in all of its {len(counts)} micro-batches"))
    stops = [m.num_stops for m in list_all_micro_steps(processes)]
    if is_causal_model and stops and None not in stops:
        num_labels, num_inputs = map(sum, zip(*stops, strict=True))
        if num_inputs and not num_labels:
            evidence = f"in the inputs {num_inputs} times, and in no label"
            findings.append(Finding("untrained_stop", f"{len(first.steps)} steps", evidence))
    micro_steps = list_all_micro_steps(processes)
    if num_media := sum(m.num_media for m in micro_steps):
        num_labels = sum(m.num_labels or 0 for m in micro_steps)
        findings.append(Finding("media_tokens", f"{len(first.steps)} steps", f"{num_media} of {num_labels} labels"))
    if len(shifts := {m.shift for m in micro_steps}) == 1 and "" not in shifts:
        findings.append(Finding("label_shift", f"{len(first.steps)} steps", shifts.pop()))
    return findings


def _find_miscount(processes: Processes, t: int) -> tuple[float, int] | None:
    """Return `num_items_in_batch` and the number of labels that a causal model predicts, if that is smaller; else None.

    The first label of a row is never predicted.
    """
    recording = processes[0]
    micro_steps = [m for process in processes if t < len(process.steps) for m in process.steps[t].micro_steps]
    item_numbers = {m.num_items for m in micro_steps}
    if not recording.honours_num_items or not is_causal(recording) or len(item_numbers) != 1 or None in item_numbers:
        return None
    if any(m.num_shifted is None for m in micro_steps):
        return None
    (num_items,), num_predicted = item_numbers, sum(m.num_shifted for m in micro_steps)
    return (num_items, num_predicted) if num_items > num_predicted else None  # with 1, a loss is a sum


def _compute_update_error(r: Step, g: Step, sizes: list[int], tolerance: float) -> float:
    """Compute the relative error of the update, over those parameters whose gradient is more than rounding."""
    ends = np.cumsum(sizes)[:-1]
    norms = [norm_of(part) for part in np.split(r.gradient, ends)]
    is_large = np.repeat([norm > 10 * tolerance * norm_of(r.gradient) for norm in norms], sizes)
    return relative((g.change - r.change)[is_large], norm_of(r.change[is_large]))


def _find_wrong_average(reference_recording: Recording, recording: Recording, t: int) -> list[Finding]:
    """Find out whether what follows the weights has changed more often than the weights, or is another one."""
    r, g, place = reference_recording.steps[t], recording.steps[t], f"step {t + 1}"
    if t and g.num_averages > max(1, r.num_averages):
        return [Finding("average", place, f"{g.num_averages} times in a step")]
    start = reference_recording.steps[0].averages
    if not t or not r.averages.size or not r.averages.shape == g.averages.shape == start.shape:
        return []
    error = relative(g.averages - r.averages, norm_of(r.averages - start))
    is_other = np.isfinite(error) and error > AVERAGE_TOLERANCE
    return [Finding("average", place, f"its change differs by {error:.2g} of itself")] if is_other else []


def _is_balanced(r: Step, g: Step, question: Question) -> bool:
    """Tell whether a gradient is c times the true one, and all rates are 1 / c of the true ones."""
    if not question.is_multiple or len(r.learning_rates) != len(g.learning_rates):
        return False
    if question.ratio <= 0 or abs(question.ratio - 1) <= question.margin:
        return False
    rates = np.array(g.learning_rates) * question.ratio
    return bool(np.allclose(rates, r.learning_rates, rtol=question.margin, atol=0))


def _rates_agree(r: Step, g: Step, tolerance: float) -> bool:
    rates = [step.learning_rates for step in (r, g)]
    if len(rates[0]) != len(rates[1]):  # in other groups
        rates = [[min(group), max(group)] for group in rates]
    return bool(np.allclose(rates[0], rates[1], rtol=tolerance, atol=0))


def _find_wrong_rates(reference_recording: Recording, recording: Recording, tolerance: float) -> list[Finding]:
    """Find the first step with other learning rates. Schedulers may tick as often as they like: only rates count."""
    for t, (r, g) in enumerate(zip(reference_recording.steps, recording.steps, strict=False)):
        if _rates_agree(r, g, tolerance):
            continue
        num_ticks, num_reference_ticks = (
            Counter(step.num_ticks for step in layout.steps[1:]).most_common(1)[0][0] if layout.steps[1:] else 1
            for layout in (recording, reference_recording)
        )
        num_groups = len(g.learning_rates)
        if num_groups != len(r.learning_rates):
            rates = f"of {num_groups} groups of parameters, not {len(r.learning_rates)}"
        else:
            pairs = list(zip(g.learning_rates, r.learning_rates, strict=True))
            number = next(n for n, pair in enumerate(pairs) if not np.isclose(*pair, rtol=tolerance, atol=0))
            rates = "{:.6g}, not {:.6g}".format(*pairs[number])
            rates += f", of group {number + 1} of {num_groups}" if num_groups > 1 else ""
        tick_ratio, k = num_ticks / max(1, num_reference_ticks), max(len(get_window(step)) for step in recording.steps)
        evidence = f"{num_ticks} ticks per step: {rates}"
        if tick_ratio > 1 and tick_ratio == recording.num_processes:
            return [Finding("ticks_per_process", f"step {t + 1}", evidence)]
        if tick_ratio > 1 and num_ticks in (k, k * recording.num_processes):
            return [Finding("ticks_per_micro_step", f"step {t + 1}", evidence)]
        return [Finding("learning_rate", f"step {t + 1}", rates)]
    return []


def _find_wrong_options(reference_recording: Recording, recording: Recording, tolerance: float) -> list[Finding]:
    """Find the first step whose update is computed with other numbers: betas, momentum, weight decay.

    Numbers that count steps (of averages, of warm-up) grow with them, and are the same after as many steps.
    """
    for t, (r, g) in enumerate(zip(reference_recording.steps, recording.steps, strict=False)):
        if len(r.options) != len(g.options):
            continue
        for number, (true_options, options) in enumerate(zip(r.options, g.options, strict=True), 1):
            for name in sorted(true_options.keys() & options.keys()):
                true_values, values = true_options[name], options[name]
                if len(true_values) == len(values) and not np.allclose(values, true_values, rtol=tolerance, atol=0):
                    texts = ", ".join(f"{v:.6g}" for v in values), ", ".join(f"{v:.6g}" for v in true_values)
                    group = f" of group {number} of {len(options)}" if len(g.options) > 1 else ""
                    return [Finding("update", f"step {t + 1}", f"{name}{group}: {texts[0]}, not {texts[1]}")]
    return []


def _find_wrong_log(
    logged_losses: list[float], true_loss: float, place: str, k: int, num_processes: int
) -> list[Finding]:
    """Compare the losses that were logged after a step with the step's loss in the reference."""
    allowed = max(LOG_TOLERANCE * abs(true_loss), LOG_ROUNDING)
    wrong_losses = [loss for loss in logged_losses if not abs(loss - true_loss) <= allowed]
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


def _find_worst_parameter(recording: Recording, difference: np.ndarray, norm: float) -> tuple[str, float]:
    ends = np.cumsum(recording.sizes)
    errors = [relative(part, norm) for part in np.split(difference, ends[:-1])]
    number = int(np.argmax(errors))
    return recording.names[number], errors[number]


def compute_error(reference: Sequence[Recording], other: Sequence[Recording]) -> float:
    """Return the largest relative error |g - r| / |r| of a step's gradient; infinite where one is not finite."""
    errors = [
        relative(g.gradient - r.gradient, norm_of(r.gradient))
        for truth, recording in zip(reference, other, strict=True)
        for r, g in zip(truth.steps, recording.steps, strict=False)
    ]
    return max((error if np.isfinite(error) else float("inf") for error in errors), default=0.0)
