"""Models from their configurations: parameters and FLOPs of the real ones, and every mistake."""

import json

import pytest
import torch
import transformers
from small_models import SMALL_CONFIGS, SMALL_DECODERS, save
from torch.utils.flop_counter import FlopCounterMode
from transformers.activations import ACT2FN

from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from samestep.recipe.prediction import predict_memory
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from stepplan import base_models
from stepplan.configs import ACTIVATIONS, model_from_config, read_config
from stepplan.decoder import Decoder
from stepplan.workload import from_recipe


@pytest.mark.parametrize("kind", SMALL_CONFIGS)
def test_parameters_and_flops_are_the_real_models(kind, tmp_path):
    config = save(tmp_path, kind)
    config._attn_implementation = "eager"
    is_image = kind.startswith("ResNet")
    shape = model_from_config(read_config(str(tmp_path)), None if is_image else 24, name=kind)
    model = getattr(transformers, kind)(config)
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    if hasattr(shape, "layer"):
        layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
        assert len(layers) == shape.num_layers == 3
        assert shape.layer.num_parameters == sum(p.numel() for p in layers[0].parameters())
    inputs = torch.randn(2, 3, 224, 224) if is_image else torch.zeros(2, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        heads = model(inputs)
        outputs = [heads[name] for name in ("logits", "prediction_logits", "seq_relationship_logits") if name in heads]
        sum(logits.sum() for logits in outputs).backward()
    expected = 2 * shape.flops_per_sample
    if kind == "GPT2LMHeadModel":  # 6 N counts biases and normalisations too
        expected -= 2 * 24 * 6 * sum(p.numel() for p in model.parameters() if p.ndim == 1)
    assert counter.get_total_flops() == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("kind", SMALL_DECODERS)
def test_parameters_and_flops_of_decoders_are_the_real_models(kind, tmp_path):
    config = save(tmp_path, kind)
    config._attn_implementation = "eager"
    values = read_config(str(tmp_path))
    assert base_models.is_decoder(values)
    decoder = Decoder(shape=base_models.shape_from_config(values, kind), sequence_length=24)
    model = getattr(transformers, kind)(config)
    assert decoder.num_parameters == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 24, dtype=torch.int64)).logits.sum().backward()
    assert counter.get_total_flops() == pytest.approx(2 * decoder.flops_per_sample, rel=2e-3)


@pytest.mark.parametrize(
    ("content", "length", "message"),
    [
        (None, 8, "a folder with a config.json, or such a file. cannot be read: No such file"),
        ("{", 8, "is not JSON"),
        ("[]", 8, "must hold an object"),
        ("{}", 8, "it has no model_type"),
        (
            '{"model_type": "t5", "architectures": ["T5Model"]}',
            8,
            "is a T5Model .model_type t5., for which there is no",
        ),
        ('{"model_type": "mamba2"}', 8, "its config.json names no class: add its name"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', 8, "its configuration has no vocab_size"),
        ('{"model_type": "bert", "architectures": ["BertForMaskedLM"]}', None, "--seq_len is missing"),
    ],
)
def test_mistakes(tmp_path, content, length, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        model_from_config(read_config(str(tmp_path)), length, name="it")


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"is an adapter, not a model\. Give its base"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", "many"),
        ("hidden_size", 0),
        ("num_hidden_layers", True),
        ("hidden_dropout_prob", 1),
        ("depths", []),
        ("hidden_act", "nosuch"),
        ("hidden_act", ["gelu"]),
        ("activation_function", 5),
    ],
)
def test_a_field_that_is_no_size_is_named(tmp_path, field, value):
    save(tmp_path, "BertForMaskedLM")
    config = read_config(str(tmp_path)) | {field: value}
    with pytest.raises(UsageError, match=f"it: {field} is .* in its configuration, must"):
        model_from_config(config, 8, name="it")


def test_activations_are_those_of_transformers():
    assert sorted(ACT2FN) == list(ACTIVATIONS)


def test_a_length_beyond_the_positions_is_refused(tmp_path):
    save(tmp_path, "BertForMaskedLM")
    with pytest.raises(UsageError, match="seq_len is 65, but it has 64 positions: use 64 or less"):
        model_from_config(read_config(str(tmp_path / "config.json")), 65, name="it")
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "bert"


def test_positions_of_roberta_begin_after_the_padding(tmp_path):
    save(tmp_path, "RobertaForMaskedLM")
    with pytest.raises(UsageError, match="seq_len is 63, but it has 62 positions"):
        model_from_config(read_config(str(tmp_path)), 63, name="it")


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "GPT2LMHeadModel", "RobertaForMaskedLM"])
def test_what_a_short_configuration_leaves_out_is_the_default_of_its_class(kind):
    """All of it is loaded at once, and only if something is missing."""
    model_type = SMALL_CONFIGS[kind][0].removesuffix("Config").lower()
    full = transformers.AutoConfig.for_model(model_type, architectures=[kind]).to_dict()
    calls = []

    def load_defaults(name: str) -> dict:
        calls.append(name)
        return transformers.AutoConfig.for_model(name).to_dict()

    short = {"model_type": model_type, "architectures": [kind]}
    shapes = [model_from_config(config, 128, name="it", load_defaults=load_defaults) for config in (full, short)]
    assert shapes[0] == shapes[1]
    assert calls == [model_type]


@pytest.mark.parametrize("kind", base_models.DEFAULTS)
def test_what_a_configuration_of_experts_leaves_out_is_what_transformers_takes(kind):
    own = transformers.AutoConfig.for_model(kind)
    assert {name: getattr(own, name) for name in base_models.DEFAULTS[kind]} == base_models.DEFAULTS[kind]
    fields = {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 5, "vocab_size": 60}
    fields |= {"num_key_value_heads": 4, "intermediate_size": 48, "tie_word_embeddings": False}
    shapes = [
        base_models.shape_from_config(fields | named, kind)
        for named in ({name: 4} for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**fields))
    shape = base_models.shape_from_config(fields, kind)
    assert Decoder(shape=shape, sequence_length=8).num_parameters == sum(p.numel() for p in model.parameters())


def test_a_configuration_that_the_planner_cannot_read_stops_no_run(tmp_path):
    fields = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    names = ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE)
    recipe = load("sft_small_cpu", dict.fromkeys(names) | {"model_name_or_path": str(tmp_path)})
    layout = solve_layout(num_processes=1, global_batch_size=8)
    assert predict_memory(recipe, layout, attention="sdpa", more_gradient_bytes=0) is None
    with pytest.raises(UsageError, match="its configuration has no num_hidden_layers"):
        from_recipe(recipe)
