"""Finds by measurement what a trainer's own loss divides by, so that no copy of the loss is needed.

A loss that is a mean over d things (rows, labels, masked tokens, pairs) makes the whole of its parts,

    l(a + b) d(a + b) = l(a) d(a) + l(b) d(b),        and so does its gradient,

for one d only, if the parts are uneven. The loss of a whole step is  sum_q l_q d_q / D,  D the sum over the step. A loss that
compares the samples of a batch fits none. Nor does one that has terms with several d: its terms are searched (`loss_terms`).
"""

import contextlib
import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from samestep._internals.accelerate_state import find_original_forwards
from samestep.errors import UsageError
from samestep.step.losses import IGNORED
from samestep.training.loss_terms import Means, Place, ask_means, find_terms

Batch = Mapping[str, Any]
Ask = Callable[[Batch], torch.Tensor]
NUM_SCANNED = 128
"""Samples of which numbers are compared, from all over the dataset, to find some that tell divisors apart."""
NUM_ASKED = 3
"""Samples that the loss is asked about, together and in two parts: as few as memory surely has room for."""
MAX_WATCHED = 2**20
"""Numbers of the gradient that are compared, of the smallest parameters; at least one parameter."""
TOLERANCE = 2e-5
"""Relative error of a fit that is rounding in float32, in which parts of a loss are computed also where weights are wider."""
COARSE = 3e-2
"""The same in 16 bits, where the next divisor must also err three times as much."""
SHORT = {torch.float16, torch.bfloat16}
ONE, _ITSELF = "1", "what the mean itself averages"


PARTS = {2: ("first half", "second half"), 3: ("first third", "second third", "last third")}
"""Rows of a sample -> names of what a batch has of each: those of pairs, and of triples."""


def count_things(batch: Batch) -> dict[str, int]:
    """Count what a mean could be over, by name: rows, labels, masked positions; and what a sum is over, `ONE`."""
    counts = {ONE: 1}
    for name, value in batch.items():
        if not isinstance(value, torch.Tensor) or not value.ndim:
            continue
        counts[f"rows of {name}"] = len(value)
        if value.is_floating_point() or value.is_complex():
            continue
        if "label" in name or "target" in name or (value == IGNORED).any():
            kind, is_counted = f"{name} but {IGNORED}", value != IGNORED
        elif "mask" in name or value.dtype is torch.bool:
            kind, is_counted = f"ones of {name}", value
        else:
            kind, is_counted = "", value
        if kind:
            counts[kind] = int(is_counted.sum())
            behind = is_counted[..., 1:] if value.ndim > 1 else is_counted
            counts[f"{kind}, behind the first of a row"] = int(behind.sum())
            for number, names in PARTS.items():  # preferred answers first, then the others
                for part, rows in zip(names, behind.chunk(number), strict=True) if len(value) % number == 0 else ():
                    counts[f"{kind}, behind the first of a row, in the {part} of the rows"] = int(rows.sum())
        if name == "position_ids":  # of samples that lie end to end
            counts["beginnings of position_ids"] = int((value == 0).sum())
            counts[f"{name} without beginnings"] = int((value != 0).sum())
    return counts


def _add_up_labels(batch: Batch) -> tuple[int, ...]:
    """Add up a sample's labels: a loss may compare those that are alike, or not."""
    return tuple(
        int(value.long().sum())
        for name, value in batch.items()
        if "label" in name and isinstance(value, torch.Tensor) and not value.is_floating_point()
    )


class NoMeanError(UsageError):
    """Raised when a loss is a mean over nothing that its batches have."""


