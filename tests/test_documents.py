"""samestep.data.documents: every source, every error, the cache, the split, the sentences."""

import csv
import itertools
import json
import os
import re
import socket
import subprocess
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data import documents, row_files, row_report
from samestep.data.builtin import python_docs
from samestep.data.documents import load_rows, split_documents, split_sentences
from samestep.errors import UsageError
from samestep.recipe.catalog import load as load_recipe

# Commas, quotes, line ends inside, a line separator that is no line end, letters beyond ASCII, spaces at both ends.
TEXTS = ["Plain.", 'A "quoted", comma.\nSecond line.', " Ünïcödé 漢字 😀 \u2028 kept. ", "x" * 200_000]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, use_cache):
    """Use a cache of the test's own."""
    use_cache(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)


def write(path, texts, column="text"):
    """Write rows with an empty, a blank and (where the kind knows it) a missing text among them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": 1, column: text} for text in ["", *texts, " \n "]]
    if path.suffix == ".txt":
        path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    elif path.suffix in (".csv", ".tsv"):
        delimiter = "," if path.suffix == ".csv" else "\t"
        with open(path, "w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["id", column], lineterminator="\n", delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list([*rows, {"id": 2, column: None}]).to_parquet(path)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in [*rows, {"id": 2, column: None}]]
        path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def load_documents(on_bad_row="refuse", **source):
    return row_report.take_good([load_rows(**source)], on_bad_row)[0]


def load(*files, **kwargs):
    return load_documents(train_file=list(files), dataset_name=None, **kwargs)


def load_name(name, **kwargs):
    return load_documents(train_file=None, dataset_name=name, **kwargs)


@pytest.mark.parametrize("kind", row_files.READERS)
def test_every_kind_gives_the_same_documents(tmp_path, kind):
    loaded = load(write(tmp_path / f"data{kind}", TEXTS))
    assert loaded["text"][:] == TEXTS
    assert loaded.features == datasets.Features({"text": datasets.Value("string")})
    assert loaded.cache_files  # on disk and memory-mapped


@pytest.mark.parametrize("kind", [".json", ".csv", ".parquet"])
def test_text_column(tmp_path, kind):
    loaded = load(write(tmp_path / f"data{kind}", TEXTS, column="body"), text_column="body")
    assert loaded.column_names == ["text"]
    assert loaded["text"][:] == TEXTS


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"one", ["one"]),
        (b"\n\n \none\ntwo \n\t\n\n\n three\n", ["one\ntwo ", " three"]),
        (b"one\r\ntwo\r\n\r\nthree\r\n", ["one\ntwo", "three"]),
        (b"\xef\xbb\xbfone\n\n\xef\xbb\xbftwo", ["one", "\ufefftwo"]),
    ],
)
def test_blank_lines_separate_the_documents_of_a_text_file(tmp_path, raw, expected):
    (tmp_path / "data.txt").write_bytes(raw)
    assert load("data.txt")["text"][:] == expected


def test_byte_order_mark_and_windows_line_ends_in_csv_and_json(tmp_path):
    (tmp_path / "data.csv").write_bytes(b'\xef\xbb\xbftext,id\r\n"one\r\ntwo",1\r\n')
    (tmp_path / "data.json").write_bytes(b'\xef\xbb\xbf{"text": "three"}\r\n\r\n')
    assert load("data.csv", "data.json")["text"][:] == ["one\ntwo", "three"]


@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"indent": 0, "ensure_ascii": False}])
def test_a_json_array_is_read_as_its_objects(tmp_path, options):
    rows = [{"text": f"{text} ] é", "more": [{"text": "}"}]} for text in TEXTS]
    (tmp_path / "data.json").write_text("\ufeff \n" + json.dumps(rows, **options) + "\n\n", encoding="utf-8")
    read = list(row_files.read_json_lines("data.json"))
    assert [row for _, row in read] == rows
    lines = (tmp_path / "data.json").read_text(encoding="utf-8").split("\n")
    assert all('"text"' in "".join(lines[number - 1 : number + 1]) for number, _ in read[: 99 if options else 1])
    assert load("data.json")["text"][:] == [row["text"] for row in rows]


def test_order_is_that_of_the_patterns_then_of_the_paths(tmp_path, monkeypatch):
    for name in ("b/z.txt", "b/a.txt", "b/c/m.txt", "b/k.csv", "a.jsonl", "x[1].txt"):
        write(tmp_path / name, [name])
    os.rename("x[1].txt", "x[1].TXT")
    assert load("b/*.txt", "a.jsonl")["text"][:] == ["b/a.txt", "b/z.txt", "a.jsonl"]
    assert load("a.jsonl", "b/**")["text"][:] == ["a.jsonl", "b/a.txt", "b/c/m.txt", "b/k.csv", "b/z.txt"]
    assert load("b/z.txt", "b/*.txt", "b/z.txt")["text"][:] == ["b/z.txt", "b/a.txt"]
    monkeypatch.setenv("HOME", str(tmp_path / "b"))
    assert load("~/k.csv")["text"][:] == ["b/k.csv"]
    assert load("x[1].TXT")["text"][:] == ["x[1].txt"]
    assert load_documents(train_file="a.jsonl", dataset_name=None)["text"][:] == ["a.jsonl"]


def test_the_number_of_processes_changes_nothing(tmp_path, use_cache):
    files = [write(tmp_path / f"{name}.txt", [f"{name} {i}" for i in range(20)]) for name in "dacb"]
    several = load(*files, num_proc=2)
    assert len(several.cache_files) == 2  # one from each process
    once = several["text"][:]
    assert once == [f"{name} {i}" for name in "dacb" for i in range(20)]
    use_cache(tmp_path / "other")
    alone = load(*files)
    assert alone["text"][:] == once
    assert alone._fingerprint == several._fingerprint


def test_an_unchanged_file_comes_from_the_cache_and_a_changed_one_does_not(tmp_path, monkeypatch):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "old", "other": "column"}')
    first = load("data.jsonl")
    with monkeypatch.context() as patch:
        patch.setitem(row_files.READERS, ".jsonl", None)  # reading would fail
        assert load(str(file))["text"][:] == ["old"]
    assert load("data.jsonl", text_column="other")["text"][:] == ["column"]
    stat = file.stat()
    file.write_text('{"text": "new", "other": "column"}')
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # same path, same size
    assert load("data.jsonl")["text"][:] == ["new"]
    file.write_text('{"text": "newer"}')
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))  # same path, same time
    changed = load("data.jsonl")
    assert changed["text"][:] == ["newer"]
    (tmp_path / "edited.py").write_text("# another version of this code")
    monkeypatch.setattr(documents, "__file__", str(tmp_path / "edited.py"))
    assert len({first._fingerprint, changed._fingerprint, load("data.jsonl")._fingerprint}) == 3


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".csv"])
def test_files_are_read_as_a_stream(tmp_path, kind):
    file = write(tmp_path / f"data{kind}", TEXTS)
    with open(file, "ab") as stream:
        stream.write(b"\n" * 100_000 + b"\xff\n")
    rows = documents._read([file], "text", "blocks")
    assert [next(rows)["text"] for _ in TEXTS[:-1]] == TEXTS[:-1]
    with pytest.raises(UsageError, match="not UTF-8"):
        list(rows)


def test_a_text_file_without_blank_lines_does_not_fill_the_memory():
    """One line again and again, which is in the memory once."""
    lines = zip(range(3, 10**6), itertools.repeat("a line\n" * 10**6), strict=False)
    with pytest.raises(UsageError, match=r"data\.txt:41: no blank line in 268,435,456 characters, but put one, or use"):
        row_files._join("data.txt", lines, "no blank line", "put one")
    assert next(lines)[0] == 42


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("data.txt", b"", "data file data.txt holds no document"),
        ("data.txt", b" \n\n\t\n", "data file data.txt holds no document"),
        ("data.jsonl", b'{"text": null}\n{"text": " "}', "data file data.jsonl holds no document"),
        ("data.csv", b"", "data file data.csv holds no document"),
        ("data.csv", b"text\n", "data file data.csv holds no document"),
        ("data.txt", b"na\xc3\xafve\n\nna\xefve", "data.txt:3: not UTF-8 at byte offset 10 (0xef)"),
        ("data.csv", b"text\nfine\n\xff\n", "data.csv:3: not UTF-8 at byte offset 10 (0xff)"),
        (
            "data.txt",
            "utf-16".encode("utf-16"),
            "data.txt: UTF-16, must be UTF-8. Convert it: iconv -f UTF-16 -t UTF-8",
        ),
        (
            "data.csv",
            "text\na\n".encode("utf-16-le"),
            "data.csv: UTF-16LE, must be UTF-8. Convert it: iconv -f UTF-16LE",
        ),
        (
            "data.jsonl",
            "{}".encode("utf-32"),
            "data.jsonl: UTF-32, must be UTF-8. Convert it: iconv -f UTF-32 -t UTF-8",
        ),
        ("data.xyz", b"text", "data file data.xyz: unknown kind '.xyz'. valid names: .csv, .json, .jsonl, .parquet"),
        ("data", b"text", "data file data: unknown kind ''. valid names: .csv"),
        ("data.jsonl", b'{"text": "a"}\n{"text": \n', "data.jsonl:2: not a JSON object, column 10: Expecting value"),
        (
            "data.json",
            b'{"text": "a"}\n["b"]',
            "data.json:2: a JSON list, not an object. One per line is read, or an array",
        ),
        ("data.json", b'["b"]', "data.json:1: a JSON list, not an object. One per line is read, or an array"),
        (
            "data.json",
            b'[\n{"text": "a"},\n{"text": \n',
            "data.json:3: the JSON array is damaged, column 9: Expecting value",
        ),
        (
            "data.json",
            b'[\n{"text": "a"}\n{"text": "b"}]',
            "data.json:3: the JSON array has no comma between two objects",
        ),
        (
            "data.json",
            b'[{"text": "a"},]',
            "data.json:1: the JSON array has no comma between two objects, or one too many",
        ),
        ("data.json", b'[{"text": "a"}', "data.json:1: the JSON array ends here"),
        ("data.json", b'[{"text": "a"}]\n{"text": "b"}', "data.json:2: text follows the JSON array"),
        ("data.json", b'[{"text": "a"},\n3]', "data.json:2: a JSON int, not an object"),
        ("data.json", b'[{"text": "a"},\n{"text": "\xff"}]', "not UTF-8 at byte offset 26 (0xff)"),
        ("data.json", b'{\n"text": "a"\n}', "data.json:1: an object over several lines. Write one object per line"),
        ("data.json", b'{"text": ["a"]}', "data.json:1: 'text' holds list, not text"),
        ("data.json", b'{"text": "a \\ud83d"}', "data.json:1: half of a surrogate pair"),
        ("data.json", b'{"texts": "a", "id": 1}', "has no column 'text', only 'texts', 'id'. Set text_column: did you"),
        (
            "data.csv",
            b"id,texts\n1,a\n",
            "has no column 'text', only 'id', 'texts'. Set text_column: did you mean texts?",
        ),
        ("data.csv", b'text\n"never closed\n', "data.csv: the row after line 1 is not CSV: unexpected end of data"),
        ("data.parquet", b"text", "data file data.parquet cannot be read"),
        ("data.txt", bytes(1000), "data file data.txt holds no document: it is empty or blank"),
        ("data.jsonl", bytes(1000), "data file data.jsonl holds no document: it is empty or blank"),
        ("data.csv", bytes(1000), "data file data.csv holds no document: it is empty or blank"),
        ("data.parquet", bytes(1000), "data file data.parquet cannot be read"),
        ("data.jsonl", b'{"text": "a"}\n{"n": %s}' % (b"7" * 5000), "data.jsonl:2: a number of more than 4,300 digits"),
        ("data.jsonl", b'{"text": ' + b"[" * 10**5, "data.jsonl:1: lists or objects nested too deep"),
        ("data.json", b'{"text": ' * 10**5, "data.json:1: lists or objects nested too deep"),
        ("data.csv", b"text,id\na,1\none, two,2\n", "data.csv:3: 3 fields, but the header names 2"),
        ("data.csv", b"text,id\na\n", "data.csv:2: 1 fields, but the header names 2"),
        ("data.csv", b"text,text\na,b\n", "data.csv:1: the first line names a column twice ('text', 'text')"),
        ("data.csv", b"\ntext\na\n", "data.csv:1: the first line is blank, must name each column once"),
        ("data.csv", b"t" * 10**5 + b"\na\n", "has no column 'text', only '" + "t" * 60 + "...'. Set text_column: "),
    ],
)
def test_a_fault_in_a_file_is_one_clear_line(tmp_path, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UsageError) as raised:
        load(name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "parquet"])
@pytest.mark.parametrize("kind", ["zeros", "nothing", "itself", "pipe", "socket"])
def test_what_has_no_end_is_not_opened(tmp_path, kind, suffix):
    """Each would be read until the memory is full, or waited for."""
    path = tmp_path / f"data.{suffix}"
    match kind:
        case "zeros" | "nothing":
            path.symlink_to("/dev/zero" if kind == "zeros" else "/dev/null")
        case "itself":
            path.symlink_to(path.name)
        case "pipe":
            os.mkfifo(path)
        case "socket":
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path.name)
    rule = (
        "cannot be read: Too many levels" if kind == "itself" else "is a device, a pipe or a socket, not a regular file"
    )
    with pytest.raises(UsageError, match=rf"^data file data\.{suffix} {rule}[^\n]*$"):
        load(path.name)
    with pytest.raises(UsageError, match=rf"^dataset_name '\.': \./data\.{suffix} {rule}[^\n]*$"):
        load_documents(train_file=None, dataset_name=".")


def test_tables_that_are_damaged(tmp_path):
    """Cut off, and with cells that are no text."""
    whole = write(tmp_path / "whole.parquet", TEXTS)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / whole).read_bytes()[:-50])
    ends = pa.array([0, 2], pa.int32()).buffers()[1]
    cells = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"\xff\xfe")])
    pyarrow.parquet.write_table(pa.table({"text": cells}), tmp_path / "bytes.parquet")
    for name in ("cut", "bytes"):
        with pytest.raises(UsageError, match=rf"^data file {name}\.parquet cannot be read: [^\n]*$"):
            load(f"{name}.parquet")


def test_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"na\xefve.txt")
    (tmp_path / name).write_text("a text")
    assert load(name)["text"][:] == ["a text"]
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"ve\.txt:1: not UTF-8"):
        load(name)


def test_a_fault_met_in_a_worker_is_as_clear(tmp_path):
    (tmp_path / "z.txt").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"^z\.txt:1: not UTF-8 at byte offset 0 [^\n]*$"):
        load(write(tmp_path / "a.txt", TEXTS), "z.txt", num_proc=2)


def test_columns_of_parquet(tmp_path):
    file = write(tmp_path / "data.parquet", TEXTS, column="body")
    with pytest.raises(UsageError, match="has no column 'text', only 'id', 'body'"):
        load(file)
    with pytest.raises(UsageError, match=r"data\.parquet:1: 'id' holds int, not text"):
        load(file, text_column="id")


def test_faulty_paths_are_collected(tmp_path):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "fine.txt", TEXTS)
    with pytest.raises(UsageError) as raised:
        load("fine.txt", "gone.txt", "none/*.txt", "folder", "/nowhere/gone.txt")
    missing, none, folder, elsewhere = raised.value.problems
    assert elsewhere == "data file /nowhere/gone.txt: no such file. Check the path."
    assert missing.startswith("data file gone.txt: no such file in ")
    assert missing.endswith(". Check the path.")
    assert none.startswith("data file none/*.txt: no file matches it in ")
    assert folder.startswith("data folder folder holds no file of .txt, .jsonl")


def test_a_folder_is_all_of_its_texts(tmp_path):
    """Those inside it, too; other kinds and hidden files are left out, and files come in the order of their paths."""
    for name in ("texts/b.txt", "texts/a.jsonl", "texts/deep/er/c.txt", "texts/.hidden/d.txt", "texts/deep/.e.txt"):
        write(tmp_path / name, [name])
    (tmp_path / "texts/picture.png").write_bytes(b"\x89PNG")
    assert load("texts")["text"][:] == ["texts/a.jsonl", "texts/b.txt", "texts/deep/er/c.txt"]


def split(**changes) -> tuple:
    return documents.load_split(load_recipe("bert_base", {"dataset_name": None, "validation_fraction": 0.0} | changes))


def test_rows_that_are_no_documents_are_counted(tmp_path):
    for kind in (".csv", ".tsv", ".jsonl", ".parquet"):
        train, _, (report,) = split(train_file=[write(tmp_path / f"data{kind}", TEXTS)])
        num_blank = 2 if kind in (".csv", ".tsv") else 3  # a cell that is missing is an empty one
        assert (len(train), report.num_used) == (len(TEXTS), len(TEXTS))
        assert report.num_read == len(TEXTS) + num_blank
        assert f"  left out: {num_blank}, no visible character ({tmp_path / f'data{kind}'}:" in str(report)
        assert report.unused == {"id": report.num_read}
        assert "  NOT used: id" in str(report)


def test_values_that_are_no_text_are_named_by_their_column(tmp_path):
    (tmp_path / "data.jsonl").write_text(
        '{"body": ["a", "b"]}\n{"body": "fine"}\n{"body": {"a": 1}}\n{"body": NaN}\n{"text": "a"}\n{"body": "too"}\n'
    )
    pyarrow.parquet.write_table(pa.table({"body": [["a"], ["b"]]}), tmp_path / "data.parquet")
    with pytest.raises(UsageError) as raised:
        split(train_file=["data.jsonl"], text_column="body")
    first, second, third = map(str, raised.value.problems)
    assert first == "data.jsonl:1: 'body' holds list, not text"
    assert second == "data.jsonl:3: 'body' holds dict, not text"
    assert third.startswith(
        "data.jsonl:5: no column 'body', only 'text'; --on_bad_row skip leaves out these 3 rows of 6"
    )
    loaded = load("data.jsonl", text_column="body", on_bad_row="skip")
    assert loaded["text"][:] == ["fine", "too"]
    with pytest.raises(UsageError, match=r"data\.parquet:1: 'body' holds list, not text \(2 rows"):
        load("data.parquet", text_column="body", on_bad_row="skip")


def test_columns_and_blank_rows_of_a_dataset_by_name_are_said(tmp_path):
    write(tmp_path / "hub" / "train.parquet", TEXTS)
    _, _, (report,) = split(train_file=None, dataset_name=str(tmp_path / "hub"))
    assert (report.num_read, report.num_used) == (len(TEXTS) + 3, len(TEXTS))
    assert "left out: 3, no visible character" in str(report)
    assert "NOT used: id" in str(report)


def test_files_of_a_folder_that_are_not_read_are_counted(tmp_path):
    for name in ("texts/a.txt", "texts/b/c.csv", "texts/.hidden/d.txt", "texts/.e.txt"):
        write(tmp_path / name, [name])
    for name in ("texts/b/picture.PNG", "texts/more.png", "texts/README", "texts/data.csv.gz"):
        (tmp_path / name).write_bytes(b"something")
    _, _, (report,) = split(train_file=["texts"])
    assert "texts: 2 files read, NOT read: 2 hidden, 2 .png, 1 without a suffix, 1 .gz" in str(report).replace(
        "1 .gz, 1 without a suffix", "1 without a suffix, 1 .gz"
    )
    assert "NOT read" not in str(split(train_file=["texts/a.txt"])[2][0])


def test_several_txt_files_are_a_document_each(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.txt", [f"{name} one", f"{name} two"])
    (tmp_path / "mine.yaml").write_text("extends: bert_base\ntrain_file: '*.txt'\nvalidation_fraction: 0.0\n")

    def counts(**changes) -> tuple[int, list[str]]:
        train, held_out, (report,) = documents.load_split(load_recipe("mine.yaml", changes))
        assert not len(held_out)
        return len(train), re.findall(r"(\d+) (?:files?|documents?)\b", str(report))[:2]

    assert counts() == (3, ["3", "3"])
    assert counts(train_file=["a.txt"]) == (2, ["1", "2"])
    assert counts(txt_documents="blocks") == (6, ["3", "6"])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"train_file": None, "dataset_name": "builtin/python"}, "did you mean builtin/python_docs?"),
        ({"train_file": ["a.txt"], "dataset_name": None, "dataset_config_name": "c"}, "files can only be read whole"),
        (
            {"train_file": None, "dataset_name": "builtin/python_docs", "dataset_config_name": "c"},
            "builtin/python_docs can only be read whole",
        ),
    ],
)
def test_which_source(kwargs, message):
    with pytest.raises(UsageError) as raised:
        load_documents(**kwargs)
    assert message in str(raised.value)


def test_a_dataset_by_name(tmp_path):
    """A local folder goes the way of a dataset on the hub, from its name on."""
    write(tmp_path / "corpus/train.parquet", TEXTS, column="body")
    loaded = load_name("./corpus", text_column="body")
    assert loaded["text"][:] == TEXTS
    assert loaded.features == documents.FEATURES


def test_a_large_string_column_becomes_a_string_column(tmp_path):
    (tmp_path / "corpus").mkdir()
    features = datasets.Features({"text": datasets.Value("large_string")})
    datasets.Dataset.from_dict({"text": TEXTS}, features=features).to_parquet(tmp_path / "corpus/train.parquet")
    loaded = load_name("./corpus")
    assert loaded.features == documents.FEATURES
    assert loaded["text"][:] == TEXTS


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"text_column": "bodies"}, "has no column 'bodies', only 'id', 'body'. Set text_column: did you mean body?"),
        ({"text_column": "id"}, "column 'id' holds Value('int64'), not text"),
        ({"text_column": "body", "dataset_config_name": "en"}, "'en' not found"),
    ],
)
def test_faults_of_a_dataset_by_name(tmp_path, kwargs, message):
    write(tmp_path / "corpus/train.parquet", TEXTS, column="body")
    with pytest.raises(UsageError) as raised:
        load_name("./corpus", **kwargs)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_dataset_of_blank_rows(tmp_path):
    write(tmp_path / "corpus/train.parquet", ["\n"])
    with pytest.raises(UsageError, match=r"'\./corpus' holds no document: column 'text' is empty in every row"):
        load_name("./corpus")


def test_the_hub_out_of_reach(tmp_path):
    program = "from samestep.data.documents import load_rows as f; f(train_file=None, dataset_name='someone/text')"
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    last = run.stderr.splitlines()[-1]
    assert last.startswith("samestep.errors.UsageError: dataset_name 'someone/text' (config None, split 'train'): ")
    assert "OfflineModeIsEnabled" in last
    assert last.endswith("or use train_file or dataset_name builtin/..., which need none.")


@pytest.fixture(scope="module")
def pages():
    """Those of the session's cache, which other tests fill, too."""
    return load_name("builtin/python_docs")["text"][:]


