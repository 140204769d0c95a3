"""Puts the recordings of processes together that hold parts of one model, and names what is wrong with such parts.

`put_together` makes a recording of the whole model for each part of the data: tensor, sequence, expert and pipeline parallel
processes of one part of the data are one then, and all that compares data parallel processes goes on as before. `explain_norm`
and `explain_times` explain numbers that only such processes produce, `find_reported_norm` those that a program prints. Nothing
else knows of them: `judge.py` and `explain.py` have a line for each.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stepaudit.causes import Finding, list_names
from stepaudit.mesh import DATA, EXPERT, PIPELINE, SEQUENCE, TENSOR, find_role
from stepaudit.placing import place, split
from stepaudit.recording import MicroStep, Recording, Step
from stepaudit.vectors import norm_of, relative
from stepaudit.windows import get_window

TIMES = {
    TENSOR: "times_tensor_parallel", SEQUENCE: "times_sequence_parallel", EXPERT: "times_expert_parallel",
}  # fmt: skip
ALIKE = 1e-6  # relative: replicas differ by rounding
CLIPPING = "what clips"
READ = 1e-5  # relative: a number that is printed, or computed in float32
DIFFERENT = 1e-3  # relative: norms that are told apart
Processes = list[Recording]


def put_together(reference: Processes, processes: Processes) -> tuple[Processes, list[Finding]]:
    """Put processes together that hold parts of one model.

    Args:
        reference: recordings of a layout; the first process's hold the whole model.
        processes: of another layout.

    Returns:
        A recording of the whole model for each part of the data, and what is wrong with the parts; the processes as they are
        where each has the whole model, and no mesh is known.
    """
    if not _is_parallel(reference[0], processes):
        return processes, []
    merged: Processes = []
    findings: list[Finding] = []
    for recording in (reference[0], *reference[0].other_recordings):
        own = [_choose(recording, process) for process in processes]
        whole, said = _Parts(recording, own).put_together()
        findings += said
        for first, other in zip(merged, whole, strict=False):
            first.other_recordings.append(other)
        merged = merged or whole
    return merged, findings


def _is_parallel(reference: Recording, processes: Processes) -> bool:
    if len(processes) == 1:
        return False
    shapes = [sorted(s for r in (p, *p.other_recordings) for s in r.shapes) for p in (reference, *processes)]
    return any(p.axes for p in processes) or any(own != shapes[0] for own in shapes[1:])


def _choose(reference: Recording, process: Recording) -> Recording:
    """Choose the recording of a process that has most of the reference's parameters."""
    recordings = [process, *process.other_recordings]
    if len(recordings) == 1:
        return process
    return max(recordings, key=lambda recording: int((place(reference, [recording])[0] >= 0).sum()))


