"""The catalog of recipes: reads one by its name or from a file, with changes, and knows all tasks."""

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.errors import UsageError, nearest
from samestep.recipe.reading import format_name, format_value, read_text, read_yaml, shipped_folder
from samestep.recipe.recipe import ALTERNATIVES, VARIANTS, Recipe
from samestep.recipe.recipe import TASKS as TASKS  # others take it from here
from samestep.recipe.settings import build
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, find_drawn
from samestep.recipe.tasks.conversation_images import IMAGE_SHAPE
from samestep.recipe.tasks.decoder import SHAPE
from samestep.recipe.tasks.seq2seq_finetuning import DRAWN as SEQ2SEQ_DRAWN
from samestep.recipe.tasks.seq2seq_finetuning import SHAPE as SEQ2SEQ_SHAPE

CATALOG = shipped_folder("catalog")
BASES = CATALOG / "bases"
"""Bases of recipes: for each task, named as it is, the fields that three quarters of its recipes share. No base is a recipe:
none names a batch and a length of its own."""
SOURCES = ALTERNATIVES[-1]
PARTS_OF_A_DATASET = ("dataset_config_name", "validation_split_name", "mixture_weights")
"""Fields that name a part of `dataset_name`, or weigh it; another source has no such part, or weight."""
HELD_OUT = ("validation_file", "validation_dir")
"""Fields that name held-out data of the same kind as the training data."""
DATA = ("train_file", "train_dir", "dataset_name", "dataset_config_name")
SHAPES = ("architecture", "vocab_size", *SHAPE, "n_embd", "n_layer", "n_head", "hidden_sizes", "depths")
MODEL = ("model_name_or_path", "lora_rank", "base_quantization", "objective", *SHAPES)
LENGTHS = ("max_train_steps", "num_train_epochs", "global_batch_size", "block_size", "max_seq_length")
"""Fields that a description names: of the data, of the model, of the training's length."""
TEXTS = ("name", "description", "source", "expect")
"""Fields that speak of all others: they are not true of a recipe whose values were changed."""


def catalog_names() -> list[str]:
    """List the names of the recipes that ship with the package."""
    return sorted(path.stem for path in CATALOG.glob("*.yaml"))


