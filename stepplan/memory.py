"""The size of a recipe's model, and the memory that one process is planned to need.

Everything is arithmetic on the recipe's `architecture`: no model is built, torch is not imported. GB are 1e9 bytes, N is the
number of parameters.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from samestep.cut.layout import Layout
from samestep.errors import UsageError
from samestep.recipe.catalog import TASKS
from samestep.recipe.recipe import Recipe
from samestep.recipe.tasks.bert_pretraining import BertPretraining
from samestep.recipe.tasks.captcha_recognition import CaptchaRecognition
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.recipe.tasks.causal_lm_pretraining import CausalLmPretraining
from samestep.recipe.tasks.gpt2_pretraining import Gpt2Pretraining
from samestep.recipe.tasks.image_classification import ImageClassification
from samestep.recipe.tasks.modernbert_pretraining import ModernBertPretraining
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning
from samestep.recipe.tasks.text_classification import TextClassification
from stepplan import base_models, convnet, readers, transformer
from stepplan.configs import is_seq2seq
from stepplan.convnet import ConvNet
from stepplan.decoder import Decoder, Tuning
from stepplan.stacks import EncoderDecoder
from stepplan.transformer import Transformer

Model = Transformer | Decoder | ConvNet | EncoderDecoder
MOMENTS = {"adamw": 8, "sgd": 4, "adamw_8bit": 2}
"""Bytes per trained parameter that an optimizer remembers: Adam's two moments and SGD's momentum in float32; Adam's in 8 bits,
to which their scales add 0.03, not counted."""


def count_trained(model: Any) -> int:
    """Count the parameters that have gradients and moments: all, but of adapters on frozen weights only the adapters."""
    return int(getattr(model, "num_trained", model.num_parameters))


def count_weight_bytes(model: Any) -> int:
    """Count the bytes of all weights as they are kept: float32, but where a model's `method` says another."""
    return int(getattr(model, "weight_bytes", 4 * model.num_parameters))


def model_from_recipe(recipe: Recipe, images: Sequence[tuple[int, int]] | None = None) -> Model:
    """Return the shape of the model that a recipe trains.

    Args:
        recipe: of any task.
        images: height and width of each image of a sample, of a recipe with images; None: as the recipe has it, or usual ones.

    Raises:
        UsageError: a task without a formula; images of a recipe without them.

    >>> from samestep.recipe.catalog import load
    >>> [model_from_recipe(load(name)).num_parameters for name in ("gpt2_xl_8xa100", "bert_large_phase1", "resnet50_1xv100")]
    [1557611200, 336226108, 25557032]
    >>> [round(model_from_recipe(load(name)).flops_per_sample / 1024 / 1e9, 3) for name in ("gpt2_124m", "gpt2_xl_8xa100")]
    [0.855, 10.28]
    """
    if recipe.parts.shape is None:
        tasks = ", ".join(task for task, recipe_class in TASKS.items() if recipe_class.parts.shape is not None)
        raise UsageError(f"task {recipe.task} has no formula for its size, compute and memory: known are {tasks}")
    if images is not None and not getattr(recipe, "images", False):
        raise UsageError(f"image_sizes is given, but {recipe.name} has no images in conversations: leave it out")
    model: Model = recipe.parts.find("shape")(recipe, **({} if images is None else {"images": images}))
    return model


def bert_pretraining(recipe: BertPretraining) -> Transformer:
    """Return the shape of BERT with both heads."""
    num_predicted = max(
        1, round((recipe.max_seq_length - 3) * recipe.mlm_probability)
    )  # [CLS], two [SEP]: never masked
    return transformer.bert(recipe.architecture, recipe.max_seq_length, num_predicted, is_unpadded=True)


def modernbert_pretraining(recipe: ModernBertPretraining) -> Transformer:
    """Return the shape of ModernBERT with its head."""
    num_predicted = max(1, round((recipe.max_seq_length - 2) * recipe.mlm_probability))  # [CLS], [SEP]: never masked
    return transformer.modernbert(recipe.architecture, recipe.max_seq_length, num_predicted)


def gpt2_pretraining(recipe: Gpt2Pretraining) -> Transformer:
    """Return the shape of GPT-2."""
    return transformer.gpt2(recipe.architecture, recipe.block_size)


def causal_lm_pretraining(recipe: CausalLmPretraining) -> Decoder:
    """Return the decoder that is pretrained."""
    config = recipe.shape | {"model_type": recipe.architecture, "vocab_size": recipe.vocab_size}
    config["head_dim"] = recipe.hidden_size // recipe.num_attention_heads
    shape = base_models.shape_from_config(config, f"architecture {recipe.architecture}")
    return Decoder(shape=shape, sequence_length=recipe.block_size)


