"""The shape of a decoder-only language model, what of it is trained and how, and the memory and work of a step.

Arithmetic only. Letters: V vocabulary, T tokens of a sequence, h width, q width of all queries, r width of all keys (and of all
values), f width of the feed-forward layer, L layers, e bytes of an activation (4, in 16 bits 2). A layer is RMS normalisation,
rotated queries and keys, a gated feed-forward layer; dense, or a mixture of experts.
"""

import dataclasses
import functools
from typing import NamedTuple

from samestep.cut.layout import LOGITS_AT_ONCE, round_up
from samestep.recipe.tasks.decoder import ALL_LINEAR
from stepplan.recurrences import UNADAPTED, Linear, Recurrence
from stepplan.transformer import INPUT_AND_OUTPUT, OTHER_ACTIVATIONS, Peak

NF4_BLOCK, NF4_GROUP = 64, 256
"""Weights that share a scale, and scales that share a second one: bitsandbytes' blocksize, and its double quantisation."""


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
    """The architecture of a decoder, or of those of its layers that are equal.

    Layers of several kinds (windows, experts, recurrences in some of them) are a shape of each kind in `layers`. What is said
    of a layer here is then nobody's, but fields of attention are those of the layers that have it.

    Attributes:
        vocab_size: V.
        hidden_size: h.
        num_layers: L.
        layers: shapes of the kinds of layers, each with their number; (): all are equal.
        intermediate_size: f of a dense feed-forward layer, or of experts that every token visits; 0: there is none.
        has_attention: whether a layer has attention.
        recurrence: what is in its place, or beside it (Falcon-H1); None: there is none.
        mixer: name of the module of attention, or of what is in its place.
        num_heads, num_key_heads: heads of queries, and of keys and values.
        head_dim: width of a head.
        tied_head: whether the head is the embedding's matrix.
        qkv_bias: whether queries, keys and values have biases.
        qk_norm: normalisation of queries and keys: none, head (each head) or width (all heads at once).
        num_post_norms: normalisations of what attention and feed-forward layer give back: 0 or 2.
        num_pre_norms: of what they are given: 2 or 0.
        gates_output: whether a sigmoid gates attention's output, from the matrix of the queries (Qwen3-Next).
        is_fused: whether queries, keys and values are one matrix.
        fuses_gate: whether both matrices that feed the activation are one.
        activation: of a feed-forward layer without a gate, fed by one matrix; None: two matrices feed it, one as a gate.
        has_layer_norm: whether normalisations are torch's LayerNorm, which saves its input only; else RMS, in operations.
        expert_tensors: tensors of f per token that an expert saves before its last product.
        copies_scores: whether stored scores are copied once more: beside a sink of each head, or with a bias of distances.
        all_linear: what all-linear adapts of a mixture beside attention: experts (with the router, but no other feed-forward
            layer: peft takes their names for those of tables), router (with all of these, but no table) or linears.
        is_eager: whether attention stores its scores, because transformers has no kernel for it.
        names: our name and theirs, of modules that are called otherwise.
        extra_layer, extra_outside: parameters of a layer, and outside the layers, that the other fields do not count: biases,
            positions.
        soft_caps: whether scores are soft-capped, which no kernel without stored matrices computes here (Gemma 2).
        window: keys that a query sees; None: all.
        num_experts, experts_per_token, expert_size: of a mixture: experts, those that a token visits, their f. 0: dense.
        gates_shared: whether a sigmoid gates the expert that every token visits (Qwen2 with experts).
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
    layers: tuple["Shape", ...] = ()
    has_attention: bool = True
    recurrence: Recurrence | None = None
    mixer: str = "self_attn"
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: str = "none"
    num_post_norms: int = 0
    num_pre_norms: int = 2
    gates_output: bool = False
    is_fused: bool = False
    fuses_gate: bool = False
    activation: str | None = None
    has_layer_norm: bool = False
    expert_tensors: int = 3
    copies_scores: bool = False
    all_linear: str = "experts"
    is_eager: bool = False
    names: tuple[tuple[str, str], ...] = ()
    extra_layer: int = 0
    extra_outside: int = 0
    soft_caps: bool = False
    window: int | None = None
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    gates_shared: bool = False
    latent: Latent | None = None
    max_length: int | None = None
    stored_bytes: int = 4

    @property
    def kinds(self) -> tuple["Shape", ...]:
        """Shapes of layers that are equal, each with their number."""
        return self.layers or (self,)

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
        return sum(layer.num_layers for layer in self.kinds if layer.num_experts)

    @property
    def attention_linears(self) -> list[Linear]:
        """Matrices of a layer's attention."""
        h, q, r = self.hidden_size, self.queries, self.keys
        if self.latent:
            rank, key_rank, rotated, value_dim = self.latent
            plain = self.head_dim - rotated
            first = [Linear("q_a_proj", h, rank, "attention"), Linear("q_b_proj", rank, q, "query_latent")]
            return [
                *(first if rank else [Linear("q_proj", h, q, "attention")]),
                Linear("kv_a_proj_with_mqa", h, key_rank + rotated, "attention"),
                Linear("kv_b_proj", key_rank, self.num_heads * (plain + value_dim), "key_latent"),
                Linear("o_proj", self.values, h, "output"),
            ]
        inner = [
            Linear("q_proj", h, q * (2 if self.gates_output else 1), "attention"),
            Linear("k_proj", h, r, "attention"),
        ]
        inner += [Linear("v_proj", h, r, "attention")]
        if self.is_fused:
            inner = [Linear("qkv_proj", h, q + 2 * r, "attention")]
        return [*inner, Linear("o_proj", q, h, "output")]

    @property
    def feed_forward_linears(self) -> list[Linear]:
        """Matrices of a layer's feed-forward layer, a mixture's experts left out."""
        h, size = self.hidden_size, self.intermediate_size
        if not size:
            return []
        down = Linear("down_proj", size, h, "down")
        rest = [down, Linear("shared_expert_gate", h, 1, "feed_forward")] if self.gates_shared else [down]
        if self.activation:
            return [Linear("up_proj", h, size, "feed_forward"), *rest]
        if self.fuses_gate:
            return [Linear("gate_up_proj", h, 2 * size, "feed_forward"), *rest]
        return [Linear("gate_proj", h, size, "feed_forward"), Linear("up_proj", h, size, "feed_forward"), *rest]

    @functools.cached_property
    def linears(self) -> list[Linear]:
        """Matrices of a layer, a mixture's experts left out: they are tables, to which no adapter is added."""
        names = dict(self.names)
        linears = self.attention_linears if self.has_attention else []
        linears = linears + (self.recurrence.linears(self.hidden_size) if self.recurrence else [])
        return [x._replace(name=names.get(x.name, x.name)) for x in linears + self.feed_forward_linears]

    @property
    def module_names(self) -> list[str]:
        """Names of modules, as `lora_targets` and `modules_to_save` name them."""
        names = {
            f"{'mlp' if linear.source in ('feed_forward', 'down') else layer.mixer}.{linear.name}": 1
            for layer in self.kinds
            for linear in layer.linears
            if linear.source != UNADAPTED
        }
        return [*names, "embed_tokens", "lm_head"]

    @property
    def expert_numbers(self) -> int:
        """Parameters of the matrices of an expert of a mixture."""
        return (2 if self.activation else 3) * self.hidden_size * self.expert_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of a layer that not every token visits."""
        return self.num_experts * self.expert_numbers

    @property
    def norm_parameters(self) -> int:
        """Parameters of a layer's normalisations, and its biases."""
        count = (self.num_pre_norms + self.num_post_norms) * self.hidden_size
        if not self.has_attention:
            return count
        count += {"none": 0, "head": 2 * self.head_dim, "width": self.queries + self.keys}[self.qk_norm]
        if self.latent:
            count += self.latent.query_rank + self.latent.key_rank
        return count + (self.queries + 2 * self.keys) * self.qkv_bias

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        count = sum(linear.size for linear in self.linears) + self.norm_parameters + self.extra_layer
        count += self.recurrence.extra if self.recurrence else 0
        return count + self.num_experts * self.hidden_size + self.expert_parameters

    @property
    def num_outside(self) -> int:
        """Parameters outside the layers: embedding, head, the last normalisation."""
        return self.vocab_size * self.hidden_size * (1 if self.tied_head else 2) + self.hidden_size + self.extra_outside

    @functools.cached_property
    def num_parameters(self) -> int:
        """N, all parameters; a tied head counts once."""
        return sum(layer.num_layers * layer.layer_parameters for layer in self.kinds) + self.num_outside

    @property
    def num_active(self) -> int:
        """Parameters that a token meets: of experts only those that it visits."""
        idle = sum(x.num_layers * (x.num_experts - x.experts_per_token) * x.expert_numbers for x in self.kinds)
        return self.num_parameters - idle


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """The part of a model that is trained, and the bytes in which its weights are kept.

    Attributes:
        rank: of the adapters; None: all weights are trained.
        targets: all-linear, or names of the matrices that get adapters.
        uses_dora: whether the norms of the adapted matrices are trained beside the adapters (DoRA).
        trains_outside: whether embedding and head are trained whole beside adapters.
        matrix_bytes: bytes of a weight of a matrix that is not quantised; of one that is frozen as its files hold it.
        cast_bytes: bytes of a weight of such a matrix in its copy, while it is multiplied; 0: there is none.
        is_quantized: whether frozen matrices of the layers are kept in 4 bits (NF4): half a byte, and scales.
    """

    rank: int | None = None
    targets: tuple[str, ...] = (ALL_LINEAR,)
    uses_dora: bool = False
    trains_outside: bool = False
    matrix_bytes: int = 4
    cast_bytes: int = 0
    is_quantized: bool = False

    weight_bytes = adapter_bytes = 4  # of a number that is trained

    def is_adapted(self, name: str) -> bool:
        """Tell whether a matrix of this name gets an adapter."""
        return self.rank is not None and (
            ALL_LINEAR in self.targets or name in {target.rpartition(".")[2] for target in self.targets}
        )

    @property
    def quantized_bytes(self) -> float:
        """Bytes of a weight in NF4: 4 bits, and a scale for 64 of them, itself a byte and a share of a second scale."""
        return 0.5 + (1 + 4 / NF4_GROUP) / NF4_BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a decoder: how many there are, which are trained, and the bytes that they take.

    Attributes:
        shape: the architecture.
        method: what is trained.
        num_scored: outputs of a head of scores (a reward model); 0: the head scores the vocabulary.
    """

    shape: Shape
    method: Tuning = Tuning()
    num_scored: int = 0

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
    def num_outside(self) -> int:
        """Parameters outside the layers; of a reward model with a head of scores."""
        if not self.num_scored:
            return self.shape.num_outside
        return self.vocab_size * self.hidden_size + self.hidden_size * (1 + self.num_scored) + self.shape.extra_outside

    @property
    def _num_vocabulary(self) -> int:
        """Parameters of embedding and head over the vocabulary; a tied head counts once."""
        return self.vocab_size * self.hidden_size * (1 if self.shape.tied_head or self.num_scored else 2)

    @functools.cached_property
    def num_parameters(self) -> int:
        """N, all weights, frozen ones and adapters too."""
        return self.shape.num_parameters - self.shape.num_outside + self.num_outside + self.num_adapter

    @functools.cached_property
    def num_adapter(self) -> int:
        """Parameters of all adapters, B and A of each matrix, and DoRA's norms."""
        return sum(layer.num_layers * self.count_adapter(layer) for layer in self.shape.kinds)

    @functools.cached_property
    def num_trained(self) -> int:
        """Parameters that have gradients and moments."""
        if self.method.rank is None:
            return self.num_parameters
        return self.num_adapter + self._num_vocabulary * self.method.trains_outside + self.hidden_size * self.num_scored

    @functools.cached_property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        method = self.method
        layers = sum(layer.num_layers * self.layer_weight_bytes(layer) for layer in self.shape.kinds)
        outside = method.weight_bytes * (self.num_outside - self._num_vocabulary)
        outside += (method.weight_bytes if method.trains_outside else method.matrix_bytes) * self._num_vocabulary
        if method.trains_outside:  # peft keeps the frozen ones beside those that it trains
            outside += method.adapter_bytes * (self.num_trained - self.num_adapter)
        return round(layers + outside)

    def layer_weight_bytes(self, layer: Shape) -> float:
        """Count the bytes of a layer's weights as they are kept, adapters included."""
        method = self.method
        matrices = sum(linear.size for linear in layer.linears)
        # Normalisations, biases, routers and experts are no linear layers, which alone are held in fewer bytes
        matrix_bytes = method.quantized_bytes if method.is_quantized else method.matrix_bytes
        adapters = method.adapter_bytes * self.count_adapter(layer)
        return matrices * matrix_bytes + (layer.layer_parameters - matrices) * method.weight_bytes + adapters

    @functools.cached_property
    def linears(self) -> list[Linear]:
        """Matrices of all layers; experts, which are tables, left out."""
        return [linear for layer in self.shape.kinds for linear in layer.linears * layer.num_layers]

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of `linears`."""
        return [(linear.out, linear.width) for linear in self.linears]

    def count_adapter(self, layer: Shape) -> int:
        """Count the parameters of the adapters of a layer."""
        if self.method.rank is None:
            return 0
        rank, dora = self.method.rank, self.method.uses_dora
        count = sum(rank * (linear.width + linear.out) + linear.out * dora for linear in self.list_adapted(layer))
        if (
            layer.num_experts and self.adapts_experts
        ):  # each expert's gate and up together at twice the rank, and the router
            h, f = layer.hidden_size, layer.expert_size
            count += rank * layer.num_experts * (2 * (h + 2 * f) + h + f)
        if layer.num_experts and ALL_LINEAR in self.method.targets and layer.all_linear != "linears":
            count += rank * (self.hidden_size + layer.num_experts)
        return count

    def list_adapted(self, layer: Shape) -> list[Linear]:
        """List the matrices of a layer that get adapters."""
        linears = [x for x in layer.linears if self.method.is_adapted(x.name) and x.source != UNADAPTED]
        # Beside tables of experts peft leaves out layers that are named like them; the gate of a shared expert is not
        return [x for x in linears if not self.adapts_experts or x.out == 1 or x.source not in ("feed_forward", "down")]

    @functools.cached_property
    def adapts_experts(self) -> bool:
        """Whether peft adapts the tables of experts: with all-linear it does, of kinds that it knows."""
        is_all = self.method.rank is not None and ALL_LINEAR in self.method.targets
        return is_all and any(layer.num_experts and layer.all_linear == "experts" for layer in self.shape.kinds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Activations(Weights):
    """The tensors that a decoder's forward saves for its backward.

    Attributes:
        sequence_length: T.
        sequences: sequences of a sample: 1, of a pair 2.
        eager_attention: attention stores its [T, T] matrices.
    """

    sequence_length: int
    sequences: int = 1
    eager_attention: bool = False

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.sequence_length * self.sequences

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in experts' tables, in whose type their tokens are computed, also under autocast."""
        return self.method.weight_bytes

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves for its backward, nothing recomputed, logits excluded."""
        layers = sum(layer.num_layers * self.layer_bytes(layer, autocast=autocast) for layer in self.shape.kinds)
        return round(self.length * (layers + self.outside_bytes))

    @property
    def outside_bytes(self) -> int:
        """Bytes per token of the last normalisation, the last hidden states, and where the chunked head gathers them."""
        return self.hidden_size * (12 if self.method.rank is None else 8)

    def layer_bytes(self, layer: Shape, *, autocast: bool) -> float:
        """Count the bytes per token that a layer saves for its backward, with b = 4, but 2 under autocast, per number.

        normalisations      before a block 4 h each, the input in float32; 4 h more where their weights are trained
        inputs of matmuls   (needed where a matrix is trained or has an adapter) under autocast b width of each, else
                            b width of all that share it
        attention           queries, output b (q + q); keys and values, repeated for all queries, b 2 q
        feed-forward        gate, its activation, up: 3 b f
        adapters            b rank of each
        """
        method, b = self.method, 2 if autocast else 4
        needed = layer.linears if method.rank is None else self.list_adapted(layer)
        total = 4.0 * layer.num_heads * layer.has_attention  # of attention its statistics
        total += b * (method.rank or 0) * len(needed)
        total += sum(2 * b * x.out for x in needed) * method.uses_dora  # what both factors of the norm's gradient are
        total += self.input_bytes(needed, layer, autocast)
        if layer.num_experts:
            total += self._mixture_bytes(layer, b)
        total += self.norm_bytes(layer, b) + self.gate_bytes(b) * layer.intermediate_size
        if layer.recurrence:
            total += layer.recurrence.saved_bytes(b, self.sequence_length, method.rank is None)
        return total + (self.attention_bytes(layer, b) if layer.has_attention else 0)

    def input_bytes(self, needed: list[Linear], layer: Shape, autocast: bool) -> int:
        """Count the bytes per token of the inputs that matrices need for their gradients.

        Autocast casts the input of each matrix anew, even where several share it: it keeps casts of weights only.
        """
        inputs = needed if autocast else {x.source: x for x in needed}.values()
        return (2 if autocast else 4) * sum(x.width for x in inputs)

    def norm_bytes(self, layer: Shape, b: int) -> int:
        """Count the bytes per token of a layer's normalisations, which compute in float32."""
        is_full = self.method.rank is None
        # The input for the input's gradient, what it is scaled to for the weight's, and a statistic
        each = 8 if is_full and not layer.has_layer_norm else 4
        total = (layer.num_pre_norms + layer.num_post_norms) * (each * layer.hidden_size + 4)
        if layer.qk_norm != "none" and layer.has_attention:
            # Llama's kind casts before its weight, Gemma's and OLMo's after it
            is_cast_first = layer.qk_norm == "head" and not layer.num_post_norms
            total += (4 + (b if is_cast_first else 4) * is_full) * (layer.queries + layer.keys)
        return total

    def attention_bytes(self, layer: Shape, b: int) -> int:
        """Count the bytes per token of queries, keys, values, output, and where they are stored, of the [T, T] matrices."""
        if layer.latent:
            return b * (2 * layer.queries + 2 * layer.values)
        whole = b * (layer.queries + layer.values)
        if (
            layer.gates_output
        ):  # its sigmoid, what it multiplies, and where nothing is cast, the gate beside the queries
            whole += (2 if b == 2 else 3) * b * layer.queries
        if self.stores_scores:
            # Probabilities; of soft caps the hyperbolic tangent, and a copy of some kinds
            pairs = b * (1 + layer.soft_caps + layer.copies_scores)
            return whole + b * 2 * layer.keys + self._square * pairs
        return whole + b * 2 * (layer.queries if layer.num_heads > layer.num_key_heads else layer.keys)

    def gate_bytes(self, b: int) -> int:
        """Count the bytes per token and unit of f: gate, its activation, and up."""
        if self.shape.activation is None:
            return 3 * b
        return OTHER_ACTIVATIONS.get(self.shape.activation, INPUT_AND_OUTPUT)[b == 2]

    @property
    def _square(self) -> int:
        """Pairs of tokens per token, of all heads, in the tables of this repository's attention, whose length is rounded up."""
        return self.shape.num_heads * round_up(self.sequence_length, 4) ** 2 // self.sequence_length

    @property
    def stores_scores(self) -> bool:
        return self.eager_attention or self.shape.soft_caps or self.shape.is_eager

    def _mixture_bytes(self, layer: Shape, b: int) -> int:
        """Count the bytes per token of router and experts."""
        k, h, f = layer.experts_per_token, layer.hidden_size, layer.expert_size
        is_full = self.method.rank is None or self.adapts_experts
        router = (b * h if is_full else 0) + 8 * layer.num_experts  # its scores, and their softmax in float32
        return router + k * self.number_bytes * (layer.expert_tensors * f + h + ((h + f) if is_full else 0))

    def temporary_bytes(self, layer: Shape, autocast: bool) -> float:
        """Count the bytes per token of gradients on their way through a layer, traced on fake tensors."""
        h, f, is_full = layer.hidden_size, layer.intermediate_size, self.method.rank is None
        k, size = layer.experts_per_token, layer.expert_size
        # Of experts, gradients that are weighted and sorted; then those of gate, up and product, when the last matrix is done
        experts = self.number_bytes * k * max(3 * h, 2 * size - h) + 4 * h if k else 0
        post = h * (layer.num_post_norms > 0)
        # What the normalisation behind the feed-forward layer saved is gone by then, but in 16 bits its casts are not
        if is_full and autocast:
            rest = 6.5 * h + 2 * f + (6 if layer.num_pre_norms else 12) * post
        elif autocast:
            rest = 9 * h + 8 * f
        else:
            rest = 4 * h + 8 * f - (6 if is_full else 2) * post
        rest = max(experts, rest if f else 0)
        if layer.recurrence:
            rest = max(rest, layer.recurrence.temporary_bytes(2 if autocast else 4, self.sequence_length, is_full))
        if not self.stores_scores or not layer.has_attention:
            return rest
        # Gradients of probabilities and of scores in float32, when what the feed-forward layer and both normalisations behind
        # it and behind attention saved is gone, and in 16 bits the cast probabilities, too
        gone = (8 if autocast else 16) * f + layer.num_post_norms * (8 if is_full else 4) * h
        return max(rest, (6 if autocast else 8) * self._square - gone)

    def count_in_layer(self, *, autocast: bool, recomputed: bool) -> float:
        """Count the bytes per token at the peak of a layer's backward, beside what other layers save.

        Args:
            autocast: in 16 bits.
            recomputed: whether the layer's own tensors are computed again now, not saved.
        """
        return max(
            self.temporary_bytes(layer, autocast) + recomputed * self.layer_bytes(layer, autocast=autocast)
            for layer in self.shape.kinds
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder(Activations):
    """A decoder in training, in the words of the planner's other models.

    Attributes:
        recomputes_head: whether logits are computed again in the backward (objectives of pairs).
        kernels: eager or compiled, which chooses the traffic of timing.CALIBRATION.
        attention_kernel: as of `timing.Attention`.
    """

    recomputes_head: bool = False
    kernels: str = "eager"
    attention_kernel: str | None = None

    unit = "token"
    has_equal_layers = True
    is_causal = True

    @property
    def kernels_per_layer(self) -> int:
        """Kernels of a layer's forward and backward, none fused: about 180, counted on fake tensors; 95 more of 7 adapters."""
        if self.method.rank is None:
            return 180
        return 180 + round(95 / 7 * sum(self.method.is_adapted(x.name) for x in self.shape.kinds[0].linears))

    # -----------------------------------------------------------------------------------------------------------------
    # Work

    @property
    def num_logits(self) -> int:
        """Logits of a sample; of an objective of pairs twice, as they are computed twice."""
        return 0 if self.num_scored else self.length * self.vocab_size * (2 if self._recomputes_logits else 1)

    @property
    def _recomputes_logits(self) -> bool:
        """Whether the head computes logits again in the backward: of pairs, and where they are soft-capped."""
        return self.recomputes_head or self.shape.soft_caps

    @property
    def forward_flops(self) -> int:
        """FLOPs of the forward of a sample: each multiply-add counts as two, each matrix once, attention in full.

        Attention of all pairs of tokens, not only of the causal half: kernels compute the half at about half the rate of
        matmuls. Within a window W a query is counted for 2 W - W^2 / T keys.
        """
        # The embedding is looked up, never multiplied; of experts only those that a token visits are
        head = self.hidden_size * (self.num_scored or self.vocab_size)
        matrices = sum(linear.size for linear in self.linears) + head + self._num_routers + self._num_visited
        return round(self.length * (2 * matrices + 2 * self.num_adapter) + self.attention_flops / 3)

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's products, forward and backward: see `forward_flops`."""
        t, total = self.sequence_length, 0.0
        for layer in self.shape.kinds:
            seen: float = t
            if layer.window is not None and layer.window < t:
                seen = 2 * layer.window - layer.window**2 / t
            flops = 2 * (layer.queries + layer.values) * seen * layer.has_attention
            total += layer.num_layers * (flops + (layer.recurrence.flops(t) if layer.recurrence else 0))
        return 3 * self.length * total

    @property
    def head_size(self) -> int:
        """Width of a head's queries."""
        return self.shape.queries // self.shape.num_heads

    @property
    def _num_routers(self) -> int:
        """Parameters of all routers."""
        return sum(layer.num_layers * layer.num_experts * self.hidden_size for layer in self.shape.kinds)

    @property
    def _num_visited(self) -> int:
        """Parameters of all experts that a token visits."""
        return sum(x.num_layers * x.experts_per_token * x.expert_numbers for x in self.shape.kinds)

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward: a frozen matrix has no gradient of its own, so its backward is one product, not two.

        Attention's backward is two forwards, adapted or not.
        """
        forward = self.forward_flops
        if self.method.rank is None:
            return 3 * forward
        frozen = sum(linear.size for linear in self.linears) + self._num_visited
        if not self.method.trains_outside and not self.num_scored:
            frozen += self.vocab_size * self.hidden_size
        return 3 * forward - 2 * self.length * frozen

    @property
    def forward_share(self) -> float:
        """The forward's part of all FLOPs: what recomputing adds."""
        return self.forward_flops / self.flops_per_sample

    def traffic_bytes(self, *, autocast: bool) -> int:
        """Count the bytes by which the traffic of element-wise kernels is measured: `saved_bytes`, all trained, none fused."""
        method = dataclasses.replace(self.method, rank=None, uses_dora=False, is_quantized=False)
        return dataclasses.replace(self, method=method, kernels="eager").saved_bytes(autocast=autocast)

    # -----------------------------------------------------------------------------------------------------------------
    # Memory

    def rows(self, num_samples: int) -> int:
        """Count the tokens of a micro-batch as they are computed: rounded up, one at least to spare."""
        return round_up(num_samples * self.length + 1, 6)

    def head_bytes(self, num_samples: int, autocast: bool) -> tuple[int, int]:
        """Count the bytes of the head at the end of the forward, and in its backward.

        c <= LOGITS_AT_ONCE logits at once take 8 c, under autocast 10 c; the matrix's gradient 4 V h if it is trained, its
        16-bit copy 2 V h, and the gradient of the hidden states.

        Soft caps of logits are plain operations, computed again in the backward: at the end of the forward the capped ones,
        their quotient and log-probabilities take 12 c, in 16 bits 10 c; in the backward the hyperbolic tangent, the
        log-probabilities and two gradients 16 c, in 16 bits 14 c.
        """
        h, rows, vocab, method = self.hidden_size, self.rows(num_samples), self.vocab_size, self.method
        if self.num_scored:
            return 4 * rows * h, 4 * rows * h
        gradient = 4 * vocab * h * (method.rank is None or method.trains_outside)
        copy = (2 if autocast and method.matrix_bytes == 4 else method.cast_bytes) * vocab * h
        chunk = min(rows, max(1, LOGITS_AT_ONCE // vocab)) * vocab
        if self.shape.soft_caps:
            each, again = (10, 14) if autocast else (12, 16)
            states = 4 * rows * h + copy
            # The matrix's gradient comes when one gradient of the chunk is left
            return states + each * chunk, states + 4 * rows * h + max(again * chunk, 4 * chunk + gradient)
        logits = copy + (10 if autocast else 8) * chunk
        if self._recomputes_logits:
            return 4 * rows * h + logits, 8 * rows * h + logits + gradient
        return 12 * rows * h + logits + gradient, 16 * rows * h + gradient

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Count the bytes at the peaks of a micro-batch, in order of time; the first ends the forward.

        End of the forward         16-bit copies of float32 weights; what all layers save, or with gradient checkpointing their
                                   inputs, and what is outside of them; the head
        Backward of the head       the same
        Backward of a layer        the copies (of one layer with gradient checkpointing); what the layers save; with gradient
                                   checkpointing what the largest layer saves; gradients on their way (`temporary_bytes`)
        """
        tokens, shape, is_full = self.rows(num_samples), self.shape, self.method.rank is None
        saved = sum(layer.num_layers * self.layer_bytes(layer, autocast=autocast) for layer in shape.kinds)
        if gradient_checkpointing:  # the inputs stay float32, also under autocast, as the residual stream does
            saved = 4 * shape.hidden_size * self.num_layers
        fixed, gradient = self._expert_sums(gradient_checkpointing)
        if is_full:  # the gradient of the largest matrix, before it is added to what was there
            gradient += (
                (2 if autocast else 4)
                * shape.hidden_size
                * max(max(layer.intermediate_size, layer.expert_size) for layer in shape.kinds)
            )
        outside = round(saved * tokens + self.outside_bytes * tokens) + fixed
        in_layer = self.count_in_layer(autocast=autocast, recomputed=gradient_checkpointing)
        in_layer = round((saved + in_layer) * tokens) + fixed + gradient
        heads = self.head_bytes(num_samples, autocast)
        caches, working = self._caches(autocast, gradient_checkpointing), self.dequantized_bytes
        waiting = 4 * self.vocab_size * shape.hidden_size * (shape.tied_head and is_full and not self.num_scored)
        return (
            Peak(caches[0], outside, heads[0], working),
            Peak(caches[1], outside, heads[1], working),
            Peak(caches[2], in_layer, waiting, working),
        )

    def _expert_sums(self, gradient_checkpointing: bool) -> tuple[int, int]:
        """Count the bytes of tables of experts beside their weights: those that are kept, and those of a layer's backward.

        peft adds an adapter's product to a table before it multiplies by it.
        """
        tables = max(layer.expert_parameters for layer in self.shape.kinds) * self.number_bytes
        sums, gradient = tables * self.adapts_experts, 0
        if tables and (self.method.rank is None or self.adapts_experts):
            gradient = 2 * tables // 3  # of one table, before it is added to what was there
            gradient += 2 * sums // 3 * gradient_checkpointing  # and the table, computed again
        return 0 if gradient_checkpointing else sums * self.shape.num_mixtures, gradient

    @property
    def dequantized_bytes(self) -> int:
        """Bytes of the copy of the largest matrix while it is multiplied; of one in 4 bits with its absolute scales."""
        largest = max(linear.size for linear in self.linears)
        return round(largest * (2 + 4 / NF4_BLOCK if self.method.is_quantized else self.method.cast_bytes))

    def _caches(self, autocast: bool, gradient_checkpointing: bool) -> tuple[int, int, int]:
        """Count the bytes of 16-bit copies of weights: autocast keeps those of trained ones to the end of the forward.

        A frozen weight's copy is kept for the backward like an activation. Experts are tables, which autocast does not cast.
        """
        method = self.method
        if not autocast:
            return 0, 0, 0
        cast = 2 if method.matrix_bytes == 4 and not method.is_quantized else 0
        matrices = (sum(linear.size for linear in self.linears) + self._num_routers) * cast
        adapters = 2 * self.num_adapter if method.adapter_bytes == 4 else 0
        if not gradient_checkpointing:
            return (matrices + adapters,) * 3
        layer = max(sum(linear.size for linear in layer.linears) for layer in self.shape.kinds)
        return matrices if method.rank is None else adapters, 0, layer * cast + adapters // self.num_layers

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes of `peaks` where FSDP2 shards the weights, a unit per layer and one for what is outside.

        Gathered are two layers (the one computed and the next, fetched ahead), what is outside, and in the backward a layer's
        gradient, whole, and in float32 while it is reduced. Adapters are gathered, too; weights in 4 bits as they are kept.
        """
        peaks = self.peaks(num_samples, autocast=autocast, gradient_checkpointing=gradient_checkpointing)
        w, (layer, trained, trained_outside) = gathered_bytes, self.count_gathered(gathered_bytes)
        forward, head, backward = peaks
        caches = [
            0 if w == 2 else peak.autocast_cache for peak in peaks
        ]  # what is gathered in 16 bits is not cast again
        outside, gradient = w * self.num_outside, w * trained_outside
        in_layer = round(outside + 2 * layer + (w + 4) * trained + backward.gathered)
        return (
            Peak(caches[0], forward.activations, forward.head, round(outside + layer + forward.gathered)),
            Peak(caches[1], head.activations, head.head, round(outside + 2 * layer + gradient + head.gathered)),
            Peak(caches[2], backward.activations, backward.head + gradient, in_layer),
            Peak(0, 0, 0, round(outside + (w + 4) * trained_outside + 4 * trained)),
        )

    def count_gathered(self, gathered_bytes: int) -> tuple[float, int, int]:
        """Count the bytes of a gathered layer, and the trained parameters of a layer and outside the layers."""
        method = self.method
        largest = max(self.shape.kinds, key=lambda layer: layer.layer_parameters)
        adapter = self.count_adapter(largest)
        size = largest.layer_parameters + adapter
        layer = self.layer_weight_bytes(largest) if method.is_quantized else gathered_bytes * size
        is_full = method.rank is None
        return layer, size if is_full else adapter, self.num_outside * (is_full or method.trains_outside)
