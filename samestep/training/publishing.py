"""The results of a finished run: all_results.json, loss.png, the model card, its upload to the hub; and its best model."""

import datetime
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from samestep.models import pretrained
from samestep.printing import fold
from samestep.training import card, checkpoint, plots
from samestep.training.output_folder import read_metrics, read_noise
from samestep.training.progress import peak_memory
from samestep.training.report import RunLog

PICTURES = ("loss.png", "predictions.png", "confusion.png")
"""Pictures that the model card shows, if they were drawn."""


def save_best(accelerator: Accelerator, output_dir: Path, model: Any, tokenizer: Any) -> None:
    """Keep the model of the best evaluation so far in `best/`, whole at any moment. Called by all processes."""
    if accelerator.is_main_process:
        partial, best = output_dir / "best.partial", output_dir / "best"
        pretrained.save_pretrained(model, tokenizer, partial)
        shutil.rmtree(best, ignore_errors=True)
        partial.rename(best)
    accelerator.wait_for_everyone()


def publish(
    log: RunLog,
    usage: str,
    training: card.Training,
    best_step: int | None = None,
    facts: Mapping[str, float] | None = None,
) -> None:
    """Write all_results.json, loss.png and README.md (the model card), push to the hub if asked for, print a summary.

    Called by process 0 only, after the model and the tokenizer were saved in the output folder.

    Args:
        log: closed.
        usage: lines of Python that load the saved model; OUTPUT_DIR stands for the folder.
        training: what was trained on what.
        best_step: step of the saved model, whose evaluation is reported; None: the last one.
        facts: further results, name -> number; None: there are none.
    """
    recipe, settings, output_dir = log.recipe, log.settings, log.output_dir
    steps, evaluations = read_metrics(output_dir)
    results: dict[str, Any] = training.describe_data() | {"steps": steps[-1]["step"] if steps else log.plan.num_steps}
    if best_step is not None:
        results["best_step"] = best_step
        evaluations = [line for line in evaluations if line["step"] <= best_step]
    if steps:  # none when a finished run is resumed into another folder
        results |= {name: steps[-1][name] for name in ("epoch", "loss") if name in steps[-1]}
        if steps[-1]["step"] == training.num_steps and training.ends_within_a_step:
            results["epoch"] = recipe.num_train_epochs  # as asked for
        units = [*card.UNITS, *(name for name in steps[-1] if name.endswith("/samples"))]
        results |= {f"{unit}_seen": sum(line.get(unit, 0) for line in steps) for unit in units if unit in steps[-1]}
    if evaluations:
        results |= {name: value for name, value in evaluations[-1].items() if name != "step"}
    if seconds := log.progress.seconds:
        results |= {"train_seconds": seconds, f"{recipe.unit}s_per_second": log.progress.num_units / seconds}
        results["peak_memory_gb"] = peak_memory(log.accelerator.device) / 1e9
    if num_skipped := log.not_finite.num_skipped:
        results["skipped_steps"] = num_skipped
    results |= facts or {}
    (output_dir / "all_results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    noises, terms = read_noise(output_dir), list(recipe.loss_weights)
    picture = plots.plot_training(*read_metrics(output_dir), terms, _title(training), noises)
    (output_dir / "loss.png").write_bytes(picture)
    pictures = [name for name in PICTURES if (output_dir / name).exists()]

    def write_card(repo_id: str | None = None) -> None:
        text = card.write(training, results, evaluations, usage, pictures, repo_id)
        (output_dir / "README.md").write_text(text, encoding="utf-8")

    write_card()
    first = evaluations[0] if evaluations else {}
    shown = {name: value for name, value in results.items() if "/" not in name}  # those of sources were printed
    width = max(len(name) for name in shown)
    print(fold(f"\n{training.title}: {recipe.description}"))
    for name, value in shown.items():
        change = f"  (from {card.format_number(first[name])} at step {first['step']})" if name in first else ""
        print(f"  {name:{width}}  {card.format_number(value)}{change}")
    files = ", ".join(
        sorted(path.name for path in output_dir.iterdir() if not path.name.startswith((".", "checkpoint-")))
    )
    newest = [f", {path.name}" for path in checkpoint.checkpoints(output_dir)[-1:]]  # none, see above
    code = "".join(f"  {line}\n" for line in usage.replace("OUTPUT_DIR", str(output_dir)).split("\n"))
    print(fold(f"\nWrote {output_dir}/: {files}{''.join(newest)}"))
    command = _own_command()
    talks = getattr(recipe, "objective", "reward") != "reward" and training.train.tokenizer.chat_template is not None
    chat = f"{command} chat {output_dir}, " if talks else ""
    print(f"Load it:\n{code}\nNext: {chat}{command} watch {output_dir}")
    if settings.push_to_hub:
        print(f"Uploaded to {card.push_to_hub(output_dir, settings.hub_model_id, write_card)}")


def _own_command() -> str:
    """Return what starts `samestep` in this environment, whether it is activated or not."""
    if shutil.which("samestep"):
        return "samestep"
    beside, here = Path(sys.executable).with_name("samestep"), Path.cwd()
    if not beside.exists():
        return f"{sys.executable} -m samestep"
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _title(training: card.Training) -> str:
    data = training.recipe.data_name
    return f"{training.title}, {training.recipe.name}{f' on {data}' if data else ''} ({datetime.date.today()})"
