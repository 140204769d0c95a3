"""What libraries write on the way, and cannot, is one line that names the folder and the remedy."""

import errno
import os
import resource
import signal

import datasets
import pytest

from samestep import errors
from samestep.data import documents, tokenizer
from samestep.errors import UsageError, exit_code, explain_unwritable
from samestep.recipe.run_settings import RunSettings
from samestep.recipe.settings import Parser
from samestep.recipe.tasks.image_classification import ImageClassification


@pytest.fixture
def caches(tmp_path, monkeypatch):
    """Give each variable of a cache a folder below the same one, in which there is room."""
    for name in errors.CACHES:
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setattr(errors, "_count_free_bytes", lambda path: 1e12)
    return tmp_path


def rows():
    yield from ({"text": f"line {i}"} for i in range(2000))


def raise_(error):
    raise error


@pytest.mark.parametrize("name", errors.CACHES)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_the_variable_of_the_folder_is_named(caches, capsys, name, number):
    path = str(caches / name.lower() / "a" / "b.lock")
    assert exit_code(lambda: raise_(OSError(number, os.strerror(number), path))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ERROR: {path} cannot be used ({os.strerror(number)}")
    assert line.endswith(f", or set {name} to another folder")


def test_an_error_is_found_inside_of_those_that_wrap_it(caches):
    path = str(caches / "hf_home" / "x")
    wrapper = datasets.exceptions.DatasetGenerationError("An error occurred")
    wrapper.__cause__ = PermissionError(errno.EACCES, "Permission denied", path)
    assert explain_unwritable(wrapper).startswith(f"{path} cannot be used (Permission denied): give the right")
    for wrapped in (
        RuntimeError("write failed: No space left on device"),
        Exception("Read-only file system (os error 30)"),
    ):
        assert "a file cannot be used (" in explain_unwritable(wrapped)


def test_a_full_folder_is_found_without_its_name(caches, monkeypatch):
    full = str(caches / "triton_cache_dir")
    monkeypatch.setattr(errors, "_count_free_bytes", lambda path: 4096.0 if path == full else 1e12)
    expected = (
        f"{full} cannot be used (No space left on device, 0.0 MB are free): make room there, or set TRITON_CACHE_DIR"
    )
    assert explain_unwritable(OSError(errno.ENOSPC, "No space left on device")).startswith(expected)


def test_other_errors_keep_their_traceback(caches):
    others = [FileNotFoundError(errno.ENOENT, "No such file", str(caches / "nowhere")), ValueError("a"), KeyError("b")]
    others += [OSError("of a library"), FileNotFoundError(errno.ENOENT, "No such file", str(caches / "tmpdir" / "x"))]
    for error in others:
        assert explain_unwritable(error) is None
        with pytest.raises(type(error)):
            exit_code(lambda error=error: raise_(error))
    assert (
        explain_unwritable(FileNotFoundError(errno.ENOENT, "No such file", str(caches / "hf_home" / "x"))) is not None
    )
    circle = ValueError("a")
    circle.__cause__ = ValueError("b")
    circle.__cause__.__cause__ = circle
    assert explain_unwritable(circle) is None


@pytest.mark.parametrize(
    ("environment", "default"),
    [
        ({}, "~/.cache/huggingface/datasets"),
        ({"HF_HOME": "/a"}, "/a/datasets"),
        ({"HF_HOME": "/a", "HF_DATASETS_CACHE": "/b"}, "/b"),
    ],
)
def test_folders_are_those_of_the_libraries(monkeypatch, environment, default):
    for name in errors.CACHES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert errors._find_cache("HF_DATASETS_CACHE") == os.path.expanduser(default)


@pytest.mark.parametrize("place", ["below a file", "in no file system"])
def test_a_cache_that_cannot_be(tmp_path, use_cache, capsys, place):
    """Real errors of `datasets`, at its first folder."""
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "cache") if place == "below a file" else "/proc/nothing/cache"
    use_cache(folder)
    assert exit_code(lambda: len(documents.cache_rows(rows, documents.FEATURES, key="x"))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR: ")
    assert line.endswith(", or set HF_DATASETS_CACHE to another folder")


def test_a_file_that_may_not_grow(tmp_path, use_cache):
    """The limit of a process stands for a disk that is full: both fail in the middle of a file, without its name."""
    use_cache(tmp_path / "cache")
    read, write = os.pipe()
    if not (pid := os.fork()):
        code = 70
        try:
            os.dup2(write, 2)
            errors.sys.stderr = os.fdopen(2, "w")
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
            code = exit_code(lambda: len(documents.cache_rows(rows, documents.FEATURES, key="x")))
            errors.sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as file:
        lines = [line for line in file.read().splitlines() if line.startswith("ERROR") or "Traceback" in line]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    assert len(lines) == 1
    assert "cannot be used (File too large" in lines[0]


def test_a_library_that_cannot_download(caches, monkeypatch):
    path = str(caches / "hf_hub_cache" / "models--a--b")
    error = OSError(errno.EROFS, "Read-only file system", path)
    monkeypatch.setattr(tokenizer.AutoTokenizer, "from_pretrained", lambda *_, **__: raise_(error))
    with pytest.raises(UsageError, match=r"models--a--b cannot be used .*, or set HF_HUB_CACHE to another folder$"):
        tokenizer.load_tokenizer("a/b", 1000, (), "GPT-2")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: raise_(error))
    with pytest.raises(UsageError, match=r"models--a--b cannot be used .*, or set HF_HUB_CACHE to another folder$"):
        documents.load_hub("a/b", None, "train", None)


def test_a_cause_among_users_mistakes_is_not_hidden(caches):
    """A mistake in what is read is said, though the cache is `datasets`'."""

    def broken():
        yield {"text": "a"}
        raise UsageError("row 2 is wrong: mend it")

    with pytest.raises(UsageError, match=r"^row 2 is wrong: mend it$"):
        documents.cache_rows(broken, documents.FEATURES, key=str(caches))


@pytest.mark.parametrize(
    ("problem", "written"),
    [
        ("my.yaml: seed is 0, but there is none: set it to null", "set it to null (--seed none)"),
        (
            "dtype is 3: set speed to safe, or it to float32",
            "set speed to safe (--speed safe), or it to float32 (--dtype float32)",
        ),
        ("speed is 1, must be a word: set it to one of auto, safe", None),
        ("eval_steps is 3: set it to a number with them, else to null", None),
        ("eval_steps is 3: set it to more", None),
        ("seed is 3: set rank to 4", "set rank to 4"),
    ],
)
def test_a_remedy_that_sets_a_field_names_its_flag(problem, written, capsys):
    def read_flags():
        parser = Parser("train.py")
        parser.add_settings(RunSettings)
        parser.add_settings(ImageClassification)
        parser.parse([])
        raise UsageError(problem)

    assert exit_code(read_flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"ERROR: {problem}" if written is None else line.endswith(f": {written}")
