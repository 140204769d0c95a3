"""Decoders without a formula: what few of their layers take, traced by torch without weights, is what all of them take.

Optional: `workload.find_model` alone asks for it, and only for kinds that no formula knows. Tensors are fake, as in
`stepplan.trace`. A model is built whole, then computed with few of its layers, and once with one more of each kind. The
difference is what such a layer takes, of memory as of FLOPs: at each peak of a step further layers add what they save. Another
number of layers shows whether that holds; where it does not, all layers are traced.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from samestep._internals import torch_tracing, transformers_models
from samestep._internals.torch_tracing import FakeTensorMode, imitate_cuda
from samestep.cut.layout import LOGITS_AT_ONCE
from samestep.errors import reason
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.step.noise import Dropout
from stepplan import base_models, trace
from stepplan.base_models import UnknownShapeError
from stepplan.decoder import NF4_BLOCK, Tuning
from stepplan.transformer import Peak

SHORT = 16
"""Tokens of the samples that are traced where a model goes from token to token, as Mamba does without its kernel."""
MOST_ERROR = 0.005
"""Largest part by which another number of layers may differ from what the runs before it say."""
LEAST_ERROR = 1e6
"""Bytes, or operations, that it may differ by anyway."""

Line = trace.Line
Key = tuple[bool, bool, int]
"""(autocast, recomputed, samples) of a micro-batch."""
Sizes = tuple[int, int, int]
"""Samples of the micro-batches that are traced: one, as many as fill the head's logits at once, and twice as many."""
Lines = dict[bool, tuple[tuple[Line, Line], tuple[Line, Line]]]
"""Recomputed or not -> the forward's peak and the backward's, bytes beyond weights and gradients: below the second of `Sizes`
a line through the first two, from there on one through the last two."""


class Run(NamedTuple):
    """Traced numbers of a model with some of its layers.

    Attributes:
        num_parameters, num_trained, weight_bytes: all parameters, those with gradients, bytes as they are kept.
        flops, forward_flops, attention_flops, kernels: of a sample; of them those that are computed again where activations
            are, else the forward's; and those of fused attention.
        peaks: (autocast, recomputed, samples, phase) -> bytes beyond weights and gradients; phase 0 is the forward.
    """

    num_parameters: float
    num_trained: float
    weight_bytes: float
    flops: float
    forward_flops: float
    attention_flops: float
    kernels: float
    peaks: Mapping[tuple[bool, bool, int, int], float]

    def combine(self, others: Sequence["Run"], weights: Sequence[float]) -> "Run":
        """Return the weighted sum of this run and others, each number by itself."""
        runs = (self, *others)

        def add(find: Callable[[Run], float]) -> float:
            return sum(w * find(run) for run, w in zip(runs, weights, strict=True))

        def at(key: tuple[bool, bool, int, int]) -> float:
            return add(lambda run: run.peaks[key])

        counts = {name: add(operator.attrgetter(name)) for name in COUNTS}
        return Run(**counts, peaks={key: at(key) for key in self.peaks})

    def list_numbers(self, keys: Iterable[tuple[bool, bool, int, int]] | None = None) -> list[float]:
        """List all numbers, of the peaks those of some keys."""
        counts = [float(getattr(self, name)) for name in COUNTS]
        return counts + [self.peaks[key] for key in (self.peaks if keys is None else keys)]


