"""Runs the tests without the rooms that can be deleted: `make test-core`, with what pytest takes behind it.

A copy of what is tracked is made without stepplan/ and samestep/contrib/, and an environment that has the packages of this one
and takes ours from the copy alone. tests/helpers/rooms.py says which tests belong to these rooms.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("samestep/contrib", "stepplan")


def copy_without_rooms(folder: Path) -> None:
    """Copy what git tracks, as it is here, but the rooms; the copy is a repository, too, which some tests want."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(tuple(f"{room}/" for room in ROOMS)):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    subprocess.run(["git", "add", "--all"], cwd=folder, check=True)


def make_environment(folder: Path, source: Path) -> Path:
    """Make an environment with the packages and commands of this one; return its Python.

    A path in a .pth file brings packages, and not the .pth files beside them, by which this checkout would be found.
    """
    venv.create(folder, with_pip=False)
    scripts, python = folder / "bin", folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    packages.joinpath("copy.pth").write_text(f"{source}\n{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    for file in Path(sys.executable).parent.iterdir():
        if file.is_file() and not (scripts / file.name).exists() and file.read_bytes().startswith(b"#!"):
            first, _, rest = file.read_text(encoding="utf-8").partition("\n")
            (scripts / file.name).write_text(f"#!{python}\n{rest}" if "python" in first else f"{first}\n{rest}")
            (scripts / file.name).chmod(0o755)
    return python


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="core-") as name:
        source, folder = Path(name, "copy"), Path(name, "environment")
        source.mkdir()
        copy_without_rooms(source)
        python = make_environment(folder, source)
        environment = os.environ | {"PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]])}
        return subprocess.run([python, "-m", "pytest", *sys.argv[1:]], cwd=source, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
