"""The page of running trainings: what it reads while they write, what it may not hold, and what its server answers."""

import base64
import contextlib
import hashlib
import http.client
import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from waiting import PATIENCE

from samestep.contrib.watching import command, watch
from samestep.errors import UsageError
from samestep.pages import find_policy

HOSTILE = "</script><script>alert(1)</script>"


def step_line(step: int, **values) -> dict:
    return {"step": step, "loss": 8.0 / step, "seconds": 0.5, "tokens": 100, "learning_rate": 1e-3} | values


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "recipe.yaml").write_text(f"description: {json.dumps(HOSTILE)}\nglobal_batch_size: 16\n")
    (path / "settings.json").write_text(json.dumps({"num_processes": 2, "num_steps": 10}))
    return path


def append(folder, *lines, end: str = "\n") -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(json.dumps(line) for line in lines) + end)


def read(folder) -> tuple[watch.RunReader, dict]:
    reader = watch.RunReader(folder)
    reader.update()
    return reader, reader.describe()


def test_it_reads_what_a_run_appends(folder):
    reader, run = read(folder)
    assert run["step"] is None, "a run without a step yet"
    append(folder, {"step": 0, "eval_loss": 9.0, "eval_accuracy": 0.1}, step_line(1))
    append(folder, step_line(2), end="")  # it is being written
    reader.update()
    run = reader.describe()
    assert (run["step"], run["num_steps"], run["seconds_left"]) == (1, 10, 4.5)
    assert run["curves"]["speed"]["mean"] == [200.0]
    assert run["unit"] == "tokens"
    assert run["curves"]["eval_accuracy"] == {"step": [0.0], "mean": [0.1], "low": [0.1], "high": [0.1]}
    version = reader.version
    reader.update()
    assert reader.version == version, "nothing is new"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n{damaged\n[1]\n")
    append(folder, step_line(3, loss=None), {"step": 3, "event": HOSTILE, "samples": 4})
    reader.update()
    run = reader.describe()
    assert run["curves"]["loss"]["mean"] == [8.0, 4.0, None], "a loss that is not finite is null"
    assert [event["event"] for event in run["events"]] == [HOSTILE]


def test_the_time_left_knows_that_the_batch_grows(folder):
    """8 of 10 steps are left: 3 of 4 samples, and 5 of 16, in units of a step of 4."""
    settings = {"num_steps": 10, "batch_sizes": [[5, 4], [5, 16]]}
    (folder / "settings.json").write_text(json.dumps(settings))
    append(folder, *(step_line(step, samples=4) for step in (1, 2)))
    assert read(folder)[1]["seconds_left"] == 0.5 * (3 + 5 * 4)


def test_a_folder_without_a_run_is_no_run(folder, tmp_path):
    (tmp_path / "texts").mkdir()
    with pytest.raises(UsageError, match=r"texts is no run: give the output_dir"):
        watch.make_readers([str(folder), str(tmp_path / "texts")])
    with pytest.raises(UsageError, match=rf"{tmp_path} is no run: name one of {folder}$"):
        watch.make_readers([str(tmp_path)])
    (folder / "settings.json").rename(folder / ".lock")  # the first second of a run
    assert len(watch.make_readers([str(folder)])) == 1


@pytest.mark.parametrize("way", ["shorter", "replaced"])
def test_it_reads_all_again_when_a_resumed_run_writes_its_lines_again(folder, way):
    append(folder, *(step_line(step) for step in range(1, 6)))
    reader, _ = read(folder)
    path = folder / "metrics.jsonl"
    if way == "replaced":  # as a resumed run does, which may have gone on since
        (folder / "partial").write_text("".join(json.dumps(step_line(step, loss=1.0)) + "\n" for step in range(1, 9)))
        (folder / "partial").replace(path)
    else:
        path.write_text("".join(json.dumps(step_line(step, loss=1.0)) + "\n" for step in range(1, 3)))
    reader.update()
    assert set(reader.describe()["curves"]["loss"]["mean"]) == {1.0}
    assert reader.describe()["step"] == (8 if way == "replaced" else 2)


def test_long_curves_are_thinned_and_keep_their_extremes():
    curve = watch.Curve()
    for step in range(1, 10_001):
        curve.add(step, math.sin(step) + (50 if step == 5_000 else 0))
    thin = curve.thin(100)
    assert len(thin["step"]) == 100
    assert thin["step"][-1] == 10_000
    assert max(thin["high"]) > 49
    assert max(thin["mean"]) < 1
    assert thin["mean"][0] == pytest.approx(sum(math.sin(step) for step in range(1, 101)) / 100, rel=1e-5)


def test_digests_of_two_runs(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    append(folder, *(step_line(step, digest=f"{step}") for step in range(1, 6)))
    append(other, *(step_line(step, digest=f"{step if step < 4 else 0}") for step in range(1, 5)))
    runs = [read(path)[0] for path in (folder, other)]
    assert watch.describe(runs)["digests"] == {"num_common": 4, "last_common": 4, "parting": 4}
    assert watch.describe([runs[0], runs[0]])["digests"]["parting"] is None


def test_no_text_of_a_run_is_markup(folder):
    append(folder, step_line(1), {"step": 1, "event": HOSTILE})
    page = watch.make_page([read(folder)[0]])
    assert page.count("</script>") == 2
    assert "<script>alert" not in page
    data = json.loads(find_data(page))
    assert data["runs"][0]["description"] == HOSTILE
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "").replace('"http")', "")


def test_the_server_answers_this_machine_only_with_what_is_new(folder):
    append(folder, step_line(1))
    with watch.make_server(watch.make_readers([str(folder)]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE)

        def ask(path: str, **headers):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        assert "</html>" in ask("/")[1]
        status, content = ask("/data.json")
        assert status == 200
        version = json.loads(content)["version"][0]
        assert ask(f"/data.json?version={version}") == (204, "")
        append(folder, step_line(2))
        status, content = ask(f"/data.json?version={version}")
        assert (status, json.loads(content)["runs"][0]["step"]) == (200, 2)
        assert ask("/data.json", Host="elsewhere.example:80")[0] == 403
        assert ask("/recipe.yaml")[0] == 404
        with pytest.raises(UsageError, match=f"port {server.server_port} .*--port {server.server_port + 1}"):
            watch.make_server([], server.server_port)
        server.shutdown()


def test_the_command_writes_the_page(folder, tmp_path):
    append(folder, step_line(1))
    command.watch([str(folder), "--html", str(tmp_path / "page.html")])
    assert '"step": 1' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "0 output folders"), (["a", "b", "c"], "3 output folders"), (["nowhere"], "nowhere is no folder")],
)
def test_folders_that_cannot_be_shown(words, message):
    with contextlib.chdir("/"), pytest.raises(UsageError, match=message):
        command.watch(words)