@dataclasses.dataclass(frozen=True)
class Divisor:
    """The number that a loss is a mean over: names of `count_things`, proportional wherever the loss was asked.

    Raises UsageError in `count` where a batch has other proportions, as then it is unknown which one counts.
    """

    name: str
    equals: Mapping[str, float]
    owner: str

    def count(self, batch: Batch) -> torch.Tensor:
        """Count a batch, int64 [1]."""
        counts = count_things(batch)
        for name, ratio in self.equals.items():
            if abs(counts.get(name, 0) - ratio * counts[self.name]) > 1e-6 * max(1, counts.get(name, 0)):
                raise UsageError(
                    f"the loss of {self.owner} is a mean over {self.name} or over {name}: {NUM_SCANNED} samples did not tell "
                    "which, and a batch now has others. Give loss= and targets=, and go on from the last checkpoint"
                )
        return torch.tensor([counts[self.name]])

    def find_total(self, counts: torch.Tensor) -> torch.Tensor:
        """Find what a step's loss is divided by, from the counts of its parts, added up: 1 if it is a sum."""
        return torch.ones_like(counts) if self.name == ONE else counts

    def take_sums(self, ask: Callable[[], torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        """Ask the loss of a batch, and return its sum, [1]."""
        loss = ask()
        return loss.view(-1) * counts.to(loss.device)


@dataclasses.dataclass(frozen=True)
class Terms:
    """The means that a loss is made of, each over something of its own; see `loss_terms`.

    Attributes:
        places: of the means, with their factors in the loss.
        divisors: what each is over.
    """

    places: Mapping[Place, float]
    divisors: Sequence[Divisor]

    @property
    def name(self) -> str:
        return "; ".join(divisor.name for divisor in self.divisors)

    def count(self, batch: Batch) -> torch.Tensor:
        """Count a batch, int64 [terms]."""
        return torch.cat([divisor.count(batch) for divisor in self.divisors])

    def find_total(self, counts: torch.Tensor) -> torch.Tensor:
        """Find what each term of a step is divided by, from the counts of its parts, added up."""
        return torch.cat(
            [divisor.find_total(part) for divisor, part in zip(self.divisors, counts.split(1), strict=True)]
        )

    def take_sums(self, ask: Callable[[], torch.Tensor], counts: torch.Tensor) -> torch.Tensor:
        """Ask the loss of a batch, and return the sums of its terms, [terms]."""
        with Means() as noted:
            loss = ask()
        if missing := self.places.keys() - noted.found.keys():
            file, line, _ = min(missing)
            raise UsageError(
                f"the loss of {self.divisors[0].owner} had a term in line {line} of {file} when it was measured, and has not "
                "now: give loss= and targets="
            )
        means = [factor * noted.found[place].value for place, factor in self.places.items()]
        return torch.stack(means) * counts.to(loss.device)


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answers of a loss about some samples: itself, a part of its gradient, and what it could be a mean over."""

    values: tuple[torch.Tensor, ...]
    counts: Mapping[str, int]


class Measurement:
    """Asks a loss about some samples of a dataset, together and apart.

    Args:
        ask: batch -> loss, scalar; for `check_sums` sums over targets, [terms].
        collate: samples -> batch.
        owner: name of the trainer, or of the head, for messages.
        is_coarse: whether it computes in 16 bits.
        most_rows: samples of any length for which memory has room; of more only short ones are asked about.
        watched: parameters that are moved meanwhile, and whose gradient is compared, too; see `choose_small`.
        has_gradient: whether it can be asked for; not of a sharded model.
    """

    def __init__(
        self,
        ask: Ask,
        collate: Callable[[Sequence[Any]], Batch],
        owner: str,
        is_coarse: bool = False,
        most_rows: int = NUM_ASKED,
        watched: Sequence[nn.Parameter] = (),
        has_gradient: bool = True,
    ):
        self.ask, self.collate, self.owner = ask, collate, owner
        self.moved, self.watched = list(watched), list(watched) if has_gradient else []
        self.most_rows = most_rows
        self.tolerance = COARSE if is_coarse else TOLERANCE

    def find_divisor(self, dataset: Any) -> Divisor | Terms:
        """Find what the loss is a mean over, or its terms. Raises UsageError where they are means of nothing that is known."""
        found, ask = self._find_divisor(dataset), self.ask
        if self.most_rows > 1:  # a short sample beside a long one
            self.ask = lambda batch: found.take_sums(partial(ask, batch), found.count(batch))
            try:
                self.check_sums(dataset)
            finally:
                self.ask = ask
        return found

    def _find_divisor(self, dataset: Any) -> Divisor | Terms:
        samples = self._choose(dataset, NUM_ASKED)
        batches = self._cut(samples)
        errors, answers = self._ask(batches)
        if not errors:
            raise UsageError(
                f"the loss of {self.owner}, or its gradient, is not finite on single samples. It "
                "compares the samples of a batch, or labels miss: give loss= and targets="
            )
        if not any(answer.values[-1].any() for answer in answers):
            raise NoMeanError(
                f"the loss of {self.owner}, or its gradient, is 0 on {len(samples)} samples, which says nothing of what it "
                "divides by. It compares the samples of a batch, or labels miss: give loss= and targets="
            )
        best = min(errors, key=lambda name: (errors[name], _rank(name)))
        ratios = {name: _find_ratio(name, best, answers) for name in errors}
        others = [error for name, error in errors.items() if ratios[name] is None]
        if errors[best] > self.tolerance or (self.tolerance == COARSE and min(others, default=1.0) < 3 * errors[best]):
            if (terms := self._find_terms(batches)) is not None:
                return terms
            raise NoMeanError(self._explain_misfit(samples, best, errors[best]))
        return self._make_divisor({name: ratio for name, ratio in ratios.items() if ratio is not None})

    def _make_divisor(self, ratios: Mapping[str, float]) -> Divisor:
        name = min(ratios, key=_rank)
        return Divisor(
            name, {other: ratio / ratios[name] for other, ratio in ratios.items() if other != name}, self.owner
        )

    def _find_terms(self, batches: Mapping[tuple[int, int], Batch]) -> Terms | None:
        """Find the terms of the loss; None where it is made of no means whose numbers are known."""
        if not self.watched or self.tolerance == COARSE:
            return None
        size = max(last for _, last in batches)
        cuts, counted = [], []
        for direction in (1, -1):
            with _moved(self.moved, direction):
                asked = {place: ask_means(partial(self.ask, batch), self.watched) for place, batch in batches.items()}
            finite = {place for place, found in asked.items() if found.loss[0].isfinite().all()}  # with a target
            parts = [cut for cut in _list_cuts(size) if finite.issuperset(cut)]
            cuts += [(asked[0, size], [asked[place] for place in cut]) for cut in parts]
            counted += [(found, count_things(batches[place])) for place, found in asked.items() if place in finite]
        places = find_terms(cuts, _find_remainder, self.tolerance)
        divisors = []
        for place in places:
            answers = [Answer((), things | {_ITSELF: found.means[place][1]}) for found, things in counted]
            names = set.intersection(*(set(answer.counts) for answer in answers)) - {_ITSELF}
            ratios = {name: ratio for name in names if (ratio := _find_ratio(name, _ITSELF, answers)) is not None}
            if not ratios:
                return None
            divisors.append(self._make_divisor(ratios))
        return Terms(places, divisors) if places else None

    def _ask(self, batches: Mapping[tuple[int, int], Batch]) -> tuple[dict[str, float], list[Answer]]:
        """Ask about samples together and in two parts: error of the fit of each divisor, and all answers."""
        size, errors, answers = max(last for _, last in batches), {}, []
        for direction in (1, -1):  # a term that is clamped at 0, as a divergence is, is not 0 in both
            with _moved(self.moved, direction):
                whole = self._answer(batches[0, size])
                self._check_repetition(whole, batches[0, size])
                for cut in _list_cuts(size):
                    parts = [self._answer(batches[place]) for place in cut]
                    if not all(value.isfinite().all() for part in parts for value in part.values):
                        continue  # a sample without a target, alone
                    for name in set.intersection(*(set(answer.counts) for answer in [whole, *parts])):
                        errors[name] = max(errors.get(name, 0.0), _misfit(name, whole, parts))
                    answers += [whole, *parts]
        return errors, answers

    def _explain_misfit(self, samples: Sequence[Any], best: str, error: float) -> str:
        """Say why no divisor fits: asked about rows of one batch, which are padded alike, one that fits tells of padding."""
        text = (
            f"the loss of {self.owner} is not that of its samples. Of {len(samples)} samples it is no mean of those of 2 and "
            f"of 1, whatever they are weighed by (nearest: {best}, {error:.1e} off)"
        )
        whole = self.collate(list(samples))
        if _has_row_for_each(whole, len(samples)):
            errors, _ = self._ask(_take_parts(whole, len(samples)))
            if min(errors.values(), default=1.0) <= self.tolerance:
                return f"{text}. Padded alike it is: it depends on the padding, so pad all samples to one length"
        return (
            f"{text}. It compares the samples of a batch, has several counts, or weights its classes: "
            "give loss= and targets= (docs/your-trainer.md)"
        )

    def check_sums(self, dataset: Any) -> None:
        """Check that sums of samples together are those of samples apart. Raises UsageError: they depend on padding, mostly."""
        if len(dataset) < 2:
            return
        samples = self._choose(dataset, 2)
        batches = self._cut(samples)
        with _moved(self.moved, 1):
            whole = self._answer(batches[0, len(samples)]).values
            cuts = [[self._answer(batches[place]).values for place in cut] for cut in _list_cuts(len(samples))]
        for parts in cuts:
            error = _find_remainder(whole, parts)
            if error > 5 * self.tolerance:
                raise UsageError(
                    f"the loss of {self.owner} depends on which samples are in a batch: of {len(samples)} together it is "
                    f"{error:.1e} off that of them apart. Mostly the model sees padding: give it an attention mask, or pad all "
                    "samples to one length"
                )

    def _check_repetition(self, answer: Answer, batch: Batch) -> None:
        if not all(value.isfinite().all() for value in answer.values):
            raise UsageError(
                f"the loss of {self.owner}, or its gradient, is not finite on {NUM_ASKED} samples together: do labels miss, or "
                "are all of them -100?"
            )
        if (error := _find_remainder(answer.values, [self._answer(batch).values])) > self.tolerance:
            raise UsageError(
                f"the loss of {self.owner} draws at random, also in evaluation: asked twice about the same samples it differs "
                f"by {error:.1e}: give loss= and targets="
            )

    def _choose(self, dataset: Any, size: int) -> list[Any]:
        """Choose a few samples whose numbers are in several proportions, one of them long where memory has room."""
        num_scanned = min(len(dataset), NUM_SCANNED)
        scanned = [dataset[place * len(dataset) // num_scanned] for place in range(num_scanned)]
        if len(scanned) < size:
            raise UsageError(
                f"the dataset has {len(scanned)} samples, must have {size} to find what the loss of {self.owner} divides "
                "by"
            )
        singles = [self.collate([sample]) for sample in scanned]
        counts, labels = [count_things(batch) for batch in singles], [_add_up_labels(batch) for batch in singles]
        columns = sorted(set.intersection(*map(set, counts)))
        rows = [[row[name] for name in columns] for row in counts]
        full = sorted(
            (number for number, row in enumerate(rows) if all(row)), key=lambda number: (sum(rows[number]), number)
        )
        empty = [number for number, row in enumerate(rows) if not all(row)][:1]
        if len(full) + len(empty) < size:
            full, empty = sorted(range(len(rows)), key=lambda number: -min(rows[number])), []
        has_room = self.most_rows >= size and (size == 2 or not empty)
        chosen = [full[0], full[-1]] if has_room and len(full) > 1 else full[:1]
        short = full[: max(size, len(full) // 2)] + empty
        while len(chosen) < size:  # each next one tells most columns apart that are still proportional
            chosen.append(
                max(
                    (number for number in short if number not in chosen),
                    key=lambda number: (
                        _count_classes([rows[place] for place in [*chosen, number]]),
                        len({labels[place] for place in [*chosen, number]}),
                        -sum(rows[number]),
                    ),
                )
            )
        return [
            scanned[number] for number in sorted(chosen, key=lambda number: number not in empty)
        ]  # not alone at the end

    def _cut(self, samples: Sequence[Any]) -> dict[tuple[int, int], Batch]:
        """Make a batch of each run of samples: collated alone, or rows of the whole where collating draws at random."""
        places = {(0, len(samples)), *(place for parts in _list_cuts(len(samples)) for place in parts)}
        whole = self.collate(list(samples))
        if _is_equal(whole, self.collate(list(samples))):
            return {(first, last): self.collate(list(samples[first:last])) for first, last in places}
        if not _has_row_for_each(whole, len(samples)):
            raise UsageError(
                f"the data collator of {self.owner} draws at random, and has no row for each sample. What its loss divides by "
                "cannot be measured: give loss= and targets="
            )
        return _take_parts(whole, len(samples))

    def _answer(self, batch: Batch) -> Answer:
        counts = count_things(batch)
        with torch.set_grad_enabled(bool(self.watched)), explained(self.owner):
            loss = self.ask(batch)
            gradients = torch.autograd.grad(loss.sum(), self.watched, allow_unused=True) if self.watched else ()
        known = zip(self.watched, gradients, strict=True)
        # 0 for a parameter that a batch leaves out, as the expert that none of its tokens went to
        vector = [(torch.zeros_like(p) if g is None else g).detach().flatten().double() for p, g in known]
        values = [loss.detach().double().view(-1), *([torch.cat(vector)] if vector else [])]
        return Answer(tuple(value.cpu() for value in values), counts)


@contextlib.contextmanager
def explained(owner: str) -> Iterator[None]:
    """Say of whom a loss was asked that raises: some only train, and are asked in evaluation mode, for it is without noise."""
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        text = " ".join(str(error).split()).rstrip(".")
        raise UsageError(
            f"the loss of {owner} was asked about a few samples before the first step, in evaluation mode, and raised "
            f"{type(error).__name__}: {text}. If it trains with them, give loss= and targets="
        ) from error


def is_coarse(modules: Iterable[nn.Module], mixed_precision: str) -> bool:
    """Tell whether modules compute in 16 bits, in which rounding hides small differences."""
    dtypes = {tensor.dtype for module in modules for tensor in module.parameters()}
    return mixed_precision in ("fp16", "bf16") or bool(dtypes & SHORT)


def choose_small(model: nn.Module) -> list[nn.Parameter]:
    """Choose the smallest parameters that are trained, up to `MAX_WATCHED` numbers."""
    trained = sorted((p for p in model.parameters() if p.requires_grad), key=torch.Tensor.numel)
    sizes = itertools.accumulate(parameter.numel() for parameter in trained)
    return [
        parameter
        for place, (parameter, size) in enumerate(zip(trained, sizes, strict=True))
        if not place or size <= MAX_WATCHED
    ]


@contextlib.contextmanager
def _moved(parameters: Sequence[nn.Parameter], direction: int) -> Iterator[None]:
    """Move parameters for a while: terms that compare samples may be 0 where a model is its own reference, as at the start."""
    local = [p.to_local() if isinstance(p, DTensor) else p for p in (parameter.detach() for parameter in parameters)]
    kept, generator = [tensor.clone() for tensor in local], torch.Generator().manual_seed(0)
    for tensor in local:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor)
        size = tensor.float().square().mean().sqrt() if tensor.numel() else torch.zeros(())
        tensor.add_(direction * noise * (0.3 * size + 0.02).to(tensor))
    try:
        yield
    finally:
        for tensor, value in zip(local, kept, strict=True):
            tensor.copy_(value)


def _list_cuts(size: int) -> list[list[tuple[int, int]]]:
    return [[(0, place), (place, size)] for place in range(1, size)]


def _has_row_for_each(batch: Batch, num_samples: int) -> bool:
    return all(isinstance(value, torch.Tensor) and value.ndim and len(value) == num_samples for value in batch.values())


def _take_parts(batch: Batch, size: int) -> dict[tuple[int, int], Batch]:
    """Take the rows of all parts of a batch, and of the whole."""
    places = {(0, size), *(place for parts in _list_cuts(size) for place in parts)}
    return {(first, last): {name: value[first:last] for name, value in batch.items()} for first, last in places}


def _count_classes(rows: Sequence[Sequence[int]]) -> int:
    """Count columns that are not proportional to each other."""
    return len({tuple(round(x / max(column[0], 1), 9) for x in column) for column in zip(*rows, strict=True)})


def _rank(name: str) -> tuple[int, str]:
    """Order names that count the same: what is more specific is what a loss means."""
    kinds = ("labels but", "ones of", "but", "position_ids", "rows")
    return next((place for place, kind in enumerate(kinds) if kind in name), len(kinds)), name


def _find_ratio(name: str, other: str, answers: Sequence[Answer]) -> float | None:
    """Find name / other where it is the same in all answers."""
    pairs = [(answer.counts[name], answer.counts[other]) for answer in answers]
    first, base = pairs[0]
    is_same = all(count * base == first * divisor for count, divisor in pairs)
    return first / base if is_same and first and base else None


def _misfit(name: str, whole: Answer, parts: Sequence[Answer]) -> float:
    """Compute |l(a + b) d(a + b) - l(a) d(a) - l(b) d(b)|, relative to the largest of these, of the loss and its gradient."""
    counts = [part.counts[name] for part in parts]
    if not whole.counts[name] or not all(counts):
        return math.inf
    weighed = [[value * count for value in part.values] for part, count in zip(parts, counts, strict=True)]
    return _find_remainder([value * whole.counts[name] for value in whole.values], weighed)


def _find_remainder(whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]]) -> float:
    """Compute |whole - sum of parts|, relative to the sum of their norms where they cancel."""
    errors = []
    for value, *summands in zip(whole, *parts, strict=True):
        scale = max(value.norm().item(), sum(summand.norm().item() for summand in summands), 1e-30)
        errors.append((value - sum(summands)).norm().item() / scale)
    return max(error if math.isfinite(error) else math.inf for error in errors)


def _is_equal(a: Batch, b: Batch) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else True for name in a
    )


@contextlib.contextmanager
def unnoted(trainer: Any) -> Iterator[None]:
    """Let a trainer forget what it notes for its log meanwhile."""
    noted = copy.deepcopy(_find_notes(trainer))
    try:
        yield
    finally:
        for name in _find_notes(trainer).keys() - noted.keys():
            delattr(trainer, name)
        vars(trainer).update(noted)


@contextlib.contextmanager
def undisturbed(trainer: Any, model: nn.Module) -> Iterator[None]:
    """Ask a trainer's loss without noise, and leave nothing of it behind: mode, generators, what it notes for its log."""
    was_training = model.training
    devices = [trainer.accelerator.device] if trainer.accelerator.device.type == "cuda" else []
    try:
        with unnoted(trainer), torch.random.fork_rng(devices), _without_reductions(model):
            model.eval()
            yield
    finally:
        model.train(was_training)


def _find_notes(trainer: Any) -> dict[str, Any]:
    """Find the attributes in which a trainer notes numbers for its log: its own, by convention."""
    kinds = dict | list | int | float
    return {name: value for name, value in vars(trainer).items() if name.startswith("_") and isinstance(value, kinds)}


@contextlib.contextmanager
def widened(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules compute in float32 for a while, without autocast by Accelerate; their numbers stay the same, bit by bit."""
    kept, forwards = [], []
    try:
        for module in modules:
            for tensor in itertools.chain(module.parameters(), module.buffers()):
                if tensor.dtype in SHORT:
                    kept.append((tensor, tensor.data))
                    tensor.data = tensor.data.float()
            for part, forward in find_original_forwards(module).items():
                forwards.append((part, part.forward))
                part.forward = forward
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
        for part, forward in forwards:
            part.forward = forward


def _without_reductions(model: nn.Module) -> contextlib.AbstractContextManager:
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else contextlib.nullcontext()
