"""Small files of others are read by one reader, which waits for nothing and reads no more than is allowed."""

import ast
import json
import math
import os
import socket
from pathlib import Path

import pytest
from transformers import Mamba2Config

from samestep.errors import UsageError
from samestep.recipe import reading

ROOT = Path(reading.__file__).parents[2]
MODULES = sorted(path for room in ("samestep", "stepplan") for path in (ROOT / room).rglob("*.py"))
OWN_FILES = {
    "samestep/training/digest.py": "/proc/cpuinfo",
    "samestep/contrib/host_memory.py": "/proc/meminfo",
    "samestep/recipe/rehearsal.py": "the command line of the parent",
    "stepplan/hardware.py": "devices of the package",
    "samestep/data/builtin/python_docs.py": "Python's own library",
    "samestep/data/template_process.py": "/proc/self/statm",
    "samestep/data/images.py": "an image, after its kind of file is known",
    "samestep/contrib/copies/checkpoint_store.py": "lines of a run, of any length",
}
"""Modules that read files whole by themselves: what they read. The lines of a run have a reader of their own."""
LOADERS = {"load", "safe_load", "full_load", "unsafe_load", "load_all", "safe_load_all", "full_load_all"}


@pytest.fixture(params=["zeros", "pipe", "socket", "folder", "itself", "nowhere", "endless", "latin"])
def odd_file(request, tmp_path, monkeypatch):
    """Yield a path that leads to no small text: what reads it without care waits, or fills the memory."""
    path = tmp_path / "odd"
    if request.param == "zeros":
        path.symlink_to("/dev/zero")
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "socket":
        monkeypatch.chdir(tmp_path)  # names of sockets are short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("odd")
    elif request.param == "folder":
        path.mkdir()
    elif request.param == "itself":
        path.symlink_to(path)
    elif request.param == "endless":
        with path.open("wb") as file:
            file.truncate(2**40)  # a terabyte of zeros, which takes no place
    elif request.param == "latin":
        path.write_bytes("größe".encode("latin-1"))
    return path


@pytest.mark.parametrize("read", [reading.read_text, reading.read_yaml, reading.read_json])
def test_what_is_no_small_text_is_refused_in_a_line(read, odd_file):
    with pytest.raises(UsageError, match=r"^the prices cannot be read: ") as error:
        read(odd_file, "the prices")
    assert "\n" not in str(error.value)


def test_a_file_of_the_kernel_that_waits_is_refused(tmp_path, monkeypatch):
    """As /proc/kmsg, which is called a regular file: a pipe that others hold open stands for it."""
    os.mkfifo(tmp_path / "odd")
    writer = os.open(tmp_path / "odd", os.O_RDWR)
    monkeypatch.setattr(reading.stat, "S_ISREG", lambda mode: True)
    with pytest.raises(UsageError, match=r"^it cannot be read: it holds nothing yet"):
        reading.read_text(tmp_path / "odd", "it")
    monkeypatch.undo()
    os.close(writer)


@pytest.mark.skipif(not os.path.exists("/proc/version"), reason="only Linux has it")
def test_files_of_the_kernel_are_no_data(tmp_path):
    (tmp_path / "vocab.txt").symlink_to("/proc/version")
    assert reading.find_fault(tmp_path / "vocab.txt") == "is a file of the kernel. Copy what it gives into one."
    with pytest.raises(UsageError, match=r"^the model: vocab\.txt is a file of the kernel"):
        reading.check_model_folder(tmp_path, "the model")


def test_a_text_of_the_largest_size_is_read_whole(tmp_path):
    file = tmp_path / "text"
    file.write_text("é" * 50)
    assert reading.read_text(file, "it", 100) == "é" * 50
    with pytest.raises(UsageError, match="more than 99 bytes"):
        reading.read_text(file, "it", 99)


@pytest.mark.parametrize("text", ["[1]", "{", "\xff", '{"a": ' * 5000, "9" * 5000, '{"a": 1' + "0" * 5000 + "}"])
def test_answers_of_a_network_are_read_as_strictly_as_files(text):
    with pytest.raises(UsageError, match=r"^the answer ") as error:
        reading.parse_json(text.encode("latin-1"), "the answer")
    assert "\n" not in str(error.value)
    assert reading.parse_json(b'{"a": 1}', "the answer") == {"a": 1}