def test_python_docs(pages):
    assert 300 < len(pages) < 1000
    assert 1_500_000 < sum(map(len, pages)) < 4_000_000
    assert min(map(len, pages)) >= python_docs.MIN_BUILTIN
    assert len(set(pages)) == len(pages)
    assert not {"antigravity", "this", "idlelib.run"} & set(sys.modules)  # read, not imported
    lines = [line.strip() for text in pages for line in text.splitlines()]
    assert not [line for line in lines if line.startswith(">>> ") or (len(line) > 3 and set(line) <= set("-=*~+ "))]


def test_python_docs_are_in_order_and_whole(pages):
    """Topics, then modules by name; within a module, docstrings by line."""
    starts = [
        "Compound statements",
        "Abstract Base Classes (ABCs)",
        "Heap queue algorithm",
        "Text wrapping and filling.",
    ]
    places = [next(i for i, text in enumerate(pages) if text.startswith(start)) for start in starts]
    assert places == sorted(places)
    wrapping = pages[places[-1]]
    parts = ["Object for wrapping/filling text.", "wrap(text : string)", "Wrap a single paragraph", "Remove any common"]
    assert sorted(parts, key=wrapping.index) == parts
    # a topic that another quotes whole is not a document of its own, or it could be held out and trained on at once
    assert [i for i, text in enumerate(pages) if 'The "while" statement is used for' in text] == places[:1]


