"""What benchmarks/gpu.py measures: cases, the ways to compute them, their models, their data and their work.

Every case is computed in a plain way, by transformers' own layers; in a fast one; and in the fast one compiled.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
)

from samestep.cut.partition import partition
from samestep.data.ragged import make_cell
from samestep.models.attention import last_hidden_at, unpad
from samestep.planner import convnet, transformer
from samestep.recipe.recipe import Recipe, load
from samestep.step import batch_norm, losses

LENGTHS = Path(__file__).parent / "lengths.json"
ALIGNED = 64  # heads are filled up to a multiple of so many classes
NEVER = -1e4  # the logit of a class that is not there: its probability is 0 in every precision
VARLEN_ON = {"cuda"}  # kinds of device that have kernels of variable length


@dataclasses.dataclass(frozen=True)
class Case:
    """Work to do.

    Attributes:
        name: in tables.
        kind: bert, gpt2 or resnet.
        recipe: of the catalog.
        length: tokens of the longest sample; images: 1.
        batch: samples of a step.
        tokens: most tokens in a cell; images: most images.
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
    """All of them, at full size or tiny."""
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
        fast: see `BertSums`, `Gpt2Sums`, `ResNetSums`.
        compiled: layers by torch.compile.
        dropout: of hidden states, when timed.
    """

    name: str
    turn: int
    fast: bool = False
    compiled: bool = False
    dropout: float = 0.0


REFERENCE = Variant("reference", 0)
NAMES = {
    "bert": ("padded, sdpa", "end to end, aligned head"),
    "gpt2": ("sdpa", "cuDNN's attention, aligned head"),
    "resnet": ("contiguous", "channels_last"),
}


def variants(case: Case) -> list[Variant]:
    """The ways to do the work of a case."""
    plain, fast = NAMES[case.kind]
    found = [Variant(f"{fast}, compiled", 1, True, True), Variant(plain, 2), Variant(fast, 3, True)]
    if case.kind == "bert" and not case.ragged:  # as published trainings have it
        found.append(Variant(f"{fast}, compiled, dropout 0.1", 4, True, True, 0.1))
    return found


def recipe_of(case: Case, few: bool = False, dropout: float = 0.0) -> Recipe:
    """The case's recipe, without dropout of attention, which kernels of variable length have not."""
    none = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0} if case.kind == "bert" else {}
    return _load(case.recipe, json.dumps(case.changes | none | (FEW[case.kind] if few and not case.tiny else {})))


@functools.cache
def _load(name: str, changes: str) -> Recipe:
    return load(name, json.loads(changes))


# ---------------------------------------------------------------------------------------------------------------------
# Models that return sums over a cell, as the scripts' do


class BertSums(nn.Module):
    """Fast: samples end to end, the last layer at the wanted tokens only, a head of aligned size."""

    def __init__(self, bert: BertForPreTraining, fast: bool, kernel: str):
        super().__init__()
        self.bert, self.fast = bert, fast
        if fast:
            unpad(bert, kernel)
        else:
            bert.set_attn_implementation("sdpa")
        self.layers = [*bert.bert.encoder.layer]

    def forward(self, first_index, masked_index, masked_labels, next_sentence_label, **tokens) -> torch.Tensor:
        """Summed losses, [2]: masked tokens, pairs. See `bert_cell`."""
        hidden = (last_hidden_at if self.fast else bert_padded)(self.bert.bert, **tokens)
        head = self.bert.cls.predictions
        weight, bias = head.decoder.weight, head.decoder.bias
        if self.fast:
            bias = F.pad(bias, (0, -len(bias) % ALIGNED), value=NEVER)
            weight = filled_up(weight)
        token_logits = F.linear(head.transform(hidden.index_select(0, masked_index)), weight, bias)
        first = self.bert.bert.pooler(hidden.index_select(0, first_index)[:, None])
        targets = (token_logits, masked_labels), (self.bert.cls.seq_relationship(first), next_sentence_label)
        return torch.stack([losses.cross_entropy_sum(*target) for target in targets])


def bert_padded(
    bert: nn.Module, input_ids, token_type_ids, position_ids, ends, source, place, is_token, wanted, **_
) -> torch.Tensor:
    """As `last_hidden_at`, by transformers' own layers on a table of padded samples."""
    inputs = (input_ids, token_type_ids, position_ids)
    hidden = bert.embeddings(*(x[0][source] for x in inputs))
    for layer in bert.encoder.layer:
        hidden = layer(hidden, attention_mask=is_token)
    return hidden.flatten(0, 1).index_select(0, place.index_select(0, wanted))


