"""Shared by all tests: an offline cache of their own, a small corpus of real text, and runs of the real script."""

import contextlib
import fcntl
import gc
import json
import os
import re
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

gc.disable()  # until all tests are imported, which takes a quarter less time
# Tests are compiled once, wherever the environment says otherwise: each process would rewrite all their assertions.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before torch, datasets and transformers are imported; children inherit it.
_HOME = tempfile.TemporaryDirectory(prefix="recipes-tests-")
os.environ.update(
    HF_HOME=_HOME.name,
    HF_HUB_OFFLINE="1",
    HF_DATASETS_DISABLE_PROGRESS_BARS="1",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS=os.environ.get("TESTS_NUM_THREADS", "1"),
    PYTHONWARNINGS="ignore",
    COLUMNS="80",  # of help, whatever terminal the tests are started in
    PYTHONPATH=os.pathsep.join([str(Path(__file__).parent / "startup"), *filter(None, [os.environ.get("PYTHONPATH")])]),
)
# As where a terminal started the tests, also under nohup, or in the background of a script; children inherit it.
for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

import pytest
import rooms
import torch
from blank import draw_nothing
from common import (
    ROOM_TINIES,
    ROOT,
    TINIES,
    fresh_accelerator,
    launch_environment,
    load_script,
    tiny_argv,
    write_corpus,
)
from forked import AUDITED, Server
from hooks import call_after_forward
from varlen import reference_varlen

from samestep import interrupt
from samestep.data import ragged
from samestep.models import cpu_matmul as products
from samestep.recipe.extras import EXTRAS, optional
from samestep.training import capacity

if hypothesis := optional("hypothesis"):
    # Beside other work an example may take seconds, which says nothing of the code
    too_slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("any speed", deadline=None, suppress_health_check=too_slow)
    hypothesis.settings.load_profile("any speed")

pytest_plugins = ["pytester"]
pytest.register_assert_rewrite("compare")
collect_ignore = ["audited", "own_loops", "startup", "toy_task"]  # programs, which importing would run
collect_ignore += rooms.list_ignored()


