"""Labelled texts: what is read, refused, tokenized and laid out in micro-batches."""

import csv
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from samestep.data import labelled_texts, row_report
from samestep.data.builtin import python_docs
from samestep.data.labelled_texts import Columns, find_classes, load_rows
from samestep.errors import UsageError
from samestep.recipe.catalog import load

ROWS = [("good, I say", "yes", "b"), ('a "bad" one', "no", "a"), ("so so", "maybe", "b"), ("fine", "or not", "a")] * 8


def write(path, rows=ROWS, header=("text", "other", "label")):
    """Write a file of the kind that its name says."""
    if path.suffix == ".parquet":
        columns = zip(*rows, strict=True)
        pyarrow.parquet.write_table(pa.table(dict(zip(header, columns, strict=True))), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows))
    else:
        quote = (lambda cell: f'"{cell.replace(chr(34), chr(34) * 2)}"') if path.suffix == ".csv" else str
        separator = "," if path.suffix == ".csv" else "\t"
        lines = [separator.join(header), *(separator.join(map(quote, map(str, row))) for row in rows)]
        path.write_text("\n".join(lines) + "\n")
    return str(path)


def load_texts(on_bad_row="refuse", **source):
    return row_report.take_good([load_rows(**source)], on_bad_row)[0]


def make_recipe(file, **changes):
    base = {"train_file": [str(file)], "vocab_size": 200, "max_seq_length": 16, "validation_fraction": 0.25}
    return load("finetune_small_cpu", base | {"dataset_name": None} | changes)


@pytest.fixture
def texts(tmp_path):
    return labelled_texts.build(make_recipe(write(tmp_path / "rows.csv")))


@pytest.fixture
def pairs(tmp_path):
    names = {"text_column": "text", "text_pair_column": "other"}
    return labelled_texts.build(make_recipe(write(tmp_path / "pairs.csv"), **names))


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_every_kind_of_file_is_read_alike(tmp_path, kind):
    rows = load_texts(train_file=[write(tmp_path / f"rows.{kind}")])
    assert [(row["text"], row["pair"], row["label"]) for row in rows] == [
        (text, None, label) for text, _, label in ROWS
    ]
    table = load_texts(train_file=[write(tmp_path / f"rows.{kind}")], columns=Columns("text", "other", "label"))
    assert table["pair"][:] == [pair for _, pair, _ in ROWS]


@pytest.mark.parametrize(
    ("header", "places"),
    [
        (("sentence1", "sentence2", "label"), (0, 1)),
        (("premise", "hypothesis", "class"), (0, 1)),
        (("question", "sentence", "label"), (0, 1)),
        (("id", "review", "labels"), (1, None)),
        (("sentence", "id", "score"), (0, None)),
    ],
)
def test_columns_are_found_by_their_usual_names(tmp_path, header, places):
    row = load_texts(train_file=[write(tmp_path / "rows.csv", header=header)])[0]
    assert (row["text"], row["pair"]) == tuple(None if place is None else ROWS[0][place] for place in places)
    assert row["label"] == "b"


def test_a_column_that_is_named_is_taken(tmp_path):
    row = load_texts(train_file=[write(tmp_path / "rows.csv")], columns=Columns("other", None, "text"))[0]
    assert (row["text"], row["pair"], row["label"]) == ("yes", None, "good, I say")


