"""Jobs for clusters: the plan, the launch file and the command in what Slurm, SkyPilot, Kubeflow, torchrun and Ray read."""

import ast
import os
import shlex
import subprocess
import tempfile

import pytest
import yaml
from common import launch_environment
from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import get_args_parser

from samestep.errors import UsageError
from samestep.recipe.catalog import load
from stepplan import engines
from stepplan.cli.launch import launch
from stepplan.hardware import parse
from stepplan.placement import place
from stepplan.workload import from_recipe

OUTPUT = ("--", "--output_dir", "/shared/my runs/a")


def write(capsys, *words: str) -> str:
    launch(["bert_large_phase1", *words, *OUTPUT])
    return capsys.readouterr().out


def launched_words(job: str) -> list[str]:
    """Find the training command of a job, as the shell reads it."""
    text = job[job.rindex("accelerate launch") :].partition("&\n")[0]
    return shlex.split(text.replace("\\\n", " "))


def test_slurm_reads_the_job(capsys, tmp_path):
    job = write(capsys, "--on", "slurm:2x8xa100-80", "--seed", "7")
    head, _, body = job.partition("set -uo pipefail")
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in head.splitlines() if "#SBATCH" in line
    )
    assert (options["nodes"], options["ntasks-per-node"], options["gpus-per-node"]) == ("2", "1", "8")
    assert "requeue" in options
    assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    config = yaml.safe_load(body.partition("<<'END_OF_LAUNCH_FILE'\n")[2].partition("END_OF_LAUNCH_FILE")[0])
    assert (config["num_machines"], config["num_processes"], config["mixed_precision"]) == (2, 16, "bf16")
    assert not {"machine_rank", "main_process_ip", "main_process_port"} & config.keys(), "the flags of the job say it"
    (line,) = [line for line in body.replace("\\\n", " ").splitlines() if line.startswith("srun")]
    inner = shlex.split(shlex.split(line.removesuffix(" &"))[-1])
    assert inner[:4] == ["exec", "env", "accelerate", "launch"]
    assert inner[inner.index("--machine_rank") + 1] == "$SLURM_NODEID"
    assert inner[inner.index("--seed") + 1] == "7"
    assert inner[-4:] == ["--output_dir", "/shared/my runs/a", "--resume_from_checkpoint", "latest"]
    assert "'/shared/my runs/a'/all_results.json" in body


@pytest.mark.parametrize(("engine", "rank"), [("skypilot", "$SKYPILOT_NODE_RANK"), ("kubeflow", "$PET_NODE_RANK")])
def test_the_others_read_yaml(capsys, engine, rank):
    job = yaml.safe_load(write(capsys, "--on", f"{engine}:2x4xt4", "--image", 'a/b:"1"'))
    if engine == "skypilot":
        assert (job["num_nodes"], job["resources"]["accelerators"]) == (2, "T4:4")
        script = job["run"]
    else:
        assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
        trainer = job["spec"]["trainer"]
        assert (trainer["numNodes"], trainer["image"]) == (2, 'a/b:"1"')
        assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 4}
        script = trainer["command"][-1]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    config = yaml.safe_load(script.partition("<<'END_OF_LAUNCH_FILE'\n")[2].partition("END_OF_LAUNCH_FILE")[0])
    assert (config["num_machines"], config["num_processes"], config["mixed_precision"]) == (2, 8, "fp16")
    words = launched_words(script)
    assert words[words.index("--machine_rank") + 1] == rank
    assert words[-4:] == ["--output_dir", "/shared/my runs/a", "--resume_from_checkpoint", "latest"]


def test_agents_that_come_and_go(capsys):
    """The script's command is one that torchrun reads."""
    job = write(capsys, "--on", "torchrun:3x8xa100-80")
    assert subprocess.run(["bash", "-n"], input=job, text=True).returncode == 0
    command = job[job.index("python -m torch.distributed.run") :].partition("&\n")[0].replace("\\\n", " ")
    command = command.replace('${ADDRESS:+--local_addr "$ADDRESS"}', "")  # only where it is set
    args = get_args_parser().parse_args(shlex.split(command)[3:])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend, args.max_restarts) == ("1:3", "8", "c10d", 1000)
    assert _parse_rendezvous_config(args.rdzv_conf) == {
        "is_host": "0",  # the store outlives the machines that train
        "last_call_timeout": "3",
        "timeout": "900",
        "keep_alive_interval": "1",
        "keep_alive_max_attempt": "5",
    }
    assert args.training_script == "scripts/pretrain_bert.py"
    assert args.training_script_args[-4:] == ["--output_dir", "/shared/my runs/a", "--fault_tolerance", "restart"]
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in job
    assert 'ACCELERATE_MIXED_PRECISION="${ACCELERATE_MIXED_PRECISION:-bf16}"' in job


