"""Parameters, FLOPs and planned memory against the real models: on the meta device, and by allocations on the CPU."""

import dataclasses
import itertools
import json
import statistics
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from cases import keep, thorough
from common import PLANNED, ROOT, load_benchmark
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import NUM_SAMPLES, peak, small
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.recipe import Recipe
from samestep.recipe.tasks.text_pretraining import TextPretraining
from samestep.step import losses
from stepplan import base_models, peers, transformer
from stepplan.memory import Memory, model_from_recipe, planned_memory
from stepplan.trace import trace_recipe
from stepplan.transformer import Transformer
from stepplan.workload import from_recipe


def build(recipe: Recipe) -> torch.nn.Module:
    if recipe.task == "gpt2_pretraining":
        return GPT2LMHeadModel(GPT2Config(**recipe.architecture, bos_token_id=None, eos_token_id=None))
    return BertForPreTraining(BertConfig(**recipe.architecture))


def padded(recipe: Recipe) -> Transformer:
    """Make the shape of transformers' own model: its last layer is computed for all tokens."""
    shape = model_from_recipe(recipe)
    if recipe.task != "bert_pretraining":
        return shape
    return transformer.bert(recipe.architecture, recipe.max_seq_length, shape.num_predicted)


def plan(recipe: Recipe, b: int, n: int = 1, **changes) -> Memory:
    layout = solve_layout(num_processes=n, global_batch_size=recipe.global_batch_size, per_device_train_batch_size=b)
    return planned_memory(padded(recipe), layout, **{"mixed_precision": "bf16"} | changes)