def filled_up(weight: torch.Tensor) -> torch.Tensor:
    """[classes, width], with rows of 0 up to a multiple of ALIGNED, which products like."""
    return F.pad(weight, (0, 0, 0, -len(weight) % ALIGNED))


class Gpt2Sums(nn.Module):
    """Fast: sdpa asks cuDNN first (`kernels`), a head of aligned size."""

    def __init__(self, gpt2: GPT2LMHeadModel, fast: bool, chunked: bool):
        super().__init__()
        self.gpt2, self.fast, self.chunked = gpt2, fast, chunked
        gpt2.set_attn_implementation("sdpa")
        self.layers = [*gpt2.transformer.h]

    def forward(self, input_ids, labels) -> torch.Tensor:
        """Summed loss, [1], of blocks [S, T]. The blocks are called by themselves: the model looks at the positions first,
        and waits for the device to do so."""
        of = self.gpt2.transformer
        hidden = of.wte(input_ids) + of.wpe.weight[: input_ids.shape[1]]
        for block in of.h:
            hidden = block(hidden, attention_mask=None, use_cache=False)
        hidden, weight = of.ln_f(hidden).flatten(0, 1), self.gpt2.lm_head.weight
        if not self.chunked:
            return losses.cross_entropy_sum(F.linear(hidden, weight), labels)[None]
        if self.fast:  # eight more columns: 1 in the hidden states, NEVER in the rows of classes that are not there
            never = F.pad(weight.new_zeros(len(weight), 8), (0, 0, 0, -len(weight) % ALIGNED), value=NEVER / 8)
            weight = torch.cat([filled_up(weight), never], 1)
            hidden = F.pad(hidden, (0, 8), value=1.0)
        return losses.linear_cross_entropy(hidden, weight, labels)[0][None]


class ResNetSums(nn.Module):
    """Fast: channels_last."""

    def __init__(self, resnet: ResNetForImageClassification, fast: bool, label_smoothing: float):
        super().__init__()
        self.of_pixels = torch.channels_last if fast else torch.contiguous_format
        self.resnet, self.label_smoothing = resnet.to(memory_format=self.of_pixels), label_smoothing
        batch_norm.synchronize(self)
        of = resnet.resnet
        self.layers = [of.embedder, *(layer for stage in of.encoder.stages for layer in stage.layers)]

    def forward(self, pixel_values, labels) -> torch.Tensor:
        """Summed loss, [1]."""
        logits = self.resnet(pixel_values.to(self.resnet.dtype, memory_format=self.of_pixels)).logits
        return losses.cross_entropy_sum(logits, labels, self.label_smoothing)[None]


def build(case: Case, variant: Variant, device: torch.device, *, few: bool, half: bool = True) -> nn.Module:
    """The case's model with random weights, the same for all variants, in training mode.

    Args:
        few: of a few layers.
        half: it is computed in bfloat16.
    """
    recipe = recipe_of(case, few, 0.0 if few else variant.dropout)
    shape = recipe.architecture
    torch.manual_seed(recipe.seed)
    with torch.device(device):
        if case.kind == "bert":
            kernel = "varlen" if half and device.type in VARLEN_ON else "sdpa"
            model = BertSums(BertForPreTraining(BertConfig(**shape)), variant.fast, kernel)
        elif case.kind == "gpt2":
            gpt2 = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
            model = Gpt2Sums(gpt2, variant.fast, chunked=variant != REFERENCE)
        else:
            resnet = ResNetForImageClassification(ResNetConfig(**shape))
            model = ResNetSums(resnet, variant.fast, recipe.label_smoothing)
    if variant.compiled:
        for layer in model.layers:
            text = case.kind != "resnet"  # cells of many sizes
            layer.compile(dynamic=text, fullgraph=text, backend="eager" if case.tiny else "inductor")
    return model.train()


@contextlib.contextmanager
def kernels(case: Case, variant: Variant) -> Iterator[None]:
    """sdpa's kernels: math alone for the reference; cuDNN's first for the fast GPT-2."""
    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if variant == REFERENCE:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    elif variant.fast and case.kind == "gpt2":
        with sdpa_kernel(first, set_priority=True):
            yield
    else:
        yield


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
    """A step's cells, the counts of each, and its real work; see `flops_of`."""

    cells: list[dict[str, torch.Tensor | None]]
    counts: list[torch.Tensor]
    samples: int
    tokens: int
    flops: int
    flops_done: int


def draw_lengths(rng: np.random.Generator, count: int, length: int, table: dict) -> np.ndarray:
    """Lengths of samples as in a table of LENGTHS, whose longest are stretched to `length`."""
    bins, full = np.array(table["counts"]), table["full"]
    chosen = rng.choice(len(bins) + 1, size=count, p=np.append(bins, full) / (bins.sum() + full))
    drawn = 1 + (chosen + rng.random(count)) / len(bins) * (length - 1)
    return np.where(chosen == len(bins), length, np.clip(drawn.astype(np.int64), min(5, length), length - 1))


