"""Says what became of the rows of each source: which are used, cut or left out and why, and which columns are not used.

A fault of a row is data, not an exception: readers note it behind the rows of the cached table and go on, so that one message
names every kind of fault of all files. What is left out without a fault (a row that is too long) is reported beside it.
"""

import dataclasses
import functools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep.data.arrow import Dataset, datasets
from samestep.data.tables import BadRow
from samestep.errors import UsageError
from samestep.printing import format_count
from samestep.recipe.extras import optional

compute = optional("pyarrow.compute")

MAX_KINDS, MAX_PLACES = 20, 3
"""Kinds of faults in a message, and rows that are named of each."""
MAX_UNUSED = 20  # columns in a report
MAX_COMPARED = 10**6  # rows that are compared with each other: about a second
SKIPPED_FILE = "skipped_rows.jsonl"
"""File of the output folder that lists the rows which `--on_bad_row skip` left out."""
VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d.,]*\b")  # in a reason: what differs between rows of one kind


class Problem(NamedTuple):
    """Reason why a row is not used.

    Attributes:
        place: file and line, or the like.
        reason: the fault or the rule, and the remedy; without the place.
    """

    place: str
    reason: str


class Kind(NamedTuple):
    """Problems that differ in their values only.

    Attributes:
        reason: of the first one.
        num_rows: rows.
        places: of the first ones, `MAX_PLACES` at most.
    """

    reason: str
    num_rows: int
    places: tuple[str, ...]

    def __str__(self) -> str:
        """Write the first place, the reason, and the number of rows with the next places."""
        if self.num_rows == 1:
            return f"{self.places[0]}: {self.reason}"
        others = self.list_places().partition(", ")[2]
        return f"{self.places[0]}: {self.reason} ({format_count(self.num_rows, 'row')}: also {others})"

    def list_places(self) -> str:
        """List the first places; of one in the same file as the first one only the line."""
        file = self.places[0].rpartition(":")[0] + ":"
        short = [place.removeprefix(file[:-1]) if file != ":" else place for place in self.places[1:]]
        return ", ".join([self.places[0], *short, *["..."] * (self.num_rows > len(self.places))])


