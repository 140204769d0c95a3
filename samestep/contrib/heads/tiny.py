"""Heads of transformers with random weights and few parameters, and samples for them, without a download."""

import dataclasses
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from samestep.errors import UsageError

KINDS = {
    "sequence classification": "SEQUENCE_CLASSIFICATION",
    "token classification": "TOKEN_CLASSIFICATION",
    "question answering": "QUESTION_ANSWERING",
    "multiple choice": "MULTIPLE_CHOICE",
    "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked language model": "MASKED_LM",
    "causal language model": "CAUSAL_LM",
}
"""Kinds of heads by the mapping of transformers that lists them. A class that several list is of the first kind."""
WIDTH, INNER, LENGTH, MOST_PARAMETERS = 32, 32, 64, 3_000_000
SIZES = {
    **dict.fromkeys("hidden_size d_model n_embd dim embedding_size emb_dim word_embed_proj_dim".split(), WIDTH),
    **dict.fromkeys(
        "intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim hidden_dim d_ff n_inner d_inner".split(), INNER
    ),
    **dict.fromkeys(
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers".split(), 2
    ),
    **dict.fromkeys(
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads".split(), 2
    ),
    **dict.fromkeys("num_key_value_heads num_experts_per_tok type_vocab_size conv_kernel".split(), 2),
    **dict.fromkeys("max_position_embeddings n_positions n_ctx vocab_size".split(), LENGTH),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts time_step_rank".split(), 4),
    **dict.fromkeys("d_kv d_head head_dim v_head_dim kv_lora_rank q_lora_rank".split(), 16),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size expert_intermediate_size".split(), 16),
    **dict.fromkeys("mamba_d_state state_size num_buckets qk_rope_head_dim qk_nope_head_dim".split(), 8),
    **dict.fromkeys("n_group topk_group n_shared_experts first_k_dense_replace".split(), 1),
    **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 0},
}
"""Fields of configurations, by the names that models use."""
KEPT = ("output_router_logits", "router_aux_loss_coef", "problem_type", "tie_word_embeddings", "is_decoder")
"""Fields that keep the value that they have, as they say what the loss is."""


def list_heads() -> dict[str, tuple[str, str]]:
    """List the classes: name -> kind, type of the model."""
    heads: dict[str, tuple[str, str]] = {}
    for kind, task in KINDS.items():
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                heads.setdefault(name, (kind, model_type))
    return heads


def make_config(usual: PreTrainedConfig) -> Any:
    """Make a configuration of small sizes without dropout from another one; what it raises where sizes do not go together."""
    fields, renamed = usual.to_dict(), getattr(type(usual), "attribute_map", {})
    computed = {
        key for key in SIZES if isinstance(made := getattr(type(usual), key, None), property) and made.fset is None
    }
    known = {key for key in SIZES if key in fields or (hasattr(usual, key) and key not in renamed)} - computed
    sizes = {key: value for key, value in SIZES.items() if key in known}
    noise = {key: 0.0 for key, value in fields.items() if "drop" in key and isinstance(value, float)}
    kept = {key: fields[key] for key in KEPT if key in fields}
    config = type(usual)(**kept | sizes | noise)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]
    return config


@dataclasses.dataclass(frozen=True)
class Head:
    """A class of transformers, and what it is made from.

    Attributes:
        name: of the class.
        kind: one of `KINDS`.
        usual: its configuration, of any sizes.
    """

    name: str
    kind: str
    usual: PreTrainedConfig

    def build(self) -> nn.Module:
        """Make the head with the same random weights each time, in float32, without noise.

        Raises:
            ValueError: it is large, whatever its configuration says. Else what the class raises.
        """
        config, made = make_config(self.usual), getattr(transformers, self.name)
        if self.kind == "question answering" or "Classification" in self.name:
            config.num_labels = 2
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
        UsageError: there is none of that name, or it is none for texts.
    """
    heads = list_heads()
    if text in heads:
        kind, model_type = heads[text]
        return Head(text, kind, CONFIG_MAPPING[model_type]())
    if not Path(text).is_dir() and ("/" not in text or text.startswith((".", "/"))):
        near = get_close_matches(text, heads, n=3)
        hint = f": did you mean {' or '.join(near)}?" if near else ", and no folder"
        raise UsageError(
            f"{text} is none of the {len(heads)} heads for texts of transformers {transformers.__version__}{hint}"
        )
    try:
        usual = AutoConfig.from_pretrained(text)
    except Exception as error:  # of json, of the hub, of values that a configuration checks
        raise UsageError(f"{text}: no configuration could be read: {' '.join(str(error).split())[:300]}") from None
    names = [name for name in usual.architectures or [] if name in heads]
    if not names:
        raise UsageError(
            f"{text}: config.json names {', '.join(usual.architectures or []) or 'no architecture'}, which is no head for "
            "texts: give the name of a class"
        )
    return Head(names[0], heads[names[0]][0], usual)


def draw(kind: str, number: int) -> dict[str, torch.Tensor]:
    """Draw a sample of 5 to 12 tokens; where several tokens are predicted, as many as the number says."""
    length = 5 + number * 5 % 8
    ids = (torch.arange(length) * (number + 3) + number * number) % 50 + 5
    ids[-1] = SIZES["eos_token_id"]
    every = torch.arange(length) % (2 + number % 3) == 0
    targets = {
        "token classification": lambda: {"labels": torch.where(every, ids % 2, -100)},
        "question answering": lambda: {
            "start_positions": torch.tensor(number % 3),
            "end_positions": torch.tensor(1 + number % 4),
        },
        "masked language model": lambda: {"labels": torch.where(every, ids, -100)},
        "causal language model": lambda: {"labels": torch.where(torch.arange(length) >= number % 3, ids, -100)},
        "sequence to sequence": lambda: {"labels": ids[: 3 + number * 3 % 4]},
    }
    return {"input_ids": ids} | targets.get(kind, lambda: {"labels": torch.tensor(number % 2)})()


def collate(kind: str) -> Callable[[list[dict]], dict[str, torch.Tensor]]:
    """Make the collate function of a kind: padded to the longest, and answers to 16 tokens, over which they are a softmax."""

    def join(samples: list[dict]) -> dict[str, torch.Tensor]:
        ids = [sample["input_ids"] for sample in samples]
        batch = {
            "input_ids": pad_sequence(ids, True, 0),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True, 0),
        }
        if kind == "question answering":
            batch = {name: nn.functional.pad(rows, (0, 16 - rows.shape[1])) for name, rows in batch.items()}
        if kind == "multiple choice":
            others = pad_sequence([row.roll(1) for row in ids], True, 0)
            batch = {
                "input_ids": torch.stack([batch["input_ids"], others], 1),
                "attention_mask": batch["attention_mask"],
            }
            batch["attention_mask"] = torch.stack([batch["attention_mask"]] * 2, 1)
        for name in samples[0].keys() - {"input_ids"}:
            values = [sample[name] for sample in samples]
            batch[name] = pad_sequence(values, True, -100) if values[0].ndim else torch.stack(values)
        return batch

    return join