COUNTS = tuple(name for name in Run.__annotations__ if name != "peaks")
"""Names of the numbers of a run that are no peaks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedDecoder:
    """A decoder in training, in the words of the planner's other models, with numbers that were traced.

    Attributes:
        num_parameters, num_trained, num_adapter: all parameters, those with gradients, those of adapters.
        weight_bytes: bytes of all weights as they are kept.
        num_layers, hidden_size, vocab_size, length: layers, width, vocabulary, tokens of a sample.
        flops_per_sample, forward_flops, attention_flops: forward and backward; what is computed again where activations are;
            fused attention in forward and backward.
        head_size: width of a head of attention.
        kernels_per_layer: operators of a layer, forward and backward.
        sizes: of the micro-batches that were traced.
        lines: traces the bytes beyond weights and gradients, in float32 or under autocast, once when asked.
        traffic: traces the bytes that a sample's forward saves where all is trained, likewise.
        cast: bytes of 16-bit copies of float32 weights that autocast keeps to the end of the forward.
        layer_parameters, layer_trained: parameters of the largest layer, those with gradients.
        layer_weight_bytes: bytes of the largest layer as it is kept; where nothing is quantised of all its numbers in 1 byte.
        outside_parameters, outside_trained: parameters outside the layers, those with gradients.
        working_bytes: bytes of the largest matrix while it is multiplied, of a base in 4 bits.
        traced_layers: layers that were traced.
        is_quantized: whether the base is in 4 bits.
    """

    num_parameters: int
    num_trained: int
    num_adapter: int
    weight_bytes: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    length: int
    flops_per_sample: int
    forward_flops: int
    attention_flops: int
    head_size: int
    kernels_per_layer: int
    sizes: Sizes
    lines: Callable[[bool], Lines]
    traffic: Callable[[bool], int]
    cast: int
    layer_parameters: int
    layer_trained: int
    layer_weight_bytes: float
    outside_parameters: int
    outside_trained: int
    working_bytes: int
    traced_layers: int
    is_quantized: bool = False

    unit = "token"
    has_equal_layers = True
    is_causal = True
    is_traced = True
    kernels = "eager"
    attention_kernel = None
    eager_attention = False

    @property
    def num_logits(self) -> int:
        """Logits of a sample."""
        return self.length * self.vocab_size

    @property
    def sequence_length(self) -> int:
        """T."""
        return self.length

    @property
    def stores_scores(self) -> bool:
        """Whether no fused kernel computes its attention, or there is none."""
        return not self.attention_flops

    @property
    def forward_share(self) -> float:
        """The part of all FLOPs that recomputing adds."""
        return self.forward_flops / self.flops_per_sample

    def saved_bytes(self, *, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves for its backward; logits exist in parts, and are left out."""
        return self.lines(autocast)[False][0][1].per_sample

    def traffic_bytes(self, *, autocast: bool) -> int:
        """Count the bytes by which the traffic between products is measured: those of `saved_bytes`, all trained."""
        return self.traffic(autocast)

    def peaks(self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool) -> tuple[Peak, ...]:
        """Return the largest moments of forward and backward, whose bytes all count as activations."""
        phases, part = self.lines(autocast)[bool(gradient_checkpointing)], num_samples >= self.sizes[1]
        most = [phase[part].fixed + num_samples * phase[part].per_sample for phase in phases]
        return tuple(Peak(0, size, 0, self.working_bytes) for size in most)

    def sharded_peaks(
        self, num_samples: int, *, autocast: bool, gradient_checkpointing: bool, gathered_bytes: int, num_processes: int
    ) -> tuple[Peak, ...]:
        """Count the bytes of `peaks` where FSDP2 shards the weights, as `Decoder.sharded_peaks` does.

        Gathered are two layers, what is outside of them, and in the backward a layer's gradient, in float32 while it is
        reduced. What is gathered in 16 bits is not cast again.
        """
        options = {"autocast": autocast, "gradient_checkpointing": gradient_checkpointing}
        forward, backward = self.peaks(num_samples, **options)
        w, layers = gathered_bytes, max(1, self.num_layers)
        spared = (self.cast if not gradient_checkpointing else self.cast // layers) * (w == 2 and autocast)
        layer = self.layer_weight_bytes * (1 if self.is_quantized else w)
        outside, gradient = w * self.outside_parameters, w * self.outside_trained
        reduced = (w + 4) * self.layer_trained
        return (
            forward._replace(
                activations=forward.activations - spared, gathered=round(outside + layer + forward.gathered)
            ),
            backward._replace(
                activations=backward.activations - spared,
                gathered=round(outside + 2 * layer + gradient + reduced + backward.gathered),
            ),
            Peak(0, 0, 0, round(outside + (w + 4) * self.outside_trained + 4 * self.layer_trained)),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Which layers are traced


MOST_KINDS = 6
"""Kinds of layers of a model of which not all layers are traced."""


class Choice(NamedTuple):
    """The layers that are traced.

    Attributes:
        base: places of the first run's.
        more: of each kind that has others, the place of one more layer, and how many are left out of the base.
    """

    base: list[int]
    more: list[tuple[int, int]]


def choose_layers(kinds: Sequence[Any]) -> Choice | None:
    """Choose layers that say what all take; None: too many kinds, or layers too few, to leave some out.

    The base has a layer of each kind, the first two (the first one's input has no gradient) and the last one, because in that
    the backward's peak may lie.

    Args:
        kinds: what tells layers apart, one for each.

    >>> choose_layers("aaaaaaaa")
    Choice(base=[0, 1, 7], more=[(2, 5)])
    >>> choose_layers("mmmammmammma"), choose_layers("abc")
    (Choice(base=[0, 1, 3, 11], more=[(2, 7), (7, 1)]), None)
    """
    n = len(kinds)
    base = sorted({0, min(1, n - 1), n - 1, *(kinds.index(kind) for kind in set(kinds))}) if n else []
    left = [place for place in range(n) if place not in base]
    more: dict[Any, list[int]] = {}
    for place in left:
        more.setdefault(kinds[place], []).append(place)
    if len(set(kinds)) > MOST_KINDS or len(left) < len(more) + 2:
        return None
    return Choice(base, [(places[0], len(places)) for places in more.values()])


def _describe_layer(layer: nn.Module) -> tuple[Any, ...]:
    """Return what tells a layer from others: its modules, sizes of its parameters, and what is set on its modules."""
    simple = (bool, int, float, str, type(None))
    settings = tuple(
        (name, type(module).__name__, key, value)
        for name, module in layer.named_modules()
        if not isinstance(module, Dropout)  # each has a number of its own
        for key, value in sorted(vars(module).items())
        if isinstance(value, simple) and not key.endswith(("layer_idx", "layer_id", "layer_number"))
    )
    return tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()), settings


def _find_layers(model: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """Find the list of a model's layers; None: there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return next((each for each in lists if len(each) == num_layers), None)


# ---------------------------------------------------------------------------------------------------------------------
# Traces


class _Tracer(trace.Tracer):
    """Counts fused attention, too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_flops = 0

    def note(self, packet: Any, flops: int) -> None:
        super().note(packet, flops)
        if "scaled_dot_product" in str(packet):
            self.attention_flops += flops


def _trace_run(
    model: SummedLosses, tracer: _Tracer, recipe: CausalLmFineTuning, keys: Sequence[Key], scale: int
) -> Run:
    """Trace micro-batches of a model with the layers that it has now.

    Args:
        model: on fake tensors.
        tracer: that has seen all of its tensors.
        recipe: whose samples it is given.
        keys: those that are recomputed last; the first one has a sample.
        scale: parts into which samples are cut.
    """
    transformers_models.keep_activations(model.causal_lm)
    recipe = dataclasses.replace(recipe, max_seq_length=-(-recipe.max_seq_length // scale))
    _forward(model, recipe, 1, True).backward()  # from now on there are gradients
    parameters = list(model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    states = tracer.now  # layers that were taken out are there, too
    peaks: dict[tuple[bool, bool, int, int], float] = {}
    counts: list[tuple[float, ...]] = []
    is_recomputed = False
    for autocast, recomputed, b in keys:
        if recomputed and not is_recomputed:  # once: each call hooks the embedding
            model.recompute_activations()
        is_recomputed = recomputed
        tracer.flops = tracer.kernels = tracer.attention_flops = 0
        tracer.peak()
        total = _forward(model, recipe, b * scale, autocast)
        forward_flops, forward_attention = tracer.flops, tracer.attention_flops
        peaks[autocast, recomputed, b, 0] = tracer.peak() - states
        total.backward()
        del total
        peaks[autocast, recomputed, b, 1] = tracer.peak() - states
        # In samples that are cut, a token sees fewer others
        more, forward_more = ((scale - 1) * flops for flops in (tracer.attention_flops, forward_attention))
        attention = scale * tracer.attention_flops
        counts.append((tracer.flops + more, forward_flops + forward_more, attention, tracer.kernels))
        if (
            recomputed and b == 1
        ):  # a head that computes its gradient in the forward has more there than is computed again
            counts[0] = (counts[0][0], tracer.flops + more - counts[0][0], *counts[0][2:])
    num_parameters, num_trained = (sum(x.numel() for x in some) for some in (parameters, trained))
    all_flops, of_forward, of_attention, kernels = counts[0]
    return Run(
        num_parameters=num_parameters,
        num_trained=num_trained,
        weight_bytes=sum(x.nbytes for x in parameters),
        flops=all_flops,
        forward_flops=of_forward,
        attention_flops=of_attention,
        kernels=kernels,
        peaks=peaks,
    )


def _find_scale(model: SummedLosses, tracer: _Tracer, recipe: CausalLmFineTuning) -> int:
    """Find the parts into which samples are cut: 1, or where a model goes from token to token, of about `SHORT` tokens.

    A step of as many operators as tokens would take minutes. As many tokens in more and shorter samples save as many bytes,
    because none but fused attention looks at pairs of them.
    """
    if recipe.max_seq_length < 2 * SHORT:
        return 1
    kernels = []
    for length in (SHORT, 2 * SHORT):
        tracer.kernels = 0
        _forward(model, dataclasses.replace(recipe, max_seq_length=length), 1, True)
        kernels.append(tracer.kernels)
    if kernels[1] - kernels[0] <= SHORT:
        return 1
    # As the program does when it finds, with numbers, that a state goes from one sequence of a row to the next
    model.is_padded = True
    has_kernel = transformers_models.supports_sdpa(model.causal_lm)
    model.causal_lm.set_attn_implementation("sdpa" if has_kernel else "eager")
    return recipe.max_seq_length // SHORT


def _forward(model: SummedLosses, recipe: CausalLmFineTuning, num_samples: int, autocast: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss: Tensor = model(**type(model).example(recipe, num_samples))[0].sum()
    return loss


class _Sizes(NamedTuple):
    """Numbers that the whole model's modules say, none of which is computed; as of `TracedDecoder`.

    Attributes:
        num_quantized, layer_quantized, quantized_bytes: frozen weights of the layers' linear modules, of the largest layer, and
            their bytes as they are traced.
        largest_matrix: weights of the largest of these.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    head_size: int
    num_parameters: int
    num_adapter: int
    num_quantized: int
    quantized_bytes: int
    largest_matrix: int
    cast: int
    layer_parameters: int
    layer_trained: int
    layer_quantized: int
    outside_parameters: int
    outside_trained: int


class _Traced(NamedTuple):
    """Traced numbers of all layers, the model's sizes, and how many layers were computed."""

    run: Run
    sizes: _Sizes
    traced_layers: int


def _trace_layers(recipe: CausalLmFineTuning, keys: Sequence[Key], attention: str) -> _Traced:
    """Trace a recipe's model with few of its layers, and extend what they take to all."""
    build, made = trace.make_builder(recipe, mixed_precision="bf16", attn_implementation=attention)
    assert isinstance(made, CausalLmFineTuning)
    recipe = made
    with FakeTensorMode(), _Tracer() as tracer:
        model = build().train()
        num_layers = model.causal_lm.config.get_text_config().num_hidden_layers
        layers = _find_layers(model, num_layers)
        kinds = [_describe_layer(layer) for layer in layers or ()]
        choice, size = choose_layers(kinds), _count_sizes(model, layers)
        kept = _Layers(model, layers)
        run = None
        if choice is not None:
            try:
                run = _extend(model, tracer, recipe, keys, kept, choice, kinds)
            except Exception:  # of any kind: a layer may count on those before it
                run = None
        if choice is not None and run is not None and run.num_parameters == size.num_parameters:
            return _Traced(run, size, len(choice.base) + len(choice.more) + 1)
        kept.keep(range(num_layers))
        scale = _find_scale(model, tracer, recipe)
        return _Traced(_trace_run(model, tracer, recipe, keys, scale), size, num_layers)


def _extend(
    model: SummedLosses,
    tracer: _Tracer,
    recipe: CausalLmFineTuning,
    keys: Sequence[Key],
    layers: "_Layers",
    choice: Choice,
    kinds: Sequence[Any],
) -> Run | None:
    """Trace the chosen layers, and extend what they take to all; None: another number of them does not take what it should."""
    places = [place for place, _ in choice.more]
    spare = next(i for i in range(len(kinds)) if i not in choice.base and i not in places)
    layers.keep(choice.base)
    scale = _find_scale(model, tracer, recipe)
    base = _trace_run(model, tracer, recipe, keys, scale)
    runs = []
    for place in places:
        layers.keep([*choice.base, place])
        runs.append(_trace_run(model, tracer, recipe, keys, scale))
    layers.keep([*choice.base, *places, spare])
    check = _trace_run(model, tracer, recipe, [key for key in keys if key[2] == 1], scale)
    ones = [1 + (kinds[place] == kinds[spare]) for place in places]
    run, expected = (base.combine(runs, (1 - sum(each), *each)) for each in ([n for _, n in choice.more], ones))
    pairs = zip(check.list_numbers(), expected.list_numbers(check.peaks), strict=True)
    is_line = all(math.isclose(a, b, rel_tol=MOST_ERROR, abs_tol=LEAST_ERROR) for a, b in pairs)
    return run if is_line else None


class _Layers:
    """The layers of a model, of which some are taken out, and put in again.

    Attributes:
        layers: the model's list; None: it has none.
        whole: all of them.
        config: the model's, whose list of kinds, where it has one, follows.
    """

    def __init__(self, model: SummedLosses, layers: nn.ModuleList | None):
        self.layers, self.whole = layers, list(layers or ())
        self.config = model.causal_lm.config.get_text_config()
        names = ("layer_types", "layers_block_type", "mlp_layer_types")
        lists = {name: getattr(self.config, name, None) for name in names}
        self.lists = {
            name: list(kinds) if isinstance(kinds, list) and len(kinds) == len(self.whole) else None
            for name, kinds in lists.items()
        }

    def keep(self, places: Iterable[int]) -> None:
        """Keep the layers of some places, in their order."""
        if self.layers is None:
            return
        places = sorted(places)
        del self.layers[:]
        self.layers.extend(self.whole[place] for place in places)
        for name, kinds in self.lists.items():
            if kinds is not None:
                getattr(self.config, name)[:] = [kinds[place] for place in places]


def _find_head_size(config: Any) -> int:
    """Find the width of a head of attention; 128 where a configuration does not say one for all layers."""
    try:
        return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    except Exception:  # of any kind: some raise their own where layers differ, and there may be no attention
        return 128


def _count_sizes(model: SummedLosses, layers: nn.ModuleList | None) -> _Sizes:
    """Count the parameters of the whole model and of its largest layer."""
    largest = max(layers or [nn.Identity()], key=lambda layer: sum(x.numel() for x in layer.parameters()))
    inside = {id(x) for layer in layers or () for x in layer.parameters()}
    parameters = list(model.parameters())
    linears = [x for layer in layers or () for x in layer.modules() if isinstance(x, nn.Linear)]
    config = model.causal_lm.config.get_text_config()
    own = list(largest.parameters())
    quantized = {id(x.weight): x.weight.numel() for x in linears if not x.weight.requires_grad}
    cast = {id(x.weight): x.weight.numel() for x in linears if x.weight.dtype == torch.float32}
    return _Sizes(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        head_size=_find_head_size(config),
        num_parameters=sum(x.numel() for x in parameters),
        num_adapter=sum(x.numel() for name, x in model.named_parameters() if "lora_" in name),
        num_quantized=sum(quantized.values()),
        quantized_bytes=sum({id(x.weight): x.weight.nbytes for x in linears if not x.weight.requires_grad}.values()),
        largest_matrix=max([0, *quantized.values()]),
        cast=2 * sum(cast.values()),
        layer_parameters=sum(x.numel() for x in own),
        layer_trained=sum(x.numel() for x in own if x.requires_grad),
        layer_quantized=sum(quantized.get(id(x), 0) for x in own),
        outside_parameters=sum(x.numel() for x in parameters if id(x) not in inside),
        outside_trained=sum(x.numel() for x in parameters if id(x) not in inside and x.requires_grad),
    )


# ---------------------------------------------------------------------------------------------------------------------
# For the planner


def trace_decoder(recipe: CausalLmFineTuning, attention: str = "sdpa") -> TracedDecoder:
    """Trace the decoder that a recipe fine-tunes, with its program's head, adapters and attention.

    Under autocast now, in float32 when the planner asks for it.

    Args:
        recipe: of texts, whose model no formula knows.
        attention: sdpa or eager.

    Raises:
        UsageError: torch or transformers is missing or too old; transformers does not know the model, or it cannot be traced.
    """
    trace.check_versions(trace.OLDEST)
    vocab_size = trace.find_shape(base_models.find_weights(recipe)).get("vocab_size", base_models.UNKNOWN_VOCABULARY)
    full = max(2, -(-(LOGITS_AT_ONCE // vocab_size + 1) // recipe.max_seq_length))
    sizes = 1, full, 2 * full
    plain = _Request(recipe, sizes, attention, True)
    whole: dict[str, Any] = {"lora_rank": None, "lora_alpha": None, "use_dora": False, "modules_to_save": ()}
    everything = plain if recipe.lora_rank is None else plain.change(whole)
    return _make_decoder(recipe, plain, everything)


class _Request(NamedTuple):
    """A trace that may be asked for: of a recipe, micro-batches of some sizes, with a kernel of attention.

    Attributes:
        recipe, sizes, attention: of the trace.
        recomputes: whether activations are computed again, too.
    """

    recipe: CausalLmFineTuning
    sizes: Sizes
    attention: str
    recomputes: bool

    def change(self, fields: Mapping[str, Any]) -> "_Request":
        """Return the request of a recipe with other fields, nothing recomputed."""
        return self._replace(recipe=dataclasses.replace(self.recipe, **fields), recomputes=False)

    def trace(self, autocast: bool) -> _Traced:
        """Trace, once for all that ask."""
        return _trace_once(*self, autocast)

    def fit_lines(self, autocast: bool) -> Lines:
        """Fit the lines of `TracedDecoder.lines`."""
        peaks, (one, full, double) = self.trace(autocast).run.peaks, self.sizes

        def fit(recomputed: bool, phase: int) -> tuple[Line, Line]:
            def line(small: int, large: int) -> Line:
                low, high = (peaks[autocast, recomputed, b, phase] for b in (small, large))
                slope = round((high - low) / (large - small))
                return Line(round(low) - small * slope, slope)

            return line(one, full), line(full, double)

        return {r: (fit(r, 0), fit(r, 1)) for r in (False, True)[: 1 + self.recomputes]}

    def count_saved(self, autocast: bool) -> int:
        """Count the bytes that the forward of a sample saves."""
        return self.fit_lines(autocast)[False][0][1].per_sample


@functools.lru_cache(maxsize=16)
def _trace_once(recipe: CausalLmFineTuning, sizes: Sizes, attention: str, recomputes: bool, autocast: bool) -> _Traced:
    name = recipe.model_name_or_path or recipe.architecture
    keys = [(autocast, recomputed, b) for recomputed in (False, True)[: 1 + recomputes] for b in sizes]
    try:
        with imitate_cuda(), torch_tracing.silence_log(), transformers_models.trace_experts():
            return _trace_layers(dataclasses.replace(recipe, base_quantization=None), keys, attention)
    except Exception as error:  # of any kind: the code is not ours
        raise UnknownShapeError(
            f"{name} has no formula, and cannot be traced: {reason(error)}. Train a few steps of it, --max_train_steps 5, to "
            "see what they take"
        ) from None


def _make_decoder(recipe: CausalLmFineTuning, plain: _Request, everything: _Request) -> TracedDecoder:
    """Make the planner's model of a trace; `everything` is one with all weights trained."""
    run, sizes, traced_layers = plain.trace(True)
    is_quantized = recipe.base_quantization is not None
    weight_bytes, layer_bytes, working = run.weight_bytes, float(sizes.layer_parameters), 0
    if is_quantized:
        each = Tuning().quantized_bytes
        weight_bytes += sizes.num_quantized * each - sizes.quantized_bytes
        layer_bytes = 4 * (layer_bytes - sizes.layer_quantized) + each * sizes.layer_quantized
        working = round(sizes.largest_matrix * (2 + 4 / NF4_BLOCK))
    return TracedDecoder(
        num_parameters=sizes.num_parameters,
        num_trained=round(run.num_trained),
        num_adapter=sizes.num_adapter,
        weight_bytes=round(weight_bytes),
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        length=recipe.max_seq_length * (1 if recipe.objective == "sft" else 2),
        flops_per_sample=round(run.flops),
        forward_flops=round(run.forward_flops),
        attention_flops=round(run.attention_flops),
        head_size=sizes.head_size,
        kernels_per_layer=round(run.kernels / sizes.num_layers),
        sizes=plain.sizes,
        lines=plain.fit_lines,
        traffic=everything.count_saved,
        cast=sizes.cast,
        layer_parameters=sizes.layer_parameters,
        layer_trained=sizes.layer_trained,
        layer_weight_bytes=layer_bytes,
        outside_parameters=sizes.outside_parameters,
        outside_trained=sizes.outside_trained,
        working_bytes=working,
        traced_layers=traced_layers,
        is_quantized=is_quantized,
    )
