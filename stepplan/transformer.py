"""The shape of a transformer: its parameters, the FLOPs of a sample, and the memory of a forward and its backward.

Arithmetic only. Letters: V vocabulary, T tokens per sample, h width, f width of the feed-forward layer, L layers, a heads, N
parameters, b samples in one forward. Pairs of numbers are for float32 and for autocast. Kinds: BERT and GPT-2.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from samestep.cut.layout import LOGITS_AT_ONCE, round_up


class Peak(NamedTuple):
    """Bytes at a peak of a micro-batch, beyond weights, gradients and the optimizer's moments.

    Attributes:
        autocast_cache: 16-bit copies of weights.
        activations: activations, and gradients of activations.
        head: logits, gradients of the vocabulary matrix and of the head's input.
        gathered: of sharded weights, what is whole for a while: gathered layers, and gradients on their way to their owners.
    """

    autocast_cache: int
    activations: int
    head: int
    gathered: int = 0


class Layer(NamedTuple):
    """The size of a layer, and the bytes per token that its forward saves for its backward, without a stored [T, T] matrix.

    Attributes:
        num_parameters: parameters of the layer.
        saved_bytes: all bytes that the forward saves, feed-forward included.
        feed_forward_bytes: the part of them that the feed-forward layer's activation saves.
        temporary_bytes: gradients on their way through the feed-forward layer.
        matrices: rows and columns of its matrices, in any order.
    """

    num_parameters: int
    saved_bytes: tuple[int, int]
    feed_forward_bytes: tuple[int, int]
    temporary_bytes: tuple[int, int]
    matrices: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A transformer, in the same words for every kind.

    Attributes:
        vocab_size: V, of the embedding.
        length: T, largest number of tokens of a sample.
        num_predicted: largest number of places of a sample at which the head scores the vocabulary; 0: a classifier.
        hidden_size: h.
        num_layers: L.
        num_heads: a.
        layer: one of the L.
        num_outside: parameters outside the layers: embeddings, the last normalisation, the head without shared matrices.
        flops_per_sample: FLOPs of forward and backward of a sample of T tokens.
        attention_dropout: whether eager attention has dropout.
        tied_head: whether the head is the embedding's matrix, so that its gradient waits for the embedding's.
        chunked_head: whether the head is `losses.linear_cross_entropy`.
        eager_attention: attention stores its [T, T] matrices; False: the sdpa kernels do not.
        post_norm: normalisations follow the residual sums, as in BERT.
        num_queries: tokens of a sample for which the last layer is computed, that is, queries of its attention, in
            `samestep.models.attention`; None: all, in transformers' own forward.
        context_bytes: bytes that the last layer keeps of each other token, in float32 and under autocast.
        keeps_masks: whether dropout keeps a mask, a byte per number, as torch's does on a GPU; `samestep.step.noise` draws it
            again there, and on a CPU keeps bits, which are left out.
        is_unpadded: whether samples lie end to end in a row, and in attention's tables, of the sizes of `samestep.data.ragged`.
        more_outside_bytes: bytes per sample that are saved outside the layers beyond 8 h per token, float32 and autocast.
        shared_layer_bytes: bytes that a layer saves once for all samples of a micro-batch.
        window: number of places after a token that most layers see, for which all keep one mask; None: all places.
        is_causal: whether a token sees those before it only.
        kernels: eager or compiled, which chooses the traffic of timing.CALIBRATION.
        attention_kernel: as of `timing.Attention`.
    """

    vocab_size: int
    length: int
    num_predicted: int
    hidden_size: int
    num_layers: int
    num_heads: int
    layer: Layer
    num_outside: int
    flops_per_sample: int
    attention_dropout: bool
    tied_head: bool = True
    chunked_head: bool = False
    eager_attention: bool = False
    post_norm: bool = False
    num_queries: int | None = None
    context_bytes: tuple[int, int] = (0, 0)
    keeps_masks: bool = True
    is_unpadded: bool = False
    more_outside_bytes: tuple[int, int] = (0, 0)
    shared_layer_bytes: int = 0
    window: int | None = None
    is_causal: bool = False
    kernels: str = "eager"
    attention_kernel: str | None = None

    unit = "token"
    has_equal_layers = True  # they are recomputed and sharded one by one
    kernels_per_layer = 68
    """Kernels of a layer's forward and backward: operators of transformers' BERT except views, counted; GPT-2 has 66."""

    @property
    def stores_scores(self) -> bool:
        """Whether matrices of [T, T] are stored, as no fused kernel does."""
        return self.eager_attention

    @property
    def sequence_length(self) -> int:
        """T."""
        return self.length

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def attention_flops(self) -> int:
        """FLOPs of attention's products of all pairs of tokens, forward and backward."""
        return 12 * self.num_layers * self.hidden_size * self.length**2

    def traffic_bytes(self, *, autocast: bool) -> int:
        """Count the bytes by which the traffic between products is measured: `saved_bytes`, compiled of a fused activation."""
        spared = 0
        if self.kernels == "compiled" and self.layer.matrices:
            spared = self.layer.feed_forward_bytes[autocast] - INPUT_AND_OUTPUT[autocast] * self.layer.matrices[-1][1]
        return self.saved_bytes(autocast=autocast) - self.num_layers * self.length * max(0, spared)

    @property
    def num_parameters(self) -> int:
        """N, the parameters of L layers and of the parts outside. A tied head counts once."""
        return self.num_layers * self.layer.num_parameters + self.num_outside

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """Rows and columns of the matrices of all layers."""
        return list(self.layer.matrices) * self.num_layers

    @property
    def num_logits(self) -> int:
        """Logits of a sample: num_predicted V."""
        return self.num_predicted * self.vocab_size

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves for its backward, logits excluded.

        T (L a + 8 h),   a = `layer_bytes`;   8 h: the normalisation outside the layers and the last hidden states
        """
        return self.length * (self.num_layers * self.layer_bytes(autocast=autocast) + 8 * self.hidden_size)

    def layer_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that a layer saves for its backward, per token; eager attention's [T, T] matrices included.

        Eager attention saves per head and pair of tokens its probabilities (4), under autocast their cast (2), and with dropout
        in float32 the probabilities after dropout (4), and a mask (1) if masks are kept. Left out everywhere: statistics of the
        normalisations and of attention, below 1 %, and on a CPU dropout's bits (1/8), at most 2 %.
        """
        probabilities = 6 if autocast else 4 + 4 * self.attention_dropout
        probabilities += self.attention_dropout and self.keeps_masks
        square = self.num_heads * self.length * probabilities
        if self.is_unpadded:  # its products do not save their output, which goes from tables into the row
            square -= (2 if autocast else 4) * self.hidden_size
        return self.layer.saved_bytes[autocast] + self.eager_attention * square

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Count the bytes at the peaks of a micro-batch of b samples, in order of time; the first ends the forward.

        With a = `layer_bytes`, m = b V num_predicted logits, and V h the vocabulary matrix, whose gradient waits from the head
        to the end of the backward for the embedding's. Of two numbers the first is for float32 and the second for autocast.
        Unpadded, b T is the number of tokens rounded up, and attention's tables, 16 h (8 h) of a and the matrices of eager
        attention, take that of their places (`_sizes`); a mask of a window takes 4 T (2 T) of each place.

        End of the forward
            cache           0 or 2 N, less 2 V h if the head is not tied
            activations     b T (L a + 8 h); 8 h: the normalisation outside the layers and the last hidden states. With
                            gradient_checkpointing b T (4 h L + 8 h): each layer's input, in float32 under autocast too
            head            8 m or 10 m; in chunks 4 V h + 4 b T h + 8 c or 10 c, for c <= LOGITS_AT_ONCE logits at once
        Backward of the head
            cache           as before; with gradient_checkpointing only the vocabulary matrix's
            activations     as before
            head            the larger of 12 m (log-probabilities, two gradients) and 4 V h + 4 m or 2 m; in chunks
                            4 V h + 4 b T h
        Backward of the last layer
            cache           as before; with gradient_checkpointing only that layer's
            activations     b T L a, with gradient_checkpointing b T (4 h (L - 1) + a), and the gradients on their way through
                            the feed-forward layer, or later through eager attention: 8 b T^2 per head, or 6, but 4 in
                            float32 with dropout. Under autocast with post_norm 4 b T h more, the input of the embeddings'
                            normalisation, and as much again with gradient_checkpointing, a layer's own input beside its casts
            head            4 V h if it is tied
        End of the backward
            head            8 V h, both gradients of a tied matrix; 12 V h in float32 and not in chunks, their sum as well;
                            4 V h if it is not tied

        Where the last layer is computed for Q = num_queries tokens of a sample only, it keeps b Q a + b (T - Q) context_bytes,
        and is not recomputed; then the largest backward is that of the layer before it, of L - 1, with at least 4 h of the
        layer's own output.

        Measured on the CPU, where gradients exist already: the formula over the profiler's peak was 0.96 to 1.03 (0.92 to 1.00
        with gradient_checkpointing) on 2 to 8 layers of width 128 and 256, the low end at 67 characters and 2 layers, where the
        matmuls' weight gradients, not counted, weigh most. Lower is only GPT-2 under autocast with far more words than tokens
        (20,000 and 128: 0.89): the CPU casts each addend of the matrix's gradient. tests/test_memory.py requires an error of at
        most 2 %, with gradient_checkpointing of at most 5 %.
        """
        h, layer = self.hidden_size, self.layer_bytes(autocast=autocast)
        cast_bytes = 2 if autocast else 0  # bytes per parameter
        tokens, places = self._sizes(num_samples)
        full_layer, inputs = tokens * layer + (places - tokens) * self._table_bytes(layer, autocast), tokens * 4 * h
        # What each layer keeps, and what a layer computes again in its backward
        kept, again = (inputs, full_layer - inputs) if gradient_checkpointing else (full_layer, 0)
        whole = earlier = self.num_layers * kept
        own_inputs = inputs * (autocast and self.post_norm) * (1 + gradient_checkpointing)
        if self.num_queries is not None:  # the largest backward of a layer is that of the last one but one
            earlier = (self.num_layers - 1) * kept
            whole = earlier + self._last_layer_bytes(num_samples, tokens, places, layer, autocast)
            own_inputs = inputs * (1 + (autocast and gradient_checkpointing))
        if self.window is not None and self.window < self.length - 1:
            masks = places * (2 if autocast else 4) * round_up(self.length, 4)
            whole, earlier = whole + masks, earlier + masks
        shared = self.shared_layer_bytes * (1 if gradient_checkpointing else self.num_layers)
        if not gradient_checkpointing:
            whole += shared
        pair = 6 if autocast else 8 - 4 * self.attention_dropout
        square = self.eager_attention * pair * self.num_heads * self.length
        temporary = max(self.layer.temporary_bytes[autocast], square - self.layer.feed_forward_bytes[autocast])
        outside_bytes = 8 * tokens * h + num_samples * self.more_outside_bytes[autocast]
        matrix = self.vocab_size * h
        # Autocast casts what is multiplied; an embedding that is no head, too, is looked up only
        num_cast = self.num_parameters - matrix * (not self.tied_head)
        num_cached = (num_cast, num_cast)
        if gradient_checkpointing:
            num_cached = matrix if self.num_predicted else 0, self.layer.num_parameters
        forward, backward = self._head_bytes(num_samples, autocast)
        tied_bytes = 8 if autocast or self.chunked_head else 12
        in_layer = earlier + again + own_inputs + shared + tokens * temporary
        return (
            Peak(cast_bytes * num_cast, whole + outside_bytes, forward),
            Peak(cast_bytes * num_cached[0], whole + outside_bytes, backward),
            Peak(cast_bytes * num_cached[1], in_layer, 4 * matrix * self.tied_head),
            Peak(0, 0, (tied_bytes if self.tied_head else 4) * matrix),
        )

    def _last_layer_bytes(self, num_samples: int, tokens: int, places: int, layer: int, autocast: bool) -> int:
        """Count what a last layer keeps that is computed for queries only; other tokens leave their keys and values."""
        spare = places > num_samples * self.length or round_up(self.num_queries, 4) > self.num_queries
        queries = round_up(num_samples * self.num_queries + spare, 6)
        return queries * layer + (tokens - queries) * self.context_bytes[autocast]

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes of `peaks` where FSDP2 shards the weights over N processes, a unit per layer and one for the rest.

        With w = gathered_bytes, P the parameters of a layer, O those outside the layers, V h the vocabulary matrix

        All of the micro-batch
            cache           as in `peaks` for w = 4, less what the backward is through with; for w = 2 none: casts come
            gathered        w O
        End of the forward, backward of the head
            gathered        w P, the last layer's: the buffer of a collective is kept until the next one
            head            as in `peaks`; in chunks and for w = 2, 2 V h more in the backward, the gradient's cast
        Backward of the last layer
            gathered        3 w P: the layer, the next one, gathered ahead, and the layer's gradient
            head            w V h, tied or not: a gradient waits for its unit's reduction
        Backward of the layer before it
            activations     less those of a layer
            gathered        3 w P, and 4 P, the last layer's gradient in the buffer of its reduction, in float32
        End of the backward
            gathered        w O and 4 P, as before; or, in place of the head's, the reduction of what is outside the layers:
                            w O for gradients, 4 O for the buffer and 4 O / N for the result
            head            w V h, 4 V h for the embedding's gradient in float32, and its cast or the sum of both
        """
        options = {"autocast": autocast, "gradient_checkpointing": gradient_checkpointing}
        forward, head, layer, end = self.peaks(num_samples, **options)
        w, size, outside = gathered_bytes, self.layer.num_parameters, self.num_outside
        matrix, is_half = self.vocab_size * self.hidden_size, gathered_bytes == 2
        waiting = w * matrix if self.num_predicted else 0
        cast = 2 * matrix if is_half and self.chunked_head else 0
        # A layer's share of what the forward keeps; of one that is recomputed, its input
        token = 4 * self.hidden_size if gradient_checkpointing else self.layer_bytes(autocast=autocast)
        kept = num_samples * self.length * token
        # Where the last layer is computed for queries only, `peaks` has the backward of the layer before it
        is_reduced = self.num_queries is not None
        last = waiting + 6 * matrix if is_half else end.head + waiting * (not self.tied_head)
        result = 4 * -(-outside // num_processes)
        caches = [0 if is_half else peak.autocast_cache for peak in (forward, head, layer)]
        if caches[2] and not gradient_checkpointing:
            caches[2] -= 2 * matrix * (self.num_predicted > 0) + 2 * size * is_reduced
        return (
            Peak(caches[0], forward.activations, forward.head, w * (outside + size)),
            Peak(caches[1], head.activations, head.head + cast, w * (outside + size)),
            Peak(caches[2], layer.activations, waiting, w * (outside + 3 * size) + 4 * size * is_reduced),
            Peak(caches[2], max(0, layer.activations - kept), waiting, w * (outside + 3 * size) + 4 * size),
            Peak(0, 0, last, w * outside + 4 * size),
            Peak(0, 0, 0, (w + 4) * outside + result + 4 * size),
        )

    def _sizes(self, num_samples: int) -> tuple[int, int]:
        """Count the tokens of b samples and the places of attention's tables, unpadded those of `samestep.data.ragged`."""
        if not self.is_unpadded:
            return (num_samples * self.length,) * 2
        places = round_up(num_samples, 3) * round_up(self.length, 4)
        is_padded = places > num_samples * self.length
        return round_up(num_samples * self.length + is_padded, 6), places

    def _table_bytes(self, layer: int, autocast: bool) -> int:
        """Count the part of a layer's bytes per token that lies in tables: queries, keys, values, outputs, eager matrices."""
        return (8 if autocast else 16) * self.hidden_size + layer - self.layer.saved_bytes[autocast]

    def _head_bytes(self, num_samples: int, autocast: bool) -> tuple[int, int]:
        """Count the bytes of the head at the end of the forward and in its backward, as in `peaks`."""
        rows, matrix = num_samples * self.num_predicted, self.vocab_size * self.hidden_size
        if self.is_unpadded:
            rows = round_up(rows, 6)  # as `samestep.data.ragged` does
        logits = rows * self.vocab_size
        if not logits:
            return 0, 0
        if not self.chunked_head:
            return (10 if autocast else 8) * logits, max(12 * logits, 4 * matrix + (2 if autocast else 4) * logits)
        # Whole rows of V logits, as many as LOGITS_AT_ONCE allows
        chunk = min(rows, max(1, LOGITS_AT_ONCE // self.vocab_size)) * self.vocab_size
        gradients = 4 * matrix + 4 * rows * self.hidden_size
        return gradients + (10 if autocast else 8) * chunk, gradients


# Bytes per token and unit of f that the feed-forward layer saves, in float32 and under autocast: the activation's input and
# its output, except for two activations. relu keeps its output only; gelu_new is eight operations that keep three more tensors.
INPUT_AND_OUTPUT = (8, 4)
OTHER_ACTIVATIONS = {"relu": (4, 2), "gelu_new": (20, 16)}


def _layer(h: int, f: int, activation: str, dropout: bool, residual: int) -> Layer:
    """Make a layer of GPT-2 or BERT: four h x h projections, two h x f, their biases, two normalisations.

        parameters 4 h^2 + 2 h f + 9 h + f
        float32    32 h + 8 f + 2 h [dropout]
        autocast   20 h + 4 f + 2 h [dropout] for GPT-2,   24 h + 4 f + 2 h [dropout] for BERT: `residual`

    float32: both normalisations save their inputs (8 h), the matmuls their inputs (the layer's or a normalisation's output,
    4 h twice), attention saves query, key, value and its output (16 h), the feed-forward layer the activation's input and
    output (8 f); dropout keeps a mask of one byte after attention and one after the feed-forward layer.
    autocast: the residual stream and so the normalisations' inputs stay float32, all else is halved. BERT casts a layer's
    input once each for query, key and value, because autocast caches casts of weights only: 4 h more than GPT-2, which
    multiplies the three at once. f = 4 h gives 66 (with dropout) and 64; 38 and 36 for GPT-2; 42 and 40 for BERT.
    Gradients of 4 h + 4 f, under autocast 6 h + 2 f, are on their way through the feed-forward layer.

    Measured on the CPU (torch 2.13, transformers 5.23, width 128, two heads, 512 tokens, `saved_tensors_hooks` and the
    profiler's allocations agreeing), in units of h per token without dropout: float32 64.2, autocast 36.1 (GPT-2), 40.1 (BERT);
    relu 48.2, 28.1, 32.1; gelu_new 112.2, 60.1 (GPT-2), where the formula has 84: on CUDA autocast computes its power in
    float32, on the CPU in bfloat16. Dropout on the CPU keeps scaled noise in the activation's own type, 8 h (4 h under
    autocast) instead of 2 h.

    Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198,
    section 4, for 34 h and 5 a T in pure 16-bit arithmetic (residual stream included), counted anew here.

    >>> [_layer(768, 3072, "gelu", False, 20).num_parameters, *_layer(1, 4, "gelu", True, 24).saved_bytes]
    [7087872, 66, 42]
    """
    feed_forward = OTHER_ACTIVATIONS.get(activation, INPUT_AND_OUTPUT)
    float32, half = (count * f for count in feed_forward)
    masks = 2 * h * dropout
    return Layer(
        num_parameters=4 * h * h + 2 * h * f + 9 * h + f,
        saved_bytes=(32 * h + float32 + masks, residual * h + half + masks),
        feed_forward_bytes=(float32, half),
        temporary_bytes=(4 * h + 4 * f, 6 * h + 2 * f),
        matrices=(*[(h, h)] * 4, (h, f), (h, f)),
    )


def gpt2_flops(num_parameters: int, num_positions: int, hidden_size: int, num_layers: int, length: int) -> int:
    """Count the floating-point operations of GPT-2 on one sample, forward and backward, each multiply-add as two.

        T (6 (N - P h) + 12 L h T)

    The embedding of the P positions is looked up, never multiplied; the token embedding counts, as it is the head. Attention
    is counted in full, not only its causal half; recomputing is not counted.

    >>> round(gpt2_flops(124_439_808, 1024, 768, 12, 1024) / 1024 / 1e9, 3)  # with all N it would be 0.860
    0.855

    Reference: Chowdhery et al., PaLM: Scaling Language Modeling with Pathways, 2022, arXiv:2204.02311, appendix B;
    N without positions as in nanoGPT, `GPT.get_num_params` and `GPT.estimate_mfu`.
    """
    weights = num_parameters - num_positions * hidden_size
    return length * (6 * weights + 12 * num_layers * hidden_size * length)


def bert_flops(
    vocab_size: int, hidden_size: int, intermediate_size: int, num_layers: int, length: int, num_predicted: int
) -> int:
    """Count the floating-point operations of BERT's pretraining on one sample, forward and backward, from its matmuls.

        3 (L T (8 h^2 + 4 h f + 4 h T) + num_predicted (2 h^2 + 2 h V) + 2 h^2 + 4 h)

    Each multiply-add counts as two, the backward as two forwards. By terms: projections, feed-forward and attention of the
    layers; the masked-token head at the predicted places only; the pooler and the next-sentence head.

    >>> [round(bert_flops(30522, 1024, 4096, 24, *case) / 1e9, 1) for case in ((128, 20), (512, 80))]  # BERT-Large
    [240.6, 1020.5]
    """
    h, f = hidden_size, intermediate_size
    layers = num_layers * length * (8 * h * h + 4 * h * f + 4 * h * length)
    heads = num_predicted * (2 * h * h + 2 * h * vocab_size) + 2 * h * h + 4 * h
    return 3 * (layers + heads)


def bert(shape: Mapping[str, Any], length: int, num_predicted: int | None, *, is_unpadded: bool = False) -> Transformer:
    """Return the shape of BERT: for pretraining, its masked-token head at `num_predicted` places of a sample, or a classifier.

    Args:
        shape: as `transformers.BertConfig` takes it; for a classifier with num_labels.
        length: T.
        num_predicted: largest number of masked tokens of a sample; None: a classifier.
        is_unpadded: whether `samestep.models.attention` computes it: without padding, the last layer for the first and the
            masked tokens only, dropout by `samestep.step.noise`. A layer keeps 4 h (under autocast 2 h) more per token,
            attention's output as tables and as rows. The last layer keeps keys, values and its input of the other tokens, 12 h
            (8 h); in a classifier, measured, 6.5 h (11 h).
    """
    vocab, h, f, layers = (
        shape[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    embeddings = (vocab + shape["max_position_embeddings"] + shape.get("type_vocab_size", 2)) * h + 2 * h  # normalised
    pooler = h * h + h
    flops = bert_flops(vocab, h, f, layers, length, num_predicted or 0)
    if num_predicted is None:
        head = (h + 1) * shape["num_labels"]
        flops += 6 * h * (shape["num_labels"] - 2)  # instead of the two classes of the next sentence
    else:
        head = (h * h + h) + 2 * h + vocab + (2 * h + 2)  # transform, its norm, bias; next sentence
    layer = _layer(h, f, shape["hidden_act"], shape["hidden_dropout_prob"] > 0 and not is_unpadded, 24)
    if is_unpadded:
        layer = layer._replace(saved_bytes=(layer.saved_bytes[0] + 4 * h, layer.saved_bytes[1] + 2 * h))
    return Transformer(
        vocab_size=vocab,
        length=length,
        num_predicted=num_predicted or 0,
        hidden_size=h,
        num_layers=layers,
        num_heads=shape["num_attention_heads"],
        layer=layer,
        num_outside=embeddings + pooler + head,
        flops_per_sample=flops,
        attention_dropout=shape["attention_probs_dropout_prob"] > 0,
        tied_head=num_predicted is not None,
        post_norm=True,
        num_queries=1 + (num_predicted or 0) if is_unpadded else None,
        keeps_masks=not is_unpadded,
        is_unpadded=is_unpadded,
        context_bytes=(12 * h, 8 * h) if num_predicted is not None else (13 * h // 2, 11 * h),
    )


def modernbert(shape: Mapping[str, Any], length: int, num_predicted: int) -> Transformer:
    """Return the shape of ModernBERT, as `samestep.models.modernbert_pretraining` computes it, without padding.

    A layer saves per token, in float32 and under autocast,

        float32    36 h + 16 f
        autocast   22 h +  8 f

    Both normalisations save their inputs (8 h) and the matmuls theirs (8 h, under autocast 4 h); attention saves queries, keys
    and values as tables (12 h, 6 h) and its output, as tables and as rows (8 h, 4 h); the feed-forward layer its activation's
    input, the gate, the activation and their product (16 f, 8 f). Outside the layers are tables of rotations, two of each kind,
    in float32 (16 h / a), and of each masked token what the head's transformation saves, 16 h, under autocast 10 h.

    Args:
        shape: as `transformers.ModernBertConfig` takes it.
        length: T.
        num_predicted: largest number of masked tokens of a sample.
    """
    vocab, h, f, layers = (
        shape[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    rotations = 16 * h // shape["num_attention_heads"] * length
    # Attention is counted in full: the kernels over tables compute what a window hides, too
    products = layers * length * (8 * h * h + 6 * h * f + 4 * h * length)
    layer = Layer(
        num_parameters=4 * h * h + 3 * h * f + 2 * h,
        saved_bytes=(36 * h + 16 * f, 22 * h + 8 * f),
        feed_forward_bytes=(16 * f, 8 * f),
        temporary_bytes=(4 * h + 8 * f, 6 * h + 4 * f),
        matrices=((h, 3 * h), (h, h), (h, 2 * f), (h, f)),
    )
    return Transformer(
        vocab_size=vocab,
        length=length,
        num_predicted=num_predicted,
        hidden_size=h,
        num_layers=layers,
        num_heads=shape["num_attention_heads"],
        layer=layer,
        # The embedding, its norm and the last one; the head's matrix, norm and bias; the first layer has one norm only
        num_outside=vocab * h + 2 * h + h * h + h + vocab - h,
        flops_per_sample=3 * (products + num_predicted * (2 * h * h + 2 * h * vocab)),
        attention_dropout=False,
        is_unpadded=True,
        more_outside_bytes=(rotations + 16 * h * num_predicted, rotations + 10 * h * num_predicted),
        window=shape["local_attention"] // 2,
    )


def gpt2(shape: Mapping[str, Any], length: int, *, chunked_head: bool = True) -> Transformer:
    """Return the shape of GPT-2, with its head at every place.

    Args:
        shape: as `transformers.GPT2Config` takes it.
        length: T.
        chunked_head: whether our script computes it: `losses.linear_cross_entropy` the head, `samestep.step.noise` dropout;
            False: transformers, all logits at once, and masks that are kept.
    """
    vocab, positions, h, layers = (shape[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer"))
    f = shape.get("n_inner") or 4 * h
    layer = _layer(h, f, shape["activation_function"], shape["resid_pdrop"] > 0 and not chunked_head, 20)
    layer = layer._replace(matrices=((h, 3 * h), (h, h), (h, f), (h, f)))  # queries, keys and values are one
    num_outside = (vocab + positions) * h + 2 * h
    num_parameters = layers * layer.num_parameters + num_outside
    return Transformer(
        vocab_size=vocab,
        length=length,
        num_predicted=length,
        hidden_size=h,
        num_layers=layers,
        num_heads=shape["n_head"],
        layer=layer,
        num_outside=num_outside,
        flops_per_sample=gpt2_flops(num_parameters, positions, h, layers, length),
        attention_dropout=shape["attn_pdrop"] > 0,
        is_causal=True,
        chunked_head=chunked_head,
        keeps_masks=not chunked_head,
    )
