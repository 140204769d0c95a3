"""Odd files in the folder of a run, and odd requests to the page of `watch`: tests/test_bounds.py, benchmarks/bounds.py.

What reads a run's files is in `PROGRAMS`; `RUN_CASES` draws files for each of them, `REQUEST_CASES` what a client sends.
"""

import contextlib
import dataclasses
import http.client
import io
import json
import math
import re
import socket
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib.figure  # noqa: F401 - before cases are timed
import torch
from accelerate import Accelerator
from hypothesis import strategies as st
from odd_inputs import ODD, Case, _json
from safetensors.torch import save_file

from samestep.cli import main
from samestep.contrib.growing.batch_schedule import BatchSchedule
from samestep.contrib.noise.growth import NoiseFollower
from samestep.contrib.publishing import charts
from samestep.contrib.replication.shared_folder import SharedFolder
from samestep.contrib.watching import watch
from samestep.errors import UsageError
from samestep.recipe import catalog as recipes
from samestep.recipe.run_files import read_lines
from samestep.step.exact_sum import ExactSum
from samestep.training import checkpoint, output_folder

RUN = recipes.load("gpt2_small_cpu")
NUM_STEPS = 40
RECIPE = RUN.to_yaml().encode()
SETTINGS = {"num_processes": 2, "mixed_precision": "no", "device": "cpu", "reproducible": None, "num_steps": NUM_STEPS}
SETTINGS |= {"batch_sizes": [[20, 4], [20, 8]], "output_dir": "run", "unknown": 1}


def _step(step: int) -> dict:
    line = {"step": step, "epoch": step / 10, "loss": 8 / step, "learning_rate": 1e-3, "grad_norm": 1.0, "samples": 4}
    line |= {"tokens": 400, "a/samples": 4, "seconds": 0.5, "grad_signal": 1 + step % 2 / 10, "grad_noise": 2.0}
    return line | {"digest": f"{step:016x}", "compute_seconds_max": 0.25, "slowest_process": 1, "skipped": True}


def _event(step: int) -> dict:
    return {"step": step, "event": "memory ran out", "per_device_train_batch_size": 2, "replicas": 2}


def _evaluation(step: int) -> dict:
    return {"step": step, "eval_loss": 9.0, "eval_perplexity": 8.0, "eval_accuracy": 0.5, "eval_a/loss": 9.0}


def _noise(step: int) -> dict:
    layer = {"grad_signal": 0.5 + step % 2 / 10, "grad_noise": 1.0}
    return {
        "step": step,
        "samples": 4,
        "targets": {"lm": 400},
        "micro_batches": 2,
        "per_device_train_batch_size": 2,
        "per_device_train_tokens": 300,
        "layers": {"wte": layer, "h.0": layer},
    }


def _digests(step: int) -> dict:
    return {"step": step} | {kind: {"wte": f"{step:016x}"} for kind in ("gradients", "parameters", "moments")}


def _samples(step: int) -> dict:
    return {"step": step, "process": 0, "micro_step": 0, "epochs": [0, 0], "samples": [1, 2]}


