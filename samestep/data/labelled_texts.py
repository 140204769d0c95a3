"""Labelled texts to samples of a classifier: local files, the Hugging Face hub, or paragraphs of Python's documentation.

Texts are read once with `datasets` to columns `text`, `pair` (None: a text alone) and `label`, then tokenized once into a
memory-mapped file: [CLS] text [SEP], or [CLS] text [SEP] pair [SEP], cut off after max_seq_length tokens. Samples have their
own lengths, and lie end to end in a micro-batch: nothing is padded.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from samestep.data import documents, predictions, row_files, row_report, tables
from samestep.data.arrow import ClassLabel, Dataset, Features, List, Value, datasets, hash_modules, hash_parts, map_once
from samestep.data.builtin import is_builtin
from samestep.data.ragged import make_micro_batch
from samestep.data.tokenizer import TokenizedTexts, choose_tokenizer, fingerprint, train_wordpiece
from samestep.errors import UsageError, nearest
from samestep.recipe.tasks.text_classification import TextClassification
from samestep.step.losses import IGNORED

PARTS_OF_ROW = ("text", "pair", "label")
FEATURES = Features(dict.fromkeys(PARTS_OF_ROW, Value("string"))) if datasets else None
PAIRS = {"sentence1": "sentence2", "premise": "hypothesis", "question1": "question2", "question": "sentence"}
"""Names of the columns of a pair, as in GLUE (Wang et al. 2019, 1804.07461)."""
TEXTS = ("text", "sentence", "review", "content")
LABELS = ("label", "labels", "class", "category", "score")
REQUIRED_TOKENS = ("cls_token", "sep_token", "pad_token")
MAX_DIGITS = 1000  # of a label that is a whole number
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
MISSING = {"", "nan", "-nan", "null", "n/a", "#n/a", "<na>", "nat"}
"""Labels, in small letters, by which tables say that there is none; and NA and None as they are written."""
METRICS_OF_CLASSES = ("accuracy", "f1", "matthews_correlation", "masked_accuracy")
MAX_CLASSES = 10  # that are named before the training


@dataclasses.dataclass(frozen=True)
class Columns:
    """The names of a file's columns. None: no pair; text and label are found by their usual names."""

    text: str | None = None
    pair: str | None = None
    label: str | None = None

    def find(
        self, location: str, present: Sequence[str], needs_label: bool = True
    ) -> tuple[str, str | None, str | None]:
        """Find the columns of text, pair and label among those that are `present`.

        Args:
            location: names the source in messages.

        Raises:
            UsageError: a column that is not present, or none with a usual name; lists the columns that are present.
        """
        text, pair, present_names = self.text, self.pair, tables.list_names(present)
        if text is None:
            pair = next((name for name in PAIRS if name in present and PAIRS[name] in present), None)
            text, pair = (pair, PAIRS[pair]) if pair else (next((n for n in TEXTS if n in present), None), None)
        label = self.label or next((name for name in LABELS if name in present), None)
        fields = {"text_column": text, "text_pair_column": pair}
        fields |= {"label_column": label} if needs_label or self.label is not None else {}
        problems = []
        for field, name in fields.items():
            if name is None and field != "text_pair_column":
                usual = (*PAIRS, *TEXTS) if field == "text_column" else LABELS
                rule = f"none of its columns {present_names} is called {', '.join(usual)}"
                problems.append(f"{location}: {rule}: name the column with --{field}")
            elif name is not None and name not in present:
                problems.append(
                    f"{location} has no column {name!r}, only {present_names}. Set {field}: "
                    f"{nearest(name, map(tables.shorten, present))}"
                )
        if problems:
            raise UsageError(problems)
        return text, pair, label if label in present else None


def load_rows(*, columns: Columns = Columns(), needs_label: bool = True, **source: Any) -> row_report.Table:
    """Load labelled texts from files or a dataset; `builtin/python_docs_parts` has paragraphs of Python's documentation.

    Args:
        columns: their names.
        needs_label: False: a file of texts to predict may lack labels.
        source: as of `documents.load_source`.

    Returns:
        A memory-mapped dataset with string columns `text`, `pair`, `label` (without pairs or labels, these hold None), and what
        is known of rows that cannot be used.
    """
    more: dict[str, Any] = {"columns": columns, "needs_label": needs_label, "kind": "labelled texts"}
    return documents.load_source(_read, FEATURES, "text", adapt=_name_classes, **source, **more)


