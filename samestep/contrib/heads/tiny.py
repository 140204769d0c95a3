"""Heads of transformers with random weights and few parameters, without a download."""

import dataclasses
import functools
import inspect
from difflib import get_close_matches
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from samestep.contrib.heads.samples import INPUTS, Samples
from samestep.contrib.heads.sizes import make_config
from samestep.errors import UsageError, reason
from samestep.recipe import hub

KINDS = {
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "speech to text": "SPEECH_SEQ_2_SEQ",
    "image-text to text": "IMAGE_TEXT_TO_TEXT MULTIMODAL_LM",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked language model": "MASKED_LM",
    "causal language model": "CAUSAL_LM",
    "next sentence": "NEXT_SENTENCE_PREDICTION",
    "image classification": "IMAGE_CLASSIFICATION",
    "video classification": "VIDEO_CLASSIFICATION",
    "audio classification": "AUDIO_CLASSIFICATION",
    "speech, CTC": "CTC",
    "semantic segmentation": "SEMANTIC_SEGMENTATION",
    "object detection": "OBJECT_DETECTION",
    "segmentation by masks": "INSTANCE_SEGMENTATION UNIVERSAL_SEGMENTATION",
    "depth estimation": "DEPTH_ESTIMATION",
    "pretraining": "PRETRAINING",
}
"""Kinds of heads by the mappings of transformers that list them. A class that several list is of the first kind."""
OTHER_KIND = "other"
ORDER = (*KINDS, OTHER_KIND)
ENDINGS = {
    "ForImageSegmentation": "object detection",
    "ForSegmentation": "object detection",
    "ForConditionalGeneration": "image-text to text",
    "ForCausalLM": "causal language model",
    "LMHeadModel": "causal language model",
    "ForCausalImageModeling": "causal language model",
}
TARGETS = ("labels", "start_positions", "future_values", "target_values", "mask_labels", "class_labels", "targets")
"""Names of what a head is to predict, besides names that end on `_label` and `_labels`."""
NO_TARGETS = ("input_labels", "input_boxes_labels")
"""Points that a user marks in an image."""
TEXTS_ONLY = ("question answering", "multiple choice")
MOST_PARAMETERS = 50_000_000


@functools.cache
def list_kinds() -> dict[str, str]:
    """List the classes that transformers has by kind: name -> kind."""
    kinds: dict[str, str] = {}
    for kind, tasks in KINDS.items():
        for task in tasks.split():
            for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
                for name in [names] if isinstance(names, str) else names:
                    kinds.setdefault(name, kind)
    return kinds


def find_kind(name: str) -> str:
    """Find the kind of a class."""
    found = (kind for ending, kind in ENDINGS.items() if name.endswith(ending))
    return list_kinds().get(name) or next(found, OTHER_KIND)


def find_class(name: str) -> type[PreTrainedModel] | None:
    """Find a class of models by its name; None: there is none."""
    made = getattr(transformers, name, None)
    is_model = isinstance(made, type) and issubclass(made, PreTrainedModel)
    return made if is_model and made.__module__.startswith("transformers.models.") else None


def list_targets(made: type[PreTrainedModel]) -> list[str]:
    """List the names of what a class is to predict, of which its forward takes a loss."""
    names = inspect.signature(made.forward).parameters
    return [
        name for name in names if name in TARGETS or (name.endswith(("_label", "_labels")) and name not in NO_TARGETS)
    ]


@functools.cache
def list_heads() -> dict[str, str]:
    """List all classes that take targets: name -> kind, in the order of `KINDS`. Imports every model: half a minute."""
    names = [name for name in dir(transformers) if (made := find_class(name)) and list_targets(made)]
    return {name: find_kind(name) for name in sorted(names, key=lambda name: (ORDER.index(find_kind(name)), name))}


@dataclasses.dataclass(frozen=True)
class Head:
    """A class of transformers, and what it is made from.

    Attributes:
        name: of the class.
        kind: one of `KINDS`, or another.
        usual: its configuration, of any sizes.
    """

    name: str
    kind: str
    usual: PreTrainedConfig

    def make_config(self) -> PreTrainedConfig:
        """Make its configuration of small sizes."""
        config = make_config(self.usual)
        if self.kind == "question answering" or "Classification" in self.name:
            config.num_labels = 2
        if self.name == "ReformerModelWithLMHead":
            config.is_decoder = True
        return config

    @functools.cached_property
    def samples(self) -> Samples:
        """Samples that it takes."""
        made = getattr(transformers, self.name)
        names = frozenset(inspect.signature(made.forward).parameters)
        own = made.main_input_name if isinstance(made.main_input_name, str) else made.main_input_name[0]
        wanted = "input_ids" if self.kind in TEXTS_ONLY else own
        main = next((name for name in (wanted, *INPUTS) if name in names and name in INPUTS), "input_ids")
        return Samples(self.kind, main, names, self.make_config())

    def build(self) -> nn.Module:
        """Make the head with the same random weights each time, in float32, without noise.

        Raises:
            ValueError: it is large, whatever its configuration says. Else what the class raises.
        """
        config, made = self.make_config(), getattr(transformers, self.name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in made(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size:,} parameters with small sizes in its configuration: parts of it have their own")
        torch.manual_seed(0)
        model = made(config).float()
        for module in model.modules():
            if "Dropout" in type(module).__name__:
                module.p = 0.0
            for field, value in vars(module).items():
                if isinstance(value, float) and ("drop" in field or "jitter" in field):
                    setattr(module, field, 0.0)
        return model


def find_head(text: str) -> Head:
    """Find a head by the name of its class, a folder with config.json, or a name on the hub.

    Raises:
        UsageError: there is none of that name, or it takes no targets.
    """
    if (made := find_class(text)) is not None:
        if not list_targets(made):
            raise UsageError(f"{text} takes no targets: it is no head that Trainer can train")
        return Head(text, find_kind(text), _make_usual(made))
    if not Path(text).is_dir() and ("/" not in text or text.startswith((".", "/"))):
        near = get_close_matches(text, dir(transformers), n=3)
        hint = f": did you mean {' or '.join(near)}?" if near else ", and no folder"
        hint = ": a program is audited by samestep lint and samestep audit-script" if text.endswith(".py") else hint
        raise UsageError(f"{text} is none of the heads of transformers {transformers.__version__}{hint}")
    try:
        usual = AutoConfig.from_pretrained(text)
    except Exception as error:  # of json, of the hub, of values that a configuration checks
        raise UsageError(
            f"{text}: no configuration could be read: {reason(error)}{hub.describe_way_out(text)}"
        ) from None
    names = [name for name in usual.architectures or [] if (made := find_class(name)) and list_targets(made)]
    if not names:
        raise UsageError(
            f"{text}: config.json names {', '.join(usual.architectures or []) or 'no architecture'}, which is no head with "
            "targets: give the name of a class"
        )
    return Head(names[0], find_kind(names[0]), usual)


def _make_usual(made: type[PreTrainedModel]) -> PreTrainedConfig:
    """Make the configuration that a class has if nobody says another."""
    types = made.config_class if isinstance(made.config_class, type) else made.config_class.__args__[0]
    return types()