FILES: dict[str, tuple[Callable[[int], dict], ...]] = {
    "metrics.jsonl": (_step, _step, _step, _evaluation, _event),
    "noise.jsonl": (_noise,),
    "digests.jsonl": (_digests,),
    "samples.jsonl": (_samples,),
}
GOOD = {
    name: b"".join(_json(makes[0](step)) + b"\n" for step in range(1, NUM_STEPS + 1)) for name, makes in FILES.items()
}
GOOD |= {"settings.json": _json(SETTINGS), "recipe.yaml": RECIPE}
"""Files of a run that nobody changed."""
LINE = b'{"step": 3, "loss": 1.0}'
HOSTILE_LINES = [
    b"",
    b"null",
    b"1",
    b"NaN",
    b'"x"',
    b"[1]",
    b"{",
    b"\0" * 100,
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"step": 1, "loss": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"a": ' * 5000,
    LINE.decode().encode("utf-16"),
    b"\xef\xbb\xbf" + LINE,
    b'{"step": NaN, "loss": 1}',
    b'{"step": 1e400, "loss": 1}',
    b'{"step": 1.0, "loss": 1}',
    b'{"step": -0, "loss": 1e308}',
    b'{"step": 1, "loss": 1' + b"0" * 400 + b"}",
    b'{"step": 1, "loss": 1' + b"0" * 5000 + b"}",
    b'{"step": 1' + b"0" * 30 + b', "loss": 1}',
    b'{"step": 1, "loss": -1e308, "seconds": 1e-320, "tokens": 9007199254740991}',
    b'{"step": 1, "step": "2", "loss": 1}',
    b'{"step": 1, "loss": 1, "loss": null}',
    b'{"step": 1, "\\ud800": 1, "loss": 1}',
    b'{"step": 1, "__proto__": 1, "constructor": 2, "": 3, "loss": 1}',
    b'{"step": 1, "event": "\\ud800"}',
    b'{"step": 1, "event": {"a": [1]}}',
    b'{"step": 1, "event": "x", "a": ' + b"9" * 2000 + b"}",
    b'{"step": 1, "' + b"a" * 10**6 + b'": 1, "loss": 1}',
    b'{"step": 1, "event": "' + b"a" * 10**6 + b'"}',
    b'{"step": 1, "loss": 1, ' + b", ".join(b'"n%d": %d' % (n, n) for n in range(10**5)) + b"}",
    b"\n".join(b'{"step": %d, "loss": 1, "n%d": 1}' % (n, n) for n in range(1, 10_000)),
    b'{"step": 1, "loss": 1' + b" " * 2**22 + b"}",
    b"x" * 2**26,
    b"\0" * 2**27,
    LINE + b"\r",
    LINE + b"\r" + LINE,
    LINE + LINE,
    b'{"step": 1, "event": "\xe2\x80\xa8"}',
    b'{"1": 2, "loss": 1}',
    b'{"step": 1, "loss": 1,}',
    b'{"step": 4, "loss": 1}\n' * 3 + LINE,
]
SESSIONS = [b"", b" ", b"1", b"[]", b"null", b"{", b"\xff", b'{"is_done": 1}', b'{"is_done": "no"}', b"[" * 100_000]
BATCH_SIZES = [
    1,
    "x",
    {},
    [],
    [1],
    [[1]],
    [["a", 1]],
    [[1, "a"]],
    [[1, 2, 3]],
    [[-1, 4]],
    [[10**30, 4]],
    [[1, 4]] * 10**5,
]
BATCH_SIZES += [
    [[math.nan, 1]],
    [[1, 1e308]],
    [[0, 0]],
    [None],
    [[None, None]],
    [[True, True]],
    [[[1], 2]],
    [[1, math.inf]],
]


def _odd_line(make: Callable[[int], dict]) -> st.SearchStrategy:
    """Draw a line that `make` makes with one or two odd values, or without a field."""
    base = make(5)
    names = st.sampled_from([*base, "unknown", "step", "step", "loss"])
    changes = st.lists(st.tuples(names, ODD), min_size=1, max_size=2).map(dict)
    changed = changes.map(lambda values: _json(base | values))
    lacking = st.sampled_from(sorted(base)).map(lambda name: _json({key: base[key] for key in base if key != name}))
    nested = [name for name, value in base.items() if isinstance(value, dict) and value]
    inner = st.tuples(st.sampled_from(nested or ["step"]), ODD).map(
        lambda pair: _json(base | {pair[0]: {"lm": pair[1], "wte": pair[1]}})
    )
    return st.one_of(changed, changed, changed, lacking, inner)


@st.composite
def _lines(draw, name: str) -> bytes:
    """Draw a file of lines, some of them odd."""
    makes = FILES[name]
    lines = [_json(makes[0](step)) for step in range(1, NUM_STEPS + 1)]
    if name == "metrics.jsonl":
        lines += [_json(_evaluation(NUM_STEPS)), _json(_event(NUM_STEPS))]
    odd = st.one_of(_odd_line(draw(st.sampled_from(makes))), st.sampled_from(HOSTILE_LINES))
    if draw(st.integers(0, 4)) == 0:  # a field is odd in all lines
        field, value = draw(st.tuples(st.sampled_from(sorted(makes[0](1))), ODD))
        lines = [_json(makes[0](step) | {field: value}) for step in range(1, NUM_STEPS + 1)]
    elif draw(st.integers(0, 9)) == 0:
        return draw(st.sampled_from(["utf-16", "utf-32"]).map(lambda code: b"\n".join(lines).decode().encode(code)))
    else:
        for line in draw(st.lists(odd, min_size=1, max_size=3)):
            lines.insert(draw(st.integers(0, len(lines))), line)
    return b"\n".join(lines) + draw(st.sampled_from([b"\n", b"\n", b"", b"\0\0\0", b"\r\n"]))


