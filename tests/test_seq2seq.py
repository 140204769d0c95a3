"""Sources and targets: drawn ones, rows of files, tokens of languages, and what is refused."""

import datetime
import json
import re

import pytest
from transformers import MBart50Tokenizer, NllbTokenizer

from samestep.data import seq2seq
from samestep.data.builtin import spelled
from samestep.errors import UsageError
from samestep.recipe.catalog import load

LETTERS = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
VALUES = {"hundred": 100, "thousand": 1000}
VALUES |= {name: number for number, name in enumerate(spelled.NAMES)}
VALUES |= {name: 10 * number for number, name in enumerate(spelled.TENS, start=2)}


def read_number(text: str) -> int:
    """Read a number in words, without the code that wrote it."""
    total = part = 0
    for word in re.split(r"[ -]", text):
        if word == "thousand":
            total, part = part * 1000, 0
        elif word == "hundred":
            part *= 100
        elif word != "and":
            part += VALUES[word]
    return total + part


def test_every_target_is_right():
    pairs = [spelled.draw(1, "train", number) for number in range(400)]
    assert {pair.kind for pair in pairs} == {"dates", "numbers"}
    for pair in pairs:
        if pair.kind == "numbers":
            assert read_number(pair.source) == int(pair.target)
            continue
        date = datetime.date.fromisoformat(pair.target)
        assert str(date.year) in pair.source
        days = [day for day in spelled.DAYS if day in pair.source]
        assert days in ([], [date.strftime("%A")])
        if "." in pair.source:
            assert [int(part) for part in pair.source.split(".")] == [date.day, date.month, date.year]
            continue
        assert date.strftime("%b") in pair.source
        number = re.search(r"\b(\d{1,2})(st|nd|rd|th)?\b", pair.source)
        ordinal = spelled.spell_ordinal(date.day)
        assert int(number[1]) == date.day if number else f"the {ordinal} of" in pair.source


def test_a_held_out_target_is_in_no_training_pair():
    parts = [{spelled.draw(1, split, number).target for number in range(2000)} for split in spelled.SPLITS]
    assert not parts[0] & parts[1]
    assert spelled.draw(1, "train", 5) == spelled.draw(1, "train", 5) != spelled.draw(2, "train", 5)


LETTER_BY_LETTER = {"tokenizer": "characters", "vocab_size": 96}


def build(file, **changes):
    recipe = load(
        "seq2seq_small_cpu", LETTER_BY_LETTER | {"train_file": [str(file)], "validation_fraction": 0} | changes
    )
    return seq2seq.build(recipe)[0]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (("source", "target"), {}),
        (("input", "output"), {}),
        (("article", "highlights"), {}),
        (("text", "summary"), {}),
        (("ask", "reply"), {"source_column": "ask", "target_column": "reply"}),
    ],
)
def test_columns_are_found(tmp_path, names, changes):
    rows = [{"id": 1, names[0]: "red", names[1]: "green"}, {"id": 2, names[0]: "blue", names[1]: "a b"}]
    pairs = build(write(tmp_path / "rows.jsonl", rows), **changes)
    assert [pairs.sources.describe(number) for number in range(2)] == ["red", "blue"]
    assert pairs.targets["target"] == ["green", "a b"]
    assert pairs.row_reports[0].unused == {"id": 2}
    assert pairs.source_names == ("rows",)


@pytest.mark.parametrize("changes", [{"source_language": "de_DE", "target_language": "en"}, {"columns": True}])
def test_texts_in_several_languages(tmp_path, changes):
    columns = {"source_column": "translation.de", "target_column": "translation.en"}
    rows = [{"translation": {"en": "red", "de": "rot"}}, {"translation": {"en": "blue", "de": "blau"}}]
    file = write(tmp_path / "rows.jsonl", rows)
    pairs = build(file, **(columns if changes.pop("columns", False) else changes))
    assert (pairs.sources.describe(1), pairs.targets[1]["target"]) == ("blau", "blue")
    with pytest.raises(UsageError, match=r"but source_language is fr, which is none of them: set it, or name two"):
        build(file, source_language="fr", target_language="en")


