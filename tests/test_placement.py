"""What a recipe does on given hardware: the decision tree, what fits, what is refused, launch files."""

import dataclasses
import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from common import PLANNED
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import cli as program
from samestep.cut.layout import shares
from samestep.errors import UsageError, exit_code
from samestep.recipe.catalog import load
from stepplan.base_models import find_base_model, shape_from_config
from stepplan.decoder import Decoder
from stepplan.hardware import device_names, parse
from stepplan.placement import TooLargeError, place
from stepplan.workload import from_model, from_recipe


def plan(recipe: str, hardware: str, changes: dict | None = None, **settings):
    return place(from_recipe(load(recipe, changes)), parse(hardware), **settings)


@pytest.mark.parametrize(
    ("recipe", "hardware", "strategy", "cut"),  # cut: N, b, k
    [
        ("bert_large_3090", "1x3090", "direct", (1, 32, 1)),  # 128 tokens; at length 512 it needs a cut, below
        ("bert_large_2080ti", "1x2080ti", "accumulate", (1, 22, 6)),
        ("bert_base", "4xt4", "data parallel", (4, 64, 1)),
        ("bert_base", "4xv100-16", "data parallel", (4, 64, 1)),
        ("gpt2_xl_8xa100", "8xa100-80", "data parallel and accumulate", (8, 16, 4)),
        ("bert_large_phase1", "2x8xa100-80", "data parallel", (16, 16, 1)),
    ],
)
def test_the_decision_tree(recipe, hardware, strategy, cut):
    placement = plan(recipe, hardware)
    layout = placement.layout
    assert placement.strategy == strategy
    assert (layout.num_processes, layout.per_device_train_batch_size, layout.gradient_accumulation_steps) == cut
    assert (placement.gradient_checkpointing, placement.sharded) == (False, False)
    assert layout.global_batch_size == load(recipe).global_batch_size
    assert ("cut into" in placement.reason) == (layout.gradient_accumulation_steps > 1)


