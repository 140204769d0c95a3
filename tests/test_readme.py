"""The README's commands, tables and map are true."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from common import task_of

from samestep import cli
from samestep.cut.layout import solve_layout
from samestep.errors import exit_code
from samestep.recipe import run_settings as run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = r"accelerate launch (?:--quiet )?--config_file accelerate_configs/(\S+) scripts/(\w+)\.py \\\n  (.*)"
ROWS = re.findall(rf"^# .*: (\d+)(.*)\n{COMMAND}$", README, re.MULTILINE)


def test_every_launch_file_has_its_command():
    assert {row[2] for row in ROWS} == {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}


@pytest.mark.parametrize(
    ("batch", "cut", "config", "program", "flags"), ROWS, ids=[f"{row[2]}-{row[3]}" for row in ROWS]
)
def test_a_command_cuts_the_batch_as_it_says(batch, cut, config, program, flags):
    assert (ROOT / "scripts" / f"{program}.py").exists()
    recipe, settings = run.parse(flags.split(), task_of(program), "")
    assert recipe.global_batch_size == int(batch)
    layout = solve_layout(
        num_processes=yaml.safe_load((ROOT / "accelerate_configs" / config).read_text())["num_processes"],
        global_batch_size=recipe.global_batch_size,
        per_device_train_batch_size=settings.per_device_train_batch_size,
    )
    steps = re.search(r"(\d+) micro-batches", cut)
    assert layout.gradient_accumulation_steps == (int(steps[1]) if steps else 1)


def test_its_commands_exist():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`?make ([a-z0-9-]+)", README)) <= targets
    for command in re.findall(r"scripts/pretrain_bert\.py --recipe bert_small_cpu \\\n  (.*)\n", README):
        run.parse(["--recipe", "bert_small_cpu", *command.replace("'", "").split()], "bert_pretraining", "")
    (restarts,) = re.findall(r"--max_restarts 3 --monitor_interval 1 scripts/pretrain_bert\.py \\\n  (.*)\n", README)
    run.parse(restarts.split(), "bert_pretraining", "")
    for link in re.findall(r"\]\(([^)h][^)]*)\)", README):
        assert (ROOT / link).exists(), link


def test_its_command_lines_run(monkeypatch, capsys, tmp_path):
    """But for those that need the hub, or a program to audit."""
    monkeypatch.chdir(tmp_path)
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", README, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^python -m recipes (.*?)(?: +#.*)?$", blocks, re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        if "--model_name_or_path" not in line and not line.startswith("audit-script"):
            monkeypatch.setattr(sys, "argv", ["recipes", *line.split()])
            assert (exit_code(cli.main), capsys.readouterr().err) == (0, ""), line


def test_its_extras_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install \"\.\[(\w+)\]\"", README)) == extras.keys()


def test_its_map_names_every_module():
    text = README.split("## Map")[1]
    modules = {path.stem for path in (ROOT / "samestep").glob("*/*.py")} - {"__init__"}
    assert {name for name in modules if not re.search(rf"\b{name}\b", text)} == set()