def test_python_docs_are_cached_by_the_version(monkeypatch):
    keys = []
    one = datasets.Dataset.from_dict({"text": ["a"]})
    monkeypatch.setattr(documents, "cache_rows", lambda generate, features, key: keys.append(key) or one)
    load_name("builtin/python_docs")
    monkeypatch.setattr(sys, "version", "3.99")
    load_name("builtin/python_docs")
    assert len(set(keys)) == 2


def test_docstrings_in_source_order():
    source = b'''# -*- coding: latin-1 -*-
"""Module: na\xefve."""
class A:
    """Class."""
    def f(self):
        """First.

            Indented.
        Not.
        """
        def g(): "Inner."
    try: pass
    except OSError:
        async def h(self): "\\d is no escape."
    else:
        match f:
            case None:
                class B: "Nested."
    finally:
        def i(self): "Finally."
    def undocumented(self): pass
def last(): "Last."
'''
    nested = ["Inner.", "\\d is no escape.", "Nested.", "Finally."]
    expected = ["Module: naïve.", "Class.", "First.\n\n    Indented.\nNot.", *nested, "Last."]
    assert python_docs._docstrings(source) == expected


def test_prose_leaves_out_rules_and_examples():
    text = """Title
*****

  +-----+------+
  | a   | b... |
  |=====|======|
Some code:

   >>> for x in y:
   ...     print(x)
   1

x - y == 3 -- still here, and ...
"""
    assert python_docs._prose(text) == "Title\n\n  | a   | b... |\n\nSome code:\n\nx - y == 3 -- still here, and ..."