def test_a_micro_batch_is_as_large_as_fits_and_evened_out():
    long = {"max_seq_length": 512}
    placement = plan("bert_large_3090", "1x2080ti", long)
    b, k = placement.layout.per_device_train_batch_size, placement.layout.gradient_accumulation_steps
    assert placement.needed_bytes <= placement.hardware.device.memory_bytes
    assert k > 1
    assert b == -(-32 // k)
    with pytest.raises(UsageError, match=r"needs .* GB for 256 samples in a forward.*or set it to \d+ or less"):
        plan("bert_large_3090", "1x2080ti", {"global_batch_size": 256} | long, per_device_train_batch_size=256)


def test_precision_is_what_the_hardware_has():
    assert [plan("bert_base", name).mixed_precision for name in ("t4", "3090", "v100-32")] == ["fp16", "bf16", "fp16"]
    assert plan("bert_base", "3090", mixed_precision="no").mixed_precision == "no"
    with pytest.raises(
        UsageError, match=r"mixed_precision is bf16, which NVIDIA T4.* does not have: it has fp16 and float32"
    ):
        plan("bert_base", "4xt4", mixed_precision="bf16")
    assert any("fp16's loss scaling" in warning for warning in plan("bert_base", "4xt4").warnings)


def test_checkpointing_and_sharding_come_only_when_nothing_else_fits():
    assert not plan("gpt2_xl_8xa100", "8xa100-40").sharded
    placement = plan("gpt2_xl_8xa100", "8x3090")
    assert (placement.gradient_checkpointing, placement.sharded) == (False, True)
    assert placement.reason.endswith("it fits only with sharded weights (FSDP2)")
    placement = plan("gpt2_xl_8xa100", "8xa100-80", per_device_train_batch_size=32)
    assert (placement.gradient_checkpointing, placement.sharded) == (True, False)
    assert plan("bert_base", "8xa100-80", sharded=True).sharded
    stored, recomputed = (plan("bert_base", "1x3090", gradient_checkpointing=flag) for flag in (False, True))
    assert recomputed.gradient_checkpointing
    assert recomputed.time.products == pytest.approx(4 / 3 * stored.time.products)
    with pytest.raises(TooLargeError, match=r"for a single sample, of 25.8 GB on 1x3090"):
        plan("gpt2_xl_8xa100", "1x3090")
    with pytest.raises(UsageError, match="sharded needs several devices"):
        plan("bert_base", "1x3090", sharded=True)


def test_checkpointing_is_taken_where_larger_micro_batches_are_faster():
    """Weights are gathered for every micro-batch: fewer of them wait less for slow links."""
    taken = plan("gpt2_xl_8xa100", "4x4080")
    kept = plan("gpt2_xl_8xa100", "4x4080", per_device_train_batch_size=1)
    assert (taken.gradient_checkpointing, kept.gradient_checkpointing, kept.fits) == (True, False, True)
    assert taken.layout.gradient_accumulation_steps < kept.layout.gradient_accumulation_steps
    assert taken.time.total < 0.9 * kept.time.total
    assert "gradient checkpointing allows" in taken.reason
    assert "--gradient_checkpointing" in taken.command()


def test_warnings():
    few = plan("bert_base", "64xh100", {"global_batch_size": 4})
    assert any("60 of 64 devices get none of 4 samples" in warning for warning in few.warnings)
    assert any("starting kernels" in warning for warning in plan("bert_base", "64xh100").warnings)
    long = plan("gpt2_774m", "1x3090")  # samples of 1,024 tokens, of which few fit
    assert (long.layout.per_device_train_batch_size, long.time.share_of_peak > 0.5) == (4, True)
    assert not any("starting kernels" in warning for warning in long.warnings)
    assert any("--machine_rank" in warning for warning in plan("bert_base", "2x8xa100-80").warnings)
    assert any("of a step is waiting for PCIe 4.0" in w for w in plan("bert_base", "8x3090").warnings)
    assert any("is waiting for the network" in w for w in plan("gpt2_774m", "4x8x3090").warnings)
    assert plan("bert_large_phase1", "8xa100-80").warnings == ()


def test_a_second_node_is_no_brake():
    """Over InfiniBand two nodes are faster than one; over 10 Gb/s they are not, and the notes say which network it is."""
    one, two = (plan("bert_large_phase1", hardware) for hardware in ("8xa100-80", "2x8xa100-80"))
    assert two.time.total < 0.8 * one.time.total
    (note,) = (warning for warning in two.warnings if warning.startswith("between nodes"))
    assert "200 GB/s" in note
    assert "--network" in note
    slow = place(two.workload, parse("2x8xa100-80", "10Gb/s"))
    assert slow.time.exposed_communication > 0.3 * slow.time.total
    assert slow.all_reduce_seconds["ring"] > 100 * two.all_reduce_seconds["ring"]


def test_processes_sum_the_gradients_of_what_is_trained():
    """Those of the adapters are 79 MB, of 8 billion parameters."""
    placement, whole = (plan(name, "8xa100-80") for name in ("llama3_8b_lora_3090", "llama3_8b_sft_8xa100"))
    assert placement.all_reduce_seconds["ring"] < whole.all_reduce_seconds["ring"] / 50
    trained = placement.workload.model.num_trained
    assert 7e7 < 4 * trained < 9e7
    device = placement.hardware.device
    seconds = 2 * (8 - 1) * (4 * trained / 8 / (device.link_gb_per_s * 1e9) + device.link_latency_us / 1e6)
    assert placement.all_reduce_seconds["ring"] == pytest.approx(seconds, rel=1e-6)


def test_network_is_a_flag_of_plan_and_scale(capsys):
    def seconds(flags: str) -> float:
        code, out, _ = run(capsys, f"plan bert_base --on 2x8xa100-80 --json {flags}")
        assert code == 0
        return json.loads(out)["time"]["total"]

    assert seconds("--network 10Gb/s") > 2 * seconds("") == 2 * seconds("--network 200GB/s")
    rows = [
        json.loads(run(capsys, f"scale bert_base --on h100 --up_to 16 --json {flags}")[1])["rows"]
        for flags in ("", "--network 1GB/s")
    ]
    assert rows[0][:4] == rows[1][:4]
    assert rows[0][4]["strong"]["seconds"] < rows[1][4]["strong"]["seconds"]
    code, _, err = run(capsys, "plan bert_base --network 25GB/s")
    assert code == 2
    assert "--network needs hardware" in err


def test_what_the_programs_refuse_is_not_planned():
    """fp16 with sharded weights or folded gradients: float32 instead, or a refusal with what works."""
    placement = plan("gpt2_xl_8xa100", "4xt4")
    assert (placement.mixed_precision, placement.sharded) == ("no", True)
    assert "loss scale is not supported with FSDP" in placement.reason
    folded = {"accumulation": "optimizer", "second_moment": "unbiased"}
    assert plan("bert_base", "4xt4", folded).mixed_precision == "no"
    assert plan("bert_base", "4xt4").mixed_precision == "fp16"
    for recipe, hardware, changes, options, message in (
        (
            "gpt2_774m",
            "4xt4",
            None,
            {"mixed_precision": "fp16"},
            "fits only with sharded .* set --mixed_precision to no",
        ),
        (
            "bert_base",
            "4xt4",
            None,
            {"mixed_precision": "fp16", "sharded": True},
            "is fp16, .* set --mixed_precision to no",
        ),
        (
            "bert_base",
            "4xa100-80",
            None,
            {"mixed_precision": "fp16", "sharded": True},
            "to bf16 or no, or leave it out",
        ),
        ("bert_base", "4x3090", folded, {"sharded": True}, "accumulation is optimizer, .* leave --sharded out"),
        (
            "finetune_small_cpu",
            "4x3090",
            None,
            {"sharded": True},
            "only programs of language models do: leave --sharded out",
        ),
    ):
        with pytest.raises(UsageError, match=message) as error:
            plan(recipe, hardware, changes, **options)
        assert len(error.value.problems) == 1


def test_adapters_that_match_no_matrix_are_planned_too():
    """Phi-3 has one matrix for queries, keys and values: nothing is trained, and nothing sent."""
    shape = {"architecture": "phi3", "lora_rank": 8, "lora_alpha": 16, "lora_targets": ["q_proj"]}
    placement = plan("sft_small_cpu", "8xt4", shape)
    assert placement.time.communication < 1e-3
    assert placement.memory.gradients == 0


@pytest.mark.parametrize(("hardware", "published"), [("8x8xa100-80", 331), ("8x8xh100", None), ("512x8xh100", None)])
def test_seventy_billion_parameters_fit_where_they_were_trained(hardware, published):
    """torchtitan trains Llama-3-70B with FSDP2 and full checkpointing on 64 A100, at 331 tokens per second and device."""
    machine = parse(hardware)
    config = find_base_model("meta-llama/Llama-3.1-70B")
    model = Decoder(shape=shape_from_config(config, "it"), sequence_length=8192)
    workload = from_model(model, "llama", global_batch_size=machine.num_processes)
    placement = place(workload, machine)
    assert placement.fits
    assert (placement.sharded, placement.gradient_checkpointing) == (True, True)
    assert placement.memory.autocast_cache == 0
    if published:
        speed = placement.time.tokens_per_second(machine.num_processes, 8192) / machine.num_processes
        assert speed == pytest.approx(published, rel=0.25)


SFT = {"model_name_or_path": "meta-llama/Llama-3.2-3B", "max_seq_length": 2048, "global_batch_size": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamw_8bit"}, "fits only with sharded weights .FSDP2., but optimizer is adamw_8bit"),
        (
            {
                "model_name_or_path": "google/gemma-3-27b",
                "lora_rank": 16,
                "lora_alpha": 32,
                "base_quantization": "nf4",
            },
            "fits only with sharded weights .FSDP2., but base_quantization is nf4",
        ),
    ],
)
def test_sharding_that_the_program_refuses_is_not_proposed(changes, message):
    """Rounded moments and packed weights cannot be divided."""
    with pytest.raises(UsageError, match=message):
        plan("sft_small_cpu", "4xl4", SFT | changes)


