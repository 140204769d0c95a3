"""The page of running trainings: what it reads while they write, what it may not hold, and what its server answers."""

import contextlib
import http.client
import json
import math
import threading

import pytest
from waiting import PATIENCE

from samestep.cli import runs
from samestep.errors import UsageError
from samestep.training import watch

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
    start = page.index('id="data">') + len('id="data">')
    data = json.loads(page[start : page.index("</script>", start)])
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
    runs.watch([str(folder), "--html", str(tmp_path / "page.html")])
    assert '"step": 1' in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "0 output folders"), (["a", "b", "c"], "3 output folders"), (["nowhere"], "nowhere is no folder")],
)
def test_folders_that_cannot_be_shown(words, message):
    with contextlib.chdir("/"), pytest.raises(UsageError, match=message):
        runs.watch(words)