def _make_row(values: Sequence[Any], names: Sequence[str | None], needs_label: bool) -> dict[str, Any]:
    """Make a row of `FEATURES` of the values of text, pair and label. Raises UsageError where they cannot be used.

    Args:
        names: of the columns of text, pair and label.
    """
    for value, name in zip(values[:2], names[:2], strict=True):
        if name is not None:
            row_files.check_text(value, name)
    label = _read_label(values[2], names[2])
    if needs_label and label is None:
        written = "" if values[2] is None or values[2] == "" else f" ({values[2]!r} stands for a missing one)"
        raise UsageError(f"{names[2]!r} has no label{written}: give one, or remove the row")
    return {"text": values[0], "pair": values[1], "label": label}


def _read_label(value: Any, name: str | None) -> str | None:
    """Write a label as a text; None: it is missing. Raises UsageError where it is no label."""
    if value is not None and not isinstance(value, str | int | float):
        raise UsageError(f"{name!r} holds {type(value).__name__}, not a label")
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    label = "" if value is None else str(value).strip()
    if problem := row_files.find_fault_of_text(label):
        raise UsageError(problem)
    return None if label in ("NA", "None") or label.lower() in MISSING else label


@dataclasses.dataclass(frozen=True)
class Text:
    """One sample.

    Attributes:
        sample_id: its number in the dataset.
        tokens: int32 [length], with [CLS] and [SEP].
        first: number of tokens up to the first [SEP], and with it.
        label: a class's number, or a number.
    """

    sample_id: int
    tokens: np.ndarray
    first: int
    label: float

    @property
    def length(self) -> int:
        """Number of tokens, with [CLS] and [SEP]."""
        return len(self.tokens)


A_TEXT, A_PAIR = '"a text"', '{"text": "a text", "text_pair": "another"}'
"""Inputs of a pipeline of transformers, as Python."""