# --------------------------------------------------------------------------------------- what others wrote into the folder


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"step": [4], "loss": 1}', "line 2: step is [4], must be a whole number"),
        (b'{"step": 4, "tokens": 1e3, "seconds": 1, "loss": 1}', "line 2: tokens is 1000.0, must be a whole number"),
        (
            b'{"step": 4, "loss": -1' + b"0" * 399 + b"}",
            "line 2: loss is a number of 400 digits, must be a finite number",
        ),
        (b'{"step": 4, "loss": NaN}', "line 2: loss is nan"),
        (b"\xfe\xff\0{", "line 2: it is no JSON object"),
        (b"x" * 2**21, "line 2: it has more than 1,048,576 bytes"),
    ],
)
def test_a_line_that_breaks_a_rule_is_left_out_and_said(folder, line, said):
    append(folder, step_line(1))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n" + line + b"\n")
    append(folder, step_line(5))
    reader, run = read(folder)
    assert (run["step"], run["curves"]["loss"]["step"]) == (5, [1, 5])
    (text,) = run["left_out"]
    assert text.startswith(f"2 lines of metrics.jsonl: {said}")
    assert "; line 3: " in text
    assert text in json.loads(find_data(watch.make_page([reader])))["runs"][0]["left_out"]


def find_data(page: str) -> str:
    start = page.index('id="data">') + len('id="data">')
    return page[start : page.index("</script>", start)]


def test_many_wrong_lines_and_many_names_are_counted(folder):
    append(folder, *({"step": "x"} for _ in range(1000)))
    append(folder, *({"step": step, "loss": 1, f"name {step}": 1} for step in range(1, 1001)))
    run = read(folder)[1]
    assert len(run["curves"]) == watch.MOST_CURVES
    lines, values = run["left_out"]
    assert lines.startswith("1,000 lines of metrics.jsonl: line 1: ")
    assert lines.endswith("; line 5: step is 'x', must be a whole number from 0 to 2^53 - 1; ...")
    assert values == "745 values of metrics.jsonl: there are more than 256 names of values"


