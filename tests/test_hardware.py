"""Devices: every number has a source; spellings and mistakes."""

import dataclasses

import pytest

from recipes.errors import UsageError
from recipes.hardware import Device, device_names, load_device, parse

ASSUMED = {"network_gb_per_s", "network_latency_us"}  # defaults, said to be assumptions in their help


@pytest.mark.parametrize("name", device_names())
def test_every_number_has_a_source(name):
    device = load_device(name)
    numbers = {field.name for field in dataclasses.fields(Device) if isinstance(getattr(device, field.name), float)}
    sourced = {word for source in device.sources for word in source.partition(":")[0].split(", ")}
    assert numbers - ASSUMED == sourced - {"link"}
    assert device.memory_bytes == device.memory_mib * 2**20


def test_what_ships():
    assert {"t4", "v100-16", "v100-32", "2080ti", "3090", "4090", "a100-40", "a100-80", "h100", "h200", "l4"} <= set(
        device_names()
    )
    assert load_device("t4").tflops("bf16") is None
    assert load_device("a100-80").tflops("bf16") == 312
    assert load_device("3090").tflops("no") == 35.6


def test_spellings(tmp_path):
    for text, shape in {"4xt4": (1, 4), "2x8xa100-80": (2, 8), "3090": (1, 1), "16x2080ti": (1, 16)}.items():
        hardware = parse(text)
        assert (hardware.num_nodes, hardware.num_devices) == shape
        assert hardware.num_processes == shape[0] * shape[1]
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{k}: {v}\n" for k, v in yaml_of("t4", watts=35).items()))
    assert parse(f"2x{file}").device.watts == 35
    assert str(parse(f"2x{file}")) == "2xmine"


def yaml_of(name: str, **changes) -> dict:
    values = {k: v for k, v in dataclasses.asdict(load_device(name)).items() if k != "name"} | changes
    return {k: "null" if v is None else list(v) if isinstance(v, tuple) else repr(v) for k, v in values.items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4xt5", "unknown device 't5': valid names: 2080ti, "),
        ("0xt4", "counts 0 devices or nodes"),
        ("2x2x2xt4", r"is not \[NODESx\]COUNTxNAME"),
        ("", r"is not \[NODESx\]COUNTxNAME"),
        ("2xnowhere.yaml", "device nowhere.yaml cannot be read"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(UsageError, match=message) as error:
        parse(text)
    assert len(error.value.problems) == 1


def test_a_file_with_mistakes_lists_them_all(tmp_path):
    file = tmp_path / "mine.yaml"
    values = yaml_of("t4", watts=-1, reachable=1.5) | {"memory": 3}
    del values["link"]
    file.write_text("".join(f"{k}: {v}\n" for k, v in values.items()))
    with pytest.raises(UsageError) as error:
        load_device(str(file))
    named = [problem.split(": ", 1)[1].split(" ")[0] for problem in error.value.problems]
    assert named == ["unknown", "reachable", "link", "watts"]
    file.write_text("[")
    with pytest.raises(UsageError, match="is not valid YAML"):
        load_device(str(file))
    file.write_text("- 1")
    with pytest.raises(UsageError, match="must be a mapping"):
        load_device(str(file))
