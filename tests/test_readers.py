"""Plans of recipes whose models read sources, recordings or images: beside the trace, and beside the models themselves."""

import dataclasses
import json

import pytest
from cases import keep

from samestep import cli
from samestep.cut.layout import solve_layout
from samestep.errors import exit_code
from samestep.recipe.catalog import load
from stepplan import base_models
from stepplan.image_text import ImageText
from stepplan.memory import model_from_recipe
from stepplan.stacks import EncoderDecoder
from stepplan.trace import trace_recipe
from stepplan.workload import from_recipe

RECIPES = {
    "t5_base_3090": 222_903_552,
    "whisper_small_3090": 241_734_912,
    "qwen3vl_2b_lora_3090": 2_127_532_032,
    "smolvlm_sft_3090": 2_246_784_880,
}
"""Recipe -> parameters of its base, as its page on the hub has them."""
SMALL = ("seq2seq_small_cpu", "speech_small_cpu", "vlm_small_cpu")
BART = {"architecture": "bart", "max_position_embeddings": 128}


def run(capsys, *words: str) -> dict:
    assert exit_code(lambda: cli.main(["plan", *words, "--json"])) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*RECIPES, *SMALL])
def test_every_recipe_has_a_plan(capsys, name):
    answer = run(capsys, name, "--on", "1x3090")
    recipe = load(name)
    assert answer["flops_per_sample"] / answer["flops_per_token"] == pytest.approx(recipe.max_seq_length)
    assert answer["memory_needed"] < answer["memory_of_device"]
    assert answer["samples_per_second"] > 0
    assert ("images" in answer) == getattr(recipe, "images", False)


@pytest.mark.parametrize("name", RECIPES)
def test_bases_have_their_published_sizes(name):
    model = model_from_recipe(load(name))
    adapters = {EncoderDecoder: lambda: model.num_adapter, ImageText: lambda: model.num_trained}
    assert model.num_parameters - adapters[type(model)]() == RECIPES[name]


LORA = {"lora_rank": 4, "lora_alpha": 8, "lora_targets": ("q", "v"), "num_hidden_layers": 6}
WIDE = {
    "hidden_size": 384,
    "intermediate_size": 1536,
}  # so that the spectrogram, which a plan leaves out, is a small part
TRACED = {
    "t5": ("seq2seq_small_cpu", {}),
    "t5 with dropout": ("seq2seq_small_cpu", {"dropout": 0.1}),
    "t5 with adapters": ("seq2seq_small_cpu", LORA),
    "t5 on a frozen encoder": ("seq2seq_small_cpu", {"freeze": ("encoder",)}),
    "bart": ("seq2seq_small_cpu", BART | {"dropout": 0.0}),
    "bart with dropout": ("seq2seq_small_cpu", BART | {"dropout": 0.1}),
    "whisper": ("speech_small_cpu", WIDE),
    "whisper on a frozen encoder": ("speech_small_cpu", WIDE | {"freeze": ("encoder",)}),
}