class _Parts:
    """The parts of one model that processes hold.

    Args:
        reference: recording of the whole model.
        processes: recordings of all processes.
    """

    def __init__(self, reference: Recording, processes: Processes):
        self.reference, self.processes = reference, processes
        self.places = place(reference, processes)
        # A process may have let go of a mesh that the others still have
        axes = processes[0].axes.items()
        self.axes = {n: size for n, size in axes if size > 1 and all(p.axes.get(n) == size for p in processes)}
        self.num_steps = min((len(process.steps) for process in processes), default=0)
        self.size = sum(reference.sizes)

    def put_together(self) -> tuple[Processes, list[Finding]]:
        """Make a recording of the whole model for each part of the data, and say what is wrong with the parts."""
        if lost := self._find_lost():
            return self._make_unknown(), [lost]
        cuts = [self._find_cuts(number) for number in range(len(self.reference.names))]
        groups = self._group()
        merged = [self._merge(number, group, len(groups), cuts) for number, group in enumerate(groups)]
        self._scale_losses(merged)
        findings = [finding for group in groups for finding in self._find_unreduced(group)]
        findings += self._find_other_samples(groups)
        findings += find_dead_parts(self.reference, merged[0])
        return merged, findings

    def _find_lost(self) -> Finding | None:
        """Find weights of a process that are no part of the reference's, and weights that no process has."""
        for rank, (process, own) in enumerate(zip(self.processes, self.places, strict=True)):
            parts = list(
                zip(process.names, process.shapes, split(own, process), split(process.weights, process), strict=True)
            )
            # Behind the end of a flat parameter there may be zeros
            if strange := [(name, shape, w) for name, shape, numbers, w in parts if w[numbers < 0].any()]:
                evidence = "they begin with other numbers than any part of the reference's weights; cut one whole model, seeded"
                if any(len(weights) < np.prod(shape) for _, shape, weights in strange):
                    evidence = "too large to be put together by their numbers: make the model smaller, and give --mesh"
                place_of = f"{list_names([name for name, *_ in strange])} of process {rank}"
                return Finding("parameters", place_of, f"nothing is compared: {evidence}")
        held = np.zeros(self.size, dtype=bool)
        for own in self.places:
            held[own[own >= 0]] = True
        names = [n for n, part in zip(self.reference.names, split(held, self.reference), strict=True) if not part.all()]
        return Finding("parameters", list_names(names), "no process has all of it") if names else None

    def _make_unknown(self) -> Processes:
        """Make a recording without steps, of which nothing is compared."""
        return [dataclasses.replace(self.reference, steps=[], other_recordings=[], unfinished_micro_steps=[])]

    def _group(self) -> list[list[int]]:
        """Group processes that have the same part of the data: their ranks."""
        has_own = {DATA} | ({EXPERT} if self._differs_along(EXPERT) else set())
        is_known = len({tuple(p.places[n] for n in self.axes) for p in self.processes}) == len(self.processes)
        groups: dict[Any, list[int]] = {}
        for rank, process in enumerate(self.processes):
            key = [process.places[name] for name in self.axes if find_role(name) in has_own]
            groups.setdefault(tuple(key) if is_known else rank, []).append(rank)
        return list(groups.values())

    def _differs_along(self, role: str) -> bool:
        """Tell whether processes that differ in this dimension alone have other samples."""

        def others(process: Recording) -> list:
            return [process.places[name] for name in self.axes if find_role(name) != role]

        return any(
            others(a) == others(b) and _list_samples(a) != _list_samples(b)
            for a, b in itertools.combinations(self.processes, 2)
        )

    def _find_cuts(self, number: int) -> list[str]:
        """Find the dimensions along which a parameter of the reference is cut: processes have other parts, or none."""
        start, size = sum(self.reference.sizes[:number]), self.reference.sizes[number]
        cuts: set[str] = set()
        held = []
        for process, own in zip(self.processes, self.places, strict=True):
            inside = (own >= start) & (own < start + size)
            held.append(frozenset(own[inside].tolist()))
            for name, part, cut in zip(process.names, split(inside, process), process.cuts, strict=False):
                cuts |= set(cut) if part.any() and name else set()
        for a, b in itertools.combinations(range(len(held)), 2):
            differing = [n for n in self.axes if self.processes[a].places[n] != self.processes[b].places[n]]
            if held[a] != held[b] and len(differing) == 1:
                cuts.add(differing[0])
        return sorted(cuts)

    def _join(self, ranks: Sequence[int], get: Callable[[Recording], np.ndarray]) -> np.ndarray:
        """Join the parts of a vector: of what several processes hold, the first one's, those of this part of the data first."""
        order = [*ranks, *(rank for rank in range(len(self.processes)) if rank not in ranks)]
        return self._join_known({rank: get(self.processes[rank]) for rank in order})

    def _join_known(self, vectors: dict[int, np.ndarray]) -> np.ndarray:
        whole = np.zeros(self.size)
        for rank in reversed(vectors):
            inside = self.places[rank] >= 0
            whole[self.places[rank][inside]] = vectors[rank][inside]
        return whole

    def _add(self, ranks: Sequence[int], parts: list[np.ndarray | None]) -> np.ndarray | None:
        """Add up what processes contribute to a micro-batch: once where it is the same; None where it is not known of all."""
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        held = np.stack([self._spread(rank, np.ones(len(self.places[rank]))) for rank in ranks]) > 0
        if not held.any(0).all():
            return None  # processes with other samples hold the rest
        spread = np.stack([self._spread(rank, part) for rank, part in zip(ranks, known, strict=True)])
        one = spread[held.argmax(0), np.arange(self.size)]
        total, differences = spread.sum(0), np.where(held, np.abs(spread - one), 0).max(0)
        parameters = zip(*(split(v, self.reference) for v in (one, total, differences)), strict=True)
        return np.concatenate([a if norm_of(d) <= ALIKE * max(norm_of(a), norm_of(b)) else b for a, b, d in parameters])

    def _merge(self, number: int, ranks: list[int], num_parts: int, cuts: list[list[str]]) -> Recording:
        first = self.processes[ranks[0]]
        steps = [self._merge_step(ranks, t) for t in range(self.num_steps)]
        return dataclasses.replace(
            first,
            num_processes=num_parts,
            process_index=number,
            names=self.reference.names,
            shapes=self.reference.shapes,
            sizes=self.reference.sizes,
            weights=self._join(ranks, lambda process: process.weights),
            signs=self._join(ranks, lambda process: process.signs),
            steps=steps,
            unfinished_micro_steps=self._merge_micro_steps(ranks, [p.unfinished_micro_steps for p in self._of(ranks)]),
            other_recordings=[],
            axes=self.axes,
            cuts=cuts,
        )

    def _of(self, ranks: list[int]) -> Processes:
        return [self.processes[rank] for rank in ranks]

    def _merge_step(self, ranks: list[int], t: int) -> Step:
        steps = [process.steps[t] for process in self._of(ranks)]
        seen: dict[str, Any] = {
            "numbers": [number for process in self.processes for number in process.steps[t].numbers],
            "lines": [line for process in self.processes for line in process.steps[t].lines],
            "returned": [norm for process in self.processes for norm in process.steps[t].returned],
            "lengths": [m.length for p in self.processes for m in p.steps[t].micro_steps[-1:] if m.length is not None],
        }
        if len(ranks) == 1 and np.array_equal(self.places[ranks[0]], np.arange(self.size)):  # it has the whole model
            return dataclasses.replace(steps[0], **seen)
        return dataclasses.replace(
            steps[0],
            gradient=self._join(ranks, lambda process: process.steps[t].gradient),
            unclipped_gradient=self._join(ranks, lambda process: process.steps[t].unclipped_gradient),
            change=self._join(ranks, lambda process: process.steps[t].change),
            micro_steps=self._merge_micro_steps(ranks, [step.micro_steps for step in steps]),
            logged_losses=[loss for step in steps for loss in step.logged_losses],
            is_clipped_early=any(step.is_clipped_early for step in steps),
            moved=None,
            dtype="",
            **seen,
        )

    def _merge_micro_steps(self, ranks: list[int], columns: list[list[MicroStep]]) -> list[MicroStep]:
        if len({len(column) for column in columns}) != 1:  # stages may compute in other portions
            columns = [_collapse(column) for column in columns]
            if len({len(column) for column in columns}) != 1:
                return []
        return [self._merge_micro_step(ranks, list(row)) for row in zip(*columns, strict=True)]

    def _merge_micro_step(self, ranks: list[int], row: list[MicroStep]) -> MicroStep:
        known = [m for m in row if m.digests is not None or m.samples is not None]
        template = (known or row)[0]
        losses = [m.loss for m in row if m.loss is not None]
        gradients = dict(zip(ranks, (m.gradient for m in row), strict=True))
        merged = dataclasses.replace(
            template,
            gradient=self._join_known(gradients),
            part=self._add(ranks, [m.part for m in row]),
            loss=float(np.mean(losses)) if losses else None,
            is_fresh=all(m.is_fresh for m in row),
            is_touched=any(m.is_touched for m in row),
            is_synchronised=any(m.is_synchronised for m in row),
            is_hooked=any(m.is_hooked for m in row),
            terms=None,
            factors=None,
            drift=None,
            training_share=None,
        )
        roles = {find_role(name) for name, size in self.axes.items() if size > 1}
        if roles & {SEQUENCE, PIPELINE}:  # each has a part of the rows, or none
            merged = dataclasses.replace(
                merged, num_rows=None, rows=None, num_labels=None, num_shifted=None, num_stops=None, counts=None,
                num_numbers=None, values=None, other_rows=[], shared=[], denominators={}, shift="",
            )  # fmt: skip
        return merged

    def _spread(self, rank: int, vector: np.ndarray) -> np.ndarray:
        """Put what a process has of a vector into the whole one, with zeros beside."""
        inside, whole = self.places[rank] >= 0, np.zeros(self.size)
        whole[self.places[rank][inside]] = vector[inside]
        return whole

    def _scale_losses(self, merged: Processes) -> None:
        """Add losses up over the parts of a sequence, where gradients are: the mean is off then by the number of parts."""
        size = int(np.prod([size for name, size in self.axes.items() if find_role(name) == SEQUENCE] or [1]))
        for r, own in zip(self.reference.steps, zip(*(layout.steps for layout in merged), strict=True), strict=False):
            losses = [sum(m.loss or 0.0 for m in get_window(step)) for step in (r, *own)]
            true_loss, mean = losses[0], float(np.mean(losses[1:]))
            if abs(mean * size - true_loss) < abs(mean - true_loss):
                for m in (m for step in own for m in step.micro_steps):
                    m.loss = m.loss * size if m.loss is not None else None

    def _find_unreduced(self, ranks: list[int]) -> list[Finding]:
        """Find replicas in a part of the data whose gradients differ as the optimizers take them."""
        held = {rank: self._spread(rank, np.ones(len(self.places[rank]))) > 0 for rank in ranks}
        for t, (a, b) in itertools.product(range(self.num_steps), itertools.combinations(ranks, 2)):
            steps = self.processes[a].steps[t], self.processes[b].steps[t]
            kinds = [[step.gradient for step in steps], [step.unclipped_gradient for step in steps]]
            kinds.append([step.micro_steps[-1].gradient if step.micro_steps else step.gradient for step in steps])
            pairs = [
                [self._spread(r, v) * (held[a] & held[b]) for r, v in zip((a, b), kind, strict=True)] for kind in kinds
            ]
            taken, *earlier = [relative(one - other, max(norm_of(one), norm_of(other))) for one, other in pairs]
            if taken > ALIKE and min(earlier) <= ALIKE:
                lengths = [step.micro_steps[-1].length or 0.0 for step in steps if step.micro_steps]
                norms = " and ".join(f"{length:.4g}" for length in lengths)
                evidence = f"processes {a} and {b} have the same gradient, and each clips it in its own way"
                evidence += f"; their parts have the norms {norms}" if norms else ""
                return [Finding("norm_of_a_part", f"step {t + 1}", evidence)]
            if taken > ALIKE:
                return [self._describe_unreduced(t, (a, b), *pairs[0])]
        return []

    def _describe_unreduced(self, t: int, ranks: tuple[int, int], one: np.ndarray, other: np.ndarray) -> Finding:
        parts = list(zip(self.reference.names, split(one - other, self.reference), strict=True))
        names = [name for name, part in parts if norm_of(part) > ALIKE * norm_of(one - other)]
        wrong = np.concatenate([np.full(len(part), name in names) for name, part in parts])
        a, b = (self.processes[rank].places for rank in ranks)
        along = [name for name in self.axes if a.get(name) != b.get(name)]
        norm = max(norm_of(one * wrong), norm_of(other * wrong))
        evidence = f"processes {ranks[0]} and {ranks[1]} differ by {relative((one - other) * wrong, norm):.2g}"
        evidence += f", though they have the same weights along {', '.join(along)}" if along else ""
        if t < len(self.reference.steps):
            true_gradient = self.reference.steps[t].gradient * wrong
            rest = (one + other) * wrong - true_gradient
            is_sum = relative(rest, norm_of(true_gradient)) < DIFFERENT
            evidence += "; their sum is the reference's gradient" if is_sum else ""
        return Finding("not_reduced", f"{list_names(names)}, step {t + 1}", evidence)

    def _find_other_samples(self, groups: list[list[int]]) -> list[Finding]:
        """Find processes that should compute the same samples, along a dimension that is not of the data, and do not."""
        for group in groups:
            known = [(rank, _list_samples(self.processes[rank], by_rows=False)) for rank in group]
            told = [(rank, samples) for rank, samples in known if samples and None not in samples]
            for rank, samples in told[1:]:
                if samples != told[0][1]:
                    evidence = (
                        f"processes {told[0][0]} and {rank} have other samples, though they differ in no data dimension"
                    )
                    return [Finding("other_samples", "step 1", evidence)]
        return []


