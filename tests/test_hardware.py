"""Devices with their sources, spellings of hardware, and what is refused."""

import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import UsageError
from stepplan.hardware import DEVICES, OWN, Device, Hardware, device_names, load_device, names_by_memory, parse

DOCUMENT = (Path(__file__).parents[1] / "docs" / "devices.md").read_text(encoding="utf-8")
NUMBERS = [
    field.name
    for field in dataclasses.fields(Device)
    if field.type not in (str, tuple[str, ...]) and field.default is dataclasses.MISSING
]


@pytest.mark.parametrize("name", device_names())
def test_every_number_of_a_device_has_a_source(name):
    device = load_device(name)
    assert device.name == name
    fields = [field for line in device.sources for field in line.split(": ")[0].split(", ")]
    assert set(fields) <= {*NUMBERS, "network_gb_per_s", "host_gb"}
    assert (device.host_gb is not None) == ("host_gb" in fields)
    assert len(fields) == len(set(fields))
    assert {field for field in NUMBERS if getattr(device, field) is not None} <= set(fields)
    assert "network_gb_per_s" in fields
    assert all(line.split(": ", 1)[1].strip() for line in device.sources)
    # Its address, or that it is assumed or measured; else the plan says that it is unverified
    for fields, source in (line.split(": ", 1) for line in device.sources):
        is_open = "https://" in source or source.startswith(("assumed", "measured")) or device.cores
        rest = set(fields.split(", ")) - set(device.unverified)
        assert is_open or not rest or source.startswith("half of the 16-bit peak"), (name, rest, source)
        assert "from memory" not in source
    assert set(device.unverified) <= {*NUMBERS, "network_gb_per_s"}


def test_the_devices_that_are_promised():
    promised = (
        "cpu t4 v100-16 v100-32 2080ti 3090 4080 4090 5090 a100-40 a100-40-sxm a100-80 h100 h200 b200 l4 l40s a10g "
    )
    promised += "a6000 rtx6000ada 4070ti a100-80-pcie h100-pcie h100-nvl gb200 mi300x mi325x gaudi3 "
    promised += "m2-ultra m3-max m3-ultra m4 m4-pro m4-max "
    promised += (
        "b300 gb300 h20 h800 a800 mi350x mi355x gh200 dgx-spark rtxpro6000 l40 a10 a40 a30 a5000 titan-rtx 3080 4060ti "
    )
    promised += "4070 5070ti 5080 h200-nvl tpu-v5e tpu-v5p tpu-v6e gaudi2 7900xtx"
    assert set(device_names()) == set(promised.split())
    assert len(NUMBERS) == 9


ACCELERATORS = [name for name in device_names() if load_device(name).cores is None]


def test_devices_by_memory():
    devices = [load_device(name) for name in names_by_memory()]
    assert devices == sorted(
        map(load_device, device_names()), key=lambda device: (device.memory_mib, device.watts or 9e9)
    )


def test_the_cpu_is_one_core():
    device = load_device("cpu")
    assert device.cores == 1
    assert set(device_names()) - set(ACCELERATORS) == {"cpu"}
    assert device.fp16_tflops is None
    assert 0.02 < device.fp32_tflops < 0.5  # AVX2 at a low clock, AVX512 at a high one
    assert device.bf16_tflops is None or device.fp32_tflops < device.bf16_tflops < 20 * device.fp32_tflops
    assert 0.5 < device.reachable < 1
    assert device.link_gb_per_s < device.memory_gb_per_s


@pytest.mark.parametrize("name", ACCELERATORS)
def test_numbers_are_plausible(name):
    device = load_device(name)
    assert 8e9 < device.memory_bytes < 500e9
    assert 0.5 <= device.reachable < 1
    assert device.link_gb_per_s < device.memory_gb_per_s
    assert 20 < (device.watts or 21) <= 1400
    flops_per_byte = (device.bf16_tflops or device.fp16_tflops or device.fp32_tflops) * 1e3 / device.memory_gb_per_s
    if device.distributed_type == "XLA":
        assert (device.fp16_tflops, device.watts) == (None, None)
        assert 100 < flops_per_byte < 600
    elif device.fp16_tflops is None:  # Apple's
        assert (device.bf16_tflops, device.is_single) == (None, True)
        assert 20 < flops_per_byte < 50
    else:
        assert device.fp32_tflops < device.fp16_tflops
        # A Gaudi 3 computes float16 at a fraction of its bfloat16 rate
        assert device.bf16_tflops in (None, device.fp16_tflops) or name == "gaudi3"
        assert (50 if name != "h20" else 30) < flops_per_byte <= 500


