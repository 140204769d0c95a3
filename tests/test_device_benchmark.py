"""Arithmetic of benchmarks/device.py and benchmarks/scaling.py, the file that ships for a CPU, and plans for it."""

import json

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from common import ROOT, load_benchmark
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from samestep import cli as program
from samestep.errors import UsageError, exit_code
from samestep.recipe.catalog import load
from stepplan import timing
from stepplan.hardware import Hardware, load_device, parse
from stepplan.placement import place
from stepplan.workload import from_recipe

device, scaling = load_benchmark("device"), load_benchmark("scaling")
CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------------
# What is measured


@given(p=st.integers(2, 64), latency=st.floats(1e-6, 1e-2), bandwidth=st.floats(1e8, 1e12))
def test_a_ring_is_recovered_from_its_times(p, latency, bandwidth):
    points = [(size, timing.ring(p, size, bandwidth, latency)) for size in (2**12, 2**20, 2**26, 2**32)]
    assert device.fit_ring(p, points) == pytest.approx((latency, bandwidth), rel=1e-3)


def test_a_fitted_latency_is_never_negative_and_errors_are_relative():
    assert device.fit_ring(2, [(2**20, 0.9e-3), (2**22, 4.1e-3)]) == (0.0, pytest.approx(1.09e9, rel=0.02))
    points = [(2**12, 1e-3), (2**26, 64e-3), (2**26, 66e-3)]
    latency, bandwidth = device.fit_ring(2, points)
    assert timing.ring(2, 2**12, bandwidth, latency) == pytest.approx(1e-3, rel=0.01)


def test_rates_are_operations_and_bytes_over_seconds():
    """Of the real sizes, which fake tensors compute in no time."""
    counted, seconds = [], iter([0.5, 0.25, 1.0, 1.25])

    def measure(call, _):
        with FlopCounterMode(display=False) as counter:
            call()
        counted.append(counter.get_total_flops())
        return next(seconds)

    assert device.flops(2, 3, 4) == 48
    with FakeTensorMode():
        best, usual = device.product_rates(torch.float32, CPU, measure)
        rate = device.memory_rate(CPU, measure)
    assert counted[0] == 2 * device.LARGE["cpu"] ** 3
    assert (best, usual) == (max(counted[0] / 0.5, counted[1] / 0.25), counted[1] / 0.25)
    num_bytes = 4 * device.ELEMENTS["cpu"]
    assert rate == max(2 * num_bytes / 1.0, 3 * num_bytes / 1.25)


def test_more_processes_than_cores_are_refused():
    most = device.num_cores()
    for processes in (0, most + 1):
        with pytest.raises(UsageError, match=f"--processes is {processes}, must be 1 to {most}"):
            device.measure("cpu", processes)


# ---------------------------------------------------------------------------------------------------------------------
# What is written

POINTS = [(size, timing.ring(2, size, 1.5e9, 2e-4)) for size in device.REDUCED]
HAS = {"description": "A CPU", "cores": 3, "memory_mib": 9000, "watts": 12, "memory_source": "a", "watts_source": "b"}


def written(tmp_path, kind="cpu", processes=2, **products):
    measured = {"products": products, "memory": 2e10, "all_reduce": POINTS if processes > 1 else None}
    has = HAS | ({} if kind == "cpu" else {"cores": None})
    file = tmp_path / "mine.yaml"
    device.write(device.device_values(kind, processes, has, measured, "measured by a test"), file)
    return load_device(str(file)), file.read_text()


def test_predictions_from_the_file_meet_what_was_measured(tmp_path):
    device, text = written(tmp_path, no=(1.1e11, 1e11), bf16=(4e11, 3e11))
    assert timing.reachable_flops(device, "no") == pytest.approx(1e11, rel=1e-3)
    assert timing.reachable_flops(device, "bf16") == pytest.approx(3e11, rel=1e-3)
    assert (device.bf16_tflops, device.reachable, device.fp16_tflops) == (0.4, 0.75, None)
    assert (device.memory_gb_per_s, device.memory_mib, device.watts, device.cores) == (20, 9000, 12, 3)
    for size, seconds in POINTS:
        bandwidth = device.link_gb_per_s * 1e9 * timing.CALIBRATION.reachable_link
        assert timing.ring(2, size, bandwidth, device.link_latency_us / 1e6) == pytest.approx(seconds, rel=2e-3)
    assert timing.all_reduce(Hardware(device, 2), 25 * 2**20) == pytest.approx(25 * 2**20 / 1.5e9, rel=0.05)
    assert "OMP_NUM_THREADS=3" in text


def test_a_precision_that_is_slower_than_float32_is_not_there(tmp_path):
    device, _ = written(tmp_path, no=(1e11, 1e11), bf16=(2e11, 0.9e11))
    assert (device.bf16_tflops, device.reachable) == (None, 0.999)
    device, _ = written(tmp_path, "cuda", 2, no=(5e13, 4e13), fp16=(9e14, 8e14), bf16=(9e14, 8e14))
    assert device.fp16_tflops == device.bf16_tflops == 900
    assert device.cores is None


@pytest.mark.parametrize(("kind", "link"), [("cpu", "loopback"), ("cuda", "PCIe 4.0 x16")])
def test_a_single_process_has_an_assumed_link(kind, link, tmp_path):
    device, _ = written(tmp_path, kind, 1, no=(1e11, 1e11))
    assert device.link == link
    assert any(line.startswith("link_gb_per_s, link_latency_us: assumed") for line in device.sources)


