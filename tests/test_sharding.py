"""FSDP2 on real processes: gradients beside those of whole weights, their types, and a process's memory beside the plan."""

import dataclasses
import json
import statistics
from functools import partial

import pytest
import safetensors.torch
import torch
import yaml
from cases import thorough
from chat_bases import save_base
from common import ROOT, launch_environment
from compare import BF16, check
from run_loading import make_changes
from run_sharded import plan_more

from samestep.models import pretrained
from samestep.models.causal_lm import CausalLmSums
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from samestep.training import weight_files

SHAPES = {"gpt2": {"num_layers": 5, "vocab_size": 1000}, "bert": {"num_layers": 5, "vocab_size": 4000}}
WAYS = {
    2: [("no", "bf16", False), ("bf16", "bf16", False), ("bf16", "fp32", False)],
    3: [("no", "bf16", False), ("bf16", "bf16", True)],
}
"""Processes -> precision, type of what is gathered, whether activations are recomputed."""


def name_cases(num_processes: int) -> dict[str, dict]:
    return {
        f"{kind} {precision} {gather}{' recomputed' * recomputed}": {
            "kind": kind,
            "precision": precision,
            "gather": gather,
            "k": 2,
            "shape": shape,
            "recomputed": recomputed,
        }
        for kind, shape in SHAPES.items()
        for precision, gather, recomputed in WAYS[num_processes]
    }


WHOLE = {
    f"{kind} {precision} {k}": {"kind": kind, "precision": precision, "gather": "whole", "k": k, "shape": shape}
    for kind, shape in SHAPES.items()
    for precision, k in (("no", 1), ("bf16", 1), ("bf16", 3))
}


@pytest.fixture(scope="module")
def measure(trainings, tmp_path_factory):
    def run(num_processes: int, cases: dict) -> list[dict]:
        folder = tmp_path_factory.mktemp("sharded")
        environment = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml")
        words = [str(folder), json.dumps(cases)]
        trainings.run(words, num_processes, environment=environment, module="run_sharded")
        return [torch.load(folder / f"{rank}.pt") for rank in range(num_processes)]

    return run


@pytest.fixture(scope="module")
def whole(measure):
    return measure(1, WHOLE)[0]


@pytest.fixture(scope="module", params=[thorough(2), 3])
def sharded(request, measure):
    return measure(request.param, name_cases(request.param))


def test_the_flag_reaches_the_accelerator(tmp_path):
    for flags, gather in (("", "bf16"), (" --fsdp_gather fp32", "fp32")):
        argv = f"--recipe gpt2_small_cpu --output_dir {tmp_path}{flags}".split()
        settings = run_settings.parse(argv, "gpt2_pretraining", "")[1]
        assert (settings.accelerator_options["fsdp_gather"], settings.may_shard) == (gather, True)


def flat(result: dict) -> torch.Tensor:
    """Join the gradient's tensors, but for keys' biases: attention does not depend on them, their gradients are rounding."""
    gradients = {name: g for name, g in result["gradient"].items() if not name.endswith("key.bias")}
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def is_rounded(gradient: torch.Tensor, exact: torch.Tensor) -> bool:
    """Tell whether a gradient is as far from the exact one as some roundings to bf16 lead: at least its own."""
    return BF16 / 8 < distance(gradient, exact) < 4 * BF16


