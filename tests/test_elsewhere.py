"""Programs that are not this repository's: what they need is planned, and there is no command for them."""

import json

import pytest

from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe.catalog import load
from stepplan.cli.dispatch import plan
from stepplan.hardware import parse
from stepplan.peers import PROGRAMS, Elsewhere
from stepplan.placement import TooLargeError, place
from stepplan.workload import from_recipe

LLAMA = {"model_name_or_path": "meta-llama/Llama-2-7b", "train_file": ["chats.jsonl"], "max_seq_length": 512}
LLAMA |= {"num_train_samples": None, "dataset_name": None, "dataset_config_name": None, "num_validation_samples": None}
TITAN = {"program": "torchtitan", "weight_bytes": 2}
QLORA = {"lora_rank": 16, "lora_alpha": 32.0, "base_quantization": "nf4"}


def make(changes=None, **elsewhere):
    workload = from_recipe(load("sft_small_cpu", LLAMA | (changes or {})))
    return workload.move(Elsewhere(**elsewhere)) if elsewhere else workload


def need(workload, num_processes: int = 4, **options):
    layout = solve_layout(num_processes=num_processes, global_batch_size=32, per_device_train_batch_size=1)
    return workload.memory(
        layout, **{"mixed_precision": "bf16", "gradient_checkpointing": True, "sharded": False} | options
    )


def test_states_of_16_and_8_bits_are_that_much_smaller():
    ours, half, eighth = make(), make(**TITAN, moment_bytes=4), make(**TITAN, moment_bytes=2)
    n = ours.model.num_parameters
    assert [need(workload).optimizer_step for workload in (ours, half, eighth)] == [16 * n, 8 * n, 6 * n]


def test_zero_divides_gradients_and_moments_and_leaves_weights_whole():
    memory = need(make(program="hf", weight_bytes=2, moment_bytes=4, zero_stage=2))
    n = make().model.num_parameters
    assert (memory.parameters, memory.gradients, memory.moments) == (2 * n, n // 2, n)


def test_offloaded_states_take_nothing_of_the_device():
    memory = need(make(offloaded=True), sharded=True)
    assert memory.parameters == memory.gradients == memory.moments == 0
    assert memory.gathered > 0


def test_selective_checkpointing_lies_between():
    kept, half, again = (
        need(make(program="litgpt", selective=selective), gradient_checkpointing=recomputed).activations
        for selective, recomputed in ((False, False), (True, True), (False, True))
    )
    assert again < half < kept


def test_bases_in_4_bits_are_divided():
    """70 billion on four cards of 24 GB: our program refuses it, others train it so."""
    changes = QLORA | {"model_name_or_path": "meta-llama/Llama-2-70b", "max_seq_length": 256}
    with pytest.raises(UsageError, match="packed weights"):
        place(make(changes), parse("4x4090"), sharded=True)
    placement = place(make(changes, program="hf", weight_bytes=2), parse("4x4090"))
    assert placement.sharded
    assert placement.command() is None


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_plan_of_another_program_has_no_command(program, capsys):
    flags = "--model_name_or_path Qwen/Qwen3-0.6B --seq_len 2048 --on 1x4090"
    plan([*flags.split(), "--program", program, "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["command"], answer["write_command"]) == (None, None)
    assert f"as {program} computes it" in answer["hint"]
    assert "not in the time" not in answer["hint"]


def test_a_plan_of_offloaded_states_says_what_its_time_lacks(capsys):
    flags = "--model_name_or_path Qwen/Qwen3-0.6B --seq_len 2048 --on 2x4090 --sharded --program hf --offloaded"
    plan([*flags.split()])
    assert "not in the time (--offloaded)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "flags", ["--weight_bits 16", "--zero_stage 2", "--offloaded true --selective_checkpointing true"]
)
def test_its_flags_need_a_program(flags):
    with pytest.raises(UsageError, match="without program: add --program hf"):
        plan(["gpt2_124m", *flags.split()])


def test_other_models_have_no_programs():
    with pytest.raises(UsageError, match="no decoder"):
        plan(["gpt2_124m", "--program", "hf"])


def test_a_fused_head_needs_less(tmp_path, capsys):
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12}
    config |= {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_inner": None,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    heads = []
    for flags in ([], ["--fused_head"]):
        plan(["--model_name_or_path", str(tmp_path), "--seq_len", "1024", "--json", *flags])
        heads.append(json.loads(capsys.readouterr().out)["memory"]["head"])
    assert heads[1] < heads[0] / 3


def test_ways_of_others_are_named_where_ours_do_not_fit():
    long = {"model_name_or_path": "meta-llama/Llama-3.1-8B", "max_seq_length": 32768}
    with pytest.raises(TooLargeError, match=r"no program here does: .*tensor parallel over 8 devices, [0-9.]+ GB"):
        place(make(long), parse("8xa10g"))
    experts = {
        "model_name_or_path": "mistralai/Mixtral-8x22B-v0.1",
        "max_seq_length": 512,
        "global_batch_size": 512,
        "lr_scaling_rule": "none",
    }
    with pytest.raises(TooLargeError, match="expert parallel over 8 devices"):
        place(make(experts), parse("64x8xa10g"))