def test_labels_of_json_may_be_numbers(tmp_path):
    rows = load_texts(train_file=[write(tmp_path / "rows.jsonl", [("x", "y", 3), ("z", "y", 0.5)])])
    assert rows["label"][:] == ["3", "0.5"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\nhello\n", "a.csv:2: 1 fields, but the header names 2"),
        ("a.csv", "text,label\nhello, you,b\n", "a.csv:2: 3 fields, but the header names 2"),
        ("a.csv", "text,label\n ,b\n", "a.csv:2: 'text' is empty: fill it in, or remove the row"),
        ("a.csv", "text,label\nhello,\n", "a.csv:2: 'label' has no label"),
        ("a.csv", "text,label\n", "a.csv holds no row"),
        ("a.csv", "title,label\nx,y\n", r"none of its columns 'title', 'label' is called .*--text_column"),
        ("a.csv", "text,kind\nx,y\n", r"none of its columns 'text', 'kind' is called .*--label_column"),
        ("a.csv", b"text,label\n\xe9t\xe9,b\n", "a.csv:2: not UTF-8 at byte offset 11"),
        (
            "a.jsonl",
            '{"text": "x", "label": "y"}\n{"text": 3, "label": "y"}\n',
            "a.jsonl:2: 'text' holds int, not text",
        ),
        ("a.jsonl", '{"text": "x", "label": ["y"]}\n', "a.jsonl:1: 'label' holds list, not a label"),
        ("a.jsonl", '{"text": "x", "label": null}\n', "a.jsonl:1: 'label' has no label"),
        ("a.jsonl", '{"text": "x", "label": "y"}\n{"text": "x"}\n', "none of its columns 'text' is called label"),
        ("a.jsonl", '{"text": "x", \n', "a.jsonl:1: not a JSON object"),
        ("a.txt", "hello", "unknown kind '.txt'"),
        (
            "a.jsonl",
            f'{{"text": "x", "label": {"7" * 5000}}}\n',
            "^[^\n]*a.jsonl:1: a number of more than 4,300 digits",
        ),
        ("a.jsonl", '{"text": "x", "label": ' + "[" * 10**5, "^[^\n]*a.jsonl:1: lists or objects nested too deep"),
        ("a.jsonl", '{"text": "x\\ud83d", "label": "y"}', "a.jsonl:1: half of a surrogate pair"),
        ("a.jsonl", '{"text": "x", "label": "\\ud83d"}', "a.jsonl:1: half of a surrogate pair"),
        ("a.csv", bytes(1000), "^[^\n]*a.csv holds no row: leave it out$"),
        ("a.tsv", "\ntext\tlabel\n", "a.tsv:1: the first line is blank"),
        ("a.csv", 'text,label\n"hello,b\n', "a.csv: the row after line 1 is not CSV: .*Close its quotation marks"),
        ("a.parquet", bytes(1000), "^[^\n]*a.parquet cannot be read: [^\n]*$"),
    ],
)
def test_a_fault_of_a_file_is_one_clear_line(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        load_texts(train_file=[str(path)])


def test_a_column_that_is_not_there_lists_those_that_are(tmp_path):
    with pytest.raises(UsageError, match=r"no column 'txt', only 'text', 'other', 'label'. Set text_column: .*text"):
        load_texts(train_file=[write(tmp_path / "rows.csv")], columns=Columns("txt", None, "label"))


def test_a_file_to_predict_needs_no_labels_and_uses_none(tmp_path, texts):
    train, _ = texts
    for name, rows, header in (
        ("bare.csv", [("so",), ("fine",)], ("text",)),
        ("more.csv", ROWS, ("text", "id", "label")),
    ):
        file = write(tmp_path / name, rows, header)
        source = labelled_texts.from_files([file], make_recipe(file), train)
        assert len(source) == len(rows)
        assert set(source.labels.tolist()) == {-100}


def test_a_dataset_of_the_hub_is_read_alike(tmp_path):
    features = datasets.Features(
        {name: datasets.Value("string") for name in ("sentence1", "sentence2")}
        | {"label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1, 0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "hub" / "train.parquet")
    table = load_texts(train_file=None, dataset_name=str(tmp_path / "hub"))
    assert table[:] == {"text": ["a", "b"], "pair": ["c", "d"], "label": ["yes", "no"]}
    hidden = {"sentence1": ["a"], "sentence2": ["c"], "label": [-1]}
    datasets.Dataset.from_dict(hidden, features=features).to_parquet(tmp_path / "hidden" / "train.parquet")
    with pytest.raises(UsageError, match="row 0: 'label' has no label"):
        load_texts(train_file=None, dataset_name=str(tmp_path / "hidden"))


def test_names_of_datasets_that_cannot_be_had():
    with pytest.raises(UsageError, match="builtin/python_docs_parts"):
        load_texts(train_file=None, dataset_name="builtin/python_doc")
    with pytest.raises(UsageError, match="Check the names and the network"):
        load_texts(train_file=None, dataset_name="nobody/nothing")


def test_paragraphs_of_the_documentation():
    rows = load_texts(train_file=None, dataset_name="builtin/python_docs_parts")
    counts = {name: rows["label"].count(name) for name in set(rows["label"])}
    assert set(counts) <= set(python_docs.PARTS)
    assert len(counts) >= 8
    assert counts["reference"] == max(counts.values()) < 0.5 * len(rows)
    assert len(set(rows["text"])) == len(rows), "held out, a paragraph that comes twice would be known"
    assert min(map(len, rows["text"])) >= python_docs.MIN_PARAGRAPH


# ---------------------------------------------------------------------------------------------------------------------
# Labels


def test_classes_are_those_of_the_training_texts():
    assert find_classes(["b", "a", "b"], None) == ["a", "b"]
    assert find_classes(["10", "9", "-1"], None) == ["-1", "9", "10"]
    assert find_classes(["10", "9", "x"], 3) == ["10", "9", "x"]
    assert find_classes(["1", "2"], 1) is None
    assert find_classes(["1.5", "2"], None) is None
    assert find_classes(["7" * 5000, "1"], None) == ["1", "7" * 5000]
    for num_labels in (None, 1, 2):
        with pytest.raises(UsageError, match="a single label, 'only': nothing can be learned"):
            find_classes(["only", "only"], num_labels)
        with pytest.raises(UsageError, match=r"a single label, '0\.5': nothing can be learned"):
            find_classes(["0.5", "0.5"], num_labels)
    with pytest.raises(UsageError, match=r"num_labels is 3, but the training texts have 2 classes \(a, b\)"):
        find_classes(["a", "b"], 3)


def test_a_label_that_only_the_held_out_texts_have(tmp_path):
    held_out = write(tmp_path / "held_out.csv", [("x", "y", "c"), ("x", "y", "a"), ("x", "y", "c")])
    recipe = make_recipe(write(tmp_path / "rows.csv"), validation_file=[held_out])
    with pytest.raises(
        UsageError, match=r"held-out texts: 'c' \(2 of 3 rows\), but the training texts have no such class"
    ):
        labelled_texts.build(recipe)


def test_labels_that_are_numbers(tmp_path):
    rows = [(f"text {place}", "", place / 4) for place in range(20)]
    train, held_out = labelled_texts.build(make_recipe(write(tmp_path / "rows.jsonl", rows)))
    assert train.classes is None
    assert [report.num_held_out for report in train.row_reports] == [len(held_out)]
    assert sorted([*train.labels, *held_out.labels]) == [row[2] for row in rows]
    micro_batch = train.collate([train.draw(0, 3)])
    assert micro_batch["labels"].item() == train.labels[3]
    assert train.collate([])["labels"].isnan().all()
    with pytest.raises(UsageError, match=r"labels of training texts: 'a', 'b' .*not all of them are numbers"):
        labelled_texts.build(make_recipe(write(tmp_path / "rows.csv"), num_labels=1))


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
@pytest.mark.parametrize("labels", [(0.0, 1.0), ("0.", "1."), ("0e0", "1E+0"), ("+0", "+1"), ("0.0", "1"), (0, 1.0)])
def test_whole_numbers_are_classes_however_they_are_written(tmp_path, kind, labels):
    if kind == "parquet" and labels == (0, 1.0):
        labels = (0.0, 1.0)  # a column has one kind
    rows = [(f"text {place}", "", labels[place % 2]) for place in range(20)]
    train, _ = labelled_texts.build(make_recipe(write(tmp_path / f"rows.{kind}", rows), validation_fraction=0.0))
    assert train.classes == ["0", "1"]
    assert train.labels.tolist() == [0, 1] * 10
    assert "labels: 2 classes: 0 (10), 1 (10)" in str(train.row_reports[0])


def test_held_out_labels_may_be_written_otherwise(tmp_path):
    files = [
        write(tmp_path / f"{name}.csv", [("x y", "", label) for label in labels] * 3)
        for name, labels in (("train", ("0", "1")), ("held_out", ("0.0", "1.0")))
    ]
    _, held_out = labelled_texts.build(make_recipe(files[0], validation_file=[files[1]]))
    assert held_out.labels.tolist() == [0, 1] * 3


def test_names_that_look_like_numbers_stay_names():
    assert find_classes(["01", "1"], None) == ["01", "1"]
    assert find_classes(["1_0", "2_0"], None) == ["1_0", "2_0"]
    assert find_classes(["1.0", "good"], None) == ["1.0", "good"]
    assert find_classes(["0,5", "1,5"], 2) == ["0,5", "1,5"]
    assert find_classes(["1e20", "12345678901234567.0"], None) == ["12345678901234567", "1" + "0" * 20]
    assert find_classes(["none", "na", "-1"], None) == ["-1", "na", "none"]


def test_a_regression_is_said(tmp_path):
    rows = [(f"text {place}", "", place / 4) for place in range(20)]
    train, _ = labelled_texts.build(make_recipe(write(tmp_path / "rows.csv", rows), validation_fraction=0.0))
    text = str(train.row_reports[0])
    assert "labels: numbers from 0 to 4.75, a regression; --num_labels N makes N classes" in text
    assert (
        "metrics that compare classes: accuracy, f1, matthews_correlation; --metrics pearsonr spearmanr fit numbers"
        in text
    )


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ["0.5", "1.5", "2.5", "?"],
            r"numbers, not all of them whole \('0.5', '1.5', '2.5'\), but '\?' is none. Mend it",
        ),
        (["0.5", "1.5", "inf"], "but 'inf' is none"),
        (["0,5", "1", "2,5"], r"numbers with a decimal comma \('0,5', '2,5'\): write a point, or set num_labels to 3"),
        (["-100", "0", "1"], "a label of the training texts is -100, which stands for a missing one"),
        (["-100.0", "0", "1"], "a label of the training texts is -100, which stands for a missing one"),
        (["1", "1.0"], "a single label, '1': nothing can be learned"),
    ],
)
def test_labels_that_would_be_taken_for_something_else(labels, message):
    with pytest.raises(UsageError, match=message):
        find_classes(labels, None)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize(
    "missing", ["", " ", "nan", "NaN", "NAN", "None", "null", "NULL", "NA", "N/A", "n/a", "<NA>", "NaT"]
)
def test_every_spelling_of_a_missing_label_is_one(tmp_path, kind, missing):
    rows = [(f"text {place}", "", "ab"[place % 2] if place % 5 else missing) for place in range(20)]
    file = write(tmp_path / f"rows.{kind}", rows)
    with pytest.raises(UsageError, match=r"'label' has no label.* leaves out these 4 rows of 20"):
        load_texts(train_file=[file])
    train, _ = labelled_texts.build(make_recipe(file, validation_fraction=0.0), on_bad_row="skip")
    assert (train.classes, len(train)) == (["a", "b"], 16)
    (report,) = train.row_reports
    assert (report.num_read, report.num_used, len(report.bad)) == (20, 16, 4)


