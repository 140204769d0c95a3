"""What recipes and models ask of hardware."""

import dataclasses

import pytest

from samestep.errors import UsageError
from samestep.planner import timing
from samestep.planner.configs import model_from_config
from samestep.planner.hardware import parse
from samestep.planner.placement import place
from samestep.planner.workload import from_model, from_recipe
from samestep.recipe.recipe import load

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
