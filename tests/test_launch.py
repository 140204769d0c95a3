"""The launch files say what they do; `create_accelerator` makes what they say, or refuses what would be another."""

import ctypes
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, GradientState, PartialState
from common import launch_environment, python_path, task_of
from forks import call_in_fork
from hooks import list_calls
from ports import hold_port
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from samestep.cut.layout import solve_layout
from samestep.errors import UsageError, exit_code
from samestep.recipe.catalog import load
from samestep.training import launch

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "accelerate_configs"
HARDWARE_KEYS = {
    "compute_environment",
    "distributed_type",
    "num_machines",
    "num_processes",
    "main_process_port",
    "gpu_ids",
    "use_cpu",
    "mixed_precision",
    "fsdp_config",
}
FSDP_KEYS = {  # Accelerate's loader lets unknown ones pass
    "fsdp_version",
    "fsdp_auto_wrap_policy",
    "fsdp_reshard_after_forward",
    "fsdp_cpu_ram_efficient_loading",
}
# file -> distributed_type, num_processes, mixed_precision, use_cpu
EXPECTED = {
    "cpu": ("NO", 1, "no", True),
    "2xcpu": ("MULTI_GPU", 2, "no", True),
    "1x3090": ("NO", 1, "bf16", False),
    "1x2080ti": ("NO", 1, "fp16", False),
    "4xt4": ("MULTI_GPU", 4, "fp16", False),
    "3xa100": ("MULTI_GPU", 3, "bf16", False),
    "8xa100": ("MULTI_GPU", 8, "bf16", False),
    "1xh200": ("NO", 1, "bf16", False),
    "fsdp2_8xa100": ("FSDP", 8, "bf16", False),
    "fsdp2_2xcpu": ("FSDP", 2, "no", True),
}
OURS = re.compile(r"ACCELERATE_|OMPI_|PMI_|MV2_|MASTER_|CUDA_VISIBLE|(LOCAL_)?(RANK|WORLD_SIZE)$")

# What a launched process sees, written to SEEN/RANK.json. FAKE_GPU: torch claims a GPU that is not there.
PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
if "FAKE_GPU" in os.environ:
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
from samestep.errors import exit_code
from samestep.training.launch import create_accelerator, is_sharded

def main():
    accelerator = create_accelerator()
    total = accelerator.reduce(torch.tensor([10.0 ** accelerator.process_index]), "sum")
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model._no_split_modules = ("Linear",)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    seen = {
        "num_processes": accelerator.num_processes,
        "process_index": accelerator.process_index,
        "device": accelerator.device.type,
        "backend": accelerator.state.backend,
        "threads": torch.get_num_threads(),
        "sum": total.item(),
        "sharded": is_sharded(accelerator) and type(next(model.parameters())).__name__ == "DTensor",
        "ddp": [getattr(model, name, None) for name in ("gradient_as_bucket_view", "broadcast_buffers")],
    }
    Path(os.environ["SEEN"], f"{accelerator.process_index}.json").write_text(json.dumps(seen))
    accelerator.wait_for_everyone()
    accelerator.end_training()