@pytest.mark.parametrize("odd_file", ["zeros", "pipe", "itself", "endless"], indirect=True)
@pytest.mark.parametrize("name", ["tokenizer.json", "merges.txt", "additional_chat_templates/tools.jinja"])
def test_a_model_folder_is_checked_before_a_library_reads_it(tmp_path, odd_file, name):
    file = tmp_path / "model" / name
    file.parent.mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    reading.check_model_folder(tmp_path / "model", "the model")
    odd_file.rename(file)
    with pytest.raises(UsageError, match=rf"^the model: {file.name} (is a device|cannot be read)"):
        reading.check_model_folder(tmp_path / "model", "the model")


def test_weights_may_be_large_but_must_be_files(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**40)
    reading.check_model_folder(tmp_path, "the model")
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin is a device, a pipe or a socket"):
        reading.check_model_folder(tmp_path, "the model")


def test_a_model_folder_that_is_none_is_left_to_the_library(tmp_path):
    for folder in (tmp_path / "nowhere", Path("Qwen/Qwen3-8B"), Path("/dev/zero")):
        reading.check_model_folder(folder, "the model")


def _calls(module: Path):
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node


def _name(module: Path) -> str:
    return module.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("module", MODULES, ids=_name)
def test_no_other_module_parses_files_of_others(module):
    if _name(module) == "samestep/recipe/reading.py":
        return
    for call in _calls(module):
        place = f"{_name(module)}:{call.lineno}"
        owner, attribute = ast.unparse(call.func.value), call.func.attr
        assert not (owner == "yaml" and attribute in LOADERS), f"{place}: use reading.read_yaml or parse_yaml"
        assert not (owner == "json" and attribute == "load"), f"{place}: use reading.read_json"
        if owner == "json" and attribute == "loads":
            inner = [node for node in ast.walk(call.args[0]) if isinstance(node, ast.Attribute)]
            assert not {node.attr for node in inner} & {"read", "read_text", "read_bytes"}, f"{place}: use read_json"
        if attribute in ("read_text", "read_bytes") and owner not in ("Path(__file__)", "Path(module.__file__)"):
            is_own = "__file__" in owner or (owner == "Path(file)" and "__file__" in module.read_text(encoding="utf-8"))
            assert is_own or _name(module) in OWN_FILES, (
                f"{place}: use reading.read_text, or say in OWN_FILES what it reads"
            )


@pytest.mark.rooms
def test_the_exceptions_exist():
    for name in OWN_FILES:
        assert any(call.func.attr in ("read_text", "read_bytes") for call in _calls(ROOT / name)), name


def test_a_cache_that_is_damaged_is_measured_again(tmp_path):
    from samestep.training import capacity

    whole = {"fits": 3, "fails": None, "way": None, "at_once": 2}
    wrong = [whole | {"fits": True}, whole | {"fits": -1}, whole | {"at_once": 10**300}, whole | {"way": 1}, [], 1]
    capacity.FILE.write_text(json.dumps({"good": whole} | dict(enumerate(wrong))))
    assert capacity._read_all() == {"good": whole}
    for text in ("[" * 100_000, "{", "1"):
        capacity.FILE.write_text(text)
        assert capacity._read_all() == {}
    capacity.FILE.unlink()
    os.mkfifo(capacity.FILE)
    assert capacity._read_all() == {}


def test_numbers_that_json_has_no_form_for_are_read_as_transformers_writes_them(tmp_path):
    config = Mamba2Config(num_heads=8, head_dim=8, hidden_size=32)
    config.save_pretrained(tmp_path)
    values = reading.read_json(tmp_path / "config.json", "the configuration")
    assert values["time_step_limit"] == [0.0, math.inf] == list(config.time_step_limit)
    text = '{"low": {"__float__": "-Infinity"}, "none": {"__float__": "NaN"}, "other": {"__float__": "much"}}'
    values = reading.parse_json(text, "it")
    assert values["low"] == -math.inf
    assert math.isnan(values["none"])
    assert values["other"] == {"__float__": "much"}
