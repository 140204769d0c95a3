"""Tells where the parts of a model that a process holds lie in the whole model, by the numbers that the weights begin with.

Names and order do not matter then: a stage may number its layers anew, and a matrix may be cut in any dimension. Where numbers
are all the same, as those of a norm, the neighbours count, then the name, and in the mesh the process's place.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stepaudit.mesh import DATA, EXPERT, TENSOR, find_role
from stepaudit.recording import Recording

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "module.", "_checkpoint_wrapped_module.")


def split(vector: np.ndarray, recording: Recording) -> list[np.ndarray]:
    """Split a sketch [numbers] into the parameters' parts."""
    return np.split(vector, np.cumsum(recording.sizes)[:-1])


def place(reference: Recording, processes: Sequence[Recording]) -> list[np.ndarray]:
    """Place the numbers of every process in the whole model.

    Args:
        reference: recording of a process that holds all.
        processes: recordings of all processes of a layout.

    Returns:
        For each process int64 [numbers of its sketch]: their numbers in the reference's sketch, -1 for those that are in none.
    """
    placer = _Placer(reference)
    parts = [placer.find_all(process) for process in processes]
    for number in range(max((len(own) for own in parts), default=0)):
        held = [rank for rank, own in enumerate(parts) if number < len(own)]
        is_flat = all(len(processes[rank].shapes[number]) == 1 for rank in held)
        if is_flat and len(held) == len(processes) and any(parts[rank][number] is None for rank in held):
            values = [split(process.weights, process)[number] for process in processes]
            for rank, piece in enumerate(placer.find_flat(processes[0].names[number], values)):
                parts[rank][number] = piece
    places = []
    for process, own in zip(processes, parts, strict=True):
        filled = [np.full(size, -1) if part is None else part for part, size in zip(own, process.sizes, strict=True)]
        places.append(np.concatenate([np.zeros(0, dtype=np.int64), *filled]).astype(np.int64))
    return places


class _Placer:
    """Looks for parameters of processes in a reference.

    Args:
        reference: recording that holds all.
    """

    def __init__(self, reference: Recording):
        self.reference = reference
        self.values = split(reference.weights, reference)
        self.starts = np.cumsum([0, *reference.sizes])

    def find_all(self, process: Recording) -> list[np.ndarray | None]:
        """Find where the parameters of a process lie; None: nowhere.

        Those that only one parameter of the reference fits are placed first, and tell the place of their neighbours.
        """
        values = split(process.weights, process)
        fits = [
            {
                candidate: found
                for candidate in range(len(self.values))
                if (found := self._match(candidate, process, number, values[number])) is not None
            }
            for number in range(len(process.names))
        ]
        chosen = {number: next(iter(found)) for number, found in enumerate(fits) if len(found) == 1}
        for number, candidates in enumerate(fits):
            if number not in chosen and candidates:
                chosen[number] = min(candidates, key=self._order(process, number, chosen))
        for number, candidate in chosen.items():
            fits[number][candidate] = self._follow_neighbour(process, number, chosen, fits)
        return [
            self.starts[chosen[number]] + candidates[chosen[number]] if number in chosen else None
            for number, candidates in enumerate(fits)
        ]

    def _follow_neighbour(
        self, process: Recording, number: int, chosen: dict[int, int], fits: list[dict[int, np.ndarray]]
    ) -> np.ndarray:
        """Cut a vector of which all parts are alike, as a bias of zeros, as the matrix beside it is cut."""
        candidate, shape = chosen[number], process.shapes[number]
        found, values = fits[number][candidate], self.values[candidate]
        if len(shape) != 1 or len(found) == len(values) or len(np.unique(values)) == len(values):
            return found
        for beside in (number - 1, number + 1):
            other = chosen.get(beside, -1)
            if other != candidate + beside - number or process.shapes[beside][:1] != shape or len(values) < len(found):
                continue
            rows = fits[beside][other] // max(1, int(np.prod(self.reference.shapes[other][1:])))
            if self.reference.shapes[other][0] == len(values) and len(
                rows := np.array(list(dict.fromkeys(rows)))
            ) == len(found):
                return rows
        return found

    def _order(self, process: Recording, number: int, chosen: dict[int, int]) -> Callable[[int], tuple]:
        """Make the order in which candidates are taken: not taken, as far from the neighbours as here, of the same name."""
        name, taken = strip(process.names[number]), set(chosen.values())
        neighbours = [
            max((n for n in chosen if n < number), default=None),
            min((n for n in chosen if n > number), default=None),
        ]

        def order(candidate: int) -> tuple:
            distances = [abs(candidate - chosen[n] - (number - n)) for n in neighbours if n is not None]
            return (
                candidate in taken,
                min(distances, default=0),
                sum(distances),
                strip(self.reference.names[candidate]) != name,
                candidate,
            )

        return order

    def _match(self, candidate: int, process: Recording, number: int, values: np.ndarray) -> np.ndarray | None:
        whole, true_shape, shape = self.values[candidate], self.reference.shapes[candidate], process.shapes[number]
        if shape == true_shape:
            return np.arange(len(whole)) if np.array_equal(whole, values) else None
        if len(whole) != np.prod(true_shape) or len(values) != np.prod(shape) or not values.size:
            return None  # only a sketch is known
        others = [d for d, sizes in enumerate(zip(true_shape, shape, strict=False)) if sizes[0] != sizes[1]]
        if len(shape) != len(true_shape) or len(others) != 1 or shape[others[0]] > true_shape[others[0]]:
            return None
        axis, indices = others[0], np.arange(len(whole)).reshape(true_shape)
        own_rows, true_rows = (
            [row.tobytes() for row in np.moveaxis(numbers.reshape(s), axis, 0)]
            for numbers, s in ((values, shape), (whole, true_shape))
        )
        places = {row: n for n, row in enumerate(true_rows)}
        if len(places) == len(true_rows):  # each row is another one: they may come in any order, as of fused matrices
            rows = [places.get(row, -1) for row in own_rows]
            return None if -1 in rows else np.take(indices, rows, axis=axis).ravel()
        for rows in _list_slices(true_shape[axis], shape[axis], process):
            taken = np.take(indices, rows, axis=axis).ravel()
            if np.array_equal(whole[taken], values):
                return taken
        return None

    def find_flat(self, name: str, values: list[np.ndarray]) -> list[np.ndarray]:
        """Find where the pieces of a flat parameter lie, of which each process has one, in the order of the processes."""
        period = next(
            (p for p in range(1, len(values)) if all(np.array_equal(v, values[n % p]) for n, v in enumerate(values))),
            len(values),
        )  # replicas have the same pieces
        joined = np.concatenate(values[:period])
        named = [n for n, other in enumerate(self.reference.names) if strip(other) == strip(name)]
        if named and np.array_equal(self.values[named[0]], joined):
            found = self.starts[named[0]] + np.arange(len(joined))
        else:
            found = _find_runs(np.concatenate(self.values), self.starts, joined)
        pieces = np.split(found, np.cumsum([len(v) for v in values[:period]])[:-1])
        return [pieces[n % period] for n in range(len(values))]


