"""Traced memory and FLOPs against what the CPU allocates, what torch counts, and the formulas."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
import transformers
from cases import keep, thorough
from common import PLANNED
from small_models import NUM_SAMPLES, SMALL_CONFIGS, peak, save, small
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from samestep._internals import transformers_models
from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step import optim
from stepplan import trace
from stepplan.base_models import find_base_model
from stepplan.configs import model_from_config, read_config
from stepplan.memory import model_from_recipe, planned_memory
from stepplan.timing import count_work
from stepplan.trace import Trace, imitate_cuda, trace_config, trace_recipe, trace_step, traced_model
from stepplan.workload import from_recipe

TINY = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
PIXELS = {key: value for key, value in TINY.items() if key != "vocab_size"} | {"image_size": 32, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
CONFIGS = {
    "BertConfig": ("BertForMaskedLM", TINY | {"max_position_embeddings": 64}, 16),
    "GPT2Config": ("GPT2LMHeadModel", {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2}, 16),
    "LlamaConfig": ("LlamaForCausalLM", TINY | {"num_key_value_heads": 1}, 16),
    "ViTConfig": ("ViTForImageClassification", PIXELS, 32),
    "ResNetConfig": ("ResNetForImageClassification", RESNET, 32),
}


def build(recipe: Recipe) -> nn.Module:
    model = recipe.parts.find("model").from_recipe(recipe, None).train()
    if recipe.task == "gpt2_pretraining":
        model.gpt2.set_attn_implementation("eager")
    return model


def loss(model: nn.Module, recipe: Recipe, num_samples: int = NUM_SAMPLES) -> torch.Tensor:
    return model(**type(model).example(recipe, num_samples))[0].sum()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return optim.adamw(model, trace.USUAL_HYPERPARAMETERS, 0.0)


def on_cpu(recipe: Recipe, mixed_precision: str = "no", gradient_checkpointing: bool = False) -> Trace:
    """Trace as a CPU allocates, without `imitate_cuda`."""
    return trace_step(
        lambda: build(recipe),
        lambda model, num_samples: loss(model, recipe, num_samples),
        NUM_SAMPLES,
        mixed_precision=mixed_precision,
        gradient_checkpointing=gradient_checkpointing,
        make_optimizer=adamw,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Memory against the CPU's allocations


MANY_WORDS = {"num_layers": 2, "vocab_size": 20000}


@pytest.mark.parametrize(
    ("kind", "changes", "mixed_precision", "recomputed"),
    [
        thorough("gpt2", {}, "no", False),
        thorough("gpt2", {}, "no", True),
        thorough("gpt2", {}, "bf16", False),
        ("gpt2", {}, "bf16", True),
        *(thorough("bert", {"vocab_size": 4000}, kind, way) for kind in ("no", "bf16") for way in (False, True)),
        thorough("bert", MANY_WORDS, "no", False),
        thorough("bert", MANY_WORDS, "no", True),
        thorough("bert", MANY_WORDS, "bf16", False),
        thorough("bert", MANY_WORDS, "bf16", True),
    ],
)
def test_a_step_is_traced_as_it_is_allocated(kind, changes, mixed_precision, recomputed, tmp_path):
    """Peaks of a forward, of one with its backward, and of the optimizer's step, over what was there before."""
    recipe = small(kind, **{"num_layers": 3} | changes)
    model = build(recipe)
    optimizer = adamw(model)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            return loss(model, recipe)

    forward().backward()
    optimizer.step()
    if recomputed:
        model.recompute_activations()
    traced = on_cpu(recipe, mixed_precision, recomputed)
    states = traced.parameters + traced.gradients + traced.moments
    states += sum(buffer.nbytes for buffer in model.buffers())
    inputs = 0
    if kind == "bert":  # the profiler does not see micro-batches that numpy holds, the tracer does
        example = type(model).example(recipe, NUM_SAMPLES)
        inputs = sum(value.nbytes for value in example.values() if value is not None)
    within = 0.006 if recomputed else 0.002  # each layer keeps the CPU generator's state, 5 KB, out of torch's sight
    assert traced.forward - states - inputs == pytest.approx(peak(forward, tmp_path), rel=within)
    whole = max(traced.forward, traced.backward) - states - inputs
    assert whole == pytest.approx(peak(lambda: forward().backward(), tmp_path), rel=within)
    assert traced.optimizer_step == states
    assert peak(optimizer.step, tmp_path) < 100
    assert traced.peak == max(traced.forward, traced.backward)


