"""Compares what the steps of two layouts are given: samples, epochs, rows, and other numbers."""

from collections import Counter

from stepaudit.causes import Finding
from stepaudit.recording import MicroStep
from stepaudit.vectors import norm_of, relative
from stepaudit.windows import Processes, get_window, list_all_micro_steps, list_micro_steps

PREDICTION_TOLERANCE = 1e-6  # relative; what is predicted of a gradient is met within it
Rows = list[list[str]]


def is_first_step_early(reference: Processes, other: Processes) -> bool:
    """Tell whether the first step has one micro-batch, the second has more, and the first gradient is not the reference's."""
    windows = [len(get_window(step)) for step in other[0].steps]
    if len(windows) < 2 or not windows[0] == 1 < windows[1]:
        return False
    r, g = reference[0].steps[0], other[0].steps[0]
    return relative(g.gradient - r.gradient, norm_of(r.gradient)) > PREDICTION_TOLERANCE


def _tally_samples(processes: Processes, t: int, name: str) -> Counter | None:
    """Tally `samples` or `digests` of step t + 1 over all processes; None if some are unknown."""
    micro_steps = list_micro_steps(processes, t)
    if any(getattr(m, name) is None for m in micro_steps):
        return None
    tally = Counter(sample for m in micro_steps for sample in getattr(m, name))
    return tally or None


def list_tallies(processes: Processes, name: str) -> list[Counter | None]:
    """List the tallies of `samples` or `digests` of all steps, over all processes; None where some are unknown."""
    return [_tally_samples(processes, t, name) for t in range(len(processes[0].steps))]


def has_fewer_samples(reference: Processes, other: Processes) -> bool:
    """Tell whether a layout has computed fewer samples than the reference, those behind its last step counted."""
    counts = []
    for processes in (reference, other):
        behind = [m for process in processes for m in process.unfinished_micro_steps]
        rows = [m.num_rows for m in (*list_all_micro_steps(processes), *behind)]
        counts.append(None if None in rows else sum(rows))
    return None not in counts and counts[1] < counts[0]


def has_as_many_in_steps(reference: Processes, other: Processes) -> bool:
    """Tell whether the steps of both layouts have as many samples, so that what is behind them is in no step of either."""
    counts = [
        [m.num_rows for t in range(len(processes[0].steps)) for m in list_micro_steps(processes, t)]
        for processes in (reference, other)
    ]
    return not any(None in rows for rows in counts) and sum(counts[0]) == sum(counts[1])


def has_same_samples(reference: Processes, other: Processes, t: int) -> bool | None:
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


def explain_samples(reference: Processes, other: Processes, t: int) -> Finding:
    place = f"step {t + 1}"
    name = _choose_sample_name(reference, other, t)
    reference_tally, tally = _tally_samples(reference, t, name), _tally_samples(other, t, name)
    if is_copied(other, t):
        return Finding("not_sharded", place, f"{len(other)} processes compute the same samples")
    if (sizes := compare_sizes(reference, other, t)) is not None:
        return Finding("batch_size", place, sizes)
    names_by_digest = {
        d: s for processes in (reference, other) for m in list_all_micro_steps(processes) for d, s in _pair_digests(m)
    }

    def list_samples(samples: Counter) -> str:
        sample_names = sorted(
            {names_by_digest.get(sample, sample) for sample in samples}, key=lambda name: (isinstance(name, str), name)
        )
        return ", ".join(map(str, sample_names[:5])) + ("..." if len(sample_names) > 5 else "")

    extra_samples, missing_samples = tally - reference_tally, reference_tally - tally
    goes_on = t + 1 < min(len(reference[0].steps), len(other[0].steps)) and has_same_samples(reference, other, t + 1)
    if not missing_samples and goes_on:  # a window is filled with samples that come again
        return Finding("duplicated", place, f"{extra_samples.total()} are added: {list_samples(extra_samples)}")
    if _is_repeated(other, t, name) and not _is_repeated(reference, t, name):
        return Finding("duplicated", place, f"all of its micro-batches have the samples {list_samples(tally)}")
    if (finding := _compare_epochs(reference, other, t)) is not None:
        return finding
    if not extra_samples:
        return Finding("dropped", place, f"{missing_samples.total()}: {list_samples(missing_samples)}")
    repeated_samples = _tally_uses(other, t, name) - _tally_uses(reference, t, name)
    if repeated_samples and not _tally_uses(reference, t, name) - _tally_uses(other, t, name):
        # A window that never stepped in its epoch comes with the first of the next one, whose samples are early then
        *earlier, window = (len(get_window(step)) for step in other[0].steps[: t + 1])
        if earlier and window > max(earlier):
            return Finding("last_window", place, f"{window - max(earlier)} micro-batches of the epoch before are in it")
        return Finding(
            "duplicated", place, f"{repeated_samples.total()} more than once: {list_samples(repeated_samples)}"
        )
    return Finding("other_samples", place, f"{extra_samples.total()} of its samples are others")


