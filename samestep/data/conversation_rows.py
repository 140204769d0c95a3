"""Reads conversations, pairs of answers and texts from files, from the hub, or built-in, to rows of one form.

A row is turns or a text before the answer, and one answer, or a preferred and a rejected one (see `row_forms`).
"""

import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.data import documents, row_files, row_forms, row_images, row_report, tables
from samestep.data.arrow import Dataset, Features, List, Value, datasets, hash_modules
from samestep.data.builtin import find_builtin, is_builtin
from samestep.data.row_forms import RowReader
from samestep.data.row_report import BadRow, Notes, Problem, RowReport, Table, count_unused, refuse, split_notes
from samestep.errors import UsageError, nearest
from samestep.printing import format_count

NAMES = ("columns", "row", "place", "source", "unused")
FEATURES = Features(dict.fromkeys(NAMES, Value("string"))) if datasets else None
HELD_OUT = "validation_file"
READING = (__name__, row_forms.__name__, row_images.__name__, row_report.__name__)
"""Modules that read rows: what they have cached is made anew when they change."""
MAX_PARSED = 200_000
"""Rows whose turns are looked at for a note, at most: about a second, at every start."""
MAX_SOURCES = 20
"""Entries of train_file at most that are told apart where no weights are given: more are files that a shell found."""


class Source(NamedTuple):
    """Rows of one source of a training.

    Attributes:
        entry: that of train_file or dataset_name; of several files that are read as one, all of them.
        train, held_out: rows without a fault, as `load_rows` returns them; `held_out` may be empty.
        report: on all of its rows, as far as they are read.
    """

    entry: str
    train: Dataset
    held_out: Dataset
    report: RowReport


def load_sources(recipe: Any) -> list[Source]:
    """Load the recipe's sources, in order, and hold rows of each out; held-out files are the last source, of no rows to train.

    Entries of dataset_name are a source each, and so are those of train_file where mixture_weights are given; else all files
    are one source, read as one. Each source has a form of its own (see `load_rows`), but turns and texts do not mix.

    Raises:
        UsageError: data that cannot be used; sources of turns beside sources of texts; a file in two sources.
    """
    options = {"wants_pairs": recipe.objective != "sft", "train_on": recipe.train_on, "columns": recipe.column_names}
    if recipe.images:
        options["takes_images"] = True
    entries = list(recipe.train_file or recipe.dataset_name)
    builtins = [entry for entry in entries if is_builtin(entry)]
    if builtins and recipe.validation_file is not None:
        raise UsageError(
            f"validation_file is set, but {builtins[0]} has held-out samples too: leave it out, or give train_file"
        )
    if builtins and recipe.column_names:
        raise UsageError(f"columns is set, but {builtins[0]} has none that are called otherwise: leave it out")
    if recipe.train_file and recipe.mixture_weights is None:
        loaded = {"train_file": load_rows(entries, **options)}
    else:
        _check_files_differ([entry for entry in entries if _is_file(recipe, entry)])
        loaded = {
            entry: load_rows([entry], names=[name], **options)
            if _is_file(recipe, entry)
            else _load_dataset(entry, recipe.dataset_config_name, name, **options)
            for entry, name in zip(entries, name_sources(entries), strict=True)
            if entry not in builtins
        }
    if recipe.validation_file is not None:
        loaded[HELD_OUT] = load_rows(recipe.validation_file, **options)
    files: dict[str, Sequence[str]] = {entry: [entry] for entry in entries if _is_file(recipe, entry)}
    files |= {"train_file": recipe.train_file or (), HELD_OUT: recipe.validation_file or ()}
    reports = {entry: report_rows(entry, table, files.get(entry, ())) for entry, table in loaded.items()}
    _check_columns(recipe, reports)
    good = {entry: table.rows for entry, table in loaded.items()}
    if not all(map(len, good.values())):
        bad = [problem for report in reports.values() for problem in report.bad]
        refuse(bad, len(bad))
    held_out = good.pop(HELD_OUT, None)
    sources = []
    for entry in ["train_file"] if "train_file" in good else entries:
        if entry in builtins:
            sources.append(find_builtin("conversations", split_name(entry)[0])(recipe, entry))
            continue
        try:
            parts = _hold_out(recipe, good[entry])
        except UsageError as error:
            raise UsageError(str(error) if entry == "train_file" else f"{entry}: {error}") from None
        sources.append(Source(entry, *parts, reports[entry]))
    if held_out is not None:
        forms = {source.train[0]["columns"].split(", ")[0] for source in sources}
        if held_out[0]["columns"].split(", ")[0] not in forms:
            raise UsageError(
                f"validation_file has the columns {held_out[0]['columns']}, train_file {sources[0].train[0]['columns']}: give "
                "both the same form"
            )
        sources.append(Source(HELD_OUT, held_out.select([]), held_out, reports[HELD_OUT]))
    kinds = {has_turns(source.train if len(source.train) else source.held_out): source.entry for source in sources}
    if len(kinds) > 1:
        raise UsageError(f"{kinds[True]} holds turns, but {kinds[False]} texts: give all sources the same kind")
    return sources


