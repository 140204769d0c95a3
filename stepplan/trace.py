"""Trace what an optimizer step of a model allocates and computes, without computing it: no GPU, no weights, no data.

The step runs on fake tensors (torch's FakeTensorMode): shapes, types and lifetimes are the real ones, there are no numbers.
Every storage is counted from its first tensor to its last reference. torch.distributed._tools.MemTracker counts the same;
it also keeps statistics of every module, which nobody reads here, so the few lines that count are our own.

The tensors are fake *CPU* tensors, because a torch built without CUDA makes no others. `imitate_cuda` adjusts them where CUDA
allocates differently. Never counted: the CUDA context, workspaces of cuBLAS and cuDNN, what a kernel allocates and frees
inside itself, fragmentation, the allocator's rounding to 512 bytes.
"""

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_flop_count
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import find_labels

from samestep._internals import torch_tracing, transformers_models
from samestep._internals.torch_tracing import FakeTensorMode, TorchDispatchMode, imitate_cuda, tree_leaves
from samestep.errors import UsageError, reason
from samestep.models import quantization
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.recipe import Recipe
from samestep.recipe.scaling import Hyperparameters
from samestep.recipe.task_settings import LanguageModelSettings
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning
from samestep.step import optim
from samestep.step.noise import noise_by_sample
from stepplan import base_models
from stepplan.transformer import Peak

OLDEST = {torch: (2, 13), transformers: (5, 23)}
"""Versions from which on what is traced is right: older ones have other operators, which fake tensors do not pass."""
AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Trace:
    """Holds what a step allocates and computes on one process, in bytes and floating-point operations.

    Attributes:
        num_parameters: all parameters, shared ones once.
        flops: of the forward and backward of one micro-batch, a multiply-add as two. Matrix products, convolutions and
            attention count (attention in full, not only its causal half); recomputing does not.
        kernels: number of operators of the same, without views and allocations.
        parameters: bytes.
        gradients: bytes.
        moments: bytes of the optimizer's state, its counters included.
        forward: peak memory during the forward of a micro-batch that is not the first, when gradients exist already, in bytes.
            All is in it: parameters, buffers, gradients, moments, input.
        backward: the same, during its backward.
        optimizer_step: the same, during the optimizer's step.
    """

    num_parameters: int
    flops: int
    kernels: int
    parameters: int
    gradients: int
    moments: int
    forward: int
    backward: int
    optimizer_step: int

    @property
    def peak(self) -> int:
        """Peak memory of the step, in bytes."""
        return max(self.forward, self.backward, self.optimizer_step)


aten = torch.ops.aten
# torch does not count products that are added in place, nor the CPU's attention kernel, which is two products forward and four
# backward. Products that the kernel computes again are not counted.
FLOPS = flop_registry | {
    aten.addmm_: flop_registry[aten.addmm],
    aten.baddbmm_: flop_registry[aten.baddbmm],
    torch_tracing.ATTENTION_ON_CPUS: (lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)),
    torch_tracing.ATTENTION_ON_CPUS_BACKWARD: (
        lambda _, q, k, v, *__, **___: 2 * sdpa_flop_count(q.shape, k.shape, v.shape)
    ),
    transformers_models.EXPERTS_MATMUL: lambda tokens, weights, *_, **__: 2 * tokens.numel() * weights.shape[-1],
}


def _count_convolution_backward(grad, x, weight, _bias, _stride, _padding, _dilation, transposed, *rest, out_val):
    """Count the FLOPs of a convolution's backward: as many as the forward's for each gradient that is asked for.

    torch 2.13 counts the gradient of a weight as if its channels were in one group. Of a convolution of each channel alone,
    as before a scan, that is as many times too much as there are channels.
    """
    _output_padding, groups, wanted = rest
    count = flop_registry[aten.convolution_backward]
    if groups == 1:
        return count(grad, x, weight, _bias, _stride, _padding, _dilation, transposed, *rest, out_val=out_val)
    places = (x if transposed else grad).shape
    return sum(wanted[:2]) * 2 * places[0] * math.prod(places[2:]) * weight.numel()


