"""Drawn conversations: a function of seed, split and number; right answers, near wrong ones, and no question in two splits."""

import datetime
import re
from collections import Counter

import pytest

from samestep.data.builtin import drawn_chats
from samestep.data.builtin.drawn_chats import LEVELS, draw_chat, find_split
from samestep.errors import UsageError

DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
LENGTHS = dict(zip(MONTHS, [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31], strict=True))


def answer(question: str) -> str:
    """Answer a question, without the code that drew it."""
    head, _, rest = question.partition(": ")
    words = rest.split()
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    if head.startswith("Days in"):
        days = [29 if word == "Feb" and numbers[0] % 4 == 0 else LENGTHS[word] for word in words]  # 2000 .. 2039
        return " ".join(map(str, days))
    return {
        "Repeat": lambda: rest,
        "Write in capitals": lambda: rest.upper(),
        "Reverse": lambda: rest[::-1],
        "Last letter of": lambda: rest[-1],
        "Sort": lambda: " ".join(sorted(words)),
        "Days after": lambda: " ".join((DAYS * 2)[DAYS.index(word) + 1] for word in words),
        "Date after": lambda: (datetime.datetime.fromisoformat(rest) + datetime.timedelta(1)).strftime("%Y-%m-%d"),
        f"What is {numbers[0] if numbers else 0} + {numbers[-1] if numbers else 0}?": lambda: str(sum(numbers)),
        f"Which is larger, {numbers[0] if numbers else 0} or {numbers[-1] if numbers else 0}?": lambda: str(
            max(numbers)
        ),
    }[head]()


def draw_all(level="easy", split="train", count=400, seed=0):
    return [draw_chat(seed, split, number, level) for number in range(count)]


def questions(chats) -> list[str]:
    return [turn["content"] for chat in chats for turn in chat.messages if turn["role"] == "user"]


@pytest.mark.parametrize("level", LEVELS)
def test_every_answer_is_right_and_the_other_one_is_wrong(level):
    chats = draw_all(level)
    assert {chat.task for chat in chats} == set(LEVELS[level].tasks)
    for chat in chats:
        turns = [*chat.messages, {"role": "assistant", "content": chat.answer}]
        system = turns.pop(0)["content"] if turns[0]["role"] == "system" else ""
        write = "[{}]" if "brackets" in system else "{}." if "full stop" in system else "{}"
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
        for question, reply in zip(turns[::2], turns[1::2], strict=True):
            assert reply["content"] == write.format(answer(question["content"]))
        assert chat.wrong != chat.answer
        assert len(chat.wrong.split()) == len(chat.answer.split())


def test_lengths_and_systems_vary():
    chats = draw_all()
    assert set(Counter(len(questions([chat])) for chat in chats)) == {1, 2, 3, 4}
    assert 0.4 < sum(chat.messages[0]["role"] == "system" for chat in chats) / len(chats) < 0.8
    assert len({len(str(chat.messages)) for chat in chats}) > 50


def test_no_question_is_in_both_splits_and_many_are_held_out():
    train, held_out = (set(questions(draw_all(split=split, count=1500))) for split in ("train", "validation"))
    assert not train & held_out
    assert len(train) > 2500 < len(held_out) + 1500
    assert {find_split(question) for question in train} == {"train"}


def test_a_chat_depends_on_nothing_but_its_arguments():
    first = draw_all(count=20)
    draw_all("hard", "validation", seed=5, count=3)
    assert [draw_chat(0, "train", number) for number in reversed(range(20))] == first[::-1]
    assert first != draw_all(count=20, seed=1)
    # The samples of a seed never change: what was learned from them can be compared.
    assert first[0].messages[0]["content"] == "Write each answer in brackets."
    assert first[0].messages[-1]["content"] == "Reverse: y r q i"
    assert (first[0].answer, first[0].wrong, first[0].task) == ("[i q r y]", "[q i r y]", "reverse")


def test_levels_are_named():
    with pytest.raises(UsageError, match=r"dataset_config_name is 'esy', .* did you mean easy"):
        draw_chat(0, "train", 0, "esy")
    assert drawn_chats.LEVELS["hard"].tasks == tuple(drawn_chats.TASKS)
