"""How models of transformers are made and which attention they compute by."""

from contextlib import AbstractContextManager
from unittest import mock

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils


def attention_kernel(config: PreTrainedConfig) -> str:
    """Return the name of the attention that a model of this config computes by.

    transformers 5.23, `_attn_implementation`: it is set by the documented `set_attn_implementation`, but read nowhere else.
    """
    return config._attn_implementation


def choose_attention(config: PreTrainedConfig, model_class: type[PreTrainedModel], kernel: str) -> None:
    """Let models of this config be made with `kernel`, or, where their class has no other, with eager.

    transformers 5.23, `_supports_sdpa` and `_attn_implementation`: a class that does not support it raises when it is made.
    """
    config._attn_implementation = kernel if model_class._supports_sdpa else "eager"


def without_first_weights() -> AbstractContextManager:
    """While it lasts, models are made without first weights: those of fake tensors, some of which are made of numbers read.

    transformers 5.23, `PreTrainedModel.initialize_weights`, which `post_init` calls.
    """
    return mock.patch.object(PreTrainedModel, "initialize_weights")


def one_document() -> AbstractContextManager:
    """While it lasts, causal masks are those of samples of one document.

    transformers 5.23, `masking_utils.find_packed_sequence_indices`: it reads off the position ids whether there are several,
    and where these are fake it takes several for granted.
    """
    return mock.patch.object(masking_utils, "find_packed_sequence_indices", _no_sequences)


def _no_sequences(position_ids: Tensor) -> None:
    """Unlike a mock, it keeps no reference to what it is called with."""
