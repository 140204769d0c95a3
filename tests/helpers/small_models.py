"""Small configurations of real model classes, small recipes, a tokenizer, and the memory that a step allocates."""

import bisect
import itertools
import json
import math
from collections.abc import Iterable

import tokenizers
import torch
import transformers

from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe

TEXT = {"vocab_size": 300, "max_position_embeddings": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
BERT = TEXT | {"hidden_size": 32, "intermediate_size": 48}
LLAMA = BERT | {"num_key_value_heads": 2}
SMALL_CONFIGS = {
    "BertForPreTraining": ("BertConfig", BERT),
    "BertForMaskedLM": ("BertConfig", BERT),
    "BertForSequenceClassification": ("BertConfig", BERT | {"num_labels": 5}),
    "RobertaForMaskedLM": ("RobertaConfig", BERT),
    "RobertaForSequenceClassification": ("RobertaConfig", BERT | {"num_labels": 5}),
    "GPT2LMHeadModel": ("GPT2Config", {"vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic", "num_labels": 7},
    ),
}
SMALL_DECODERS = {
    "LlamaForCausalLM": ("LlamaConfig", LLAMA),
    "MistralForCausalLM": ("MistralConfig", LLAMA | {"tie_word_embeddings": True}),
    "Qwen2ForCausalLM": ("Qwen2Config", LLAMA | {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", LLAMA | {"head_dim": 16}),
}
SMALL_RECIPES = {
    "gpt2": {"n_embd": 128, "n_head": 2, "n_positions": 192, "block_size": 128, "vocab_size": 1000},
    "bert": {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 384, "max_position_embeddings": 192}
    | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_seq_length": 128, "vocab_size": 4000},
}
NUM_SAMPLES = 4


def save(folder, kind: str, **changes) -> transformers.PreTrainedConfig:
    name, shape = (SMALL_CONFIGS | SMALL_DECODERS)[kind]
    config = getattr(transformers, name)(**shape | changes, architectures=[kind])
    config.save_pretrained(folder)
    return config


def small(kind: str, num_layers: int = 5, activation: str | None = None, **changes) -> Recipe:
    layers, act = {"gpt2": ("n_layer", "activation_function"), "bert": ("num_hidden_layers", "hidden_act")}[kind]
    changes = SMALL_RECIPES[kind] | {layers: num_layers} | ({act: activation} if activation else {}) | changes
    return load({"gpt2": "gpt2_124m", "bert": "bert_base"}[kind], changes)


class _LatestEnd:
    """Ends of events by their beginnings: looked up, for a step has thousands of each kind."""

    def __init__(self, events: Iterable[dict]):
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events)
        self.starts = [start for start, _ in spans]
        self.ends = [-math.inf, *itertools.accumulate((end for _, end in spans), max)]

    def before(self, time: float) -> float:
        """Return the latest end of the events that began at a time or before it; minus infinity: there are none."""
        return self.ends[bisect.bisect_right(self.starts, time)]


PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}


def peak(step, folder) -> int:
    """Measure the peak bytes that `step` allocates, over those allocated before it: exact, from the profiler's events.

    With gloo an upper bound: its threads free memory, too, which the profiler does not see until the address is used again.
    Left out are gloo's own copies of what it sends, and what a matrix product allocates and frees inside of itself: some CPUs
    compute bf16 by way of float32.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    collectives = _LatestEnd(e for e in events if e["name"].startswith("c10d::"))
    products = _LatestEnd(e for e in events if e["name"] in PRODUCTS)
    changes = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    ends, freed = {}, {}  # place of an allocation -> when it is freed; address -> when it is freed next
    for place, event in reversed(list(enumerate(changes))):
        address = event["args"]["Addr"]
        if event["args"]["Bytes"] < 0:
            freed[address] = event["ts"]
        else:
            ends[place] = freed.pop(address, math.inf)
    sizes, total, largest = {}, 0, 0  # by address; 0: a copy of gloo's, or inside of a product
    for place, event in enumerate(changes):
        size, address, time = event["args"]["Bytes"], event["args"]["Addr"], event["ts"]
        if size < 0:
            total -= sizes.pop(address, -size)
            continue
        total -= sizes.pop(address, 0)
        is_left_out = collectives.before(time) >= time or products.before(time) >= ends[place]
        sizes[address] = 0 if is_left_out else size
        total += sizes[address]
        largest = max(largest, total)
    return largest


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Make a tokenizer of 20 words and five special ones."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(20))]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model), **names)