def test_states_are_those_of_the_real_model():
    recipe = small("bert")
    model, traced = build(recipe), on_cpu(recipe)
    n = sum(parameter.numel() for parameter in model.parameters())
    counters = 4 * len(list(model.parameters()))
    assert (traced.num_parameters, traced.parameters, traced.gradients) == (n, 4 * n, 4 * n)
    assert traced.moments == 8 * n + counters
    positions = sum(buffer.nbytes for buffer in model.buffers())
    assert traced.optimizer_step == 16 * n + counters + positions


def test_the_optimizers_own_temporaries_are_counted():
    plain, large = (
        trace_step(
            lambda: nn.Linear(1000, 1000, bias=False),
            lambda model, num_samples: model(torch.ones(num_samples, 1000)).sum(),
            1,
            mixed_precision="no",
            gradient_checkpointing=False,
            make_optimizer=lambda model, fused=fused: torch.optim.AdamW(model.parameters(), fused=fused, foreach=False),
        )
        for fused in (True, False)
    )
    assert plain.optimizer_step == 16_000_004
    assert large.optimizer_step >= 20_000_004
    assert large.peak == large.optimizer_step


# ---------------------------------------------------------------------------------------------------------------------
# As on a GPU


def saved_bytes(function) -> int:
    """Count bytes of distinct storages that a function saves for its backward, its input's not counted."""
    inputs, saved = torch.ones(2, 4, 64, 16, requires_grad=True), {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(inputs)
    saved.pop(inputs.untyped_storage().data_ptr(), None)
    assert output.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def test_what_cuda_keeps_otherwise():
    numbers = 2 * 4 * 64 * 16

    def dropout(inputs):
        return F.dropout(inputs, 0.5)

    def attention(inputs):
        return F.scaled_dot_product_attention(inputs, inputs, inputs, dropout_p=0.5, is_causal=True)

    def power(inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.pow(inputs.bfloat16(), 3.0)

    assert [saved_bytes(function) for function in (dropout, power)] == [4 * numbers, 2 * numbers]
    assert saved_bytes(attention) > 2 * 4 * 64 * 64 * 4
    with imitate_cuda():
        assert [saved_bytes(function) for function in (dropout, power)] == [numbers, 4 * numbers]
        assert saved_bytes(attention) == 4 * numbers + 2 * 4 * 64 * 4  # the output and a statistic per row
        assert F.dropout(torch.ones(3), 0.5, training=False).tolist() == [1, 1, 1]
        assert set(F.dropout(torch.ones(100), 0.5).tolist()) == {0, 2}
    assert saved_bytes(dropout) == 4 * numbers


def test_dropout_by_sample_keeps_nothing():
    changes = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    plain, dropout = (
        trace_recipe(small("bert"), 4, mixed_precision="no"),
        trace_recipe(small("bert", **changes), 4, mixed_precision="no"),
    )
    tokens, h, layers = 4 * 128, 128, 5
    masks = (
        (2 * (layers - 1) + 1) * tokens * h
    )  # of torch's dropout: after attention, after the feed-forward layer, embeddings
    assert 0 < dropout.forward - plain.forward < masks / 100
    recomputed = trace_recipe(small("bert", **changes), 4, mixed_precision="no", gradient_checkpointing=True)
    assert recomputed.peak < dropout.peak


def test_a_document_mask_keeps_a_matrix_for_each_sample():
    single, several = (
        trace_recipe(small("gpt2", document_mask=flag), 4, mixed_precision="no").forward for flag in (False, True)
    )
    assert several - single == pytest.approx(5 * 4 * 4 * 128**2, rel=0.01)


# ---------------------------------------------------------------------------------------------------------------------
# FLOPs


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("gpt2", "sdpa"), *(thorough(*way) for way in (("bert", "eager"), ("gpt2", "eager"), ("bert", "sdpa")))],
)
def test_flops_are_those_that_torch_counts(kind, attention):
    recipe = small(kind)
    model = build(recipe)
    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        loss(model, recipe).backward()
    # In float32 the head adds a product in place, which torch does not count.
    for mixed_precision, recomputed in (("no", False), ("bf16", True)):
        options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
        traced = trace_recipe(recipe, NUM_SAMPLES, **options, attn_implementation=attention)
        assert traced.flops == counter.get_total_flops()