@pytest.mark.parametrize(("fraction", "held_out"), [(0.1, 10), (0.126, 13), (0.001, 2), (0.98, 98)])
def test_split_documents(fraction, held_out):
    whole = datasets.Dataset.from_dict({"text": [f"{i:03}" for i in range(100)]})
    train, validation = (part["text"][:] for part in split_documents(whole, fraction, seed=1))
    assert len(validation) == held_out
    assert sorted(train + validation) == whole["text"][:]
    assert train == sorted(train)
    assert validation == sorted(validation)
    again, other = (split_documents(whole, fraction, seed=seed)[1]["text"][:] for seed in (1, 2))
    assert again == validation != other


def test_the_held_out_documents_are_spread():
    whole = datasets.Dataset.from_dict({"text": [f"{i:05}" for i in range(10_000)]})
    held_out = [int(text) for text in split_documents(whole, 0.1, seed=0)[1]["text"]]
    assert held_out[:6] == [17, 26, 39, 42, 52, 64]  # numpy keeps Philox and permutation as they are
    assert 4_800 < sum(held_out) / len(held_out) < 5_200


def test_nothing_held_out():
    whole = datasets.Dataset.from_dict({"text": ["only"]})
    train, validation = split_documents(whole, 0, seed=0)
    assert train["text"][:] == ["only"]
    assert len(validation) == 0
    assert validation.column_names == ["text"]