def _list_samples(process: Recording, by_rows: bool = True) -> list:
    """List what is known of the samples of a process's first step."""
    return [
        m.samples or m.digests or (m.rows if by_rows else None) for step in process.steps[:1] for m in step.micro_steps
    ]


def _collapse(column: list[MicroStep]) -> list[MicroStep]:
    """Make one micro-batch of several."""
    if not column:
        return []
    parts = [m.part for m in column]
    part = None if any(p is None for p in parts) else sum(parts[1:], parts[0])
    losses = [m.loss for m in column if m.loss is not None]
    return [
        dataclasses.replace(column[-1], part=part, is_fresh=column[0].is_fresh, loss=sum(losses) if losses else None)
    ]


def find_dead_parts(reference: Recording, recording: Recording) -> list[Finding]:
    """Find parameters that get no gradient in any step, neither in the reference nor here: both agree on nothing."""
    if not reference.steps or not recording.steps:
        return []
    gradients = [step.gradient for layout in (reference, recording) for step in layout.steps]
    parts = zip(reference.names, *(split(gradient, reference) for gradient in gradients), strict=True)
    dead = [n for n, *own in parts if n not in reference.frozen and not any(part.any() for part in own)]
    if not dead:
        return []
    evidence = (
        f"{len(dead)} of {len(reference.names)} parameters have a gradient of 0 in all steps, in the reference, too"
    )
    return [Finding("dead_part", list_names(dead), evidence)]


