"""Build the wheel and the sdist into dist/, check what they hold, and try them outside the repository: `make release`.

The wheel is installed alone, without torch, to plan; and into another fresh environment, without extras: a plan, an audit of a
program, a test with the fixture `assert_same_step`, and a loop of one's own with `exact_steps`. Then, with the extra `text`, a
script of the unpacked sdist, which is the checkout, trains a recipe: scripts are in no wheel.

    python .ci/release.py --python python3.13     # with another Python in the fresh environment
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
PROGRAM = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--accum", type=int)
flags = parser.parse_args()
torch.manual_seed(0)
samples, model = torch.randn(64, 4, dtype=torch.float64), torch.nn.Linear(4, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in samples.split(flags.batch * flags.accum):
    for micro_batch in step.split(flags.batch):
        (model(micro_batch).square().mean() / flags.accum).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
TEST = """
import torch


def test_my_step(assert_same_step):
    torch.manual_seed(0)
    assert_same_step(
        torch.nn.Linear(4, 1),
        [(torch.randn(4), 1.0) for _ in range(8)],
        collate=lambda samples: {"x": torch.stack([x for x, _ in samples])} if samples else {"x": torch.zeros(0, 4)},
        loss=lambda model, batch: (model(batch["x"]).square().sum(), len(batch["x"])),
    )
"""
LOOP = """
import torch
from accelerate import Accelerator
from samestep import exact_steps

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in exact_steps(
    accelerator,
    [torch.randn(4) for _ in range(20)],
    lambda samples: {"x": torch.stack(samples) if samples else torch.zeros(0, 4)},
    global_batch_size=10,
    per_device_batch_size=3,
    targets=lambda batch: len(batch["x"]),
):
    for batch in step:
        with accelerator.accumulate(model):
            accelerator.backward(step.loss(model(batch["x"]).square().sum()))
            optimizer.step()
            optimizer.zero_grad()
print("exact_steps:", model.weight.norm().item())
"""


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:5.0f} s] {text}", flush=True)


def run(*words: object, folder: Path, expect: str = "") -> None:
    """Run a program; end with what it printed unless it succeeds and prints what is expected."""
    done = subprocess.run([*map(str, words)], cwd=folder, capture_output=True, text=True)
    output = done.stdout + done.stderr
    if done.returncode or expect not in output:
        sys.exit(f"ERROR: {' '.join(map(str, words))}: exit code {done.returncode}, expected {expect!r} in\n{output}")


def tracked(*folders: str) -> set[str]:
    """List the files that git tracks."""
    done = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return {name for name in done.stdout.split("\0") if name}


def check_version() -> str:
    """Return the version, which is the same wherever it is written."""
    (version,) = re.findall(r'__version__ = "(.+)"', (ROOT / "samestep" / "__init__.py").read_text())
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    logged = re.findall(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if cited != [version] or logged[0] != version:
        sys.exit(f"ERROR: __version__ is {version}, CITATION.cff has {cited}, CHANGELOG.md begins with {logged[0]}")
    return version


def check_contents(wheel: Path, sdist: Path) -> None:
    """Check that the wheel holds the packages and nothing else, and the sdist all that git tracks."""
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    moved = {f"samestep/{name.removeprefix('recipes/')}" for name in tracked("recipes/catalog", "accelerate_configs")}
    missing = (tracked("samestep", "stepaudit", "stepplan") | moved) - held
    foreign = {name for name in held if not name.startswith(("samestep/", "stepaudit/", "stepplan/", "samestep-"))}
    licences = [name for name in held if name.endswith(".dist-info/licenses/LICENSE")]
    if missing or foreign or not licences:
        sys.exit(f"ERROR: {wheel.name} lacks {missing or 'nothing'}, holds {foreign or 'nothing'} beside, {licences=}")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if missing := tracked() - held:
        sys.exit(f"ERROR: {sdist.name} lacks {sorted(missing)}: MANIFEST.in")


def try_out(python: str, wheel: Path, sdist: Path) -> None:
    """Install the wheel into fresh environments, and use it outside the repository."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        run(python, "-m", "venv", folder / "small", folder=folder)
        plan_only(folder / "small" / "bin", folder, wheel)
        run(python, "-m", "venv", folder / "env", folder=folder)
        use(folder / "env" / "bin", folder, wheel, sdist)


def plan_only(bin: Path, folder: Path, wheel: Path) -> None:
    """Install the wheel without its dependencies, as docs/install.md says, and plan."""
    pip = (bin / "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", wheel, folder=folder)
    run(*pip, "pyyaml", "jinja2", folder=folder)
    run(bin / "samestep", "list", folder=folder, expect="bert_base")
    run(bin / "samestep", "plan", "gpt2_124m", "--html", "plan.html", "--on", "8xa100-80", folder=folder)
    job = ("launch", "bert_base", "--on", "slurm:2x8xa100-80", "--", "--output_dir", "/shared/runs")
    run(bin / "samestep", *job, folder=folder, expect="#SBATCH")
    run(bin / "samestep", "scale", "bert_base", "--on", "t4", folder=folder)
    say("samestep list, plan, launch, scale without torch")


def use(bin: Path, folder: Path, wheel: Path, sdist: Path) -> None:
    """Install the wheel, without extras and then with one, and try in a folder what people do with it."""
    (torch,) = re.findall(r"^torch==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    pip = (bin / "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, torch, folder=folder)
    run(*pip, wheel, "pytest", folder=folder)
    say(f"installed with {subprocess.check_output([bin / 'python', '--version'], text=True).strip()}")
    run(bin / "samestep", "plan", "bert_large_3090", "--on", "1x3090", folder=folder, expect="accelerate launch")
    say("samestep plan")
    (folder / "train.py").write_text(PROGRAM)
    words = ("--vary", "batch=16,accum=1", "--vary", "batch=4,accum=4", "--", "train.py")
    run(bin / "samestep", "audit-script", *words, folder=folder, expect="\nexact")
    run(bin / "python", "-m", "stepaudit", *words, folder=folder, expect="\nexact")
    say("samestep audit-script")
    (folder / "test_mine.py").write_text(TEST)
    run(bin / "python", "-m", "pytest", "-q", "test_mine.py", folder=folder, expect="1 passed")
    say("assert_same_step")
    (folder / "loop.py").write_text(LOOP)
    run(bin / "python", "loop.py", folder=folder, expect="exact_steps: ")
    say("exact_steps")
    run(*pip, f"{wheel}[text]", folder=folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    checkout = folder / sdist.name.removesuffix(".tar.gz")
    shutil.rmtree(checkout / "samestep")  # the installed one trains
    launch = (bin / "accelerate", "launch", "--quiet", "--config_file", "accelerate_configs/cpu.yaml")
    flags = ("--recipe", "bert_small_cpu", "--max_train_steps", "5", "--num_warmup_steps", "0", "--speed", "safe")
    run(*launch, "scripts/pretrain_bert.py", *flags, folder=checkout, expect="Load it:")
    say("a recipe is trained")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python of the fresh environment")
    python = parser.parse_args().python
    version = check_version()
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, folder=ROOT)
    wheel, sdist = DIST / f"samestep-{version}-py3-none-any.whl", DIST / f"samestep-{version}.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=ROOT)
    check_contents(wheel, sdist)
    say(f"built {wheel.name} ({wheel.stat().st_size:,} bytes) and {sdist.name} ({sdist.stat().st_size:,} bytes)")
    try_out(python, wheel, sdist)
    say("all is well")


START = time.perf_counter()
if __name__ == "__main__":
    main()