class RowReport(NamedTuple):
    """Report on the rows of one source.

    Attributes:
        source: its name for people.
        num_read, num_used: rows, those that are held out among them.
        num_cut: of the used ones, those that lost their end.
        num_held_out: of the used ones.
        bad: rows with a fault, which `--on_bad_row skip` left out.
        left_out: rows that a rule of the recipe left out, such as the largest length.
        columns: columns that are used.
        unused: columns, or fields of a column, that are not used -> rows that have them.
        notes: further lines.
    """

    source: str
    num_read: int
    num_used: int
    num_cut: int = 0
    num_held_out: int = 0
    bad: Sequence[Problem] = ()
    left_out: Sequence[Problem] = ()
    columns: Sequence[str] = ()
    unused: Mapping[str, int] = {}
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        """Write a short line for the numbers, each reason, and the columns."""
        line = f"{self.source}: {format_count(self.num_read, 'row')} read, {self.num_used:,} used"
        parts = {"held out": self.num_held_out, "cut": self.num_cut}
        line += "".join(f", {count:,} of them {text}" for text, count in parts.items() if count)
        lines = [line]
        for kind in [*group(self.bad), *group(self.left_out)]:
            lines.append(f"  left out: {kind.num_rows:,}, {kind.reason} ({kind.list_places()})")
        if self.columns:
            lines.append(f"  columns used: {', '.join(self.columns)}")
        if self.unused:
            names = [
                name if count == self.num_read else f"{name} ({format_count(count, 'row')})"
                for name, count in list(self.unused.items())[:MAX_UNUSED]
            ]
            more = f" and {len(self.unused) - MAX_UNUSED} more" if len(self.unused) > MAX_UNUSED else ""
            lines.append(f"  NOT used: {', '.join(names)}{more}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def add_notes(reports: Sequence[RowReport], train: Any, held_out: Any) -> list[RowReport]:
    """Add the `notes` of training and held-out samples to the reports of the sources from which they come.

    Args:
        reports: one for both, or one for each.
        train, held_out: None: there are none.
    """
    reports = list(reports)
    for place, part in enumerate((train, held_out)):
        if part is not None and reports:
            place = min(place, len(reports) - 1)
            reports[place] = reports[place]._replace(notes=[*reports[place].notes, *part.notes])
    return reports


def group(problems: Iterable[Problem]) -> list[Kind]:
    """Group problems by kind, in the order of their first rows.

    >>> group([Problem("a:1", "label is '3': mend it"), Problem("a:2", "label is '44': mend it")])
    [Kind(reason="label is '3': mend it", num_rows=2, places=('a:1', 'a:2'))]
    """
    first: dict[str, str] = {}  # shape of a reason -> its first wording
    places: dict[str, list[str]] = {}
    counts: Counter[str] = Counter()
    shapes: dict[str, str] = {}
    for place, reason in problems:
        shape = shapes.get(reason)
        if shape is None:
            shape = shapes[reason] = VALUE.sub("?", reason)
        first.setdefault(shape, reason)
        counts[shape] += 1
        if counts[shape] <= MAX_PLACES:
            places.setdefault(shape, []).append(place)
    return [Kind(first[shape], count, tuple(places[shape])) for shape, count in counts.items()]


def refuse(problems: Sequence[Problem], num_rows: int) -> None:
    """Raise a UsageError with one line for each kind of problem; do nothing where there are none.

    Args:
        problems: of all rows of all sources.
        num_rows: rows that were read.
    """
    if not problems:
        return
    kinds = group(problems)
    lines = [str(kind) for kind in kinds[:MAX_KINDS]]
    if len(kinds) > MAX_KINDS:
        lines.append(f"and {len(kinds) - MAX_KINDS} other kinds of faults")
    if len(problems) < num_rows:
        these = "this row" if len(problems) == 1 else f"these {len(problems):,} rows"
        lines[-1] = f"{lines[-1].rstrip('.')}; --on_bad_row skip leaves out {these} of {num_rows:,}"
    raise UsageError(lines)


@dataclasses.dataclass
class Notes:
    """Notes on the rows of a source beside those that can be used.

    Attributes:
        problems: of rows that cannot be used.
        num_blank: rows without a visible character, which are no documents; of their places the first ones are known.
        columns: columns that are used.
        unused: columns that are not used -> rows that have them.
    """

    problems: list[Problem] = dataclasses.field(default_factory=list)
    num_blank: int = 0
    blank_places: list[str] = dataclasses.field(default_factory=list)
    columns: list[str] = dataclasses.field(default_factory=list)
    unused: Counter[str] = dataclasses.field(default_factory=Counter)

    def add_blank(self, place: str) -> None:
        """Count a row without a visible character."""
        self.num_blank += 1
        self.blank_places = [*self.blank_places, place][:MAX_PLACES]

    def merge(self, other: "Notes") -> None:
        """Take in the notes of another file."""
        self.problems += other.problems
        self.num_blank += other.num_blank
        self.blank_places = [*self.blank_places, *other.blank_places][:MAX_PLACES]
        self.columns = list(dict.fromkeys([*self.columns, *other.columns]))
        self.unused.update(other.unused)

    def describe_blank(self) -> list[str]:
        """Say how many rows have no visible character, in a line; none if there are none."""
        if not self.num_blank:
            return []
        places = ", ".join(self.blank_places) + (", ..." if self.num_blank > len(self.blank_places) else "")
        return [f"left out: {self.num_blank:,}, no visible character{f' ({places})' if places else ''}"]

    def write(self, names: Iterable[str], column: str = "text") -> Iterator[dict[str, str | None]]:
        """Write the notes as two rows of a cached table, of which `split_notes` reads them: an empty one announces them.

        A column of their own, empty in nearly all rows, would make reading slower by a fifth.

        Args:
            names: of the table's columns.
            column: one of them that is null in no other row.
        """
        empty: dict[str, str | None] = dict.fromkeys(names)
        if self != Notes():
            yield empty
            yield empty | {column: json.dumps(vars(self))}


class Table(NamedTuple):
    """Rows of a source that can be used, and what is known of the others."""

    rows: Any
    notes: Notes

    @property
    def num_read(self) -> int:
        """Number of rows that were read."""
        return len(self.rows) + len(self.notes.problems) + self.notes.num_blank

    def report(self, source: str, **more: Any) -> RowReport:
        """Report on the rows; `more` are further fields of `RowReport`."""
        notes = self.notes
        more |= {"bad": notes.problems, "columns": notes.columns, "unused": notes.unused}
        return RowReport(source, self.num_read, len(self.rows), **more)


def read_noted(
    rows: Iterable[tuple[str, Any]],
    find: Callable[[str, list[str], bool], tuple[str | None, ...]],
    make: Callable[[Mapping[str, Any], Any], dict[str, Any] | None],
    notes: Notes,
) -> Iterator[dict[str, Any]]:
    """Make rows of a table of those of a source, one at a time; what is known of the others goes into the notes.

    Args:
        rows: places and columns of rows, or a `BadRow` in place of the columns.
        find: finds the columns that are read (None: such a row has none) from the place of a row, the names of its columns, and
            whether no other row was read before; its UsageError about the first row is one about the source.
        make: makes the row of the columns and the names that `find` found; None: the row has no visible character. Raises
            UsageError where it cannot.
    """
    names: tuple[str | None, ...] | None = None
    shapes: Counter[tuple[str, ...]] = Counter()  # names of the columns of a row -> such rows
    for place, values in rows:
        try:
            if isinstance(values, BadRow):
                raise UsageError(values)
            if names is None or not all(name in values for name in names if name is not None):
                names = find(place, list(values), names is None)
            shapes[tuple(values)] += 1
            row = make(values, names)
        except UsageError as error:
            if names is None and not isinstance(values, BadRow):
                raise
            reason = str(error).removeprefix(place).removeprefix(":").strip()  # it may begin with the place
            notes.problems.append(Problem(place, reason))
            continue
        if row is None:
            notes.add_blank(place)
        else:
            yield row
    notes.columns = [name for name in names or () if name is not None]
    for shape, count in shapes.items():
        notes.unused.update(dict.fromkeys((name for name in shape if name not in notes.columns), count))


def split_notes(rows: Dataset, column: str = "text") -> Table:
    """Split a cached table, whose `column` is null in no other row, into rows and what `Notes.write` wrote."""
    texts = rows.with_format("arrow").select_columns(column)[:][column]
    places = compute.indices_nonzero(compute.is_null(texts)).to_pylist() if texts.null_count else []
    notes = Notes()
    for place in places:
        values = json.loads(texts[place + 1].as_py())
        values["problems"] = [Problem(*problem) for problem in values["problems"]]
        notes.merge(Notes(**values | {"unused": Counter(values["unused"])}))
    if not places:
        return Table(rows, notes)
    # Parts without gaps stay as they are on the disk; a table of places would be looked up for every row
    starts, ends = [0, *(place + 2 for place in places)], [*places, len(rows)]
    parts = [rows.select(range(*part)) for part in zip(starts, ends, strict=True) if part[0] < part[1]]
    return Table(datasets.concatenate_datasets(parts) if parts else rows.select([]), notes)


def take_good(tables: Sequence[Table], on_bad_row: str = "refuse") -> list[Dataset]:
    """Return the rows that can be used.

    Args:
        on_bad_row: `refuse` raises a UsageError where others cannot, `skip` only where a table has no other.
    """
    if on_bad_row == "refuse":
        refuse(
            [problem for table in tables for problem in table.notes.problems], sum(table.num_read for table in tables)
        )
    for table in tables:
        if not len(table.rows):
            refuse(table.notes.problems, table.num_read)
    return [table.rows for table in tables]


@functools.lru_cache(1000)
def write_unused(names: tuple[str, ...]) -> str:
    """Write the names of a row's unused columns as a text for the cached table's column `unused`; empty: none."""
    return json.dumps(names) if names else ""


def count_unused(rows: Dataset) -> dict[str, int]:
    """Count of each unused column the rows that have it, from what `write_unused` wrote; the most frequent first."""
    counts: Counter[str] = Counter()
    for entry in compute.value_counts(rows.with_format("arrow").select_columns("unused")[:]["unused"]).to_pylist():
        for name in json.loads(entry["values"] or "[]"):
            counts[name] += entry["counts"]
    return dict(counts.most_common())


def describe_repeats(train: Dataset, held_out: Dataset, names: Sequence[str], target: str | None = None) -> list[str]:
    """Say how many rows repeat earlier ones, and how many held-out rows are trained on, too; nothing where none does.

    Args:
        train, held_out: rows, no more than `MAX_COMPARED` together, or nothing is said.
        names: columns that make a row what it is, `target` among them.
        target: column of labels, of which the same row should have one; None: rows may well have several.
    """
    if len(train) + len(held_out) > MAX_COMPARED:
        return []
    trained, held = (read_values(rows, names) for rows in (train, held_out))
    once, lines = set(trained), []
    if num_repeats := len(trained) - len(once):
        lines.append(f"repeated: {format_count(num_repeats, 'row')} of those to train on")
    if num_leaked := sum(key in once for key in held):
        lines.append(
            f"held out AND trained on: {format_count(num_leaked, 'row')}, so that its evaluation is too good. Remove repeats "
            "from the data"
        )
    if target is not None:
        place = names.index(target)
        keys = {*once, *held}
        num_contents = len({(*key[:place], *key[place + 1 :]) for key in keys})
        if num_contents < len(keys):
            lines.append(
                f"the same but for its {target}: {format_count(len(keys) - num_contents, 'row')}. Mend the {target}s"
            )
    return lines


def read_values(rows: Dataset, names: Sequence[str]) -> list[tuple[Any, ...]]:
    """Read the values of some columns, a tuple for each row."""
    table = rows.with_format("arrow").select_columns(list(names))[:] if len(rows) else None
    return [] if table is None else list(zip(*(table[name].to_pylist() for name in names), strict=True))


def write_skipped(folder: Path, reports: Iterable[RowReport], *, is_more: bool = False) -> Path | None:
    """Write place and reason of each skipped row to a file of the output folder; None: nothing was skipped, nor is a file.

    Args:
        folder: of the output.
        reports: with the rows.
        is_more: the file has other rows already, to which these are added.
    """
    rows: list[Any] = [problem._asdict() for report in reports for problem in report.bad]
    file = folder / SKIPPED_FILE
    if not rows:
        if not is_more:
            file.unlink(missing_ok=True)  # of an earlier run that is overwritten
        return None
    with file.open("a" if is_more else "w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return file


def report_rows(data: Any, output_dir: Path | None, say: Callable[[str], None], *, is_more: bool = False) -> None:
    """Say what became of the rows of a data set, where it tells; list those that are left out.

    Args:
        data: the data set.
        output_dir: where the list goes; None: another process writes it.
        say: prints a text.
        is_more: as of `write_skipped`.
    """
    reports = getattr(data, "row_reports", ())
    for report in reports:
        say(str(report))
    if reports and output_dir is not None and (file := write_skipped(output_dir, reports, is_more=is_more)):
        say(f"skipped rows are listed in {file}")
    if (mask_report := getattr(data, "mask_report", None)) is not None:
        say(str(mask_report))
