"""How large a recipe's model is, what one step computes, and the memory that one process is planned to need.

All of it is arithmetic on the recipe's `architecture`: nothing is built, torch is not imported. Letters: V vocabulary,
T tokens per sample, h width, f width of the feed-forward layer, L layers, N parameters, b samples in one forward.
GB are 1e9 bytes. Two kinds of model are known, BERT for pretraining and GPT-2, both with the head tied to the embedding
and the sdpa attention kernels, which store no [T, T] matrix (eager attention adds 5 to 9 bytes per head and pair of tokens).
"""

import dataclasses

from recipes.errors import UsageError
from recipes.plan import Layout
from recipes.recipe import Recipe

LOGITS_AT_ONCE = 2**26
"""Logits that GPT-2's head holds at once, whatever the micro-batch: 256 MiB in float32."""


@dataclasses.dataclass(frozen=True)
class Model:
    """The shape of a recipe's model, in the same words for every task.

    Attributes:
        vocab_size: V.
        length: T, the most tokens of a sample.
        num_predicted: the most places of a sample at which the head scores the vocabulary.
        hidden_size: h.
        intermediate_size: f.
        num_layers: L.
        num_outside: parameters outside the layers: embeddings, the last normalisation, what the head does not share.
        flops_per_sample: forward and backward of a sample of T tokens.
        residual: bytes per token and unit of width that a layer saves under autocast, but for masks and feed-forward.
        activation: the feed-forward layer's activation.
        dropout: whether the two dropouts of a layer keep masks.
        chunked: whether the head is `losses.linear_cross_entropy`.
    """

    vocab_size: int
    length: int
    num_predicted: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_outside: int
    flops_per_sample: int
    residual: int
    activation: str
    dropout: bool
    chunked: bool

    @property
    def parameters_per_layer(self) -> int:
        """Four h x h projections, two h x f, their biases, two normalisations: 4 h^2 + 2 h f + 9 h + f.

        >>> from recipes.recipe import load
        >>> model_of(load("gpt2_124m")).parameters_per_layer == 12 * 768**2 + 13 * 768
        True
        """
        return _parameters_per_layer(self.hidden_size, self.intermediate_size)

    @property
    def num_parameters(self) -> int:
        """N = L (4 h^2 + 2 h f + 9 h + f) + those outside the layers. A tied head counts once.

        >>> from recipes.recipe import load
        >>> model_of(load("gpt2_xl_8xa100")).num_parameters, model_of(load("bert_large_phase1")).num_parameters
        (1557611200, 336226108)
        """
        return self.num_layers * self.parameters_per_layer + self.num_outside

    @property
    def flops_per_token(self) -> float:
        """flops_per_sample / T.

        >>> from recipes.recipe import load
        >>> [round(model_of(load(name)).flops_per_token / 1e9, 3) for name in ("gpt2_124m", "gpt2_xl_8xa100")]
        [0.855, 10.28]
        """
        return self.flops_per_sample / self.length


def model_of(recipe: Recipe) -> Model:
    """The model that a recipe trains.

    Raises:
        UsageError: a task without a formula.
    """
    if recipe.task not in _MODELS:
        raise UsageError(
            f"task {recipe.task} has no formula for its size, compute and memory: known are {', '.join(_MODELS)}"
        )
    return _MODELS[recipe.task](recipe)


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


