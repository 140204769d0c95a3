"""Sends the lines of metrics.jsonl to a tracker (--report_to)."""

from collections.abc import Sequence
from typing import Any

from samestep.training.parts import Part
from samestep.training.run import Run


class Trackers(Part):
    """A tracker of Accelerate: wandb, trackio or tensorboard. It goes on with the run of an earlier session."""

    def __init__(self, run: Run):
        self.accelerator = accelerator = run.accelerator
        recipe, tracker = run.recipe, run.settings.report_to
        name, run_id, first_step = run.output_dir.resolve().name, run.log.run_id, run.start.state.step
        init_kwargs = {
            "wandb": {"id": run_id, "name": name, "resume": "allow"},
            "trackio": {"name": f"{name}-{run_id}", "resume": "allow"},
            "tensorboard": {"purge_step": first_step + 1},
        }
        if tracker == "tensorboard":  # its hyperparameters would be a second run, in a folder of their own
            accelerator.init_trackers("tensorboard", init_kwargs=init_kwargs)
            if accelerator.is_main_process:
                writer = accelerator.get_tracker("tensorboard", unwrap=True)
                writer.add_text("recipe", f"```yaml\n{recipe.to_yaml()}```", first_step)
        else:
            config = {name: value if value is not None else "null" for name, value in recipe.decisive_fields().items()}
            accelerator.init_trackers(recipe.name, config=config, init_kwargs=init_kwargs)

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        for line in lines:
            self._send(line, "train")

    def evaluated(self, line: dict[str, Any]) -> None:
        self._send(line, "eval")

    def _send(self, line: dict[str, Any], prefix: str) -> None:
        values = {f"{prefix}/{k.removeprefix('eval_')}": v for k, v in line.items() if k not in ("step", "digest")}
        for name in [name for name, value in values.items() if isinstance(value, list)]:  # one of each layer
            values |= {f"{name}/{layer}": value for layer, value in enumerate(values.pop(name))}
        self.accelerator.log(values, step=line["step"])