def test_what_no_program_here_runs_is_said_and_not_proposed():
    changes = SFT | {"model_name_or_path": "meta-llama/Llama-3.1-8B"}
    with pytest.raises(TooLargeError, match=r"no program here does: CPU offload of FSDP2, 11\.4 GB"):
        plan("sft_small_cpu", "4xl4", changes)
    with pytest.raises(TooLargeError) as error:
        plan("sft_small_cpu", "4xl4", changes | {"model_name_or_path": "meta-llama/Llama-3.1-405B"})
    assert "offload" not in str(error.value)


def test_weights_are_divided_within_nodes_where_that_is_faster():
    """Copies on every node (HSDP) where the network is slow and a node holds the weights; else FSDP2 over all devices."""
    changes = SFT | {"model_name_or_path": "meta-llama/Llama-3.1-8B"}
    workload = from_recipe(load("sft_small_cpu", changes))
    slow, fast = (place(workload, parse("2x8xa100-80", network), sharded=True) for network in ("10GB/s", "400GB/s"))
    assert (slow.num_shards, fast.num_shards) == (8, None)
    assert "a copy on every node (HSDP), to save" in slow.reason
    assert slow.written_file == "hsdp_2x8xa100-80.yaml"
    assert yaml.safe_load(slow.config())["parallelism_config"] == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 8,
    }
    assert "parallelism_config" not in fast.config()
    whole = dataclasses.replace(slow, num_shards=None).with_micro_batch(slow.layout.per_device_train_batch_size)
    assert slow.memory.total > whole.memory.total
    assert slow.time.total < 0.95 * whole.time.total
    assert slow.with_micro_batch(slow.layout.per_device_train_batch_size).memory == slow.memory
    narrow = place(workload, parse("8x2xa100-40", "1GB/s"), sharded=True)
    assert narrow.num_shards is None, "a node of two such cards does not hold them"