def text_classification(recipe: TextClassification) -> Transformer:
    """Return the shape of BERT with a classifier, of two classes where the data decide their number."""
    shape = recipe.architecture | {"num_labels": recipe.num_labels or 2}
    return transformer.bert(shape, recipe.max_seq_length, None, is_unpadded=True)


def causal_lm_finetuning(recipe: CausalLmFineTuning, images: Sequence[tuple[int, int]] | None = None) -> Decoder:
    """Return the decoder that is fine-tuned, with its tower where it reads images of these sizes; see `model_from_recipe`.

    A sample of preferences is a pair of sequences of full length.
    """
    if recipe.images:
        return readers.image_text_finetuning(recipe, images)
    is_pair = recipe.objective != "sft"
    shape = base_models.shape_from_recipe(recipe)
    method = Tuning(
        rank=recipe.lora_rank,
        targets=tuple(recipe.lora_targets),
        uses_dora=recipe.use_dora,
        trains_outside=bool({"embed_tokens", "lm_head"} & set(recipe.modules_to_save or ())),
        matrix_bytes=4 if recipe.lora_rank is None or recipe.use_dora else shape.stored_bytes,
        is_quantized=recipe.base_quantization is not None,
    )
    return Decoder(
        shape=shape,
        sequence_length=recipe.max_seq_length,
        sequences=2 if is_pair else 1,
        method=method,
        num_scored=int(recipe.objective == "reward"),
        recomputes_head=is_pair and recipe.objective != "reward",
    )


def has_formula(recipe: Recipe) -> bool:
    """Tell whether `model_from_recipe` knows the recipe's model without asking the network."""
    if not recipe.is_planned:
        return False
    if isinstance(recipe, Seq2SeqFineTuning):
        path = recipe.model_name_or_path
        found = (
            {"model_type": recipe.architecture}
            if path is None
            else base_models.find_local_config(base_models.find_weights(recipe))
        )
        return found is not None and is_seq2seq(found)
    if not isinstance(recipe, CausalLmFineTuning | CausalLmPretraining):
        return True
    path = getattr(recipe, "model_name_or_path", None)
    config: dict[str, Any] = {"model_type": recipe.architecture}
    if path is not None:
        config = base_models.find_local_config(base_models.find_weights(recipe)) or {}
    return base_models.find_kind(config) in base_models.MODEL_TYPES


def image_classification(recipe: ImageClassification) -> ConvNet:
    """Return the shape of a ResNet."""
    group_norm = recipe.normalization == "group"
    return convnet.resnet(recipe.architecture, recipe.image_height, recipe.image_width, group_norm=group_norm)


def captcha_recognition(recipe: CaptchaRecognition) -> ConvNet:
    """Return the shape of a reader of captchas."""
    return convnet.captcha_reader(
        *(recipe.image_height, recipe.image_width, recipe.num_channels, recipe.conv_channels, recipe.hidden_size),
        recipe.num_characters * len(recipe.alphabet),
        group_norm=recipe.normalization == "group",
    )


