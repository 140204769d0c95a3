"""The picture of the README: one recipe on 1, 2 and 3 processes, killed and moved, beside Accelerate's documented loop.

    make figures        # about 3 minutes on 2 cores; --draw draws what was measured before

A tiny Llama of random weights learns drawn conversations (recipe sft_small_cpu with the changes of SHAPE); its answers are
trained. All runs take the same samples in the same order from the same weights, with the same optimizer and schedule.

- samestep: scripts/finetune_causal_lm.py on 1, 2 and 3 processes, in micro-batches that do not divide the batch; and on 2,
  whose processes get SIGKILL while they train, then on 3, killed again, then on 1.
- The documented loop: peers/documented.py on 1 and on 2 processes, with the same global batch. Its gradient is a mean of the
  means of micro-batches, and its prepared scheduler ticks once per process.

The loss of a step is the mean over the trained tokens of its global batch, for all of them. The lower panel has the difference
from the run on one process.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "benchmarks" / "peers"
sys.path.insert(0, str(PEERS))

import harness
import yaml

NUM_STEPS, BATCH, EVERY = 120, 32, 15
SHAPE = {
    "extends": "sft_small_cpu",
    "max_train_steps": NUM_STEPS,
    "num_train_samples": NUM_STEPS * BATCH,
    "num_validation_samples": 8,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 192,
    "weight_decay": 0.0,
}
FLAGS = f"--speed safe --logging_steps 1 --num_generations 0 --checkpointing_steps {EVERY} --overwrite_output_dir"
# Name -> processes of each session with its largest micro-batch; all but the last session are killed after these steps.
OURS = {
    "1 process": [(1, 32)],
    "2 processes": [(2, 5)],
    "3 processes": [(3, 4)],
    "killed twice, on 2, 3, 1": [(2, 7), (3, 4), (1, 5)],
}
KILLS = (50, 85)
DOCUMENTED = {"1 process": (1, 4, 8), "2 processes": (2, 4, 4)}
"""Name -> processes, samples of a micro-batch, micro-batches of a step on each process."""
PACKAGES = ("torch", "accelerate", "transformers")
PICTURES = {"light": ROOT / "docs" / "curve-light.svg", "dark": ROOT / "docs" / "curve-dark.svg"}


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def launch(num_processes: int, words: list[Any], folder: Path) -> subprocess.Popen:
    """Start a program and its flags on N processes of one thread each."""
    program, *flags = map(str, words)
    command = harness.launch_on(program, num_processes)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home")}
    log = (folder / "log").open("a")
    return subprocess.Popen([*command, *flags], stdout=log, stderr=log, env=environment, start_new_session=True)


def wait(process: subprocess.Popen, folder: Path, is_reached: Callable[[], bool] = lambda: False) -> None:
    """Wait until a program ends, or kill all its processes when something is reached.

    Raises:
        SystemExit: it failed.
    """
    while process.poll() is None and not is_reached():
        time.sleep(0.05)
    if process.returncode is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    elif process.returncode:
        sys.exit((folder / "log").read_text()[-3000:])


def read_losses(output: Path) -> dict[int, float]:
    """Read step -> loss of a run of ours."""
    if not (output / "metrics.jsonl").exists():
        return {}
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def train_ours(name: str, folder: Path) -> dict[str, Any]:
    """Train in one or several sessions, each but the last of which is killed."""
    output = folder / name.replace(" ", "_").replace(",", "")
    kills = []
    for number, (num_processes, b) in enumerate(OURS[name]):
        words = [ROOT / "scripts" / "finetune_causal_lm.py", "--recipe", folder / "recipe.yaml", "--output_dir", output]
        words += ["--per_device_train_batch_size", b, *FLAGS.split()]
        if number:
            words = [word for word in words if word != "--overwrite_output_dir"] + [
                "--resume_from_checkpoint",
                "latest",
            ]
        process = launch(num_processes, words, folder)
        if number < len(OURS[name]) - 1:
            last = KILLS[number]
            wait(process, folder, lambda last=last: max(read_losses(output), default=0) >= last)
            kills.append(max(read_losses(output)))
        else:
            wait(process, folder)
    losses = read_losses(output)
    return {"program": "samestep", "name": name, "kills": kills, "losses": [losses[step] for step in sorted(losses)]}


def train_documented(name: str, folder: Path) -> dict[str, Any]:
    """Train in the documented loop."""
    num_processes, b, k = DOCUMENTED[name]
    output = folder / f"documented-{num_processes}"
    wait(launch(num_processes, [PEERS / "documented.py", folder, output, b, k], folder), folder)
    ranks = [json.loads(Path(f"{output}-{rank}.json").read_text()) for rank in range(num_processes)]
    losses = []
    for step in range(NUM_STEPS):
        micro_batches = [pair for rank in ranks for pair in rank[step * k : (step + 1) * k]]
        losses.append(sum(loss * count for loss, count in micro_batches) / sum(count for _, count in micro_batches))
    return {"program": "documented", "name": name, "kills": [], "losses": losses}


def main() -> None:
    parser = harness.flags("figures", __doc__)
    parser.add_argument("--draw", action="store_true", help="draw earlier results")
    arguments = parser.parse_args()
    if arguments.draw:
        results = harness.read(arguments.output)
    else:
        import chat_trainers

        about = harness.about("make figures", PACKAGES, 1)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            os.environ["HF_HOME"] = str(folder / "home")
            (folder / "recipe.yaml").write_text(yaml.safe_dump(SHAPE))
            chat_trainers.prepare(folder)
            runs = [train_ours(name, folder) for name in OURS] + [train_documented(name, folder) for name in DOCUMENTED]
        for run in runs:
            run["losses"] = [round(loss, 8) for loss in run["losses"]]
            assert len(run["losses"]) == NUM_STEPS, (run["name"], len(run["losses"]))
        results = {"about": about, "runs": runs}
    harness.write(arguments.output, results, markdown(results))
    if arguments.output == harness.RESULTS / "figures":
        for theme, path in PICTURES.items():
            path.write_text(draw(results, theme), encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Page and picture


def differences(results: dict, run: dict) -> list[float]:
    """Compute |loss - loss of our run on one process| of every step."""
    return [abs(loss - first) for loss, first in zip(run["losses"], results["runs"][0]["losses"], strict=True)]


def markdown(results: dict) -> str:
    rows = [
        [
            "samestep" if run["program"] == "samestep" else "documented loop",
            run["name"],
            ", ".join(map(str, run["kills"])) or "-",
            f"{run['losses'][0]:.4f}",
            f"{sum(run['losses'][-10:]) / 10:.4f}",
            f"{max(differences(results, run)):.1e}",
        ]
        for run in results["runs"]
    ]
    heads = (
        "program | run | killed after step | first loss | mean of the last 10 | largest difference from the first run"
    )
    return harness.page("One recipe, run in six ways", "figures.py", results["about"], harness.table(heads, rows))


# Okabe and Ito's colours, which colour-blind people can tell apart; lines differ in width and dashes, too.
THEMES = {
    "light": {"text": "#1f2328", "grid": "#d0d7de", "ours": ["#9fd3f2", "#4aa3da", "#0b5d94", "#001d33"]},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", "ours": ["#0b4a75", "#2f8fcb", "#8fd0f5", "#f0f8ff"]},
}
DOCUMENTED_COLOURS = {"light": ["#d55e00", "#b8860b"], "dark": ["#ff8c42", "#f0e442"]}
WIDTHS, DASHES = (9, 6, 3.4, 1.4), ("", "", "", "5 4")
LEFT, RIGHT, WIDTH = 52, 462, 480
LOSS_PANEL, DIFFERENCE_PANEL, HEIGHT = (152, 332), (384, 498), 546
SMALLEST = 1e-8
"""Difference at the bottom of the lower panel."""


def path(points: list[tuple[float, float]], colour: str, width: float, dashes: str = "") -> str:
    """Draw a line through points."""
    d = "M" + " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path d="{d}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-linejoin="round"{dash}/>'


def label(x: float, y: float, text: str, colour: str, anchor: str = "start") -> str:
    """Write a text."""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}">{text}</text>'


def draw(results: dict, theme: str) -> str:
    """Draw the curves, and below them their difference from the first, as SVG.

    Args:
        theme: light or dark.
    """
    colours, runs = THEMES[theme], results["runs"]
    ours = [run for run in runs if run["program"] == "samestep"]
    others = [run for run in runs if run["program"] != "samestep"]
    styles = [(run, colours["ours"][i], WIDTHS[i], DASHES[i]) for i, run in enumerate(ours)]
    styles += [(run, DOCUMENTED_COLOURS[theme][i], 2.4, ("2 3", "9 4")[i]) for i, run in enumerate(others)]
    num_steps = len(runs[0]["losses"])
    top_loss = math.ceil(max(max(run["losses"]) for run in runs))

    def x(step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / num_steps

    def y_loss(loss: float) -> float:
        top, bottom = LOSS_PANEL
        return bottom - (bottom - top) * loss / top_loss

    def y_difference(difference: float) -> float:
        top, bottom = DIFFERENCE_PANEL
        share = (math.log10(max(difference, SMALLEST)) - math.log10(SMALLEST)) / (0.5 - math.log10(SMALLEST))
        return bottom - (bottom - top) * share

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-size="15" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">'
    ]
    # Legend
    text = colours["text"]
    lines.append(label(8, 20, "samestep, one recipe", text))
    for number, (run, colour, width, dashes) in enumerate(styles[: len(ours)]):
        y = 42 + 21 * number
        lines += [path([(10, y - 5), (44, y - 5)], colour, width, dashes), label(52, y, run["name"], text)]
    lines.append(label(282, 20, "the documented loop", text))
    for number, (run, colour, width, dashes) in enumerate(styles[len(ours) :]):
        y = 42 + 21 * number
        lines += [path([(284, y - 5), (318, y - 5)], colour, width, dashes), label(326, y, run["name"], text)]
    # Axes
    lines.append(label(8, LOSS_PANEL[0] - 12, "loss of a step", text))
    for loss in range(0, top_loss + 1, 2):
        lines += [path([(LEFT, y_loss(loss)), (RIGHT, y_loss(loss))], colours["grid"], 1)]
        lines += [label(LEFT - 8, y_loss(loss) + 5, str(loss), text, "end")]
    lines.append(label(8, DIFFERENCE_PANEL[0] - 12, "difference from the run on 1 process", text))
    for exponent in (-8, -6, -4, -2, 0):
        y = y_difference(10.0**exponent)
        lines += [path([(LEFT, y), (RIGHT, y)], colours["grid"], 1)]
        lines += [label(LEFT - 8, y + 5, f"1e{exponent}" if exponent else "1", text, "end")]
    for step in range(0, num_steps + 1, num_steps // 4):
        lines.append(label(x(step), DIFFERENCE_PANEL[1] + 22, str(step), text, "middle"))
    lines.append(label(RIGHT, HEIGHT - 6, "optimizer step", text, "end"))
    # Kills
    for run in ours:
        for step in run["kills"]:
            lines.append(path([(x(step), LOSS_PANEL[0]), (x(step), LOSS_PANEL[1])], text, 1, "2 4"))
            lines.append(label(x(step) + 4, LOSS_PANEL[0] + 12, "killed", text))
    # Curves
    for run, colour, width, dashes in styles:
        lines.append(
            path([(x(step), y_loss(loss)) for step, loss in enumerate(run["losses"], 1)], colour, width, dashes)
        )
    for run, colour, width, dashes in styles[1:]:
        points = [(x(step), y_difference(value)) for step, value in enumerate(differences(results, run), 1)]
        lines.append(path(points, colour, min(width, 2.4), dashes))
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
