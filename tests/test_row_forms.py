"""Rows of the forms that people have: everything in a row is used, or named as not used, or the row is refused."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samestep.data.row_forms import RowReader
from samestep.errors import UsageError


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


def user(content, **more):
    return turn("user", content, **more)


def assistant(content, **more):
    return turn("assistant", content, **more)


def read(values, wants_pairs=False, train_on="assistant", **columns):
    """Read one row: its parts, or the reason why it is refused."""
    reader = RowReader(wants_pairs, train_on, {name: target for target, name in columns.items()})
    try:
        row = reader.read(values)
    except UsageError as error:
        return str(error)
    return json.loads(row["row"]) | {"columns": row["columns"], "unused": json.loads(row["unused"] or "[]")}


def chat(values, **options):
    """Read one row to its turns, role and content, of which the last is the answer."""
    row = read(values, **options)
    assert not isinstance(row, str), row
    return [(turn["role"], turn["content"]) for turn in [*row["prompt"], *row["answers"][0]]]


ASKED = [("system", "Be kind."), ("user", "How?"), ("assistant", "So.")]


@pytest.mark.parametrize(
    "values",
    [
        {"messages": [turn("system", "Be kind."), user("How?"), assistant("So.")]},
        {"messages": [user("How?"), assistant("So.")], "system": "Be kind."},
        {"messages": [turn("system", "Be kind."), user("How?"), assistant("So.")], "system": "Be kind."},
        {"conversations": [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}], "system": "Be kind."},
        {"conversations": repr([turn("system", "Be kind."), user("How?"), assistant("So.")])},
        {"messages": [turn("system", [{"type": "text", "text": "Be kind."}]), user(["How?"]), assistant("So.")]},
        {"instruction": "How?", "output": "So.", "system": "Be kind.", "input": "", "history": []},
        {"question": "How?", "answer": "So.", "system_prompt": "Be kind.", "history": "[]"},
        {"Instruction": "How?", "Response": "So.", "System": "Be kind.", "context": None},
        {"prompt": "How?", "completion": "So.", "system": "Be kind."},
        {"prompt": [user("How?")], "completion": "So.", "system": "Be kind."},
        {"prompt": json.dumps([turn("system", "Be kind."), user("How?")]), "completion": repr([assistant("So.")])},
        {"prompt": [turn("system", "Be kind."), user("How?")], "completion": assistant("So.")},
        {"messages": [turn("system", "Be kind."), user("How?"), assistant("So.")], "prompt": "How?", "text": "x"},
    ],
)
def test_the_same_chat_in_many_forms(values):
    assert chat(values) == ASKED


def test_history_and_input_have_their_places():
    pairs = [["hello", "hi"], ["more?", "yes"]]
    expected = [("user", "hello"), ("assistant", "hi"), ("user", "more?"), ("assistant", "yes"), ("user", "A\n\nB")]
    for history in (pairs, json.dumps(pairs), str([tuple(pair) for pair in pairs])):
        row = {"instruction": "A", "input": "B", "output": "C", "history": history}
        assert chat(row) == [*expected, ("assistant", "C")]
    assert "trains_prompt" in read(row)
    assert "trains_prompt" not in read({"instruction": "A", "output": "C"})
    assert "history must be a list of pairs" in read(row | {"history": ["hello"]})
    assert "history changes what the row says" in read({"messages": [user("a"), assistant("b")], "history": pairs})


def test_calls_of_tools_in_their_forms():
    call = {"name": "add", "arguments": {"a": 1}}
    expected = [{"type": "function", "function": call}]
    for turns in (
        [{"from": "human", "value": "1?"}, {"from": "function_call", "value": json.dumps(call)}],
        [user("1?"), {"role": "assistant", "content": None, "function_call": call}],
    ):
        after = [{"role": "observation", "content": "1"}, assistant("one")]
        row = read({"messages": turns + after, "tools": json.dumps([call])})
        assert row["prompt"][1]["tool_calls"] == expected
        assert row["prompt"][2]["role"] == "tool"
        assert row["tools"] == [call]
    assert "must hold a call of a tool" in read({"messages": [turns[0], {"from": "function_call", "value": "[1]"}]})


@pytest.mark.parametrize(
    ("values", "prompt"),
    [
        ({"question": "How?", "system": "Be kind."}, ASKED[:2]),
        ({"prompt": "How?", "system": "Be kind."}, ASKED[:2]),
        ({"instruction": "How?", "input": "Now."}, [("user", "How?\n\nNow.")]),
        ({"prompt": repr([user("How?")])}, [("user", "How?")]),
        ({"conversations": [{"from": "human", "value": "How?"}]}, [("user", "How?")]),
        ({"prompt": "How?", "history": [["a", "b"]]}, [("user", "a"), ("assistant", "b"), ("user", "How?")]),
    ],
)
@pytest.mark.parametrize("kind", ["texts", "turn", "turns", "json"])
def test_pairs_have_their_question(values, prompt, kind):
    make = {"texts": str, "turn": assistant, "turns": lambda text: [assistant(text)]}.get(kind)
    make = make or (lambda text: json.dumps([assistant(text)]))
    if kind == "texts" and values == {"prompt": repr([user("How?")])}:
        make = assistant
    row = read(values | {"chosen": make("So."), "rejected": make("No."), "id": 3}, wants_pairs=True)
    assert [(turn["role"], turn["content"]) for turn in row["prompt"]] == prompt
    assert [[turn["content"] for turn in answer] for answer in row["answers"]] == [["So."], ["No."]]
    assert row["unused"] == ["id"]


def test_pairs_of_texts_need_a_question():
    found = read({"story": "How?", "chosen": "So.", "rejected": "No."}, wants_pairs=True)
    assert "chosen and rejected share no beginning, so that their question is missing" in found
    texts = {"chosen": "Human: How?\nBot: So.", "rejected": "Human: How?\nBot: No."}
    assert read(texts | {"story": "x"}, wants_pairs=True)["unused"] == ["story"]
    assert "post changes what the row says" in read(texts | {"post": "When?"}, wants_pairs=True)
    more = {"post": "How?", "score_chosen": 3, "prompt_id": "x"}
    assert sorted(read(texts | more, wants_pairs=True)["unused"]) == ["post", "prompt_id", "score_chosen"]


def test_pairs_as_ultrafeedback_has_them():
    """What a further column repeats is no loss; what it adds is."""
    chosen, rejected = [user("How?"), assistant("So.")], [user("How?"), assistant("No.")]
    row = {"prompt": "How?", "chosen": chosen, "rejected": rejected, "messages": chosen, "score_chosen": 1.0}
    assert [turn["content"] for turn in read(row, wants_pairs=True)["prompt"]] == ["How?"]
    del row["prompt"]
    assert [turn["content"] for turn in read(row, wants_pairs=True)["prompt"]] == ["How?"]
    more = [turn("system", "Be kind."), *chosen]
    assert "messages changes what the row says" in read(row | {"prompt": "How?", "messages": more}, wants_pairs=True)
    assert "instruction changes what" in read(row | {"prompt": "How?", "instruction": "x"}, wants_pairs=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weight", 0),
        ("weight", 0.0),
        ("loss_weight", "0"),
        ("train", False),
        ("trainable", "false"),
        ("training", 0),
        ("loss", False),
        ("loss_mask", 0),
        ("masked", True),
        ("ignore", 1),
    ],
)
def test_a_turn_that_is_not_to_be_trained(field, value):
    turns = [user("a"), assistant("b", **{field: value}), user("c"), assistant("d")]
    row = read({"messages": turns})
    assert row["untrained"] == [1]
    assert row["unused"] == []
    assert row["prompt"][1] == assistant("b")
    is_trained = {"messages": [user("a"), assistant("b", **{field: field not in ("masked", "ignore")})]}
    assert "untrained" not in read(is_trained)
    assert "train_on is all" in read({"messages": turns}, train_on="all")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"messages": [user("a"), assistant("b", weight=0.5)]}, "weight is 0.5, but a turn is trained"),
        ({"messages": [user("a"), assistant("b", mask=1)]}, "mask may say that it is not trained"),
        ({"messages": [user("a"), assistant("b", train_detail=[1])]}, "train_detail may say"),
        ({"messages": [user("a"), assistant("b")], "weight": 0.3}, "weight is 0.3, but every row counts the same"),
        ({"messages": [user("a"), assistant("b")], "images": ["x.png"]}, "images is not empty, but only text"),
        ({"messages": [user("a", images=["x"]), assistant("b")]}, "it holds images, but only text is trained"),
        ({"messages": [user([{"type": "image_url", "image_url": "x"}]), assistant("b")]}, "type 'image_url', but only"),
        ({"messages": [user("a"), assistant("b")], "rejected": "c"}, "rejected is not used by objective sft"),
        ({"prompt": "a", "completion": "b", "label": False}, "label is False, which marks an answer that is not"),
        ({"prompt": "a", "completion": "b", "question": "c"}, "question changes what the row says"),
        ({"prompt": "a", "completion": 1}, "completion holds int, not text"),
        ({"prompt": 1.5, "completion": "b"}, "prompt holds float, not text"),
        ({"messages": [user("a"), assistant("b")], "system": 3}, "system holds int, not text"),
        ({"messages": [turn("system", "x"), user("a"), assistant("b")], "system": "y"}, "system says something else"),
        ({"prompt": "[{'role': 'user' 'content': 'a'}]", "completion": "b"}, "prompt is a text that is not JSON"),
        ({"messages": [user("a"), assistant("b")], "functions": [{"name": "f"}]}, "functions is not used"),
        (
            {"messages": [user("a"), assistant("b")], "chat_history": [["c", "d"]]},
            "chat_history changes what the row says",
        ),
        ({"messages": [user("a"), assistant("b")], "tool": [{"name": "f"}]}, "tool changes what the row says"),
        ({"messages": [user("a"), assistant("b", label=0)]}, "label may say that it is not trained"),
        ({"mesages": [user("a"), assistant("b")]}, "--columns messages=mesages"),
    ],
)
def test_what_changes_the_meaning_is_refused(values, reason):
    assert reason in read(values)


def test_columns_that_are_called_otherwise():
    row = {"chat": [user("a"), assistant("b")], "label": False, "id": 1}
    assert chat(row, messages="chat", unused="label") == [("user", "a"), ("assistant", "b")]
    found = read(row, messages="chat", unused="label")
    assert found["columns"] == "messages=chat"
    assert found["unused"] == ["label", "id"]
    assert "maps two columns to messages" in read(row | {"messages": 1}, messages="chat")
    assert (
        read(row, messages="chatt")
        == "columns names chatt, but its columns are 'chat', 'label', 'id': did you mean chat?"
    )


def test_all_rows_have_the_form_of_the_first_good_one():
    reader = RowReader(False, "assistant", {})
    rows = [{"id": 3}, {"prompt": "a", "completion": "b"}, {"messages": [user("a"), assistant("b")]}]
    with pytest.raises(UsageError, match="its columns are 'id', must be messages"):
        reader.read(rows[0])
    assert reader.read(rows[1])["columns"] == "prompt, completion"
    with pytest.raises(UsageError, match="but the first row is read by prompt, completion"):
        reader.read(rows[2])
    assert reader.read({"completion": "d", "prompt": "c", "n": None})["columns"] == "prompt, completion"


WORDS = st.text("abc", min_size=4, max_size=8)
FORMS = {
    "messages": lambda a, b: {"messages": [user(a), assistant(b)]},
    "sharegpt": lambda a, b: {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]},
    "text": lambda a, b: {"messages": json.dumps([user(a), assistant(b)])},
    "plain": lambda a, b: {"prompt": a, "completion": b},
    "alpaca": lambda a, b: {"instruction": a, "output": b},
    "dolly": lambda a, b: {"instruction": a, "response": b},
    "pairs": lambda a, b: {"prompt": a, "chosen": b, "rejected": b + "!"},
}
NAMES = (
    "system history input context images label weight id source score question answer tools text category functions"
).split()
FIELDS = "name weight train mask loss images id timestamp tool_call_id reasoning_content".split()


@settings(derandomize=True, max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_is_used_and_what_is_named_are_the_whole_row(data):
    """Random columns and fields: each value is in the turns, or its column or field is named, or the row is refused."""
    form = data.draw(st.sampled_from(sorted(FORMS)))
    texts = data.draw(st.lists(WORDS, min_size=2, max_size=2, unique=True))
    row = FORMS[form](*texts)
    values = WORDS | st.integers(2, 9) | st.booleans() | st.lists(WORDS, min_size=1, max_size=2)
    extra = data.draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=3))
    row = extra | row
    fields = {}
    if form in ("messages", "sharegpt"):
        fields = data.draw(st.dictionaries(st.sampled_from(FIELDS), values, max_size=2))
        next(iter(row[name] for name in ("messages", "conversations") if name in row))[1].update(fields)
    found = read(row, wants_pairs=form == "pairs")
    if isinstance(found, str):
        names = {*extra, *fields}
        assert any(name in found for name in names), (found, row)
        return
    whole = json.dumps([found["prompt"], found["answers"], found["tools"]])
    said = found["columns"].split(", ") + found["unused"]
    for name, value in row.items():
        assert name in said, (name, row)
        if name in extra and name in found["columns"].split(", ") and name not in ("label", "weight"):
            assert all(text in whole for text in ([value] if isinstance(value, str) else value)), (name, row)
    for name, value in fields.items():
        is_mark = name in ("weight", "train", "loss") and value in (True, False)
        assert is_mark or any(other.endswith(f"[].{name}") for other in found["unused"]), (name, row)
        assert not is_mark or (1 in found.get("untrained", [])) == (value is False or False in fields.values()), row