# ---------------------------------------------------------------------------------------------------------------------
# Explanations


def list_wrong_norms(gradient: np.ndarray, recording: Recording) -> list[tuple[float, str]]:
    """List the norms that count what several processes hold more than once, each with the dimensions along which it does.

    Args:
        gradient: float64 [numbers], of the whole model.
        recording: has the mesh, and along which dimensions each parameter is cut.
    """
    squares = np.array([norm_of(part) ** 2 for part in split(gradient, recording)])
    axes = [(name, size) for name, size in recording.axes.items() if size > 1]
    true_norm, found = float(squares.sum()) ** 0.5, []
    for number in range(1, len(axes) + 1):
        for chosen in itertools.combinations(axes, number):
            times = [np.prod([s for n, s in chosen if n not in cut] or [1]) for cut in recording.cuts]
            norm = float((squares * np.array(times)).sum()) ** 0.5
            if relative(abs(norm - true_norm), true_norm) > DIFFERENT:
                found.append((norm, ", ".join(name for name, _ in chosen)))
    return found


def _is_sketched(recording: Recording) -> bool:
    """Tell whether the length of a parameter is known nearly only."""
    return any(np.prod(shape) > size for shape, size in zip(recording.shapes, recording.sizes, strict=True))


def explain_norm(q: Any) -> list[Finding] | None:
    """Explain a gradient that is clipped by a norm which counts replicas, or leaves out what other processes hold."""
    if not q.recording.axes or _is_sketched(q.recording):
        return None
    step, true_norm = q.recording.steps[q.t], norm_of(q.true_gradient)
    if found := find_reported_norm(step, q.recording, q.place):
        return found
    for norm, along in list_wrong_norms(q.true_gradient, q.recording):
        expected = true_norm / norm
        is_common = abs(round(1 / expected) * expected - 1) <= q.margin  # as a factor that a loop divides by
        if q.is_multiple and abs(q.ratio / expected - 1) <= max(q.margin, READ) and not is_common:
            return [_describe_norm(q.place, "", 1 / expected, along, f"{q.ratio:.4g} times the gradient, ")]
    return None


