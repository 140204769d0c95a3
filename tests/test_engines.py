"""Jobs for clusters: the plan, the launch file and the command in what Slurm, SkyPilot and Kubeflow read."""

import shlex
import subprocess

import pytest
import yaml

from samestep import cli
from samestep.errors import UsageError
from samestep.planner import engines

OUTPUT = ("--", "--output_dir", "/shared/my runs/a")


def write(capsys, *words: str) -> str:
    cli.launch("bert_large_phase1", [*words, *OUTPUT])
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
    assert subprocess.run(["bash", "-n"], input=job, text=True, timeout=20).returncode == 0
    config = yaml.safe_load(body.partition("<<'END_OF_LAUNCH_FILE'\n")[2].partition("END_OF_LAUNCH_FILE")[0])
    assert (config["num_machines"], config["num_processes"], config["mixed_precision"]) == (2, 16, "bf16")
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
    assert subprocess.run(["bash", "-n"], input=script, text=True, timeout=20).returncode == 0
    config = yaml.safe_load(script.partition("<<'END_OF_LAUNCH_FILE'\n")[2].partition("END_OF_LAUNCH_FILE")[0])
    assert (config["num_machines"], config["num_processes"], config["mixed_precision"]) == (2, 8, "fp16")
    words = launched_words(script)
    assert words[words.index("--machine_rank") + 1] == rank
    assert words[-4:] == ["--output_dir", "/shared/my runs/a", "--resume_from_checkpoint", "latest"]


def test_one_machine_needs_no_rank(capsys):
    words = launched_words(write(capsys, "--on", "skypilot:1xt4"))
    assert "--machine_rank" not in words
    assert words[words.index("--config_file") + 1] == "$launch_file"


def test_the_file_is_written_and_handed_over(capsys, tmp_path, monkeypatch):
    file = tmp_path / "a job.sbatch"
    words = ["--on", "slurm:2x8xa100-80", "--write", str(file)]
    cli.launch("bert_large_phase1", [*words, *OUTPUT])
    assert f"sbatch '{file}'" in capsys.readouterr().out
    assert file.read_text().startswith("#!/bin/bash\n")
    (tmp_path / "sbatch").write_text('#!/bin/sh\necho "$1" > "$0.got"\nexit "${STATUS:-0}"\n')
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    cli.launch("bert_large_phase1", [*words, "--submit", *OUTPUT])
    assert (tmp_path / "sbatch.got").read_text() == f"{file}\n"
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(UsageError, match="exit code 3"):
        cli.launch("bert_large_phase1", [*words, "--submit", *OUTPUT])
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="needs sbatch, which is not installed"):
        cli.launch("bert_large_phase1", [*words, "--submit", *OUTPUT])


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
        cli.launch("bert_large_phase1", words)


def test_every_engine_has_its_template():
    assert {path.name for path in (engines.TEMPLATES / "engines").iterdir()} == {
        engine.template for engine in engines.ENGINES.values()
    }