def strip(name: str) -> str:
    """Return a parameter's name without what wraps its model.

    >>> strip("module._fsdp_wrapped_module.head.weight")
    'head.weight'
    """
    for word in WRAPPERS:
        name = name.replace(word, "")
    return name


def _list_slices(true_size: int, size: int, process: Recording) -> Iterator[list[int]]:
    """List the rows that a part of `size` may be, of `true_size`: that of the process's place in the mesh first."""
    likely = [
        process.places[name]
        for role in (TENSOR, EXPERT, DATA)
        for name, number in process.axes.items()
        if find_role(name) == role and number * size == true_size
    ]
    for start in [place * size for place in likely] + list(range(0, true_size - size + 1, size)):
        yield list(range(start, start + size))


def _find_runs(whole: np.ndarray, starts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Find the numbers of a flat parameter in the whole model; -1 for padding.

    Of several places for a parameter that one counts from which the longest run agrees: what comes behind it tells.
    """
    found, position = np.full(len(values), -1), 0
    taken = np.zeros(len(whole), dtype=bool)
    while position < len(values):
        after = int(found[position - 1]) + 1 if position else 0
        run, start = _find_run(whole, taken, values[position:], after)
        run = min(run, int(starts[np.searchsorted(starts, start, side="right")]) - start) if run else 0
        is_end = position + run == len(values) and not values[position:].any()
        if not run or (is_end and start != after):  # padding
            position += max(run, 1)
            continue
        found[position : position + run] = np.arange(start, start + run)
        taken[start : start + run] = True
        position += run
    return found


def _find_run(whole: np.ndarray, taken: np.ndarray, values: np.ndarray, after: int) -> tuple[int, int]:
    """Find the longest run of numbers that are not taken and agree with the first values: its length and its start.

    Of several as long the one that begins at `after` counts, then the first one.
    """
    runs = []
    for start in map(int, np.flatnonzero((whole == values[0]) & ~taken)):
        length = min(len(whole) - start, len(values))
        differs = np.flatnonzero((whole[start : start + length] != values[:length]) | taken[start : start + length])
        runs.append((int(differs[0]) if len(differs) else length, start == after, -start))
    run, _, start = max(runs, default=(0, False, 0))
    return run, -start
