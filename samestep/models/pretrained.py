"""Make transformers' models with initial weights, choose their attention kernels, and let them continue texts."""

import contextlib
import contextvars
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.masking_utils import eager_mask
from transformers.utils import cached_file

from samestep._internals.transformers_models import attention_kernel
from samestep.errors import UsageError, reason
from samestep.models import cpu_matmul, stop_tokens
from samestep.recipe import hub
from samestep.recipe.pretrained_shape import find_base, read_local_config
from samestep.recipe.reading import read_json


def find_config(name_or_path: str) -> dict[str, Any] | None:
    """Read the config.json of a model, of a folder or on the hub; None: it cannot be had, and loading the weights says why."""
    name_or_path = find_base(name_or_path) or name_or_path
    config = read_local_config(name_or_path)
    if config is not None or Path(name_or_path).exists():
        return config
    hub.announce(name_or_path)
    try:
        return read_json(Path(cached_file(name_or_path, "config.json")), f"config.json of {name_or_path}")
    except Exception:  # of any kind: network, names, files of others
        return None


_LEAVES_OUT = contextvars.ContextVar("leaves_out", default=False)


@contextlib.contextmanager
def leave_out_weights() -> Iterator[None]:
    """Let `initial_model` make models whose weights are on no device (`meta`), within this context; buffers have numbers."""
    token = _LEAVES_OUT.set(True)
    try:
        yield
    finally:
        _LEAVES_OUT.reset(token)


def _make_empty(model_class: Any, config: PreTrainedConfig, name_or_path: str) -> PreTrainedModel:
    """Make what `from_pretrained` makes, without weights."""
    with init_empty_weights(include_buffers=False):
        model: PreTrainedModel = model_class.from_config(config, dtype=torch.float32)
    model.tie_weights()
    with contextlib.suppress(OSError, ValueError):  # it need not have one
        model.generation_config = GenerationConfig.from_pretrained(name_or_path)
    return model.eval()


def initial_model(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    name_or_path: str | None,
    head: str | tuple[str, ...] | None = None,
) -> PreTrainedModel:
    """Make a model of `config` with random weights (of torch's seed), or with the weights of `name_or_path`, in float32.

    Args:
        model_class: of transformers.
        config: decides the shapes.
        name_or_path: on the hub, or a folder; no code in it is run. None: random weights.
        head: prefixes of the names of weights that may differ from the file's: they stay random where the file lacks them or
            has other shapes, and the file may have more of them. All other weights must match. None: only shapes must match.

    Raises:
        UsageError: the weights cannot be loaded, or have another shape.
    """
    if name_or_path is None:
        return model_class(config)
    if _LEAVES_OUT.get():
        return _make_empty(model_class, config, name_or_path)
    try:
        model, loading_info = model_class.from_pretrained(
            name_or_path,
            config=config,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=head is not None,
            weights_only=True,  # of pytorch_model.bin, a pickle: it could run code
            trust_remote_code=False,
        )
    except pickle.UnpicklingError:
        raise UsageError(
            f"model_name_or_path {name_or_path} cannot be loaded: its pytorch_model.bin holds more than tensors, which could "
            "be code. Give a model with model.safetensors"
        ) from None
    except Exception as error:  # of any kind: the files were written by others
        raise UsageError(
            f"model_name_or_path {name_or_path} cannot be loaded: {reason(error)}. It must hold a whole model.safetensors, or "
            "pytorch_model.bin"
        ) from None
    if head is not None:
        mismatched = [key if isinstance(key, str) else key[0] for key in loading_info["mismatched_keys"]]
        differences = {
            "lacks": loading_info["missing_keys"],
            "has": loading_info["unexpected_keys"],
            "has another shape of": mismatched,
        }
        texts = []
        for verb, keys in differences.items():
            if names := [name for name in sorted(keys) if not name.startswith(head)]:
                texts.append(f"it {verb} {names[0]} and {len(names) - 1} more")
        if texts:
            raise UsageError(
                f"model_name_or_path {name_or_path} is another model than the recipe's: {'; '.join(texts)}. Give a checkpoint "
                "of the recipe's shape, with its normalization"
            )
    return model


