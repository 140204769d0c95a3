"""Takes the shape of a model from the checkpoint that training starts from, by its config.json."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.recipe import catalog as recipes
from samestep.recipe.reading import check_model_folder, format_name, format_value, has_hub_form, read_json
from samestep.recipe.recipe import Recipe
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.recipe.tasks.embedding_training import EmbeddingTraining
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning

SHAPES: dict[str, dict[str, Any]] = {
    "bert": {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    },
    "resnet": {
        "num_channels": 3,
        "embedding_size": 64,
        "hidden_sizes": (256, 512, 1024, 2048),
        "depths": (3, 4, 6, 3),
        "layer_type": "bottleneck",
    },
}
"""Architecture -> fields that weights decide, with the values that transformers takes where a config.json leaves one out."""
MODEL_TYPES = {"group_norm_resnet": "resnet"}
"""`model_type` of a config.json, where it is not the architecture's name -> architecture."""
SAME = [{"gelu_new", "gelu_pytorch_tanh"}]
"""Values that name one function: a recipe's stays."""

FindConfig = Callable[[str], Mapping[str, Any] | None]


def read_local_config(name_or_path: str) -> dict[str, Any] | None:
    """Read the config.json of a folder; None: there is none, or it is a name on the hub.

    Raises:
        UsageError: the folder holds what cannot be read as a model, see `check_model_folder`.
    """
    folder, origin = Path(name_or_path).expanduser(), f"model_name_or_path {format_name(name_or_path)}"
    check_model_folder(folder, origin)
    path = folder / "config.json"
    return read_json(path, f"{origin}: config.json") if path.is_file() else None


def find_base(name_or_path: str, more: str = "") -> str | None:
    """Find the base of an adapter in a folder: `base/` in it, or beside it (of a checkpoint: in its run), else what its
    adapter_config.json names; None: the folder holds a whole model, or none, or it is a name on the hub.

    Args:
        name_or_path: of a model, or an adapter.
        more: a further remedy of who asks, for the message.

    Raises:
        UsageError: the file names no base, or a folder that is not here, as of the machine on which the adapter was trained.
    """
    folder = Path(name_or_path).expanduser()
    path = folder / "adapter_config.json"
    if not path.is_file() or (folder / "config.json").exists():
        return None
    for place in (folder / "base", folder.parent / "base"):
        if (place / "config.json").is_file():
            return str(place)
    origin = f"the adapter in {format_name(name_or_path)}"
    base = read_json(path, f"{origin}: adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise UsageError(
            f"{origin}: adapter_config.json names no base: put the base, or a link to it, at {folder}/base{more}"
        )
    if not has_hub_form(base) and not Path(base).expanduser().exists():
        raise UsageError(
            f"{origin} was trained on {format_name(base)}, which is not here: put that folder, or a link to it, at "
            f"{folder}/base{more}"
        )
    return base


def load(
    name_or_file: str,
    changes: Mapping[str, Any],
    *,
    task: str | None = None,
    find_config: FindConfig = read_local_config,
    say: Callable[[str], object] = lambda text: None,
) -> Recipe:
    """Load a recipe as `recipe.load` does, with the shape of the checkpoint that it starts from, and what own data decide.

    Args:
        name_or_file, changes, task: as of `recipe.load`; `changes` are what a user typed.
        find_config: returns the configuration of a model, given model_name_or_path; None: it cannot be known, and the recipe's
            shape stays.
        say: told in one line which fields of the recipe the checkpoint replaces, if it does. A tokenizer_name that nobody typed
            is one of them: a checkpoint that was typed brings its own.

    Raises:
        UsageError: as `recipe.load`; the checkpoint is of another architecture, or contradicts what was typed.
    """
    recipe = recipes.load(name_or_file, changes, task=task)
    if found := recipe.find_fields_of_data(changes):
        changes = {**changes, **found}
        recipe = recipes.load(name_or_file, changes, task=task)
    path = getattr(recipe, "model_name_or_path", None)
    config = None if path is None else find_config(path)
    if config is None:
        return recipe
    location = f"model_name_or_path {format_name(path)}"
    if isinstance(recipe, Seq2SeqFineTuning):
        return recipe  # of any architecture; lengths of encoder and decoder are compared where the model is made
    if isinstance(
        recipe, CausalLmFineTuning | EmbeddingTraining
    ):  # of any architecture, whose shape the recipe does not have
        num_positions = config.get("max_position_embeddings", config.get("n_positions"))
        if isinstance(num_positions, int) and recipe.max_seq_length > num_positions:
            raise UsageError(
                f"max_seq_length is {recipe.max_seq_length}, but {location} has {format_value(num_positions)} positions: set "
                "it to that or less"
            )
        return recipe
    trained = next(name for name, fields in SHAPES.items() if all(hasattr(recipe, field) for field in fields))
    model_type: Any = config.get("model_type")
    if not isinstance(model_type, str) or MODEL_TYPES.get(model_type, model_type) != trained:
        raise UsageError(
            f"{location} is a model of type {format_value(model_type)}, but {recipe.task} trains {trained}. Give a checkpoint "
            f"of {trained}; other architectures train in a loop of your own, or with ExactTrainer (docs/your-own-loop.md)"
        )
    shape = {field: config.get(field, default) for field, default in SHAPES[trained].items()}
    other = {field: value for field, value in shape.items() if not _is_same(getattr(recipe, field), value)}
    if typed := [field for field in other if field in changes]:
        raise UsageError(
            f"{location} has {field} {format_value(other[field])}, but {format_value(changes[field])} was given: leave "
            f"--{field} out, the weights decide it"
            for field in typed
        )
    if (
        path is not None
        and path == changes.get("model_name_or_path")
        and "tokenizer_name" not in changes
        and _has_tokenizer(path)
    ):
        other |= {"tokenizer_name": None} if getattr(recipe, "tokenizer_name", None) is not None else {}
    if other:
        texts = [f"{field} {format_value(value)} (not {getattr(recipe, field)})" for field, value in other.items()]
        say(f"the model has the shape of {format_name(path)}: {', '.join(texts)}")
    return recipes.load(name_or_file, {**changes, **other}, task=task) if other else recipe


def _has_tokenizer(name_or_path: str) -> bool:
    """Tell whether a folder holds a tokenizer; of a name on the hub it is taken for granted."""
    path = Path(name_or_path).expanduser()
    return not path.exists() or any((path / name).is_file() for name in ("tokenizer.json", "vocab.txt", "vocab.json"))


def _is_same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, tuple):
        return isinstance(theirs, list | tuple) and ours == tuple(theirs)
    return ours == theirs or any(isinstance(theirs, str) and {ours, theirs} <= same for same in SAME)