@pytest.mark.parametrize(
    ("number", "fraction", "message"),
    [
        (3, 0.1, "of 3 documents leaves fewer than 2 to train on"),
        (100, 0.99, "of 100 documents leaves fewer than 2"),
        (100, 1.0, "validation_fraction 1.0 must be"),
        (100, -0.1, "validation_fraction -0.1 must be"),
        (100, float("nan"), "validation_fraction nan must be"),
    ],
)
def test_bad_fractions(number, fraction, message):
    whole = datasets.Dataset.from_dict({"text": ["text"] * number})
    with pytest.raises(UsageError, match=message):
        split_documents(whole, fraction, seed=0)
    assert len(split_documents(datasets.Dataset.from_dict({"text": ["text"] * 4}), 0.1, seed=0)[0]) == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        (" \n\t\n", []),
        ("No end", ["No end"]),
        ("One. Two! Three? 4 of them.", ["One.", "Two!", "Three?", "4 of them."]),
        ('He said "Go." "Yes," she said. (So.) It is.', ['He said "Go."', '"Yes," she said.', "(So.)", "It is."]),
        ("Über. Ärger. Not e.g. this, v1.2 or 3.5 m.", ["Über.", "Ärger.", "Not e.g. this, v1.2 or 3.5 m."]),
        ("J. R. R. Tolkien of the U.S. Army. Next.", ["J. R. R. Tolkien of the U.S. Army.", "Next."]),
        ("a hard\n  wrapped line\r\nand  on", ["a hard wrapped line and on"]),
        ("Title\n\nText\n \t\n\n\nmore", ["Title", "Text", "more"]),
        ("one .\ntwo , lower case .\nthree", ["one .", "two , lower case .", "three"]),
        (
            "To do:\n- one\n  and on\n* Two. Three\n 10. Four\n2) five",
            ["To do:", "- one and on", "* Two.", "Three", "10. Four", "2) five"],
        ),
        ("co-\n-operate - or *not*\n1.5 m", ["co- -operate - or *not* 1.5 m"]),
        ("第一句。第二句！“第三句？”末", ["第一句。", "第二句！", "“第三句？”", "末"]),
        (" = Robert = \n \n Text . He \n", ["= Robert =", "Text .", "He"]),
    ],
)
def test_split_sentences(text, expected):
    assert split_sentences(text) == expected