def save_pretrained(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model of transformers, or the adapters of peft's, and its tokenizer, with the tokens that end its texts."""
    card = folder / "README.md"
    has_card = card.exists()
    model.save_pretrained(folder)
    if hasattr(model, "get_base_model"):
        save_generation_config(model.get_base_model(), folder)
        if not has_card:  # peft writes one that knows the base's path on this machine, and no more
            card.unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def save_generation_config(model: Any, folder: Path) -> None:
    """Save a model's generation_config, if it generates."""
    if isinstance(model, PreTrainedModel) and model.can_generate():
        model.generation_config.save_pretrained(folder)


def causal_attention(device: torch.device, mixed_precision: str, length: int) -> str:
    """Return sdpa, but eager where sdpa's backward is slow: short sequences in bf16 on a CPU.

    Forward and backward of 4 layers x 128 on 2 cores (torch 2.13, AVX512-BF16), time of eager / time of sdpa: in bf16 0.76,
    0.74, 0.83 and 2.4 at lengths 64, 128, 256 and 1,024; in fp32 1.09, 1.12, 1.16 and 2.8.
    """
    is_slow = device.type == "cpu" and mixed_precision == "bf16" and length <= 256
    return "eager" if is_slow else "sdpa"


def causal_kernel_candidates(
    model: PreTrainedModel, device: torch.device, mixed_precision: str, length: int, kernel: str | None = None
) -> dict[str, Callable[[], object]]:
    """List the kernels of attention and of matmuls for a causal model, as `SummedLosses.kernel_candidates`.

    The kernel of `causal_attention` for samples of `length` tokens comes first; `kernel` is the only one, if that is decided.
    """
    first = causal_attention(device, mixed_precision, length)
    names = sorted(["sdpa", "eager"] if device.type == "cpu" else [first], key=first.__ne__)
    if device.type == "cpu" and getattr(model.config, "attn_pdrop", 0.0):
        names = ["eager"]  # sdpa draws its own noise, not by sample
    names = [kernel] if kernel else names
    candidates = {
        name: partial(model.set_attn_implementation, BY_SAMPLE if name == "eager" else name) for name in names
    }
    return cpu_matmul.add_onednn(candidates, model, device, mixed_precision)


def find_noisy_kernel(model: nn.Module) -> str | None:
    """Return the name of the attention kernel that draws dropout of its own, not by sample; None: there is none.

    Args:
        model: has models of transformers as children.
    """
    for child in model.children():
        config = getattr(child, "config", None)
        if any(getattr(config, name, 0) for name in ("attention_probs_dropout_prob", "attn_pdrop")):
            kernel = attention_kernel(config).removeprefix("unpadded_")
            if "eager" not in kernel:
                return kernel
    return None


def _eager_by_sample(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    *,
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' eager kernel does, [S, heads, T, d] -> [S, T, heads, d], but with the module's own
    dropout, whose noise may be drawn by sample."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    return (module.attn_dropout(scores.softmax(-1).to(value.dtype)) @ value).transpose(1, 2), None


BY_SAMPLE = "eager_by_sample"
AttentionInterface.register(BY_SAMPLE, _eager_by_sample)
AttentionMaskInterface.register(BY_SAMPLE, eager_mask)  # kernels without one get no mask from transformers' own forward


def gpt2_hidden(gpt2: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """Compute GPT-2's last hidden states, [S, T, width].

    They are the same as its own forward's. That one looks for documents in the positions on the host, and so waits for the
    device in every micro-batch.

    Args:
        gpt2: transformers' GPT2Model.
        input_ids: int64 [S, T].
        position_ids: int64 [S, T], from 0 at the start of every document, where attention does not pass; None: 0, 1, ...
    """
    length, kernel = input_ids.shape[1], attention_kernel(gpt2.config)
    places = torch.arange(length, device=input_ids.device)
    hidden = gpt2.drop(gpt2.wte(input_ids) + gpt2.wpe(places[None] if position_ids is None else position_ids))
    mask = None  # sdpa is causal by itself
    if position_ids is not None or kernel.startswith("eager"):
        mask = (places <= places[:, None])[None, None]  # [1, 1, T, T], or [S, 1, T, T] with documents
        if position_ids is not None:
            document = (position_ids == 0).cumsum(1)[:, None]
            mask = mask & (document[..., None] == document[:, :, None])
        if kernel.startswith("eager"):
            mask = hidden.new_zeros(mask.shape).masked_fill_(~mask, torch.finfo(hidden.dtype).min)
    for block in gpt2.h:
        hidden = block(hidden, attention_mask=mask, use_cache=False)
    return gpt2.ln_f(hidden)


@torch.no_grad()
def continue_text(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, num_tokens: int, seed: int
) -> str:
    """Return `prompt` and its continuation by `model`, sampled at temperature 0.8 until the text ends or has num_tokens more.

    A text longer than the model's positions is continued from its last tokens, half as many as there are positions.

    Args:
        model: a causal language model with `config.max_position_embeddings`; left in evaluation mode.
        tokenizer: its eos_token begins and ends texts.
        prompt: may be empty.
        num_tokens: the largest number of tokens to sample.
        seed: of the sampling.
    """
    set_seed(seed)
    size = model.config.max_position_embeddings
    tokens = [tokenizer.eos_token_id, *tokenizer(prompt, add_special_tokens=False)["input_ids"]]
    num_tokens += len(tokens)
    model.eval()
    while len(tokens) < num_tokens:
        window = torch.tensor([tokens if len(tokens) < size else tokens[-(size // 2) :]], device=model.device)
        generated = model.generate(
            window,
            attention_mask=torch.ones_like(window),
            max_new_tokens=min(num_tokens - len(tokens), size - window.shape[1]),
            do_sample=True,
            temperature=0.8,
            pad_token_id=tokenizer.eos_token_id,
        )
        tokens += generated[0, window.shape[1] :].tolist()
        if tokens[-1] in {tokenizer.eos_token_id, *stop_tokens.list_ends(model.generation_config)}:
            break
    return tokenizer.decode(tokens, skip_special_tokens=True)
