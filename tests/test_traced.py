"""Decoders without a formula: few traced layers against all of them, and against the formula of kinds that have one."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from cases import thorough
from transformers import AutoConfig

from samestep.cli import main
from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe import pretrained_shape
from stepplan import timing, trace
from stepplan.base_models import UnknownShapeError, may_be_decoder
from stepplan.certainty import judge
from stepplan.hardware import parse
from stepplan.memory import count_weight_bytes, model_from_recipe, planned_memory
from stepplan.placement import place
from stepplan.traced import choose_layers, trace_decoder
from stepplan.workload import find_model, from_command, from_recipe

SMALL = {"hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 256, "pad_token_id": None}
UNKNOWN = {
    "olmo": {},
    "cohere2": {"sliding_window": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}
BOUND = 1 / 25
"""Tokens of a micro-batch are rounded up by 1 / 32 at most, another number of them in each."""
LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module")
def make_recipe(tmp_path_factory):
    """Make the recipe that fine-tunes a small model of a kind, in one folder for all tests: what is traced is kept."""
    folder = tmp_path_factory.mktemp("kinds")

    def make(kind, length=128, changes=None, **fields):
        config = AutoConfig.for_model(kind, **SMALL | UNKNOWN.get(kind, {}) | fields)
        config.architectures = ["TheirForCausalLM"]
        config.save_pretrained(folder / kind)
        own = {"model_name_or_path": str(folder / kind), "max_seq_length": length, "train_file": ["chats.jsonl"]}
        return pretrained_shape.load("sft_small_cpu", own | (changes or {}))

    return make


@pytest.mark.parametrize(
    ("kind", "changes", "recomputed"),
    [
        ("olmo", {}, False),
        thorough("cohere2", LORA, True),
        thorough("cohere2", {}, False),
        thorough("olmoe", {}, True),
        thorough("olmoe", LORA, False),
    ],
)
def test_few_layers_say_what_all_take(kind, changes, recomputed, make_recipe):
    recipe = make_recipe(kind, changes=changes)
    model, whole = trace_decoder(recipe), model_from_recipe_is_refused(recipe)
    assert whole
    assert model.traced_layers < model.num_layers
    options = {"mixed_precision": "bf16", "gradient_checkpointing": recomputed}
    for b in (1, 3, 40):  # below and above what fills the head at once
        traced = trace.trace_recipe(recipe, b, **options)
        layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
        planned = planned_memory(model, layout, **options)
        assert planned.total == pytest.approx(traced.peak, rel=BOUND), b
        assert model.flops_per_sample * b == pytest.approx(traced.flops, rel=BOUND), b
        assert (model.num_parameters, count_weight_bytes(model)) == (traced.num_parameters, traced.parameters)
        assert 4 * model.num_trained == traced.gradients


def model_from_recipe_is_refused(recipe) -> bool:
    """Whether no formula knows a recipe's model, and a run is not held up by a trace of it."""
    with pytest.raises(UnknownShapeError, match="there is no formula"):
        model_from_recipe(recipe)
    with pytest.raises(UnknownShapeError, match="there is no formula"):
        from_recipe(recipe)
    return True


@pytest.mark.parametrize("changes", [{}, thorough(LORA), thorough(LORA | {"base_quantization": "nf4"})])
def test_a_trace_says_what_a_formula_does(changes, make_recipe):
    """Of a kind that has one: weights exactly, memory whole and sharded, work."""
    recipe = make_recipe("llama", changes=changes)
    formula, model = model_from_recipe(recipe), trace_decoder(recipe)
    assert model.num_parameters == formula.num_parameters
    assert model.num_trained == formula.num_trained
    assert model.weight_bytes == pytest.approx(formula.weight_bytes, rel=1e-3)
    assert model.flops_per_sample == pytest.approx(formula.flops_per_sample, rel=BOUND)
    in_head = 2 * formula.num_logits * formula.hidden_size
    # What is computed again ends before the last product of a layer, whose result nobody needs
    assert 0.8 < model.forward_flops / (formula.forward_flops - in_head) < 1 + BOUND
    works = [timing.count_work(each, "bf16") for each in (model, formula)]
    assert works[0].attention.flops == pytest.approx(works[1].attention.flops, rel=0.1)
    # With what the head keeps of each token, which of eight narrow layers is much
    assert works[0].saved_bytes == pytest.approx(works[1].saved_bytes, rel=0.1)
    for sharded in (False, True) if "base_quantization" not in changes else (False,):
        layout = solve_layout(num_processes=2, global_batch_size=64, per_device_train_batch_size=32)
        options = {"mixed_precision": "bf16", "sharded": sharded}
        for again in (False, True):
            totals = [
                planned_memory(each, layout, **options, gradient_checkpointing=again).total for each in (model, formula)
            ]
            assert totals[0] == pytest.approx(totals[1], rel=0.08), (sharded, again)


