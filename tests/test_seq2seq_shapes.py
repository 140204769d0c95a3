"""Encoders with decoders beside transformers' own models, on no device: parameters, work, memory, adapters."""

import dataclasses
import json

import peft
import pytest
import torch
from cases import keep
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from stepplan import stacks
from stepplan.configs import has_formula, model_from_config
from stepplan.decoder import Tuning
from stepplan.memory import planned_memory
from stepplan.stacks import EncoderDecoder
from stepplan.timing import count_work
from stepplan.trace import trace_config

T5 = {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_heads": 4, "num_layers": 3, "vocab_size": 500}
BART = {"d_model": 64, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 256, "decoder_ffn_dim": 192}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 500, "max_position_embeddings": 128}
BART |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
CASES = {
    "t5": T5,
    "t5 with a gate": T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2, "d_kv": 24},
    "mt5": T5,
    "umt5": T5,
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
    "marian": BART,
    "m2m_100": BART,
    "whisper": BART | {"num_mel_bins": 16, "max_source_positions": 64, "max_target_positions": 64},
}
CLASSES = {"t5": "T5", "bart": "Bart", "whisper": "Whisper"}


def make(case: str, **changes):
    """Make the configuration of a case, and its fields."""
    kind = case.split()[0]
    config = AutoConfig.for_model(kind, **(CASES[case] | changes))
    if kind in CLASSES:
        config.architectures = [f"{CLASSES[kind]}ForConditionalGeneration"]
    return config, json.loads(config.to_json_string(use_diff=False))


def plan(values: dict, source: int, target: int) -> EncoderDecoder:
    model = model_from_config(values, source, name="it", target_length=target)
    assert isinstance(model, EncoderDecoder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_parameters_are_those_of_transformers(case):
    config, values = make(case)
    auto = AutoModelForSpeechSeq2Seq if case == "whisper" else AutoModelForSeq2SeqLM
    with torch.device("meta"):
        real = auto.from_config(config)
    assert plan(values, 48, 24).num_parameters == real.num_parameters()
    assert has_formula(values)


@pytest.mark.parametrize("case", keep(["t5", "t5 with a gate", "bart", "whisper"], ["t5", "whisper"]))
def test_memory_and_work_meet_the_trace(case, tmp_path):
    config, values = make(case, d_model=128, vocab_size=2000)
    config.save_pretrained(tmp_path)
    model = plan(values, 64, 64)
    for mixed_precision, recomputed in (("no", False), ("bf16", True)):
        traced = trace_config(str(tmp_path), 8, 64, mixed_precision=mixed_precision, gradient_checkpointing=recomputed)
        layout = solve_layout(num_processes=1, global_batch_size=8, per_device_train_batch_size=8)
        options = {"mixed_precision": mixed_precision, "gradient_checkpointing": recomputed}
        assert planned_memory(model, layout, **options).total == pytest.approx(traced.peak, rel=0.07), options
        assert 8 * model.flops_per_sample == pytest.approx(traced.flops, rel=0.02)


@pytest.mark.parametrize(
    ("case", "names"), [("t5", ["q", "v"]), ("bart", ["q_proj", "v_proj"]), ("bart", ["all-linear"])]
)
def test_adapters_are_those_of_peft(case, names):
    config, values = make(case)
    with torch.device("meta"):
        real = AutoModelForSeq2SeqLM.from_config(config)
        targets = "all-linear" if names == ["all-linear"] else names
        adapted = peft.get_peft_model(real, peft.LoraConfig(r=4, target_modules=targets))
    model = stacks.adapt(plan(values, 48, 24), Tuning(rank=4, targets=tuple(names)))
    assert (model.num_trained, model.num_parameters) == adapted.get_nb_trainable_parameters()


def test_what_is_frozen_costs_a_forward():
    """A frozen encoder saves nothing, has no gradients, and a third of its work."""
    _, values = make("whisper")
    whole = plan(values, 48, 24)
    model = stacks.adapt(whole, Tuning(), trains_encoder=False)
    assert model.num_parameters == whole.num_parameters
    assert whole.num_trained - model.num_trained == whole.encoder.num_base
    assert model.encoder.saved_bytes(autocast=True) == 0
    # The backward of the encoder, whose first convolution has none to its input, and that of the decoder to its states
    decoder, states = whole.decoder, [matrix for matrix in whole.decoder.matrices if matrix.reads == "source"]
    spared = 2 * whole.encoder.forward_flops - whole.encoder.input_flops
    spared += decoder.num_layers * sum(2 * matrix.tokens * matrix.size for matrix in states)
    assert whole.flops_per_sample - model.flops_per_sample == pytest.approx(spared, rel=1e-6)
    assert count_work(model, "bf16").flops < count_work(whole, "bf16").flops


def test_memory_follows_both_lengths():
    _, values = make("bart")
    totals = [
        plan(values, *lengths).peaks(4, autocast=True, gradient_checkpointing=False)[0].activations
        for lengths in ((64, 64), (128, 64), (64, 128))
    ]
    assert totals[0] < min(totals[1:])
    eager = dataclasses.replace(plan(values, 64, 64), eager_attention=True)
    assert eager.saved_bytes(autocast=True) > plan(values, 64, 64).saved_bytes(autocast=True)


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        ({"model_type": "bart"} | BART, (256, 24), "seq_len is 256, but it has 128 positions"),
        ({"model_type": "whisper"} | CASES["whisper"], (24, 65), "target_len is 65, but it has 64 positions"),
        ({"model_type": "t5"} | T5 | {"d_ff": None}, (24, 24), "its configuration has no d_ff"),
        ({"model_type": "t5"} | T5 | {"d_ff": -1}, (24, 24), "d_ff is -1 in its configuration"),
        ({"model_type": "t5"} | T5 | {"feed_forward_proj": 3}, (24, 24), "feed_forward_proj is 3 in its configuration"),
        ({"model_type": "bert", "hidden_size": 8}, (24, 24), "target_len is 24, but it has no decoder"),
    ],
)
def test_mistakes_get_one_line(values, lengths, message):
    with pytest.raises(UsageError, match=message):
        plan(values, *lengths)


@pytest.mark.parametrize(
    "own",
    [
        {"pos_att_type": ["c2p", "p2c"], "type_vocab_size": 0, "position_biased_input": False},
        {"pos_att_type": ["c2p"], "max_relative_positions": 24},
        {"relative_attention": False},
    ],
)
def test_the_first_deberta_is_that_of_transformers(own):
    fields = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
    fields |= {"vocab_size": 128, "pad_token_id": 0, "relative_attention": True}
    config = AutoConfig.for_model("deberta", **(fields | own))
    with torch.device("meta"):
        real = AutoModelForMaskedLM.from_config(config)
    values = json.loads(config.to_json_string(use_diff=False))
    assert model_from_config(values, 32, name="it").num_parameters == real.num_parameters()