def test_labels_that_are_missing_in_other_kinds_of_cells(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "x", "label": NaN}\n{"text": "x", "label": null}\n{"text": "x", "label": 1}\n'
    )
    columns = {"text": ["x", "x", "x"], "label": [1.0, None, float("nan")]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "b.parquet")
    for name in ("a.jsonl", "b.parquet"):
        rows = load_texts(train_file=[str(tmp_path / name)], on_bad_row="skip")
        assert rows["label"][:] == ["1"]


def test_all_kinds_of_faults_of_a_file_are_named_at_once(tmp_path):
    lines = ["text,label,note", "fine,a,", ",b,", "too,many,cells,here", "no label,,", "fine,b,", "few"]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError) as raised:
        labelled_texts.build(make_recipe(tmp_path / "rows.csv"))
    texts = [str(problem) for problem in raised.value.problems]
    assert [text.split("rows.csv:")[1][:2] for text in texts] == ["3:", "4:", "5:"]
    assert "--on_bad_row skip leaves out these 4 rows of 6" in texts[-1]
    train, _ = labelled_texts.build(make_recipe(tmp_path / "rows.csv", validation_fraction=0.0), on_bad_row="skip")
    assert train.rows["text"][:] == ["fine", "fine"]
    (report,) = train.row_reports
    assert [problem.place.split(":")[1] for problem in report.bad] == ["3", "4", "5", "7"]
    assert dict(report.unused) == {"note": 4}
    assert list(report.columns) == ["text", "label"]


