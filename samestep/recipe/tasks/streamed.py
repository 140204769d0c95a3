"""The fields of recipes whose training rows may be streamed."""

import dataclasses
from typing import Any

from samestep.recipe.recipe import Recipe
from samestep.recipe.rules import Rule, each, rows
from samestep.recipe.settings import limit, setting

FIELDS = ("streaming", "num_streams", "shuffle_buffer_size")
IN_EPOCHS = ("num_train_epochs", "warmup_epochs")
"""Fields that need the number of samples."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamedTexts(Recipe):
    """The fields of recipes whose training rows may be streamed: whether they are, and in which order."""

    # Streaming
    streaming: bool = setting(
        "read train_file or dataset_name as the training goes, not before: shards on a disk, by URLs, or of the hub "
        "(docs/streaming.md)"
    )
    num_streams: int = setting(
        "virtual streams, of which sample t of the run comes from stream t mod num_streams; not used without streaming",
        limit(2**16),
    )
    shuffle_buffer_size: int = setting(
        "rows of each virtual stream that are shuffled at once; not used without streaming", limit(2**20)
    )

    rules = rows(
        *each(
            IN_EPOCHS,
            lambda name: Rule(
                lambda f: f.streaming and f[name] is not None,
                f"{name} is {{f[{name}]}}, but streaming is true, and a stream's number of samples is not known",
                f"set {name.replace('num_train_epochs', 'max_train_steps').replace('warmup_epochs', 'num_warmup_steps')}",
            ),
        ),
        Rule(
            lambda f: f.streaming and f.validation_fraction and f.validation_file is None,
            "validation_fraction is {f.validation_fraction}, but streaming is true, and of a stream nothing is held out",
            "give validation_file, or set validation_fraction to 0",
        ),
        Rule(
            lambda f: f.streaming and f.splits_dataset,
            "validation_split_name is set, but streaming is true, and held-out rows are read whole from files",
            "give validation_file, or set validation_split_name to null",
        ),
        Rule(
            lambda f: f.streaming and not f.names_tokenizer,
            "tokenizer_name is null, but streaming is true, and no tokenizer is trained on a stream",
            "set tokenizer_name",
        ),
        Rule(
            lambda f: f.streaming and any(name.startswith("builtin/") for name in _list_names(f.dataset_name)),
            "dataset_name is {f.dataset_name}, but streaming is true, and built-in data are no shards",
            "set streaming to false",
        ),
        Rule(
            lambda f: f.streaming and f.fault_tolerance == "step",
            "fault_tolerance is step, but streaming is true, and a replica does not know the places of others' streams",
            "set fault_tolerance to restart",
        ),
    )

    @property
    def names_tokenizer(self) -> bool:
        """A fact, for the rules: whether a tokenizer is loaded, by its name or from the folder of the weights."""
        return any(getattr(self, name, None) is not None for name in ("tokenizer_name", "model_name_or_path"))

    @property
    def splits_dataset(self) -> bool:
        """A fact, for the rules: whether a split of a dataset is held out."""
        return getattr(self, "validation_split_name", None) is not None

    def decisive_fields(self) -> dict[str, Any]:
        fields = super().decisive_fields()
        if not self.streaming:  # fingerprints of earlier versions, which had none
            for name in FIELDS:
                del fields[name]
        return fields


def _list_names(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else [*(names or ())]