@dataclasses.dataclass(frozen=True)
class Memory:
    """Planned memory of one process at the peak of a step, in bytes.

    It is a plan, not a promise. It leaves out the CUDA context and NCCL (about 1 GB), fragmentation, the input, and buffers in
    which collectives wait.

    Attributes:
        parameters: 4 N (float32), or as frozen weights are kept.
        gradients: 4 N, N those that are trained, between micro-batches; 0 where they accumulate in the optimizer. Under DDP
            with k > 1 its buckets come on top, 4 N that are not counted.
        moments: 8 N for Adam's two, 4 N for SGD's momentum; the fused optimizers need nothing more at the step.
        autocast_cache: 16-bit copies of the weights during a forward and its backward; 0 in float32.
        gathered: in sharded runs only: parameters gathered from the other processes, and gradients on their way to them.
        activations: activations that one micro-batch saves for its backward, and a layer's temporaries.
        head: logits and the results computed from them, the gradients of the vocabulary matrix and of the hidden states.
        forward, backward, optimizer_step: the sums at the peak of each; the largest is the sum of the items.
    """

    parameters: int
    gradients: int
    moments: int
    autocast_cache: int
    gathered: int
    activations: int
    head: int
    forward: int = dataclasses.field(compare=False, default=0)
    backward: int = dataclasses.field(compare=False, default=0)
    optimizer_step: int = dataclasses.field(compare=False, default=0)

    @property
    def items(self) -> dict[str, int]:
        """The items of the total, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.compare}

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(self.items.values())


def gathered_bytes(mixed_precision: str, fsdp_gather: str) -> int:
    """Return the bytes in which FSDP2 gathers a parameter: 2 under mixed precision bf16 with fsdp_gather bf16, else 4."""
    return 2 if mixed_precision == fsdp_gather == "bf16" else 4


def planned_memory(
    model: Model,
    layout: Layout,
    *,
    mixed_precision: str,
    gradient_checkpointing: bool = False,
    sharded: bool = False,
    fsdp_gather: str = "bf16",
    num_shards: int | None = None,
    offloaded: bool = False,
    moment_bytes: float = MOMENTS["adamw"],
    gradient_bytes: float = 4,
) -> Memory:
    """Plan the memory that one process needs for a model's step, cut by a layout.

    States     4 N parameters + 4 N gradients + 8 N moments (Adam), in float32; of adapters on frozen weights, gradients and
               moments of the adapters only, and weights in 4 bits where they are quantised (`Decoder.weight_bytes`).
    Sharded    (FSDP2) the states divided by the processes; gathered, two layers and all parameters outside the layers, and a
               layer's gradient while it is reduced (`Transformer.sharded_peaks`). In bf16 there is no autocast cache.
    Peak       the largest of the model's `peaks` comes on top: benchmarks/results/memory.md has them beside the peaks that
               torch traces.

    Args:
        model: shape of the model, for example from `model_from_recipe`.
        layout: N and b; a micro-batch never exceeds a process's share.
        mixed_precision: no, bf16 or fp16.
        gradient_checkpointing: recompute the activations of each layer in the backward.
        sharded: FSDP2 instead of DDP.
        fsdp_gather: type in which FSDP2 gathers weights under mixed precision bf16: bf16 or fp32.
        num_shards: processes that divide the weights, where groups of them hold them all (HSDP); None: all processes divide.
        offloaded: whether the divided weights, their gradients and moments are in host memory (FSDP2's CPU offload).
        moment_bytes: bytes per parameter that the optimizer remembers.
        gradient_bytes: bytes per parameter of gradients between micro-batches; 0 where they accumulate in the optimizer.

    Returns:
        The planned memory of one process, in bytes.

    Raises:
        UsageError: gradient_checkpointing or sharding of a model without equal layers; num_shards that do not divide the
            processes, or offloading of weights that are not divided.

    >>> from samestep.cut.layout import solve_layout
    >>> from samestep.recipe.catalog import load
    >>> layout = solve_layout(num_processes=8, global_batch_size=512, per_device_train_batch_size=4)
    >>> memory = planned_memory(model_from_recipe(load("gpt2_xl_8xa100")), layout, mixed_precision="bf16")
    >>> {name: round(num_bytes / 1e9, 1) for name, num_bytes in memory.items.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'parameters': 6.2, 'gradients': 6.2, 'moments': 12.5, 'autocast_cache': 3.1, 'gathered': 0.0, 'activations': 11.4,
     'head': 1.0}
    """
    for name, is_set in {"gradient_checkpointing": gradient_checkpointing, "sharded": sharded}.items():
        if is_set and not model.has_equal_layers:
            raise UsageError(
                f"{name} works layer by layer; it is planned for transformers with a formula only: leave it out"
            )
    if num_shards is not None and (not sharded or layout.num_processes % num_shards):
        raise UsageError(
            f"num_shards is {num_shards}, must divide the {layout.num_processes} processes of a sharded run: leave it out"
        )
    if offloaded and not sharded:
        raise UsageError("offloaded is true, but weights are not sharded, and only FSDP2 offloads: leave it out")
    if isinstance(model, Decoder) and model.method.matrix_bytes == 2:  # as files hold them, mostly in bf16
        cast_bytes = {"no": 4, "fp16": 2, "bf16": 0}[mixed_precision]
        model = dataclasses.replace(model, method=dataclasses.replace(model.method, cast_bytes=cast_bytes))
    # Process 0 has the largest share, and no process needs more than it does
    num_samples = min(layout.per_device_train_batch_size, layout.shares[0])
    parts = (num_shards or layout.num_processes) if sharded else 1
    trained = -(-count_trained(model) // parts)
    weights = -(-count_weight_bytes(model) // parts) if hasattr(model, "weight_bytes") else 4 * trained
    options: dict[str, Any] = {"autocast": mixed_precision != "no", "gradient_checkpointing": gradient_checkpointing}
    if sharded:
        options |= {
            "gathered_bytes": gathered_bytes(mixed_precision, fsdp_gather),
            "num_processes": parts,
        }
    peaks = model.sharded_peaks if sharded and not isinstance(model, ConvNet) else model.peaks
    first, *later = peaks(num_samples, **options)
    if offloaded:
        trained = weights = 0
    gradients, moments = round(gradient_bytes * trained), round(moment_bytes * trained)
    backward = max(later, key=sum)
    # States are there all the time; which peak is the largest depends on the rest alone
    states = weights + gradients + moments
    peak = max(first, backward, key=sum)
    return Memory(
        parameters=weights,
        gradients=gradients,
        moments=moments,
        **peak._asdict(),
        forward=states + sum(first),
        backward=states + sum(backward),
        optimizer_step=states,
    )
