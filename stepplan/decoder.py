"""The shape of a decoder-only language model, what of it is trained and how, and the memory and work of a step.

Arithmetic only. Letters: V vocabulary, T tokens of a sequence, h width, q width of all queries, r width of all keys (and of all
values), f width of the feed-forward layer, L layers, e bytes of an activation (4, in 16 bits 2). A layer is RMS normalisation,
rotated queries and keys, a gated feed-forward layer; dense, or a mixture of experts.
"""

import dataclasses
from typing import NamedTuple

from samestep.cut.layout import LOGITS_AT_ONCE, round_up
from stepplan.transformer import Peak

ALL_LINEAR = "all-linear"
NF4_BLOCK, NF4_GROUP = 64, 256
"""Weights that share a scale, and scales that share a second one: bitsandbytes' blocksize, and its double quantisation."""


class Linear(NamedTuple):
    """A matrix of a layer.

    Attributes:
        name: name of its module.
        width: numbers that come in.
        out: numbers that go out.
        source: what comes in: attention (the normalised input), output (of attention), feed_forward, down, router, latent.
    """

    name: str
    width: int
    out: int
    source: str


class Latent(NamedTuple):
    """Latent attention (DeepSeek-V2, 2405.04434, section 2.1): queries, keys and values come from narrow vectors.

    Attributes:
        query_rank, key_rank: widths of the narrow vectors; query_rank 0: queries come from the layer's input.
        rotated: rotated part of a head's queries and keys.
        value_dim: width of a head's values.
    """

    query_rank: int
    key_rank: int
    rotated: int
    value_dim: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The architecture of a decoder.

    Attributes:
        vocab_size: V.
        hidden_size: h.
        num_layers: L.
        intermediate_size: f of dense layers.
        num_heads, num_key_heads: heads of queries, and of keys and values.
        head_dim: width of a head.
        tied_head: whether the head is the embedding's matrix.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: normalisation of queries and keys: none, head (each head) or width (all heads at once).
        num_post_norms: normalisations of what attention and feed-forward layer give back: 0 or 2.
        num_pre_norms: of what they are given: 2 or 0.
        is_fused: whether queries, keys and values are one matrix, and so are both that feed the activation (Phi-3).
        soft_caps: whether scores are soft-capped, which no kernel without stored matrices computes here (Gemma 2).
        window: keys that a query of a layer with a window sees; None: all layers see all.
        num_global: layers without the window.
        num_experts, experts_per_token, expert_size: of a mixture: experts, those that a token visits, their f. 0: dense.
        shared_size: f of experts that every token visits.
        num_dense: the first layers, which are dense in a mixture.
        latent: attention is latent; None: it is not.
        max_length: positions; None: not said.
        stored_bytes: bytes of a weight in the model's files, 2 or 4.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    num_key_heads: int
    head_dim: int
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: str = "none"
    num_post_norms: int = 0
    num_pre_norms: int = 2
    is_fused: bool = False
    soft_caps: bool = False
    window: int | None = None
    num_global: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    num_dense: int = 0
    latent: Latent | None = None
    max_length: int | None = None
    stored_bytes: int = 4

    @property
    def queries(self) -> int:
        """q, the width of all queries."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """r, the width of all keys."""
        return self.num_key_heads * self.head_dim

    @property
    def values(self) -> int:
        """The width of all values, as of attention's output per query head."""
        return self.num_heads * self.latent.value_dim if self.latent else self.queries

    @property
    def num_mixtures(self) -> int:
        """Layers with experts."""
        return max(0, self.num_layers - self.num_dense) if self.num_experts else 0

    def attention_linears(self) -> list[Linear]:
        """List the matrices of a layer's attention."""
        h, q, r = self.hidden_size, self.queries, self.keys
        if self.latent:
            rank, key_rank, rotated, value_dim = self.latent
            plain = self.head_dim - rotated
            first = [Linear("q_a_proj", h, rank, "attention"), Linear("q_b_proj", rank, q, "latent")]
            return [
                *(first if rank else [Linear("q_proj", h, q, "attention")]),
                Linear("kv_a_proj_with_mqa", h, key_rank + rotated, "attention"),
                Linear("kv_b_proj", key_rank, self.num_heads * (plain + value_dim), "latent"),
                Linear("o_proj", self.values, h, "output"),
            ]
        inner = [Linear("q_proj", h, q, "attention"), Linear("k_proj", h, r, "attention")]
        inner += [Linear("v_proj", h, r, "attention")]
        if self.is_fused:
            inner = [Linear("qkv_proj", h, q + 2 * r, "attention")]
        return [*inner, Linear("o_proj", q, h, "output")]

    def feed_forward_linears(self, size: int) -> list[Linear]:
        """List the matrices of a feed-forward layer of this width."""
        h = self.hidden_size
        down = Linear("down_proj", size, h, "down")
        if self.is_fused:
            return [Linear("gate_up_proj", h, 2 * size, "feed_forward"), down]
        return [Linear("gate_proj", h, size, "feed_forward"), Linear("up_proj", h, size, "feed_forward"), down]

    def linears(self, is_mixture: bool) -> list[Linear]:
        """List the matrices of a layer, a mixture's experts left out: they are tables, to which no adapter is added."""
        if not is_mixture:
            return self.attention_linears() + self.feed_forward_linears(self.intermediate_size)
        return self.attention_linears() + (self.feed_forward_linears(self.shared_size) if self.shared_size else [])

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer that not every token visits."""
        return self.num_experts * 3 * self.hidden_size * self.expert_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of a layer's normalisations, and its biases."""
        count = (self.num_pre_norms + self.num_post_norms) * self.hidden_size
        count += {"none": 0, "head": 2 * self.head_dim, "width": self.queries + self.keys}[self.qk_norm]
        if self.latent:
            count += self.latent.query_rank + self.latent.key_rank
        return count + (self.queries + 2 * self.keys) * self.qkv_bias

    def layer_parameters(self, is_mixture: bool) -> int:
        """Count the parameters of a layer."""
        count = sum(linear.width * linear.out for linear in self.linears(is_mixture)) + self.norm_parameters
        return count + (self.num_experts * self.hidden_size + self.expert_parameters if is_mixture else 0)

    @property
    def num_outside(self) -> int:
        """Parameters outside the layers: embedding, head, the last normalisation."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_head else 2) + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """N, all parameters; a tied head counts once."""
        mixtures = self.num_mixtures
        dense = (self.num_layers - mixtures) * self.layer_parameters(is_mixture=False)
        return dense + mixtures * self.layer_parameters(is_mixture=True) + self.num_outside

    @property
    def num_active(self) -> int:
        """Parameters that a token meets: of experts only those that it visits."""
        idle = self.num_experts - self.experts_per_token
        return self.num_parameters - self.num_mixtures * idle * 3 * self.hidden_size * self.expert_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The part of a model that is trained, and the bytes in which its weights are kept.

    Attributes:
        rank: of the adapters; None: all weights are trained.
        targets: all-linear, or names of the matrices that get adapters.
        uses_dora: whether the norms of the adapted matrices are trained beside the adapters (DoRA).
        trains_outside: whether embedding and head are trained whole beside adapters.
        weight_bytes: bytes of a weight that is kept whole: 4, or 2.
        matrix_bytes: bytes of a weight of a matrix that is frozen and not quantised; None: `weight_bytes`.
        cast_bytes: bytes of a weight of such a matrix in its copy, while it is multiplied; 0: there is none.
        adapter_bytes: bytes of a number of an adapter.
        is_quantized: whether frozen matrices of the layers are kept in 4 bits (NF4): half a byte, and scales.
        doubles_scales: whether the scales are quantised again, to a byte (double quantisation); else they take 4 bytes.
    """

    rank: int | None = None
    targets: tuple[str, ...] = (ALL_LINEAR,)
    uses_dora: bool = False
    trains_outside: bool = False
    weight_bytes: int = 4
    matrix_bytes: int | None = None
    cast_bytes: int = 0
    adapter_bytes: int = 4
    is_quantized: bool = False
    doubles_scales: bool = True

    def is_adapted(self, name: str) -> bool:
        """Tell whether a matrix of this name gets an adapter."""
        return self.rank is not None and (ALL_LINEAR in self.targets or name in self.targets)

    @property
    def quantized_bytes(self) -> float:
        """Bytes of a weight in NF4: 4 bits, and a scale for 64 of them, itself a byte and a share of a second scale."""
        scale = 1 + 4 / NF4_GROUP if self.doubles_scales else 4
        return 0.5 + scale / NF4_BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A way to compute a layer and the head, as far as memory depends on it. The default is this repository's.

    Attributes:
        kernels: eager, a kernel per operator, or compiled, element-wise kernels fused.
        is_ours: attention of `samestep.models.sequences`, normalisations of transformers; False: 16-bit weights throughout, and
            attention in place.
        expands_keys: whether keys and values are repeated for all queries before the kernel.
        has_chunked_head: logits exist in parts only.
        logit_bytes: bytes per logit at the peak of a whole head; None: 12, see `Decoder.head_bytes`.
        keeps_gradients: whether gradients exist while a forward is computed; False: they begin with its backward.
        sums_whole_gradients: whether gradients of sharded weights are summed whole over the micro-batches of a step and reduced
            after the last one (`no_sync` of FSDP); False: each micro-batch's are reduced.
        updates_in_backward: the optimizer's step is part of the backward, so that a gradient never waits.
        recomputed: what is recomputed where gradient checkpointing is asked for: all; selective (every second matmul, and all
            between them).
        offloads_inputs: whether the inputs of recomputed layers wait in host memory.
        shards_outside: whether embedding and head are sharded units of their own, so that neither is whole during the layers.
        drops_inputs: whether each adapter has a dropout of its own, whose result and mask (a byte) are kept.
        keeps_quantized_inputs: whether what is multiplied by a matrix in 4 bits is kept, although the matrix is frozen:
            bitsandbytes did until 0.43.
    """

    kernels: str = "eager"
    is_ours: bool = True
    expands_keys: bool = True
    has_chunked_head: bool = True
    logit_bytes: float | None = None
    keeps_gradients: bool = True
    sums_whole_gradients: bool = False
    updates_in_backward: bool = False
    recomputed: str = "all"
    offloads_inputs: bool = False
    shards_outside: bool = False
    drops_inputs: bool = False
    keeps_quantized_inputs: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder in training, in the words of the planner's other models.

    Attributes:
        shape: the architecture.
        sequence_length: T.
        sequences: sequences of a sample: 1, of a pair 2.
        method: what is trained.
        program: how it is computed.
        num_scored: outputs of a head of scores (a reward model); 0: the head scores the vocabulary.
        recomputes_head: whether logits are computed again in the backward (objectives of pairs).
        eager_attention: attention stores its [T, T] matrices.
    """

    shape: Shape
    sequence_length: int
    sequences: int = 1
    method: Tuning = Tuning()
    program: Program = Program()
    num_scored: int = 0
    recomputes_head: bool = False
    eager_attention: bool = False

    unit = "token"
    has_equal_layers = True

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.sequence_length * self.sequences

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        """h."""
        return self.shape.hidden_size

    @property
    def num_layers(self) -> int:
        """L."""
        return self.shape.num_layers

    @property
    def kernels(self) -> str:
        """The kind of kernels, for the calibration of the time."""
        return self.program.kernels

    @property
    def kernels_per_layer(self) -> int:
        """Kernels of a layer's forward and backward, none fused: about 180, counted on fake tensors; 95 more with adapters."""
        return 180 + 95 * (self.method.rank is not None)

    # -----------------------------------------------------------------------------------------------------------------
    # Parameters

    @property
    def num_outside(self) -> int:
        """Parameters outside the layers; of a reward model with a head of scores."""
        matrix = self.shape.vocab_size * self.shape.hidden_size
        if not self.num_scored:
            return self.shape.num_outside
        return matrix + self.shape.hidden_size * (1 + self.num_scored)

    @property
    def num_parameters(self) -> int:
        """N, all weights, frozen ones and adapters too."""
        return self.shape.num_parameters - self.shape.num_outside + self.num_outside + self.num_adapter

    @property
    def num_adapter(self) -> int:
        """Parameters of all adapters, B and A of each matrix, and DoRA's norms."""
        return sum(
            count * self._layer_adapter(is_mixture)
            for is_mixture, count in self._kinds()
            if self.method.rank is not None
        )

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and moments."""
        if self.method.rank is None:
            return self.num_parameters
        matrix = self.shape.vocab_size * self.shape.hidden_size
        outside = matrix * (1 if self.shape.tied_head or self.num_scored else 2) if self.method.trains_outside else 0
        head = self.shape.hidden_size * self.num_scored
        copies = outside if self.method.trains_outside else 0
        return self.num_adapter + copies + head

    @property
    def num_active(self) -> int:
        """Weights that a token meets."""
        return self.shape.num_active - self.shape.num_outside + self.num_outside + self.num_adapter

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        method = self.method
        frozen = sum(count * self.layer_weight_bytes(is_mixture) for is_mixture, count in self._kinds())
        matrices = self.vocab_size * self.hidden_size * (1 if self.shape.tied_head or self.num_scored else 2)
        outside = method.weight_bytes * (self.num_outside - matrices)
        is_held = method.matrix_bytes is not None and not method.trains_outside
        outside += (method.matrix_bytes if is_held else method.weight_bytes) * matrices
        if method.trains_outside:  # peft keeps the frozen ones beside those that it trains
            outside += method.adapter_bytes * (self.num_trained - self.num_adapter)
        return round(frozen + outside)

    def layer_weight_bytes(self, is_mixture: bool) -> float:
        """Count the bytes of a layer's weights as they are kept, adapters included."""
        method, shape = self.method, self.shape
        matrices = sum(linear.width * linear.out for linear in shape.linears(is_mixture))
        others = shape.layer_parameters(is_mixture) - matrices
        matrix_bytes = method.quantized_bytes if method.is_quantized else method.matrix_bytes or method.weight_bytes
        adapters = method.adapter_bytes * self._layer_adapter(is_mixture)
        return matrices * matrix_bytes + others * method.weight_bytes + adapters

    def _kinds(self) -> list[tuple[bool, int]]:
        """List whether layers are mixtures, and their number."""
        mixtures = self.shape.num_mixtures
        return [(is_mixture, n) for is_mixture, n in ((False, self.num_layers - mixtures), (True, mixtures)) if n]

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of all layers; experts, which are tables, left out."""
        kinds = [linear for is_mixture, count in self._kinds() for linear in self.shape.linears(is_mixture) * count]
        return [(linear.out, linear.width) for linear in kinds]

    def _layer_adapter(self, is_mixture: bool) -> int:
        if self.method.rank is None:
            return 0
        adapted = [linear for linear in self.shape.linears(is_mixture) if self.method.is_adapted(linear.name)]
        rank, dora = self.method.rank, self.method.uses_dora
        count = sum(rank * (linear.width + linear.out) + linear.out * dora for linear in adapted)
        if is_mixture and self._adapts_experts:  # each expert's gate and up together at twice the rank, and the router
            h, f = self.shape.hidden_size, self.shape.expert_size
            count += rank * self.shape.num_experts * (2 * (h + 2 * f) + h + f) + rank * (h + self.shape.num_experts)
        return count

    @property
    def _adapts_experts(self) -> bool:
        """Whether peft adapts the tables of experts, too: with all-linear it does."""
        return self.method.rank is not None and ALL_LINEAR in self.method.targets

    @property
    def _expert_bytes(self) -> int:
        """Bytes of the experts of a layer in the type in which they are computed."""
        return self.shape.expert_parameters * (self.method.weight_bytes if self.program.is_ours else 2)

    # -----------------------------------------------------------------------------------------------------------------
    # Work

    @property
    def num_logits(self) -> int:
        """Logits of a sample; of an objective of pairs twice, as they are computed twice."""
        return 0 if self.num_scored else self.length * self.vocab_size * (2 if self._recomputes_logits else 1)

    @property
    def _recomputes_logits(self) -> bool:
        """Whether the head computes logits again in the backward: of pairs; here also where they are soft-capped."""
        return self.recomputes_head or (self.program.is_ours and self.shape.soft_caps)

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward of a sample: each multiply-add counts as two, each matrix once, attention in full.

        Attention of all pairs of tokens, not only of the causal half: kernels compute the half at about half the rate of
        matmuls. Within a window W a query is counted for 2 W - W^2 / T keys.
        """
        shape, t = self.shape, self.sequence_length
        head = self.vocab_size * self.hidden_size if not self.num_scored else self.hidden_size * self.num_scored
        matrices = sum(linear.width * linear.out for linear in self._all_linears()) + head
        if shape.num_mixtures:
            per_layer = shape.num_experts * self.hidden_size
            per_layer += shape.experts_per_token * 3 * self.hidden_size * shape.expert_size
            matrices += shape.num_mixtures * per_layer
        seen: list[float] = [t] * self.num_layers
        if shape.window is not None and shape.window < t:
            near = 2 * shape.window - shape.window**2 / t
            seen = [t] * shape.num_global + [near] * (self.num_layers - shape.num_global)
        width = self.shape.queries + self.shape.values
        return round(self.length * (2 * matrices + 2 * width * sum(seen) + 2 * self.num_adapter))

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward: a frozen matrix has no gradient of its own, so its backward is one product, not two.

        Attention's backward is two forwards, adapted or not.
        """
        forward = self.forward_flops
        if self.method.rank is None:
            return 3 * forward
        frozen = sum(linear.width * linear.out for linear in self._all_linears())
        if not self.method.trains_outside and not self.num_scored:
            frozen += self.vocab_size * self.hidden_size
        frozen += self.shape.num_mixtures * self.shape.experts_per_token * 3 * self.hidden_size * self.shape.expert_size
        return 3 * forward - 2 * self.length * frozen

    def _all_linears(self) -> list[Linear]:
        return [linear for is_mixture, count in self._kinds() for linear in self.shape.linears(is_mixture) * count]

    @property
    def forward_share(self) -> float:
        """The forward's part of all FLOPs: what recomputing adds."""
        return self.forward_flops / self.flops_per_sample

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves for its backward, nothing recomputed, logits excluded."""
        layers = sum(count * self.layer_bytes(is_mixture, autocast=autocast) for is_mixture, count in self._kinds())
        return round(self.length * (layers + self._outside_bytes(autocast)))

    def traffic_bytes(self, *, autocast: bool) -> int:
        """Count the bytes by which the traffic of element-wise kernels is measured: `saved_bytes` with all weights trained."""
        whole = dataclasses.replace(self, method=Tuning(weight_bytes=self.method.weight_bytes))
        return whole.saved_bytes(autocast=autocast)

    # -----------------------------------------------------------------------------------------------------------------
    # Activations

    def _outside_bytes(self, autocast: bool) -> float:
        """Bytes per token of the last normalisation, the last hidden states, and where the chunked head gathers them."""
        h = self.hidden_size
        if not self.program.is_ours:
            return 6 * h
        return (12 if self.method.rank is None else 8) * h

    def layer_bytes(self, is_mixture: bool, *, autocast: bool) -> float:
        """Count the bytes per token that a layer saves for its backward, with b = 4, but 2 in 16 bits, per number.

            normalisations      before a block 4 h each, the input in float32; 4 h more where their weights are trained
            inputs of matmuls   (needed where a matrix is trained or has an adapter) under autocast b width of each, in one
                                dtype b width of all that share it
            attention           queries, output b (q + q); keys and values, repeated for all queries here, b 2 q, and b 2 r
            feed-forward        gate, its activation, up: 3 b f
            adapters            b rank of each

        In 16 bits throughout, compiled: each normalisation's input and output, 2 h twice each; queries, keys, values and
        output; gate and up, and the product where it is needed.
        """
        shape, method, program = self.shape, self.method, self.program
        h, is_full = shape.hidden_size, method.rank is None
        is_half = autocast or not program.is_ours
        b, stats = (2 if is_half else 4), 4
        needed = [x for x in shape.linears(is_mixture) if is_full or method.is_adapted(x.name)]
        sources = {x.source for x in needed}
        casts_each = is_half and program.is_ours
        total = 4.0 * shape.num_heads + sum(b * (method.rank or 0) for x in needed)
        total += sum(2 * b * x.out for x in needed) * method.uses_dora  # what both factors of the norm's gradient are
        # What the matmuls save of their inputs
        widths = {"attention": h, "feed_forward": h, "output": shape.values, "down": 0, "latent": 0}
        if method.is_quantized and program.keeps_quantized_inputs:
            size = shape.shared_size if is_mixture else shape.intermediate_size
            total += b * (2 * h + shape.values + size)
        if program.drops_inputs and not is_full:
            total += sum((b + 1) * x.width for x in needed)
        elif casts_each:
            total += sum(b * x.width for x in needed)
        else:
            total += sum(b * widths[source] for source in sources) + sum(
                b * x.width for x in needed if x.source == "down"
            )
            total += sum(b * x.width for x in needed if x.source == "latent")
        if is_mixture and shape.num_experts:
            total += self._mixture_bytes(is_full or self._adapts_experts, b)
        # Normalisations
        compiled = program.kernels == "compiled"
        if compiled and not program.is_ours:
            total += (2 * shape.num_pre_norms + 2 * shape.num_post_norms) * h + stats
        else:
            normed = (4 if program.is_ours else 2) if is_full else 0
            total += (shape.num_pre_norms + shape.num_post_norms) * ((4 + normed) * h + stats)
            if shape.qk_norm != "none":
                # Llama's kind casts before its weight, Gemma's and OLMo's after it
                is_cast_first = shape.qk_norm == "head" and not shape.num_post_norms
                normed = (b if is_cast_first else 4) if is_full else 0
                total += (4 + normed) * (shape.queries + shape.keys)
        total += self._attention_bytes(b)
        size = shape.shared_size if is_mixture else shape.intermediate_size
        total += (2 if compiled and not program.is_ours else 3) * b * size
        return total

    def _attention_bytes(self, b: int) -> float:
        shape, program = self.shape, self.program
        q, r = shape.queries, shape.keys
        repeats = shape.num_heads > shape.num_key_heads and not shape.latent
        if shape.latent:
            return b * (2 * q + 2 * shape.values)
        whole = b * (q + shape.values)
        if program.is_ours and self._stores_scores:
            pairs = b * (1 + shape.soft_caps)  # probabilities; of soft caps the hyperbolic tangent
            return whole + b * 2 * r + self._square * pairs
        if not program.expands_keys or not repeats:
            return whole + b * 2 * r
        return whole + b * 2 * q

    @property
    def _square(self) -> int:
        """Pairs of tokens per token, of all heads, in the tables of this repository's attention, whose length is rounded up."""
        return self.shape.num_heads * round_up(self.sequence_length, 4) ** 2 // self.sequence_length

    @property
    def _stores_scores(self) -> bool:
        return self.eager_attention or self.shape.soft_caps

    def _mixture_bytes(self, is_full: bool, b: int) -> float:
        """Bytes per token of router and experts, which compute in the dtype of their weights."""
        shape = self.shape
        k, h, f = shape.experts_per_token, shape.hidden_size, shape.expert_size
        e = self.method.weight_bytes if self.program.is_ours else 2
        router = (b * h if is_full else 0) + 8 * shape.num_experts
        return router + k * e * (3 * f + h + ((h + f) if is_full else 0))

    def temporary_bytes(self, autocast: bool) -> float:
        """Bytes per token of gradients on their way through the feed-forward layer, traced on fake tensors."""
        shape, h = self.shape, self.shape.hidden_size
        f = max(shape.intermediate_size if self.num_layers > shape.num_mixtures else 0, shape.shared_size)
        k, size = shape.experts_per_token, shape.expert_size
        post = shape.num_post_norms > 0
        if not self.program.is_ours:
            return 6 * h + 4 * max(f, k * size * 2)
        # Of experts, gradients that are weighted and sorted; then those of gate, up and product, when the last matrix is done
        experts = self.method.weight_bytes * k * max(3 * h, 2 * size - h) + 4 * h if k else 0
        is_full = self.method.rank is None
        # What the normalisation behind the feed-forward layer saved is gone by then, but in 16 bits its casts are not
        if is_full:
            behind = (6 if shape.num_pre_norms else 12) if autocast else -6
            rest = 6.5 * h + 2 * f + behind * h * post if autocast else 4 * h + 8 * f + behind * h * post
        else:
            rest = 9 * h + 8 * f if autocast else 4 * h + 8 * f - 2 * h * post
        rest = max(experts, rest if f else 0)
        if not self._stores_scores:
            return rest
        # Gradients of probabilities and of scores in float32, when what the feed-forward layer and both normalisations behind
        # it and behind attention saved is gone, and in 16 bits the cast probabilities, too
        gone = (8 if autocast else 16) * f + shape.num_post_norms * (8 if is_full else 4) * h
        return max(rest, (6 if autocast else 8) * self._square - gone)

    # -----------------------------------------------------------------------------------------------------------------
    # Memory

    def rows(self, num_samples: int) -> int:
        """Count the tokens of a micro-batch as they are computed: rounded up, one at least to spare, in this repository."""
        tokens = num_samples * self.length
        return round_up(tokens + 1, 6) if self.program.is_ours else tokens

    def head_bytes(self, num_samples: int, autocast: bool) -> tuple[int, int]:
        """Count the bytes of the head at the end of the forward, and in its backward.

        In chunks c <= LOGITS_AT_ONCE logits at once take 8 c, in 16 bits 10 c; the matrix's gradient 4 V h if it is trained,
        its 16-bit copy 2 V h, and the gradient of the hidden states. Whole, m logits take 2 m in 16 bits, 4 m in float32, and
        their log-probabilities and gradient 4 m each, of which three are there at once: 12 m.

        Soft caps of logits are plain operations, computed again in the backward: at the end of the forward the capped ones,
        their quotient and log-probabilities take 12 c, in 16 bits 10 c; in the backward the hyperbolic tangent, the
        log-probabilities and two gradients 16 c, in 16 bits 14 c.
        """
        h, rows, vocab = self.hidden_size, self.rows(num_samples), self.vocab_size
        if self.num_scored:
            return 4 * rows * h, 4 * rows * h
        is_half = autocast or not self.program.is_ours
        is_trained = self.method.rank is None or self.method.trains_outside
        gradient = (4 if self.program.is_ours else 2) * vocab * h * is_trained
        is_cast = autocast and (self.method.matrix_bytes or self.method.weight_bytes) == 4
        copy = (2 if is_cast else self.method.cast_bytes) * vocab * h
        if not self.program.has_chunked_head:
            logits = rows * vocab
            each = self.program.logit_bytes or (12 if is_half else 8)
            return round(each * logits), round(each * logits)
        chunk = min(rows, max(1, LOGITS_AT_ONCE // vocab)) * vocab
        if not self.program.is_ours:
            chunk = rows * vocab  # torchtune cuts the loss only: its 16-bit logits are there as a whole
        each = again = 2 if not self.program.is_ours else 10 if is_half else 8
        if self.program.is_ours and self.shape.soft_caps:
            each, again = (10, 14) if is_half else (12, 16)
        states = 4 * rows * h * (1 if self._recomputes_logits or not self.program.is_ours else 3)
        forward = states + copy + round(each * chunk) + (0 if self._recomputes_logits else gradient)
        if self.program.is_ours and self.shape.soft_caps:
            # The matrix's gradient comes when one gradient of the chunk is left
            backward = states + 4 * rows * h + copy + max(round(again * chunk), 4 * chunk + gradient)
        else:
            logits = copy + round(each * chunk) if self._recomputes_logits else 0
            backward = states + 4 * rows * h + logits + gradient
        return forward, backward

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Count the bytes at the peaks of a micro-batch, in order of time; the first ends the forward.

        End of the forward         16-bit copies of float32 weights; what all layers save, or with gradient checkpointing their
                                   inputs, and what is outside of them; the head
        Backward of the head       the same
        Backward of a layer        the copies (of one layer with gradient checkpointing); what the layers save; with gradient
                                   checkpointing what the largest layer saves; gradients on their way (`temporary_bytes`)
        """
        tokens, shape, method, program = self.rows(num_samples), self.shape, self.method, self.program
        layers = [(count, self.layer_bytes(is_mixture, autocast=autocast)) for is_mixture, count in self._kinds()]
        token = 4 if program.is_ours and method.weight_bytes == 4 else 2
        inputs = token * shape.hidden_size * self.num_layers
        largest = max(size for _, size in layers)
        saved, again = sum(count * size for count, size in layers), 0.0
        # peft adds an adapter's product to the tables of experts before it multiplies by them
        sums, gradient = self._expert_bytes * self._adapts_experts, 0
        if shape.num_mixtures and (method.rank is None or self._adapts_experts):
            gradient = 2 * self._expert_bytes // 3  # of one table, before it is added to what was there
            gradient += 2 * sums // 3 * gradient_checkpointing  # and the table, computed again
        fixed = 0 if gradient_checkpointing else sums * shape.num_mixtures
        if gradient_checkpointing and program.recomputed == "all":
            saved, again = inputs * (not program.offloads_inputs), largest
        elif gradient_checkpointing:  # selective: layers' inputs, every second matmul's output, attention's output
            kept = 4 * shape.hidden_size + 2 * shape.queries + 2 * shape.values + 2 * shape.keys
            saved, again = self.num_layers * (kept + 2 * shape.intermediate_size), largest
        outside = self._outside_bytes(autocast) * tokens
        forward_head, backward_head = self.head_bytes(num_samples, autocast)
        caches = self._caches(autocast, gradient_checkpointing)
        temporary = self.temporary_bytes(autocast) * tokens
        working = self._dequantized_bytes()
        if (
            method.rank is None and program.is_ours
        ):  # the gradient of the largest matrix, before it is added to what was there
            gradient += (2 if autocast else 4) * shape.hidden_size * max(shape.intermediate_size, shape.expert_size)
        layer_head = 0
        if shape.tied_head and method.rank is None and not self.num_scored:
            layer_head = (4 if program.is_ours else 2) * self.vocab_size * shape.hidden_size
        return (
            Peak(caches[0], round(saved * tokens + outside) + fixed, forward_head, working),
            Peak(caches[1], round(saved * tokens + outside) + fixed, backward_head, working),
            Peak(caches[2], round((saved + again) * tokens + temporary) + fixed + gradient, layer_head, working),
        )

    def last_peak(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> Peak:
        """Count the bytes of `peaks` in the backward of the first layer, the last one to be computed."""
        tokens = self.rows(num_samples)
        layer = max(self.layer_bytes(is_mixture, autocast=autocast) for is_mixture, _ in self._kinds())
        cache = self._caches(autocast, gradient_checkpointing)[2]
        return Peak(cache, round((layer + self.temporary_bytes(autocast)) * tokens), 0, self._dequantized_bytes())

    def _dequantized_bytes(self) -> int:
        """Bytes of the copy of the largest matrix while it is multiplied; of one in 4 bits with its absolute scales."""
        largest = max(linear.width * linear.out for linear in self._all_linears())
        return round(largest * (2 + 4 / NF4_BLOCK if self.method.is_quantized else self.method.cast_bytes))

    def _caches(self, autocast: bool, gradient_checkpointing: bool) -> tuple[int, int, int]:
        """Count the bytes of 16-bit copies of weights: autocast keeps those of trained ones to the end of the forward.

        A frozen weight's copy is kept for the backward like an activation. Experts are tables, which autocast does not cast.
        """
        method, shape = self.method, self.shape
        if not autocast or not self.program.is_ours:
            return 0, 0, 0
        cast = 2 if (method.matrix_bytes or method.weight_bytes) == 4 and not method.is_quantized else 0
        matrices = sum(linear.width * linear.out for linear in self._all_linears()) * cast
        matrices += shape.num_mixtures * shape.num_experts * self.hidden_size * cast
        adapters = 2 * self.num_adapter if method.adapter_bytes == 4 else 0
        layer = max(
            sum(linear.width * linear.out for linear in shape.linears(is_mixture)) for is_mixture, _ in self._kinds()
        )
        one_layer = layer * cast + (adapters // max(1, self.num_layers))
        if not gradient_checkpointing:
            return (matrices + adapters,) * 3
        kept = matrices if method.rank is None else adapters
        return kept, 0, one_layer

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes of `peaks` where FSDP2 shards the weights, a unit per layer and one for what is outside.

        Gathered are two layers (the one computed and the next, fetched ahead), what is outside, and in the backward a layer's
        gradient, whole, and in float32 (in 16 bits where all is) while it is reduced. Adapters are gathered, too; weights in
        4 bits as they are kept.
        """
        peaks = self.peaks(num_samples, autocast=autocast, gradient_checkpointing=gradient_checkpointing)
        w, method = gathered_bytes, self.method
        is_mixture = self.shape.num_mixtures > 0
        size, outside = self.shape.layer_parameters(is_mixture) + self._layer_adapter(is_mixture), self.num_outside
        layer = self.layer_weight_bytes(is_mixture) if method.is_quantized else w * size
        trained = size if method.rank is None else self._layer_adapter(is_mixture)
        trained_outside = outside if method.rank is None or method.trains_outside else 0
        forward, head, backward = peaks
        caches = [0 if w == 2 else peak.autocast_cache for peak in peaks]
        # What is outside is whole all the time, or, in units of its own, the head only while it is computed
        matrix = self.vocab_size * self.hidden_size
        whole, whole_head = (0, w * matrix) if self.program.shards_outside else (w * outside, w * outside)
        head_gradient = w * (min(matrix, trained_outside) if self.program.shards_outside else trained_outside)
        reduced = 4 if self.program.is_ours or method.weight_bytes == 4 else w  # type of the buffer of a reduction
        return (
            Peak(caches[0], forward.activations, forward.head, round(whole_head + layer + forward.gathered)),
            Peak(caches[1], head.activations, head.head, round(whole_head + 2 * layer + head_gradient + head.gathered)),
            Peak(
                caches[2],
                backward.activations,
                backward.head + (0 if self.program.shards_outside else w * trained_outside),
                round(whole + 2 * layer + (w + reduced) * trained + backward.gathered),
            ),
            Peak(0, 0, 0, round(whole + (w + reduced) * trained_outside + reduced * trained)),
        )