def find_reported_norm(step: Step, recording: Recording, place: str) -> list[Finding] | None:
    """Find a wrong norm among the numbers that a program reads or reduces, unless the right one is among them.

    Norms that a function returns which clips are looked at, too; a right one there is no reason to read a wrong one.
    """
    if _is_sketched(recording):
        return None
    gradients = [step.unclipped_gradient, *(m.gradient for m in get_window(step)[-1:])]
    norms = [norm_of(gradient) for gradient in gradients]
    lines = [*step.lines, *([CLIPPING] * len(step.returned))]
    seen = np.abs(np.array([*step.numbers, *step.returned]))

    def find(norm: float) -> str | None:
        """Find the line that has seen a norm, or its square; None: none has."""
        matches = [np.abs(numbers / norm - 1) <= READ for numbers in (seen, np.sqrt(seen)) if norm]
        found = [lines[n] for match in matches for n in np.flatnonzero(match)]
        return found[0] if found else None

    if any(find(norm) not in (None, CLIPPING) for norm in norms):
        return None
    for gradient, true_norm in zip(gradients, norms, strict=True):
        for norm, along in list_wrong_norms(gradient, recording):
            if (line := find(norm)) is not None:
                return [_describe_norm(place, line, norm / true_norm, along)]
    for length in step.lengths:
        line = find(length)
        if line is not None and all(relative(abs(length - norm), norm) > DIFFERENT for norm in norms):
            evidence = f"{length:.4g} at {line}, and that of the whole gradient is {norms[-1]:.4g}"
            return [Finding("norm_of_a_part", place, evidence)]
    return None


