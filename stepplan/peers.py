"""The ways in which other programs train a decoder, as far as its memory depends on them.

`stepplan.decoder` describes the programs of this repository; here is what torchtune, litgpt, torchtitan and peft do otherwise:
weights in 16 bits throughout or FSDP's own casts, attention in place, heads whole, gradients that are freed after each step.
What they do is planned (`plan --program`), and never launched.
"""

import dataclasses
from typing import Any

from samestep.cut.layout import Layout
from stepplan.decoder import NF4_BLOCK, Decoder, Shape, Tuning
from stepplan.memory import Memory, count_trained, planned_memory
from stepplan.recurrences import Linear
from stepplan.timing import Software
from stepplan.transformer import Peak

PHASES = ("forward", "backward", "optimizer_step")
"""Sums of a plan."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerTuning(Tuning):
    """Says what another program trains, and in which bytes it keeps weights.

    Attributes:
        weight_bytes: bytes of a weight that is kept whole: 4, or 2.
        adapter_bytes: bytes of a number of an adapter.
        doubles_scales: whether the scales of weights in 4 bits are quantised again, to a byte (double quantisation); else they
            take 4 bytes.
    """

    weight_bytes: int = 4
    adapter_bytes: int = 4
    doubles_scales: bool = True

    @property
    def quantized_bytes(self) -> float:
        return super().quantized_bytes if self.doubles_scales else 0.5 + 4 / NF4_BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerDecoder(Decoder):
    """A decoder as another program trains it, in 16 bits.

    Attributes:
        has_chunked_head: logits exist in parts only.
        logit_bytes: bytes per logit at the peak of a whole head.
        keeps_gradients: whether gradients exist while a forward is computed; False: they begin with its backward.
        sums_whole_gradients: whether gradients of sharded weights are summed whole over the micro-batches of a step and reduced
            after the last one (`no_sync` of FSDP); False: each micro-batch's are reduced.
        updates_in_backward: the optimizer's step is part of the backward, so that a gradient never waits.
        recomputed: what is recomputed where gradient checkpointing is asked for: all; selective (every second matmul, and all
            between them).
        offloads_inputs: whether the inputs of recomputed layers wait in host memory.
        shards_outside: whether embedding and head are sharded units of their own, so that neither is whole during the layers.
        drops_inputs: whether each adapter has a dropout of its own, whose result and mask (a byte) are kept.
        quantized_input_bytes: bytes per number of the input of each matrix in 4 bits that are kept for the backward, although
            the matrix is frozen; each matrix keeps a copy of its own. 0: none.
        keeps_whole: whether the whole model that was loaded stays on each device, when it has been divided.
        copies_in_update: whether the optimizer makes a number for each trained one while it updates them all at once (foreach).
        quantizes_experts: whether experts are linear layers, kept in 4 bits where matrices are, not tables.
    """

    has_chunked_head: bool = True
    logit_bytes: float = 12
    keeps_gradients: bool = True
    sums_whole_gradients: bool = False
    updates_in_backward: bool = False
    recomputed: str = "all"
    offloads_inputs: bool = False
    shards_outside: bool = False
    drops_inputs: bool = False
    quantized_input_bytes: int = 0
    keeps_whole: bool = False
    copies_in_update: bool = False
    quantizes_experts: bool = False

    number_bytes = 2
    stores_scores = False  # their attention stores no matrices of [T, T], or the source says otherwise
    _recomputes_logits = False

    # -------------------------------------------------------------------------------------------------- activations

    @property
    def outside_bytes(self) -> int:
        return 6 * self.hidden_size

    def layer_bytes(self, layer: Shape, *, autocast: bool) -> float:
        return super().layer_bytes(layer, autocast=True)

    def input_bytes(self, needed: list[Linear], layer: Shape, autocast: bool) -> int:
        """Count the bytes per token of the inputs of matrices: those that share one keep it once, as nothing is cast."""
        kept = 0
        if self.method.is_quantized:
            widths = 3 * layer.hidden_size + layer.values + layer.intermediate_size
            kept = self.quantized_input_bytes * widths
        if self.drops_inputs and self.method.rank is not None:
            return kept + 3 * sum(x.width for x in needed)
        return kept + super().input_bytes(needed, layer, autocast=False) // 2

    def norm_bytes(self, layer: Shape, b: int) -> int:
        """Count the bytes per token of normalisations: compiled, input and output; else a float32 copy, and the output."""
        is_full = self.method.rank is None
        num_norms = layer.num_pre_norms + layer.num_post_norms
        if self.kernels == "compiled":
            return 2 * num_norms * layer.hidden_size + 4
        total = num_norms * ((6 if is_full else 4) * layer.hidden_size + 4)
        if layer.qk_norm != "none" and layer.has_attention:
            is_cast_first = layer.qk_norm == "head" and not layer.num_post_norms
            total += (4 + (b if is_cast_first else 4) * is_full) * (layer.queries + layer.keys)
        return total

    def gate_bytes(self, b: int) -> int:
        """Count the bytes per token and unit of f: compiled, the activation is computed again from gate and up."""
        return (2 if self.kernels == "compiled" else 3) * b

    def temporary_bytes(self, layer: Shape, autocast: bool) -> float:
        f = max(layer.intermediate_size, 2 * layer.experts_per_token * layer.expert_size)
        return 6 * layer.hidden_size + 4 * f

    # ------------------------------------------------------------------------------------------------------- memory

    def layer_weight_bytes(self, layer: Shape) -> float:
        total, method = super().layer_weight_bytes(layer), self.method
        if method.is_quantized and self.quantizes_experts:
            total -= layer.expert_parameters * (method.weight_bytes - method.quantized_bytes)
        return total

    def rows(self, num_samples: int) -> int:
        return num_samples * self.length

    def head_bytes(self, num_samples: int, autocast: bool) -> tuple[int, int]:
        """Count the bytes of the head: whole, some for each logit; in chunks the 16-bit logits, as only the loss is cut."""
        rows = self.rows(num_samples)
        logits = rows * self.vocab_size
        if not self.has_chunked_head:
            return (round(self.logit_bytes * logits),) * 2
        states, matrix = 4 * rows * self.hidden_size, self.vocab_size * self.hidden_size
        gradient = 2 * matrix * (self.method.rank is None)
        copy = 2 * matrix * (self.method.weight_bytes == 4)
        return states + copy + 2 * logits + gradient, 2 * states + gradient

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        tokens, shape = self.rows(num_samples), self.shape
        saved = sum(layer.num_layers * self.layer_bytes(layer, autocast=autocast) for layer in shape.kinds)
        fixed, gradient = self._expert_sums(gradient_checkpointing)
        if gradient_checkpointing and self.recomputed == "all":
            saved = 2 * shape.hidden_size * self.num_layers * (not self.offloads_inputs)
        elif gradient_checkpointing:  # selective: layers' inputs, every second matmul's output, attention's output
            saved = sum(layer.num_layers * self.count_kept(layer) for layer in shape.kinds)
        outside = round(saved * tokens + self.outside_bytes * tokens) + fixed
        in_layer = self.count_in_layer(autocast=autocast, recomputed=gradient_checkpointing)
        in_layer = round((saved + in_layer) * tokens) + fixed + gradient
        heads, working = self.head_bytes(num_samples, autocast), self.dequantized_bytes
        waiting = 2 * self.vocab_size * shape.hidden_size * (shape.tied_head and self.method.rank is None)
        return (
            Peak(0, outside, heads[0], working),
            Peak(0, outside, heads[1], working),
            Peak(0, in_layer, waiting, working),
        )

    @staticmethod
    def count_kept(layer: Shape) -> int:
        """Count the bytes per token that selective checkpointing keeps of a layer: products of every second matrix."""
        visited = layer.intermediate_size + layer.experts_per_token * layer.expert_size
        attention = (layer.queries + layer.values + layer.keys) * layer.has_attention
        return 4 * layer.hidden_size + 2 * (attention + visited)

    def last_peak(self, num_samples: int, autocast: bool) -> Peak:
        """Count the bytes of `peaks` in the backward of the first layer, the last one to be computed."""
        activations = round(self.count_in_layer(autocast=autocast, recomputed=True) * self.rows(num_samples))
        return Peak(0, activations, 0, self.dequantized_bytes)

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes where FSDP shards the weights; in 16 bits where all is, gradients are reduced in them, too."""
        peaks = self.peaks(num_samples, autocast=autocast, gradient_checkpointing=gradient_checkpointing)
        w, (layer, trained, trained_outside) = gathered_bytes, self.count_gathered(gathered_bytes)
        # What is outside is whole all the time, or, in units of its own, the head only while it is computed
        matrix, outside = self.vocab_size * self.hidden_size, w * self.num_outside
        whole, whole_head, head_gradient = outside, outside, w * trained_outside
        waiting = w * trained_outside
        if self.shards_outside:
            whole, whole_head, head_gradient, waiting = 0, w * matrix, w * min(matrix, trained_outside), 0
        reduced = 4 if self.method.weight_bytes == 4 else w  # type of the buffer of a reduction
        forward, head, backward = peaks
        in_head, in_layer = whole_head + 2 * layer + head_gradient, whole + 2 * layer + (w + reduced) * trained
        return (
            Peak(0, forward.activations, forward.head, round(whole_head + layer + forward.gathered)),
            Peak(0, head.activations, head.head, round(in_head + head.gathered)),
            Peak(0, backward.activations, backward.head + waiting, round(in_layer + backward.gathered)),
            Peak(0, 0, 0, round(whole + (w + reduced) * trained_outside + reduced * trained)),
        )