def test_the_driver_of_ray(capsys):
    job = write(capsys, "--on", "ray:3x8xa100-80", "--seed", "7")
    tree = ast.parse(job)
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Dict | ast.Constant)
    }
    assert values["PROGRAM"] == "scripts/pretrain_bert.py"
    assert values["ENVIRONMENT"] == {"ACCELERATE_MIXED_PRECISION": "bf16"}
    flags = values["FLAGS"]
    assert flags[flags.index("--seed") + 1] == "7"
    assert flags[-4:] == ["--output_dir", "/shared/my runs/a", "--fault_tolerance", "restart"]
    (scaling,) = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "ScalingConfig"]
    assert {k.arg: ast.literal_eval(k.value) for k in scaling.keywords} == {"num_workers": (1, 24), "use_gpu": True}


@pytest.mark.parametrize("hardware", ["8x3090", "2x8x3090"])
def test_the_environment_is_that_of_the_launch_file(hardware):
    """Engines that start the script by themselves tell it what `accelerate launch` would, weights that are sharded included."""
    workload = from_recipe(load("gpt2_xl_8xa100"), source="gpt2_xl_8xa100")
    placement = place(workload, parse(hardware))
    assert placement.sharded
    variables, has_copies = engines._list_environment(placement), placement.num_shards is not None
    assert has_copies == (hardware == "2x8x3090")
    assert variables.keys() == {
        *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "FSDP_AUTO_WRAP_POLICY"),
        *("FSDP_RESHARD_AFTER_FORWARD", "FSDP_CPU_RAM_EFFICIENT_LOADING"),
        *(
            "ACCELERATE_USE_PARALLELISM_CONFIG",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE",
        )
        * has_copies,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(placement.config())
        file.flush()
        launched = launch_environment(file.name)
    assert {name: launched[name] for name in variables} == variables


def test_one_machine_needs_no_rank(capsys):
    words = launched_words(write(capsys, "--on", "skypilot:1xt4"))
    assert "--machine_rank" not in words
    assert words[words.index("--config_file") + 1] == "$launch_file"


def test_the_file_is_written_and_handed_over(capsys, tmp_path, monkeypatch):
    file = tmp_path / "a job.sbatch"
    words = ["--on", "slurm:2x8xa100-80", "--write", str(file)]
    launch(["bert_large_phase1", *words, *OUTPUT])
    assert f"sbatch '{file}'" in capsys.readouterr().out
    assert file.read_text().startswith("#!/bin/bash\n")
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$1" > "$0.got"\nexit "${STATUS:-0}"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    launch(["bert_large_phase1", *words, "--submit", *OUTPUT])
    assert (tmp_path / "sbatch.got").read_text() == f"{file}\n"
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(UsageError, match="exit code 3"):
        launch(["bert_large_phase1", *words, "--submit", *OUTPUT])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="needs sbatch, which is not installed"):
        launch(["bert_large_phase1", *words, "--submit", *OUTPUT])


def test_torchruns_job_asks_for_the_machine_where_others_meet(capsys, tmp_path):
    """Once, and not in each round of its loop."""
    file = tmp_path / "job.sh"
    launch(["bert_large_phase1", "--on", "torchrun:2x8xa100-80", "--write", str(file), *OUTPUT])
    assert "first lines" in capsys.readouterr().out
    run = subprocess.run(["bash", str(file)], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"MAIN=10.0.0.1 bash {file}" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "8xa100-80", *OUTPUT], "on is 8xa100-80, must be ENGINE:HARDWARE"),
        (
            ["--on", "slurm:1xt4", "--max_seq_length", "512", "--hidden_size", "16384", *OUTPUT],
            "plan bert_large_phase1 --.* says",
        ),
        (["--on", "slum:8xa100-80", *OUTPUT], "engine slum.*slurm"),
        (["--on", "slurm:8xa100-80"], "output_dir is missing"),
        (["--on", "slurm:8xa100-80", *OUTPUT, "--eval_step", "3"], "--eval_steps"),
        (["--on", "slurm:8xa100-80", "--submit", *OUTPUT], "--submit needs --write"),
        (["--on", "kubeflow:8xa100-80", *OUTPUT], "image is missing"),
        (["--on", "skypilot:1xa100-40", *OUTPUT], "SkyPilot's name of a100-40"),
    ],
)
def test_what_cannot_be_launched(words, message):
    with pytest.raises(UsageError, match=message):
        launch(["bert_large_phase1", *words])


def test_every_engine_has_its_template():
    assert {path.name for path in (engines.TEMPLATES / "engines").iterdir()} == {
        engine.template for engine in engines.ENGINES.values()
    }
