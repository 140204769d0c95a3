"""samestep.data.tables: ends of lines, encodings, and how the cells of a table are told apart."""

import csv
import io

import pytest

from samestep.data import tables
from samestep.errors import UsageError

ROWS = [
    ["plain", "a"],
    ['a "quoted" word', "b"],
    ['"all of it"', "a"],
    ["an, end; of | all", "b"],
    ["two\nlines", "a"],
    ["an apostrophe's place", "b"],
    ["", "a"],
]


def read(path, content, delimiter=","):
    """Read the rows of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = list(tables.read_delimited(str(path), delimiter))
    if reasons := [f":{number}: {row}" for number, row in rows if isinstance(row, str)]:
        raise UsageError(reasons)
    return [list(row.values()) for _, row in rows]


def written(rows, **options):
    """Write rows, and a header, as Python's csv module does."""
    stream = io.StringIO()
    csv.writer(stream, **options).writerows([["text", "label"], *rows])
    return stream.getvalue()


@pytest.mark.parametrize("usual", [",", "\t"])
@pytest.mark.parametrize("delimiter", list(tables.DELIMITERS))
@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("quotechar", ['"', "'"])
def test_what_a_writer_of_csv_wrote_is_read_back(tmp_path, usual, delimiter, quoting, quotechar):
    """Also where the suffix names another delimiter."""
    content = written(ROWS, delimiter=delimiter, quoting=quoting, quotechar=quotechar)
    assert read(tmp_path / "rows", content, usual) == ROWS


@pytest.mark.parametrize(
    "texts",
    [
        ['"the end', "a"],
        ['"No."', 'He said "no".'],
        ['" I know ," he said .', '"yes" he said'],
        ["'tis the end", '\'t was "good"'],
        ['a 5" screen', 'all "of" "it"'],
    ],
)
def test_marks_that_do_not_enclose_cells_stay(tmp_path, texts):
    """As in GLUE's files, in which a quotation mark is a character."""
    rows = [[text, "a"] for text in texts] + [["plain", "b"]]
    lines = ["text\tlabel", *("\t".join(row) for row in rows)]
    assert read(tmp_path / "rows.tsv", "\n".join(lines) + "\n", "\t") == rows


def test_one_cell_far_behind_the_beginning_decides(tmp_path):
    text = "plain " * 20_000
    rows = [[text, "a"]] * 10
    assert len(rows) * len(text) > tables.SAMPLE
    for last in (['a "quoted" one', "b"], ["two\nlines", "b"], ["two\tcells", "b"]):
        assert read(tmp_path / "rows.tsv", written([*rows, last], delimiter="\t"), "\t") == [*rows, last]
    plain = "text\tlabel\n" + f"{text}\ta\n" * 10 + '"the end\tb\n'
    assert read(tmp_path / "rows.tsv", plain, "\t")[-1] == ['"the end', "b"]


def test_a_cell_that_is_not_closed_among_many_that_are_is_a_fault(tmp_path):
    rows = [[f'a "quoted" text {place}', "a"] for place in range(20)]
    content = written(rows, delimiter="\t") + '"never closed\ta\n' + written(rows, delimiter="\t").split("\n", 1)[1]
    with pytest.raises(UsageError, match="the row after line 21 is not CSV"):
        read(tmp_path / "rows.tsv", content, "\t")


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ('sep=;\ntext;label\n"a; b";c\n', [["a; b", "c"]]),
        ('text, label\n"a, b", "c"\nd, e\n', [["a, b", "c"], ["d", "e"]]),
        ("text\na; b\nc\n", [["a; b"], ["c"]]),
        ("text; all of it\na\n", [["a"]]),
        ("text;label\na, b;c\n", [["a, b", "c"]]),
        ("text,label\n\n\na,b\n\n", [["a", "b"]]),
    ],
)
def test_unusual_tables(tmp_path, content, rows):
    assert read(tmp_path / "rows.csv", content) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\nhello;b\n", ":2: 1 fields, but the header names 2: the row has semicolons, the header commas"),
        ('text,label\n"a \\"good\\" film",b\n', r'is not CSV: .* It has \\" inside a cell: double the mark \(""\)'),
        (
            "text;label\na;b\na;b;c\n",
            ":3: 3 fields, but the header names 2: put quotation marks around a text with semicolons",
        ),
        ("sep=;\ntext;label\na;b;c\n", ":3: 3 fields"),
        ('text\tlabel\n"a\tb\n"c\n', ":3: 1 fields, but the header names 2"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, content, message):
    with pytest.raises(UsageError, match=message):
        read(tmp_path / "rows.csv", content)


@pytest.mark.parametrize("block", [3, 4, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
def test_each_end_of_a_line_is_the_same(tmp_path, block, end):
    path = tmp_path / "file"
    path.write_bytes(f"\ufeffone{end}ü{end}three".encode())
    assert list(tables.read_lines(str(path), block)) == [(1, "one\n"), (2, "ü\n"), (3, "three")]
    path.write_bytes(f"one{end}".encode())
    assert list(tables.read_lines(str(path), block)) == [(1, "one\n")]


def test_mixed_ends_of_lines(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a\r\rb\r\nc\nd\r")
    assert [line for _, line in tables.read_lines(str(path))] == ["a\n", "\n", "b\n", "c\n", "d\n"]


@pytest.mark.parametrize("block", [4, 1 << 20])
def test_a_fault_behind_such_ends_is_at_its_line_and_byte(tmp_path, block):
    path = tmp_path / "file"
    path.write_bytes(b"one\r\ntwo\r\n\xff\n")
    lines = tables.read_lines(str(path), block)
    assert [next(lines), next(lines)] == [(1, "one\n"), (2, "two\n")]
    with pytest.raises(UsageError, match="file:3: not UTF-8 at byte offset 10"):
        next(lines)


def test_a_line_may_be_as_long_as_is_allowed_and_no_longer(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"short\n" * 9 + b"b" * 20 + b"\n" + b"c" * 20)
    assert len(list(tables.read_lines(str(path), max_line=20))) == 11
    for end in (b"", b"\n"):
        path.write_bytes(b"short\n" * 9 + b"b" * 21 + end)
        with pytest.raises(UsageError, match="file:10: a line of more than 20 bytes"):
            list(tables.read_lines(str(path), max_line=20))


def test_a_space_before_a_text_is_its_own_unless_all_cells_have_one(tmp_path):
    rows = [[" begins with a space", "a"], ['he said, "no", twice', "b"]]
    for delimiter in ",;":
        table = [[text.replace(",", delimiter), label] for text, label in rows]
        assert read(tmp_path / "rows.csv", written(table, delimiter=delimiter), ",") == table
    for content in ('text, label\n"a", "x"\nb, "y"\n', 'text,label\na, "x, y"\nb,z\n'):
        assert read(tmp_path / "rows.csv", content, ",") in ([["a", "x"], ["b", "y"]], [["a", "x, y"], ["b", "z"]])
