"""What surrounds the code is well-formed and true: the public workflow, forms of issues, the citation, hooks."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch

import pytest
import yaml
from common import ROOT

from samestep import __version__

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def read(name: str):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_what_there_is():
    """Its targets, its versions of Python; actions of a named version."""
    workflow = read(".github/workflows/tests.yml")
    jobs = workflow["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in steps if "uses" in step)
    targets = {name for step in steps for name in re.findall(r"^make ([a-z-]+)", step.get("run", ""), re.M)}
    assert {"check", "test", "test-kinds", "release", "site", "venv"} <= targets <= TARGETS
    versions = jobs["tests"]["strategy"]["matrix"]["python"]
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    classifiers = [line for line in PROJECT["project"]["classifiers"] if line.startswith("Programming Language")]
    assert [line.rpartition(" ")[2] for line in classifiers] == versions[:-1], "the newest is tried, and no promise yet"
    assert jobs["release"]["strategy"]["matrix"]["python"] == [versions[0], versions[-1]]
    assert True in workflow, "`on` is read as true by YAML 1.1"


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_a_form_is_one(form):
    """GitHub shows no form at all where a field is not as it wants it."""
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= content.keys() <= {"name", "description", "body", "labels", "title"}
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(set(ids)) == len(ids) > 0
    assert {field["type"] for field in fields} <= {"textarea", "input"}
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_the_citation_has_this_version():
    citation = read("CITATION.cff")
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_hooks_are_the_checks():
    """Before a commit the same is checked as by `make check`."""
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for hook in repository["hooks"]:
        program, *words = hook["entry"].split()
        if program == "make":
            assert set(words) <= TARGETS
        else:
            assert f"$(BIN)/{program.removeprefix('.venv/bin/')} {words[0]}" in makefile


def test_the_sdist_holds_every_file():
    """MANIFEST.in names those of the root by pattern: a new kind of file would be missed."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode or not git.stdout:
        pytest.skip("no checkout")
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    folders = {words[1] for words in lines if words[0] == "graft"}
    patterns = [pattern for words in lines if words[0] == "include" for pattern in words[1:]]
    patterns += ["LICENSE", "MANIFEST.in", "pyproject.toml"]  # which setuptools adds
    names = {name.partition("/")[0] for name in git.stdout.splitlines()}
    assert [name for name in names - folders if not any(fnmatch(name, pattern) for pattern in patterns)] == []