@st.composite
def _settings(draw) -> bytes:
    """Draw a settings.json with one or two odd values, or one that is none."""
    name = st.sampled_from([*SETTINGS, "num_steps", "batch_sizes"])
    values = draw(st.lists(st.tuples(name, ODD), min_size=1, max_size=2).map(dict))
    if draw(st.booleans()):
        values["batch_sizes"] = draw(st.sampled_from(BATCH_SIZES))
    return draw(st.one_of(*[st.just(_json(SETTINGS | values))] * 4, st.sampled_from(HOSTILE_LINES)))


# ---------------------------------------------------------------------------------------------------------------------
# What reads them


@dataclasses.dataclass(frozen=True)
class RunCase(Case):
    """A run's folder, which a program of `PROGRAMS` reads; `task` is its name."""

    most_memory, most_seconds = 2**30, 5

    def main(self) -> int | None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return PROGRAMS[self.task]()


def _command() -> None:
    """Call the command: `compare` and `advise` end with 1 where that is the answer."""
    code = main()
    if code not in (0, None, 1):
        raise AssertionError(code)


def _watch() -> None:
    _command()
    _check_page(Path("page.html").read_text(encoding="utf-8"))


def _check_page(page: str) -> dict:
    """Check that a page holds the data of a run, and say what it knows of them."""
    found = re.search('id="data">(.*?)</script>', page, re.DOTALL)
    (run,) = json.loads(found[1])["runs"]
    return run


def _compare() -> None:
    """Compare the run with one whose files are not odd."""
    other = Path("other")
    other.mkdir()
    for name, content in GOOD.items():
        (other / name).write_bytes(content)
    _command()


def _resume() -> None:
    folder = Path()
    output_folder.prepare_lines(folder, 30, NUM_STEPS)
    steps, evaluations = output_folder.read_metrics(folder)
    noises = list(read_lines(folder / "noise.jsonl"))
    charts.draw_training(steps, evaluations, ["lm"], "a run", noises).savefig(io.BytesIO())


def _replicas() -> None:
    folder = SharedFolder(Path(), checkpoint.LINES)
    assert folder.is_done in (True, False)
    folder.add("metrics.jsonl", _step(NUM_STEPS + 1))
    folder.write(is_writer=False)
    folder.close()


def _checkpoint() -> None:
    folder = Path("checkpoint-3")
    folder.mkdir()
    for name in ("state.json", "recipe.yaml"):
        Path(name).rename(folder / name)
    for part in ("model", "optimizer"):
        save_file({"a.weight": torch.zeros(2)}, folder / f"{part}.safetensors")
    hashed = {path.name: checkpoint._flush_and_hash(path) for path in sorted(folder.iterdir())}
    content = {"format": checkpoint.FORMAT, "step": 3, "files": hashed}
    if Path("changes.json").exists():
        with contextlib.suppress(ValueError, RecursionError):
            content |= json.loads(Path("changes.json").read_bytes())
    (folder / "manifest.json").write_text(checkpoint._manifest(content))
    try:
        state = checkpoint.verify(folder)
    except checkpoint.DamagedCheckpoint as error:
        raise UsageError(f"checkpoint-3 is damaged: {error}") from None
    # What a run does with the state
    follower = NoiseFollower(BatchSchedule.read("noise 0.05 from 4"), 64, state.growth)
    follower.describe("sqrt")
    exact_sum = ExactSum(torch.nn.Linear(1, 1))
    if state.exact_sum is not None:
        exact_sum.last_exponent = state.exact_sum["exponent"]
        dict(state.exact_sum)
    exact_sum.begin(2)
    if state.scaler is not None:
        torch.amp.GradScaler("cpu").load_state_dict(state.scaler)
    Accelerator(cpu=True)
    json.dumps(dataclasses.asdict(state))