def adjust_gradients(memory: Memory, model: PeerDecoder, layout: Layout, gradient_bytes: float) -> Memory:
    """Adjust planned memory to when gradients exist, and how much of them each process holds, in a peer's program.

    Where the whole model stays on each device, it is there beside a process's part.

    Args:
        memory: plan of a program that keeps its part of the gradients all the time.
        model: the model as the program computes it.
        layout: the cut of the step.
        gradient_bytes: bytes of a gradient.
    """
    if model.keeps_whole:
        sums = {name: getattr(memory, name) + model.weight_bytes for name in ("parameters", *PHASES)}
        memory = dataclasses.replace(memory, **sums)
    if model.sums_whole_gradients and layout.gradient_accumulation_steps > 1:
        return replace_gradients(memory, gradient_bytes * count_trained(model))
    copy = memory.gradients * model.copies_in_update
    update = memory.optimizer_step + copy
    found = memory if model.keeps_gradients else _begin_with_backward(memory, model, layout, gradient_bytes)
    if not model.copies_in_update or update <= found.total:
        return found
    states = {"parameters": memory.parameters, "gradients": memory.gradients, "moments": memory.moments}
    sums = {"forward": found.forward, "backward": found.backward, "optimizer_step": update}
    return Memory(**states, autocast_cache=0, gathered=0, activations=copy, head=0, **sums)