def test_flops_of_a_convolution():
    def step(model: nn.Module, num_samples: int) -> torch.Tensor:
        return model(torch.ones(num_samples, 3, 16, 16)).sum()

    def make() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))

    with FlopCounterMode(display=False) as counter:
        step(make(), 2).backward()
    options = {"mixed_precision": "no", "gradient_checkpointing": False, "make_optimizer": adamw}
    assert trace_step(make, step, 2, **options).flops == counter.get_total_flops() > 0


# ---------------------------------------------------------------------------------------------------------------------
# The formula


SIMILAR = ("qwen3_0.6b_sft_3090", "llama3_8b_lora_3090", "llama3_8b_sft_8xa100", "gpt_modern_124m", "bert_modern_base")
SIMILAR += ("gpt_modern_730m_8xh100", "gpt_modern_shakespeare_char_cpu", "bert_modern_large_8xa100")
SIMILAR += ("bert_large_phase1", "finetune_mnli_bert_base", "gpt2_350m", "gpt2_774m")
"""Recipes whose trace takes long, of shapes that others are traced for."""


ALWAYS = ("gpt2_small_cpu", "resnet_digits_cpu", "captcha_cpu")


@pytest.mark.parametrize(
    "name", keep({model_from_recipe(load(name)): name for name in PLANNED if name not in SIMILAR}.values(), ALWAYS)
)
def test_the_formula_meets_the_trace(name, tmp_path):
    """Of each task's recipes, with fewer layers than theirs, which are all alike."""
    recipe = load(name)
    berts = {task: {"num_hidden_layers": 2} for task in ("bert_pretraining", "text_classification")}
    shallow = berts | {"gpt2_pretraining": {"n_layer": 2}}
    if recipe.task == "image_classification":
        shallow = {recipe.task: {"depths": (1,) * len(recipe.depths)}}
    base = None if recipe.task != "causal_lm_finetuning" else find_base_model(recipe.model_name_or_path or "")
    if base is not None:
        write(tmp_path, **base | {"num_hidden_layers": 6})
        shallow = {recipe.task: {"model_name_or_path": str(tmp_path)}}
    recipe = load(name, shallow.get(recipe.task))
    workload = from_recipe(recipe)
    cases = ((1, "bf16", False), (9, "no", False), (33, "bf16", True))  # not the sizes to which rows are rounded up
    if "model_name_or_path" in shallow.get(recipe.task, {}):
        cases = ((1, "bf16", False), (4, "bf16", True))  # each takes seconds
    for b, mixed_precision, recomputed in cases:
        options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
        layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
        if recomputed and not workload.model.has_equal_layers:
            options["gradient_checkpointing"] = False
        planned = workload.memory(layout, **options)
        assert planned.total == pytest.approx(trace_recipe(recipe, b, **options).peak, rel=0.05), (b, options)


def test_the_formula_of_group_normalisation():
    recipe = load("resnet50_1xv100", {"depths": (1, 1, 1, 1), "normalization": "group"})
    batch, group = (
        trace_recipe(variant, 16, mixed_precision="bf16")
        for variant in (dataclasses.replace(recipe, normalization="batch"), recipe)
    )
    assert group.forward > 1.5 * batch.forward  # float32 under autocast
    layout = solve_layout(num_processes=1, global_batch_size=16, per_device_train_batch_size=16)
    planned = planned_memory(model_from_recipe(recipe), layout, mixed_precision="bf16", moment_bytes=4)
    assert planned.total == pytest.approx(group.peak, rel=0.05)