class LabelledTexts(TokenizedTexts):
    """The samples of a dataset of labelled texts.

    Args:
        rows: columns `text`, `pair`, `label`, as `load_rows` returns them.
        tokenizer: with [CLS], [SEP] and [PAD].
        max_seq_length: tokens per sample at most; longer ones are cut at their end, of a pair the longer text.
        classes: names of the classes, in the order of their numbers; None: labels are numbers.
        num_proc: processes that tokenize.
        description: names the texts in messages.

    Raises:
        UsageError: labels that are none of the classes, or no numbers.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_seq_length: int,
        classes: list[str] | None,
        num_proc: int | None = None,
        description: str = "texts",
    ):
        self.rows, self.classes = rows, classes
        self.labels = _numbers(_labels(rows), classes, description)
        features = Features({"tokens": List(Value("int32")), "first": Value("int32"), "is_cut": Value("bool")})
        key = fingerprint(tokenizer), max_seq_length, hash_modules(__name__)
        arguments = {"tokenizer": tokenizer, "max_seq_length": max_seq_length}
        table = map_once(rows, _tokenize, key, description, num_proc, fn_kwargs=arguments, features=features)
        texts = rows.select_columns([name for name in PARTS_OF_ROW[:2] if name in rows.column_names])
        super().__init__(table, texts, tokenizer, max_seq_length, description)
        self.first = table.data.column("first").to_numpy().astype(np.int64)
        self.num_cut = int(np.sum(table.data.column("is_cut").to_numpy()))

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        """Say how many texts there are, of how many classes, and how many were cut."""
        kind = "numbers" if self.classes is None else f"{len(self.classes)} classes"
        cut = f", {self.num_cut:,} cut off after {self.max_length}" if self.num_cut else ""
        return f"{len(self):,} texts of {kind} ({self.num_tokens:,} tokens{cut})"

    def write(self, path: Path, logits: np.ndarray, *, is_judged: bool = False) -> None:
        """Write a csv file of predictions in the order of the texts, or judged: the worst ones first.

        Its columns are `prediction` (a class, or a number), of classes `probability` (the predicted one's), judged `label`,
        `text`, of pairs `pair`, and of classes `probability_CLASS` for each.

        Args:
            path: where the file goes.
            logits: floating [samples, classes]; [samples, 1] when labels are numbers.
            is_judged: whether the texts have labels, which are written beside the predictions.
        """
        names = [*["label"] * is_judged, *PARTS_OF_ROW[: 1 + (self.rows[0]["pair"] is not None)]]
        columns: dict[str, Iterable[Any]] = {name: self.rows[name] for name in names}
        if self.classes is None:
            columns = {"prediction": (f"{value:.6g}" for value in logits[:, 0])} | columns
            order = np.argsort(-np.abs(logits[:, 0] - self.labels), kind="stable") if is_judged else None
        else:
            if is_judged:
                columns["label"] = [self.classes[label] for label in self.labels]
            columns = predictions.list_columns(self.classes, logits, columns)
            order = predictions.sort_by_error(logits, self.labels) if is_judged else None
        predictions.write_table(path, columns, order)

    @property
    def example(self) -> str:
        """The input of a pipeline of transformers, as Python: a text, or a pair of texts."""
        return A_PAIR if self.rows[0]["pair"] is not None else A_TEXT

    def describe_baseline(self) -> list[str]:
        """Say what these texts give a classifier that has learned nothing, in a line; of numbers nothing."""
        if self.classes is None or not len(self.labels):
            return []
        name = tables.shorten(self.classes[Counter(self.labels.tolist()).most_common(1)[0][0]])
        return [f"{name} for every held-out text would have an accuracy of {self.majority_accuracy:.3f}"]

    @property
    def majority_accuracy(self) -> float | None:
        """The accuracy of the most frequent class for every text; None: there are no classes."""
        if self.classes is None or not len(self.labels):
            return None
        return float(np.unique(self.labels, return_counts=True)[1].max() / len(self.labels))

    def describe_labels(self, metrics: Sequence[str]) -> list[str]:
        """Say what the labels are taken for, and which of the metrics do not fit them, in lines."""
        if self.classes is None:
            low, high = self.labels.min(), self.labels.max()
            lines = [f"labels: numbers from {low:g} to {high:g}, a regression; --num_labels N makes N classes of them"]
            if of_classes := [name for name in metrics if name in METRICS_OF_CLASSES]:
                lines.append(
                    f"metrics that compare classes: {', '.join(of_classes)}; --metrics pearsonr spearmanr fit numbers"
                )
            return lines
        counts = Counter(self.labels.tolist())
        names = [f"{tables.shorten(self.classes[place])} ({counts[place]:,})" for place in sorted(counts)]
        more = f" and {len(names) - MAX_CLASSES:,} more" if len(names) > MAX_CLASSES else ""
        return [f"labels: {len(self.classes):,} classes: {', '.join(names[:MAX_CLASSES])}{more}"]

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, the tokens, and the labels."""
        labels = self.labels.tobytes() if self.classes is None else repr([self.classes, self.labels.tolist()])
        return {
            "tokenizer": fingerprint(self.tokenizer),
            "texts": hash_parts(self.tokens.digest(), self.first.tobytes()),
            "labels": hash_parts(labels),
        }

    def draw(self, epoch: int, sample_id: int) -> Text:
        """Return a sample; it is the same in every epoch."""
        return Text(int(sample_id), self.tokens[sample_id], int(self.first[sample_id]), float(self.labels[sample_id]))

    def longest(self) -> Text:
        """Return a sample of max_seq_length tokens, of the first class."""
        return Text(0, np.full(self.max_length, self.tokenizer.sep_token_id, np.int32), self.max_length, 0.0)

    def collate(self, texts: list[Text]) -> dict[str, torch.Tensor | None]:
        """Make a micro-batch of S samples end to end, M tokens, without padding; no samples make one without a label.

        Returns:
            what `ragged.make_micro_batch` returns, with each sample's first token as query.
            labels: int64 [S], a sample without a label has -100; float64 [S] when labels are numbers, NaN without one.
            counts: int64 [1], the number of samples.
        """
        counts = torch.tensor([len(texts)])
        missing_label = IGNORED if self.classes is not None else np.nan
        texts = texts or [Text(0, np.full(2, self.tokenizer.sep_token_id), 2, missing_label)]
        labels = torch.tensor(
            [text.label for text in texts], dtype=torch.float64 if self.classes is None else torch.int64
        )
        return {
            **make_micro_batch(
                [text.tokens for text in texts], [text.first for text in texts], [np.zeros(1, np.int64)] * len(texts)
            ),
            "labels": labels,
            "counts": counts,
        }


def build(
    recipe: TextClassification, num_proc: int | None = None, on_bad_row: str = "refuse"
) -> tuple[LabelledTexts, LabelledTexts | None]:
    """Build the recipe's training and held-out texts, see `samestep.data`.

    Raises:
        UsageError: data or tokenizer that cannot be used, a single class, another number of classes than num_labels.
    """
    columns = Columns(recipe.text_column, recipe.text_pair_column, recipe.label_column)
    loaded = documents.load_tables(recipe, load_rows, columns=columns, num_proc=num_proc)
    rows, held_out = documents.split_tables(recipe, loaded, on_bad_row)
    classes = find_classes(_labels(rows), recipe.num_labels)

    def train_tokenizer() -> PreTrainedTokenizerBase:
        texts = rows.select_columns("text")
        pairs = rows.filter(lambda pair: pair is not None, input_columns="pair").select_columns("pair")
        all_texts = datasets.concatenate_datasets([texts, pairs.rename_column("pair", "text")]) if len(pairs) else texts
        return train_wordpiece(all_texts, recipe.vocab_size, recipe.do_lower_case)

    tokenizer = choose_tokenizer(recipe, train_tokenizer, REQUIRED_TOKENS, "BERT")
    settings: dict[str, Any] = {"max_seq_length": recipe.max_seq_length, "classes": classes, "num_proc": num_proc}
    train = LabelledTexts(rows, tokenizer, **settings, description="training texts")
    rest = LabelledTexts(held_out, tokenizer, **settings, description="held-out texts") if len(held_out) else None
    num_cut = [part.num_cut for part in (train, rest) if part is not None]
    notes = [*train.describe_labels(recipe.metrics), *([] if rest is None else rest.describe_baseline())]
    if not is_builtin(recipe.dataset_name):
        notes += row_report.describe_repeats(rows, held_out, PARTS_OF_ROW, "label")
    num_cut = num_cut if len(loaded) > 1 else [sum(num_cut)]
    train.row_reports = documents.report_tables(recipe, loaded, rows, notes, num_cut)
    train.row_reports = row_report.add_notes(train.row_reports, train, rest)
    return train, rest


def from_files(
    files: Sequence[str], recipe: TextClassification, train: LabelledTexts, on_bad_row: str = "refuse"
) -> LabelledTexts:
    """Read texts to label, with or without labels of their own, in the same way as the training texts.

    Raises:
        UsageError: files that cannot be read.
    """
    columns = Columns(recipe.text_column, recipe.text_pair_column, None)
    table = load_rows(train_file=files, columns=columns, needs_label=False)
    (rows,) = row_report.take_good([table], on_bad_row)
    rows = rows.remove_columns("label").add_column("label", [None] * len(rows)).cast(rows.features)
    settings: dict[str, Any] = {"max_seq_length": train.max_length, "classes": train.classes}
    texts = LabelledTexts(rows, train.tokenizer, **settings, description="texts to predict")
    texts.row_reports = [table.report("predict_file", num_cut=texts.num_cut)]
    return texts


def find_classes(labels: Sequence[str], num_labels: int | None) -> list[str] | None:
    """Find the classes that labels name, sorted (as numbers where all are whole numbers); None: labels are numbers.

    With num_labels None, labels are numbers if each of them is a number, and not all are whole. Whole numbers are one class
    however they are written: 1, 1.0 and 1e0.

    Raises:
        UsageError: a single label, another number of classes than num_labels, numbers that are not whole beside labels that
            are no numbers, or -100, which stands for a missing label.

    >>> find_classes(["10", "9", "10"], None), find_classes(["b", "a"], 2), find_classes(["1.5", "2"], None)
    (['9', '10'], ['a', 'b'], None)
    >>> find_classes(["0.0", "1.0", "1"], None)
    ['0', '1']
    """
    names = sorted(set(labels))
    is_whole = all(map(_is_whole, names))
    if is_whole:
        names = sorted(sorted(set(map(_write_whole, names))), key=int)
    if len(names) == 1:
        raise UsageError(
            f"the training texts have a single label, {tables.list_names(names)}: nothing can be learned; check "
            "label_column and train_file"
        )
    fractions = [name for name in names if _is_number(name) and not _is_whole(name)]
    others = [name for name in names if not _is_number(name)]
    if num_labels == 1 or (num_labels is None and fractions and not others):
        return None
    commas = [name for name in others if "," in name and NUMBER.fullmatch(name.replace(",", ".", 1))]
    if num_labels is None and commas and commas == others:
        raise UsageError(
            f"labels of the training texts are numbers with a decimal comma ({tables.list_names(commas[:3])}): write a "
            f"point, or set num_labels to {len(names)} if they are classes"
        )
    if num_labels is None and fractions and len(fractions) > len(others):
        raise UsageError(
            f"labels of the training texts are numbers, not all of them whole ({tables.list_names(fractions[:3])}), but "
            f"{tables.list_names(others)} is none. Mend it, or set num_labels to {len(names)} if they are classes"
        )
    if str(IGNORED) in names:
        raise UsageError(
            f"a label of the training texts is {IGNORED}, which stands for a missing one. Remove the rows, give them a class, "
            "or set num_labels to 1 if labels are numbers"
        )
    class_names = ", ".join(map(tables.shorten, names[:10])) + (", ..." if len(names) > 10 else "")
    if num_labels is not None and len(names) != num_labels:
        raise UsageError(
            f"num_labels is {num_labels}, but the training texts have {len(names)} classes ({class_names}): set it to "
            f"{len(names)}, or mend the labels"
        )
    return names


def _labels(rows: Dataset) -> list[str | None]:
    """Read the column `label` at once; `datasets` would read one row at a time."""
    return rows.select_columns("label").with_format("arrow")[:]["label"].to_pylist()


def _numbers(labels: Sequence[str | None], classes: list[str] | None, description: str) -> np.ndarray:
    """Turn labels into numbers of their classes, int64, or into the numbers that they are, float64; None into -100, or NaN."""
    if classes is None:
        wrong = sorted({label for label in labels if label is not None and not _is_number(label)})
        rule = "not all of them are numbers: set num_labels to that of the classes, or mend them"
        numbers = [np.nan if label is None else float(label) for label in labels] if not wrong else []
    else:
        if all(map(_is_whole, classes)):
            labels = [_write_whole(label) if label is not None and _is_whole(label) else label for label in labels]
        places = {name: place for place, name in enumerate(classes)} | {None: IGNORED}
        wrong = sorted(set(labels) - set(places))
        rule = f"the training texts have no such class, only {tables.list_names(classes)}"
        numbers = [places[label] for label in labels] if not wrong else []
    if wrong:
        count, label_names = sum(label in set(wrong) for label in labels), tables.list_names(wrong)
        raise UsageError(f"labels of {description}: {label_names} ({count} of {len(labels)} rows), but {rule}")
    return np.array(numbers, np.float64 if classes is None else np.int64)


def _is_whole(label: str) -> bool:
    """Tell whether a label is a whole number, however it is written."""
    if label.removeprefix("-").isdecimal():
        return len(label) < MAX_DIGITS
    if NUMBER.fullmatch(label) is None:
        return False
    value = Decimal(label)
    return value.adjusted() < MAX_DIGITS and value == value.to_integral_value()


def _write_whole(label: str) -> str:
    """Write a whole number as digits; what is digits stays, so that 01 and 1 are two classes."""
    return label if label.removeprefix("-").isdecimal() else str(int(Decimal(label)))


def _is_number(label: str) -> bool:
    return NUMBER.fullmatch(label) is not None and bool(np.isfinite(float(label)))


def _tokenize(batch: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> dict[str, list]:
    texts, pairs = batch["text"], batch["pair"]
    inputs = [texts] if pairs[0] is None else [texts, pairs]
    encoding = tokenizer(
        *inputs,
        truncation="longest_first",
        max_length=max_seq_length,
        return_token_type_ids=True,
        return_overflowing_tokens=False,
        verbose=False,
    )
    tokens = encoding["input_ids"]
    whole = tokenizer(*inputs, return_length=True, verbose=False)["input_ids"]
    return {
        "tokens": [np.array(ids, np.int32) for ids in tokens],
        "first": [kinds.count(0) for kinds in encoding["token_type_ids"]],
        "is_cut": [len(full) > max_seq_length for full in whole],
    }


# ---------------------------------------------------------------------------------------------------------------------
# rows


def _name_classes(dataset: Dataset) -> Dataset:
    """Give the names of classes in place of their numbers; -1 stands for none."""
    for column, feature in dataset.features.items():
        if isinstance(feature, ClassLabel):
            dataset = dataset.map(
                lambda row, column=column, names=feature.names: {
                    column: names[row[column]] if row[column] >= 0 else None
                },
                features=Features(dataset.features | {column: Value("string")}),
            )
    return dataset


def _read(
    rows: Iterable[tuple[str, Any]], _: str | None, columns: Columns, needs_label: bool
) -> Iterator[dict[str, str | None]]:
    """Read rows, and behind them their `row_report.Notes`. Raises UsageError at a fault that is not one row's."""

    def find(place: str, present: list[str], _: bool) -> tuple[str | None, ...]:
        return columns.find(place, present, needs_label)

    def make(values: Mapping[str, Any], names: Sequence[str | None]) -> dict[str, Any]:
        return _make_row([None if name is None else values[name] for name in names], names, needs_label)

    notes = row_report.Notes()
    yield from row_report.read_noted(rows, find, make, notes)
    yield from notes.write(FEATURES)