def _describe_norm(place: str, line: str, times: float, along: str, more: str = "") -> Finding:
    where = f" at {line}" if line else ""
    evidence = (
        f"{more}the norm{where} is {times:.4g} times too large: what processes of {along} all have counts for each"
    )
    return Finding("norm_counts_replicas", place, evidence)


def explain_times(q: Any) -> list[Finding] | None:
    """Explain a gradient that is too large, or too small, by the size of a dimension that is not of the data."""
    sizes = {name: size for name, size in q.recording.axes.items() if size > 1 and find_role(name) in TIMES}
    if not sizes or not q.true_gradient.any():
        return None
    names, cuts = q.recording.names, q.recording.cuts
    pairs = list(zip(split(q.true_gradient, q.recording), split(q.gradient, q.recording), strict=True))
    norm = norm_of(q.true_gradient)
    wrong = [n for n, (r, g) in enumerate(pairs) if relative(g - r, norm) > q.margin]
    r, g = (
        np.concatenate([pair[side] for n, pair in enumerate(pairs) if n in wrong] or [np.zeros(0)]) for side in (0, 1)
    )
    if not r.any():
        return None
    ratio = float(r @ g / (r @ r))
    if relative(g - ratio * r, norm_of(g)) > q.margin:
        return None
    right_cuts = [set(cut) for n, cut in enumerate(cuts) if n not in wrong]

    def count_own(name: str) -> tuple[bool, bool]:
        """Sort: a dimension along which what is wrong is cut, and what is right is not, comes first."""
        is_own = all(name in cuts[n] for n in wrong) and not any(name in cut for cut in right_cuts)
        return not (is_own and right_cuts), find_role(name) == EXPERT and not is_own

    for name in sorted(sizes, key=count_own):
        size = sizes[name]
        text = {size: f"{name} = {size}", 1 / size: f"1/{name} = 1/{size}"}
        for value, words in text.items():
            if abs(ratio / value - 1) <= q.margin:
                evidence = f"{ratio:.4g} times the gradient: {words}"
                same = [n for n, s in {**q.recording.axes, "k": q.k}.items() if n != name and s == size]
                evidence += f" ({', '.join(same)} {'has' if len(same) == 1 else 'have'} this size, too)" if same else ""
                evidence += "; all other parameters are right" if len(wrong) < len(names) else ""
                line = next((m.line for m in get_window(q.recording.steps[q.t]) if m.line), "")
                evidence += f"; its backward is at {line}" if line else ""
                where = q.place if len(wrong) == len(names) else f"{list_names([names[n] for n in wrong])}, {q.place}"
                return [Finding(TIMES[find_role(name)], where, evidence)]
    return None