@pytest.mark.distributed
@pytest.mark.parametrize("kind", SHAPES)
def test_a_sharded_gradient_is_the_whole_one_up_to_rounding(whole, sharded, kind):
    """In float32 up to float32's, in bf16 up to its rounding, in however many micro-batches: of all weights, and of embeddings.

    Rows of an embedding are used often: what adds their gradients up in bf16 is 10 roundings away.
    """
    exact = flat(whole[f"{kind} no 1"])
    cuts = [flat(whole[f"{kind} bf16 {k}"]) for k in (1, 3)]
    usual = statistics.mean(distance(cut, exact) for cut in cuts)
    between = distance(cuts[1], cuts[0])
    ours = {name.removeprefix(f"{kind} "): flat(result) for name, result in sharded[0].items() if name.startswith(kind)}
    print(f"{kind}, {len(sharded)} processes: whole weights in bf16 {usual:.5f}, between cuts {between:.5f}")
    for name, gradient in ours.items():
        print(
            f"  {name}: beside float32 {distance(gradient, exact):.7f}, beside whole bf16 {distance(gradient, cuts[0]):.5f}"
        )
    for name, gradient in ours.items():
        if name.startswith("no"):
            assert distance(gradient, exact) < 1e-6
        else:
            assert is_rounded(gradient, exact)
            assert distance(gradient, cuts[0]) < 4 * BF16
            true, gradients = whole[f"{kind} no 1"]["gradient"], sharded[0][f"{kind} {name}"]["gradient"]
            for table in [key for key in true if "embeddings.weight" in key or "wte" in key or "wpe" in key]:
                assert distance(gradients[table], true[table]) < 4 * BF16, table
    for name, result in sharded[0].items():
        assert result["norm"] == pytest.approx(
            torch.cat([g.flatten() for g in result["gradient"].values()]).norm().item(), rel=1e-4
        )
        assert all(flat(other[name]).equal(flat(result)) for other in sharded[1:])


@pytest.mark.distributed
def test_weights_are_gathered_in_bf16_and_gradients_reduced_in_float32(sharded):
    for name, result in sharded[0].items():
        counts = result["sent"]
        assert {kind for collective, kind in counts if collective == "reduce_scatter_single"} == {"torch.float32"}
        half, whole = (counts.get(("all_gather_single", f"torch.{kind}"), 0) for kind in ("bfloat16", "float32"))
        if "bf16 bf16" in name:
            assert 0 < whole < 0.02 * half  # normalisations
        else:
            assert half == 0 < whole


@pytest.mark.distributed
def test_a_process_needs_the_memory_that_is_planned(sharded):
    for name, case in name_cases(len(sharded)).items():
        more = plan_more(len(sharded), **case)
        measured = max(result[name]["peak"] for result in sharded)
        print(f"{name}, {len(sharded)} processes: planned {more / 1e6:.2f} MB, measured {measured / 1e6:.2f}")
        assert more == pytest.approx(measured, rel=0.07)


@pytest.mark.distributed
def test_groups_add_up_their_gradients_once_in_a_step(whole, measure):
    """Two groups of two processes (HSDP): between groups a reduction of each unit per step, within them one per micro-batch."""
    k, case = 3, {"kind": "gpt2", "gather": "bf16", "shape": SHAPES["gpt2"], "k": 3}
    cases = {
        "groups": case | {"precision": "no", "num_shards": 2},
        "groups bf16": case | {"precision": "bf16", "num_shards": 2},
        "one group": case | {"precision": "no"},
    }
    results = measure(4, cases)
    exact = flat(whole["gpt2 no 1"])
    assert distance(flat(results[0]["groups"]), exact) < 1e-6
    assert is_rounded(flat(results[0]["groups bf16"]), exact)
    for name in cases:
        assert all(flat(other[name]).equal(flat(results[0][name])) for other in results[1:])
        times, sent = results[0][name]["times"], results[0][name]["sent"]
        num_units = times["reduce_scatter_single"] // k
        assert times["reduce_scatter_single"] == k * num_units > 0
        if name == "one group":
            assert "all_reduce" not in times
            continue
        # Each process adds up its half of the gradient with the process of the other group that has the same half
        assert times["all_reduce"] == num_units
        scattered, reduced = (sent[kind, "torch.float32"] for kind in ("reduce_scatter_single", "all_reduce"))
        assert reduced == scattered / k / 2


