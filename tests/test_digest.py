"""Digests of tensors at steps: what they cover, that they survive going on, and that `compare` finds one bit by them."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from accelerate import Accelerator
from common import fresh_accelerator, metrics
from torch import nn

from samestep.contrib.digests import combine, digest_gradients, digest_step
from samestep.errors import UsageError
from samestep.recipe.exclusions import find_refusal
from samestep.recipe.task_settings import LanguageModelSettings
from samestep.training import checkpoint, digest, launch

FLAGS = "--global_batch_size 8 --per_device_train_batch_size 3 --digest_steps 2 "


def read_digests(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "digests.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
def test_a_digest_is_of_the_bytes_in_rows(dtype):
    tensor = torch.tensor([[[[0, 1, 2], [3, 4, 5]]] * 2] * 3).to(dtype)
    whole = digest.digest_tensor(tensor)
    assert whole == xxhash.xxh3_64_hexdigest(bytes(tensor.clone().untyped_storage()))
    assert whole == digest.digest_tensor(tensor.contiguous(memory_format=torch.channels_last))
    assert whole == digest.digest_tensor(tensor.transpose(1, 2).contiguous().transpose(1, 2))
    changed = tensor.clone()
    changed[1, 1, 0, 0] = 1
    assert whole != digest.digest_tensor(changed)
    assert digest.digest_tensor(tensor[0, 0, 0, 1]) == digest.digest_tensor(tensor[0, 0, 0, 1:2])
    assert digest.digest_tensor(tensor[:0]) == xxhash.xxh3_64_hexdigest(b"")


def test_one_digest_of_all_covers_every_pair():
    record = {"step": 2, "parameters": {"a": "1", "b": "2"}, "moments": {"a/exp_avg": "3"}, "gradients": {"b": "4"}}
    whole = combine(record)
    swapped = {"gradients": {"b": "4"}, "moments": {"a/exp_avg": "3"}, "parameters": {"b": "2", "a": "1"}, "step": 9}
    assert combine(swapped) == whole
    others = [
        record | {"parameters": {"a": "2", "b": "1"}},
        record | {"parameters": {"a": "1"}},
        record | {"gradients": {"a": "4"}},
        record | {"moments": record["gradients"], "gradients": record["moments"]},
    ]
    assert len({whole, *map(combine, others)}) == 5


def test_a_run_writes_them_by_the_names_of_its_checkpoints(train):
    """Tied weights once; the digests after step 4 are those of the tensors in its checkpoint."""
    run = train("run", FLAGS + "--checkpointing_steps 4 --max_train_steps 5")
    lines = read_digests(run)
    assert [line["step"] for line in lines] == [2, 4]
    digests = [line.get("digest") for line in metrics(run)]
    assert digests == [None, combine(lines[0]), None, combine(lines[1]), None]
    tensors, moments = (checkpoint.read(run / "checkpoint-4", part) for part in ("model", "optimizer"))
    names = lines[1]["parameters"].keys()
    assert lines[1]["parameters"] == {name: digest.digest_tensor(tensors[name]) for name in names}
    assert names == lines[1]["gradients"].keys() == {name.rpartition("/")[0] for name in lines[1]["moments"]}
    assert {name for name in tensors if tensors[name].is_floating_point()} == names
    assert lines[1]["moments"] == {
        name.removeprefix("bert."): digest.digest_tensor(moment) for name, moment in moments.items()
    }


def test_gradients_are_digested_before_they_are_clipped(train):
    flags = FLAGS.replace("--digest_steps 2", "--digest_steps 1 --max_train_steps 1 --max_grad_norm")
    (clipped,), (whole,) = (read_digests(train(norm, f"{flags} {norm}")) for norm in ("0.2", "none"))
    assert clipped["gradients"] == whole["gradients"]
    assert clipped["moments"] != whole["moments"]


def test_resumed_and_overwritten_runs_have_the_same(train):
    whole = read_digests(train("whole", FLAGS))
    parts = train("parts", FLAGS + "--stop_after_step 7 --checkpointing_steps 3")
    assert [line["step"] for line in read_digests(parts)] == [2, 4, 6]
    train("parts", f"{FLAGS} --resume_from_checkpoint {parts / 'checkpoint-3'}")
    assert read_digests(parts) == whole
    train("parts", FLAGS.replace("--digest_steps 2", "--max_train_steps 2") + "--overwrite_output_dir")
    assert not (parts / "digests.jsonl").exists()


def test_an_optimizer_that_accumulates_has_no_gradient(train):
    (line,) = read_digests(
        train("run", FLAGS + "--accumulation optimizer --second_moment unbiased --max_train_steps 3")
    )
    assert line["gradients"] == {}
    assert {name.rpartition("/")[2] for name in line["moments"]} >= {"exp_avg", "exp_avg_sq"}


def test_frozen_tied_and_buffered():
    fresh_accelerator()
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    parameters = checkpoint.name_parameters(model)
    model(torch.randn(4, 3)).sum().backward()
    line = digest_step(1, parameters, optimizer, digest_gradients(parameters))
    assert list(line["parameters"]) == ["0.weight", "2.weight", "2.bias"]
    assert (list(line["gradients"]), line["moments"]) == (["0.weight", "2.weight"], {})


def test_sharded_weights_are_refused(monkeypatch):
    fresh_accelerator()
    for name, value in (("ACCELERATE_USE_FSDP", "true"), ("FSDP_VERSION", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"^digest_steps is 5, .* shards .*: leave it out, or") as error:
        launch.create_accelerator(settings=LanguageModelSettings(recipe="", digest_steps=5))
    assert len(error.value.problems) == 1
    assert find_refusal(is_sharded=True) is None
    assert find_refusal(digest_steps=5) is None


def test_the_kind_of_machine(tmp_path):
    here = digest.machine_kind()
    assert f"torch {torch.__version__}" in here
    assert torch.backends.cpu.get_cpu_capability() in here
    file = tmp_path / "cpuinfo"
    kinds = {here, digest.machine_kind(file)}
    for name, flags in (("Cpu 1", "sse avx"), ("Cpu 1", "avx sse"), ("Cpu 1", "avx2"), ("Cpu 2", "sse avx")):
        core = f"vendor_id\t: Maker\nmodel name\t: {name}\nflags\t\t: {flags}\n"
        file.write_text(f"processor\t: 0\n{core}\nprocessor\t: 1\n{core}\n")
        kinds.add(digest.machine_kind(file))
        assert f"Maker {name}, " in digest.machine_kind(file)
    assert len(kinds) == 5, "the order of flags says nothing"