FLOPS[aten.convolution_backward] = _count_convolution_backward
if transformers_models.EXPERTS_MATMUL_BACKWARD is not None:
    FLOPS[transformers_models.EXPERTS_MATMUL_BACKWARD] = lambda tokens, weights, *_, **__: (
        4 * tokens.numel() * weights.shape[-1]
    )


class Tracer(TorchDispatchMode):
    """Counts the bytes of all storages that operators returned and that something still refers to, and their FLOPs.

    Where two gradients of one tensor meet, autograd adds the second to the first in place, if nothing else refers to it and
    it is no view; but never while tensors are fake. Such a sum is counted as in place if its first addend is gone by the
    next operator.

    Attributes:
        now: bytes at this moment.
        flops, kernels: so far.
    """

    def __init__(self):
        super().__init__()
        self.now = self.flops = self.kernels = self._peak = 0
        self._alive: dict[int, int] = {}  # bytes, by address
        # After a sum that may have been in place: address of its first addend, bytes before the next operator.
        self._sum: tuple[int, int] | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._close_sum()
        returned = func(*args, **kwargs)
        for leaf in tree_leaves(returned):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        if func is aten.add.Tensor and not torch.is_grad_enabled() and not torch_tracing.is_view(args[0]):
            self._sum = torch_tracing.address(args[0].untyped_storage()), self.now
        else:
            self._peak = max(self._peak, self.now)
        self.kernels += func.namespace == "aten" and not func.is_view and torch_tracing.name(func) != "empty"
        if count := FLOPS.get(torch_tracing.packet(func)):
            self.note(torch_tracing.packet(func), count(*args, **kwargs, out_val=returned))
        return returned

    def note(self, packet: Any, flops: int) -> None:
        """Add the FLOPs of an operator."""
        self.flops += flops

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = torch_tracing.address(storage)
        if address not in self._alive:
            self._alive[address] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._remove, address)

    def _remove(self, address: int) -> None:
        self.now -= self._alive.pop(address)

    def _close_sum(self) -> None:
        if self._sum is not None:
            addend, num_bytes = self._sum
            self._peak = max(self._peak, num_bytes if addend in self._alive else self.now)
            self._sum = None

    def peak(self) -> int:
        """Return the most bytes at once since the last call."""
        self._close_sum()
        peak, self._peak = self._peak, self.now
        return peak


def check_versions(oldest_versions: Mapping[Any, tuple[int, int]]) -> None:
    """Refuse torch and transformers that are older than those of a table, which names modules."""
    found = {module: tuple(map(int, module.__version__.split(".")[:2])) for module in oldest_versions}
    if any(found[module] < oldest for module, oldest in oldest_versions.items()):
        needed, here = (
            " and ".join(f"{module.__name__} {major}.{minor}" for module, (major, minor) in versions.items())
            for versions in (oldest_versions, found)
        )
        raise UsageError(
            f"tracing needs {needed} or newer, here are {here}: upgrade, or plan by formula, without --trace"
        )