def _is_repeated(processes: Processes, t: int, name: str) -> bool:
    """Tell whether all micro-batches of a step, two or more, have the same samples."""
    tallies = [Counter(getattr(m, name)) for m in list_micro_steps(processes, t)]
    return len(tallies) > 1 and all(tally == tallies[0] for tally in tallies)


def _compare_epochs(reference: Processes, other: Processes, t: int) -> Finding | None:
    """Find a step that goes on into the next epoch under one layout only, or one whose epoch is over under the other."""
    place = f"step {t + 1}"
    reference_epochs, epochs = ({m.epoch for m in list_micro_steps(layout, t)} for layout in (reference, other))
    if None in reference_epochs | epochs or not (reference_epochs and epochs) or reference_epochs == epochs:
        return None
    if len(epochs) != len(reference_epochs):
        where = "" if len(epochs) > 1 else ", in the reference"
        return Finding(
            "last_window", place, f"its micro-batches are of {max(len(epochs), len(reference_epochs))} epochs{where}"
        )
    if min(len({m.epoch for m in list_all_micro_steps(layout)}) for layout in (reference, other)) < 2:
        return None  # one of them is made of one pass
    where = ", in the reference" if max(reference_epochs) > max(epochs) else ""
    evidence = f"epoch {min(epochs) + 1} under this layout, {min(reference_epochs) + 1} under the reference"
    return Finding("dropped", place, f"the end of an epoch{where}: this step is of {evidence}")


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


def count_dropped_samples(reference: Processes, other: Processes) -> int:
    """Count the samples of the reference's last step, if only that step is missing and is smaller than the others; else 0."""
    num_steps = len(other[0].steps)
    if num_steps != len(reference[0].steps) - 1 or not num_steps:
        return 0
    first_size, last_size = _count_samples(reference, 0), _count_samples(reference, num_steps)
    return last_size if first_size and last_size and last_size < first_size else 0


def _pair_digests(micro_step: MicroStep) -> list[tuple[str, int]]:
    """Pair digest and index of each sample."""
    if not micro_step.digests or not micro_step.samples or len(micro_step.digests) != len(micro_step.samples):
        return []
    return list(zip(micro_step.digests, micro_step.samples, strict=True))


def _tally_uses(processes: Processes, t: int, name: str) -> Counter:
    return sum((_tally_samples(processes, number, name) or Counter() for number in range(t + 1)), Counter())


def is_copied(processes: Processes, t: int) -> bool:
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
        a.any() and a.shape == b.shape and norm_of(a - b) <= 1e-12 * norm_of(a)
        for rank in parts[1:]
        for a, b in zip(parts[0], rank, strict=True)
    )


def compare_sizes(reference: Processes, other: Processes, t: int) -> str | None:
    """Say how many samples a step has here and in the reference, if one is a multiple of the other; None: they are as many.

    Where rows are not samples (texts side by side, of which a row has one word each), the numbers of a step are compared.
    """
    sizes, numbers = ([count(layout, t) for layout in (reference, other)] for count in (_count_samples, _count_numbers))
    if numbers[0] == numbers[1] > 0 or None in sizes:
        return None
    is_by_rows = sizes[0] != sizes[1]
    if _tally_samples(reference, t, "digests") is None and all(numbers) and not max(numbers) % min(numbers):
        is_by_rows &= sizes[0] * numbers[1] == sizes[1] * numbers[0]
    elif not is_by_rows:
        return None
    pair, unit = (sizes, "samples") if is_by_rows else (numbers, "numbers")
    count = _count_samples if is_by_rows else _count_numbers
    first_pair = [count(layout, 0) for layout in (reference, other)]
    if not all(pair) or not all(first_pair):
        return None
    if max(pair) % min(pair):
        return f"{pair[1]} {unit}, {pair[0]} in the reference" if is_by_rows and _have_sizes(reference, other) else None
    # A partial window, or one that is cut off, is no other batch size: the first step tells that.
    is_everywhere = first_pair[0] * pair[1] == first_pair[1] * pair[0]
    return f"{pair[1]} {unit}, {pair[0]} in the reference" if is_everywhere else None


def _have_sizes(reference: Processes, other: Processes) -> bool:
    """Tell whether the steps of two layouts cut one order of samples into windows of two sizes, by their first two steps.

    Samples that are lost, or come twice, leave the steps behind them as they are. Of another size, the second step begins
    elsewhere: the larger first step has the first samples of the other layout's second one.
    """
    tallies = [[_tally_samples(layout, t, "digests") for t in (0, 1)] for layout in (reference, other)]
    if any(tally is None for pair in tallies for tally in pair):
        return False
    (first, second), (larger, next_one) = sorted(tallies, key=lambda pair: pair[0].total())
    sizes = [[tally.total() for tally in pair] for pair in tallies]
    more = larger - first
    return (
        bool(more) and all(a >= b for a, b in sizes) and not first - larger and more <= second and not more & next_one
    )


def _count_numbers(processes: Processes, t: int) -> int:
    return sum(m.num_numbers or 0 for m in list_micro_steps(processes, t))


def _count_samples(processes: Processes, t: int) -> int | None:
    for name in ("digests", "samples"):
        if (tally := _tally_samples(processes, t, name)) is not None:
            return tally.total()
    rows = [m.num_rows for m in list_micro_steps(processes, t)]
    return None if None in rows else sum(rows)