FORKS = pytest.StashKey[Server]()
FORK_SERVER = os.environ.setdefault("TESTS_FORK_SERVER", f"{_HOME.name}/forks")
"""Address of the fork server: the first process's, which workers of pytest-xdist inherit."""
IMPORTED_LATE = ("torch._dynamo", "scipy.io", "sklearn.datasets", "sklearn.metrics", "sentence_transformers", "trl")
IMPORTED_LATE += ("stepplan.prediction", "samestep.models.bert_pretraining", "samestep.models.gpt2_pretraining")
IMPORTED_LATE += ("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
"""What libraries and programs import when they use it: once in the fork server, and not in every process again."""
TOOLS = {"hypothesis", "lightning", "psutil", "sentence_transformers", "tensorboard", "trl"}
MISSING = sorted(name for name in TOOLS.union(*EXTRAS.values()) if find_spec(name) is None)
"""What a bare installation (`pip install . pytest`) lacks: tests that need it are skipped there."""
BARE = {"test_audit_masks", "test_audit_script", "test_boundaries", "test_costs"}
"""Files of tests of what works without extras: there a missing package is a failure."""


def find_missing(text: str, path: Path) -> str:
    """Find the package that a failure is for want of, or that is too old; empty: there is none, or none may be wanted."""
    for room in rooms.list_excused(path):
        if re.search(rf"No module named '{re.escape(room)}\b|needs the package {re.escape(room)}\b", text):
            return room
    names = "|".join(MISSING)
    if match := re.search("tracing needs (torch .*?) or newer, here are", text):
        return match[1]  # `trace.OLDEST`: newer than what everything else works with
    match = re.search(rf"No module named '({names})\b|needs .*?\b({names})\b.* not installed: pip install", text)
    return (match[1] or match[2]) if MISSING and match and path.stem not in BARE else ""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed and (name := find_missing(str(report.longrepr), collector.path)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {name}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed and (name := find_missing(f"{call.excinfo.value!r} {report.longreprtext}", item.path)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: needs {name}")
    return report


GIB_OF_A_WORKER = 6


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Choose three workers for two cores, where memory allows it: tests wait a third of their time, for processes."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return max(1, min(num_cores + num_cores // 2, int(gib / GIB_OF_A_WORKER)))


def pytest_collection_modifyitems(config, items):
    """Leave thorough cases out, unless -m asks for them, or one of the words names a test; and what needs a missing room."""
    if rooms.MISSING:
        for item in items:
            if item.get_closest_marker("rooms"):
                item.add_marker(pytest.mark.skip(reason=f"needs {rooms.MISSING[0]}"))
    if "thorough" in config.option.markexpr or any("::" in word for word in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("thorough")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop():
    gc.enable()
    gc.set_threshold(20_000, 20, 20)  # most new objects live: looking for garbage among them took 3 % of the time


@pytest.fixture(scope="module", autouse=True)
def modules_are_no_garbage():
    """Freeze the imported modules: `gc.collect()` at the end of every training would look at all of torch and transformers."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def pictures_are_blank(request, monkeypatch):
    """Write blank pictures for figures, but in tests that look at pictures and take the fixture `real_figures`."""
    if "real_figures" not in request.fixturenames:
        draw_nothing(monkeypatch.setattr)


@pytest.fixture
def real_figures():
    """Draw figures as for a user; see `pictures_are_blank`."""


@pytest.fixture(autouse=True)
def restore_signal_handlers():
    """Put signal handlers back: runs that fail leave theirs, which processes forked later would inherit."""
    handlers = {number: signal.getsignal(number) for number in interrupt.SIGNALS}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    """Forget after each test what it learned about memory."""
    monkeypatch.setattr(capacity, "FILE", tmp_path / "capacity.json")


@pytest.fixture
def use_cache(monkeypatch):
    """Let HF_DATASETS_CACHE name a folder: use_cache(folder). `datasets` reads it once, and its config at every use."""
    import datasets  # here: it reads HF_HOME when it is imported

    def use(folder: Path) -> None:
        monkeypatch.setenv("HF_DATASETS_CACHE", str(folder))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder)

    return use


@pytest.fixture
def after_forward():
    """Act behind each forward of a class of modules: after_forward(module_class, act); see `hooks.call_after_forward`."""
    with contextlib.ExitStack() as stack:
        yield lambda module_class, act: stack.enter_context(call_after_forward(module_class, act))


@pytest.fixture
def tables_cost_nothing(monkeypatch):
    """Let short samples have several tables, too."""
    monkeypatch.setattr(ragged, "TABLE_COST", 0)


@pytest.fixture
def varlen_on_cpus(monkeypatch):
    """Compute on a CPU what torch's kernel for samples of any length computes on GPUs."""
    from samestep.models import attention  # here: it imports transformers' models

    monkeypatch.setattr(attention, "varlen_attn", reference_varlen)


@pytest.fixture(autouse=True)
def products_are_torchs():
    """Undo after each test the choice of matmul kernels that a run in this process made."""
    yield
    products.use(None)


@pytest.fixture(scope="session")
def script(scripts):
    return scripts["pretrain_bert"]


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Write the corpus once, for all workers of pytest-xdist; see `write_corpus`."""
    folder = Path(FORK_SERVER).with_name("corpus")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "written").exists():
            folder.mkdir(exist_ok=True)
            write_corpus(folder)
            (folder / "written").touch()
    return folder / "corpus.jsonl"


@pytest.fixture(scope="session")
def scripts():
    """Load the programs, by name."""
    return {name: load_script(name) for name in TINIES | ROOM_TINIES}


@pytest.fixture
def train(scripts, corpus, tmp_path):
    """Train a tiny model in this process: train("name", "--flag value ...") -> output folder."""

    def run(name: str, flags: str = "", *, output_dir: Path | None = None, program: str = "pretrain_bert") -> Path:
        fresh_accelerator()
        output_dir = output_dir or tmp_path / name
        scripts[program].main(tiny_argv(program, corpus, output_dir, flags))
        return output_dir

    return run


def connect(config: pytest.Config) -> Server:
    """Connect to the fork server of all workers; the first one starts it, and nobody waits for its imports yet."""
    if FORKS not in config.stash:
        libraries = ("stepaudit.program", *AUDITED, *IMPORTED_LATE)
        forks = Server("run_layouts", libraries=libraries, address=FORK_SERVER)
        config.stash[FORKS] = forks.__enter__()
        config.add_cleanup(lambda: forks.__exit__())
    return config.stash[FORKS]


def pytest_collection_finish(session):
    if any({"server", "trainings"} & set(getattr(item, "fixturenames", ())) for item in session.items):
        connect(session.config)


@pytest.fixture(scope="session")
def server(pytestconfig):
    """Give a server that records programs as the audit does, without the wait for their imports."""
    return connect(pytestconfig).beside("stepaudit.program", is_cpu=True)


@pytest.fixture(scope="session")
def trainings(pytestconfig):
    """Give a server of trainings on several processes: imports are waited for once, and not in every launch."""
    return connect(pytestconfig).beside("run_layouts", is_cpu=False)


@pytest.fixture(scope="session")
def run_processes(trainings, tmp_path_factory):
    """Run `main` of a module of helpers/ on N processes over gloo: run_processes("run_x", 2) -> what each left in RANK.pt."""

    def run(module: str, num_processes: int) -> list:
        folder = tmp_path_factory.mktemp(module)
        trainings.run([str(folder)], num_processes, module=module)
        return [torch.load(folder / f"{rank}.pt") for rank in range(num_processes)]

    return run


@pytest.fixture
def train_on(corpus, tmp_path, trainings):
    """Train tiny models on N real processes over gloo: train_on(2, {"name": "--flag value ..."}) -> folder of all.

    A name that begins with a program's ("pretrain_gpt2/...") is trained by that program. The processes are forked, and told
    what `accelerate launch` with the launch file would tell them; test_launch.py and others launch.
    """

    def run(num_processes: int, runs: dict[str, str], config: str | Path = "2xcpu", precision: str = "no") -> Path:
        calls = []
        for name, flags in runs.items():
            program = name.split("/")[0] if "/" in name else "pretrain_bert"
            calls.append([program, *tiny_argv(program, corpus, tmp_path / name, flags)])
        more = ["--num_processes", str(num_processes), "--mixed_precision", precision]
        file = config if isinstance(config, Path) else ROOT / "accelerate_configs" / f"{config}.yaml"
        environment = launch_environment(file, *more)
        trainings.run([str(tmp_path), json.dumps(calls)], num_processes, environment=environment, can_repeat=False)
        return tmp_path

    return run