def test_batch_normalisation_is_a_matter_of_micro_steps():
    """Statistics are those of all processes, so that k alone matters."""
    assert not any("batch normalisation" in warning for warning in plan("resnet50_imagenet_4xt4", "4xt4").warnings)
    cut = plan("resnet50_imagenet_4xt4", "4xt4", per_device_train_batch_size=8)
    assert cut.layout.gradient_accumulation_steps == 8
    message = next(warning for warning in cut.warnings if "batch normalisation" in warning)
    assert "from the 32 samples of a micro-batch, not from 256" in message
    assert "--exact_batch_norm" in message


@given(
    name=st.sampled_from(PLANNED),
    device=st.sampled_from(device_names()),
    num=st.integers(1, 70),
    batch=st.integers(1, 3000),
)
@settings(max_examples=60, deadline=None)
def test_what_fits_leaves_its_error_band(name, device, num, batch):
    """And every sample of the step is computed once."""
    try:
        placement = plan(name, f"{num}x{device}", {"global_batch_size": batch})
    except UsageError:
        return
    assert placement.memory.total < placement.needed_bytes <= placement.hardware.device.memory_bytes
    layout = placement.layout
    assert layout.shares == shares(batch, num)
    assert layout.per_device_train_batch_size * layout.gradient_accumulation_steps >= layout.shares[0]


# ---------------------------------------------------------------------------------------------- launch files, the command


@pytest.mark.parametrize("hardware", ["1x4090", "8x3090", "2x8xa100-80", "3xa100-40"])
@pytest.mark.parametrize("recipe", ["bert_base", "gpt2_xl_8xa100"])
def test_a_launch_file_is_read_by_accelerate(recipe, hardware, tmp_path):
    if (recipe, hardware) == ("gpt2_xl_8xa100", "1x4090"):
        recipe = "gpt2_124m"
    placement = plan(recipe, hardware)
    file = tmp_path / "written.yaml"
    file.write_text(placement.config())
    config = load_config_from_file(str(file))
    assert config.num_processes == placement.layout.num_processes
    assert config.num_machines == placement.hardware.num_nodes
    assert config.mixed_precision == placement.mixed_precision
    kind = config.distributed_type.value
    assert kind == ("FSDP" if placement.sharded else "NO" if placement.layout.num_processes == 1 else "MULTI_GPU")
    assert (yaml.safe_load(placement.config()).get("fsdp_config", {}).get("fsdp_version") == 2) == placement.sharded