def overlay(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `changes` over `values`; a value for one of several alternatives clears the others.

    Other training data clears the fields that name parts of the old data: the configuration and the held-out split of another
    dataset; for data of another kind, files instead of a dataset, also the held-out data, and how documents are told apart.
    Weights to start from clear the shape of a causal language model, which they decide.

    >>> overlay({"max_train_steps": 10, "num_train_epochs": None}, {"num_train_epochs": 2})
    {'max_train_steps': None, 'num_train_epochs': 2}
    >>> overlay({"dataset_name": "wiki", "dataset_config_name": "en", "train_file": None}, {"train_file": ["a.txt"]})
    {'dataset_name': None, 'dataset_config_name': None, 'train_file': ['a.txt']}
    """
    merged = dict(values)
    for name in SOURCES:
        if changes.get(name) is not None and changes[name] != values.get(name):
            is_other_kind = values.get(name) is None and any(values.get(source) is not None for source in SOURCES)
            cleared = PARTS_OF_A_DATASET + (HELD_OUT if is_other_kind else ())
            cleared += DRAWN_SIZES if _is_drawn(values.get("dataset_name")) and not _is_drawn(changes[name]) else ()
            merged.update({field: None for field in cleared if field in merged})
            if is_other_kind and "txt_documents" in merged:
                merged["txt_documents"] = "auto"
    if changes.get("model_name_or_path") is not None and "architecture" in merged:
        merged |= dict.fromkeys(
            name for name in (*SHAPE, *SEQ2SEQ_SHAPE, *IMAGE_SHAPE, "architecture", "vocab_size") if name in merged
        )
    for group in ALTERNATIVES:
        if any(changes.get(name) is not None for name in group):
            merged.update({name: None for name in group if name in merged})
    return merged | dict(changes)


def _is_drawn(names: Any) -> bool:
    """Tell whether a name of a dataset, or one of several, is that of drawn data whose size is said."""
    return bool(find_drawn(names)) or (isinstance(names, str) and names in SEQ2SEQ_DRAWN)


def _change(values: Mapping[str, Any], changes: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Lay `changes` over the values of a recipe, and say in its `source` and `expect` that they are no longer the recipe's.

    A description of other data, another model or length, is left empty, for `load` to write.
    """
    merged = overlay(values, changes)
    names = [name for name in changes if name not in TEXTS and not _is_same(merged[name], values.get(name))]
    if names:
        texts = {"source": f"{origin}, but for {', '.join(names)}", "expect": "not measured with these values"}
        if any(name in (*DATA, *MODEL, *LENGTHS) for name in names):
            texts["description"] = ""
        merged |= {name: text for name, text in texts.items() if name not in changes}
    return merged


def _is_same(a: Any, b: Any) -> bool:
    """Tell whether two values of a field, from a file or a flag, are the same.

    >>> _is_same(("a",), ["a"]), _is_same("1e-3", 0.001), _is_same(None, "a")
    (True, True, False)
    """
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    try:
        return float(a) == float(b)
    except (TypeError, ValueError, OverflowError):
        return bool(a == b)


def load(name_or_file: str, changes: Mapping[str, Any] | None = None, *, task: str | None = None) -> Recipe:
    """Load a recipe from the catalog or from a YAML file, strictly.

    Args:
        name_or_file: a catalog name ("bert_base") or a path to a .yaml file. A file may begin with `extends: NAME_OR_FILE`
            and then hold only what differs; NAME may be a task's, whose base it then extends.
        changes: field -> value, laid over the file's (flags).
        task: refuse a recipe of another task.

    Raises:
        UsageError: unknown recipe, unreadable file, or any broken rule, all problems in one error.
    """
    values = _read(name_or_file, ancestors=())
    kind = values.get("task")
    if not isinstance(kind, str) or kind not in TASKS:
        state = "missing" if kind is None else format_value(kind)
        remedy = f"{', '.join(TASKS)}; `extends: RECIPE` brings that of another recipe"
        remedy += "; a task of your own is known to programs that import its file" if kind is not None else ""
        raise UsageError(f"recipe {format_name(name_or_file)}: task is {state}, must be one of {remedy}")
    if task is not None and kind != task:
        raise UsageError(
            f"recipe {format_name(name_or_file)} is for the task {kind}, this script trains {task}: {_list_choices(task)}"
        )
    values = _change(values, changes or {}, str(values.get("name", name_or_file)))
    recipe: Recipe = build(TASKS[kind], values, f"recipe {format_name(name_or_file)}")
    if not recipe.description:
        subject = (type(recipe).__doc__ or kind).partition(":")[0].rstrip(".")
        place = f" on {recipe.data_name}" if recipe.data_name else ""
        recipe = dataclasses.replace(recipe, description=f"{subject}{recipe.model_in_words}{place}.")
    return recipe


def name_changed(recipe: Recipe, changes: Mapping[str, Any]) -> str:
    """Name a recipe with what flags changed: its model, its data.

    >>> recipe = load("gpt2_124m", changes := {"train_file": ["a.txt"], "n_layer": 24})
    >>> name_changed(recipe, changes), name_changed(recipe, {"seed": 2})
    ('gpt2_124m of another shape, on a.txt', 'gpt2_124m')
    """
    path, data = changes.get("model_name_or_path"), None
    if any(changes.get(name) is not None for name in DATA):
        data = recipe.data_name
    if path is None:
        name = recipe.name + " of another shape" * any(name in SHAPES for name in changes)
        return f"{name}{',' * (name != recipe.name)} on {data}" if data else name
    model = Path(path).name or str(path)
    return f"{model} on {data or recipe.data_name or 'its data'} ({recipe.name})"


def find_task(name_or_file: str) -> str | None:
    """Find the task of a recipe; None: there is no such recipe, or it names none."""
    try:
        task = _read(name_or_file, ancestors=()).get("task")
    except UsageError:
        return None
    return task if isinstance(task, str) else None


def _list_choices(task: str) -> str:
    return "recipes for it: " + ", ".join(n for n in catalog_names() if _read(n, ancestors=())["task"] == task)


def _read(name_or_file: str, ancestors: Sequence[str]) -> dict[str, Any]:
    """Read a recipe's values, laid over its base's; `ancestors` are the recipes that extend it."""
    path = _find_file(name_or_file, ancestors[-1] if ancestors else None)
    if name_or_file in ancestors:
        raise UsageError(
            f"recipe {format_name(name_or_file)} extends itself through {' -> '.join(ancestors)}: remove one `extends`"
        )
    is_shipped = path.is_relative_to(CATALOG)  # such a recipe speaks for itself, and its file does not change
    read = _read_shipped if is_shipped else read_yaml
    values = {"name": path.stem} | read(path, f"recipe {format_name(path)}")
    for field in VARIANTS:
        if isinstance(sentence := values.get(field), str):
            values[field] = _replace_sentence(field, sentence, path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise UsageError(
            f"recipe {format_name(path)}: extends is {format_value(base)}, must be a recipe's name or file"
        )
    if str(base).endswith((".yaml", ".yml")):
        base = path.parent / base
    base_values = _read(str(base), (*ancestors, name_or_file))
    if not is_shipped:
        return _change(base_values, values, base)
    if "source" not in base_values:  # a task's base
        return overlay(base_values, values)
    # What another recipe of the catalog was measured to reach is no promise of this one
    return _change(base_values, {"source": f"extends {base} ({base_values['source']})"} | values, base)


_read_shipped = functools.cache(read_yaml)  # the bases are those of many recipes


def _replace_sentence(field: str, sentence: str, path: Path) -> Any:
    """Warn of a sentence in a file, and return its mapping; a sentence that breaks a rule stays, for `build` to refuse."""
    try:
        mapping = VARIANTS[field].read(sentence).mapping
    except UsageError:
        return sentence
    form = yaml.safe_dump(mapping, default_flow_style=True, sort_keys=False, width=1000).strip()
    message = f"recipe {format_name(path)}: {field} as a sentence is read until 0.2: write {form}"
    # With the file's own line below it, not one of this program
    lines = read_text(path, f"recipe {format_name(path)}").splitlines()
    number = next((number for number, line in enumerate(lines, 1) if line.startswith(field)), 1)
    warnings.warn_explicit(message, FutureWarning, format_name(path), number, registry=_WARNED)
    return mapping


_WARNED: dict[Any, Any] = {}  # each warning is shown once


def _find_file(name_or_file: str, extended_by: str | None) -> Path:
    """Find the file of a recipe, or of a base that a recipe `extended_by` names; a file of one's own is not looked at."""
    if name_or_file.endswith((".yaml", ".yml")):
        return Path(name_or_file)
    folders = (CATALOG,) if extended_by is None else (CATALOG, BASES)
    files = {path.stem: path for folder in folders for path in folder.glob("*.yaml")}
    if name_or_file not in files:
        hint = nearest(name_or_file, files)
        remedy = "Another model of its kind trains with --model_name_or_path MODEL added; a recipe of your own is a .yaml file"
        origin = ""
        if extended_by is not None:
            origin = f"recipe {format_name(extended_by)}: extends: "
            remedy = (
                f"A base is one of {', '.join(sorted(path.stem for path in BASES.glob('*.yaml')))}, or a .yaml file"
            )
        raise UsageError(
            f"{origin}unknown recipe {format_value(name_or_file)}: {hint}{'' if hint.endswith('?') else '.'} {remedy}"
        )
    return files[name_or_file]