@settings(max_examples=50, deadline=None)
@given(st.text() | st.text(alphabet=" \n\r\t\u2028.!?。\"'()-*1aAé“"))
def test_split_sentences_keeps_every_visible_character(text):
    segments = split_sentences(text)
    assert "".join("".join(segments).split()) == "".join(text.split())
    assert all(segment and segment == " ".join(segment.split()) for segment in segments)


@pytest.mark.parametrize("unit", [".", " ", "\n", ". ", "\n ", ".'", '. "', "。”", "- \n", "a", "1"])
def test_split_sentences_takes_linear_time(unit):
    """Quadratic time would be many minutes, in which the test would be ended."""
    text = "." + unit * 200_000
    assert "".join("".join(split_sentences(text)).split()) == "".join(text.split())


# ---------------------------------------------------------------------------------------------------------------------
# a file as one document, the end of the text held out


def test_a_file_as_one_document_is_kept_to_the_last_character(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\r\ntwo \n\n".encode())
    (tmp_path / "b.txt").write_text("three")
    assert load("a.txt", "b.txt", txt_documents="files")["text"][:] == ["one\n\ntwo \n\n", "three"]
    assert load("a.txt", "b.txt")["text"][:] == ["one", "two ", "three"]
    (tmp_path / "c.jsonl").write_text('{"text": "x\\n\\ny"}\n')
    assert load("c.jsonl", txt_documents="files")["text"][:] == ["x\n\ny"], "other kinds have their own documents"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("abü😀", min_size=1, max_size=9), min_size=1, max_size=6), st.floats(0.05, 0.95))
