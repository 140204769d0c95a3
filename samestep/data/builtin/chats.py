"""Conversations, and pairs, that need no download, as sources of rows: drawn ones, and examples of Python's own modules."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samestep.data import documents
from samestep.data.arrow import hash_modules
from samestep.data.builtin import doctest_chats, drawn_chats, drawn_images
from samestep.data.conversation_rows import FEATURES, NAMES, READING, Source, split_name
from samestep.data.row_report import RowReport
from samestep.errors import UsageError

DOCTESTS = "builtin/doctests"
IMAGES = "builtin/drawn_images"
HAS_PAIRS = {"builtin/drawn_chats": False, "builtin/drawn_pairs": True, DOCTESTS: False, IMAGES: False}


def load_source(recipe: Any, entry: str) -> Source:
    """Load a source of rows, training and held-out ones.

    Args:
        recipe: gives the seed, the numbers of samples to draw (examples are as many as there are), and their level.
        entry: of dataset_name, one of `HAS_PAIRS`, perhaps with a level.

    Raises:
        UsageError: such data have no pairs, or only pairs; or how they are drawn is not said.
    """
    sizes = {"train": recipe.num_train_samples, "validation": recipe.num_validation_samples}
    train, held_out = (_load_split(recipe, entry, split, size) for split, size in sizes.items())
    size = len(train) + len(held_out)
    return Source(entry, train, held_out, RowReport(entry, size, size, columns=train[0]["columns"].split(", ")))


def _load_split(recipe: Any, entry: str, split: str, num_samples: int | None) -> Any:
    name, config, _ = split_name(entry)
    wants_pairs = recipe.objective != "sft"
    if HAS_PAIRS[name] != wants_pairs:
        other = next(other for other, has_pairs in HAS_PAIRS.items() if has_pairs == wants_pairs)
        raise UsageError(
            f"dataset_name is {name}, but objective {recipe.objective} needs {other}: set dataset_name to it"
        )
    config = config or recipe.dataset_config_name
    if name == DOCTESTS:
        if config is not None:
            raise UsageError(f"dataset_name {name} has no configuration, but {config} was given: leave it out")
        key = (sys.version, split, hash_modules(__name__, doctest_chats.__name__, *READING))
        return documents.cache_rows(_doctest_rows, FEATURES, key=key, split=split)
    if num_samples is None:
        field = "num_train_samples" if split == "train" else "num_validation_samples"
        raise UsageError(f"{field} is not set, but {name} is drawn: say how many samples")
    if name == IMAGES:
        if config is not None or not recipe.images:
            fault = "images is false" if config is None else f"dataset_config_name is {config}"
            raise UsageError(
                f"dataset_name is {name}, but {fault}: set images to true, and dataset_config_name to null"
            )
        options = {"num_samples": num_samples, "seed": recipe.seed, "split": split}
        images = (name, *options.values(), hash_modules(__name__, drawn_images.__name__, *READING))
        return documents.cache_rows(_image_rows, FEATURES, key=images, **options)
    drawn = {"seed": recipe.seed, "split": split, "level": config or "easy"}
    draws = (name, num_samples, drawn, hash_modules(__name__, drawn_chats.__name__, *READING))
    return documents.cache_rows(_drawn_rows, FEATURES, key=draws, name=name, num_samples=num_samples, **drawn)


def _drawn_rows(name: str, num_samples: int, seed: int, split: str, level: str) -> Iterator[dict[str, str | None]]:
    columns = "prompt, chosen, rejected" if HAS_PAIRS[name] else "messages"
    for sample_id in range(num_samples):
        chat = drawn_chats.draw_chat(seed, split, sample_id, level)
        answers = [chat.answer, chat.wrong] if HAS_PAIRS[name] else [chat.answer]
        place = f"{name}, {split} {sample_id}"
        yield _make_row(columns, chat.messages, answers, place, chat.task)


def _image_rows(num_samples: int, seed: int, split: str) -> Iterator[dict[str, str | None]]:
    for sample_id, (turns, answer, task) in enumerate(drawn_images.iterate_turns(seed, split, num_samples)):
        yield _make_row("messages", turns, [answer], f"{IMAGES}, {split} {sample_id}", task)


def _doctest_rows(split: str) -> Iterator[dict[str, str | None]]:
    for example in doctest_chats.find_examples():
        if example.split == split:
            turns = [{"role": "user", "content": example.prompt}]
            yield _make_row("messages", turns, [example.answer], f"{DOCTESTS}, {example.module}", "doctests")


def _make_row(
    columns: str, turns: Sequence[Mapping], answers: Sequence[str], place: str, source: str
) -> dict[str, str | None]:
    row = {
        "prompt": turns,
        "answers": [[{"role": "assistant", "content": answer}] for answer in answers],
        "tools": None,
        "trains_prompt": True,
    }
    return dict(zip(NAMES, (columns, json.dumps(row), place, source, ""), strict=True))
