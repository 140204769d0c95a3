"""The beginning of a session: at a checkpoint, which may be of a training of another length, or before the first step."""

import dataclasses
import datetime
import functools
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from samestep.errors import UsageError
from samestep.recipe import rehearsal
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.recipe.settings import drop_flags
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.training import checkpoint
from samestep.training.copies import Copies
from samestep.training.output_folder import OutputFolder
from samestep.training.plan import Plan, plan_training
from samestep.training.reduction import Reduction

DECIDED_BY_WEIGHTS = (*CausalLmFineTuning.SHAPE, "architecture", "vocab_size", "tokenizer_name")
"""Flags that have no place beside weights to start from, and those of a session that has ended."""
DECIDED_BY_WEIGHTS += ("resume_from_checkpoint", "overwrite_output_dir", "stop_after_step")


class Start:
    """The point at which a session begins. Made by all processes.

    Args:
        accelerator, recipe, settings: the run's.
        argv: flags of the run.
        folder: the output folder.
        copies: where checkpoints are beside it.

    Attributes:
        checkpoint: folder to go on from; None: there is none.
        state: what had been reached there.

    Raises:
        UsageError: the checkpoint is damaged, or of another recipe.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        settings: RunSettings,
        argv: Sequence[str],
        folder: OutputFolder,
        copies: Copies,
    ):
        self.recipe, self.argv, self.folder, self.copies = recipe, list(argv), folder, copies
        resume = settings.resume_from_checkpoint
        if resume == "latest":
            checkpoint.share_newest(copies.peers, folder.output_dir)
        self.checkpoint, self.state = checkpoint.find(accelerator, resume, folder.output_dir, recipe, copies.store)
        if self.checkpoint is not None:
            self.checkpoint = copies.peers.find_here(self.checkpoint)

    @functools.cached_property
    def date(self) -> str:
        """The day on which the run began, in ISO's format. Asked for by all processes."""
        date = self.state.data_fingerprints.get("date") or self.folder.date or datetime.date.today().isoformat()
        (date,) = broadcast_object_list([date])  # processes may start on both sides of midnight
        return date

    @property
    def stages(self) -> Sequence[Any]:
        """Stages of a batch that grows, as they were decided so far."""
        return (self.state.growth or {"stages": ()})["stages"]

    def check_earlier_steps(self, plan: Plan, reduction: Reduction) -> str | None:
        """Check that a checkpoint of a recipe with another length, decay or growth has taken the same steps so far.

        So a finished training goes on from its stable part, before its learning rate fell, with any length and decay.

        Args:
            plan: of the whole training.
            reduction: how gradients become the step's.

        Returns:
            What differs; None: nothing does.

        Raises:
            UsageError: a step so far had other samples, or another learning rate.
        """
        folder, recipe, done = self.checkpoint, self.recipe, self.state.step
        earlier = None if folder is None else checkpoint.read_earlier_recipe(folder, self.state, recipe)
        if folder is None or earlier is None:
            return None
        order, num_steps, schedule = plan_training(earlier, plan.order.num_samples, plan.order.mixture, self.stages)
        changes = "; ".join(
            f"{name} {getattr(earlier, name)} there, {getattr(recipe, name)} here"
            for name in checkpoint.LATER_FIELDS
            if getattr(recipe, name) != getattr(earlier, name)
        )
        numbers = (dataclasses.replace(each.scaled_hyperparameters(), learning_rate=0.0) for each in (recipe, earlier))
        is_same = len(set(numbers)) == 1
        if done == num_steps != plan.num_steps:
            reduction.check_longer(folder, num_steps, plan.num_steps)
        pairs = (order.spans.find, plan.order.spans.find), (schedule, plan.schedule)
        parting = next((step for step in range(done) if any(a(step) != b(step) for a, b in pairs)), done)
        if not is_same or parting < done:
            steps = [int(path.name.split("-")[1]) for path in checkpoint.checkpoints(folder.parent)]
            fitting = [f"checkpoint-{step}" for step in steps if step <= parting] if is_same else []
            if (
                is_same
                and not fitting  # from which it would go on exactly
                and done == num_steps < plan.num_steps
                and (command := self._continue_elsewhere(folder.parent, earlier, num_steps, plan.num_steps))
            ):
                raise UsageError(
                    f"checkpoint {folder} is the end of a training of {num_steps} steps, whose learning rate has "
                    f"fallen since step {parting}. One of {plan.num_steps} would have been another one from there. To train "
                    f"on from what it left, with a warm-up and a decay of its own: {command}"
                )
            where = f"{fitting[-1]} is one" if fitting else "there is none beside it"
            raise UsageError(
                f"checkpoint {folder} is of another recipe, whose steps part from this one's after step "
                f"{parting if is_same else 0}: {changes}. Resume from a checkpoint up to there ({where}), or with "
                f"{folder / 'recipe.yaml'}"
            )
        return (
            f"going on from step {done} of a training of {num_steps}, whose steps so far are those of this one of "
            f"{plan.num_steps}: {changes}"
        )

    def _continue_elsewhere(self, result: Path, earlier: Any, num_done: int, num_steps: int) -> str | None:
        """Write the command that trains on from what a finished training left, for the rest of the length that was asked for.

        Args:
            result: the folder of that training.
            earlier: its recipe.
            num_done: its steps.
            num_steps: steps that were asked for.

        Returns:
            The command; None: such a recipe starts from no weights, or there are none.
        """
        recipe = self.recipe
        has_result = any((result / name).exists() for name in ("config.json", "adapter_config.json"))
        if not hasattr(recipe, "model_name_or_path") or not has_result:
            return None
        length: dict[str, Any] = {"max_train_steps": num_steps - num_done}
        if recipe.num_train_epochs is not None and earlier.num_train_epochs is not None:
            length = {"num_train_epochs": f"{recipe.num_train_epochs - earlier.num_train_epochs:g}"}
        flags = {"model_name_or_path": result, "output_dir": f"{result}-more", **length}
        words = rehearsal.find_command(self.argv)
        kept = drop_flags(self.argv, {*flags, *DECIDED_BY_WEIGHTS, "num_train_epochs", "max_train_steps"})
        new = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return shlex.join([*words[: len(words) - len(self.argv)], *kept, *new])