def test_files_that_ship_are_named():
    assert plan("bert_base", "4xt4").config_file.name == "4xt4.yaml"
    assert plan("gpt2_xl_8xa100", "8xa100-80").config_file.name == "8xa100.yaml"
    assert plan("gpt2_xl_8xa100", "8xa100-80", sharded=True).config_file.name == "fsdp2_8xa100.yaml"
    assert plan("bert_base", "2x8xa100-80").config_file is None
    command = plan("gpt2_xl_8xa100", "8xa100-80", per_device_train_batch_size=32).command()
    assert command == (
        "accelerate launch --config_file accelerate_configs/8xa100.yaml scripts/pretrain_gpt2.py --recipe gpt2_xl_8xa100 "
        "--per_device_train_batch_size 32 --gradient_checkpointing"
    )


def test_another_precision_than_the_file_has_is_in_the_command():
    assert "--mixed_precision" not in plan("bert_base", "4xt4").command()
    assert (
        "4xt4.yaml --mixed_precision no scripts/pretrain_bert.py"
        in plan("bert_base", "4xt4", mixed_precision="no").command()
    )
    assert "--mixed_precision" not in plan("bert_base", "4xt4", mixed_precision="no").command("mine.yaml")


def in_one_line(text: str) -> str:
    return " ".join(text.replace("\\\n", "").split())


def run(capsys, line: str) -> tuple[int, str, str]:
    code = exit_code(lambda: program.main(line.split()))
    return code, *capsys.readouterr()


def test_the_command(capsys, tmp_path):
    file = tmp_path / "mine.yaml"
    code, out, _ = run(capsys, f"plan gpt2_xl_8xa100 --on 8x3090 --write_config {file}")
    assert code == 0
    assert "(mixed_precision bf16, sharded)" in in_one_line(out)
    assert f"accelerate launch --config_file {file} " in in_one_line(out)
    assert load_config_from_file(str(file)).num_processes == 8
    code, _, err = run(capsys, f"plan gpt2_xl_8xa100 --on 4x3090 --write_config {file}")
    assert (code, "it exists already" in err) == (2, True)
    answer = json.loads(run(capsys, "plan bert_large_2080ti --on 1x2080ti --json")[1])
    assert (answer["hardware"], answer["strategy"]) == ("1x2080ti", "accumulate")
    assert answer["memory"]["total"] < answer["memory_needed"] <= answer["memory_of_device"]
    assert "--per_device_train_batch_size 22" in answer["command"]


def test_the_time_is_shown_by_what_takes_it(capsys):
    answer = json.loads(run(capsys, "plan gpt2_xl_8xa100 --on 8xa100-80 --json")[1])
    time = answer["time"]
    parts = [name for name in time if name not in ("total", "communication", "at_peak")]
    assert time["total"] == pytest.approx(sum(time[name] for name in parts))
    assert answer["samples_per_second"] == pytest.approx(512 / time["total"])
    seconds = load("gpt2_xl_8xa100").max_train_steps * time["total"] + answer["saving_seconds"]
    assert answer["seconds_to_end"] == pytest.approx(seconds)
    out = run(capsys, "plan gpt2_xl_8xa100 --on 8xa100-80")[1]
    assert f"{time['total']:.3g} s per step" in out
    hours = answer["seconds_to_end"] / 3600
    assert f"{hours:.0f} hours ({hours / 1.25:.0f} to {1.25 * hours:.0f}) for 64,000 steps" in in_one_line(out)
    assert f"{hours * 8 * 400 / 1000:.0f} kWh" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--on 4xt5", "unknown device 't5'"),
        ("--on 4xt4 --num_processes 4", "--num_processes 4 with --on 4xt4: leave out one of them"),
        ("--write_config x.yaml", "--write_config needs hardware"),
        ("--html x.html", "--html needs hardware"),
        ("--on 4xt4 --html /nowhere/x.html", "--html /nowhere/x.html: No such file or directory"),
        ("--on 4xt4 --write_config /nowhere/x.yaml", "--write_config /nowhere/x.yaml: No such file or directory"),
        (
            "--on 4xt4 --per_device_train_batch_size 8 --gradient_accumulation_steps 3",
            "8 micro-batches of at most 8",
        ),
    ],
)
def test_mistakes(capsys, flags, message):
    code, _, err = run(capsys, f"plan bert_base {flags}")
    assert code == 2
    assert message in err
