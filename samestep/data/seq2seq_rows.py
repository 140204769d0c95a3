"""Reads rows of sources and targets: files, or datasets of the hub, whose columns are found by their usual names."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.data import documents, row_files, row_report, tables
from samestep.data.arrow import Features, Value, datasets
from samestep.errors import UsageError, nearest

FEATURES = Features(dict.fromkeys(("source", "target", "origin"), Value("string"))) if datasets else None
PAIRS = {
    "source": "target",
    "src": "tgt",
    "input": "output",
    "inputs": "targets",
    "article": "highlights",
    "document": "summary",
    "dialogue": "summary",
    "text": "summary",
    "question": "answer",
}
"""Usual names of the columns of sources, and of the targets beside them; `FOUND` has more for these."""
FOUND = ("target", "tgt", "output", "summary", "highlights", "abstract", "translation", "answer")
TRANSLATION = "translation"
"""Column of a text in several languages, by their names."""


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of a file's columns. None: they are found by their usual names.

    NAME.KEY is the text KEY of a column NAME that holds several, as `translation.en`.
    """

    source: str | None = None
    target: str | None = None
    languages: tuple[str | None, str | None] = (None, None)

    def find(self, place: str, present: Sequence[str]) -> tuple[str, str]:
        """Find the columns of source and target. Raises UsageError, with the columns that are present."""
        shown = tables.list_names(present)
        if self.source is not None and self.target is not None:
            for field, name in (("source_column", self.source), ("target_column", self.target)):
                if name not in present:
                    hint = nearest(name, map(tables.shorten, present))
                    raise UsageError(f"{place} has no column {name!r}, only {shown}. Set {field}: {hint}")
            return self.source, self.target
        if any(name.startswith(TRANSLATION + ".") for name in present):
            first, second = (self._find_language(place, present, number) for number in range(2))
            return first, second
        source = next((name for name in PAIRS if name in present), None)
        usual = tuple(PAIRS) if source is None else (PAIRS[source], *FOUND)
        target = next((name for name in (PAIRS.get(source or ""), *FOUND) if name in present and name != source), None)
        if source is None or target is None:
            kind = "source" if source is None else "target"
            raise UsageError(
                f"{place}: none of its columns {shown} is called {', '.join(dict.fromkeys(usual))}, for the {kind}: name them "
                "with --source_column and --target_column"
            )
        return source, target

    def _find_language(self, place: str, present: Sequence[str], number: int) -> str:
        field, language = ("source_language", "target_language")[number], self.languages[number] or ""
        for key in (language, language.partition("_")[0]):  # en_XX of mBART is en
            if f"{TRANSLATION}.{key}" in present:
                return f"{TRANSLATION}.{key}"
        names = [name for name in present if name.startswith(TRANSLATION + ".")]
        raise UsageError(
            f"{place} has texts {tables.list_names(names)}, but {field} is {language or None}, which is none of them: set "
            "it, or name two of them with --source_column and --target_column"
        )


def flatten(values: Mapping[str, Any]) -> dict[str, Any]:
    """Give each text of a column that holds several a name of its own.

    >>> flatten({"id": 1, "translation": {"en": "a", "de": "b"}})
    {'id': 1, 'translation.en': 'a', 'translation.de': 'b'}
    """
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def load_rows(*, columns: Columns = Columns(), **source: Any) -> row_report.Table:
    """Load sources and targets; `source` as of `documents.load_source`.

    Returns:
        A memory-mapped dataset with columns `source`, `target` and `origin` (the file's name without its ending; None of the
        hub), and what is known of rows that cannot be used.
    """
    return documents.load_source(_read, FEATURES, "source", columns=columns, **source)


def _read(rows: Iterable[tuple[str, Any]], file: str | None, columns: Columns) -> Iterator[dict[str, Any]]:
    notes, origin = row_report.Notes(), Path(file).stem if file else None
    flat = ((place, flatten(values) if isinstance(values, Mapping) else values) for place, values in rows)

    def make(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        source, target = (row_files.check_text(values[name], name) for name in names)
        return {"source": source, "target": target, "origin": origin}

    yield from row_report.read_noted(flat, lambda place, present, _: columns.find(place, present), make, notes)
    yield from notes.write(FEATURES, "source")