def test_turing_and_volta_have_no_bfloat16():
    names = {name for name in ACCELERATORS if load_device(name).tflops("bf16") is None}
    apple = {name for name in names if load_device(name).is_single}
    assert names - apple == {"t4", "2080ti", "titan-rtx", "v100-16", "v100-32"}
    assert load_device("t4").tflops("no") == 8.1


@given(name=st.sampled_from(device_names()), num_devices=st.integers(1, 64), num_nodes=st.integers(1, 999))
def test_spellings(name, num_devices, num_nodes):
    hardware = parse(f"{num_nodes}x{num_devices}x{name}")
    assert hardware == Hardware(load_device(name), num_devices, num_nodes)
    assert hardware.num_processes == num_devices * num_nodes
    assert parse(str(hardware)) == hardware


@given(
    name=st.sampled_from(device_names()), devices=st.integers(1, 64), nodes=st.integers(1, 99), form=st.integers(0, 3)
)
def test_an_x_of_a_name_is_no_count(name, devices, nodes, form):
    """Names as they are and in capitals, with blanks for their marks and after the maker's name: 7900XTX, A100 40 SXM."""
    maker = load_device(name).description.partition(" ")[0]
    spelling = [name, name.upper(), name.replace("-", " "), f"{maker} {name.upper().replace('-', ' ')}"][form]
    for text in (
        f"{nodes}x{devices}x{spelling}",
        f"{nodes} x {devices} X {spelling}",
        f"{nodes}X{devices}x {spelling}",
    ):
        assert parse(text) == Hardware(load_device(name), devices, nodes), text
    assert parse(spelling) == Hardware(load_device(name))


def test_counts_may_be_left_out():
    assert str(parse("h200")) == str(parse("1xh200")) == str(parse("1x1xh200")) == "1xh200"
    assert parse("8xa100-80").num_nodes == 1


def test_a_device_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text((DEVICES / "t4.yaml").read_text().replace("network_gb_per_s: 6.25\n", "network_gb_per_s: 3\n"))
    hardware = parse(f"2x4x{file}")
    assert (hardware.num_processes, hardware.device.name, hardware.network_gb_per_s) == (8, "mine", 3)


def test_nodes_have_a_network():
    """An adapter per device where InfiniBand is usual, else one per node; a flag says the bandwidth of a node."""
    bandwidths = {text: parse(text).network_gb_per_s for text in ("2x8xh100", "2x4xh100", "2x8xa100-80", "2x8x3090")}
    assert bandwidths == {"2x8xh100": 400, "2x4xh100": 200, "2x8xa100-80": 200, "2x8x3090": 1.25}
    for text, bandwidth in (("25GB/s", 25), ("200Gb/s", 25), ("200 Gb/s", 25), ("12.5GB/s", 12.5), ("100Mb/s", 0.0125)):
        assert parse("2x8xh100", text).network_gb_per_s == pytest.approx(bandwidth)


@pytest.mark.parametrize(
    "network", ["25", "25GB", "fast", "0GB/s", "-1GB/s", "nan GB/s", "25gb/s", "", "999999999GB/s" * 9]
)
def test_a_bad_network_is_refused(network):
    with pytest.raises(UsageError, match=r"network is .*, must be the bandwidth of a node and direction") as error:
        parse("2x8xh100", network)
    assert len(error.value.problems) == 1


FACTS = "memory_mib: 24576\nbf16_tflops: 100\nmemory_gb_per_s: 900\nwatts: 300\n"


