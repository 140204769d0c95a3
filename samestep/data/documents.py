"""Text to pretrain on, as documents: local files, the Hugging Face hub, or the documentation that ships with Python."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.data import row_files, row_report, tables
from samestep.data.arrow import Dataset, Features, Value, datasets, hash_modules, hash_parts
from samestep.data.builtin import find_builtin, is_builtin
from samestep.errors import UsageError, explain_unwritable, nearest, reason
from samestep.printing import format_count
from samestep.recipe import hub
from samestep.recipe.extras import optional, require
from samestep.recipe.reading import find_fault
from samestep.recipe.tasks.text_pretraining import TextPretraining

pa, compute, parquet = optional("pyarrow"), optional("pyarrow.compute"), optional("pyarrow.parquet")

FEATURES = Features({"text": Value("string")}) if datasets else None
EMPTY = "holds no document: it is empty or blank. Leave it out."


def load_rows(
    *,
    train_file: Sequence[str] | None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    text_column: str = "text",
    txt_documents: str = "blocks",
    num_proc: int | None = None,
) -> row_report.Table:
    """Load documents from the one of `train_file` and `dataset_name` that is given, in an order that depends on nothing else.

    Rows without a visible character are no documents; the others are kept as they are.

    Args:
        train_file: paths, globs (`data/*.txt`, `data/**/*.jsonl`) and folders, of which all files of these kinds are read, also
            those in folders inside; in the order given, each glob and folder sorted by path; a file named twice is read once.
            Kinds may be mixed. All are UTF-8, a byte order mark is dropped, and \\n, \\r\\n and \\r end a line.

            - `.txt`: one document per block of lines; blank lines separate blocks. So a file of one sentence per line
              needs a blank line after each document, and in WikiText (a blank line after each title and paragraph)
              every title and every paragraph is a document of its own. With `txt_documents` files, the whole file is
              one document, to the last character.
            - `.jsonl`, `.json`: one object per line, the document in its key `text_column`.
            - `.csv`, `.tsv`: a header line, the document in column `text_column`; how cells are told apart is found in the
              file (see `tables.find_reading`).
            - `.parquet`: the document in the string column `text_column`.
        dataset_name: a dataset on the hub, a local dataset folder, or `builtin/python_docs`: the language reference
            and the standard library's docstrings of the running Python, some 450 documents, no network needed.
        dataset_config_name: the configuration of a dataset on the hub, whose split `train` is read.
        text_column: the column that holds the document. Text files and built-in documents have no columns.
        txt_documents: blocks, files, or auto: see `split_txt`.
        num_proc: processes that read; more than there are files are of no use.

    Returns:
        A memory-mapped dataset with one string column `text`, and what is known of rows that are no documents. Files are read
        as a stream and cached by `datasets`, under a key of paths, sizes and modification times: a changed file is read again.

    Raises:
        UsageError: a file that is missing, of unknown kind, without a document, not UTF-8 or
            malformed; a folder without such files; no such column; a dataset that cannot be reached or has no such
            configuration.
    """
    load = find_builtin("documents", dataset_name) if is_builtin(dataset_name) else None
    if (train_file or load) and dataset_config_name is not None:
        raise UsageError(
            f"dataset_config_name={dataset_config_name!r} selects a part of a dataset on the hub; "
            f"{'files' if train_file else dataset_name} can only be read whole: leave it out."
        )
    if load:
        return row_report.Table(load(), row_report.Notes())
    if train_file:
        files, key = row_files.find_files(train_file, row_files.READERS)
        workers = min(num_proc or 1, len(files))
        options = {"text_column": text_column, "txt_documents": split_txt(txt_documents, files)}
        rows = cache_rows(_read, FEATURES, key=(key, options), num_proc=workers, files=files, **options)
        return row_report.split_notes(rows)
    return _hub(dataset_name, dataset_config_name, text_column, num_proc)


def split_documents(
    documents: Dataset, validation_fraction: float, seed: int, method: str = "random"
) -> tuple[Dataset, Dataset]:
    """Split documents into training and held-out ones, both in their old order.

    Args:
        documents: one row per document, column `text`.
        validation_fraction: share to hold out, in [0, 1). 0 holds out none: the second dataset is empty.
        seed: a whole number >= 0.
        method: `random` holds out whole documents, a function of the seed and the number of documents: the share rounded,
            and at least 2 (a false next sentence needs a second one). `tail` holds out the end of the text: the training
            part is its first int((1 - share) * characters), and a document that this cuts is in both parts.

    Raises:
        UsageError: the fraction is out of range, leaves too little to train on, or holds out nothing.
    """
    if not 0 <= validation_fraction < 1:
        raise UsageError(f"validation_fraction {validation_fraction} must be at least 0 and less than 1.")
    if validation_fraction == 0:
        return documents, documents.select([])
    if method == "tail":
        return _split_tail(documents, validation_fraction)
    num_validation = max(2, round(len(documents) * validation_fraction))
    if len(documents) - num_validation < 2:
        raise UsageError(
            f"validation_fraction {validation_fraction} of {len(documents)} documents leaves fewer than 2 to train on "
            f"({num_validation} held out, 2 at least). Lower it, set it to 0, set validation_split to tail. Or give more "
            "documents (--txt_documents blocks: a blank line ends a document of a .txt file)."
        )
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(documents))
    validation, train = np.sort(order[:num_validation]), np.sort(order[num_validation:])
    return documents.select(train), documents.select(validation)


def _split_tail(documents: Dataset, validation_fraction: float) -> tuple[Dataset, Dataset]:
    # Places are counted in characters over all documents: `ends` [documents], `cut`; `place` is the cut within document `row`
    ends = np.cumsum(compute.utf8_length(documents.with_format("arrow")[:]["text"]).to_numpy())
    cut = int(ends[-1] * (1 - validation_fraction))
    row = min(int(np.searchsorted(ends, cut, side="right")), len(documents) - 1)
    text = documents[row]["text"]
    place = cut - int(ends[row]) + len(text)
    first, second = (
        Dataset.from_dict({"text": [part] if row_files.is_visible(part) else []}, features=FEATURES)
        for part in (text[:place], text[place:])
    )
    head, tail = (documents.select(rows or []) for rows in (range(row), range(row + 1, len(documents))))
    train, validation = datasets.concatenate_datasets([head, first]), datasets.concatenate_datasets([second, tail])
    if not len(train) or not len(validation):
        remedy = "hold out: raise it, or set it to 0" if len(train) else "train on: lower it"
        raise UsageError(
            f"validation_fraction {validation_fraction} of {ends[-1]} characters leaves no text to {remedy}."
        )
    return train, validation


def load_split(
    recipe: TextPretraining, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[Dataset, Dataset, list[row_report.RowReport]]:
    """Load the recipe's training and held-out documents, one row per document; no held-out ones when validation_fraction is 0.

    Returns:
        training documents, held-out ones, what became of the rows of each source.

    Raises:
        UsageError: data that cannot be used.
    """
    files = row_files.find_files(recipe.train_file, row_files.READERS)[0] if recipe.train_file else []
    txt_documents = split_txt(recipe.txt_documents, files)
    source: dict[str, Any] = {"text_column": recipe.text_column, "txt_documents": txt_documents, "num_proc": num_proc}
    hub: dict[str, Any] = {"dataset_name": recipe.dataset_name, "dataset_config_name": recipe.dataset_config_name}
    sources = [load_rows(train_file=recipe.train_file, **hub, **source)]
    if recipe.validation_file is not None:
        sources.append(load_rows(train_file=recipe.validation_file, **source))
    documents, *others = row_report.take_good(sources, on_bad_row)
    if others:
        train, held_out, num_held_out = documents, others[0], 0
    else:
        train, held_out = split_documents(documents, recipe.validation_fraction, recipe.seed, recipe.validation_split)
        num_held_out = len(held_out)
    fields = ["train_file" if recipe.train_file else "dataset_name", "validation_file"]
    reports = [_report(recipe, *item, num_held_out, txt_documents) for item in zip(fields, sources, strict=False)]
    return train, held_out, reports


def _report(
    recipe: TextPretraining, field: str, table: row_report.Table, num_held_out: int, txt_documents: str
) -> row_report.RowReport:
    """Report on the rows of the source that a field of the recipe names."""
    notes = table.notes.describe_blank()
    if field != "dataset_name":
        files = row_files.find_files(getattr(recipe, field), row_files.READERS)[0]
        notes.append(describe_files(files, len(table.rows), txt_documents))
        notes += row_files.describe_sources(getattr(recipe, field), row_files.READERS)
    name = f"dataset_name {recipe.dataset_name}" if field == "dataset_name" else field
    return table.report(name, num_held_out=num_held_out, notes=notes)


def split_txt(txt_documents: str, files: Sequence[str]) -> str:
    """Decide how `.txt` files are split into documents.

    Args:
        txt_documents: blocks, files, or auto: files where several `.txt` files are given, else blocks.
        files: those to train on, as `row_files.find_files` returned them; held-out files are split in the same way.

    Returns:
        blocks (blank lines separate documents), or files (a file is a document).
    """
    num_txt = sum(Path(file).suffix.lower() == ".txt" for file in files)
    return ("files" if num_txt > 1 else "blocks") if txt_documents == "auto" else txt_documents


def describe_files(files: Sequence[str], num_documents: int, txt_documents: str) -> str:
    """Say how many files and documents there are, and what a document is where it can be chosen.

    >>> describe_files(["a.txt", "b.txt"], 2, "files")
    '2 files, 2 documents (a .txt file is one; --txt_documents blocks: blank lines separate them)'
    >>> describe_files(["a.csv"], 9, "blocks")
    '1 file, 9 documents'
    """
    text = f"{format_count(len(files), 'file')}, {format_count(num_documents, 'document')}"
    if not any(file.lower().endswith(".txt") for file in files):
        return text
    if txt_documents == "files":
        return f"{text} (a .txt file is one; --txt_documents blocks: blank lines separate them)"
    return f"{text} (blank lines separate those of .txt; --txt_documents files: a file is one)"


# A segment starts after a blank line and at a list item; it ends after a full stop (not after an initial's), with its
# closing quotes, before a new line, an upper-case letter, a digit or a quote; the CJK full stop needs no space.
_ITEM = r"[^\S\n]*(?:[-*+•‣]|\d{1,3}[.)])\s"
_ITEM_START = re.compile(_ITEM)
_BREAK = re.compile(rf"\n(?=[^\S\n]*\n|{_ITEM})")
_SENTENCE_END = re.compile(
    r"""(?:(?<!\b[A-Za-z])\.|[!?…])["'”’»)\]]*(?:[^\S\n]*\n|\s+(?=["'“‘«(\[]*[^\W_a-z]))|[。！？]["'”’」』）]*"""
)


def split_sentences(text: str) -> list[str]:
    """Split a document into the segments from which sentence pairs are made, without losing a visible character.

    Paragraphs (blank lines) and list items stay apart, the hard-wrapped lines of one paragraph are joined, and white
    space becomes single spaces. Rules, not a model: abbreviations before a capital ("Dr. Who") end a sentence, one
    that starts with a lower-case letter is found only after a line end, and a list's last item takes in the lines that
    follow it without a blank one.

    >>> split_sentences("One sentence\\nin two lines. Another by J. Smith!\\n\\n- an item\\n- 2. and another")
    ['One sentence in two lines.', 'Another by J. Smith!', '- an item', '- 2. and another']
    """
    segments = []
    for block in _BREAK.split(text):
        item = _ITEM_START.match(block)
        start = 0
        for end in _SENTENCE_END.finditer(block, item.end() if item else 0):
            segments.append(block[start : end.end()])
            start = end.end()
        segments.append(block[start:])
    return [" ".join(segment.split()) for segment in segments if segment.strip()]


# ---------------------------------------------------------------------------------------------------------------------
# sources


def cache_rows(
    generate: Callable[..., Iterator[dict]], features: Features, key: object, num_proc: int = 1, **kwargs
) -> Dataset:
    """Cache the rows of `generate(**kwargs)` on disk, under `key` and the text of the modules that read.

    Raises:
        UsageError: packages that are not installed; or an error of `generate`, without the exceptions in which `datasets` and
            its workers wrap it.
    """
    require("text", "training on texts")
    fingerprint = hash_parts(hash_modules(__name__, row_files.__name__, tables.__name__, row_report.__name__), key)
    try:
        return Dataset.from_generator(
            generate, features=features, gen_kwargs=kwargs, num_proc=num_proc, fingerprint=fingerprint
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if explain_unwritable(error):  # the cache is at fault, and not what is read
            raise
        for _ in generate(**kwargs):  # meet the user's error again
            pass
        raise


def load_hub(
    name: str, config: str | None, split: str | None, num_proc: int | None, alternative: str = "train_file"
) -> Any:
    """Load a split of a dataset of the hub, or of a local dataset folder; None: all splits. No code in it is run.

    Args:
        alternative: field that names data without the hub, for messages.

    Raises:
        UsageError: it cannot be reached, or has no such configuration or split.
    """
    if not datasets:
        require("text", "a dataset of the hub")
    for folder, _, files in os.walk(name):
        for file in files:
            if problem := find_fault(os.path.join(folder, file)):
                raise UsageError(f"dataset_name {name!r}: {os.path.join(folder, file)} {problem}")
    try:
        hub.announce(name)
        return datasets.load_dataset(name, config, split=split, num_proc=num_proc)
    except Exception as error:  # of any kind: others wrote the files that are read
        if problem := explain_unwritable(error):
            raise UsageError(problem) from None
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
        raise UsageError(
            f"dataset_name {name!r} (config {config!r}, split {split!r}): {reason(cause or error)}. Check the names and the "
            f"network, or use {alternative} or dataset_name builtin/..., which need none"
            f"{hub.describe_way_out(name)}."
        ) from error


def load_source(
    read: Callable[..., Iterator[dict]],
    features: Features,
    text: str,
    *,
    train_file: Sequence[str] | None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
    num_proc: int | None = None,
    kind: str | None = None,
    modules: Sequence[str] = (),
    adapt: Callable[[Dataset], Dataset] | None = None,
    **options: Any,
) -> row_report.Table:
    """Load the rows of exactly one of `train_file` and `dataset_name`, as a task reads them.

    Args:
        read: makes rows of `features` of (place, columns) of each row, of the file's name (None: the hub's), and of `options`;
            behind them are its `row_report.Notes`. A function of a module.
        text: column that is null in no row.
        train_file: paths, globs and folders, in UTF-8: `.csv` and `.tsv` with a header line, `.jsonl` or `.json` with an object
            per line, `.parquet`.
        dataset_name: a dataset on the hub (`nyu-mll/glue`), or a built-in one.
        dataset_config_name, split: of a dataset on the hub.
        num_proc: processes that read files.
        kind: of built-in datasets, see `find_builtin`; None: the task has none.
        modules: that read rows, beside that of `read`.
        adapt: prepares a dataset of the hub.

    Returns:
        A memory-mapped dataset, and what is known of rows that cannot be used.

    Raises:
        UsageError: a source that is missing, of unknown kind, not UTF-8 or malformed; a column that is not there.
    """
    if kind is not None and is_builtin(dataset_name):
        return row_report.Table(find_builtin(kind, str(dataset_name))(), row_report.Notes())
    source: dict[str, Any]
    key: Any
    if train_file:
        files, key = row_files.find_files(train_file, row_files.ROW_READERS)
        source = {"files": files}
    else:
        dataset = load_hub(str(dataset_name), dataset_config_name, split, num_proc)
        dataset = adapt(dataset) if adapt else dataset
        source = {"dataset": dataset, "place": f"dataset_name {dataset_name!r}, split {split!r}"}
        key = rows_fingerprint(dataset), source["place"]
    rows = cache_rows(
        _read_files if train_file else _read_dataset,
        features,
        key=(key, options, hash_modules(read.__module__, *modules)),
        num_proc=min(num_proc or 1, len(files)) if train_file else 1,
        read=read,
        **source,
        **options,
    )
    return row_report.split_notes(rows, text)


def _read_files(files: Sequence[str], read: Callable[..., Iterator[dict]], **options: Any) -> Iterator[dict]:
    for file in files:
        yield from read(row_files.read_rows(file), file, **options)


def _read_dataset(dataset: Dataset, place: str, read: Callable[..., Iterator[dict]], **options: Any) -> Iterator[dict]:
    yield from read(((f"{place}, row {number}", row) for number, row in enumerate(dataset)), None, **options)


def load_tables(recipe: Any, load: Callable[..., row_report.Table], **options: Any) -> list[row_report.Table]:
    """Load the rows of a recipe's training source, and of its held-out one, if it names one of its own.

    Args:
        recipe: with `train_file`, `dataset_name`, `dataset_config_name`, `validation_file` and `validation_split_name`.
        load: loads a source.
        options: what it takes besides.
    """
    hub = {"dataset_name": recipe.dataset_name, "dataset_config_name": recipe.dataset_config_name}
    loaded = [load(train_file=recipe.train_file, **hub, **options)]
    if recipe.validation_file is not None:
        loaded.append(load(train_file=recipe.validation_file, **options))
    elif recipe.validation_split_name is not None and recipe.dataset_name is not None:
        loaded.append(load(train_file=None, split=recipe.validation_split_name, **hub, **options))
    return loaded


def split_tables(recipe: Any, loaded: Sequence[row_report.Table], on_bad_row: str) -> tuple[Dataset, Dataset]:
    """Take the rows of `load_tables` that can be used, and hold some out where no source of its own has these."""
    rows, *others = row_report.take_good(loaded, on_bad_row)
    return (rows, others[0]) if others else split_documents(rows, recipe.validation_fraction, recipe.seed)


def report_tables(
    recipe: Any, loaded: Sequence[row_report.Table], rows: Dataset, notes: Sequence[str], num_cut: Sequence[int] = ()
) -> list[row_report.RowReport]:
    """Report on the rows of each table of `load_tables`.

    Args:
        rows: to train on, of the first table.
        notes: further lines on it.
        num_cut: rows of each that lost their end.
    """
    first = "train_file" if recipe.train_file else f"dataset_name {recipe.dataset_name}"
    names = first, "validation_file" if recipe.validation_file else f"split {recipe.validation_split_name}"
    files = recipe.train_file, recipe.validation_file
    reports, num_held_out = [], len(loaded[0].rows) - len(rows)  # none, where another source has them
    for table, name, patterns, cut in zip(loaded, names, files, num_cut or (0, 0), strict=False):
        own = row_files.describe_sources(patterns, row_files.ROW_READERS) if patterns else []
        own += notes if table is loaded[0] else []
        reports.append(table.report(name, num_cut=cut, num_held_out=num_held_out, notes=own))
    return reports


def _hub(name: str, config: str | None, text_column: str, num_proc: int | None) -> row_report.Table:
    documents = load_hub(name, config, "train", num_proc)
    if text_column not in documents.column_names:
        raise UsageError(_no_column(f"dataset_name {name!r}", text_column, documents.column_names))
    unused = Counter({column: len(documents) for column in documents.column_names if column != text_column})
    documents = documents.select_columns(text_column).rename_columns({text_column: "text"})
    feature = documents.features["text"]
    if feature not in (Value("string"), Value("large_string")):
        raise UsageError(f"dataset_name {name!r}: column {text_column!r} holds {feature}, not text.")
    if documents.features != FEATURES:
        documents = documents.cast(FEATURES)
    visible = documents.filter(row_files.is_visible, input_columns="text", num_proc=num_proc)
    if not len(visible):
        raise UsageError(f"dataset_name {name!r} holds no document: column {text_column!r} is empty in every row.")
    num_blank = len(documents) - len(visible)
    notes = row_report.Notes(num_blank=num_blank, columns=[text_column], unused=unused)
    return row_report.Table(visible if num_blank else documents, notes)


def _no_column(location: str, text_column: str, columns: Sequence[str]) -> str:
    hint = nearest(text_column, map(tables.shorten, columns))
    return f"{location} has no column {text_column!r}, only {tables.list_names(columns)}. Set text_column: {hint}"


def _read(files: Sequence[str], text_column: str, txt_documents: str) -> Iterator[dict[str, str | None]]:
    """Read the documents of the files, one at a time, and behind those of a file its `row_report.Notes`.

    Raises:
        UsageError: a fault that is not one row's.
    """
    readers = row_files.READERS | {".parquet": partial(row_files.read_parquet, columns=[text_column])}
    if txt_documents == "files":
        readers[".txt"] = row_files.read_whole
    for file in files:
        kind, notes, num_used = Path(file).suffix.lower(), row_report.Notes(), 0
        column = "text" if kind == ".txt" else text_column
        find, make = partial(_find_column, file, column), partial(_make_row, column)
        for row in row_report.read_noted(row_files.read_rows(file, readers, EMPTY), find, make, notes):
            num_used += 1
            yield row
        if not num_used and not notes.problems:
            raise UsageError(f"data file {file} {EMPTY}")
        if kind == ".txt":  # which has no columns
            notes.columns = []
        yield from notes.write(FEATURES)


def _find_column(file: str, text_column: str, place: str, present: list[str], is_first: bool) -> tuple[str]:
    """Return the name of the column of documents. Raises UsageError where a row has none."""
    if text_column in present:
        return (text_column,)
    if is_first:
        is_json = Path(file).suffix.lower() in (".jsonl", ".json")
        raise UsageError(_no_column(place if is_json else file, text_column, present))
    raise UsageError(f"no column {text_column!r}, only {tables.list_names(present)}")


def _make_row(text_column: str, values: Mapping[str, Any], _: object) -> dict[str, str] | None:
    """Make a row of a document; None: it has no visible character. Raises UsageError where it is no text."""
    text = values[text_column]
    if type(text) is str:  # nearly all of them
        if not text.isascii() and (problem := row_files.find_fault_of_text(text)):
            raise UsageError(problem)
        return {"text": text} if row_files.is_visible(text) else None
    if text is None or (isinstance(text, float) and text != text):  # NaN
        return None
    raise UsageError(f"{text_column!r} holds {type(text).__name__}, not text")