def zipf(rng: np.random.Generator, size: int | tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Token ids, some of them much more often than others."""
    weights = 1 / (np.arange(vocab_size) + 2.7)
    return rng.choice(vocab_size, size=size, p=weights / weights.sum())


def draw(case: Case, seed: int) -> list:
    """The samples of a step: pairs, blocks of length + 1 tokens, or (image, label)."""
    rng, recipe = np.random.default_rng(seed), recipe_of(case)
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


def bert_cell(pairs: list[Pair]) -> dict[str, torch.Tensor | None]:
    """A cell's tensors, as `SentencePairs.collate` makes them."""
    num_wanted = np.array([1 + len(pair.places) for pair in pairs])
    first_index = np.cumsum(num_wanted) - num_wanted
    tokens, seconds = [pair.tokens for pair in pairs], [pair.second for pair in pairs]
    return {
        **make_cell(tokens, seconds, [np.append(0, pair.places) for pair in pairs]),
        "first_index": torch.from_numpy(first_index),
        "masked_index": torch.from_numpy(np.delete(np.arange(num_wanted.sum()), first_index)),
        "masked_labels": torch.from_numpy(np.concatenate([pair.labels for pair in pairs])),
        "next_sentence_label": torch.tensor([pair.is_random for pair in pairs]),
    }


def make_step(case: Case, variant: Variant, samples: list, device: torch.device, tokens: int, k: int = 1) -> Step:
    """Cut samples into cells of at most about `tokens` tokens, and at least k of them."""
    of_bert = case.kind == "bert"
    lengths = np.array([len(pair.tokens) for pair in samples]) if of_bert else np.full(len(samples), case.length)
    if of_bert and not variant.fast and k == 1:  # padding counts, too
        places = partition(lengths, 1, len(samples), max(tokens, int(lengths.max())))[0]
    else:  # about equally many tokens in each
        k = max(k, math.ceil(lengths.sum() / tokens))
        places = [cells[0] for cells in partition(lengths, k, len(samples))]
    cells, counts = [], []
    for own in ([samples[place] for place in cell] for cell in places):
        if of_bert:
            cells.append(bert_cell(own))
            counts.append(torch.tensor([len(cells[-1]["masked_labels"]), len(own)]))
        elif case.kind == "gpt2":
            blocks = torch.from_numpy(np.stack(own))
            cells.append({"input_ids": blocks[:, :-1].contiguous(), "labels": blocks[:, 1:].flatten()})
            counts.append(torch.tensor([len(own) * case.length]))
        else:
            images, labels = zip(*own, strict=True)
            images = torch.stack(images).to(memory_format=torch.channels_last)
            cells.append({"pixel_values": images, "labels": torch.tensor(labels)})
            counts.append(torch.tensor([len(own)]))
    if device.type == "cuda":
        cells = [{name: x if x is None else x.pin_memory() for name, x in cell.items()} for cell in cells]
    return Step(cells, counts, len(samples), int(lengths.sum()), *flops_of(case, variant, samples))


def flops_of(case: Case, variant: Variant, samples: list) -> tuple[int, int]:
    """FLOPs of real tokens: by the published formula of the whole model, and of those the ones that are done.

    The formula counts what is not needed, and not done: of GPT-2 the attention to later tokens, 6 L h T (T - 1) of a sample;
    of BERT, when it is fast, the last layer's query, attention, output and feed-forward layer of unwanted tokens, each
    3 (4 h^2 + 4 h f + 4 h T). Padding is done, and counted nowhere.
    """
    recipe = recipe_of(case)
    shape = recipe.architecture
    if case.kind == "resnet":
        return (len(samples) * convnet.resnet(shape, recipe.image_height, recipe.image_width).flops_per_sample,) * 2
    if case.kind == "gpt2":
        whole = len(samples) * transformer.gpt2(shape, case.length).flops_per_sample
        later = 6 * shape["n_layer"] * shape["n_embd"] * case.length * (case.length - 1)
        return whole, whole - len(samples) * later
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    _, h, f, _ = of = [shape[name] for name in names]
    sizes = [(len(pair.tokens), len(pair.places)) for pair in samples]
    whole = sum(transformer.bert_flops(*of, length, masked) for length, masked in sizes)
    unwanted = sum(3 * (length - masked - 1) * 4 * h * (h + f + length) for length, masked in sizes)
    return whole, whole - variant.fast * unwanted
