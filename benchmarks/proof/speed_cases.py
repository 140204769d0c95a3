"""What speed.py measures: cases, the ways to compute them, their data and their work.

Models are those of the scripts, by each of their own kernels, plain and compiled as the scripts compile them.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from samestep.cut.partition import partition
from samestep.data.ragged import make_pretraining_micro_batch
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step import batch_norm
from stepplan import convnet, transformer

LENGTHS = Path(__file__).parent / "lengths.json"


@dataclasses.dataclass(frozen=True)
class Case:
    """Work to do.

    Attributes:
        name: in tables.
        kind: bert, gpt2 or resnet.
        recipe: of the catalog.
        length: tokens of the longest sample; images: 1.
        batch: samples of a step.
        tokens: most tokens in a micro-batch; images: most images.
        checked: samples that are checked.
        ragged: whether samples are shorter, as in LENGTHS.
        published: (work, length) of rows of PUBLISHED that are shown beside it.
        changes: fields of the recipe that are changed.
        tiny: a test, no measurement.
    """

    name: str
    kind: str
    recipe: str
    length: int
    batch: int
    tokens: int
    checked: int
    ragged: bool = False
    published: tuple[tuple[str, int | None], ...] = ()
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    tiny: bool = False


PHASES = ("bert_large_phase1", "bert_large_phase2")
SQUAD = ("bert_large_squad", 384)
CASES = [
    Case("BERT-Large, length 128", "bert", PHASES[0], 128, 256, 32768, 32, False, (("bert_large", 128),)),
    Case("BERT-Large, length 128, as real pairs", "bert", PHASES[0], 128, 256, 32768, 32, ragged=True),
    Case("BERT-Large, length 512", "bert", PHASES[1], 512, 256, 32768, 10, False, (("bert_large", 512), SQUAD)),
    Case("BERT-Large, length 512, as real pairs", "bert", PHASES[1], 512, 256, 32768, 10, ragged=True),
    Case("GPT-2 124M", "gpt2", "gpt2_124m", 1024, 480, 32768, 5, False, (("gpt2_124m", 1024),)),
    Case("GPT-2 1558M", "gpt2", "gpt2_xl_8xa100", 1024, 64, 16384, 5, False, (("gpt2_1558m", 1024),)),
    Case("ResNet-50", "resnet", "resnet50_imagenet_4xt4", 1, 256, 256, 12, False, (("resnet50", None),)),
]
# What is checked: few layers; of BERT larger weights, so that attention is far from a mean over all tokens.
FEW = {
    "bert": {"num_hidden_layers": 2, "initializer_range": 0.05},
    "gpt2": {"n_layer": 2},
    "resnet": {"depths": [1, 1, 1, 1]},
}
TINY = {
    "bert": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    | {"initializer_range": 0.2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "resnet": {"image_height": 32, "image_width": 32, "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
}


def cases(tiny: bool) -> list[Case]:
    """List all cases, at full size or tiny."""
    return [_tiny(case) for case in CASES] if tiny else CASES


def _tiny(case: Case) -> Case:
    length, changes = {128: 16, 512: 32, 1024: 32, 1: 1}[case.length], TINY[case.kind]
    if case.kind != "resnet":
        changes = changes | {"vocab_size": 500, "max_grad_norm": 0.2}
        changes |= {"max_seq_length": length} if case.kind == "bert" else {"block_size": length, "n_positions": length}
    batch, tokens = {"bert": (12, 96), "gpt2": (5, 64), "resnet": (12, 12)}[case.kind]
    small = {"length": length, "batch": batch, "tokens": tokens, "checked": 8, "changes": changes}
    return dataclasses.replace(case, **small, tiny=True)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A way to do it.

    Attributes:
        name: in tables.
        turn: variants of all cases run in this order, so that the last ones are left out when time is short.
        kernel: one of the model's `kernel_candidates`.
        compiled: layers by torch.compile.
        dropout: of hidden states, when timed.
    """

    name: str
    turn: int
    kernel: str
    compiled: bool = False
    dropout: float = 0.0


REFERENCE = Variant("reference", 0, "sdpa")  # which is computed by its math kernel


