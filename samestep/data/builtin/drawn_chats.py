"""Conversations to learn from, drawn as captchas are: each decided by a seed and a number, with answers that Python computes.

A chat has 1 to 4 questions with their answers, and often a system turn that changes how answers are written. Each question
belongs to one split, which a hash of its text decides. So no question of a held-out chat, whatever its turn, occurs in a
training chat, however many are drawn: who answers held-out questions has learned the tasks, not the questions.
"""

import calendar
import dataclasses
import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from samestep.cut.order import sample_rng
from samestep.errors import UsageError, nearest

CHATS = 9  # stream of random numbers (see order.sample_rng)
SPLITS = ("train", "validation")
HELD_OUT = 10  # one question of so many is held out
MAX_TURNS = 4
LETTERS = "abcdefghijklmnopqrstuvwxyz"
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Level(NamedTuple):
    """A level of difficulty of questions.

    Attributes:
        longest: elements of a list at most; the shortest list has 3.
        addend: the second number of a sum is less than that; the first is less than 100.
        tasks: names of the tasks.
    """

    longest: int
    addend: int
    tasks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation whose last turn is an answer.

    Attributes:
        messages: the turns before the last answer, each with `role` and `content`.
        answer: the right one.
        wrong: a wrong one that is near: two elements changed places, one is another, or the number is beside the right one.
        task: name of the last question's task.
    """

    messages: tuple[dict[str, str], ...]
    answer: str
    wrong: str
    task: str


def draw_chat(seed: int, split: str, sample_id: int, level: str = "easy") -> Chat:
    """Draw the chat of a number: a pure function of its arguments.

    Args:
        seed: any integer.
        split: train or validation.
        sample_id: 0 or more.
        level: one of `LEVELS`.

    Raises:
        UsageError: a level that does not exist.
    """
    if level not in LEVELS:
        raise UsageError(f"dataset_config_name is {level!r}, must be a level of drawn chats: {nearest(level, LEVELS)}")
    rng = sample_rng(seed, CHATS, SPLITS.index(split), sample_id)
    system, write = SYSTEMS[rng.integers(len(SYSTEMS))]
    messages = [] if system is None else [{"role": "system", "content": system}]
    num_turns = int(rng.integers(1, MAX_TURNS + 1))
    for turn in range(num_turns):
        task = LEVELS[level].tasks[rng.integers(len(LEVELS[level].tasks))]
        question, answer = _draw_question(rng, task, LEVELS[level], split)
        messages.append({"role": "user", "content": question})
        if turn < num_turns - 1:
            messages.append({"role": "assistant", "content": write(answer)})
    return Chat(tuple(messages), write(answer), write(_spoil(rng, answer)), task)


def find_split(question: str) -> str:
    """Find the split that a question belongs to, by a hash of its text."""
    digest = hashlib.sha256(question.encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % HELD_OUT == 0 else "train"


def _draw_question(rng: np.random.Generator, task: str, level: Level, split: str) -> tuple[str, str]:
    while True:
        question, answer = TASKS[task](rng, level)
        if find_split(question) == split:
            return question, answer


def _spoil(rng: np.random.Generator, answer: str) -> str:
    """Make a wrong answer that is near the right one."""
    words = answer.split()
    places = [place for place in range(len(words) - 1) if words[place] != words[place + 1]]
    if places and rng.random() < 0.5:
        place = places[rng.integers(len(places))]
        words[place : place + 2] = words[place + 1], words[place]
        return " ".join(words)
    place = int(rng.integers(len(words)))
    words[place] = _replace(rng, words[place])
    return " ".join(words)


def _replace(rng: np.random.Generator, word: str) -> str:
    """Replace a number by one beside it, a day by another day, a date by another one, a letter by another letter."""
    if word.isdecimal():
        return str(int(word) + 1 if word == "0" or rng.random() < 0.5 else int(word) - 1)
    if "-" in word:
        return str(datetime.date.fromisoformat(word) + datetime.timedelta(days=1))
    choices = list(DAYS) if word in DAYS else list(LETTERS if word.islower() else LETTERS.upper())
    choices.remove(word)
    return choices[rng.integers(len(choices))]


# ---------------------------------------------------------------------------------------------------------------------
# tasks: each draws a question and computes its answer


def _elements(rng: np.random.Generator, level: Level, choices: Sequence[str]) -> list[str]:
    size = int(rng.integers(3, level.longest + 1))
    return [choices[place] for place in rng.integers(len(choices), size=size)]


def _repeat(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    text = " ".join(_elements(rng, level, LETTERS))
    return f"Repeat: {text}", text


def _capitals(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    text = " ".join(_elements(rng, level, LETTERS))
    return f"Write in capitals: {text}", text.upper()


def _reverse(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    letters = _elements(rng, level, LETTERS)
    return f"Reverse: {' '.join(letters)}", " ".join(reversed(letters))


def _last(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    letters = _elements(rng, level, LETTERS)
    return f"Last letter of: {' '.join(letters)}", letters[-1]


def _sort(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    digits = _elements(rng, level, "0123456789")
    return f"Sort: {' '.join(digits)}", " ".join(sorted(digits))


def _add(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    first, second = int(rng.integers(100)), int(rng.integers(level.addend))
    return f"What is {first} + {second}?", str(first + second)


def _larger(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    first = int(rng.integers(100))
    second = (first + 1 + int(rng.integers(99))) % 100  # another number
    return f"Which is larger, {first} or {second}?", str(max(first, second))


def _next_days(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    days = _elements(rng, level, DAYS)
    return f"Days after: {' '.join(days)}", " ".join(DAYS[(DAYS.index(day) + 1) % 7] for day in days)


def _days_in(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    months, year = _elements(rng, level, MONTHS), int(rng.integers(2000, 2040))
    lengths = [calendar.monthrange(year, MONTHS.index(month) + 1)[1] for month in months]
    return f"Days in {year} of: {' '.join(months)}", " ".join(map(str, lengths))


def _next_date(rng: np.random.Generator, level: Level) -> tuple[str, str]:
    date = datetime.date(2000, 1, 1) + datetime.timedelta(days=int(rng.integers(40 * 365)))
    return f"Date after: {date}", str(date + datetime.timedelta(days=1))


TASKS: dict[str, Callable[[np.random.Generator, Level], tuple[str, str]]] = {
    "repeat": _repeat,
    "capitals": _capitals,
    "reverse": _reverse,
    "last": _last,
    "sort": _sort,
    "add": _add,
    "larger": _larger,
    "next_days": _next_days,
    "days_in": _days_in,
    "next_date": _next_date,
}
LEVELS = {
    "easy": Level(4, 10, ("repeat", "capitals", "reverse", "last", "sort", "add", "larger", "next_days")),
    "medium": Level(6, 100, ("repeat", "capitals", "reverse", "last", "sort", "add", "larger", "next_days", "days_in")),
    "hard": Level(10, 100, tuple(TASKS)),
}
SYSTEMS: tuple[tuple[str | None, Callable[[str], str]], ...] = (
    (None, str),
    (None, str),
    ("You are a helpful assistant.", str),
    ("End each answer with a full stop.", lambda answer: f"{answer}."),
    ("Write each answer in brackets.", lambda answer: f"[{answer}]"),
)
"""System turns, and what they do to an answer."""
