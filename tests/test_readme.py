"""The README is short; the commands of docs/hardware.md cut as they say.

Commands are those of test_printed_commands.py, links of test_links.py, generated tables of test_docs.py.
"""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from common import tasks_of

from samestep.cut.layout import solve_layout
from samestep.recipe import run_settings as run

ROOT = Path(__file__).parent.parent
MAX_LINES, MAX_COLUMNS, MAX_WORDS = 110, 100, 900
PRINTED = re.compile(r"^```text\n\$ (?:.*\n)*?```$", re.MULTILINE)
HARDWARE = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
COMMAND = r"accelerate launch (?:--quiet )?--config_file accelerate_configs/(\S+) scripts/(\w+)\.py \\\n  (.*)"
ROWS = re.findall(rf"^# .*: (\d+)(.*)\n{COMMAND}$", HARDWARE, re.MULTILINE)


def test_every_launch_file_has_its_command():
    assert {row[2] for row in ROWS} == {path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")}


@pytest.mark.parametrize(
    ("batch", "cut", "config", "program", "flags"), ROWS, ids=[f"{row[2]}-{row[3]}" for row in ROWS]
)
def test_a_command_cuts_the_batch_as_it_says(batch, cut, config, program, flags):
    assert (ROOT / "scripts" / f"{program}.py").exists()
    recipe, settings = run.parse(flags.split(), tasks_of(program), "")
    assert recipe.global_batch_size == int(batch)
    layout = solve_layout(
        num_processes=yaml.safe_load((ROOT / "accelerate_configs" / config).read_text())["num_processes"],
        global_batch_size=recipe.global_batch_size,
        per_device_train_batch_size=settings.per_device_train_batch_size,
    )
    steps = re.search(r"(\d+) micro-batches", cut)
    assert layout.gradient_accumulation_steps == (int(steps[1]) if steps else 1)


def test_the_readme_is_read_in_two_minutes():
    """Tables, addresses, and what programs print are as wide as they are."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES
    assert len(text.split()) <= MAX_WORDS
    lines = PRINTED.sub("", text).splitlines()
    assert not [line for line in lines if len(line) > MAX_COLUMNS and not line.startswith(("|", "  <img"))]


def test_the_extras_exist():
    install = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(re.findall(r"pip install \"\.\[(\w+)\]\"", install)) == extras.keys()
