"""What recipes and models ask of hardware."""

import dataclasses

import pytest

from samestep.errors import UsageError
from samestep.recipe.catalog import load
from stepplan import base_models, decoder, timing
from stepplan.configs import model_from_config
from stepplan.hardware import parse
from stepplan.memory import has_formula
from stepplan.placement import place
from stepplan.workload import from_model, from_recipe

BERT = {"architectures": ["BertForMaskedLM"], "model_type": "bert", "vocab_size": 100, "hidden_size": 32}
BERT |= {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
BERT |= {"hidden_act": "gelu", "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}


def test_what_an_optimizer_remembers_and_moves():
    """Bytes per parameter: AdamW 8 and 28, SGD 4 and 20; clipping moves 12 more."""
    workloads = {name: from_recipe(load(name)) for name in ("bert_base", "resnet50_1xv100", "captcha_3xa100")}
    assert [workload.moment_bytes for workload in workloads.values()] == [8, 4, 8]
    assert [workload.optimizer_bytes for workload in workloads.values()] == [40, 20, 28]
    clipped = from_recipe(load("resnet50_1xv100", {"max_grad_norm": 1.0}))
    assert clipped.optimizer_bytes == 32
    shape = model_from_config(BERT, 16, name="it")
    assert [from_model(shape, "it", global_batch_size=8, optimizer=name).moment_bytes for name in ("adamw", "sgd")] == [
        8,
        4,
    ]
    assert [
        from_model(shape, "it", global_batch_size=8, optimizer=name).optimizer_bytes for name in ("adamw", "sgd")
    ] == [28, 20]


def test_the_time_is_that_of_its_kernels_and_optimizer():
    placement = place(from_recipe(load("resnet50_1xv100")), parse("1xv100-16"))
    model, bandwidth = placement.workload.model, parse("v100-16").device.memory_gb_per_s * 1e9
    assert placement.time.optimizer == pytest.approx(20 * model.num_parameters / bandwidth)
    per_byte = timing.CALIBRATION.traffic_channels_last / bandwidth + timing.CALIBRATION.stall
    assert placement.time.memory_traffic == pytest.approx(256 * model.saved_bytes(autocast=True) * per_byte)
    assert placement.memory.moments == 4 * model.num_parameters


def test_batch_normalization_and_attention():
    assert [
        from_recipe(load(name)).batch_normalization for name in ("bert_base", "resnet50_1xv100", "captcha_3xa100")
    ] == [
        False,
        True,
        False,
    ]
    assert not from_recipe(load("resnet50_1xv100", {"exact_batch_norm": True})).batch_normalization
    shape = model_from_config(BERT, 16, name="it")
    assert from_model(shape, "it", global_batch_size=8, attention="eager").model == dataclasses.replace(
        shape, eager_attention=True
    )
    assert not from_model(shape, "it", global_batch_size=8).batch_normalization
    with pytest.raises(UsageError, match="captcha_3xa100 has no attention"):
        from_recipe(load("captcha_3xa100"), attention="eager")


def test_steps_and_epochs():
    recipe = load("bert_base", {"max_train_steps": 10, "num_warmup_steps": 2})
    assert (from_recipe(recipe).num_steps, from_recipe(recipe).steps_per_epoch) == (10, None)
    workload = from_recipe(recipe, num_train_samples=1280)
    assert (workload.num_steps, workload.steps_per_epoch) == (10, 5)  # what was asked for, not an epoch's
    longer = from_recipe(load("bert_base", {"num_train_epochs": 2.5, "num_warmup_steps": 2}), num_train_samples=1280)
    assert (longer.num_steps, longer.schedule.num_warmup_steps) == (13, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Fine-tuned decoders

SFT = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "max_seq_length": 2048}
LORA = {"lora_rank": 16, "lora_alpha": 32}
PUBLISHED = {
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-2-7b": 6_738_415_616,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-3-1b": 999_885_952,
    "microsoft/Phi-3-mini-4k": 3_821_079_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
}


def test_base_models_have_their_published_sizes():
    shapes = {name: base_models.shape_from_config(config, name) for name, config in base_models.read_table().items()}
    assert {name: shapes[name].num_parameters for name in PUBLISHED} == PUBLISHED
    active = [shapes[name].num_active / 1e9 for name in ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3")]
    assert active == pytest.approx([3.3, 37], rel=0.03)  # as published; DeepSeek's 37 leaves out the embedding
    assert base_models.find_base_model("Qwen/Qwen2.5-7B-Instruct") == base_models.read_table()["Qwen/Qwen2.5-7B"]
    assert base_models.find_base_model("somebody/else") is None


def test_adapters_have_gradients_and_moments_and_frozen_weights_do_not():
    full, lora = (from_recipe(load("sft_small_cpu", {**SFT, **changes})) for changes in ({}, LORA))
    per_layer = 16 * (4 * 4096 + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert lora.model.num_trained == lora.model.num_adapter == 32 * per_layer == 41_943_040
    assert full.state_bytes == 16 * 8_030_261_248
    norms = (2 * 32 + 1) * 4096  # in float32; what is frozen is held in the 16 bits of its file
    assert lora.state_bytes == 2 * (8_030_261_248 - norms) + 4 * norms + 16 * 41_943_040
    # Without gradients of its weights a layer's backward is one product instead of two
    assert lora.model.flops_per_sample / full.model.flops_per_sample == pytest.approx(0.69, abs=0.02)
    assert lora.model.forward_share == pytest.approx(0.49, abs=0.02)


def test_four_bits_take_half_a_byte_and_their_scales():
    method = decoder.Tuning(rank=16, is_quantized=True)
    assert method.quantized_bytes == pytest.approx(0.5 + (1 + 4 / 256) / 64)
    shape = base_models.shape_from_config(base_models.find_base_model("Llama-3.1-8B"), "it")
    model = decoder.Decoder(shape=shape, sequence_length=512, method=method)
    linear = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    others = 8_030_261_248 - linear
    assert model.weight_bytes == round(linear * method.quantized_bytes + 4 * others + 4 * model.num_adapter)


def test_a_pair_is_two_sequences():
    changes = {"objective": "dpo", "dataset_name": "builtin/drawn_pairs", "train_on": "completions"}
    one, pair = (from_recipe(load("sft_small_cpu", each)).model for each in ({}, changes))
    assert (one.length, pair.length) == (256, 512)
    assert pair.flops_per_sample == 2 * one.flops_per_sample


def test_a_window_and_long_sequences():
    shape = base_models.shape_from_config(base_models.find_base_model("gemma-3-4b"), "it")
    assert [(layer.window, layer.num_layers) for layer in shape.kinds] == [(1024, 29), (None, 5)]
    whole = dataclasses.replace(shape, layers=(), window=None)
    near, far = (decoder.Decoder(shape=each, sequence_length=131_072) for each in (shape, whole))
    assert near.flops_per_sample < 0.35 * far.flops_per_sample
    assert near.saved_bytes(autocast=True) == far.saved_bytes(autocast=True)  # no [T, T] matrix is kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_length": 200_000}, "max_seq_length is 200,000, but meta-llama/Llama-3.1-8B has 131,072"),
        (LORA | {"lora_rank": 5000}, "lora_rank is 5,000, above the width 4,096"),
        ({"model_name_or_path": "nothing"}, "nothing' is no folder here and not in the planner's table"),
    ],
)
def test_what_cannot_be_fine_tuned(changes, message):
    with pytest.raises(UsageError) as error:
        from_recipe(load("sft_small_cpu", SFT | changes))
    assert message.replace("'", "") in str(error.value).replace("'", "").replace('"', "")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "bloom"}, "model_type"),
        (
            {"hidden_size": 10**15},
            "hidden_size is 1000000000000000 in its configuration, must be a whole number from 1 to 131,072",
        ),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
    ],
)
def test_a_configuration_that_is_no_decoder(fields, message):
    with pytest.raises(UsageError, match=message):
        base_models.shape_from_config(base_models.find_base_model("Llama-3.1-8B") | fields, "it")


def test_a_run_to_come_has_the_shape_of_its_recipe():
    assert from_recipe(load("dpo_small_cpu")).model.shape == from_recipe(load("sft_small_cpu")).model.shape
    assert has_formula(load("dpo_small_cpu"))
    assert not has_formula(load("sft_small_cpu", {"architecture": "gpt2", "num_key_value_heads": None}))
