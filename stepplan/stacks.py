"""Stacks of equal layers: the encoder and decoder of a sequence-to-sequence model, the tower of one that reads pictures.

Arithmetic only. Letters: h width, q width of all queries, f width of the feed-forward layer, T tokens of a sample in the stack,
S tokens of a sample that cross-attention sees. Pairs of numbers are for float32 and for autocast.
"""

import dataclasses
from typing import NamedTuple

from samestep.cut.layout import LOGITS_AT_ONCE
from stepplan.decoder import Tuning
from stepplan.transformer import INPUT_AND_OUTPUT, OTHER_ACTIVATIONS, Peak


class Matrix(NamedTuple):
    """A matrix of a layer.

    Attributes:
        name: of its module, as adapters name it.
        width, out: numbers that come in, and that go out.
        tokens: of a sample that it multiplies.
        reads: what comes in: numbers that several matrices share.
    """

    name: str
    width: int
    out: int
    tokens: int
    reads: str

    @property
    def size(self) -> int:
        """Number of its weights."""
        return self.width * self.out


NAMES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2", "fc3")
"""Names of a layer's modules: queries, keys, values, output, those of the feed-forward layer, the last one of its gate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Equal layers, one behind the other, and the tokens of a sample that they compute.

    Attributes:
        hidden_size: h.
        num_layers: layers.
        intermediate_size: f.
        num_heads, head_dim: of attention.
        tokens: T.
        source_tokens: S; 0: there is no cross-attention.
        seen: tokens that a token sees in self-attention, on average; None: all.
        is_gated: whether a second matrix gates the feed-forward layer.
        activation: of the feed-forward layer.
        has_rms: whether normalisations are RMS, in operations; else torch's LayerNorm.
        has_query_bias, has_key_bias, has_biases: whether queries and values, keys, all other matrices have biases.
        is_fused: whether queries, keys and values are one matrix.
        extra_layer: parameters of a layer that the other fields do not count.
        num_outside: parameters outside the layers: positions, a stem, normalisations.
        num_unreached: parameters, of all, that no loss reaches, so that they are not trained: a head that nobody asks.
        outside_flops: of a sample's forward outside the layers.
        input_flops: those of them that read what needs no gradient: pixels, spectrograms.
        outside_bytes: bytes that a sample saves outside the layers.
        dropouts, activation_dropout, attention_dropout: whether there is such a dropout, which keeps a mask.
        has_score_bias: whether self-attention adds a bias of distances to its scores, which are stored, in float32.
        is_padded: whether that bias has a mask of each sample's padding in it.
        stores_scores: whether all attention stores its matrices, as eager attention does.
        is_trained: whether its weights are; a stack that is neither trained nor adapted saves nothing,
        passes_gradient: unless the gradient goes through it to what is trained below.
        method: adapters on it; None: there are none.
        names: of its modules, as `NAMES`.
    """

    hidden_size: int
    num_layers: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    tokens: int
    source_tokens: int = 0
    seen: float | None = None
    is_gated: bool = False
    activation: str = "gelu"
    has_rms: bool = False
    has_query_bias: bool = True
    has_key_bias: bool = True
    has_biases: bool = True
    is_fused: bool = False
    extra_layer: int = 0
    num_outside: int = 0
    num_unreached: int = 0
    outside_flops: int = 0
    input_flops: int = 0
    outside_bytes: tuple[int, int] = (0, 0)
    dropouts: bool = False
    activation_dropout: bool = False
    attention_dropout: bool = False
    has_score_bias: bool = False
    is_padded: bool = False
    stores_scores: bool = False
    is_trained: bool = True
    passes_gradient: bool = False
    method: Tuning | None = None
    names: tuple[str, ...] = NAMES

    @property
    def queries(self) -> int:
        """q."""
        return self.num_heads * self.head_dim

    @property
    def num_attentions(self) -> int:
        """Attentions of a layer, that of the source included."""
        return 1 + (self.source_tokens > 0)

    @property
    def matrices(self) -> list[Matrix]:
        """List the matrices of a layer."""
        h, q, f, t, names = self.hidden_size, self.queries, self.intermediate_size, self.tokens, self.names
        inner = [Matrix(name, h, q, t, "states") for name in names[:3]]
        listed = [Matrix("qkv", h, 3 * q, t, "states")] if self.is_fused else inner
        listed.append(Matrix(names[3], q, h, t, "output"))
        if self.source_tokens:
            listed.append(Matrix(names[0], h, q, t, "cross states"))
            listed += [Matrix(name, h, q, self.source_tokens, "source") for name in names[1:3]]
            listed.append(Matrix(names[3], q, h, t, "cross output"))
        listed += [Matrix(names[4], h, f, t, "middle"), Matrix(names[5], f, h, t, "down")]
        return listed + ([Matrix(names[6], h, f, t, "middle")] if self.is_gated else [])

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, its matrices, biases and normalisations, without adapters."""
        h, q, f = self.hidden_size, self.queries, self.intermediate_size
        biases = self.num_attentions * (2 * q * self.has_query_bias + q * self.has_key_bias + h * self.has_biases)
        biases += (f * (1 + self.is_gated) + h) * self.has_biases
        norms = (1 + self.num_attentions) * h * (1 if self.has_rms else 2)
        return sum(matrix.size for matrix in self.matrices) + biases + norms + self.extra_layer

    @property
    def num_base(self) -> int:
        """Parameters without adapters."""
        return self.num_layers * self.layer_parameters + self.num_outside

    @property
    def adapted(self) -> list[Matrix]:
        """List the matrices of a layer that get adapters."""
        return [matrix for matrix in self.matrices if self.method is not None and self.method.is_adapted(matrix.name)]

    @property
    def layer_adapter(self) -> int:
        """Parameters of the adapters of a layer."""
        if self.method is None or self.method.rank is None:
            return 0
        rank, dora = self.method.rank, self.method.uses_dora
        return sum(rank * (matrix.width + matrix.out) + matrix.out * dora for matrix in self.adapted)

    @property
    def num_adapter(self) -> int:
        """Parameters of all adapters."""
        return self.num_layers * self.layer_adapter

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients."""
        return self.num_adapter + (self.num_base - self.num_unreached) * self.is_trained

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept: matrices of layers as the method says, all else in float32."""
        matrices = self.num_layers * sum(matrix.size for matrix in self.matrices)
        size = 4.0
        if self.method is not None and not self.is_trained:
            size = self.method.quantized_bytes if self.method.is_quantized else self.method.matrix_bytes
        return round(matrices * size + 4 * (self.num_base - matrices + self.num_adapter))

    @property
    def is_passed(self) -> bool:
        """Whether the backward goes through the layers."""
        return self.is_trained or self.num_adapter > 0 or self.passes_gradient

    # -----------------------------------------------------------------------------------------------------------------
    # Work

    @property
    def attention_flops(self) -> float:
        """FLOPs of the products of queries, keys and values in the forward of a sample."""
        seen = (self.tokens if self.seen is None else self.seen) + self.source_tokens
        return 4 * self.num_layers * self.tokens * self.queries * seen

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward of a sample: each multiply-add counts as two."""
        layer = sum(2 * matrix.tokens * matrix.size for matrix in self.matrices)
        adapters = sum(2 * x.tokens * (self.method.rank or 0) * (x.width + x.out) for x in self.adapted if self.method)
        return self.num_layers * (layer + adapters) + self.attention_flops + self.outside_flops

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward: a frozen matrix has no gradient of its own."""
        if not self.is_passed:
            return self.forward_flops
        frozen = 0 if self.is_trained else sum(2 * matrix.tokens * matrix.size for matrix in self.matrices)
        return 3 * self.forward_flops - self.num_layers * frozen - self.input_flops

    # -----------------------------------------------------------------------------------------------------------------
    # Memory

    def layer_bytes(self, *, autocast: bool) -> float:
        """Count the bytes that a layer saves of a sample for its backward, with b = 4, but 2 under autocast, per number.

        normalisations      4 h each, the input in float32; RMS of a trained weight 4 h more
        inputs of matmuls   under autocast b width of each, which casts for each matrix anew, else 4 width of all that share it;
                            of the encoder's states nothing in float32, as they are kept once
        attention           queries and output b 2 q, keys and values b 2 q of each token that they are of
        feed-forward        activation b f or more; of a gate b 2 f more; its dropout b f more where the activation keeps its
                            output
        dropouts            a mask of a byte
        scores              of each pair of tokens and head, where they are stored
        """
        if not self.is_passed:
            return 0.0
        t, h, q, f, b = self.tokens, self.hidden_size, self.queries, self.intermediate_size, 2 if autocast else 4
        norms = (8 if self.has_rms and self.is_trained else 4) * h + (4 if self.has_rms else 8)
        total: float = t * norms * (1 + self.num_attentions)
        needed = self.matrices if self.is_trained else self.adapted
        needed = [x for x in needed if x.reads not in ("output", "cross output", "down")]  # what the layer keeps anyway
        inputs = needed if autocast else list({x.reads: x for x in needed if x.reads != "source"}.values())
        total += b * sum(x.tokens * x.width for x in inputs)
        rank = self.method.rank or 0 if self.method is not None else 0
        total += b * sum(x.tokens * (rank + 2 * x.out * self.method.uses_dora) for x in self.adapted if self.method)
        total += b * q * (4 * t + (2 * t + 2 * self.source_tokens) * (self.source_tokens > 0))
        total += t * f * (OTHER_ACTIVATIONS.get(self.activation, INPUT_AND_OUTPUT)[autocast] + 2 * b * self.is_gated)
        # The dropout's output is what the last matrix needs; before it an activation may keep its own, too
        total += t * f * self.activation_dropout * (1 + b * (self.activation == "relu" and not self.is_gated))
        # T5 casts a relu's output to the type of the last matrix, which autocast casts back: a copy, as of a dropout
        is_copied = autocast and self.has_rms and self.activation == "relu" and not self.is_gated
        total += b * t * f * (is_copied and self.is_trained and not self.activation_dropout)
        total += t * h * self.dropouts * (1 + self.num_attentions)
        return total + self.score_bytes(autocast)

    @property
    def bias_bytes(self) -> int:
        """Bytes of a sample's bias of scores in float32, with its mask, which all layers share; 0: it is no sample's own."""
        return 4 * self.num_heads * self.tokens**2 * (self.has_score_bias and self.is_padded)

    def score_bytes(self, autocast: bool) -> float:
        """Count the bytes of a layer's stored matrices of scores, of a sample."""
        if not self.stores_scores:
            total = 4.0 * self.tokens * self.num_heads * self.num_attentions  # statistics of the kernel
            if self.has_score_bias and self.is_trained:  # in float32 queries, keys and values, too
                total += self.tokens * (4 * self.num_heads * self.tokens + 6 * self.queries * autocast)
            elif self.has_score_bias:  # a bias that needs no gradient goes to the kernel
                total += self.bias_bytes / (2 if autocast else 1)
            return total
        pairs = self.num_heads * self.tokens * (self.tokens + self.source_tokens)
        each = 6 if autocast else 4 + 4 * self.attention_dropout
        return pairs * (each + self.attention_dropout)

    def saved_bytes(self, *, autocast: bool) -> float:
        """Count the bytes that a sample saves in the whole stack, nothing recomputed."""
        outside = self.outside_bytes[autocast] if self.is_passed else 0
        return self.num_layers * self.layer_bytes(autocast=autocast) + outside

    def kept_bytes(self, *, autocast: bool) -> float:
        """Count what stays of `saved_bytes` where layers are computed again: the input of each."""
        outside = self.outside_bytes[autocast] if self.is_passed else 0
        states = 4 * self.num_layers * self.tokens * self.hidden_size
        return (states + self.bias_bytes) * self.is_passed + outside

    def temporary_bytes(self, *, autocast: bool) -> float:
        """Count the bytes of gradients of a sample on their way through a layer, as of `transformer._layer`."""
        if not self.is_passed:
            return 0.0
        h, f = self.hidden_size, self.intermediate_size * (1 + self.is_gated)
        feed_forward = self.tokens * (6 * h + 2 * f if autocast else 4 * h + 4 * f)
        pairs = self.num_heads * self.tokens * max(self.tokens, self.source_tokens * self.stores_scores)
        pairs *= self.stores_scores or (self.has_score_bias and self.is_trained)
        # When attention's gradients are the most, what the feed-forward layer saved is gone
        gone = self.tokens * f * OTHER_ACTIVATIONS.get(self.activation, INPUT_AND_OUTPUT)[autocast]
        return max(feed_forward, pairs * (6 if autocast else 8) - gone)

    def count_cast(self) -> int:
        """Count the weights that autocast casts, and keeps to the end of the forward, or for the backward."""
        size = 4 if self.method is None else self.method.matrix_bytes
        matrices = sum(matrix.size for matrix in self.matrices) if size == 4 else 0
        return self.num_layers * (matrices + self.layer_adapter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderDecoder:
    """An encoder and a decoder in training, in the words of the planner's other models.

    Attributes:
        encoder, decoder: its stacks.
        vocab_size: V; the head is the embedding of both stacks.
        num_head: parameters of embedding and head.
        chunked_head: whether the head is `losses.linear_cross_entropy`; else all logits are there at once.
        kernels: eager or compiled, which chooses the traffic of timing.CALIBRATION.
        attention_kernel: as of `timing.Attention`.
        eager_attention: attention stores its matrices, though a kernel could take them.
    """

    encoder: Stack
    decoder: Stack
    vocab_size: int
    num_head: int
    chunked_head: bool = False
    kernels: str = "eager"
    attention_kernel: str | None = None
    eager_attention: bool = False

    unit = "token"
    has_equal_layers = True
    is_causal = False

    @property
    def kernels_per_layer(self) -> int:
        """Kernels of a layer's forward and backward, none fused, counted on fake tensors: of BART 66, of T5 156 and 181."""
        return (156 + 25 * self.decoder.is_gated) if self.decoder.has_rms else 66

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """The encoder and the decoder, which store their scores where attention is eager."""
        if not self.eager_attention:
            return self.encoder, self.decoder
        encoder, decoder = (dataclasses.replace(x, stores_scores=True) for x in (self.encoder, self.decoder))
        return encoder, decoder

    @property
    def stores_scores(self) -> bool:
        """Whether a stack stores its scores."""
        return any(stack.stores_scores or stack.has_score_bias for stack in self.stacks)

    @property
    def is_full(self) -> bool:
        """Whether the decoder, and so embedding and head, are trained whole."""
        return self.decoder.is_trained

    @property
    def num_layers(self) -> int:
        """Layers of both stacks."""
        return self.encoder.num_layers + self.decoder.num_layers

    @property
    def length(self) -> int:
        """Tokens of a sample, of the source and of the target."""
        return self.encoder.tokens + self.decoder.tokens

    @property
    def sequence_length(self) -> int:
        """The longer of both."""
        return max(self.encoder.tokens, self.decoder.tokens)

    @property
    def head_size(self) -> int:
        """Width of a head of attention."""
        return self.decoder.head_dim

    @property
    def hidden_size(self) -> int:
        """h."""
        return self.decoder.hidden_size

    @property
    def num_outside(self) -> int:
        """Parameters outside the layers."""
        return self.num_head + self.encoder.num_outside + self.decoder.num_outside

    @property
    def num_parameters(self) -> int:
        """All parameters, adapters too."""
        return self.num_head + sum(stack.num_base + stack.num_adapter for stack in self.stacks)

    @property
    def num_adapter(self) -> int:
        """Parameters of all adapters."""
        return sum(stack.num_adapter for stack in self.stacks)

    @property
    def num_trained(self) -> int:
        """Parameters that have gradients and moments."""
        return sum(stack.num_trained for stack in self.stacks) + self.num_head * self.is_full

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as they are kept."""
        return 4 * self.num_head + sum(stack.weight_bytes for stack in self.stacks)

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of all layers."""
        return [(x.out, x.width) for stack in self.stacks for x in stack.matrices * stack.num_layers]

    @property
    def num_logits(self) -> int:
        """Logits of a sample."""
        return self.decoder.tokens * self.vocab_size

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward of a sample."""
        return sum(stack.forward_flops for stack in self.stacks) + 2 * self.num_logits * self.hidden_size

    @property
    def flops_per_sample(self) -> int:
        """FLOPs of forward and backward of a sample."""
        head = (6 if self.is_full else 4) * self.num_logits * self.hidden_size
        # States of an encoder that is not passed need no gradient
        needless = sum(2 * x.tokens * x.size for x in self.decoder.matrices if x.reads == "source")
        needless *= self.decoder.num_layers * (not self.encoder.is_passed)
        return round(sum(stack.flops for stack in self.stacks) + head - needless)

    @property
    def forward_share(self) -> float:
        """The forward's part of all FLOPs."""
        return self.forward_flops / self.flops_per_sample

    @property
    def attention_flops(self) -> float:
        """FLOPs of attention's products, forward and backward."""
        return sum(stack.attention_flops * (3 if stack.is_passed else 1) for stack in self.stacks)

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves, logits excluded."""
        return round(sum(stack.saved_bytes(autocast=autocast) for stack in self.stacks) + self._outside_bytes)

    def traffic_bytes(self, *, autocast: bool) -> int:
        """Count the bytes by which the traffic between products is measured: `saved_bytes`, all trained."""
        whole = [dataclasses.replace(stack, is_trained=True, method=None) for stack in self.stacks]
        return dataclasses.replace(self, encoder=whole[0], decoder=whole[1]).saved_bytes(autocast=autocast)

    @property
    def _outside_bytes(self) -> int:
        """Bytes of a sample for the last normalisations and states: the encoder's are kept for all layers of the decoder."""
        return sum(
            stack.tokens * stack.hidden_size * stack.is_passed * (14 if stack.has_rms else 8) for stack in self.stacks
        )

    def _head_bytes(self, num_samples: int, autocast: bool) -> tuple[int, int]:
        """Count the bytes of the head at the end of the forward and in its backward, as `Transformer.peaks` does."""
        h, rows = self.hidden_size, num_samples * self.decoder.tokens
        gradient = 4 * self.vocab_size * h * self.is_full
        if self.chunked_head:
            chunk = min(rows, max(1, LOGITS_AT_ONCE // self.vocab_size)) * self.vocab_size
            gradients = gradient + 4 * rows * h
            return gradients + (10 if autocast else 8) * chunk, gradients
        logits = rows * self.vocab_size
        return (10 if autocast else 8) * logits, max(12 * logits, gradient + (2 if autocast else 4) * logits)

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Count the bytes at the peaks of a micro-batch, in order of time, as `Transformer.peaks` does.

        They are the end of the forward, the backward of the head, that of a layer of the decoder, and that of the encoder's
        last layer, when the decoder's are done.
        """
        encoder, decoder = self.stacks
        options = {"autocast": autocast}
        layers = [stack.layer_bytes(**options) for stack in self.stacks]
        if gradient_checkpointing:
            kept = [stack.kept_bytes(**options) for stack in self.stacks]
        else:
            kept, layers = [stack.saved_bytes(**options) for stack in self.stacks], [0.0, 0.0]
        matrix = 4 * self.vocab_size * self.hidden_size * self.is_full
        cast = 2 * (self.num_head + sum(stack.count_cast() for stack in self.stacks)) if autocast else 0
        layer_cast = max(2 * stack.count_cast() // stack.num_layers for stack in self.stacks) if autocast else 0
        cached = layer_cast if gradient_checkpointing else cast
        heads = self._head_bytes(num_samples, autocast)
        whole = round(num_samples * (sum(kept) + self._outside_bytes))
        in_decoder = num_samples * (sum(kept) + layers[1] + decoder.temporary_bytes(**options))
        in_encoder = num_samples * (kept[0] + layers[0] + encoder.temporary_bytes(**options))
        # The gradient of the encoder's states, and of each layer's part, before they are added
        states = 8 * num_samples * encoder.tokens * encoder.hidden_size * encoder.is_passed
        in_decoder += num_samples * self._outside_bytes / 2 + states
        return (
            Peak(cast, whole, heads[0]),
            Peak(2 * self.num_head * autocast if gradient_checkpointing else cast, whole, heads[1]),
            Peak(cached, round(in_decoder), matrix),
            Peak(cached, round(in_encoder + states), matrix),
            Peak(0, 0, (2 if autocast or self.chunked_head else 3) * matrix),
        )

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes of `peaks` where FSDP2 shards the weights, a unit per layer and one for what is outside.

        Gathered are two layers, what is outside, and in the backward a layer's gradient, whole, and in float32 while it is
        reduced, as in `Decoder.sharded_peaks`.
        """
        peaks = self.peaks(num_samples, autocast=autocast, gradient_checkpointing=gradient_checkpointing)
        w = gathered_bytes
        layer = max(stack.layer_parameters + stack.layer_adapter for stack in self.stacks)
        trained = max(stack.layer_parameters * stack.is_trained + stack.layer_adapter for stack in self.stacks)
        outside, gradient = w * self.num_outside, w * self.num_outside * self.is_full
        gathered = [outside + w * layer, outside + 2 * w * layer + gradient]
        gathered += [outside + 2 * w * layer + (w + 4) * trained] * 3
        return tuple(
            peak._replace(autocast_cache=0 if w == 2 else peak.autocast_cache, gathered=size)
            for peak, size in zip(peaks, gathered, strict=True)
        )


def adapt(
    model: EncoderDecoder, method: Tuning, *, trains_encoder: bool = True, shares_embedding: bool = False
) -> EncoderDecoder:
    """Return the model with a part of it trained.

    Args:
        model: all of which is trained.
        method: adapters; of rank None: all weights.
        trains_encoder: whether the encoder is trained, or adapted, too; else it is frozen.
        shares_embedding: whether a frozen encoder reads the embedding of the decoder, which is trained without adapters.
    """
    encoder, decoder = (
        stack if method.rank is None else dataclasses.replace(stack, is_trained=False, method=method)
        for stack in (model.encoder, model.decoder)
    )
    if not trains_encoder:
        passes = shares_embedding and method.rank is None
        encoder = dataclasses.replace(model.encoder, is_trained=False, passes_gradient=passes)
    return dataclasses.replace(model, encoder=encoder, decoder=decoder)
