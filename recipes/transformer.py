"""The shape of a transformer: its parameters, what a sample computes, and the memory of a forward and its backward.

Arithmetic only. Letters: V vocabulary, T tokens per sample, h width, f width of the feed-forward layer, L layers, a heads, N
parameters, b samples in one forward. Two kinds: BERT for pretraining and GPT-2, the head tied to the embedding.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

LOGITS_AT_ONCE = 2**26
"""Logits that GPT-2's head holds at once, whatever the micro-batch: 256 MiB in float32."""


class Moment(NamedTuple):
    """Bytes at one moment of a micro-step, beyond weights, gradients and the optimizer's."""

    autocast_cache: int
    activations: int
    head: int


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A transformer, in the same words for every kind.

    Attributes:
        vocab_size: V.
        length: T, the most tokens of a sample.
        num_predicted: the most places of a sample at which the head scores the vocabulary.
        hidden_size: h.
        intermediate_size: f.
        num_layers: L.
        num_heads: a.
        num_outside: parameters outside the layers: embeddings, the last normalisation, what the head does not share.
        flops_per_sample: forward and backward of a sample of T tokens.
        residual: bytes per token and unit of width that a layer saves under autocast, but for masks and feed-forward.
        activation: the feed-forward layer's activation.
        dropout: whether the two dropouts of a layer keep masks.
        attention_dropout: whether the dropout of eager attention does.
        eager: attention stores its [T, T] matrices; False: the sdpa kernels do not.
        chunked: whether the head is `losses.linear_cross_entropy`.
    """

    vocab_size: int
    length: int
    num_predicted: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_outside: int
    flops_per_sample: int
    residual: int
    activation: str
    dropout: bool
    attention_dropout: bool
    chunked: bool
    eager: bool = False

    unit = "token"
    layered = True  # of equal layers, which are recomputed and sharded one by one
    kernels = "eager"  # which traffic of timing.CALIBRATION
    kernels_per_layer = 68
    """Kernels of a layer's forward and backward: operators but views of transformers' BERT, counted; GPT-2 has 66."""

    @property
    def parameters_per_layer(self) -> int:
        """Four h x h projections, two h x f, their biases, two normalisations: 4 h^2 + 2 h f + 9 h + f.

        >>> gpt2({"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}
        ...     | {"activation_function": "gelu", "resid_pdrop": 0, "attn_pdrop": 0}, 1024).parameters_per_layer
        7087872
        """
        return _parameters_per_layer(self.hidden_size, self.intermediate_size)

    @property
    def num_parameters(self) -> int:
        """N = L (4 h^2 + 2 h f + 9 h + f) + those outside the layers. A tied head counts once."""
        return self.num_layers * self.parameters_per_layer + self.num_outside

    @property
    def gathered(self) -> int:
        """Parameters that a process of a sharded run gathers at once: a layer, and all outside the layers."""
        return self.parameters_per_layer + self.num_outside

    @property
    def num_logits(self) -> int:
        """Logits of a sample: num_predicted V."""
        return self.num_predicted * self.vocab_size

    def saved_bytes(self, *, autocast: bool) -> int:
        """Bytes that the forward of a sample saves for its backward, logits excluded: T (L a + 8 h), a of `per_layer`.

        8 h: the normalisation outside the layers and the last hidden states.
        """
        return self.length * (self.num_layers * self.per_layer(autocast=autocast) + 8 * self.hidden_size)

    def per_layer(self, *, autocast: bool) -> int:
        """Bytes that a layer saves for its backward, per token.

            float32    32 h + 8 f + 2 h [dropout]                       + a T (4 + 5 [attention dropout]) if eager
            autocast   20 h + 4 f + 2 h [dropout] for GPT-2, 24 h BERT  + a T (6 + 1 [attention dropout]) if eager

        float32: both normalisations save their inputs (8 h), the products theirs (the layer's or a normalisation's output, 4 h
        twice), attention saves query, key, value and its output (16 h), the feed-forward layer the activation's input and
        output (8 f); dropout keeps a mask of one byte after attention and one after the feed-forward layer. Eager attention
        saves its probabilities (4), and with dropout a mask (1) and what it leaves of them (4).
        autocast: the residual stream and so the normalisations' inputs stay float32, all else is halved. BERT casts a layer's
        input once each for query, key and value, because autocast caches casts of weights only: 4 h more than GPT-2, which
        multiplies the three at once. f = 4 h gives 66 (with dropout) and 64; 38 and 36 for GPT-2; 42 and 40 for BERT. Eager
        attention saves its probabilities (4), a mask (1) and their cast (2).

        Left out: statistics of the normalisations and of attention, below 1 %. Measured on the CPU (torch 2.13, transformers
        5.23, width 128, two heads, 512 tokens, `saved_tensors_hooks` and the profiler's allocations agreeing), in
        units of h per token without dropout: float32 64.2, autocast 36.1 (GPT-2), 40.1 (BERT); relu 48.2, 28.1, 32.1; gelu_new
        112.2, 60.1 (GPT-2), where the formula has 84: on CUDA autocast computes its power in float32, on the CPU in
        bfloat16. Dropout on the CPU keeps scaled noise in the activation's own type, 8 h (4 h under autocast) instead of 2 h.

        Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198,
        section 4, for 34 h and 5 a T in pure 16-bit arithmetic (residual stream included), counted anew here.
        """
        probabilities = (6 + self.attention_dropout) if autocast else (4 + 5 * self.attention_dropout)
        square = self.eager * self.num_heads * self.length * probabilities
        residual = self.residual if autocast else 32
        return (residual + 2 * self.dropout) * self.hidden_size + self._feed_forward(autocast) + square

    def _feed_forward(self, autocast: bool) -> int:
        """Bytes per token that the feed-forward layer's activation saves."""
        return OTHERWISE.get(self.activation, INPUT_AND_OUTPUT)[autocast] * self.intermediate_size

    def moments(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Moment, ...]:
        """What is alive at the fullest moments of a micro-step of b samples; the first ends the forward.

        With a of `per_layer`, m = b V num_predicted logits, and V h the vocabulary matrix, whose gradient waits from the head
        to the end of the backward for the embedding's. Where two numbers are given, the first is for float32 and the second for
        autocast.

        End of the forward
            cache           0 or 2 N
            activations     b T (L a + 8 h); 8 h: the normalisation outside the layers and the last hidden states. With
                            gradient_checkpointing b T (4 h L + 8 h): each layer's input, in float32 under autocast too
            head of GPT-2   4 V h + 4 b T h + 8 c or 10 c, for c <= LOGITS_AT_ONCE logits at once
            head of BERT    8 m or 10 m
        Backward of the head
            cache           as before; with gradient_checkpointing only the vocabulary matrix's
            activations     as before
            head of GPT-2   4 V h + 4 b T h
            head of BERT    the larger of 12 m (log-probabilities, two gradients) and 4 V h + 4 m or 2 m
        Backward of the last layer
            cache           as before; with gradient_checkpointing only that layer's
            activations     b T L a, with gradient_checkpointing b T (4 h (L - 1) + a), and the gradients on their way: those
                            of the feed-forward layer, b T (4 h + 4 f) or b T (6 h + 2 f), or, when that is done, those of
                            eager attention, 8 b a T^2
            head            4 V h
        End of the backward
            head            8 V h, both gradients of the matrix; 12 V h for BERT in float32, their sum as well

        Measured on the CPU, where gradients exist already: the formula over the profiler's peak was 0.96 to 1.03 (0.92 to 1.00
        with gradient_checkpointing) on 2 to 8 layers of width 128 and 256, the low end at 67 characters and 2 layers, where the
        products' weight gradients, not counted, weigh most. Below that only GPT-2 under autocast with far more words than
        tokens (20,000 and 128: 0.89): the CPU casts each addend of the matrix's gradient. tests/test_memory.py holds it to
        2 %, with gradient_checkpointing to 5 %.
        """
        h, f, layer = self.hidden_size, self.intermediate_size, self.per_layer(autocast=autocast)
        tokens, cached = num_samples * self.length, 2 if autocast else 0  # bytes per parameter
        saved = tokens * self.num_layers * (4 * h if gradient_checkpointing else layer)
        recomputed = tokens * (layer - 4 * h) if gradient_checkpointing else 0
        square = self.eager * 8 * self.num_heads * self.length
        temporary = max(6 * h + 2 * f if autocast else 4 * h + 4 * f, square - self._feed_forward(autocast))
        outside, matrix = 8 * tokens * h, self.vocab_size * h
        num_cached = (matrix, self.parameters_per_layer) if gradient_checkpointing else (self.num_parameters,) * 2
        forward, backward = self._head(num_samples, autocast)
        return (
            Moment(cached * self.num_parameters, saved + outside, forward),
            Moment(cached * num_cached[0], saved + outside, backward),
            Moment(cached * num_cached[1], saved + recomputed + tokens * temporary, 4 * matrix),
            Moment(0, 0, (8 if autocast or self.chunked else 12) * matrix),
        )

    def _head(self, num_samples: int, autocast: bool) -> tuple[int, int]:
        """Bytes of the head at the end of the forward and in its backward, as in `moments`."""
        rows, matrix = num_samples * self.num_predicted, self.vocab_size * self.hidden_size
        logits = rows * self.vocab_size
        if not self.chunked:
            return (10 if autocast else 8) * logits, max(12 * logits, 4 * matrix + (2 if autocast else 4) * logits)
        num_chunks = -(-logits // LOGITS_AT_ONCE)
        gradients = 4 * matrix + 4 * rows * self.hidden_size
        return gradients + (10 if autocast else 8) * -(-rows // num_chunks) * self.vocab_size, gradients


# Bytes per token and unit of f that the feed-forward layer saves, in float32 and under autocast: the activation's input and
# its output, unless named here. relu keeps its output only; gelu_new is eight operations that keep three more.
INPUT_AND_OUTPUT = (8, 4)
OTHERWISE = {"relu": (4, 2), "gelu_new": (20, 16)}


def gpt2_flops(num_parameters: int, num_positions: int, hidden_size: int, num_layers: int, length: int) -> int:
    """Floating-point operations of GPT-2 on one sample, forward and backward, each multiply-add as two.

        T (6 (N - P h) + 12 L h T)

    P positions: their embedding is looked up, never multiplied; the token embedding counts, as it is the head. Attention is
    counted in full, not only its causal half; recomputing is not counted.

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
    """Floating-point operations of BERT's pretraining on one sample, forward and backward, from its matrix products.

        3 (L T (8 h^2 + 4 h f + 4 h T) + num_predicted (2 h^2 + 2 h V) + 2 h^2 + 4 h)

    Each multiply-add is two, and the backward twice the forward. By terms: projections, feed-forward and attention of the
    layers; the masked-token head at the predicted places only; the pooler and the next-sentence head.

    >>> [round(bert_flops(30522, 1024, 4096, 24, *case) / 1e9, 1) for case in ((128, 20), (512, 80))]  # BERT-Large
    [240.6, 1020.5]
    """
    h, f = hidden_size, intermediate_size
    layers = num_layers * length * (8 * h * h + 4 * h * f + 4 * h * length)
    heads = num_predicted * (2 * h * h + 2 * h * vocab_size) + 2 * h * h + 4 * h
    return 3 * (layers + heads)


def _parameters_per_layer(h: int, f: int) -> int:
    return 4 * h * h + 2 * h * f + 9 * h + f


def bert(shape: Mapping[str, Any], length: int, num_predicted: int) -> Transformer:
    """BERT for pretraining, its masked-token head at `num_predicted` places of a sample.

    Args:
        shape: as `transformers.BertConfig` takes it.
        length: T.
        num_predicted: the most masked tokens of a sample.
    """
    vocab, h, f, layers = (
        shape[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    embeddings = (vocab + shape["max_position_embeddings"] + 2) * h + 2 * h  # tokens, positions, segments; normalised
    heads = (h * h + h) + (h * h + h) + 2 * h + vocab + (2 * h + 2)  # pooler; transform, its norm, bias; next sentence
    return Transformer(
        vocab_size=vocab,
        length=length,
        num_predicted=num_predicted,
        hidden_size=h,
        intermediate_size=f,
        num_layers=layers,
        num_heads=shape["num_attention_heads"],
        num_outside=embeddings + heads,
        flops_per_sample=bert_flops(vocab, h, f, layers, length, num_predicted),
        residual=24,
        activation=shape["hidden_act"],
        dropout=shape["hidden_dropout_prob"] > 0,
        attention_dropout=shape["attention_probs_dropout_prob"] > 0,
        chunked=False,
    )


def gpt2(shape: Mapping[str, Any], length: int) -> Transformer:
    """GPT-2, its head computed by `losses.linear_cross_entropy` at every place.

    Args:
        shape: as `transformers.GPT2Config` takes it.
        length: T.
    """
    vocab, positions, h, layers = (shape[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer"))
    outside = (vocab + positions) * h + 2 * h
    num_parameters = layers * _parameters_per_layer(h, 4 * h) + outside
    return Transformer(
        vocab_size=vocab,
        length=length,
        num_predicted=length,
        hidden_size=h,
        intermediate_size=4 * h,
        num_layers=layers,
        num_heads=shape["n_head"],
        num_outside=outside,
        flops_per_sample=gpt2_flops(num_parameters, positions, h, layers, length),
        residual=20,
        activation=shape["activation_function"],
        dropout=shape["resid_pdrop"] > 0,
        attention_dropout=shape["attn_pdrop"] > 0,
        chunked=True,
    )