def _begin_with_backward(memory: Memory, model: PeerDecoder, layout: Layout, gradient_bytes: float) -> Memory:
    """Adjust planned memory to gradients that exist from the backward to the update only; arguments as above."""
    # Until the backward ends, gradients are not there; then all are, or, updated within it, the largest one
    last = model.last_peak(min(layout.per_device_train_batch_size, layout.shares[0]), autocast=True)
    largest = model.vocab_size * model.hidden_size if model.method.rank is None else 0
    at_end = round(min(memory.gradients, gradient_bytes * largest)) if model.updates_in_backward else memory.gradients
    without = replace_gradients(memory, 0)
    states = without.optimizer_step
    if states + sum(last) + at_end <= max(without.forward, without.backward):
        return without
    peak = states + at_end + sum(last)
    values = {"forward": peak, "backward": peak, "optimizer_step": states + at_end}
    return dataclasses.replace(memory, gradients=at_end, **last._asdict(), **values)


def replace_gradients(memory: Memory, gradients: float) -> Memory:
    """Replace the bytes of the gradients, in all sums that hold them."""
    more = round(gradients) - memory.gradients
    return dataclasses.replace(memory, **{name: getattr(memory, name) + more for name in ("gradients", *PHASES)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A way to train that no program of this repository has.

    Attributes:
        program: one of `PROGRAMS`.
        weight_bytes: bytes of a trained weight and of its gradient: 2, or 4 with 16-bit copies where they are multiplied.
        moment_bytes: bytes of both moments of a trained number.
        zero_stage: 2: each process keeps its part of gradients and moments, and all weights (DeepSpeed); 0: as FSDP or DDP do.
        offloaded: whether divided weights, gradients and moments are in the hosts' memory.
        selective: whether gradient checkpointing computes half of the products again, not all.
        has_fused_head: whether logits exist in parts only.
    """

    program: str = "hf"
    weight_bytes: int = 4
    moment_bytes: float = 8
    zero_stage: int = 0
    offloaded: bool = False
    selective: bool = False
    has_fused_head: bool = False

    def adapt(self, model: Any) -> PeerDecoder:
        """Return a decoder of this repository as the program computes it; frozen weights are in 16 bits or fewer."""
        method = model.method
        held = 2 if method.rank is not None else self.weight_bytes
        tuning = {field.name: getattr(method, field.name) for field in dataclasses.fields(Tuning)}
        tuning |= {"matrix_bytes": held, "weight_bytes": held, "adapter_bytes": self.weight_bytes}
        fields: dict[str, Any] = {
            name: getattr(model, name) for name in ("shape", "sequence_length", "sequences", "num_scored")
        }
        own = PROGRAMS[self.program] | ({"recomputed": "selective"} if self.selective else {})
        own |= {"has_chunked_head": True} if self.has_fused_head else {}
        return PeerDecoder(**fields, method=PeerTuning(**tuning), **own)

    def plan(self, model: Any, layout: Layout, options: dict[str, Any]) -> Memory:
        """Plan the memory of one process; `options` as of `memory.planned_memory`, which holds what is not ours to change."""
        parts = layout.num_processes if self.zero_stage == 2 else 1
        memory = planned_memory(
            *(model, layout),
            **options
            | {"offloaded": options.get("offloaded", False) or (self.offloaded and options.get("sharded", False))},
            moment_bytes=self.moment_bytes / parts,
            gradient_bytes=self.weight_bytes / parts,
        )
        return adjust_gradients(memory, model, layout, self.weight_bytes)

    def software(self, model: Any, *, sharded: bool) -> Software:
        """Count the bytes that the program moves for each weight: in 16 bits two reads, a gradient, its sum."""
        is_mixed = self.weight_bytes == 4
        return Software(
            kernels=model.kernels,
            weight_bytes=28 if is_mixed else 10,
            frozen_bytes=10 if model.method.is_quantized else 4 + 12 * sharded,
            optimizer_bytes=40 if is_mixed else 14,
            gathered_bytes=2,
        )

    @property
    def hint(self) -> str:
        """Say that this is planned only."""
        hint = f"Planned as {self.program} computes it: no program of this repository does so, and there is no command."
        return f"{hint} Copies between host and devices are not in the time (--offloaded)." if self.offloaded else hint


HUGGING_FACE = {"has_chunked_head": False, "logit_bytes": 14, "keeps_gradients": False, "copies_in_update": True}
PROGRAMS: dict[str, dict[str, Any]] = {
    "hf": HUGGING_FACE,
    "trl": HUGGING_FACE,
    "litgpt": {
        "has_chunked_head": False,
        "logit_bytes": 14,
        "drops_inputs": True,
        "quantized_input_bytes": 4,
        "sums_whole_gradients": True,
    },
    "torchtune": {"kernels": "compiled", "keeps_gradients": False},
    "torchtitan": {"kernels": "compiled", "has_chunked_head": False, "logit_bytes": 10, "recomputed": "selective"},
}
"""Program -> fields of `PeerDecoder`: transformers' Trainer with its model's own loss, TRL's on top of it, litgpt, torchtune
with its chunked loss, torchtitan compiled. benchmarks/language_models.yaml has what they are read from, and rows of them."""