def variants(case: Case, device: torch.device) -> list[Variant]:
    """List the ways to do the work of a case in bfloat16: the kernels that its script chooses from."""
    recipe = make_recipe(case)
    with torch.device("meta"):
        model = recipe.parts.find("model").from_recipe(recipe, None)
    compiled = [*candidates(model, recipe, device, "bf16", compiled=True)]
    result = [Variant(f"{kernel}, compiled", 1, kernel, True) for kernel in compiled]
    result += [Variant(kernel, 2, kernel) for kernel in candidates(model, recipe, device, "bf16")]
    if case.kind == "bert" and not case.ragged:  # as published trainings have it
        result.append(Variant(f"{compiled[-1]}, compiled, dropout 0.1", 3, compiled[-1], True, 0.1))
    return result


def candidates(
    model: SummedLosses, recipe: Recipe, device: torch.device, mixed_precision: str, compiled: bool = False
) -> Mapping[str, Callable[[], object]]:
    """List the model's kernels, as its script asks for them."""
    settings = recipe.parts.find("settings")(recipe=recipe.name)
    if hasattr(settings, "torch_compile"):
        settings = dataclasses.replace(settings, torch_compile=compiled)
    return model.kernel_candidates(device, mixed_precision, settings)


def build(
    case: Case, variant: Variant, device: torch.device, *, few: bool, mixed_precision: str = "bf16"
) -> SummedLosses:
    """Build the case's model with random weights, the same for all variants, in training mode.

    Args:
        few: of a few layers.
        mixed_precision: that it is computed in; without the variant's kernel there, the model's first one is taken.
    """
    recipe = make_recipe(case, few, 0.0 if few else variant.dropout)
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        model = recipe.parts.find("model").from_recipe(recipe, None)
    kernels = candidates(model, recipe, device, mixed_precision, variant.compiled)
    kernels.get(variant.kernel, next(iter(kernels.values())))()
    if variant.compiled:
        model.compile_layers()
    batch_norm.synchronize(model)
    return model.train()


def make_recipe(case: Case, few: bool = False, dropout: float = 0.0) -> Recipe:
    """Make the case's recipe, from random weights, without dropout of attention, which kernels of variable length have not."""
    changes = case.changes | {"model_name_or_path": None} | (FEW[case.kind] if few and not case.tiny else {})
    if case.kind == "bert":
        changes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    return _load(case.recipe, json.dumps(changes))


@functools.cache
def _load(name: str, changes: str) -> Recipe:
    return load(name, json.loads(changes))


# ---------------------------------------------------------------------------------------------------------------------
# Data


class Pair(NamedTuple):
    """A sample of BERT: its tokens, where the second segment begins, what is masked, and whether the second is random."""

    tokens: np.ndarray
    second: int
    places: np.ndarray
    labels: np.ndarray
    is_random: int


class Step(NamedTuple):
    """A step's micro-batches, the counts of each, and its real work; see `count_flops`."""

    micro_batches: list[dict[str, torch.Tensor | None]]
    counts: list[torch.Tensor]
    samples: int
    tokens: int
    flops: int
    flops_done: int


def draw_lengths(rng: np.random.Generator, count: int, length: int, table: dict) -> np.ndarray:
    """Draw lengths of samples as in a table of LENGTHS, whose longest are stretched to `length`."""
    bins, full = np.array(table["counts"]), table["full"]
    bin_index = rng.choice(len(bins) + 1, size=count, p=np.append(bins, full) / (bins.sum() + full))
    lengths = 1 + (bin_index + rng.random(count)) / len(bins) * (length - 1)
    return np.where(bin_index == len(bins), length, np.clip(lengths.astype(np.int64), min(5, length), length - 1))