def report_rows(entry: str, table: Table, files: Sequence[str]) -> RowReport:
    """Report on the rows of a source, as far as they are read; `files` are its patterns, of a dataset none."""
    unused = count_unused(table.rows)
    named = dict.fromkeys(name for names in table.rows.unique("columns") for name in names.split(", "))
    columns = [name for name in named if unused.get(name, 0) < len(table.rows)]
    notes = row_files.describe_sources(files, row_files.ROW_READERS) if files else []
    notes = [*notes, *_describe_repeated_roles(table.rows)]
    bad, num_used = table.notes.problems, len(table.rows)
    return RowReport(entry, table.num_read, num_used, bad=bad, columns=columns, unused=unused, notes=notes)


def _describe_repeated_roles(rows: Dataset) -> list[str]:
    """Say how many rows have two turns of one role in a row, which some templates refuse and others run together.

    Results of tools are none of them: a turn may call several. Of more than `MAX_PARSED` rows nothing is said.
    """
    if len(rows) > MAX_PARSED:
        return []
    first, count = "", 0
    for line, place in row_report.read_values(rows, ("row", "place")):
        role = _find_repeated_role(json.loads(line))
        first, count = first or (role and f"{place}, {role}"), count + bool(role)
    verb = "has" if count == 1 else "have"
    return [f"{format_count(count, 'row')} {verb} two turns of one role in a row: first {first}"] if count else []


def _find_repeated_role(row: Mapping[str, Any]) -> str:
    """Find the first role, but `tool`, that has two turns in a row; empty: none has, or the row has no turns."""
    for answer in row["answers"]:
        turns = [turn for part in (row["prompt"], answer) if isinstance(part, list) for turn in part]
        for before, after in itertools.pairwise(turns):
            if before["role"] == after["role"] != "tool":
                return str(after["role"])
    return ""


def _check_columns(recipe: Any, reports: Mapping[str, RowReport]) -> None:
    """Raise UsageError where `columns` names a column that no row has."""
    names = {name for report in reports.values() for name in report.unused}
    names |= {name.partition("=")[2] or name for report in reports.values() for name in report.columns}
    names |= {name.rpartition("[].")[2] for name in names}
    is_read = any(report.columns for report in reports.values())  # else the message about the rows names the columns
    missing = [name for name in recipe.column_names if name not in names]
    if missing and is_read:
        raise UsageError(
            f"columns names {tables.shorten(missing[0])}, which no row that can be read has: {nearest(missing[0], names)}"
        )


def _is_file(recipe: Any, entry: str) -> bool:
    return bool(recipe.train_file) or Path(entry).suffix.lower() in row_files.ROW_READERS