def _bert(recipe: Recipe) -> Model:
    shape = recipe.architecture
    vocab, h, f, layers = (
        shape[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    )
    embeddings = (vocab + shape["max_position_embeddings"] + 2) * h + 2 * h  # tokens, positions, segments; normalised
    heads = (h * h + h) + (h * h + h) + 2 * h + vocab + (2 * h + 2)  # pooler; transform, its norm, bias; next sentence
    length = recipe.max_seq_length
    num_predicted = max(1, round((length - 3) * recipe.mlm_probability))  # [CLS] and two [SEP] are never masked
    return Model(
        vocab_size=vocab,
        length=length,
        num_predicted=num_predicted,
        hidden_size=h,
        intermediate_size=f,
        num_layers=layers,
        num_outside=embeddings + heads,
        flops_per_sample=bert_flops(vocab, h, f, layers, length, num_predicted),
        residual=24,
        activation=shape["hidden_act"],
        dropout=shape["hidden_dropout_prob"] > 0,
        chunked=False,
    )


def _gpt2(recipe: Recipe) -> Model:
    shape = recipe.architecture
    vocab, positions, h, layers = (shape[name] for name in ("vocab_size", "n_positions", "n_embd", "n_layer"))
    outside = (vocab + positions) * h + 2 * h
    num_parameters = layers * _parameters_per_layer(h, 4 * h) + outside
    return Model(
        vocab_size=vocab,
        length=recipe.block_size,
        num_predicted=recipe.block_size,
        hidden_size=h,
        intermediate_size=4 * h,
        num_layers=layers,
        num_outside=outside,
        flops_per_sample=gpt2_flops(num_parameters, positions, h, layers, recipe.block_size),
        residual=20,
        activation=shape["activation_function"],
        dropout=shape["resid_pdrop"] > 0,
        chunked=True,
    )


_MODELS = {"bert_pretraining": _bert, "gpt2_pretraining": _gpt2}


# Bytes per token and unit of f that the feed-forward layer saves, in float32 and under autocast: the activation's input and
# its output, unless named here. relu keeps its output only; gelu_new is eight operations that keep three more.
INPUT_AND_OUTPUT = (8, 4)
OTHERWISE = {"relu": (4, 2), "gelu_new": (20, 16)}


def activations_per_layer(model: Model, *, autocast: bool) -> int:
    """Bytes that a layer saves for its backward, per token.

        float32    32 h + 8 f + 2 h [dropout]
        autocast   20 h + 4 f + 2 h [dropout] for GPT-2,   24 h + 4 f + 2 h [dropout] for BERT

    float32: both normalisations save their inputs (8 h), the products theirs (the layer's or a normalisation's output, 4 h
    twice), attention saves query, key, value and its output (16 h), the feed-forward layer the activation's input and output
    (8 f); dropout keeps a mask of one byte after attention and one after the feed-forward layer.
    autocast: the residual stream and so the normalisations' inputs stay float32, all else is halved. BERT casts a layer's
    input once each for query, key and value, because autocast caches casts of weights only: 4 h more than GPT-2, which
    multiplies the three at once. f = 4 h gives 66 (with dropout) and 64; 38 and 36 for GPT-2; 42 and 40 for BERT.

    Left out: statistics of the normalisations and of attention, below 1 %. Measured on the CPU (torch 2.13, transformers
    5.23, width 128, two heads, 512 tokens, `saved_tensors_hooks` and the profiler's allocations agreeing), in
    units of h per token without dropout: float32 64.2, autocast 36.1 (GPT-2), 40.1 (BERT); relu 48.2, 28.1, 32.1; gelu_new
    112.2, 60.1 (GPT-2), where the formula has 84: on CUDA autocast computes its power in float32, on the CPU in
    bfloat16. Dropout on the CPU keeps scaled noise in the activation's own type, 8 h (4 h under autocast) instead of 2 h.

    >>> from recipes.recipe import load
    >>> gpt2, bert = model_of(load("gpt2_124m")), model_of(load("bert_base"))  # without and with dropout
    >>> [activations_per_layer(m, autocast=on) / m.hidden_size for m in (gpt2, bert) for on in (False, True)]
    [64.0, 36.0, 66.0, 42.0]

    Reference: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, arXiv:2205.05198,
    section 4, for 34 h in pure 16-bit arithmetic (residual stream included), counted anew here.
    """
    feed_forward = OTHERWISE.get(model.activation, INPUT_AND_OUTPUT)[autocast]
    residual = model.residual if autocast else 32
    return (residual + 2 * model.dropout) * model.hidden_size + feed_forward * model.intermediate_size


@dataclasses.dataclass(frozen=True)
class Memory:
    """Planned memory of one process at the fullest moment of a step, in bytes.

    A plan, not a promise. Not in it: the CUDA context and NCCL (about 1 GB), fragmentation, the input, buffers in which
    collectives wait.

    Attributes:
        parameters: 4 N (float32).
        gradients: 4 N; kept between micro-steps, and under DDP they are views of its buckets.
        moments: 8 N, Adam's two; the fused optimizer needs nothing more at the step.
        autocast_cache: 16-bit copies of the weights while a forward and its backward last; 0 in float32.
        gathered: parameters gathered from the other processes, sharded runs only.
        activations: what one micro-batch saves for its backward, and a layer's temporaries.
        head: logits and what is computed from them, the gradients of the vocabulary matrix and of the hidden states.
    """

    parameters: int
    gradients: int
    moments: int
    autocast_cache: int
    gathered: int
    activations: int
    head: int

    @property
    def total(self) -> int:
        """The sum of all items."""
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        size, unit = (1e9, "GB (1e9 bytes)") if self.total >= 1e9 else (1e6, "MB (1e6 bytes)")
        items = [
            f"{name.replace('_', ' ')} {num_bytes / size:.1f}"
            for name, num_bytes in dataclasses.asdict(self).items()
            if num_bytes
        ]
        return f"{self.total / size:.1f} {unit} per process, planned: {', '.join(items)}"


def planned_memory(
    recipe: Recipe, layout: Layout, *, mixed_precision: str, gradient_checkpointing: bool, sharded: bool
) -> Memory:
    """The memory that one process is planned to need for a recipe cut by a layout.

    States     4 N parameters + 4 N gradients + 8 N moments, in float32.
    Sharded    (FSDP2) these divided by the processes, and gathered in float32 one layer and all outside the layers. Autocast's
               copies are whole all the same. Not counted: a layer gathered ahead of its use, a layer's gradient that
               waits for its reduction. Not measured.

    To them comes the largest of four moments, with a of `activations_per_layer`, m = b V num_predicted logits, and V h the
    vocabulary matrix, whose gradient waits from the head to the end of the backward for the embedding's. Where two numbers
    are given, the first is for float32 and the second for autocast.

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
        activations     b T L a, with gradient_checkpointing b T (4 h (L - 1) + a), and the gradients on their way:
                        b T (4 h + 4 f) or b T (6 h + 2 f)
        head            4 V h
    End of the backward
        head            8 V h, both gradients of the matrix; 12 V h for BERT in float32, their sum as well

    Measured on the CPU, where gradients exist already: the plan of one forward and backward (all but the states) over the
    profiler's peak was 0.96 to 1.03 (0.92 to 1.00 with gradient_checkpointing) on 2 to 8 layers of width 128 and 256, the low
    end at 67 characters and 2 layers, where the products' weight gradients, not counted, weigh most. Below that only GPT-2
    under autocast with far more words than tokens (20,000 and 128: 0.89): the CPU casts each addend of the matrix's
    gradient. tests/test_memory.py holds it to 2 %, with gradient_checkpointing to 5 %. No GPU was measured.

    Args:
        recipe: of a task that `model_of` knows.
        layout: N and b; a micro-batch never exceeds a process's share.
        mixed_precision: no, bf16 or fp16.
        gradient_checkpointing: recompute the activations of each layer in the backward.
        sharded: FSDP2 instead of DDP.

    Raises:
        UsageError: a task without a formula.

    >>> from recipes.plan import solve_layout
    >>> from recipes.recipe import load
    >>> layout = solve_layout(num_processes=8, global_batch_size=512, per_device_train_batch_size=4)
    >>> plan = {"mixed_precision": "bf16", "gradient_checkpointing": False, "sharded": False}
    >>> print(planned_memory(load("gpt2_xl_8xa100"), layout, **plan))  # doctest: +NORMALIZE_WHITESPACE
    40.3 GB (1e9 bytes) per process, planned: parameters 6.2, gradients 6.2, moments 12.5, autocast cache 3.1,
    activations 11.4, head 0.9
    """
    model, autocast = model_of(recipe), mixed_precision != "no"
    h, layer = model.hidden_size, activations_per_layer(model, autocast=autocast)
    num_samples = min(layout.per_device_train_batch_size, layout.shares[0])
    tokens = num_samples * model.length
    share = -(-model.num_parameters // (layout.num_processes if sharded else 1))
    gathered = 4 * (model.parameters_per_layer + model.num_outside) if sharded else 0
    cached = 2 if autocast else 0  # bytes per parameter

    saved = tokens * model.num_layers * (4 * h if gradient_checkpointing else layer)
    recomputed = tokens * (layer - 4 * h) if gradient_checkpointing else 0
    temporary = tokens * (6 * h + 2 * model.intermediate_size if autocast else 4 * h + 4 * model.intermediate_size)
    outside, matrix = 8 * tokens * h, model.vocab_size * h
    num_cached = (matrix, model.parameters_per_layer) if gradient_checkpointing else (model.num_parameters,) * 2
    forward, backward = _head(model, num_samples, autocast)
    moments = (
        (cached * model.num_parameters, saved + outside, forward),
        (cached * num_cached[0], saved + outside, backward),
        (cached * num_cached[1], saved + recomputed + temporary, 4 * matrix),
        (0, 0, (8 if autocast or model.chunked else 12) * matrix),
    )
    cache, activations, head = max(moments, key=sum)
    return Memory(
        parameters=4 * share,
        gradients=4 * share,
        moments=8 * share,
        autocast_cache=cache,
        gathered=gathered,
        activations=activations,
        head=head,
    )


def _head(model: Model, num_samples: int, autocast: bool) -> tuple[int, int]:
    """Bytes of the head at the end of the forward and in its backward, as in `planned_memory`."""
    rows, matrix = num_samples * model.num_predicted, model.vocab_size * model.hidden_size
    logits = rows * model.vocab_size
    if not model.chunked:
        return (10 if autocast else 8) * logits, max(12 * logits, 4 * matrix + (2 if autocast else 4) * logits)
    num_chunks = -(-logits // LOGITS_AT_ONCE)
    gradients = 4 * matrix + 4 * rows * model.hidden_size
    return gradients + (10 if autocast else 8) * -(-rows // num_chunks) * model.vocab_size, gradients