def test_the_report_says_how_cells_are_told_apart(tmp_path):
    quoted = [(f'the "best" film {place}', "", "ab"[place % 2]) for place in range(8)]
    with open(tmp_path / "quoted.tsv", "w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("text", "other", "label"), *quoted])
    plain = write(tmp_path / "plain.tsv", [('"the end', "", "a"), ("so so", "", "b")] * 4)
    unmarked = write(tmp_path / "unmarked.tsv", [("fine", "", "a"), ("so so", "", "b")] * 4)
    for file, words in (
        (tmp_path / "quoted.tsv", 'cells between tabs, some in quotation marks (")'),
        (plain, "cells between tabs, quotation marks are characters"),
        (unmarked, None),
    ):
        train, _ = labelled_texts.build(make_recipe(file, validation_fraction=0.0))
        text = str(train.row_reports[0])
        assert words is None or words in text
        assert ("cells between" in text) == (words is not None)


# ---------------------------------------------------------------------------------------------------------------------
# Samples and micro-batches


def test_a_sample_is_its_text_between_marks(texts):
    train, held_out = texts
    assert (len(train), len(held_out)) == (24, 8)
    for place in range(len(train)):
        sample = train.draw(3, place)
        assert train.tokenizer.decode(sample.tokens[1:-1]) == train.tokenizer.decode(
            train.tokenizer(train.rows[place]["text"], add_special_tokens=False)["input_ids"]
        )
        assert sample.first == sample.length
        assert train.classes[int(sample.label)] == train.rows[place]["label"]
    assert "24 texts of 2 classes" in str(train)


def test_a_pair_is_both_texts(pairs):
    train, _ = pairs
    sep = train.tokenizer.sep_token_id
    for place in range(len(train)):
        sample, row = train.draw(0, place), train.rows[place]
        ends = np.flatnonzero(sample.tokens == sep)
        assert sample.first == ends[0] + 1
        assert ends[-1] == sample.length - 1
        for part, text in ((sample.tokens[1 : ends[0]], row["text"]), (sample.tokens[ends[0] + 1 : -1], row["pair"])):
            assert part.tolist() == train.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_long_texts_are_cut_and_counted(tmp_path):
    rows = [("word " * 30, "other " * 3, "a"), ("word", "other", "b")] * 5
    columns = {"text_column": "text", "text_pair_column": "other", "validation_fraction": 0.0}
    train, held_out = labelled_texts.build(make_recipe(write(tmp_path / "rows.csv", rows), **columns))
    assert held_out is None
    assert train.num_cut == 5
    assert "5 cut off after 16" in str(train)
    long = train.draw(0, 0)
    assert long.length == 16 == train.longest().length
    assert long.length - long.first == 4, "the longer one of the pair is cut"


def test_a_micro_batch(pairs):
    train, _ = pairs
    samples = [train.draw(0, place) for place in range(3)]
    micro_batch = train.collate(samples)
    num_tokens = sum(sample.length for sample in samples)
    row = {name: micro_batch[name][0, :num_tokens].tolist() for name in ("input_ids", "token_type_ids", "position_ids")}
    assert row["input_ids"] == [token for sample in samples for token in sample.tokens.tolist()]
    kinds = [[0] * sample.first + [1] * (sample.length - sample.first) for sample in samples]
    assert row["token_type_ids"] == [kind for sample in kinds for kind in sample]
    assert row["position_ids"] == [place for sample in samples for place in range(sample.length)]
    assert micro_batch["input_ids"][0][micro_batch["queries"][:3]].tolist() == [train.tokenizer.cls_token_id] * 3
    assert micro_batch["query_ends"].tolist() == [0, 1, 2, 3]
    assert micro_batch["is_token"].sum((1, 2, 3)).tolist() == [sample.length for sample in samples]
    assert micro_batch["labels"].tolist() == [sample.label for sample in samples]
    assert micro_batch["counts"].tolist() == [3]
    empty = train.collate([])
    assert len(empty["queries"]) == 1
    assert empty["labels"].tolist() == [-100]
    assert empty["counts"].tolist() == [0]


def test_the_tokenizer_learns_from_both_texts_of_a_pair(pairs, texts):
    assert "maybe" in pairs[0].tokenizer.get_vocab()
    assert "maybe" not in texts[0].tokenizer.get_vocab()


def test_fingerprints_tell_texts_from_labels(tmp_path):
    def prints(name, rows, **changes):
        return labelled_texts.build(make_recipe(write(tmp_path / name, rows), **changes))[0].fingerprints

    first = prints("rows.csv", ROWS)
    others = [(text, pair, {"a": "b", "b": "a"}[label]) for text, pair, label in ROWS]
    changed = prints("labels.csv", others)
    assert {name for name in first if first[name] != changed[name]} == {"labels"}
    renamed = prints("names.csv", [(text, pair, label * 2) for text, pair, label in ROWS])
    assert {name for name in first if first[name] != renamed[name]} == {"labels"}
    shorter = prints("rows.csv", ROWS, max_seq_length=8)
    assert {name for name in first if first[name] != shorter[name]} <= {"texts"}


def write_and_read(texts, path, logits) -> list[dict[str, str]]:
    texts.write(path, logits)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_predictions_are_written_in_order(tmp_path, pairs):
    train, _ = pairs
    logits = np.zeros((len(train), 2))
    logits[:2] = [[0.0, np.log(3)], [800.0, 0.0]]
    places = {"text": train.rows["text"][:], "pair": train.rows["pair"][:]}
    rows = write_and_read(train, tmp_path / "predictions.csv", logits)
    names = ("prediction", "probability", "probability_a", "probability_b")
    assert [[row[name] for name in names] for row in rows[:2]] == [["b", "0.75", "0.25", "0.75"], ["a", "1", "1", "0"]]
    assert {name: [row[name] for row in rows] for name in places} == places
    train.classes = None
    numbers = write_and_read(train, tmp_path / "numbers.csv", logits[:, 1:])
    assert [float(row["prediction"]) for row in numbers] == pytest.approx(logits[:, 1].tolist(), rel=1e-5)
    assert {name: [row[name] for row in numbers] for name in places} == places
    assert set(numbers[0]) == {"prediction", *places}


def test_judged_predictions_begin_with_the_worst(tmp_path, pairs):
    train, _ = pairs
    labels = np.array([0, 1] * len(train))[: len(train)]
    train.labels, logits = labels, np.stack([2.0 * (labels == 0), 2.0 * (labels == 1)], 1)
    logits[1], logits[2] = [3.0, 0.0], [0.0, 9.0]  # wrong, the second the surer
    train.write(tmp_path / "judged.csv", logits, is_judged=True)
    with (tmp_path / "judged.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["label"], row["prediction"]) for row in rows[:2]] == [("a", "b"), ("b", "a")]
    assert [row["text"] for row in rows[:2]] == [train.rows["text"][2], train.rows["text"][1]]
    assert all(row["label"] == row["prediction"] for row in rows[2:])
    assert train.describe_baseline()[0].startswith("a for every held-out text would have an accuracy of ")
    train.classes, train.labels = None, np.arange(len(train), dtype=float)
    train.write(tmp_path / "numbers.csv", np.zeros((len(train), 1)), is_judged=True)
    with (tmp_path / "numbers.csv").open(newline="", encoding="utf-8") as file:
        assert next(csv.DictReader(file))["text"] == train.rows["text"][-1]
    assert train.describe_baseline() == []


def test_labels_that_are_numbers_reach_the_loss_as_they_were_written(tmp_path):
    rows = [(text, other, str(0.1 + place)) for place, (text, other, _) in enumerate(ROWS)]
    texts, _ = labelled_texts.build(
        make_recipe(write(tmp_path / "rows.csv", rows), num_labels=1, validation_fraction=0)
    )
    labels = texts.collate([texts.draw(0, place) for place in range(3)])["labels"]
    assert labels.tolist() == [0.1, 1.1, 2.1]
