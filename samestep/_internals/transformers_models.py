"""The making of models of transformers, and the attention kernel that they use."""

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils
from transformers.integrations import moe

EXPERTS_MATMUL = torch.ops.transformers.grouped_mm_fallback
"""transformers 5.24: products of tokens [S, n] with the weights [E, n, m] of their experts, of which torch's FLOP counter knows
nothing."""
EXPERTS_MATMUL_BACKWARD = getattr(torch.ops.transformers, "grouped_mm_fallback_backward", None)
"""The backward of `EXPERTS_MATMUL`; None: transformers is older (5.17), where nothing is traced."""


def attention_kernel(config: PreTrainedConfig) -> str:
    """Return the name of the attention kernel that a model of this config uses, of several its language model.

    transformers 5.24, `_attn_implementation`: the documented `set_attn_implementation` sets it, but nothing documented reads
    it.
    """
    return config.get_text_config()._attn_implementation


def set_text_attention(model: PreTrainedModel, kernel: str) -> None:
    """Let a model's attention be computed by a kernel; where it is made of several, that of its language model only.

    transformers 5.24, `sub_configs`: names of the parts, by which the documented `set_attn_implementation` knows them.
    """
    config, text = model.config, model.config.get_text_config()
    name = next((name for name in config.sub_configs if getattr(config, name) is text), None)
    model.set_attn_implementation(kernel if name is None else {name: kernel})


def set_tower_attention(model: PreTrainedModel, kernel: str) -> dict[str, str]:
    """Let the towers of a model that give their attention a row of all images, with the ends of the images or of their windows,
    compute it by a kernel.

    transformers 5.24: such layers take `cu_seqlens`, and pass them on to kernels that have "flash" in their name; for others
    they call the kernel once for each part of the row.

    Returns:
        their own kernels, by the names of their configs, as `set_attn_implementation` takes them.
    """
    kernels = {}
    for name in model.config.sub_configs:
        config = getattr(model.config, name)
        modules = [module for module in model.modules() if getattr(module, "config", None) is config]
        layers = [module for module in modules if not isinstance(module, PreTrainedModel)]
        if any("cu_seqlens" in inspect.signature(layer.forward).parameters for layer in layers):
            kernels[name] = config._attn_implementation
    model.set_attn_implementation(dict.fromkeys(kernels, kernel))
    return kernels


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Tell whether a model has torch's kernel of attention: transformers 5.24, `_supports_sdpa` of its class."""
    return bool(model._supports_sdpa)


def can_set_attention(model: PreTrainedModel) -> bool:
    """Tell whether a model's attention is a function of `AttentionInterface`, which can be exchanged.

    transformers 5.24, `_can_set_attn_implementation`: the documented `set_attn_implementation` asks it, and only warns.
    """
    return model._can_set_attn_implementation()


def choose_attention(config: PreTrainedConfig, model_class: type[PreTrainedModel], kernel: str) -> None:
    """Let models of this config be made with `kernel`, or with eager where their class has no other.

    transformers 5.24, `_supports_sdpa` and `_attn_implementation`: a class that does not support sdpa raises when it is made.
    """
    config._attn_implementation = kernel if model_class._supports_sdpa else "eager"


def skip_weight_initialization() -> AbstractContextManager:
    """Make models without initial weights within this context: some initializations read numbers, which fake tensors lack.

    transformers 5.24, `PreTrainedModel.initialize_weights`, which `post_init` calls.
    """
    return mock.patch.object(PreTrainedModel, "initialize_weights")


def assume_single_document() -> AbstractContextManager:
    """Make causal masks within this context for samples that hold one document.

    transformers 5.24, `masking_utils.find_packed_sequence_indices`: it reads from the position ids whether there are several,
    and where these are fake it assumes several.
    """
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", _no_sequences)


def recompute_activations(model: PreTrainedModel, options: dict[str, Any] | None = None) -> None:
    """Let a model keep few activations for the backward, which computes the others again.

    transformers 5.24, `activation_checkpointing_enable`: in 5.17 its name is `gradient_checkpointing_enable`.

    Args:
        options: of `torch.utils.checkpoint.checkpoint`.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


def recomputes_within(model: PreTrainedModel, context_fn: Callable) -> bool:
    """Tell whether all layers that are computed again in the backward are so within `context_fn`.

    transformers 5.24, `_gradient_checkpointing_func`: torch's checkpoint with its options, which nothing documented reads.
    """
    functions = [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()]
    return all(getattr(f, "keywords", {}).get("context_fn") is context_fn for f in functions if f is not None)


def find_routers(model: nn.Module) -> dict[nn.Module, str]:
    """Find the modules whose outputs models of transformers record as `router_logits`, and their names.

    transformers 5.24, `_can_record_outputs` of a class: which outputs of which modules it can return. A value is an
    `OutputRecorder`, a class of modules, or a list of these. 5.17 has it, too, for some models; others have no such attribute.
    """
    found: dict[nn.Module, str] = {}
    for part in model.modules():
        recorded = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", ())
        for recorder in recorded if isinstance(recorded, list | tuple) else (recorded,):
            kind, place = getattr(recorder, "target_class", recorder), getattr(recorder, "layer_name", None) or ""
            for name, module in part.named_modules():
                if isinstance(kind, type) and isinstance(module, kind) and place in name:
                    found.setdefault(module, name)
    return found


def trace_experts() -> AbstractContextManager:
    """Let mixtures of experts multiply by `EXPERTS_MATMUL` within this context, in the dtype of their weights.

    transformers 5.24, `integrations.moe._can_use_grouped_mm`: it chooses torch's `grouped_mm`, whose kernels take float32, too,
    but not its rule for fake tensors (torch 2.13). Autocast leaves either of them alone.
    """
    return mock.patch.object(moe, "_can_use_grouped_mm", _no_kernel)


def _no_sequences(position_ids: Tensor) -> None:
    """Find no packed sequences; unlike a mock, keep no reference to the argument."""


def _no_kernel(tokens: Tensor, weights: Tensor, offsets: Tensor) -> bool:
    """Find no kernel; unlike a mock, keep no references to the arguments."""
    return False


def shift_right(model: PreTrainedModel, labels: Tensor) -> Tensor:
    """Shift targets as a model does where it is given no decoder_input_ids, int64 [S, T], padded with its pad_token_id.

    transformers 5.24: `prepare_decoder_input_ids_from_labels`, or, of M2M100 and Whisper, which have no such method, the
    function `shift_tokens_right` of the model's module. Neither is documented.
    """
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return model.prepare_decoder_input_ids_from_labels(labels)
    shift = vars(sys.modules[type(model).__module__])["shift_tokens_right"]
    return shift(labels, model.config.pad_token_id, model.config.decoder_start_token_id)