sys.exit(exit_code(main))
"""


def header(name: str) -> list[str]:
    """Read the comment at the head of a launch file, line by line, without its signs."""
    lines = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in lines)
    return [line[2:] for line in lines]


def launch_command(name: str) -> dict[str, str]:
    """Read the flags of the launch command in a header."""
    command = " ".join(line.strip().removesuffix("\\") for line in header(name) if line.startswith("  "))
    words = shlex.split(command)
    assert words[:3:2] == ["accelerate", "--config_file"]
    script = words.pop(4)
    assert (ROOT / script).exists()
    del words[:2]
    return {"script": script} | dict(zip(words[::2], words[1::2], strict=True))


@pytest.fixture
def launched(trainings, tmp_path):
    """Launch PROGRAM: launched(config, (FLAGS OF A MACHINE, ...), VARIABLE=VALUE) -> exit codes, output, what processes saw.

    None removes a variable of the environment. The launcher is forked, what it launches is not; test_recovery.py and
    test_plan_commands.py launch by the command.
    """

    def run(
        config: Path, machines: Sequence[Sequence[str]] = ((),), **changes: str | None
    ) -> tuple[list[int], str, list[dict]]:
        program = tmp_path / "program.py"
        program.write_text(PROGRAM)
        env = {key: value for key, value in os.environ.items() if not OURS.match(key)}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path(ROOT), "SEEN": str(tmp_path)} | changes
        env = {key: value for key, value in env.items() if value is not None}
        commands = [["--config_file", str(config), *flags, str(program)] for flags in machines]
        words = [str(tmp_path), json.dumps(env), *map(json.dumps, commands)]
        trainings.run(words, len(machines), module="run_launcher", can_repeat=False)
        ranks = range(len(machines))
        codes = [int((tmp_path / f"code-{rank}").read_text()) for rank in ranks]
        output = "".join((tmp_path / f"log-{rank}").read_text() for rank in ranks)
        return codes, output, [json.loads(path.read_text()) for path in sorted(tmp_path.glob("*.json"))]

    return run


@pytest.fixture
def bare(monkeypatch):
    """Remove launch variables and the state of earlier `Accelerator`s; both are put back afterwards."""
    for key in filter(OURS.match, list(os.environ)):
        monkeypatch.delenv(key)
    states = [AcceleratorState._shared_state, PartialState._shared_state, GradientState._shared_state]
    saved = [dict(state) for state in states]
    for state in states:
        state.clear()
    yield monkeypatch
    for state, values in zip(states, saved, strict=True):
        state.clear()
        state.update(values)


def test_every_launch_file_is_expected_here():
    assert sorted(path.stem for path in CONFIGS.iterdir()) == sorted(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_file_loads_and_says_only_what_the_hardware_is(name):
    path = CONFIGS / f"{name}.yaml"
    config = load_config_from_file(str(path))
    actual = (config.distributed_type.value, config.num_processes, config.mixed_precision, config.use_cpu)
    assert actual == EXPECTED[name]
    text = path.read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    assert set(values) <= HARDWARE_KEYS
    assert set(values.get("fsdp_config", FSDP_KEYS)) == FSDP_KEYS
    body = text.split("\n\n", 1)[1].replace("fsdp_config:\n", "").splitlines()
    assert all(re.fullmatch(r"( {2})?\w+: \S+ # .+", line) for line in body), "every key has a value and a comment"
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("name", EXPECTED)
def test_header_command_gives_the_layout_it_names(name):
    flags = launch_command(name)
    assert flags["--config_file"] == f"accelerate_configs/{name}.yaml"
    assert (ROOT / flags["--config_file"]).samefile(CONFIGS / f"{name}.yaml")
    layout = solve_layout(
        num_processes=EXPECTED[name][1],
        global_batch_size=load(flags["--recipe"], task=task_of(Path(flags["script"]).stem)).global_batch_size,
        per_device_train_batch_size=int(flags["--per_device_train_batch_size"]),
    )
    n, b, k = layout.num_processes, layout.per_device_train_batch_size, layout.gradient_accumulation_steps
    line = f"Layout: N = {n}, b = {b}, k = {k} for the recipe's global batch of {layout.global_batch_size}."
    assert line in header(name)
    if min(layout.shares) != max(layout.shares):
        first, last = layout.shares[:-1], layout.shares[-1]
        assert f"shares are {', '.join(map(str, first))} and {last} samples" in header(name)[0]


@pytest.mark.distributed
def test_2xcpu_is_two_processes_that_agree(launched):
    codes, output, reports = launched(CONFIGS / "2xcpu.yaml")
    assert codes == [0], output
    common = {"num_processes": 2, "device": "cpu", "backend": "gloo", "threads": 1, "sum": 11.0, "ddp": [True, False]}
    common |= {"sharded": False}
    assert reports == [common | {"process_index": 0}, common | {"process_index": 1}]
    assert "broadcast_buffers" not in output


@pytest.mark.distributed
def test_fsdp2_2xcpu_is_two_processes_that_shard(launched):
    codes, output, reports = launched(CONFIGS / "fsdp2_2xcpu.yaml")
    assert codes == [0], output
    common = {"num_processes": 2, "device": "cpu", "backend": "gloo", "threads": 1, "sum": 11.0, "ddp": [None, None]}
    assert reports == [common | {"process_index": 0, "sharded": True}, common | {"process_index": 1, "sharded": True}]


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_machines_are_two_launches_that_agree(launched, tmp_path):
    """As docs/multi-node.md prints it: one launch file, whose rank and address the command of each machine replaces."""
    config = tmp_path / "nodes.yaml"
    values = yaml.safe_load((CONFIGS / "2xcpu.yaml").read_text())
    flags = [("--machine_rank", str(rank), "--main_process_ip", "127.0.0.1") for rank in (0, 1)]
    with hold_port() as port:
        values |= {"num_machines": 2, "machine_rank": 0, "main_process_port": port, "main_process_ip": "127.0.0.9"}
        config.write_text(yaml.safe_dump(values))
        codes, output, reports = launched(config, flags)
    assert codes == [0, 0], output
    assert [(report["process_index"], report["num_processes"], report["sum"]) for report in reports] == [
        (0, 2, 11.0),
        (1, 2, 11.0),
    ]


def test_cpu_is_one_process_with_all_cores_beside_a_gpu_too(launched):
    codes, output, reports = launched(CONFIGS / "cpu.yaml", FAKE_GPU="1", OMP_NUM_THREADS=None)
    assert codes == [0], output
    cores = psutil.cpu_count(logical=False)
    actual = [(report["num_processes"], report["device"], report["backend"], report["threads"]) for report in reports]
    assert actual == [(1, "cpu", None, cores)]


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="two processes would share the GPU")
def test_processes_that_would_each_train_alone_are_refused(launched, tmp_path):
    config = tmp_path / "alone.yaml"
    config.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\nmain_process_port: 0\n")
    codes, output, reports = launched(config)
    assert codes != [0]
    assert reports == []
    start = "ERROR: 2 processes were launched, but each would train alone, on cpu"
    (line,) = [line for line in output.splitlines() if line.startswith(start)]
    assert f"traceback : {line}" in output, "the launcher's report has it, too"


def test_launch_file_for_two_that_starts_one_is_refused(launched, tmp_path):
    config = tmp_path / "one.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    codes, output, reports = launched(config)
    assert codes != [0]
    assert reports == []
    assert "ERROR: the launch file has num_processes above 1" in output


def problems(**kwargs) -> list[str]:
    with pytest.raises(UsageError) as error:
        launch.create_accelerator(**kwargs)
    return error.value.problems


def test_plain_start_is_one_process(bare, tmp_path):
    accelerator = launch.create_accelerator(mixed_precision=None, log_with=None, project_dir=tmp_path)
    assert (accelerator.num_processes, accelerator.gradient_accumulation_steps) == (1, 1)
    assert (accelerator.mixed_precision, accelerator.project_dir) == ("no", tmp_path)


def test_optimizer_looks_for_no_packages_in_every_step(bare):
    accelerator = launch.create_accelerator()
    model = torch.nn.Linear(1, 1)
    _, optimizer = launch.prepare(accelerator, model, torch.optim.SGD(model.parameters(), 0.1))
    optimizer.step()
    with list_calls(importlib.util.find_spec) as calls:
        optimizer.step()
    assert calls == []


def test_group_of_one_is_no_mistake(bare):
    env = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    for key, value in env.items():
        bare.setenv(key, value)
    assert launch.create_accelerator().num_processes == 1


@pytest.mark.parametrize(
    ("env", "is_asked_for"),
    [
        *(({"CUDA_VISIBLE_DEVICES": value}, True) for value in ("", "-1", "-1,-1", " -1,0")),
        *((env, False) for env in ({}, {"CUDA_VISIBLE_DEVICES": "1,-1"}, {"ACCELERATE_USE_CPU": "False"})),
    ],
)
def test_accelerate_takes_the_cpu_where_the_launch_asks_for_it(bare, env, is_asked_for):
    """Beside a GPU, too. ACCELERATE_USE_CPU it reads itself, as the launch of cpu.yaml shows."""
    for key, value in env.items():
        bare.setenv(key, value)
    made = SimpleNamespace(num_processes=1, torch_device_mesh=None, mixed_precision="no", device=torch.device("cpu"))
    settings = {}
    launch.create_accelerator(kind=lambda **kwargs: settings.update(kwargs) or made)
    assert settings["cpu"] is is_asked_for


@pytest.mark.parametrize("precision", [None, "no"])
def test_precision_is_the_launchers_unless_given(bare, precision):
    bare.setenv("ACCELERATE_USE_CPU", "true")
    bare.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert launch.create_accelerator(mixed_precision=precision).mixed_precision == (precision or "bf16")


def test_worker_without_its_group_is_refused(bare):
    bare.setenv("WORLD_SIZE", "2")
    bare.setenv("RANK", "0")  # and no LOCAL_RANK: Accelerate goes on alone
    (problem,) = problems()
    assert "2 processes were launched, but each would train alone" in problem
    assert "ACCELERATE_USE_CPU=true" in problem


@pytest.mark.parametrize("size", launch.SIZES)
def test_group_without_a_rank_is_refused_before_it_waits_for_ever(bare, size):
    bare.setenv(size, "2")
    bare.setenv("ACCELERATE_USE_CPU", "true")  # with MASTER_ADDR too, Accelerate would wait for a second rank 0
    (problem,) = problems()
    assert "the environment counts 2 processes, but this one has no RANK" in problem


@pytest.mark.parametrize("value", ["auto", "4", "1", ""])
def test_accumulation_from_the_launcher_is_refused(bare, value):
    bare.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", value)
    (problem,) = problems()
    assert problem.startswith(f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS is {value!r}, but k follows from the recipe")
    assert "remove gradient_accumulation_steps from the launch file" in problem


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"DP_SHARD_SIZE": "3"}, "dp_shard_size 3, but 4 processes cannot be divided into groups of 3"),
        ({"DP_REPLICATE_SIZE": "4"}, "dp_shard_size 1, but weights are not divided. Remove parallelism_config"),
        ({"DP_SHARD_SIZE": "2", "TP_SIZE": "2"}, "tp_size 2, but then processes share samples"),
    ],
)
def test_groups_that_cannot_be_made_are_refused(bare, variables, message):
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "4", "RANK": "0"}.items():
        bare.setenv(name, value)
    bare.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    for name, value in variables.items():
        bare.setenv(f"PARALLELISM_CONFIG_{name}", value)
    assert any(message in problem for problem in problems())


@pytest.mark.parametrize("name", launch.UNSUPPORTED_FEATURES)
def test_engines_that_scale_by_themselves_are_refused(bare, name):
    bare.setenv(name, "true")
    (problem,) = problems()
    assert problem.startswith(f"{name} is set, but ")
    assert problem.endswith(
        "Launch with distributed_type MULTI_GPU, or for weights in parts with FSDP and fsdp_version 2"
    )


def test_problems_come_together(bare):
    bare.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    bare.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    assert len(problems()) == 2


@pytest.mark.parametrize("by", ["argument", "launcher"])
def test_fp16_on_a_cpu_is_refused(bare, by):
    bare.setenv("CUDA_VISIBLE_DEVICES", "")  # asks for the CPU
    if by == "launcher":
        bare.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    (problem,) = problems(mixed_precision="fp16" if by == "argument" else None)
    assert "fp16" in problem
    assert problem.endswith("on a CPU: set it to no or bf16")


@pytest.mark.parametrize(
    ("has_bf16", "precision", "refused"), [(False, "bf16", True), (False, "fp16", False), (True, "bf16", False)]
)
def test_emulated_bf16_is_refused(has_bf16, precision, refused):
    """A T4 and a 2080 Ti have no bf16 of their own, an A100 has."""
    cuda = SimpleNamespace(
        is_bf16_supported=lambda including_emulation=True: including_emulation or has_bf16,
        get_device_name=lambda device: "Tesla T4",
    )
    made = SimpleNamespace(
        num_processes=1, torch_device_mesh=None, mixed_precision=precision, device=torch.device("cuda", 0)
    )
    problems = launch.find_accelerator_problems(made, None, None, cuda)
    emulated = "mixed_precision is bf16, but Tesla T4 only emulates it, slowly: set it to fp16"
    assert problems == ([emulated] if refused else [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version is 1, but only FSDP2 is supported"),
        (
            {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"},
            "unties tied weights (head and embedding): set it to false",
        ),
        (
            {"ACCELERATE_MIXED_PRECISION": "fp16"},
            "mixed_precision is fp16, whose loss scale is not supported with FSDP",
        ),
    ],
)
def test_sharding_that_would_change_the_step_is_refused(bare, changes, message):
    env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
    env |= {"CUDA_VISIBLE_DEVICES": "-1"} | changes
    for key, value in env.items():
        bare.setenv(key, value)
    assert message in " ".join(problems())


@pytest.mark.parametrize(
    ("recipe", "hardware", "options"),
    [
        ("gpt2_774m", "4xt4", {}),  # fits in fp16 only if it is sharded
        ("gpt2_xl_8xa100", "8xv100-16", {}),
        ("bert_base", "4xt4", {"sharded": True}),
        ("gpt2_xl_8xa100", "8x3090", {}),
    ],
)
def test_what_is_planned_is_no_launch_that_is_refused(bare, tmp_path, recipe, hardware, options):
    from stepplan.hardware import parse
    from stepplan.placement import place
    from stepplan.workload import from_recipe

    placement = place(from_recipe(load(recipe)), parse(hardware), **options)
    config = placement.config() if callable(placement.config) else placement.config
    (tmp_path / "written.yaml").write_text(config)
    for key, value in launch_environment(tmp_path / "written.yaml").items():
        bare.setenv(key, value)
    bare.setenv("CUDA_VISIBLE_DEVICES", "-1")
    accelerator = launch.create_accelerator()
    assert accelerator.mixed_precision == placement.mixed_precision


STARTED = """
import json, os, resource, sys
import samestep.training.run
import torch
from samestep.training.launch import create_accelerator
def count_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**24)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def report(**more):
    count_faults()
    print(json.dumps({"faults": count_faults(), **more}), flush=True)
    os._exit(0)