@pytest.mark.parametrize(
    "sizes", [3, "x", {"a": 1}, [1], [[1]], [[1, "4"]], [[5, 4, 1]], [[-1, 4]], [[1, 2.5]], [[None, 1]]]
)
def test_settings_that_break_a_rule_are_left_out_and_said(folder, sizes):
    (folder / "settings.json").write_text(json.dumps({"num_steps": 10, "batch_sizes": sizes, "device": "cpu"}))
    append(folder, step_line(1))
    run = read(folder)[1]
    assert (run["settings"]["device"], run["seconds_left"]) == ("cpu", 4.5)
    (text,) = run["left_out"]
    assert text.startswith("settings.json: batch_sizes is ")


def test_files_that_cannot_be_read_are_said(folder):
    (folder / "settings.json").write_text("{")
    (folder / "recipe.yaml").write_text("a: *b")
    (folder / "metrics.jsonl").mkdir()
    said = read(folder)[1]["left_out"]
    assert [text.split()[0] for text in said] == ["recipe.yaml", "settings.json", "metrics.jsonl,"]


def test_the_largest_numbers_have_a_mean():
    curve = watch.Curve()
    for step in range(2000):
        curve.add(step, 1.5e308)
    assert set(curve.thin()["mean"]) == {1.5e308}


def test_a_page_runs_its_own_script_and_style_only(folder):
    """Their hashes are in its policy, nothing else is allowed, and no element has a style or a handler of its own."""
    append(folder, step_line(1))
    page = watch.make_page([read(folder)[0]])
    policy = find_policy(page)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    for tag in ("style", "script"):
        text = page.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
    assert not re.search(r"<[^>]* (style|on\w+)=", page)
    script = page.split("<script>")[1]
    assert not re.search(r"setAttribute\(\"style|style: |innerHTML|eval\(", script)


# --------------------------------------------------------------------------------------------------------------- requests


@pytest.fixture
def serve(folder, capsys):
    """Serve the page of a run: serve(limits) -> the server. At the end nothing may have been printed."""
    append(folder, step_line(1))
    with contextlib.ExitStack() as stack:

        def start(**limits) -> watch.PageServer:
            runs = watch.make_readers([str(folder)])
            server = stack.enter_context(watch.make_server(runs, 0, watch.Limits(**limits)))
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            stack.callback(server.shutdown)
            return server

        yield start
    assert capsys.readouterr() == ("", "")


def connect(server: watch.PageServer) -> socket.socket:
    return socket.create_connection(server.server_address, timeout=60)


def receive(client: socket.socket) -> bytes:
    """Receive until the server closes the connection; nothing, if it resets it."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := client.recv(2**16):
            answer += part
    return answer


def ask(server: watch.PageServer, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send a request; return the status, the headers by their names in lower case, and the body of its answer."""
    with connect(server) as client:
        client.sendall(request)
        head, _, body = receive(client).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET http://[::1 HTTP/1.1", 400),
        ("GET http://[x]y/ HTTP/1.0", 400),
        ("GET //[ HTTP/1.0", 404),
        ("GET /\xff\xe9 HTTP/1.1", 404),
        ("GET /a b HTTP/1.1", 400),
        ("GET /", 400),
        ("GET / HTTP/3.x", 400),
        ("GET / HTTP/7.0", 505),
        ("POST / HTTP/1.1", 405),
        ("<SCRIPT> / HTTP/1.1", 405),
        ("GET /" + "a" * 70_000 + " HTTP/1.1", 414),
        ("\x16\x03\x01", 400),
        ("", 400),
        ("\n\n\n", 400),
        ("\x85 \xa0", 400),
    ],
)
def test_a_request_that_is_none_gets_a_short_text(serve, request_line, status):
    server = serve()
    answer, headers, body = ask(server, f"{request_line}\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    assert answer == status
    assert (headers["content-type"], headers["x-content-type-options"]) == ("text/plain; charset=utf-8", "nosniff")
    assert body.count(b"\n") == 1
    assert len(body) < 60
    assert b"<" not in body
    assert ask(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Host: 127.0.0.1:8765", 200),
        ("Host: LOCALHOST", 200),
        ("Host: localhost.evil.example", 403),
        ("Host: evil.example:localhost", 403),
        ("Host: [::1", 403),
        ("Host: localhost:80@evil.example", 403),
        ("X: 1", 403),
        ("Host: \xe9", 403),
        ("Host: localhost\r\nX: " + "y" * 70_000, 431),
        ("Host: localhost" + "".join(f"\r\nX{number}: 1" for number in range(101)), 431),
    ],
)
def test_a_request_by_its_headers(serve, header, status):
    assert ask(serve(), f"GET / HTTP/1.1\r\n{header}\r\n\r\n".encode("latin-1"))[0] == status