def test_four_facts_make_a_device(tmp_path):
    """What they leave out is assumed, and said; a file that extends a device takes it from there."""
    file, base = tmp_path / "mine.yaml", tmp_path / "base.yaml"
    file.write_text(FACTS)
    device = load_device(str(file))
    assert (device.name, device.fp16_tflops, device.fp32_tflops, device.watts) == ("mine", 100, 100 / 16, 300)
    assert all(name in device.notes[0] for name in (*OWN.keys() - {"watts", "sources"}, "fp32_tflops"))
    assert "watts" not in device.notes[0]
    base.write_text("extends: t4\nwatts: 50\n")
    file.write_text("extends: base.yaml\nmemory_mib: 30000\n")
    t4, device = load_device("t4"), load_device(str(file))
    changed = {"name": "mine", "memory_mib": 30000, "watts": 50, "description": device.description}
    assert device == dataclasses.replace(t4, **changed)


@pytest.mark.parametrize("file", re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
def test_documented_devices_work(file, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(file)
    assert load_device(str(path)).memory_bytes > 8e9


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4xT4", "4xt4"),
        ("4 x t4", "4xt4"),
        ("1xRTX3090", "1x3090"),
        ("rtx 3090", "1x3090"),
        ("NVIDIA H100", "1xh100"),
        ("8 X A100-SXM4-80GB", "8xa100-80"),
        ("2x8xA100 80", "2x8xa100-80"),
        ("Tesla V100 32 GB", "1xv100-32"),
        ("GeForce RTX 2080 Ti", "1x2080ti"),
        ("RTX 6000 Ada", "1xrtx6000ada"),
        ("NVIDIA H100 80GB HBM3", "1xh100"),
        ("1xH100 PCIe", "1xh100-pcie"),
        ("4xH100NVL", "4xh100-nvl"),
        ("A100 80GB PCIe", "1xa100-80-pcie"),
        ("RTX 4070 Ti", "1x4070ti"),
        ("8 x AMD Instinct MI300X OAM", "8xmi300x"),
        ("Intel Gaudi 3", "1xgaudi3"),
        ("Apple M4 Max", "1xm4-max"),
        ("72xGB200", "72xgb200"),
        ("1x7900 XTX", "1x7900xtx"),
        ("2x4x7900XTX", "2x4x7900xtx"),
        ("4 x Radeon RX 7900 XTX", "4x7900xtx"),
        ("7900 XTX", "1x7900xtx"),
        ("8xTPU v5e", "8xtpu-v5e"),
        ("1xRTX PRO 6000", "1xrtxpro6000"),
    ],
)
def test_other_spellings(text, name):
    assert str(parse(text)) == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4xa100", "device 'a100' may be a100-40 or a100-40-sxm or a100-80 or a100-80-pcie: name one"),
        ("1xH100 CNX", "unknown device 'H100 CNX': did you mean h100.*extends: h100"),
        ("8xmi250x", "unknown device 'mi250x': did you mean mi3.*`extends: mi3[0-9]*x` and then says what differs"),
        ("1xRTX 4070 Ti SUPER", "unknown device 'RTX 4070 Ti SUPER': did you mean 4070ti"),
        ("2x4xRX 7800 XT", "unknown device 'RX 7800 XT': did you mean 7900xtx"),
        ("1x7800XT", "unknown device '7800XT': did you mean 7900xtx"),
        ("4xnosuchdevice", "unknown device 'nosuchdevice': known are 2080ti, 3080, "),
        ("gpu", "unknown device 'gpu'"),
        ("8h100", "'8h100' is no device: hardware is .NODESx.COUNTxNAME, here 8xh100"),
        ("RTX 4090 x 4", "here 4xrtx 4090$"),
        ("h100:8", "here 8xh100$"),
        ("slurm:2x8xa100-80", "slurm: is for launch; here 2x8xa100-80$"),
        ("8x", "is not .NODESx.COUNTxNAME"),
        ("8", "unknown device '8'"),
        ("4090x4", "here 4x4090$"),
        ("", "is not \\[NODESx\\]COUNTxNAME"),
        ("2x2x2xt4", "is not \\[NODESx\\]COUNTxNAME"),
        ("0xt4", "counts 0 devices or nodes"),
        ("4xh100+4xa100-80", "mixes devices, but one kind is planned"),
        ("1000000x8xt4", "counts 8,000,000 devices, must be 131,072 or fewer"),
        ("2x0xt4", "counts 0 devices or nodes"),
        ("-1xt4", "unknown device '-1xt4'"),
        ("4xt4x", "unknown device 't4x'"),
        ("1xnowhere.yaml", "device nowhere.yaml cannot be read: No such file"),
    ],
)
def test_bad_spellings_give_one_clear_message(text, message):
    with pytest.raises(UsageError, match=message) as error:
        parse(text)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_gb_per_s: 320", "memory_gb_per_s: 0"), "memory_gb_per_s is 0.0, must be from 1e-06 to"),
        (("memory_gb_per_s: 320", "memory_gb_per_s: fast"), "memory_gb_per_s is 'fast', must be a number"),
        (("memory_gb_per_s: 320", "memory_gb_per_s: .nan"), "memory_gb_per_s is nan"),
        (("memory_gb_per_s: 320\n", ""), "memory_gb_per_s is missing"),
        (("fp32_tflops: 8.1", "extends: t5"), "unknown device 't5'"),
        (("fp32_tflops: 8.1", "extends: mine.yaml"), "extends itself"),
        (("fp32_tflops: 8.1", "extends: 4"), "extends is 4, must be"),
        (("memory_gb_per_s", "memory_gb_s"), "unknown key 'memory_gb_s': did you mean memory_gb_per_s"),
        (("reachable: 0.6", "reachable: 1.6"), "reachable is 1.6, must lie in"),
        (("reachable: 0.6", "reachable: [0.6"), "is not valid YAML"),
        (("fp16_tflops: 65", f"fp16_tflops: -7{'0' * 399}"), "fp16_tflops is -inf, must be from"),
        (("fp16_tflops: 65", "fp16_tflops: 1e-300"), "fp16_tflops is 1e-300, must be from"),
        (
            ("unverified: [network_gb_per_s]", "unverified: [network]\ndistributed_type: GPU"),
            "must be one of MULTI_CPU",
        ),
        (("unverified: [network_gb_per_s]", "unverified: [speed]"), "unverified names 'speed', which is no field"),
        (("unverified: [network_gb_per_s]", "unverified: watts"), r"unverified is 'watts', must be a list of texts"),
        (("unverified: [network_gb_per_s]", "notes: it is small"), r"notes is 'it is small', must be a list of texts"),
        (("unverified: [network_gb_per_s]", "notes: ['']"), r"notes is \(''.*, must be a list of lines of text"),
        (("description: ", 'name: "a\\tb"\ndescription: '), r"name is 'a\\tb', must be one line of text"),
        (("description: ", "name: 2031-05-06\ndescription: "), r"name is datetime.date\(2031, 5, 6\), must be text"),
        (("network: 50 Gb/s Ethernet", "network: ' '"), "network is ' ', must be one line of text"),
    ],
)
def test_bad_files_give_clear_messages(change, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text((DEVICES / "t4.yaml").read_text().replace(*change))
    with pytest.raises(UsageError, match=message):
        load_device(str(file))


@pytest.mark.parametrize("peak", ["1" + "0" * 400, "-1", "0", ".inf", "often", "[65]", "true", "2001-01-01"])
def test_a_peak_is_checked_before_others_are_computed_from_it(peak, tmp_path):
    """The file leaves out fp32_tflops, which is a share of the peak."""
    file = tmp_path / "mine.yaml"
    file.write_text(f"memory_mib: 16000\nmemory_gb_per_s: 320\nbf16_tflops: {peak}\n")
    with pytest.raises(UsageError) as error:
        load_device(str(file))
    assert len(error.value.problems) == 1
    assert "bf16_tflops is " in str(error.value)


def test_a_file_that_is_no_mapping(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("- t4\n")
    with pytest.raises(UsageError, match="must hold `field: value` lines"):
        load_device(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        load_device(str(file))