def make_tokenizer(kind: type, folder):
    if kind is NllbTokenizer:
        tokenizer = kind(vocab={token: number for number, token in enumerate([*SPECIAL, *LETTERS])}, merges=[])
    else:
        tokenizer = kind(vocab=[(token, 0.0) for token in SPECIAL] + [(token, -1.0) for token in LETTERS])
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize(
    ("kind", "languages"), [(NllbTokenizer, "eng_Latn deu_Latn"), (MBart50Tokenizer, "en_XX de_DE")]
)
def test_the_token_of_a_language_is_given(tmp_path, kind, languages):
    """It is no target, unless the recipe says so; sources begin with that of their own language."""
    tokenizer, (first, second) = make_tokenizer(kind, tmp_path / "tokenizer"), languages.split()
    rows = [{"source": "red", "target": "rot"}, {"source": "green", "target": "gruen"}]
    file = write(tmp_path / "rows.jsonl", rows)
    changes = {"tokenizer_name": str(tmp_path / "tokenizer"), "vocab_size": 400, "source_language": first}
    changes |= {"target_language": second}
    for count, num_given in ((False, 1), (True, 0)):
        pairs = build(file, count_forced_tokens=count, **changes)
        sample = pairs.draw(0, 0)
        assert tokenizer.convert_ids_to_tokens([sample.source[0], sample.labels[0]]) == [first, second]
        assert sample.num_given == num_given
        batch = pairs.collate([pairs.draw(0, 0), pairs.draw(0, 1)])
        labels = batch["labels"].flatten()[batch["label_index"]].tolist()
        assert batch["counts"].item() == len(labels) == int((batch["labels"] != 1).sum()) - 2 * num_given
        assert (tokenizer.convert_tokens_to_ids(second) in labels) is count
    with pytest.raises(UsageError, match=r"target_language is 'xx', but the tokenizer has no such token"):
        build(file, **(changes | {"target_language": "xx"}))


def test_a_prefix_and_what_is_cut(tmp_path):
    file = write(
        tmp_path / "rows.jsonl", [{"source": "red", "target": "green"}, {"source": "a" * 50, "target": "b" * 50}]
    )
    pairs = build(file, source_prefix="ab: ", max_source_length=20, max_target_length=10)
    assert pairs.tokenizer.decode(pairs.draw(0, 0).source, skip_special_tokens=True) == "ab: red"
    assert [pairs.draw(0, 1).length, pairs.max_length, pairs.longest().length] == [30, 30, 30]
    assert pairs.draw(0, 1).labels[-1] == pairs.tokenizer.eos_token_id
    text = " ".join(pairs.notes)
    assert "1 sources of training pairs are cut after max_source_length 20" in text
    assert "1 targets of training pairs are cut after max_target_length 10" in text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"source": "a"}, "has no column"),
        ({"source": "a", "target": ""}, "'target' is empty: fill it in, or remove the row"),
        ({"source": " ", "target": "b"}, "'source' is empty"),
        ({"source": "a", "target": 3}, "'target' holds int, not text"),
        ({"source": "a", "target": None}, "'target' is empty"),
        ({"source": ["a"], "target": "b"}, "'source' holds list, not text"),
        ({"source": "\ud800", "target": "b"}, "half of a surrogate pair"),
    ],
)
def test_bad_rows(tmp_path, row, message):
    file = write(tmp_path / "rows.jsonl", [{"source": "red", "target": "green"}] * 3 + [row])
    with pytest.raises(UsageError) as error:
        build(file)
    assert message.replace("has no column", "none of its columns") in str(error.value)
    assert "--on_bad_row skip leaves out this row of 4" in str(error.value)
    recipe = load("seq2seq_small_cpu", {"train_file": [str(file)], "validation_fraction": 0})
    pairs, _ = seq2seq.build(recipe, on_bad_row="skip")
    assert len(pairs) == 3
    assert len(pairs.row_reports[0].bad) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_column": "a"}, "of source_column and target_column one is set: name both, or neither"),
        ({"source_language": "en"}, "of source_language and target_language one is set"),
        ({"num_train_samples": None}, "num_train_samples is null, but builtin/spelled_dates_and_numbers is drawn"),
        (
            {"modality": "speech"},
            "modality is speech, but builtin/spelled_dates_and_numbers has text: set modality to text",
        ),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        (
            {"architecture": "bart", "max_position_embeddings": 8},
            "max_source_length 64 exceeds max_position_embeddings 8",
        ),
    ],
)
def test_recipes_that_are_refused(changes, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        load("seq2seq_small_cpu", changes)