def forward(model: torch.nn.Module, recipe: Recipe, autocast: bool) -> torch.Tensor:
    """Compute the summed loss of NUM_SAMPLES whole samples, without padding; BERT as transformers computes it."""
    shape, device = padded(recipe), model.device
    ids = torch.zeros(NUM_SAMPLES, shape.length, dtype=torch.int64, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        if recipe.task == "gpt2_pretraining":
            hidden = model.transformer(ids, use_cache=False).last_hidden_state
            labels, weight = ids.flatten(), model.lm_head.weight
            return losses.linear_cross_entropy(hidden.flatten(0, 1), weight, labels, transformer.LOGITS_AT_ONCE)[0]
        hidden, pooled = model.bert(ids, return_dict=False)
        places = torch.arange(NUM_SAMPLES * shape.num_predicted, device=device)
        token_logits = model.cls.predictions(hidden.flatten(0, 1)[places])
        pair_logits = model.cls.seq_relationship(pooled)
        pairs = losses.cross_entropy_sum(pair_logits, torch.zeros(NUM_SAMPLES, dtype=torch.int64, device=device))
        return losses.cross_entropy_sum(token_logits, torch.zeros_like(places)) + pairs


# ---------------------------------------------------------------------------------------------------------------------
# Parameters


@pytest.mark.parametrize("name", [name for name in catalog_names() if isinstance(load(name), TextPretraining)])
def test_parameters_are_the_real_models(name):
    recipe = load(name)
    if hasattr(recipe, "model_name_or_path"):
        recipe = dataclasses.replace(recipe, model_name_or_path=None)
    with torch.device("meta"):
        model = recipe.parts.find("model").from_recipe(recipe, None)
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    shape = model_from_recipe(recipe)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    of_layer = shape.layer.num_parameters if isinstance(shape, Transformer) else shape.shape.layer_parameters
    assert of_layer == sum(p.numel() for p in layers[-1].parameters())


def test_an_unusual_shape_is_counted_too():
    for recipe in (small("gpt2"), small("bert")):
        with torch.device("meta"):
            assert model_from_recipe(recipe).num_parameters == sum(p.numel() for p in build(recipe).parameters())


def test_published_sizes():
    sizes = {
        name: model_from_recipe(load(name)).num_parameters
        for name in ("gpt2_xl_8xa100", "gpt2_124m", "bert_large_phase1")
    }
    assert sizes == {"gpt2_xl_8xa100": 1_557_611_200, "gpt2_124m": 124_439_808, "bert_large_phase1": 336_226_108}


def test_a_task_without_a_formula_is_named():
    with pytest.raises(UsageError, match="task audio has no formula"):
        model_from_recipe(SimpleNamespace(task="audio", parts=SimpleNamespace(shape=None)))


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs


def test_flops_of_gpt2_are_those_of_palm_without_positions():
    assert model_from_recipe(load("gpt2_124m")).flops_per_sample / 1024 / 1e9 == pytest.approx(0.855, abs=5e-4)
    assert model_from_recipe(load("gpt2_xl_8xa100")).flops_per_sample / 1024 / 1e9 == pytest.approx(10.28, abs=5e-3)


def test_flops_of_bert_large():
    for length, num_predicted, gigaflops in ((128, 20, 240.6), (512, 80, 1020.5)):
        assert transformer.bert_flops(30522, 1024, 4096, 24, length, num_predicted) / 1e9 == pytest.approx(
            gigaflops, abs=0.05
        )
    phase2 = model_from_recipe(load("bert_large_phase2"))
    assert (phase2.num_predicted, model_from_recipe(load("bert_large_phase1")).num_predicted) == (76, 19)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_flops_are_those_that_torch_counts(kind):
    recipe = small(kind)
    shape = model_from_recipe(recipe)
    model = build(recipe)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        if kind == "gpt2":  # its chunked head has no backward to count: the plain one multiplies the same matrices
            ids = torch.zeros(NUM_SAMPLES, shape.length, dtype=torch.int64)
            model(ids, use_cache=False).logits.sum().backward()
        else:
            forward(model, recipe, autocast=False).backward()
    not_multiplied = sum(p.numel() for p in model.parameters() if p.ndim == 1) if kind == "gpt2" else 0
    expected = shape.flops_per_sample - 6 * shape.length * not_multiplied  # 6 N counts biases and norms: 0.1 % of 124M
    assert counter.get_total_flops() == NUM_SAMPLES * expected


# ---------------------------------------------------------------------------------------------------------------------
# Memory by hand


def test_gpt2_xl_on_eight_a100():
    recipe, n, tokens, v, h = load("gpt2_xl_8xa100"), 1_557_611_200, 4 * 1024, 50257, 1600
    ours = plan(recipe, 4, 8)
    assert ours == Memory(
        parameters=4 * n,
        gradients=4 * n,
        moments=8 * n,
        autocast_cache=2 * n,
        gathered=0,
        activations=48 * 36 * tokens * h + 8 * tokens * h,
        head=4 * v * h + 4 * tokens * h + 10 * 1335 * v,  # chunks of 1,335 rows, the most below 2**26 logits
    )
    assert ours.total == sum(
        [ours.parameters, ours.gradients, ours.moments, ours.autocast_cache, ours.activations, ours.head]
    )
    assert 1335 * v <= transformer.LOGITS_AT_ONCE < 1336 * v
    assert ours.total / 1e9 == pytest.approx(40.4, abs=0.05)
    full_logits = ours.total - 10 * 1335 * v + (4 + 4 + 2) * tokens * v
    assert full_logits / 1e9 == pytest.approx(41.8, abs=0.05)
    assert full_logits / 1e9 == pytest.approx(42.9, rel=0.05)  # with two dropout masks, 2 sbh per layer, it is 42.4


def test_gpt2_xl_sharded_and_recomputed():
    recipe, n, tokens, v, h = load("gpt2_xl_8xa100"), 1_557_611_200, 16 * 1024, 50257, 1600
    ours = plan(recipe, 16, 8, sharded=True, gradient_checkpointing=True)
    layer, root = 12 * h * h + 13 * h, (v + 1024) * h + 2 * h
    assert (ours.parameters, ours.gradients, ours.moments) == (4 * n // 8, 4 * n // 8, 8 * n // 8)
    # Gathered in bf16: the layer before the last is the fullest moment, its input and its activations there again
    assert (ours.autocast_cache, ours.gathered) == (0, 2 * (3 * layer + root) + 4 * layer)
    assert ours.activations == tokens * h * (46 * 4 + 36 + 14)
    assert ours.head == 2 * v * h
    ours = plan(recipe, 16, 8, sharded=True, gradient_checkpointing=True, fsdp_gather="fp32")
    assert (ours.autocast_cache, ours.gathered) == (2 * n, 4 * (layer + root))
    assert ours.activations == tokens * h * (48 * 4 + 8)
    assert ours.head == 4 * v * h + 4 * tokens * h + 10 * 1335 * v
    assert plan(recipe, 16, 8, sharded=True, mixed_precision="no").gathered == 4 * (layer + root)
    assert plan(recipe, 16, 7, sharded=True).parameters == 4 * (n // 7 + 1)
    short = load("gpt2_xl_8xa100", {"block_size": 256})
    last = plan(short, 1, mixed_precision="no", gradient_checkpointing=True)
    assert (last.activations, last.head) == (0, 8 * v * h)


def test_with_few_characters_the_backward_is_the_fullest_moment():
    recipe, tokens, v, h = load("gpt2_shakespeare_char"), 64 * 256, 67, 384
    for mixed_precision, layer, gradients, cache in (("no", 64, 4 + 16, 0), ("bf16", 36, 6 + 8, 2)):
        ours = plan(recipe, 64, mixed_precision=mixed_precision)
        assert (ours.activations, ours.head) == (tokens * h * (6 * layer + gradients), 4 * v * h)
        assert ours.autocast_cache == cache * model_from_recipe(recipe).num_parameters
        ours = plan(recipe, 64, mixed_precision=mixed_precision, gradient_checkpointing=True)
        assert (ours.activations, ours.head) == (tokens * h * (5 * 4 + layer + gradients), 4 * v * h)
        assert ours.autocast_cache == cache * (12 * h * h + 13 * h)


def test_bert_large_with_dropout():
    recipe, n, tokens, v, h = load("bert_large_3090"), 336_226_108, 8 * 128, 30522, 1024
    ours = plan(recipe, 8, mixed_precision="no")
    assert (ours.parameters + ours.gradients + ours.moments) / 1e9 == pytest.approx(5.380, abs=5e-4)
    assert (ours.activations, ours.autocast_cache) == (tokens * h * (24 * 66 + 8), 0)
    assert ours.head == 4 * v * h + 4 * 8 * 19 * v
    assert plan(recipe, 32, mixed_precision="no").head == 12 * 32 * 19 * v
    half = plan(recipe, 8, mixed_precision="fp16")
    assert (half.activations, half.autocast_cache) == (tokens * h * (24 * 42 + 4 + 6 + 2 * 4), 2 * n)
    assert half.head == 4 * v * h  # the fullest moment is the backward of the last layer
    assert half == plan(recipe, 8, mixed_precision="bf16")
    last = plan(recipe, 1, mixed_precision="no", gradient_checkpointing=True)
    assert (last.activations, last.head) == (0, 12 * v * h)


def test_a_micro_batch_never_exceeds_the_share_of_the_process():
    recipe = load("bert_large_3090")
    assert plan(recipe, 64, 4) == plan(recipe, 8, 4) != plan(recipe, 4, 4)


def test_activation_functions_and_dropout():
    def units(activation, autocast, **changes):
        model = model_from_recipe(load("gpt2_124m", {"activation_function": activation, **changes}))
        return model.layer_bytes(autocast=autocast) / model.hidden_size

    assert [units("gelu", autocast) for autocast in (False, True)] == [64, 36]
    assert [units("relu", autocast) for autocast in (False, True)] == [48, 28]
    assert [units("gelu_new", autocast) for autocast in (False, True)] == [112, 84]
    assert [units("gelu", autocast, resid_pdrop=0.1) for autocast in (False, True)] == [64, 36]  # no masks


# ---------------------------------------------------------------------------------------------------------------------
# Memory as it must grow

SIZES = {
    "name": st.sampled_from(PLANNED),
    "b": st.integers(1, 300),
    "k": st.integers(1, 40),
    "mixed_precision": st.sampled_from(["no", "fp16", "bf16"]),
    "recomputed": st.booleans(),
    "n": st.integers(1, 16),
    "eager": st.booleans(),
}


@given(**SIZES)
@settings(deadline=None)
def test_memory_grows_with_the_micro_batch_and_never_with_k(name, b, k, mixed_precision, recomputed, n, eager):
    model = model_from_recipe(load(name))
    if not model.has_equal_layers:
        recomputed = False
    elif eager:
        model = dataclasses.replace(model, eager_attention=True)

    def total(b: int, k: int, sharded: bool = False) -> int:
        layout = solve_layout(num_processes=n, per_device_train_batch_size=b, gradient_accumulation_steps=k)
        options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed, "sharded": sharded}
        ours = planned_memory(model, layout, **options)
        assert ours.total == max(ours.forward, ours.backward) >= ours.optimizer_step
        return ours.total

    assert total(b, 1) == total(b, k)
    assert total(b, k) <= total(b + 1, k) < total(10 * b + 300, k)
    if isinstance(model, Transformer) and n > 1:
        whole, shared = 16 * model.num_parameters, 16 * -(-model.num_parameters // n)
        saved = total(b, k) - whole + shared
        cache = 2 * model.num_parameters * (mixed_precision == "bf16")
        assert total(b, k, sharded=True) >= saved - cache
        # Besides what is gathered, the gradients of the layers and of what is outside wait for their reduction
        assert total(b, k, sharded=True) <= saved + 16 * model.layer.num_parameters + 16 * model.num_outside


@given(**SIZES, more=st.integers(1, 200))
@settings(deadline=None)
def test_memory_grows_with_length(name, b, k, mixed_precision, recomputed, n, eager, more):
    recipe = load(name)
    names = {
        "bert_pretraining": "max_seq_length",
        "gpt2_pretraining": "block_size",
        "text_classification": "max_seq_length",
        "causal_lm_finetuning": "max_seq_length",
        "causal_lm_pretraining": "block_size",
        "modernbert_pretraining": "max_seq_length",
        "image_classification": "image_width",
    }
    field = names.get(recipe.task, "image_height")
    if recipe.task == "causal_lm_finetuning":  # has no more positions than that
        recipe, more = (
            dataclasses.replace(recipe, max_seq_length=recipe.max_seq_length // 2),
            min(more, recipe.max_seq_length // 2),
        )
    short, long = recipe, dataclasses.replace(recipe, **{field: getattr(recipe, field) + more})
    settings = {"mixed_precision": mixed_precision}
    assert plan(short, b, n, **settings).total <= plan(long, b, n, **settings).total
    autocast = mixed_precision != "no"
    sizes = [model_from_recipe(shape).saved_bytes(autocast=autocast) for shape in (short, long)]
    assert sizes[0] < sizes[1] or (field == "image_height" and more < 2 ** len(recipe.conv_channels))
    assert model_from_recipe(short).flops_per_sample <= model_from_recipe(long).flops_per_sample


# ---------------------------------------------------------------------------------------------------------------------
# Memory as measured


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation"),
    [("gpt2", "gelu_pytorch_tanh"), ("gpt2", "relu"), ("gpt2", "gelu_new"), ("bert", "gelu"), ("bert", "relu")],
)
def test_what_a_layer_saves(kind, activation, autocast):
    """Bytes of distinct storages saved for the backward, of 3 layers less those of 1; statistics are below 1 %."""

    def saved(num_layers: int) -> int:
        recipe = small(kind, num_layers, activation)
        model, storages = build(recipe), {}
        addresses = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in addresses:
                storages[storage.data_ptr()] = tensor  # kept alive, so that no address comes twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(model, recipe, autocast)
        assert loss.requires_grad
        return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())

    shape = padded(small(kind, 2, activation))
    weights = 2 * (shape.layer.num_parameters - 4 * shape.hidden_size) if autocast else 0  # norms are not cast
    measured = ((saved(3) - saved(1)) / 2 - weights) / (NUM_SAMPLES * shape.length)
    expected = shape.layer_bytes(autocast=autocast)
    if activation == "gelu_new" and autocast:  # the CPU computes its power in bfloat16 where CUDA takes float32
        expected -= 6 * 4 * shape.hidden_size
    assert expected <= measured <= 1.015 * expected


@pytest.mark.parametrize(
    ("kind", "vocab_size", "num_layers", "num_chunks", "autocast", "recomputed"),
    keep(
        [
            (*shape, autocast, recomputed)
            for shape in (("gpt2", 1000, 5, 1), ("gpt2", 1000, 5, 4), ("bert", 4000, 5, 1), ("bert", 20000, 3, 1))
            for autocast in (False, True)
            for recomputed in (False, True)
        ],
        [
            *(("gpt2", 1000, 5, 1, False, False), ("gpt2", 1000, 5, 1, True, True), ("gpt2", 1000, 5, 4, True, False)),
            *(("bert", 4000, 5, 1, True, False), ("bert", 20000, 3, 1, False, True), ("bert", 20000, 3, 1, True, True)),
        ],
    ),
)
def test_the_plan_of_a_forward_and_backward_meets_its_peak(
    kind, vocab_size, num_layers, num_chunks, autocast, recomputed, tmp_path, monkeypatch
):
    recipe = small(kind, num_layers, vocab_size=vocab_size)
    shape = padded(recipe)
    monkeypatch.setattr(transformer, "LOGITS_AT_ONCE", NUM_SAMPLES * shape.length * shape.vocab_size // num_chunks)
    model = build(recipe).train()
    model.set_attn_implementation("sdpa")
    if recomputed:
        model.gradient_checkpointing_enable()
    for parameter in model.parameters():  # as in any micro-batch but the first
        parameter.grad = torch.zeros_like(parameter)
    mixed_precision = "bf16" if autocast else "no"
    planned = plan(recipe, NUM_SAMPLES, mixed_precision=mixed_precision, gradient_checkpointing=recomputed)
    measured = peak(lambda: forward(model, recipe, autocast).backward(), tmp_path)
    ratio = (planned.autocast_cache + planned.activations + planned.head) / measured
    assert ratio == pytest.approx(1, abs=0.05 if recomputed else 0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Memory of a step


def test_the_peak_does_not_grow_with_the_accumulation_steps(train, tmp_path):
    """Whole runs of the program, two steps each, everything that torch allocates: weights, moments, data, activations.

    With k = 1 there are no gradients yet in the forward; with more they wait, 4 bytes per parameter, and a new gradient of
    the vocabulary matrix exists beside the old one.
    """
    peaks, shape = {}, "--n_embd 128 --n_layer 4 --vocab_size 1000 --lr_scaling_rule none --validation_fraction 0"
    for k in (1, 2, 4):
        flags = f"--global_batch_size {48 * k} --per_device_train_batch_size 48 --max_train_steps 2 {shape}"
        peaks[k] = peak(partial(train, f"k{k}", flags, program="pretrain_gpt2"), tmp_path)
    num_parameters = model_from_recipe(
        load("gpt2_small_cpu", {"n_embd": 128, "vocab_size": 1000, "n_positions": 48, "block_size": 48})
    )
    num_parameters = num_parameters.num_parameters
    print({k: f"{size / 1e6:.1f} MB" for k, size in peaks.items()}, num_parameters)
    assert peaks[1] > 16 * num_parameters
    assert 0 <= peaks[2] - peaks[1] <= 4 * num_parameters + 8 * 1000 * 128
    for k in (2, 4):
        assert peaks[k] == pytest.approx(peaks[1], rel=0.05)
    assert peaks[4] == pytest.approx(peaks[2], rel=0.01)


@pytest.mark.parametrize("autocast", [False, True])
def test_chunks_save_the_logits_they_avoid(autocast, tmp_path):
    """GPT-2's vocabulary, 256 tokens: the peak falls by the logits that never exist, in all their copies."""
    rows, vocab, width, chunk_size = 256, 50257, 8, 2**22
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(vocab, (rows,))

    def plain():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.cross_entropy_sum(torch.nn.functional.linear(hidden, weight), labels).backward()

    def chunked():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.linear_cross_entropy(hidden, weight, labels, chunk_size)[0].backward()

    peaks = []
    for step in (plain, chunked):
        step()  # so that both gradients exist already
        peaks.append(peak(step, tmp_path))
    chunk_rows = chunk_size // vocab
    avoided = (rows - chunk_rows) * vocab * 4
    saved = peaks[0] - peaks[1]
    print(f"autocast {autocast}: peak {peaks[0] / 1e6:.0f} MB whole, {peaks[1] / 1e6:.0f} MB in chunks of {chunk_rows}")
    assert 2 * avoided < saved < 4 * avoided
    assert peaks[1] < rows * vocab * 4, "below a single copy of the logits"


# ---------------------------------------------------------------------------------------------------------------------
# Fine-tuned decoders

DECODER = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
DECODER |= {"intermediate_size": 1408, "vocab_size": 8000, "max_seq_length": 256, "tie_word_embeddings": False}
LORA = {"lora_rank": 8, "lora_alpha": 16}
DPO = {"objective": "dpo", "dataset_name": "builtin/drawn_pairs", "train_on": "completions"}


@pytest.mark.parametrize(
    ("changes", "b", "mixed_precision", "recomputed"),
    [
        thorough({"architecture": "llama"}, 4, "bf16", False),
        ({"architecture": "llama"} | LORA, 16, "no", True),
        thorough({"architecture": "llama", "use_dora": True} | LORA, 4, "bf16", False),
        thorough({"architecture": "qwen3"} | LORA, 16, "bf16", False),
        thorough({"architecture": "phi3"}, 16, "bf16", True),
        ({"architecture": "gemma3_text"} | LORA, 8, "bf16", False),
        thorough({"architecture": "olmo2"}, 8, "no", False),
        thorough({"architecture": "gemma2"}, 8, "bf16", False),
        thorough({"architecture": "gemma2"} | LORA, 16, "no", True),
        thorough({"architecture": "llama", "lora_targets": ["q_proj", "v_proj"]} | LORA, 8, "bf16", False),
        ({"architecture": "mistral"} | DPO, 4, "bf16", False),
    ],
    ids=str,
)
def test_the_plan_of_fine_tuning_meets_the_trace(changes, b, mixed_precision, recomputed):
    recipe = load("sft_small_cpu", DECODER | changes)
    options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
    layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
    planned, traced = from_recipe(recipe).memory(layout, **options), trace_recipe(recipe, b, **options)
    assert planned.parameters + planned.gradients + planned.moments == pytest.approx(
        traced.parameters + traced.gradients + traced.moments, rel=1e-3
    )
    assert planned.total == pytest.approx(traced.peak, rel=0.05)


RESULTS = ROOT / "benchmarks" / "results" / "language_models.json"


def test_published_peaks():
    """What is committed is what the code plans: its median error, those within 15 %, what is refused and what is not."""
    program, results = load_benchmark("language_models"), json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [program.compare_memory(row, results["programs"]) for row in program.read_rows("memory")]
    assert rows == results["memory"]
    errors = [abs(row["error"]) for row in rows if row["error"] is not None]
    assert statistics.median(errors) <= 0.07
    assert statistics.mean(error <= 0.15 for error in errors) >= 0.88
    assert max(errors) < 0.24
    # FSDP of 4-bit weights by TRL holds 12 GB more than is planned here
    wrong = [(row["source"], row["model"], row["hardware"], row["b"]) for row in rows if not row["is_right"]]
    assert wrong == [("fms_acceleration", "Llama-2-70b", "2xa100-80", 4)]
    unseen = [abs(row["error"]) for row in program.leave_out_seen(rows) if row["error"] is not None]
    assert statistics.median(unseen) <= 0.08
    assert statistics.mean(error <= 0.15 for error in unseen) >= 0.85


def test_gradients_that_are_summed_whole_are_not_divided():
    """FSDP without reductions between micro-batches: every process holds them all, but of a step in one piece none does."""
    shape = base_models.shape_from_config(base_models.find_base_model("gemma-2b"), "it")
    sizes = {}
    for name, k in itertools.product((False, True), (1, 4)):
        model = peers.PeerDecoder(shape=shape, sequence_length=512, sums_whole_gradients=name)
        layout = solve_layout(num_processes=4, per_device_train_batch_size=1, gradient_accumulation_steps=k)
        memory = planned_memory(model, layout, mixed_precision="bf16", sharded=True, gradient_bytes=2)
        memory = peers.adjust_gradients(memory, model, layout, gradient_bytes=2)
        sizes[name, k] = memory.gradients / (2 * shape.num_parameters)
    assert sizes == {(False, 1): 0.25, (False, 4): 0.25, (True, 1): 0.25, (True, 4): 1}