@pytest.mark.parametrize("case", keep(TRACED, ["t5", "whisper on a frozen encoder"]))
def test_plans_meet_the_trace_of_the_script(case):
    """Memory and work of the program's own model, loss and optimizer."""
    recipe = load(*TRACED[case])
    workload = from_recipe(recipe)
    for b, mixed_precision, recomputed in ((4, "no", False), (17, "bf16", False), (17, "bf16", True)):
        options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
        layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
        traced = trace_recipe(recipe, b, **options)
        planned = workload.memory(layout, **options).total
        assert planned == pytest.approx(traced.peak, rel=0.07), (b, options)
        assert traced.num_parameters == workload.model.num_parameters
        if not recomputed:
            assert b * workload.model.flops_per_sample == pytest.approx(traced.flops, rel=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Images


def make_sums(changes: dict | None = None):
    """Make the program's model of the drawn images, by its own code: random weights, and the data's processor."""
    recipe = load("vlm_small_cpu", {"num_train_samples": 40, "num_validation_samples": 4} | (changes or {}))
    source, _ = recipe.parts.find("data")(recipe)
    return recipe, recipe.parts.find("model").from_recipe(recipe, source)


PARTS = {
    "whole": {},
    "tower": {"freeze": ("vision_tower",)},
    "tower and projector": {"freeze": ("vision_tower", "projector")},
    "projector alone": {"freeze": ("vision_tower", "language_model")},
    "adapters everywhere": {"lora_rank": 4, "lora_alpha": 8},
    "adapters by name": {"lora_rank": 4, "lora_alpha": 8, "lora_targets": ("q_proj", "linear_1")},
    "adapters on the text": {"lora_rank": 4, "lora_alpha": 8, "freeze": ("vision_tower", "projector")},
}


@pytest.mark.parametrize("part", PARTS)
def test_what_is_trained_of_images_and_text_is_what_is_planned(part):
    """Numbers of parameters, all and trained, are those of the program's model."""
    recipe, sums = make_sums(PARTS[part])
    vocabulary = sums.causal_lm.get_input_embeddings().weight.shape[0]
    planned = model_from_recipe(dataclasses.replace(recipe, vocab_size=vocabulary))
    # But for adapters on a head that nothing asks, which peft adds, too
    sizes = [p.numel() for name, p in sums.model.named_parameters() if p.requires_grad or "lora_" not in name]
    assert planned.num_parameters == sum(sizes)
    assert planned.num_trained == sum(p.numel() for p in sums.model.parameters() if p.requires_grad)


def test_images_take_their_part_of_a_sample(capsys):
    one, two = (
        run(capsys, "qwen3vl_2b_lora_3090", "--image_sizes", *sizes) for sizes in (["480x640"], ["480x640"] * 2)
    )
    assert one["images"] == {"sizes": [[480, 640]], "tokens": 300}  # of 32 x 32 pixels each
    assert two["images"]["tokens"] == 600
    assert two["tokens_per_step"] == one["tokens_per_step"]  # a sample has max_seq_length tokens, whatever they are
    assert two["flops_per_sample"] > one["flops_per_sample"]
    assert two["saved_bytes_per_sample"]["bf16"] > one["saved_bytes_per_sample"]["bf16"]
    tower = {"freeze": ("vision_tower",)}
    whole, frozen = (model_from_recipe(load("vlm_small_cpu", changes)) for changes in ({}, tower))
    assert frozen.tower.saved_bytes(autocast=True) == 0 < whole.tower.saved_bytes(autocast=True)
    assert whole.flops_per_sample > frozen.flops_per_sample
    assert exit_code(lambda: cli.main(["plan", "vlm_small_cpu"])) == 0
    assert "images     3 of 32 x 32 pixels, 48 of the tokens of a sample" in capsys.readouterr().out


def test_tiles_follow_the_processor_that_is_saved(tmp_path):
    config = dict(base_models.find_base_model("SmolVLM2-2.2B"))
    del config["processor"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = load("smolvlm_sft_3090", {"model_name_or_path": str(tmp_path)})
    tokens = []
    for edge in (768, 1536):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": edge}}))
        tokens.append(model_from_recipe(recipe).image_tokens)
    assert tokens == [81 * (2 * 2 + 1), 81 * (4 * 3 + 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vlm_small_cpu --image_sizes 3x", "image_sizes has 3x, must be height and width"),
        ("bert_base --image_sizes 32x32", "image_sizes is given, but bert_base has no images"),
        ("qwen3vl_2b_lora_3090 --image_sizes 4000x4000", "but max_seq_length is 2,048: raise it, or give fewer"),
        ("vlm_small_cpu --freeze layers", "freeze names layers, but frozen parts are planned whole"),
        ("seq2seq_small_cpu --freeze decoder", "freeze names decoder, but of its parts only encoder is planned"),
        ("t5_base_3090 --max_source_length 64 --lora_rank 900 --lora_alpha 8", "lora_rank is 900, above the width 768"),
        ("whisper_small_3090 --max_target_length 500", "max_target_length is 500, but"),
        ("vlm_small_cpu --program trl --on 1x3090", "is no decoder of texts"),
        ("seq2seq_small_cpu --architecture prophetnet", "prophetnet, for which there is no formula: known are t5"),
    ],
)
def test_mistakes_get_one_line(capsys, words, message):
    assert exit_code(lambda: cli.main(["plan", *words.split()])) == 2
    err = capsys.readouterr().err
    assert message in err.replace("'", "").replace('"', "")
    assert err.count("\n") == 1