@pytest.mark.thorough
@pytest.mark.distributed
def test_groups_take_the_same_steps_and_go_on_elsewhere(train, train_on, tmp_path):
    """HSDP on 2 x 2 processes, by Muon and AdamW; the first group writes checkpoints, which one process and groups resume."""
    config = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp2_2xcpu.yaml").read_text())
    sizes = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2}
    file = tmp_path / "groups.yaml"
    file.write_text(yaml.safe_dump(config | {"parallelism_config": sizes, "num_processes": 4}))
    flags = "--global_batch_size 10 --per_device_train_batch_size 1 --dtype float64"
    muon = flags + " --optimizer muon --muon_learning_rate 0.02 --muon_momentum 0.9 --muon_weight_decay 0.1"
    stop, resume = " --stop_after_step 5", " --resume_from_checkpoint latest"
    train = partial(train, program="pretrain_gpt2")
    train("pretrain_gpt2/resumed", flags + stop)
    runs = {"resumed": flags + resume, "stopped": flags + stop, "muon": muon}
    folder = train_on(4, {f"pretrain_gpt2/{name}": words for name, words in runs.items()}, file) / "pretrain_gpt2"
    whole = train("whole", flags)
    check(folder / "resumed", whole, "float64")
    check(folder / "muon", train("whole-muon", muon), "float64")
    saved = [path.name for path in (folder / "stopped" / "checkpoint-5").glob("model-*")]
    assert sorted(saved) == [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    check(train("pretrain_gpt2/stopped", flags + resume), whole, "float64")


CHANGES = {"full": {}, "lora": {"lora_rank": 4, "lora_alpha": 8.0, "lora_targets": ["all-linear"]}}


def test_rows_of_files_are_the_weights_that_are_loaded_whole(trainings, tmp_path):
    """Tied or not, adapters or all weights, files in 16 bits or in float32; on no host a whole copy."""
    tied = save_base(tmp_path / "tied", "qwen3", tie_word_embeddings=True, head_dim=8)
    plain = save_base(tmp_path / "plain", dtype=torch.bfloat16)
    cases = {
        f"{base.name} {name} {reads_shards}": {
            "changes": make_changes(base, **CHANGES[name]),
            "reads_shards": reads_shards,
            "precision": precision,
        }
        for base, name, precision in ((tied, "full", "bf16"), (plain, "full", "no"), (plain, "lora", "bf16"))
        for reads_shards in (True, False)
    }
    environment = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml")
    trainings.run([str(tmp_path), json.dumps(cases)], 3, environment=environment, module="run_loading")
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        for name in ("tied full", "plain full", "plain lora"):
            rows, whole = (found[f"{name} {reads_shards}"] for reads_shards in (True, False))
            assert (rows["files"], whole["files"]) == (True, False)
            assert rows["digests"] == whole["digests"]
            assert rows["fingerprint"] == whole["fingerprint"]
            assert bool(rows["fingerprint"]) == name.endswith("lora")


@pytest.mark.parametrize("lacking", ["a tensor", "its shape", "nothing"])
def test_files_of_another_form_are_loaded_whole(tmp_path, lacking):
    base = save_base(tmp_path)
    file = base / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    if lacking != "nothing":
        tensors |= {name: tensors[name][:-1].clone()}
    if lacking == "a tensor":
        del tensors[name]
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    recipe = load("sft_small_cpu", make_changes(base))
    with pretrained.leave_out_weights():
        model = CausalLmSums.from_recipe(recipe)
    assert all(parameter.is_meta for parameter in model.parameters())
    files = weight_files.match(base, model)
    assert (files is not None) == (lacking == "nothing")
    if files is not None:
        assert torch.equal(files.read(f"model.{name}"), tensors[name])


@pytest.mark.parametrize(
    "change", [{"objective": "dpo", "preference_beta": 0.1}, {"base_quantization": "nf4"}, {"use_dora": True}]
)
def test_what_needs_whole_weights_loads_them(tmp_path, change):
    changes = make_changes(save_base(tmp_path), **CHANGES["lora"])
    assert load("sft_small_cpu", changes).reads_shards
    recipe = dataclasses.replace(load("sft_small_cpu", changes), **change)
    assert not recipe.reads_shards
    assert weight_files.find(recipe, lambda: pytest.fail("a model was made")) is None