# ---------------------------------------------------------------------------------------------------------------------
# Any model


@pytest.mark.parametrize("name", keep(CONFIGS, ["BertConfig", "ViTConfig"]))
def test_any_config_is_traced(name, tmp_path):
    model_name, changes, length = CONFIGS[name]
    config = getattr(transformers, name)(**changes)
    config.save_pretrained(tmp_path)
    model = getattr(transformers, model_name)(config)
    traced = trace_config(str(tmp_path), 2, length, mixed_precision="bf16")
    assert traced.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    model.set_attn_implementation("eager")
    shape = (2, length) if model.main_input_name == "input_ids" else (2, 3, length, length)
    inputs = torch.zeros(shape, dtype=torch.int64 if len(shape) == 2 else torch.float32)
    labels = torch.zeros(shape if len(shape) == 2 else 2, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(inputs, labels=labels).loss.backward()
    assert traced.flops == counter.get_total_flops()
    assert traced.peak > 16 * traced.num_parameters
    assert traced == trace_config(str(tmp_path / "config.json"), 2, length, mixed_precision="bf16")


LARGER = {
    "hidden_size": 256,
    "n_embd": 256,
    "intermediate_size": 768,
    "vocab_size": 4000,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "embedding_size": 64,
    "hidden_sizes": [128, 256],
    "head_dim": 64,
}


def larger(kind: str) -> dict:
    return {key: value for key, value in LARGER.items() if key in SMALL_CONFIGS[kind][1]}


@pytest.mark.parametrize("kind", keep(SMALL_CONFIGS, ["ResNetForImageClassification"]))
def test_the_formula_of_a_configuration_meets_the_trace(kind, tmp_path):
    save(tmp_path, kind, **larger(kind))
    is_image = kind.startswith("ResNet")
    shape = model_from_config(read_config(str(tmp_path)), None if is_image else 96, name=kind)
    ways = ((1, "bf16", False, "sdpa"), (16, "no", False, "eager"), (16, "bf16", True, "sdpa"))
    for b, mixed_precision, recomputed, attention in ways[: 1 if is_image else 3]:
        options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
        layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
        model = shape if is_image else dataclasses.replace(shape, eager_attention=attention == "eager")
        planned = planned_memory(model, layout, **options).total
        traced = trace_config(str(tmp_path), b, 224 if is_image else 96, attn_implementation=attention, **options)
        assert planned == pytest.approx(traced.peak, rel=0.05 if kind.startswith("Bert") else 0.025), (b, options)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("kind", keep(["Qwen3", "Mixtral", "Qwen3Moe"], ["Qwen3Moe"]))
def test_a_model_of_the_hub_is_traced_as_its_recipe(kind, tmp_path):
    """With heads of a width of their own, and with experts, which no field of a recipe says."""
    changes = {"vocab_size": 4000, "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    changes |= {"num_key_value_heads": 2, "intermediate_size": 768, "max_position_embeddings": 128, "head_dim": 96}
    experts = {"Mixtral": {"num_local_experts": 4}, "Qwen3Moe": {"num_experts": 4, "moe_intermediate_size": 384}}
    changes |= experts[kind] | {"num_experts_per_tok": 2} if kind in experts else {}
    getattr(transformers, f"{kind}Config")(**changes, dtype="bfloat16").save_pretrained(tmp_path)
    recipe = {"model_name_or_path": str(tmp_path), "max_seq_length": 128}
    layout = solve_layout(num_processes=1, global_batch_size=64, per_device_train_batch_size=64)
    for changes, recomputed in (({}, False), ({"lora_rank": 4, "lora_alpha": 8}, True)):
        tuned, options = load("sft_small_cpu", recipe | changes), {"mixed_precision": "bf16"}
        options |= {"gradient_checkpointing": recomputed}
        traced, model = trace_recipe(tuned, 64, **options), model_from_recipe(tuned)
        assert recomputed or traced.num_parameters == model.num_parameters
        assert planned_memory(model, layout, **options).total == pytest.approx(traced.peak, rel=0.05), changes


def test_where_eager_attention_is_the_most(tmp_path):
    """Many heads, narrow and long: the fullest moment is the backward of the last layer's attention."""
    shape = {"hidden_size": 64, "num_attention_heads": 16, "num_hidden_layers": 2, "intermediate_size": 256}
    for mixed_precision, dropout in (("bf16", 0.0), ("no", 0.1)):
        more = {"attention_probs_dropout_prob": dropout, "architectures": ["BertForMaskedLM"]}
        transformers.BertConfig(**shape, **more, vocab_size=100).save_pretrained(tmp_path)
        model = dataclasses.replace(model_from_config(read_config(str(tmp_path)), 512, name="it"), eager_attention=True)
        layout = solve_layout(num_processes=1, global_batch_size=4, per_device_train_batch_size=4)
        traced = trace_config(str(tmp_path), 4, 512, mixed_precision=mixed_precision, attn_implementation="eager")
        planned = planned_memory(model, layout, mixed_precision=mixed_precision)
        assert planned.total == pytest.approx(traced.peak, rel=0.03), (mixed_precision, dropout)


def test_a_traced_model_is_planned_for(tmp_path):
    """A model with a formula, as if it had none: below, between and beyond the micro-batches that were traced."""
    save(tmp_path, "BertForMaskedLM", **larger("BertForMaskedLM"))
    model = traced_model(str(tmp_path), 96)
    for b, mixed_precision in ((1, "no"), (3, "bf16"), (16, "bf16")):
        layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
        ours = planned_memory(model, layout, mixed_precision=mixed_precision)
        traced = trace_config(str(tmp_path), b, 96, mixed_precision=mixed_precision)
        assert ours.total == pytest.approx(traced.peak, rel=0.02)
        assert (ours.forward, ours.optimizer_step) == pytest.approx((traced.forward, traced.optimizer_step), rel=0.02)
    shape = model_from_config(read_config(str(tmp_path)), 96, name="it")
    assert (model.num_parameters, model.flops_per_sample) == (shape.num_parameters, shape.flops_per_sample)
    ours, by_formula = (count_work(item, "bf16") for item in (model, shape))
    assert ours.kernels_per_layer == pytest.approx(by_formula.num_layers * by_formula.kernels_per_layer, rel=0.5)
    with pytest.raises(ValueError, match="not recomputed"):
        model.peaks(1, autocast=True, gradient_checkpointing=True)
    assert (model.unit, model.length, model.kernels) == ("token", 96, "eager")


def test_sgd_remembers_half_as_much(tmp_path):
    save(tmp_path, "BertForMaskedLM")
    adam, sgd = (trace_config(str(tmp_path), 1, 8, mixed_precision="no", optimizer=name) for name in ("adamw", "sgd"))
    assert sgd.moments == 4 * sgd.num_parameters
    assert 0 <= adam.moments - 2 * sgd.moments < 4 * 100  # its counters


@pytest.mark.parametrize(
    ("mixed_precision", "recomputed"),
    [("no", False), thorough("no", True), thorough("bf16", False), ("bf16", True)],
)
def test_a_llama_is_traced_as_it_is_allocated(mixed_precision, recomputed, tmp_path):
    """Grouped queries, its own normalisation, logits of all tokens; sizes at which a kernel's own workspace is small."""
    config = transformers.LlamaConfig(**TINY | {"hidden_size": 128, "vocab_size": 2000, "use_cache": False})
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.zeros(4, 128, dtype=torch.int64)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            return model(ids.clone(), labels=ids).loss

    forward().backward()
    if recomputed:
        transformers_models.recompute_activations(model)
    measured = peak(lambda: forward().backward(), tmp_path)
    config.save_pretrained(tmp_path)
    options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
    traced = trace_config(str(tmp_path), 4, 128, **options)
    state = traced.parameters + traced.gradients + traced.moments
    assert traced.peak - state == pytest.approx(measured, rel=0.01)


GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0, "kv_lora_rank": 16}
EXPERTS = {
    "MixtralForCausalLM": ("mixtral", {"num_key_value_heads": 1, "num_local_experts": 4}, "intermediate_size"),
    "Qwen3MoeForCausalLM": ("qwen3_moe", {"num_key_value_heads": 1, "num_experts": 4}, "moe_intermediate_size"),
    "DeepseekV3ForCausalLM": ("deepseek_v3", GROUPS | {"q_lora_rank": 16}, "moe_intermediate_size"),
}


@pytest.mark.parametrize("kind", keep(EXPERTS, ["MixtralForCausalLM"]))
def test_experts_are_traced(kind, tmp_path, capfd):
    """Each token's products with one expert more: forward and backward of three matrices, in float32, also under autocast."""
    model_type, values, width = EXPERTS[kind]
    values = TINY | values | {width: 48, "model_type": model_type, "architectures": [kind], "dtype": "bfloat16"}
    path = write(tmp_path, **values, num_experts_per_tok=1)
    one = [trace_config(path, 2, 16, mixed_precision=precision) for precision in ("no", "bf16")]
    path = write(tmp_path, **values, num_experts_per_tok=2)
    two = [trace_config(path, 2, 16, mixed_precision=precision) for precision in ("no", "bf16")]
    for before, after in zip(one, two, strict=True):
        assert after.flops - before.flops == 3 * 2 * (2 * 16) * 2 * 3 * 32 * 48
        assert after.num_parameters == before.num_parameters
        assert after.parameters == 4 * after.num_parameters
        assert after.forward > before.forward
    model = getattr(transformers, kind)(transformers.AutoConfig.from_pretrained(tmp_path))
    assert two[0].num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert capfd.readouterr().err == ""


def test_experts_are_traced_as_they_are_allocated(tmp_path):
    sizes = TINY | {"hidden_size": 128, "num_key_value_heads": 1, "num_local_experts": 4, "intermediate_size": 256}
    config = transformers.MixtralConfig(**sizes | {"vocab_size": 2000, "use_cache": False})
    model = transformers.MixtralForCausalLM(config).train()
    ids = torch.zeros(4, 128, dtype=torch.int64)

    def step() -> None:
        model(ids.clone(), labels=ids).loss.backward()

    step()
    measured = peak(step, tmp_path)
    config.save_pretrained(tmp_path)
    traced = trace_config(str(tmp_path), 4, 128, mixed_precision="no")
    state = traced.parameters + traced.gradients + traced.moments
    assert traced.peak - state == pytest.approx(measured, rel=0.01)


def test_sounds_and_texts_that_answer_texts(tmp_path, monkeypatch):
    """Whisper reads spectrograms of full length; T5 begins with a token that its config need not name."""
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8, "max_source_positions": 50}
    heads = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in (("attention_heads", 2),)}
    sizes |= heads | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 100, "max_target_positions": 24}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    whisper = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
    path = write(tmp_path, **whisper, **sizes, **tokens)
    monkeypatch.setattr(trace, "TRACED_SIZES", ((1, 2),))
    model = traced_model(path, 8)
    assert (model.unit, model.length) == ("token", 8)
    assert model.flops_per_sample < trace_config(path, 1, 16, mixed_precision="no").flops
    with pytest.raises(UsageError, match=r"length 25 exceeds .* 24"):
        trace_config(path, 2, 25, mixed_precision="no")
    t5 = {"model_type": "t5", "vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    path = write(tmp_path, **t5, architectures=["T5ForConditionalGeneration"])
    model = transformers.T5ForConditionalGeneration(transformers.AutoConfig.from_pretrained(tmp_path))
    traced = trace_config(path, 2, 16, mixed_precision="bf16")
    assert traced.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_keys_and_values_are_not_cached(tmp_path):
    peaks = []
    for use_cache in (True, False):
        transformers.GPT2Config(**CONFIGS["GPT2Config"][1], use_cache=use_cache).save_pretrained(tmp_path)
        peaks.append(trace_config(str(tmp_path), 2, 16, mixed_precision="no").peak)
    assert peaks[0] == peaks[1]


def test_the_class_that_a_config_names(tmp_path):
    config = transformers.BertConfig(**TINY, architectures=["BertForSequenceClassification"], num_labels=3)
    config.save_pretrained(tmp_path)
    ours = trace_config(str(tmp_path), 2, 16, mixed_precision="no").num_parameters
    model = transformers.BertForSequenceClassification(config)
    assert ours == sum(parameter.numel() for parameter in model.parameters())
    for unusable in ("BertModel", "OfARepository", "logging", "set_seed"):
        transformers.BertConfig(**TINY, architectures=[unusable]).save_pretrained(tmp_path)
        masked = transformers.BertForMaskedLM(config)
        ours = trace_config(str(tmp_path), 2, 16, mixed_precision="no").num_parameters
        assert ours == sum(parameter.numel() for parameter in masked.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes


def write(folder, **values) -> str:
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "is not one of transformers: .*model_type"),
        ({"model_type": "nope"}, "is not one of transformers"),
        ({"model_type": "nope", "auto_map": {"AutoConfig": "evil.Config"}}, "is not one of transformers"),
        ({"model_type": "gpt2", "n_layer": "x"}, "is not one of transformers: .*n_layer"),
        ({"model_type": "gpt2", "n_positions": 8}, "length 16 exceeds max_position_embeddings 8 of .*: lower it"),
        ({"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]}, "needs input_values"),
        ({"model_type": "encodec"}, "encodec of .* has no class with a loss"),
        (TINY | {"model_type": "bert", "hidden_act": "nosuch"}, "^BertFor.* cannot be made of its config: 'nosuch'$"),
        (
            TINY | {"model_type": "bert", "num_attention_heads": 3},
            "^BertFor.* cannot be made of its config: .*multiple",
        ),
        (
            TINY | {"model_type": "bert", "architectures": ["BertForMultipleChoice"]},
            "cannot be traced on input_ids, labels",
        ),
        (PIXELS | {"model_type": "vit"}, r"ViT.* cannot be traced on pixel_values, labels: .*16\*16.*32\*32"),
    ],
)
def test_mistakes_in_a_config(values, message, tmp_path):
    with pytest.raises(UsageError, match=message) as raised:
        trace_config(write(tmp_path, **values), 3, 16, mixed_precision="no")
    assert "\n" not in str(raised.value)


def test_other_mistakes(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')\n")
    (tmp_path / "config.json").write_text('{"model')
    for path in (tmp_path, tmp_path / "none", tmp_path / "evil.py"):
        with pytest.raises(UsageError, match=f"{path.name} is no"):
            trace_config(str(path), 1, 8, mixed_precision="no")
    with pytest.raises(UsageError, match="gradient_checkpointing is true, but Linear"):
        trace_step(
            lambda: nn.Linear(2, 2),
            lambda model, num_samples: model(torch.ones(num_samples, 2)).sum(),
            1,
            mixed_precision="no",
            gradient_checkpointing=True,
            make_optimizer=adamw,
        )
    with pytest.raises(UsageError, match="gradient_checkpointing is true, but ReadingSums"):
        trace_recipe(load("captcha_cpu"), 1, mixed_precision="no", gradient_checkpointing=True)


def test_versions_that_are_too_old_are_refused():
    """And plans by formula go on with them."""
    trace.check_versions(trace.OLDEST)
    with pytest.raises(
        UsageError, match=r"^tracing needs torch 2\.13 and transformers 99\.0 or newer, here are torch 2\."
    ):
        trace.check_versions({torch: (2, 13), transformers: (99, 0)})
