"""The results of a run: its best model; all_results.json when it is finished, and what is printed of that.

Parts of the run write pages about the results.
"""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.models import pretrained
from samestep.printing import fold, write_number
from samestep.recipe.pretrained_shape import find_base
from samestep.recipe.reading import read_json
from samestep.training import checkpoint
from samestep.training.launch import is_sharded
from samestep.training.output_folder import read_metrics
from samestep.training.progress import peak_memory

if TYPE_CHECKING:
    from samestep.training.run import Run

UNITS = ("samples", "tokens")  # of which lines of metrics.jsonl say how many a step had


def publish(run: "Run", usage: str, best_step: int | None, facts: Mapping[str, float]) -> None:
    """Write all_results.json, let the run's parts write pages, print a summary.

    Called by process 0 only, after the model and the tokenizer were saved in the output folder.

    Args:
        run: finished.
        usage: lines of Python that load the saved model; OUTPUT_DIR stands for the folder.
        best_step: step of the saved model, whose evaluation is reported; None: the last one.
        facts: further results, name -> number.
    """
    steps, evaluations = read_metrics(run.output_dir)
    results = describe_data(run) | {"steps": steps[-1]["step"] if steps else run.num_steps}
    if best_step is not None:
        results["best_step"] = best_step
        evaluations = [line for line in evaluations if line["step"] <= best_step]
    if steps:  # none when a finished run is resumed into another folder
        results |= {name: steps[-1][name] for name in ("epoch", "loss") if name in steps[-1]}
        if steps[-1]["step"] == run.num_steps and ends_within_a_step(run):
            results["epoch"] = run.recipe.num_train_epochs  # as asked for
        units = [*UNITS, *(name for name in steps[-1] if name.endswith("/samples"))]
        results |= {f"{unit}_seen": sum(line.get(unit, 0) for line in steps) for unit in units if unit in steps[-1]}
    if evaluations:
        results |= {name: value for name, value in evaluations[-1].items() if name != "step"}
    speed, file = f"{run.recipe.unit}s_per_second", run.output_dir / "all_results.json"
    if seconds := run.log.progress.seconds:
        results |= {"train_seconds": seconds, speed: run.log.progress.num_units / seconds}
        results["peak_memory_gb"] = peak_memory(run.accelerator.device) / 1e9
    elif file.is_file():  # a finished run that is published again has measured nothing
        earlier = read_json(file, "all_results.json")
        results |= {name: earlier[name] for name in ("train_seconds", speed, "peak_memory_gb") if name in earlier}
    if num_skipped := run.log.not_finite.num_skipped:
        results["skipped_steps"] = num_skipped
    results |= facts
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    for part in run.parts:
        part.publish(results, evaluations, usage)
    _print_summary(run, results, evaluations, usage)
    for part in run.parts:
        part.upload()


def save_best(run: "Run", model: Any) -> None:
    """Keep a model and the tokenizer in `best/` of the output folder, whole at any moment. Called by all processes."""
    if is_sharded(run.accelerator):
        model = getattr(run.network.make_whole_model(), "model", None)
    if run.accelerator.is_main_process:
        partial, best = run.output_dir / "best.partial", run.output_dir / "best"
        pretrained.save_pretrained(model, run.network.trained.tokenizer, partial)
        shutil.rmtree(best, ignore_errors=True)
        partial.rename(best)
    run.accelerator.wait_for_everyone()


def describe_data(run: "Run") -> dict[str, Any]:
    """Return what is known of the training data, name -> value: their place, samples, documents and tokens."""
    train, held_out = run.data
    num_samples = None if hasattr(train, "num_samples") else len(train)  # which a stream does not know
    facts = {"data": run.recipe.data_name, "train_samples": num_samples}
    for name, attribute in (("train_documents", "num_documents"), ("train_tokens", "num_tokens")):
        facts[name] = getattr(train, attribute, None)
    if facts["train_documents"] == num_samples:  # each is a sample
        del facts["train_documents"]
    if held_out is not None:
        facts |= {"eval_samples": len(held_out), "eval_majority_accuracy": getattr(held_out, "majority_accuracy", None)}
    return {name: value for name, value in facts.items() if value is not None}