def test_every_number_that_is_written_has_a_source(tmp_path):
    for processes in (1, 2):
        device, _ = written(tmp_path, "cuda", processes, no=(1e11, 1e11), fp16=(2e11, 2e11), bf16=(3e11, 2e11))
        fields = [field for line in device.sources for field in line.split(": ")[0].split(", ")]
        numbers = "memory_mib fp32_tflops fp16_tflops bf16_tflops reachable memory_gb_per_s link_gb_per_s"
        assert sorted(fields) == sorted([*numbers.split(), "link_latency_us", "watts"])


# ---------------------------------------------------------------------------------------------------------------------
# Plans for a CPU


@pytest.mark.parametrize(("hardware", "file"), [("1xcpu", "cpu.yaml"), ("2xcpu", "2xcpu.yaml")])
def test_a_plan_for_a_cpu(hardware, file, capsys):
    assert exit_code(lambda: program.main(["plan", "bert_small_cpu", "--on", hardware, "--json"])) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["hardware"] == hardware
    precision = "no" if load_device("cpu").bf16_tflops is None else "bf16"
    assert answer["mixed_precision"] == precision
    assert answer["command"].startswith(
        f"OMP_NUM_THREADS=1 accelerate launch --config_file accelerate_configs/{file} --mixed_precision {precision} scripts/"
    )


@pytest.mark.parametrize("hardware", ["1xcpu", "2xcpu", "4xcpu", "2x2xcpu"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_launch_file_for_a_cpu_is_as_those_that_ship(hardware, sharded, tmp_path):
    if hardware == "1xcpu" and sharded:
        return
    placement = place(from_recipe(load("gpt2_small_cpu")), parse(hardware), sharded=sharded)
    file = tmp_path / "written.yaml"
    file.write_text(placement.config())
    config, keys = load_config_from_file(str(file)), yaml.safe_load(placement.config())
    assert config.use_cpu
    assert config.num_processes == placement.hardware.num_processes
    shipped = "cpu" if hardware == "1xcpu" else "fsdp2_2xcpu" if sharded else "2xcpu"
    like = yaml.safe_load((ROOT / "accelerate_configs" / f"{shipped}.yaml").read_text())
    assert {key: keys[key] for key in ("distributed_type", "use_cpu")} == {
        key: like[key] for key in ("distributed_type", "use_cpu")
    }
    assert keys.get("gpu_ids") == like.get("gpu_ids")


# ---------------------------------------------------------------------------------------------------------------------
# Predicted beside measured communication

LATENCY, BANDWIDTH, NUM_PARAMETERS = 1e-9, 1e9, 10_000_000


def exact_seconds() -> dict[str, list[float]]:
    """Compute times from the formulas, for two rounds."""
    times = {"1 computed 1": [0.1, 0.1], "1 once 1": [0.1, 0.1]}
    for n in scaling.PROCESSES[1:]:
        for k in (1, 4):
            computed = [0.01 * k, 0.01 * k]  # of which a backward hides a part of the communication
            times[f"{n} computed {k}"] = computed
            for kind in ["once", *(["every"] if k > 1 else [])]:
                exposed = scaling.predict(n, LATENCY, BANDWIDTH, NUM_PARAMETERS, k, 0.01, kind == "every")[1]
                times[f"{n} {kind} {k}"] = [seconds + exposed for seconds in computed]
        for size in [*scaling.FITTED, *scaling.CHECKED]:
            times[f"{n} all-reduce {size}"] = [scaling.CALLS * timing.ring(n, size, BANDWIDTH, LATENCY)] * 2
    return times


def test_times_that_follow_the_formulas_have_no_error():
    result = scaling.compare(exact_seconds(), NUM_PARAMETERS)
    assert (result["latency"], result["bandwidth"]) == (pytest.approx(LATENCY, abs=1e-10), pytest.approx(BANDWIDTH))
    for row in result["steps"]:
        assert row["step_predicted"] == pytest.approx(row["step_measured"])
        assert row["exposed_predicted"] == pytest.approx(row["exposed_measured"], abs=1e-6)
    assert [row["processes"] for row in result["steps"]] == [1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
    for row in result["all_reduces"]:
        assert row["ring"] == pytest.approx(row["measured"], rel=1e-4)
        assert row["predicted"] <= row["ring"]


def test_communication_is_hidden_behind_the_last_backward_but_for_a_bucket():
    total, exposed = scaling.predict(2, 0, BANDWIDTH, NUM_PARAMETERS, 4, 1.0, False)
    assert total == pytest.approx(4 * NUM_PARAMETERS / BANDWIDTH)
    assert exposed == pytest.approx(total / 2)  # two buckets
    every, every_exposed = scaling.predict(2, 0, BANDWIDTH, NUM_PARAMETERS, 4, 1.0, True)
    assert (every, every_exposed) == (pytest.approx(4 * total), pytest.approx(4 * exposed))
    assert scaling.predict(1, 0, BANDWIDTH, NUM_PARAMETERS, 1, 1.0, False) == (0, 0)


def test_a_machine_without_namespaces_says_why():
    assert scaling.measure_throttled(1, ["sh", "-c", "echo not permitted >&2; exit 1"]) == "not permitted"
    assert "No such file" in scaling.measure_throttled(1, ["there-is-no-such-program"])
    about = {"command": "c", "mbit": 1, "num_parameters": 1, "rounds": 1, "machine": "m", "python": "3", "versions": {}}
    links = {"loopback": scaling.compare(exact_seconds(), NUM_PARAMETERS), "throttled": "not permitted"}
    assert "Not measured: this machine makes no namespaces with throttled links (not permitted)" in scaling.markdown(
        {"about": about, "links": links}
    )


def test_the_model_is_the_one_that_was_measured():
    about = json.loads((ROOT / "benchmarks" / "results" / "scaling.json").read_text())["about"]
    assert about["num_parameters"] == sum(p.numel() for p in scaling.build_model().parameters())