def zipf(rng: np.random.Generator, size: int | tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Draw token ids, some of them much more often than others."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    return rng.choice(vocab_size, size=size, p=weights / weights.sum())


def draw(case: Case, seed: int) -> list:
    """Draw the samples of a step: pairs, blocks of length + 1 tokens, or (image, label)."""
    rng, recipe = np.random.default_rng(seed), make_recipe(case)
    if case.kind == "gpt2":
        return list(zipf(rng, (case.batch, case.length + 1), recipe.vocab_size))
    if case.kind == "resnet":
        generator = torch.Generator().manual_seed(seed)
        images = torch.randn(case.batch, 3, recipe.image_height, recipe.image_width, generator=generator)
        return list(zip(images, rng.integers(recipe.num_labels, size=case.batch).tolist(), strict=True))
    lengths = np.full(case.batch, case.length)
    if case.ragged:
        tables = json.loads(LENGTHS.read_text())["lengths"]
        lengths = draw_lengths(rng, case.batch, case.length, tables.get(str(case.length), tables["128"]))
    pairs = []
    for length in lengths.tolist():
        tokens = zipf(rng, length, recipe.vocab_size)
        places = np.sort(rng.permutation(np.arange(1, length - 1))[: max(1, round((length - 3) * 0.15))])
        labels = tokens[places]
        tokens[places] = 3
        pairs.append(Pair(tokens, int(rng.integers(2, length - 1)), places, labels, int(rng.integers(2))))
    return pairs


def make_step(
    case: Case, samples: list, device: torch.device, *, max_tokens: int | None = None, max_samples: int | None = None
) -> Step:
    """Cut samples into micro-batches as the scripts do."""
    is_bert = case.kind == "bert"
    lengths = np.array([len(pair.tokens) for pair in samples]) if is_bert else np.full(len(samples), case.length)
    micro_batches, counts = [], []
    for places in partition(lengths, 1, max_samples or len(samples), max_tokens)[0]:
        part = [samples[place] for place in places]
        if is_bert:
            tokens, seconds, masked, labels, is_random = zip(*part, strict=True)
            micro_batches.append(make_pretraining_micro_batch(tokens, seconds, masked, labels, is_random))
            counts.append(torch.tensor([sum(map(len, labels)), len(part)]))
        elif case.kind == "gpt2":
            blocks = torch.from_numpy(np.stack(part))
            constants = {"position_ids": None, "label_index": None}  # of one document, not padded
            micro_batches.append(
                {"input_ids": blocks[:, :-1].contiguous(), "labels": blocks[:, 1:].flatten(), **constants}
            )
            counts.append(torch.tensor([len(part) * case.length]))
        else:
            images, labels = zip(*part, strict=True)
            images = torch.stack(images).to(memory_format=torch.channels_last)
            micro_batches.append({"pixel_values": images, "labels": torch.tensor(labels)})
            counts.append(torch.tensor([len(part)]))
    if device.type == "cuda":
        micro_batches = [
            {name: x if x is None else x.pin_memory() for name, x in micro_batch.items()}
            for micro_batch in micro_batches
        ]
    return Step(micro_batches, counts, len(samples), int(lengths.sum()), *count_flops(case, samples))


def count_flops(case: Case, samples: list) -> tuple[int, int]:
    """Count FLOPs of real tokens: by the published formula of the whole model, and those that are done.

    The formula counts what is not needed, and not done: of GPT-2 the attention to later tokens, 6 L h T (T - 1) of a sample;
    of BERT the last layer's query, attention, output and feed-forward layer of unwanted tokens, each
    3 (4 h^2 + 4 h f + 4 h T). Padding is done, and counted nowhere.
    """
    recipe = make_recipe(case)
    shape = recipe.architecture
    if case.kind == "resnet":
        return (len(samples) * convnet.resnet(shape, recipe.image_height, recipe.image_width).flops_per_sample,) * 2
    if case.kind == "gpt2":
        whole = len(samples) * transformer.gpt2(shape, case.length).flops_per_sample
        later = 6 * shape["n_layer"] * shape["n_embd"] * case.length * (case.length - 1)
        return whole, whole - len(samples) * later
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    _, h, f, _ = dimensions = [shape[name] for name in names]
    sizes = [(len(pair.tokens), len(pair.places)) for pair in samples]
    whole = sum(transformer.bert_flops(*dimensions, length, masked) for length, masked in sizes)
    unwanted = sum(3 * (length - masked - 1) * 4 * h * (h + f + length) for length, masked in sizes)
    return whole, whole - unwanted