def trace_step(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module, int], Tensor],
    num_samples: int,
    *,
    mixed_precision: str,
    gradient_checkpointing: bool,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> Trace:
    """Trace a micro-batch and the optimizer's step after it, as they are once gradients and moments exist.

    Memory is allocated as on a CPU, within `imitate_cuda` as on a GPU. The callables run under FakeTensorMode: tensors that
    they make are fake, and no number may be read from one.

    Args:
        build: makes the model, which is trained in the dtypes that it has.
        loss: computes the model's loss on so many samples, which it makes; runs under autocast. What it keeps alive counts.
        num_samples: in one forward.
        mixed_precision: no, bf16 or fp16.
        gradient_checkpointing: recompute activations, for transformers' models.
        make_optimizer: makes the optimizer of a model.

    Raises:
        UsageError: the model cannot recompute its activations, or torch or transformers is too old.
    """
    check_versions(OLDEST)

    def forward() -> Tensor:
        dtype = AUTOCAST[mixed_precision]
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            return loss(model, num_samples)

    with FakeTensorMode(), Tracer() as tracer:
        model = build().train()
        optimizer = make_optimizer(model)
        tracer.flops = tracer.kernels = 0
        forward().backward()
        flops, kernels = tracer.flops, tracer.kernels
        optimizer.step()
        if gradient_checkpointing:
            _checkpoint(model)
        tracer.peak()
        total = forward()
        forward_peak = tracer.peak()
        total.backward()
        del total
        backward_peak = tracer.peak()
        optimizer.step()
        step_peak = tracer.peak()
        parameters = list(model.parameters())
        state = [value for values in optimizer.state.values() for value in values.values()]
        return Trace(
            num_parameters=sum(parameter.numel() for parameter in parameters),
            flops=flops,
            kernels=kernels,
            parameters=_bytes(parameters),
            gradients=_bytes([parameter.grad for parameter in parameters if parameter.grad is not None]),
            moments=_bytes([value for value in state if isinstance(value, Tensor)]),
            forward=forward_peak,
            backward=backward_peak,
            optimizer_step=step_peak,
        )


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _checkpoint(model: nn.Module) -> None:
    if isinstance(model, SummedLosses):
        model.recompute_activations()
    elif isinstance(model, PreTrainedModel) and model.supports_gradient_checkpointing:
        transformers_models.recompute_activations(model)
    else:
        raise UsageError(
            f"gradient_checkpointing is true, but {type(model).__name__} cannot recompute its activations: set it to false"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Recipes


def trace_recipe(
    recipe: Recipe,
    num_samples: int,
    *,
    mixed_precision: str,
    gradient_checkpointing: bool = False,
    attn_implementation: str = "sdpa",
) -> Trace:
    """Trace a recipe's step as its script takes it, on a GPU: its model, loss and optimizer, every sample at full length.

    With document_mask each layer of GPT-2 keeps a mask of [T, T] for each sample.

    Args:
        recipe: of any task of the catalog.
        num_samples: b, in one forward.
        mixed_precision: no, bf16 or fp16.
        gradient_checkpointing: recompute the activations of each layer in the backward.
        attn_implementation: sdpa or eager.

    Raises:
        UsageError: gradient_checkpointing of a model that cannot recompute its activations.

    >>> from samestep.recipe.catalog import load
    >>> trace = trace_recipe(load("gpt2_124m"), 4, mixed_precision="bf16")
    >>> print(f"{trace.num_parameters:,} parameters, {trace.peak / 1e9:.1f} GB")
    124,439,808 parameters, 4.5 GB
    """
    model_class = recipe.parts.find("model")
    build, recipe = make_builder(recipe, mixed_precision=mixed_precision, attn_implementation=attn_implementation)
    with imitate_cuda(), torch_tracing.silence_log(), transformers_models.trace_experts():
        return trace_step(
            build,
            lambda model, num_samples: model(**model_class.example(recipe, num_samples))[0].sum(),
            num_samples,
            mixed_precision=mixed_precision,
            gradient_checkpointing=gradient_checkpointing,
            make_optimizer=lambda model: optim.from_recipe(model, recipe),
        )


def make_builder(
    recipe: Recipe, *, mixed_precision: str, attn_implementation: str
) -> tuple[Callable[[], SummedLosses], Recipe]:
    """Return what makes a recipe's model without weights, with a GPU's kernels, and the recipe as it is without them.

    Args:
        recipe, mixed_precision, attn_implementation: as of `trace_recipe`.
    """
    model_class, settings_class = recipe.parts.find("model"), recipe.parts.find("settings")
    matrix_bytes = 4
    options: dict[str, Any] = {}
    if isinstance(recipe, CausalLmFineTuning) and recipe.model_name_or_path is not None:
        matrix_bytes = _find_matrix_bytes(recipe)
        options["shape"] = shape = find_shape(base_models.find_weights(recipe))
        values = {"vocab_size": shape["vocab_size"], "architecture": shape["model_type"], "model_name_or_path": None}
        recipe = dataclasses.replace(recipe, **values)
    elif isinstance(recipe, Seq2SeqFineTuning) and recipe.model_name_or_path is not None:
        config = base_models.find_config(base_models.find_weights(recipe))
        options["shape"] = config | {"decoder_start_token_id": config.get("decoder_start_token_id", 0)}
    elif hasattr(recipe, "model_name_or_path"):
        no_weights: dict[str, Any] = {"model_name_or_path": None}
        recipe = dataclasses.replace(recipe, **no_weights)

    def build() -> SummedLosses:
        with transformers_models.skip_weight_initialization():
            model: SummedLosses = model_class.from_recipe(recipe, None, **options)
        if matrix_bytes == 2:  # as the files of the base that is not there
            quantization.hold_base(model.model, torch.bfloat16)
        noise_by_sample(model, recipe.seed)
        if issubclass(settings_class, LanguageModelSettings):
            settings = settings_class(recipe=recipe.name, attn_implementation=attn_implementation)
            (use_kernels,) = model.kernel_candidates(torch.device("cuda"), mixed_precision, settings).values()
            use_kernels()
        return model

    return build, recipe


def _find_matrix_bytes(recipe: CausalLmFineTuning) -> int:
    """Find the bytes of a frozen number of a recipe's base: of its files, but with DoRA 4."""
    if recipe.lora_rank is None or recipe.use_dora:
        return 4
    config = base_models.find_config(base_models.find_weights(recipe))
    parts = [config.get("text_config") or {}, config]
    dtypes = [part[name] for part in parts for name in ("dtype", "torch_dtype") if part.get(name) is not None]
    return 2 if dtypes and dtypes[0] in ("bfloat16", "float16") else 4


NO_SHAPE = (
    *("dtype", "torch_dtype", "text_config", "quantization_config", "auto_map"),
    *("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation"),
)
"""Fields of a configuration that say nothing of a shape: types, and kernels and code, which would be loaded."""


def find_shape(name_or_path: str) -> dict[str, Any]:
    """Find the fields of a decoder's configuration, as the planner does: weights stay on the hub."""
    config = base_models.find_config(name_or_path)
    fields = {**config, **(config.get("text_config") or {}), "model_type": base_models.find_kind(config)}
    return {name: value for name, value in fields.items() if name not in NO_SHAPE}


# ---------------------------------------------------------------------------------------------------------------------
# Any model of transformers

# Where a config's `architectures` names no class, the first of these that takes the config does.
MAPPINGS = (
    "MODEL_FOR_MASKED_LM_MAPPING",
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
)
INPUTS: dict[str, Callable[[PreTrainedConfig, int, int], Tensor]] = {
    "input_ids": lambda config, b, length: torch.zeros(b, length, dtype=torch.int64),
    "pixel_values": lambda config, b, length: torch.zeros(b, getattr(config, "num_channels", 3), length, length),
    # Spectrograms of full length, which an encoder halves once
    "input_features": lambda config, b, length: torch.zeros(b, config.num_mel_bins, 2 * config.max_source_positions),
}
"""Main input of a model -> makes it, for b samples of a length."""
SAMPLE_LABEL_CLASSES = ("SequenceClassification", "ImageClassification", "NextSentencePrediction")  # a label per sample
USUAL_HYPERPARAMETERS = Hyperparameters(1e-3, 0.9, 0.999, 1e-8)


def trace_config(
    name_or_path: str,
    num_samples: int,
    length: int,
    *,
    mixed_precision: str,
    gradient_checkpointing: bool = False,
    attn_implementation: str = "sdpa",
    optimizer: str = "adamw",
) -> Trace:
    """Trace a step of any transformers model on a GPU, from its config alone: the model's own loss, a fused optimizer.

    Weights are never loaded and no code of a repository is run. Parameters are float32. Samples have no padding, and hold
    one document. The model's output is not kept beyond its loss: a loop that keeps it holds the logits, too.

    Args:
        name_or_path: a folder with a config.json, such a file, or a name on the hub. Its `architectures` names the class;
            if it does not, the class is the first of those for masked tokens, next tokens, images and sequences that exists.
        num_samples: in one forward.
        length: tokens of a sample, also of the text that goes with a sound; of an image, pixels per side.
        mixed_precision: no, bf16 or fp16.
        gradient_checkpointing: recompute the activations of each layer in the backward.
        attn_implementation: sdpa, where the model has it, or eager.
        optimizer: adamw, or sgd with momentum.

    Raises:
        UsageError: the config cannot be read, its model is unknown, length is beyond its positions, or its forward needs
            more than one of INPUTS and labels, or reads numbers.
    """
    config = _config(name_or_path)
    model_class = _model_class(name_or_path, config)
    transformers_models.choose_attention(config, model_class, attn_implementation)
    name, main_input = model_class.__name__, model_class.main_input_name
    labels = find_labels(model_class)
    text_config = config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", getattr(text_config, "max_target_positions", None))
    if main_input not in INPUTS:
        raise UsageError(f"{name} of {name_or_path} needs {main_input}: only {', '.join(INPUTS)} can be made up")
    if not labels:
        raise UsageError(f"{name} of {name_or_path} takes no labels, so it has no loss: name another in architectures")
    if main_input != "pixel_values" and positions is not None and length > positions:
        raise UsageError(f"length {length} exceeds max_position_embeddings {positions} of {name_or_path}: lower it")

    def build() -> PreTrainedModel:
        try:
            with transformers_models.skip_weight_initialization():
                return model_class(config)
        except Exception as error:  # of any kind: the config is somebody's
            raise UsageError(f"{name} of {name_or_path} cannot be made of its config: {reason(error)}") from None

    def loss(model: nn.Module, num_samples: int) -> Tensor:
        inputs = dict.fromkeys([main_input, *labels])
        try:
            inputs[main_input] = INPUTS[main_input](config, num_samples, length)
            for label in labels:
                is_per_sample = label != "labels" or any(kind in name for kind in SAMPLE_LABEL_CLASSES)
                inputs[label] = torch.zeros(num_samples if is_per_sample else (num_samples, length), dtype=torch.int64)
            return model(**inputs).loss
        except Exception as error:  # of any kind: the code is not ours
            raise UsageError(
                f"{name} of {name_or_path} cannot be traced on {', '.join(inputs)}: {reason(error)}"
            ) from None

    with (
        imitate_cuda(),
        torch_tracing.silence_log(),
        transformers_models.assume_single_document(),
        transformers_models.trace_experts(),
    ):
        return trace_step(
            build,
            loss,
            num_samples,
            mixed_precision=mixed_precision,
            gradient_checkpointing=gradient_checkpointing,
            make_optimizer=lambda model: (
                optim.sgd(model, 0.1, 0.9, 0.0)
                if optimizer == "sgd"
                else optim.adamw(model, USUAL_HYPERPARAMETERS, 0.0)
            ),
        )


def _config(name_or_path: str) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
    except OSError as error:
        raise UsageError(
            f"{name_or_path} is no folder or file with a model's config, nor on the hub: {reason(error)}"
        ) from None
    except Exception as error:  # whatever the config holds
        raise UsageError(f"the config of {name_or_path} is not one of transformers: {reason(error)}") from None
    config.get_text_config().use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # which token begins a text makes no difference here
    return config


def _model_class(name_or_path: str, config: PreTrainedConfig) -> type[PreTrainedModel]:
    architectures = [getattr(transformers, str(name), None) for name in config.architectures or []]
    mappings = [getattr(transformers, mapping) for mapping in MAPPINGS]
    classes = [cls for cls in architectures if isinstance(cls, type) and issubclass(cls, PreTrainedModel)]
    classes = [cls for cls in classes if find_labels(cls)]
    classes += [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    if not classes:
        raise UsageError(f"{config.model_type} of {name_or_path} has no class with a loss for text or images")
    return classes[0]


class Line(NamedTuple):
    """Holds the bytes beyond the states as a line in the micro-batch size b: fixed + b per_sample."""

    fixed: int
    per_sample: int


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """Describes a transformers model for the planner, from traces of few and of many samples. Neither recomputed nor sharded.

    Attributes:
        num_parameters: N.
        flops_per_sample: forward and backward.
        length: tokens of a sample; 1 for an image.
        unit: token or image.
        kernels: eager or channels_last: selects the traffic in timing.CALIBRATION.
        kernels_per_layer: operators of a whole micro-batch; there is one layer.
        forward, backward: peak memory in float32 and under autocast, as lines of which the largest counts: a peak is the
            largest of several moments, each of which is a line.
    """

    num_parameters: int
    flops_per_sample: int
    length: int
    unit: str
    kernels: str
    kernels_per_layer: int
    forward: tuple[tuple[Line, ...], tuple[Line, ...]]
    backward: tuple[tuple[Line, ...], tuple[Line, ...]]

    has_equal_layers = False
    num_layers = 1
    num_logits = 0  # they are among the bytes of the forward

    def saved_bytes(self, *, autocast: bool) -> int:
        """Return the bytes that the forward of a sample leaves for its backward, logits included."""
        return self.forward[autocast][-1].per_sample

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Return the forward and the backward as peaks, whose memory all counts as activations.

        Raises:
            ValueError: gradient_checkpointing.
        """
        if gradient_checkpointing:
            raise ValueError("a traced model is not recomputed")
        lines = self.forward[autocast], self.backward[autocast]
        return tuple(Peak(0, max(fixed + num_samples * slope for fixed, slope in part), 0) for part in lines)


TRACED_SIZES = ((1, 2), (32, 64))  # pairs of micro-batch sizes; a line goes through each pair


def traced_model(name_or_path: str, length: int, attn_implementation: str = "sdpa") -> TracedModel:
    """Trace the model of a config for the planner.

    Args:
        name_or_path, length, attn_implementation: as in `trace_config`.

    Raises:
        UsageError: as `trace_config`.
    """

    def measure_activations(mixed_precision: str, b: int) -> tuple[int, int]:
        trace = trace_config(
            name_or_path, b, length, mixed_precision=mixed_precision, attn_implementation=attn_implementation
        )
        states = trace.parameters + trace.gradients + trace.moments
        return trace.forward - states, trace.backward - states

    def fit_line(small: int, large: int, pair: tuple[int, int]) -> Line:
        slope = (large - small) // (pair[1] - pair[0])
        return Line(small - pair[0] * slope, slope)

    lines = []
    for mixed_precision in ("no", "bf16"):
        peaks = [[measure_activations(mixed_precision, b) for b in sizes] for sizes in TRACED_SIZES]
        lines.append(
            [
                tuple(fit_line(a[index], b[index], sizes) for (a, b), sizes in zip(peaks, TRACED_SIZES, strict=True))
                for index in (0, 1)  # forward and backward
            ]
        )
    trace = trace_config(name_or_path, 1, length, mixed_precision="no", attn_implementation=attn_implementation)
    is_text = _model_class(name_or_path, _config(name_or_path)).main_input_name != "pixel_values"
    return TracedModel(
        num_parameters=trace.num_parameters,
        flops_per_sample=trace.flops,
        length=length if is_text else 1,
        unit="token" if is_text else "image",
        kernels="eager" if is_text else "channels_last",
        kernels_per_layer=trace.kernels,
        forward=(lines[0][0], lines[1][0]),
        backward=(lines[0][1], lines[1][1]),
    )