PROGRAMS = {
    "watch": _watch,
    "compare": _compare,
    "advise": _command,
    "resume": _resume,
    "replicas": _replicas,
    "checkpoint": _checkpoint,
}
WORDS = {
    "watch": [("watch", ".", "--html", "page.html")],
    "compare": [("compare", ".", "other"), ("compare", "other", ".", "--json", "true")],
    "advise": [("advise", "."), ("advise", ".", "--json", "true"), ("advise", ".", "--ramp", "true")],
}


@st.composite
def run_files(draw) -> RunCase:
    """Draw odd lines, or odd settings, of a run, and what reads them."""
    program = draw(st.sampled_from(["watch", "watch", "watch", "compare", "advise", "advise", "resume", "replicas"]))
    names = ["metrics.jsonl", "metrics.jsonl", "metrics.jsonl"]
    names += {
        "watch": ["settings.json"] * 2,
        "compare": ["digests.jsonl", "settings.json"],
        "advise": ["noise.jsonl", "noise.jsonl", "settings.json"],
        "resume": ["noise.jsonl", "samples.jsonl", "digests.jsonl"],
        "replicas": ["samples.jsonl", ".session"],
    }[program]
    odd = draw(st.sampled_from(names))
    files = dict(GOOD)
    files[odd] = draw(
        _settings() if odd == "settings.json" else st.sampled_from(SESSIONS) if odd == ".session" else _lines(odd)
    )
    words = draw(st.sampled_from(WORDS.get(program, [()])))
    return RunCase(f"line of a run, {program}", program, words, tuple(files.items()))


STATE = {
    "step": 3,
    "recipe_fingerprint": RUN.fingerprint,
    "data_fingerprints": {"texts": "0123456789abcdef"},
    "num_skipped": 0,
    "run_id": "abcdef12",
    "scaler": {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 1,
    },
    "exact_sum": {"exponent": -3, "per_sample": 4},
    "growth": {"stages": [[0, 4], [80, 8]], "measurements": [[1, 1.0, 2.0]], "since": 1},
    "versions": {"torch": "2"},
    "is_routine": False,
}


@st.composite
def checkpoints(draw) -> RunCase:
    """Draw odd values in a checkpoint's state or manifest, which is made anew and so is no damage of bytes."""
    state, files = dict(STATE), [("recipe.yaml", RECIPE)]
    way = draw(st.integers(0, 5))
    if way == 0:
        changes = draw(
            st.lists(st.tuples(st.sampled_from(["format", "step", "files", "x"]), ODD), min_size=1).map(dict)
        )
        files.append(("changes.json", _json(changes)))
    elif way < 3:
        state |= draw(st.lists(st.tuples(st.sampled_from(sorted(STATE)), ODD), min_size=1, max_size=2).map(dict))
    else:
        part = draw(st.sampled_from(["scaler", "exact_sum", "growth", "growth", "data_fingerprints"]))
        field, value = draw(st.tuples(st.sampled_from(sorted(STATE[part])), ODD))
        if part == "growth" and draw(st.booleans()):
            value = [value]
            value = [value] if draw(st.booleans()) else value
        state[part] = STATE[part] | {field: value}
    content = draw(st.one_of(*[st.just(_json(state))] * 9, st.sampled_from(HOSTILE_LINES)))
    return RunCase("checkpoint's state", "checkpoint", (), (*files, ("state.json", content)))


# ---------------------------------------------------------------------------------------------------------------------
# Requests


@dataclasses.dataclass(frozen=True)
class RequestCase(Case):
    """Bytes that a client sends to the page of `watch`; they stand in the file request."""

    most_memory, most_seconds = 2**30, 5

    def main(self) -> None:
        Path("run").mkdir()
        Path("run", "metrics.jsonl").write_bytes(_json(_step(1)) + b"\n")
        content, errors = Path("request").read_bytes(), io.StringIO()
        with contextlib.redirect_stderr(errors), make_server() as server:
            threading.Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
            answer = ask(server.server_port, content)
            check_answer(answer, content)
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
            connection.request("GET", "/data.json")
            assert connection.getresponse().status == 200, "the next request"
            server.shutdown()
        assert not errors.getvalue(), errors.getvalue()


def make_server():
    """Make the server of the page with a short deadline."""
    return watch.make_server(watch.make_readers(["run"]), 0, watch.Limits(seconds=1.0))