def explain_rows(reference: Processes, other: Processes, t: int) -> Finding | None:
    """Find out whether the model was given other rows, of the same samples or where no samples are known."""
    groups = [list_micro_steps(processes, t) for processes in (reference, other)]
    if (finding := _compare_numbers(groups[0], groups[1], t)) is not None:
        return finding
    num_others = {len(m.other_rows) for group in groups for m in group}
    # The targets and masks that came with the rows, too
    for number in range(-1, num_others.pop() if len(num_others) == 1 else 0):
        truth, rows = ([m.rows if number < 0 else m.other_rows[number] for m in group] for group in groups)
        if (finding := _compare_rows(truth, rows, other, t)) is not None:
            return _find_rows_elsewhere(reference, other, t, number) or finding
    return None


def _find_rows_elsewhere(reference: Processes, other: Processes, t: int, number: int) -> Finding | None:
    """Find out whether the rows of a step that are not the reference's are of its other steps: samples, and not drawn anew."""

    def tally(processes: Processes, steps: range) -> Counter:
        rows: Counter = Counter()
        for m in (m for step in steps for m in list_micro_steps(processes, step)):
            rows.update(row[1] for row in (m.rows if number < 0 else m.other_rows[number]) or [] if len(row) > 1)
        return rows

    own, truth = tally(other, range(t, t + 1)), tally(reference, range(t, t + 1))
    strangers, place = own - truth, f"step {t + 1}"
    earlier, elsewhere = tally(other, range(t)), tally(reference, range(len(reference[0].steps)))
    if not strangers or not strangers.keys() <= elsewhere.keys() or len(elsewhere) < 2:
        return None
    count = f"{strangers.total()} of its {own.total()} rows"
    if strangers.keys() <= truth.keys() | earlier.keys():
        return Finding("duplicated", place, f"{count} come a second time")
    return Finding("other_samples", place, f"{count} are of another step of the reference")


def _compare_numbers(reference_group: list[MicroStep], group: list[MicroStep], t: int) -> Finding | None:
    """Find out whether all rows are rows of the other layout, some of them more often: whole rows, of all tensors."""

    def tally(micro_steps: list[MicroStep]) -> Counter | None:
        rows: Counter = Counter()
        for m in micro_steps:
            if m.rows is None:
                return None
            rows.update(tuple(tuple(row[1:]) for row in tensors) for tensors in zip(m.rows, *m.other_rows, strict=True))
        return rows

    reference_rows, rows = tally(reference_group), tally(group)
    if reference_rows is None or rows is None or reference_rows.total() == rows.total():
        return None
    if not reference_rows:
        return Finding("dropped", f"step {t + 1}", f"in the reference all, {rows.total()} of which are here")
    if rows.keys() == reference_rows.keys() and rows > reference_rows:
        return Finding("duplicated", f"step {t + 1}", f"{rows.total() - reference_rows.total()} rows more than once")
    if rows < reference_rows:
        return Finding("dropped", f"step {t + 1}", f"{reference_rows.total() - rows.total()} rows fewer")
    return None


def explain_values(reference: Processes, other: Processes, t: int) -> Finding | None:
    """Find out whether the model was given other numbers in all, however they are laid out in rows."""
    groups = [list_micro_steps(processes, t) for processes in (reference, other)]
    numbers = [sum(m.num_numbers or 0 for m in group) for group in groups]
    values = [sum(m.values or 0 for m in group) % 2**64 for group in groups]
    if numbers[0] == numbers[1] > 0 and values[0] != values[1]:
        return _name_inputs(other, t, f"{numbers[0]} numbers, and not the same")
    return None


def explain_shared(reference: Processes, other: Processes, t: int) -> Finding | None:
    """Find out whether the model was given another tensor without rows, of a shape that the reference has, too."""
    groups = [list_micro_steps(processes, t) for processes in (reference, other)]
    known = [{tuple(text) for m in group for text in m.shared} for group in groups]
    shapes = {shape for shape, _ in known[0]}
    if new := [pair for pair in known[1] - known[0] if pair[0] in shapes]:
        return _name_inputs(other, t, f"a tensor of the shape {new[0][0]} for all rows of a micro-batch")
    return None


def _name_inputs(processes: Processes, t: int, evidence: str) -> Finding:
    """Name the cause of other inputs: whether collate draws them."""
    if processes[0].draws_in_collate:
        return Finding("random_collate", f"step {t + 1}", evidence)
    return Finding("other_inputs", f"step {t + 1}", evidence)


def _compare_rows(
    reference_parts: list[Rows | None], parts: list[Rows | None], other: Processes, t: int
) -> Finding | None:
    """Compare the rows of all micro-batches of a step: each has a shape, and hashes of which one must be in the reference."""
    if None in reference_parts or None in parts:
        return None
    reference_rows, rows = ([tuple(row) for part in group for row in part or []] for group in (reference_parts, parts))
    if not reference_rows or len(reference_rows) != len(rows):
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
    return _name_inputs(other, t, f"{num_others} of {len(rows)} rows are others")
