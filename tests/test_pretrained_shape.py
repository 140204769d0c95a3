"""A checkpoint to start from brings its shape: nothing of it has to be typed, nothing typed may contradict it."""

import dataclasses
import json

import pytest
from transformers import BertConfig, GPT2Config, ResNetConfig, RobertaConfig

from samestep import cli
from samestep.errors import UsageError
from samestep.recipe.catalog import TEXTS
from samestep.recipe.catalog import load as load_recipe
from samestep.recipe.pretrained_shape import SHAPES, load

CASES = {
    "bert_base": BertConfig(
        vocab_size=70, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, layer_norm_eps=1e-6
    ),
    "gpt2_124m": GPT2Config(n_embd=24, n_layer=3, n_head=4, vocab_size=70),
    "finetune_glue_bert_base": BertConfig(hidden_size=24, num_attention_heads=4, max_position_embeddings=256),
    "resnet50_1xv100": ResNetConfig(depths=[1, 1], hidden_sizes=[8, 16], embedding_size=4, layer_type="basic"),
}


def test_what_a_config_leaves_out_is_what_transformers_takes():
    for config in (BertConfig(), GPT2Config(), ResNetConfig()):
        theirs = {field: getattr(config, field) for field in SHAPES[config.model_type]}
        assert {f: tuple(v) if isinstance(v, list) else v for f, v in theirs.items()} == SHAPES[config.model_type]


@pytest.mark.parametrize("name", CASES)
def test_the_shape_is_the_checkpoints(name, tmp_path):
    config, said = CASES[name], []
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    ours = load_recipe(name)
    recipe = load(name, {"model_name_or_path": str(tmp_path)}, say=said.append)
    shape = {field: getattr(recipe, field) for field in SHAPES[config.model_type]}
    expected = {field: getattr(config, field) for field in shape}
    if "activation_function" in shape:
        assert shape["activation_function"] == ours.activation_function, "two names of one function"
        expected["activation_function"] = ours.activation_function
    assert {field: list(value) if isinstance(value, tuple) else value for field, value in shape.items()} == expected
    changed = {
        field.name
        for field in dataclasses.fields(ours)
        if field.name not in TEXTS and getattr(ours, field.name) != getattr(recipe, field.name)
    }
    assert changed <= {*shape, "tokenizer_name", "model_name_or_path"}
    assert getattr(recipe, "tokenizer_name", None) is None
    (line,) = said
    assert all(field in line for field in changed - {"model_name_or_path"})
    again = []
    assert load(
        name, {"model_name_or_path": str(tmp_path)} | {f: shape[f] for f in changed & shape.keys()}, say=again.append
    )


def test_what_is_typed_may_not_contradict(tmp_path):
    CASES["gpt2_124m"].save_pretrained(tmp_path)
    start = {"model_name_or_path": str(tmp_path)}
    with pytest.raises(UsageError) as error:
        load("gpt2_124m", start | {"n_layer": 12, "n_head": 4, "n_embd": 12})
    assert [problem.split(" has ")[1].split(" ")[0] for problem in error.value.problems] == ["n_embd", "n_layer"]
    assert load("gpt2_124m", start | {"resid_pdrop": 0.1}).resid_pdrop == 0.1


def test_another_architecture_is_named(tmp_path):
    RobertaConfig().save_pretrained(tmp_path)
    with pytest.raises(
        UsageError, match=r"of type 'roberta', but bert_pretraining trains bert. Give a checkpoint of bert;"
    ):
        load("bert_base", {"model_name_or_path": str(tmp_path)})


def test_what_cannot_be_read_leaves_the_recipe_as_it_is(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        assert load("bert_base", {"model_name_or_path": str(folder)}).hidden_size == 768
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(UsageError, match=r"config\.json is not JSON"):
        load("bert_base", {"model_name_or_path": str(tmp_path)})


def test_a_plan_is_of_the_checkpoints_shape(tmp_path, capsys):
    CASES["gpt2_124m"].save_pretrained(tmp_path)
    cli.main(f"plan gpt2_124m --model_name_or_path {tmp_path} --json".split())
    small = json.loads(capsys.readouterr().out)
    assert small["num_parameters"] < 1e6