def ask(port: int, content: bytes) -> bytes:
    """Send bytes and return what is answered, until the server closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(content)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := client.recv(2**16):
                answer += part
    return answer


def check_answer(answer: bytes, content: bytes) -> None:
    """Check that an answer is one of HTTP, and says in a line what was wrong."""
    if not answer:  # a request that has not come as a whole has no answer
        assert b"\n" not in content, "no answer"
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    status = re.fullmatch(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*", head.split(b"\r\n")[0])
    assert status, answer[:100]
    code = int(status[1])
    assert code in (200, 204) or 400 <= code < 500 or code in (501, 503, 505), code
    assert b"X-Content-Type-Options: nosniff" in head, head
    if code >= 400:
        assert len(body) < 200, body
        assert b"<" not in body, body


METHODS = [
    "GET",
    "HEAD",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PATCH",
    "get",
    "",
    "X" * 300,
    "G\0T",
    "é",
]
PATHS = [
    "/",
    "/data.json",
    "/data.json?version=1",
    "http://[bad/",
    "//[",
    "/[",
    "*",
    "",
    "?",
    "/../..",
    "/%00",
    "/\0",
    "/é",
]
PATHS += [
    "/" + "a" * 70_000,
    "/data.json?version=" + "1," * 5000,
    "http://localhost/",
    "localhost:80",
    "/data.json?" + "a=1&" * 2000,
]
PATHS += [
    "http://[::1",
    "http://[v1.x]/",
    "http://a:b:c/",
    "/a b",
    "//evil.example/",
    "http://\u2100.example/",
    "/data.json?version=%ff",
]
VERSIONS = [
    "HTTP/1.0",
    "HTTP/1.1",
    "HTTP/0.9",
    "HTTP/2.0",
    "HTTP/9",
    "HTTP/1.x",
    "HTTP/" + "1" * 300 + ".0",
    "",
    "http/1.1",
    "HTTP/1.1 x",
]
HEADERS = [
    "Host: localhost",
    "Host: 127.0.0.1",
    "Host: [bad",
    "Host: é",
    "Host: evil.example",
    "Host:",
    "Host",
    ": x",
    "\0: x",
]
HEADERS += [
    "A: " + "b" * 70_000,
    "Content-Length: 5",
    "Content-Length: x",
    "Content-Length: -1",
    "Expect: 100-continue",
    " folded",
]
HEADERS += [
    "Transfer-Encoding: chunked",
    "Connection: keep-alive",
    "Host: localhost:" + "9" * 400,
    "Range: bytes=0-",
    "Upgrade: h2c",
]


@st.composite
def requests(draw) -> RequestCase:
    """Draw a request in which one thing is odd, or all: method, address, version, headers; or bytes that are none."""
    odd = draw(st.sampled_from([0, 1, 1, 1, 2, 3, 3, 4]))
    choices = enumerate((METHODS, PATHS, VERSIONS))
    parts = [draw(st.sampled_from(options if odd in (place, 4) else options[:2])) for place, options in choices]
    headers = draw(st.lists(st.sampled_from(HEADERS), max_size=5)) if odd > 2 else HEADERS[:1]
    lines = [" ".join(parts), *headers]
    if odd > 2 and draw(st.integers(0, 9)) == 0:
        lines += [f"X-{number}: 1" for number in range(200)]
    end = draw(st.sampled_from(["\r\n", "\r\n", "\r\n", "\n", "\r"]))
    content = (
        (end.join(lines) + 2 * end).encode("latin-1", "replace")
        if draw(st.booleans())
        else (end.join(lines) + 2 * end).encode()
    )
    way = draw(st.integers(0, 19))
    if way == 0:
        content = content[: draw(st.integers(0, len(content)))]
    elif way == 1:
        content = draw(
            st.one_of(
                st.binary(max_size=200), st.sampled_from([b"\0" * 10**6, b"\n" * 10**5, b"\x16\x03\x01\x02\0\x01\0"])
            )
        )
    elif way == 2:
        content += b"x" * 10**6
    return RequestCase("request to watch", "request", (), (("request", content),))


RUN_CASES = st.one_of(run_files(), run_files(), run_files(), checkpoints())
REQUEST_CASES = requests()