def ends_within_a_step(run: "Run") -> bool:
    """Tell whether the epochs that were asked for end within the last step, which has samples beyond them."""
    recipe, (train, _) = run.recipe, run.data
    if recipe.num_train_epochs is None or recipe.epoch_end != "carry":
        return False
    num_uses = sum(uses for _, uses in getattr(train, "mixture", ())) or len(train)
    return run.num_steps * recipe.global_batch_size > recipe.num_train_epochs * num_uses and not recipe.batch_schedule


def name_model(run: "Run") -> str:
    """Name the model as its repository is called, or its folder."""
    return (run.settings.hub_model_id or run.output_dir.resolve().name).rpartition("/")[2]


def find_local_base(run: "Run") -> str | None:
    """Find the folder of this machine that the saved adapter needs; None: a whole model was saved, or the base is the hub's, or
    lies beside the adapter."""
    adapter, start = run.output_dir / "adapter_config.json", getattr(run.recipe, "model_name_or_path", None)
    if start is None or not adapter.is_file():
        return None
    base = find_base(start) or start
    return base if Path(base).expanduser().exists() else None


def _print_summary(
    run: "Run", results: Mapping[str, Any], evaluations: Sequence[Mapping[str, Any]], usage: str
) -> None:
    """Print the results, beside those of the first evaluation, and what the folder holds, with how to go on from it."""
    recipe, output_dir = run.recipe, run.output_dir
    first = evaluations[0] if evaluations else {}
    shown = {name: value for name, value in results.items() if "/" not in name}  # those of sources were printed
    width = max(len(name) for name in shown)
    notes = {"train_seconds": "(of this session's steps, without evaluations)"}
    notes["eval_majority_accuracy"] = "(of the largest class for every sample)"
    notes[f"{recipe.unit}s_per_second"] = "(mean of these steps)"
    if "best_step" in results:
        notes |= dict.fromkeys(("epoch", "loss"), "(of the last step)")
    print(fold(f"\n{name_model(run)}: {recipe.description}"))
    for name, value in shown.items():
        best = f"of step {results['best_step']}, the saved model's; " if "best_step" in results else ""
        change = f"({best}from {write_number(first[name])} at step {first['step']})" if name in first else ""
        print(f"  {name:{width}}  {write_number(value)}  {change or notes.get(name, '')}".rstrip())
    files = ", ".join(
        sorted(path.name for path in output_dir.iterdir() if not path.name.startswith((".", "checkpoint-")))
    )
    newest = [f", {path.name}" for path in checkpoint.checkpoints(output_dir)[-1:]]  # none, see above
    code = "".join(f"  {line}\n" for line in usage.replace("OUTPUT_DIR", str(output_dir)).split("\n"))
    print(fold(f"\nWrote {output_dir}/: {files}{''.join(newest)}"))
    if base := find_local_base(run):
        print(
            fold(
                f"\nThe adapter needs {base}, a folder of this machine. Who is given the adapter needs that folder, too, at "
                f"{output_dir.name}/base"
            )
        )
    command = _own_command()
    talks = getattr(recipe, "objective", "reward") != "reward" and run.data[0].tokenizer.chat_template is not None
    talks = talks and not getattr(recipe, "images", False)
    chat = f"{command} chat {output_dir}, " if talks else ""
    print(f"Load it:\n{code}\nNext: {chat}{command} watch {output_dir}")


def _own_command() -> str:
    """Return what starts `samestep` in this environment, whether it is activated or not."""
    if shutil.which("samestep"):
        return "samestep"
    beside, here = Path(sys.executable).with_name("samestep"), Path.cwd()
    if not beside.exists():
        return f"{sys.executable} -m samestep"
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)