def _check_files_differ(entries: Sequence[str]) -> None:
    """Raise UsageError where two sources hold the same file."""
    owners: dict[str, str] = {}
    for entry in entries:
        for file in row_files.find_files([entry], row_files.ROW_READERS)[0]:
            owner = owners.setdefault(os.path.realpath(file), entry)
            if owner != entry:
                raise UsageError(
                    f"{file} is in two sources, {owner} and {entry}: name it once, and give it the sum of the weights"
                )


def _hold_out(recipe: Any, rows: Dataset) -> tuple[Dataset, Dataset]:
    """Hold a share of the rows out, unless the recipe names held-out files."""
    if recipe.validation_file is not None:
        return rows, rows.select([])
    fraction = recipe.validation_fraction
    if fraction and len(rows) - max(2, round(fraction * len(rows))) < 2:
        raise UsageError(
            f"validation_fraction {fraction} of {len(rows)} samples leaves fewer than 2 to train on, as 2 at least are held "
            "out. Lower it, set it to 0, or give more samples"
        )
    return documents.split_documents(rows, fraction, recipe.seed)


def name_sources(entries: Sequence[str]) -> list[str]:
    """Name sources by their entries, for metrics: different names for different entries.

    >>> name_sources(["a/chats.jsonl", "b/chats.jsonl", "more/*.csv", "owner/set:en", "builtin/doctests"])
    ['chats', 'chats_2', 'more', 'set_en', 'doctests']
    """
    names: list[str] = []
    for entry in entries:
        parts = [part for part in Path(entry).parts if not glob.has_magic(part)] or [entry]
        last = parts[-1] if Path(entry).suffix.lower() not in row_files.ROW_READERS else Path(parts[-1]).stem
        name = re.sub(r"[^\w.-]+", "_", last).strip("_") or "files"
        number = 1 + sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in names)
        names.append(name if number == 1 else f"{name}_{number}")
    return names


def load_rows(
    train_file: Sequence[str],
    *,
    wants_pairs: bool = False,
    train_on: str = "assistant",
    columns: Mapping[str, str] | None = None,
    names: Sequence[str] | None = None,
    takes_images: bool = False,
) -> Table:
    """Load conversations, or pairs, from files.

    The form is recognised by the first row's columns, and all rows must have it (docs/language-models.md lists the forms).

    Args:
        train_file: paths, folders and globs: `.jsonl` or `.json` with an object per line or an array of objects, `.csv`,
            `.tsv`, `.parquet`. In a cell of a table turns and tools are JSON, or lists as Python writes them.
        wants_pairs: read pairs, which no other form can give.
        train_on: see `Conversations`; other forms than `text` need a turn of the assistant at the end unless it is `all`.
        columns: name in the files -> the name by which it is read, see `RowReader`.
        names: of the source of each entry; None: by the entries, if there are no more than `MAX_SOURCES`; else none.
        takes_images: whether rows may hold images, see `row_images`; paths are relative to the row's file.

    Returns:
        A memory-mapped dataset with string columns `columns`, names of the columns that were read; `row`, JSON with `prompt`,
        `answers`, `tools`, perhaps `trains_prompt` (whether turns of the assistant before the answer may be trained) and
        `untrained` (numbers of turns that are not); `place`, file and line; `source`, its name; `unused`, see
        `write_unused`; and the problems of rows that cannot be used.

    Raises:
        UsageError: a file that cannot be read, or holds no row.
    """
    options: dict[str, Any] = {"wants_pairs": wants_pairs, "train_on": train_on, "columns": dict(columns or {})}
    if takes_images:
        options["takes_images"] = True
    files, keys = row_files.find_files(train_file, row_files.ROW_READERS)
    if names is None:
        names = name_sources(train_file) if len(train_file) <= MAX_SOURCES else ["files"] * len(train_file)
    labels: dict[str, str] = {}
    for entry, name in zip(train_file, names, strict=True):
        for file in row_files.find_files([entry], row_files.ROW_READERS)[0]:
            labels.setdefault(file, name)
    labelled = [(file, labels[file]) for file in files]
    key = (keys, labelled, options, hash_modules(*READING))
    return split_notes(documents.cache_rows(_read, FEATURES, key=key, files=labelled, **options), "row")


