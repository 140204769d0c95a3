"""A recipe on more and more devices, on paper."""

import itertools
import json

import pytest
from common import PLANNED
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep import cli as program
from samestep.errors import UsageError, exit_code
from samestep.recipe.catalog import load
from stepplan.growth import grow, make_remarks
from stepplan.hardware import device_names, load_device
from stepplan.workload import from_recipe


def run(capsys, line: str) -> tuple[int, str, str]:
    code = exit_code(lambda: program.main(line.split()))
    return code, *capsys.readouterr()


def test_gpt2_xl_from_one_device_to_thousands():
    rows = grow(from_recipe(load("gpt2_xl_8xa100")), load_device("a100-80"), 4096)
    assert [row.num_devices for row in rows] == [2**i for i in range(13)]
    assert [row.strong.layout.gradient_accumulation_steps for row in rows[:6]] == [32, 16, 8, 4, 2, 1]
    assert [row.strong is None for row in rows[9:]] == [False, True, True, True]
    assert [row.weak.workload.global_batch_size // row.num_devices for row in rows] == [512] * 13
    assert str(rows[-1].weak.hardware) == "512x8xa100-80"
    assert rows[0].strong_efficiency == rows[0].weak_efficiency == 1
    assert 0.94 < rows[3].strong_efficiency <= rows[3].weak_efficiency < 1
    first, *later = (row for row in grow(from_recipe(load("gpt2_xl_8xa100")), load_device("3090"), 8) if row.weak)
    assert (first.num_devices, first.weak.workload.global_batch_size) == (2, 512)
    assert [row.weak.workload.global_batch_size for row in later] == [1024, 2048]
    lines = make_remarks(rows)
    assert lines[0].startswith("k falls to 1 at 32 devices")
    assert lines[-1] == "more than 512 devices do not help: the step has 512 samples"


def test_where_the_batch_passes_the_critical_size():
    rows = grow(from_recipe(load("bert_base"), critical_batch_size=1000), load_device("a100-80"), 32)
    (text,) = (remark for remark in make_remarks(rows) if "critical" in remark)
    assert text.endswith("passes the critical size of 1000 samples at 4 devices (1024 samples)")
    rows = grow(from_recipe(load("bert_base"), critical_batch_size=1e6), load_device("a100-80"), 32)
    assert not any("critical" in remark for remark in make_remarks(rows))


@given(name=st.sampled_from(PLANNED), device=st.sampled_from(device_names()), up_to=st.integers(1, 300))
@settings(max_examples=12, deadline=None)
def test_more_devices_compute_no_slower_but_for_waiting(name, device, up_to):
    try:
        rows = grow(from_recipe(load(name)), load_device(device), up_to)
    except UsageError:
        return
    placed = [row.strong.time for row in rows if row.strong]
    computing = [time.total - time.exposed_communication - time.stragglers for time in placed]
    assert all(second <= first * (1 + 1e-9) for first, second in itertools.pairwise(computing))
    efficiencies = [
        value for row in rows for value in (row.strong_efficiency, row.weak_efficiency) if value is not None
    ]
    assert all(value > 0 for value in efficiencies)  # above 1 where one device must cut into the smallest micro-batches


def test_the_command(capsys):
    code, out, _ = run(capsys, "scale bert_base --on t4 --up_to 16")
    lines = out.splitlines()
    assert code == 0
    assert [line.split()[0] for line in lines[2:7]] == ["1", "2", "4", "8", "16"]
    assert lines[1].index("|") == lines[2].index("|")
    assert lines[-1].startswith(
        "- with this batch, waiting for communication takes more than 10 % of a step from 16 devices on"
    )
    answer = json.loads(run(capsys, "scale bert_base --on t4 --up_to 4 --global_batch_size 2 --json")[1])
    assert [row["strong"] is None for row in answer["rows"]] == [False, False, True]
    assert answer["rows"][1]["weak"]["global_batch_size"] == 4
    assert answer["remarks"][-1] == "more than 2 devices do not help: the step has 2 samples"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("scale", "it needs a recipe"),
        ("scale bert_base", "on is missing"),
        ("scale bert_base --on t5", "unknown device 't5'"),
        ("scale bert_base --on t4 --up_to 0", "up_to is 0, must be from 1 to"),
        ("scale bert_base --on t4 --up_to 1000000000000", "up_to is 1000000000000, must be from 1 to 131,072"),
        ("scale gpt2_xl_8xa100 --on t4 --up_to 2", "does not fit up to 2 x t4: take larger devices, or raise --up_to"),
    ],
)
def test_mistakes(capsys, line, message):
    code, _, err = run(capsys, line)
    assert code == 2
    assert message in err