modules = sorted({"peft", "bitsandbytes.functional", "torch._inductor.compile_fx"} & set(sys.modules))
if not os.fork():
    report()
os.wait()
create_accelerator()
report(modules=modules)
"""


@pytest.fixture(scope="module")
def started() -> list[dict]:
    """Start a process as for a training, once; what it reports before and after it has made its Accelerator."""
    environment = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run([sys.executable, "-c", STARTED], env=environment, capture_output=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not glibc")
def test_freed_memory_is_kept_on_a_cpu(started):
    """Pages are handed out once, not for every tensor anew."""
    assert started[1]["faults"] < started[0]["faults"] / 10


def test_a_start_does_not_wait_for_what_few_runs_need(started):
    """transformers imports peft, which would load bitsandbytes, and with it Inductor."""
    assert started[1]["modules"] == ["peft"]


def test_the_launchers_report_of_a_mistake_has_its_line(monkeypatch, tmp_path):
    """Torchrun prints a traceback and a report whatever a process says; with it the last thing to be read is the mistake."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv("RANK", "0")

    def fail() -> None:
        raise UsageError(["one is 1: set it to 2", "two"])

    code, said = call_in_fork(lambda: exit_code(fail))
    lines = said.strip()
    assert lines.splitlines() == ["ERROR: one is 1: set it to 2", "ERROR: two"]
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(file))
    assert (failure.message, failure.exitcode) == (lines, 2)
    assert lines in ChildFailedError("train.py", {0: failure}).format_msg()