def split_name(entry: str) -> tuple[str, str | None, str]:
    """Split an entry of dataset_name, NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, into name, configuration and split.

    >>> split_name("openai/gsm8k:main"), split_name("HuggingFaceH4/ultrachat_200k::train_sft")
    (('openai/gsm8k', 'main', 'train'), ('HuggingFaceH4/ultrachat_200k', None, 'train_sft'))
    """
    name, config, split = [entry, "", ""] if os.path.exists(entry) else [*entry.split(":", 2), "", ""][:3]
    return name, config or None, split or "train"


def _load_dataset(entry: str, config: str | None, source: str, **options: Any) -> Table:
    """Load a dataset of the hub, or a folder of one; see `load_rows`."""
    name, own_config, split = split_name(entry)
    dataset = documents.load_hub(name, own_config or config, split, None)
    key = (rows_fingerprint(dataset), entry, source, sorted(options.items()), hash_modules(*READING))
    more = {"dataset": dataset, "name": name, "source": source, **options}
    return split_notes(documents.cache_rows(_read_dataset, FEATURES, key=key, **more), "row")


def _read(files: Sequence[tuple[str, str]], **options: Any) -> Iterator[dict[str, str | None]]:
    """Read the rows of files, each with its source's name, and behind them their `row_report.Notes`."""
    reader, notes = RowReader(**options), Notes()
    for file, source in files:
        reader.turns.folder = os.path.dirname(os.path.abspath(file))
        is_table = Path(file).suffix.lower() not in (".json", ".jsonl")
        yield from _read_source(row_files.read_rows(file), is_table, source, reader, notes)
    yield from notes.write(FEATURES, "row")


def _read_dataset(dataset: Dataset, name: str, source: str, **options: Any) -> Iterator[dict[str, str | None]]:
    """Read the rows of a dataset, as `_read` those of files."""
    notes, reader = Notes(), RowReader(**options)
    reader.turns.folder = name if os.path.isdir(name) else None
    if reader.turns.takes_images:
        dataset = _keep_encoded(dataset)
    rows = ((f"dataset_name {name!r}, row {number}", values) for number, values in enumerate(dataset))
    yield from _read_source(rows, True, source, reader, notes)
    yield from notes.write(FEATURES, "row")


def _keep_encoded(dataset: Dataset) -> Dataset:
    """Let the columns of a dataset give images as they are stored, which may be damaged."""
    for name, feature in dataset.features.items():
        inner = getattr(feature, "feature", feature)
        if isinstance(inner, datasets.Image):
            encoded = datasets.Image(decode=False)
            dataset = dataset.cast_column(name, encoded if inner is feature else List(encoded))
    return dataset


def _read_source(
    rows: Iterable[tuple[str, Any]], is_table: bool, source: str, reader: RowReader, notes: Notes
) -> Iterator[dict[str, str | None]]:
    for place, values in rows:
        try:
            if isinstance(values, BadRow):
                raise UsageError(values)
            row = reader.read(_without_none(values) if is_table else values)
        except UsageError as error:
            notes.problems.append(Problem(place, str(error)))
        else:
            yield row | {"place": place, "source": source}


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out keys without a value inside of columns, which tables add so that all rows have the same keys."""
    return {name: _strip_none(value) for name, value in values.items()}


def _strip_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _strip_none(item) for key, item in value.items() if item is not None}
    return [_strip_none(item) for item in value] if isinstance(value, list) else value


def has_turns(rows: Dataset) -> bool:
    """Tell whether rows have turns; else they have texts."""
    return isinstance(json.loads(rows[0]["row"])["prompt"], list)
