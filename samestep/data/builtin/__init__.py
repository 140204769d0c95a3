"""The one list of data that need no download; what reads or draws them is imported here alone, when a recipe asks for it."""

import importlib
from typing import Any

from samestep.errors import UsageError, nearest

BUILTIN = {
    "documents": {"builtin/python_docs": "samestep.data.builtin.python_docs:load_pages"},
    "labelled texts": {"builtin/python_docs_parts": "samestep.data.builtin.python_docs:load_paragraphs"},
    "pairs of texts": {"builtin/python_docs_pairs": "samestep.data.builtin.python_docs:load_pairs"},
    "conversations": {
        "builtin/drawn_chats": "samestep.data.builtin.chats:load_source",
        "builtin/drawn_pairs": "samestep.data.builtin.chats:load_source",
        "builtin/drawn_images": "samestep.data.builtin.chats:load_source",
        "builtin/doctests": "samestep.data.builtin.chats:load_source",
    },
    "sources and targets": {"builtin/spelled_dates_and_numbers": "samestep.data.builtin.spelled:load_rows"},
    "recordings and texts": {"builtin/spoken_digits": "samestep.data.builtin.spoken_digits:load"},
    "images": {"builtin/digits": "samestep.data.builtin.digits:Digits"},
}
"""Kind of samples -> `dataset_name` -> MODULE:NAME of what makes them. Captchas are a task of their own."""


def is_builtin(dataset_name: str | None) -> bool:
    """Tell whether a name of a dataset is one of built-in data."""
    return dataset_name is not None and dataset_name.startswith("builtin/")


def find_builtin(kind: str, dataset_name: str) -> Any:
    """Import what makes built-in data. Raises UsageError where there are no such data of the kind."""
    places = BUILTIN[kind]
    if dataset_name not in places:
        raise UsageError(f"dataset_name {dataset_name!r} does not exist: {nearest(dataset_name, places)}")
    module, name = places[dataset_name].split(":")
    return getattr(importlib.import_module(module), name)