def test_the_answers_of_the_server(serve):
    server, host = serve(), b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    status, headers, page = ask(server, b"GET /" + host)
    assert (status, headers["content-length"]) == (200, str(len(page)))
    policy = headers["content-security-policy"]
    assert policy == f"{find_policy(page.decode())}; frame-ancestors 'none'".lower()
    assert "'unsafe" not in policy
    assert (headers["referrer-policy"], headers["x-frame-options"]) == ("no-referrer", "deny")
    status, headers, body = ask(server, b"HEAD /" + host)
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 1000
    status, headers, data = ask(server, b"GET /data.json" + host)
    assert (status, headers["content-security-policy"]) == (200, "default-src 'none'; frame-ancestors 'none'")
    version = json.loads(data)["version"][0]
    assert ask(server, b"GET /data.json?version=%d" % version + host)[0] == 204
    assert ask(server, b"DELETE /" + host)[1]["allow"] == "get, head"
    # A body that nobody reads does not take the answer away
    assert (
        ask(server, b"POST /" + host.replace(b"\r\n\r\n", b"\r\nContent-Length: 15000000\r\n\r\n") + b"z" * 15_000_000)[
            0
        ]
        == 405
    )


def test_a_client_that_sends_nothing_or_half_or_drop_by_drop_is_let_go(serve):
    """The last one sends a byte as soon as it may, for ever: no wait of its own is long."""
    server = serve(seconds=0.2)
    with connect(server) as silent, connect(server) as half, connect(server) as slow:
        half.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        slow.sendall(b"GET / HTTP/1.1\r\n")
        slow.settimeout(0.01)
        while True:
            try:
                slow.sendall(b"X")
                if not slow.recv(1):
                    break
            except TimeoutError:  # nothing has come yet: the next byte
                continue
            except ConnectionError:
                break
        assert receive(silent) == receive(half) == b""
    assert ask(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200


def test_a_client_that_reads_nothing_is_let_go(folder, serve):
    """Its answer is larger than what the system keeps of it."""
    append(
        folder,
        *(
            {"step": 1, "event": "x" * 9000, "detail": "y" * 9000} | {f"n{i}": "z" * 9000 for i in range(90)}
            for _ in range(50)
        ),
    )
    server = serve(seconds=0.2, connections=1)
    with connect(server) as deaf:
        deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ask(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # connected later: the place is taken by now
        assert server.places.acquire(timeout=60)


def test_connections_beyond_the_limit_are_told_to_come_again(serve):
    server, clients = serve(connections=3, seconds=60), []
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(3)]
        for client in clients:
            client.sendall(b"GET / HTTP")
        for _ in range(10):
            status, headers, body = ask(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (status, headers["retry-after"], body) == (503, "1", b"try again later\n")
        assert headers["content-length"] == str(len(body))
        clients[0].sendall(b"/1.1\r\nHost: localhost\r\n\r\n")
        assert receive(clients[0]).startswith(b"HTTP/1.0 200 ")
    for _ in range(3):
        assert server.places.acquire(timeout=60), "each place is given back"


def test_the_command_ends_at_ctrl_c_while_connections_are_open(folder):
    append(folder, step_line(1))
    command = [sys.executable, "-m", "samestep", "watch", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    place = "127.0.0.1", int(re.match(r"http://localhost:(\d+) shows", process.stdout.readline())[1])
    with (
        socket.create_connection(place) as half,
        socket.create_connection(place),
        socket.create_connection(place) as whole,
    ):
        half.sendall(b"GET / HTTP/1.1\r\n")
        whole.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert receive(whole).startswith(b"HTTP/1.0 200 ")
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0