def test_a_model_that_goes_from_token_to_token_is_traced_in_short_samples(make_recipe):
    """As many tokens in shorter samples save as many bytes; a step of as many operators as tokens would take minutes."""
    recipe = make_recipe(
        "jamba", 32, num_hidden_layers=4, attn_layer_period=4, attn_layer_offset=2, num_experts=2, num_experts_per_tok=1
    )
    model, traced = trace_decoder(recipe), trace.trace_recipe(recipe, 2, mixed_precision="bf16")
    layout = solve_layout(num_processes=1, global_batch_size=2, per_device_train_batch_size=2)
    assert model.num_parameters == traced.num_parameters
    assert 2 * model.flops_per_sample == pytest.approx(traced.flops, rel=0.05)
    assert planned_memory(model, layout, mixed_precision="bf16").total == pytest.approx(traced.peak, rel=0.1)


def test_layers_are_chosen():
    assert choose_layers("a" * 32).more == [(2, 29)]
    assert choose_layers("abcdefg" * 4) is None  # too many kinds
    assert choose_layers([]) is None


def test_the_whole_plan(make_recipe, capsys):
    recipe = make_recipe("olmo")
    workload = from_command(recipe)
    placement = place(workload, parse("8xh100"))
    assert judge(placement).reasons == ("of a model without a formula",)
    words = ["plan", "--model_name_or_path", recipe.model_name_or_path, "--from_scratch", "false"]
    main([*words, "--seq_len", "128", "--on", "1x3090", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["traced_layers"] == find_model(recipe).traced_layers
    assert "finetune_causal_lm.py" in answer["command"]


def test_what_cannot_be_traced_is_said_in_one_line(make_recipe, tmp_path):
    recipe = make_recipe("olmo")
    config = json.loads((Path(recipe.model_name_or_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "theirs"}))
    recipe = dataclasses.replace(recipe, model_name_or_path=str(tmp_path))
    with pytest.raises(UsageError, match=r"has no formula, and cannot be traced: .*theirs"):
        from_command(recipe)


def test_decoders_are_known_by_their_class():
    assert may_be_decoder({"model_type": "new", "architectures": ["NewForCausalLM"]})
    assert may_be_decoder(
        {"model_type": "new", "architectures": ["NewForConditionalGeneration"], "text_config": {"a": 1}}
    )
    for config in (
        {"model_type": "new", "architectures": ["NewForConditionalGeneration"]},
        {"model_type": "new", "architectures": ["NewForCausalLM"], "is_encoder_decoder": True},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "new"},
    ):
        assert not may_be_decoder(config)


def test_a_convolution_of_each_channel_alone_counts_each_alone():
    def count(groups: int) -> int:
        made = trace.trace_step(
            lambda: torch.nn.Conv1d(8, 8, 4, groups=groups, bias=False),
            lambda model, b: model(torch.ones(b, 8, 19, requires_grad=True)).sum(),
            2,
            mixed_precision="no",
            gradient_checkpointing=False,
            make_optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.1),
        )
        return made.flops

    assert count(1) == 3 * 2 * 2 * 16 * 8 * 8 * 4
    assert count(8) == count(1) // 8