def test_the_tail_is_cut_by_characters(texts, fraction):
    whole = "".join(texts)
    cut = int(len(whole) * (1 - fraction))
    source = datasets.Dataset.from_dict({"text": texts})
    if cut == 0:
        with pytest.raises(UsageError, match="leaves no text to train on: lower it"):
            split_documents(source, fraction, 0, "tail")
        return
    train, held_out = split_documents(source, fraction, 0, "tail")
    assert "".join(train["text"]) == whole[:cut]
    assert "".join(held_out["text"]) == whole[cut:]
    assert len(train) + len(held_out) in (len(texts), len(texts) + 1)


def test_a_blank_tail_holds_out_nothing():
    source = datasets.Dataset.from_dict({"text": ["words" * 10 + "\n" * 50]})
    with pytest.raises(UsageError, match="of 100 characters leaves no text to hold out: raise it, or set it to 0"):
        split_documents(source, 0.3, 0, "tail")


def test_the_tail_of_the_same_documents_is_cached_as_the_same():
    source = datasets.Dataset.from_dict({"text": ["one two", "three four five"]})
    prints = [[part._fingerprint for part in split_documents(source, 0.4, 0, "tail")] for _ in range(2)]
    assert prints[0] == prints[1]


def test_ends_of_lines_of_old_macs_and_mixed_ones(tmp_path):
    for name, raw in (
        ("data.txt", b"one\rtwo\r\rthree\r\n\r\nfour\n\n"),
        ("data.csv", b'text,id\r"one\rtwo",1\rthree,2\r\nfour,3\n'),
        ("data.jsonl", b'{"text": "one\\ntwo"}\r{"text": "three"}\r\n{"text": "four"}\n'),
    ):
        (tmp_path / name).write_bytes(raw)
        assert load(name)["text"][:] == ["one\ntwo", "three", "four"]
