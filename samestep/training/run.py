"""A run of a recipe on the hardware at hand: the work that a script's loop leaves to objects because it is rare or long.

`Run` makes the Accelerator, finds the checkpoint to go on from, cuts the steps, saves, logs, evaluates. Its `steps` are
`Step`s: context managers around a script's code for one optimizer step. When memory runs out in a step, all processes throw
their gradients away and `steps` gives the same step again, in smaller micro-batches: the same samples, so the same gradient.
"""

import contextlib
import dataclasses
import datetime
import functools
import io
import math
import os
import shlex
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from samestep import interrupt
from samestep._internals import torch_distributed
from samestep._internals.library_output import quiet_libraries
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.row_report import write_skipped
from samestep.data.steps import MicroBatch, StepData, Steps, find_terms_without_target, to_device
from samestep.errors import UsageError
from samestep.models import pretrained, small_model
from samestep.models.summed_losses import SummedLosses
from samestep.printing import fold
from samestep.recipe import rehearsal, run_settings
from samestep.recipe.batch_schedule import parse
from samestep.recipe.batch_size import Measurement
from samestep.recipe.ramp import NoiseFollower
from samestep.recipe.recipe import Recipe
from samestep.recipe.settings import drop_flags
from samestep.recipe.step_plan import describe_sizes, plan_steps
from samestep.recipe.tasks.causal_lm_finetuning import CausalLmFineTuning
from samestep.step import accumulate, batch_norm, losses, noise, optim
from samestep.step.noise_scale import NoiseMeter, TermMeter
from samestep.training import card, checkpoint, digest, host_memory, kernels, launch, micro_batch_size, report
from samestep.training.evaluation import evaluate
from samestep.training.recovery import Attempt, Recovery
from samestep.training.reduction import HasEnded
from samestep.training.stragglers import StepClock
from samestep.training.ways import choose_reduction, find_peers, open_store

DECIDED_BY_WEIGHTS = (*CausalLmFineTuning.SHAPE, "architecture", "vocab_size", "tokenizer_name")
"""Flags that have no place beside weights to start from, and those of a session that has ended."""
DECIDED_BY_WEIGHTS += ("resume_from_checkpoint", "overwrite_output_dir", "stop_after_step")


class Run:
    """One run of a recipe.

    Args:
        argv: flags of the recipe and of the run.
        task: task of the recipes that the script trains; several: any of them.
        description: description of the script, for --help.

    Attributes:
        recipe: decides the steps; its file, with the flags in place of its values.
        settings: decides how the recipe is run here.
        accelerator: Accelerate's `Accelerator`.
        output_dir: folder of all results.
        loss_weights: w_j, floating [terms] on the device; known after `prepare`.
        num_steps: optimizer steps of the whole training; known after `load_data`.
        completed_steps: optimizer steps so far, those before the checkpoint included.
        date: the day on which the run began, in ISO's format: what a chat template reads from the clock.
        log: writes metrics, and has the evaluations so far; known after `prepare`.

    Raises:
        UsageError: bad flags, recipe, launch, output folder or checkpoint.
    """

    recipe: Any  # of the task's class

    def __init__(self, argv: Sequence[str], task: str | Sequence[str], description: str):
        notes: list[str] = []
        self.recipe, self.settings = run_settings.parse(
            argv, task, description, find_config=pretrained.find_config, say=notes.append
        )
        self.argv = list(argv)
        interrupt.outlive_readers()
        quiet_libraries()
        self.output_dir = Path(self.settings.output_dir)
        self.accelerator = launch.create_accelerator(recipe=self.recipe, **self.settings.accelerator_options)
        self._say(*notes)
        if self.settings.rehearse:
            self._rehearse_own_kind(argv, task, description)
        self.reduction = choose_reduction(self.accelerator, self.recipe, self.settings)
        self.layout = solve_layout(
            num_processes=self.reduction.num_workers or self.accelerator.num_processes,
            global_batch_size=self.recipe.global_batch_size,
            per_device_train_batch_size=host_memory.choose_batch_size(self.accelerator, self.recipe, self.settings),
            gradient_accumulation_steps=self.settings.gradient_accumulation_steps,
        )
        self.folder = report.open_output_dir(self.accelerator, self.settings)
        self.reduction.join(self.folder)
        self.store = open_store(self.accelerator, self.settings)
        resume = self.settings.resume_from_checkpoint
        self.peers = find_peers(self.accelerator, self.settings)
        if resume == "latest":
            checkpoint.share_newest(self.peers, self.output_dir)
        self.checkpoint, self.start = checkpoint.find(
            self.accelerator, resume, self.output_dir, self.recipe, self.store
        )
        if self.checkpoint is not None:
            self.checkpoint = self.peers.find_here(self.checkpoint)
        self.reduction.check_checkpoint(self.checkpoint, self.start, self._say)
        self.completed_steps = self.start.step
        self.has_stopped_early = self.has_ended_elsewhere = False
        self.problem: str | None = None

    def _rehearse_own_kind(self, argv: Sequence[str], task: str | Sequence[str], description: str) -> None:
        """Let a rehearsal train a small model of the kind that the recipe fine-tunes, of which the first session makes one.

        Where none can be made, it trains a small Llama, and says so.
        """
        find_config, no_rehearsal = pretrained.find_config, [*argv, "--rehearse", "false"]
        recipe, _ = run_settings.parse(no_rehearsal, task, description, find_config=find_config)
        if not isinstance(recipe, CausalLmFineTuning) or recipe.model_name_or_path is None:
            return
        folder = self.output_dir / rehearsal.START
        answer: list[str | None] = [None]
        if self.accelerator.is_main_process:
            try:
                if os.environ.get(rehearsal.SESSION, "0") == "0":
                    shutil.rmtree(folder, ignore_errors=True)
                    torch.manual_seed(recipe.seed)
                    small_model.make(recipe, folder)
                answer = [None if folder.exists() else ""]  # the first session has said why
            except UsageError as error:
                answer = [f"{error}: this rehearsal trains a small Llama instead"]
        (problem,) = broadcast_object_list(answer)
        if problem is not None:
            self._say(*[problem] * bool(problem))
            return
        tokenizer = recipe.tokenizer_name or recipe.model_name_or_path
        self.recipe = recipe.rehearsed({"model_name_or_path": str(folder), "tokenizer_name": tokenizer})

    def _say(self, *texts: str) -> None:
        """Print texts on process 0, folded where the terminal is narrow."""
        for text in texts:
            self.accelerator.print(fold(text))

    @functools.cached_property
    def date(self) -> str:
        """The day on which the run began, also where it is resumed or joined on another. Asked for by all processes."""
        joined = "" if self.folder is None else self.folder.date
        date = self.start.data_fingerprints.get("date") or joined or datetime.date.today().isoformat()
        (date,) = broadcast_object_list([date])  # processes may start on both sides of midnight
        return date

    def load_data(self, build: Callable[..., tuple[Any, Any]], *options: Any) -> tuple[Any, Any]:
        """Load the training data and the held-out data (None: none), and lay out the steps of the training.

        Args:
            build: function of a module of `samestep.data`, called with the recipe, the number of workers and `options`.
        """
        with self.accelerator.local_main_process_first():
            train, held_out = build(self.recipe, self.settings.preprocessing_num_workers, *options)
        self.train, self.held_out = train, held_out
        recipe = self.recipe
        if self.held_out is None:
            self._say("nothing is held out, so nothing is evaluated: --validation_fraction 0.1 holds out a tenth")
        reports = getattr(train, "row_reports", ())
        self._say(*map(str, reports))
        if reports and self.accelerator.is_main_process and (file := write_skipped(self.output_dir, reports)):
            self._say(f"skipped rows are listed in {file}")
        if (report := getattr(train, "mask_report", None)) is not None:
            self._say(str(report))
        mixture = getattr(train, "mixture", ())
        num_uses = sum(uses for _, uses in mixture) if mixture else len(train)
        self.follower: NoiseFollower | None = None
        if recipe.batch_schedule is not None and (growth := parse(recipe.batch_schedule)).kind == "noise":
            self.follower = NoiseFollower(growth, recipe.global_batch_size, self.start.growth)
        self.order, self.num_steps, self.schedule = self._plan_steps(recipe, num_uses, mixture)
        if self.checkpoint is not None:
            self._check_earlier_steps(num_uses, mixture)
        if self.settings.rehearse:
            self.num_steps = min(self.num_steps, rehearsal.NUM_STEPS)
        self.last_step = min(self.num_steps, self.settings.stop_after_step or self.num_steps)
        return train, held_out

    def _plan_steps(self, recipe: Recipe, num_samples: int, mixture: tuple) -> tuple[Order, int, Any]:
        """Plan the steps of a recipe: the samples of each, how many they are, the learning rate of each."""
        order = Order(num_samples, recipe.global_batch_size, recipe.seed, recipe.epoch_end, mixture)
        if recipe.batch_schedule is not None:
            decided = self.follower.stages if self.follower else (self.start.growth or {"stages": ()})["stages"]
            plan = plan_steps(recipe, num_samples, decided)
            return dataclasses.replace(order, stages=plan.stages), plan.num_steps, plan.schedule
        num_steps = recipe.max_train_steps or order.num_steps(recipe.num_train_epochs)
        return order, num_steps, recipe.schedule(num_steps, float(order.steps_per_epoch))

    def _check_earlier_steps(self, num_samples: int, mixture: tuple) -> None:
        """Check that a checkpoint of a recipe with another length, decay or growth has taken the same steps so far.

        So a finished training goes on from its stable part, before its learning rate fell, with any length and decay.

        Raises:
            UsageError: a step so far had other samples, or another learning rate.
        """
        recipe, done = self.recipe, self.start.step
        earlier = checkpoint.read_earlier_recipe(self.checkpoint, self.start, recipe)
        if earlier is None:
            return
        order, num_steps, schedule = self._plan_steps(earlier, num_samples, mixture)
        changes = "; ".join(
            f"{name} {getattr(earlier, name)} there, {getattr(recipe, name)} here"
            for name in checkpoint.LATER_FIELDS
            if getattr(recipe, name) != getattr(earlier, name)
        )
        numbers = (dataclasses.replace(each.scaled_hyperparameters(), learning_rate=0.0) for each in (recipe, earlier))
        is_same, found = len(set(numbers)) == 1, recipe.exchange
        if found is not None and found.is_local and done == num_steps != self.num_steps and done % found.num_steps:
            raise UsageError(
                f"checkpoint {self.checkpoint} is the end of a training of {num_steps} steps, at which workers exchanged "
                f"their parameters, but one of {self.num_steps} steps has no exchange there: resume from an earlier one"
            )
        pairs = (order.spans.find, self.order.spans.find), (schedule, self.schedule)
        parting = next((step for step in range(done) if any(a(step) != b(step) for a, b in pairs)), done)
        if not is_same or parting < done:
            steps = [int(path.name.split("-")[1]) for path in checkpoint.checkpoints(self.checkpoint.parent)]
            fitting = [f"checkpoint-{step}" for step in steps if step <= parting] if is_same else []
            if (
                is_same
                and not fitting  # from which it would go on exactly
                and done == num_steps < self.num_steps
                and (command := self._continue_elsewhere(earlier, num_steps))
            ):
                raise UsageError(
                    f"checkpoint {self.checkpoint} is the end of a training of {num_steps} steps, whose learning rate has "
                    f"fallen since step {parting}: one of {self.num_steps} would have been another one from there. To train "
                    f"on from what it left, with a warm-up and a decay of its own: {command}"
                )
            where = f"{fitting[-1]} is one" if fitting else "there is none beside it"
            raise UsageError(
                f"checkpoint {self.checkpoint} is of another recipe, whose steps part from this one's after step "
                f"{parting if is_same else 0}: {changes}. Resume from a checkpoint up to there ({where}), or with "
                f"{self.checkpoint / 'recipe.yaml'}"
            )
        self._say(
            f"going on from step {done} of a training of {num_steps}, whose steps so far are those of this one of "
            f"{self.num_steps}: {changes}"
        )

    def _continue_elsewhere(self, earlier: Recipe, num_steps: int) -> str | None:
        """Write the command that trains on from what a finished training left, for the rest of the length that was asked for.

        Args:
            earlier: the recipe of that training; `num_steps`: its steps.

        Returns:
            The command; None: such a recipe starts from no weights, or there are none.
        """
        recipe, result = self.recipe, self.checkpoint.parent
        has_result = any((result / name).exists() for name in ("config.json", "adapter_config.json"))
        if not hasattr(recipe, "model_name_or_path") or not has_result:
            return None
        length: dict[str, Any] = {"max_train_steps": self.num_steps - num_steps}
        if recipe.num_train_epochs is not None and earlier.num_train_epochs is not None:
            length = {"num_train_epochs": f"{recipe.num_train_epochs - earlier.num_train_epochs:g}"}
        flags = {"model_name_or_path": result, "output_dir": f"{result}-more", **length}
        words = rehearsal.find_command(self.argv)
        kept = drop_flags(self.argv, {*flags, *DECIDED_BY_WEIGHTS, "num_train_epochs", "max_train_steps"})
        new = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return shlex.join([*words[: len(words) - len(self.argv)], *kept, *new])

    def _follow_noise(self, step: "Step") -> bool:
        """Let the batch grow if the noise of a measured step says so; whether it does. Called by all processes."""
        if self.follower is None or step.noise is None:
            return False
        signal, own = step.noise.sum(1).tolist()
        size = None
        if math.isfinite(signal + own):
            measured = Measurement(step.index + 1, *(float(f"{x:.6g}") for x in (signal, own * step.data.num_samples)))
            size = self.follower.add(measured)
        (size,) = broadcast_object_list([size])  # process 0 decides, whatever others have in their last digit
        if size is None:
            return False
        self.follower.grow(self.order.spans.find(step.index + 1)[0], size)
        order, self.num_steps, self.schedule = self._plan_steps(self.recipe, self.order.num_samples, self.order.mixture)
        self.order = self.recovery.steps.order = order
        self.last_step = min(self.num_steps, self.settings.stop_after_step or self.num_steps)
        text = self.follower.describe(self.follower.growth.rate)
        self.log.change_length(self.num_steps, order.spans)
        self.log.add_event(
            step.index + 1, "the batch grows with the noise", batch=size, num_steps=self.num_steps, so_far=text
        )
        return True

    def _describe_growth(self) -> str:
        """Say how the batch grows, after the layout in the first line of a run; nothing where it stays."""
        if not self.order.stages:
            return ""
        return f"; {describe_sizes(self.order.spans.list_sizes(self.num_steps))}"

    def prepare(self, model_class: type[SummedLosses], train: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make the model and the optimizer, as the checkpoint has them if there is one, ready for `accelerator.accumulate`.

        With --speed auto the model takes the fastest of its kernels.

        Args:
            model_class: class of a module of `samestep.models`.
            train: as `load_data` returned it.
        """
        recipe, settings, accelerator = self.recipe, self.settings, self.accelerator
        torch.manual_seed(recipe.seed)
        self.build = lambda: model_class.from_recipe(recipe, train).to(getattr(torch, settings.dtype))
        self.bare_model = model = self.build()
        self.noise = noise.noise_by_sample(model, recipe.seed)
        notes = [*model.notes, *self.noise.notes, *optim.find_notes(recipe)]
        self._say(*notes)
        candidates = model.kernel_candidates(accelerator.device, accelerator.mixed_precision, settings)
        kernels.choose(accelerator, recipe, settings, model, train, candidates)
        kernel = pretrained.find_noisy_kernel(model)
        if kernel and settings.reproducible is None:
            self._say(
                f"attention dropout with attn_implementation {kernel}: the kernel draws its own noise, per process and "
                "micro-batch, so that another layout's losses differ by it, unlike with --attn_implementation eager; samples, "
                "batch, learning rate, masks and all other dropout do not"
            )
        if getattr(settings, "gradient_checkpointing", False):
            model.recompute_activations()
        if getattr(settings, "torch_compile", False):
            model.compile_layers()
        (batch_norm.freeze if getattr(recipe, "normalization", None) == "frozen" else batch_norm.synchronize)(model)
        fingerprints = train.fingerprints | checkpoint.fingerprint_frozen(model)
        optimizer = optim.from_recipe(model, recipe)
        names = checkpoint.name_parameters(self.bare_model)
        model, optimizer = self.reduction.prepare(model, optimizer, names, self.start)
        self.model, self.optimizer, self.parameters = model, optimizer, list(model.parameters())
        weights = list(recipe.loss_weights.values())
        self.loss_weights = torch.tensor(weights, dtype=getattr(torch, settings.dtype), device=accelerator.device)
        cut = Steps(
            train,
            self.order,
            self.layout,
            process_index=accelerator.process_index,
            max_tokens=getattr(settings, "per_device_train_tokens", None),
            same_num_micro_batches=launch.waits_in_forward(accelerator, model),
            deals_whole=self.reduction.is_exact,
            noise_scale_steps=settings.noise_scale_steps,
            workers=self.reduction.own,
        )
        if self.checkpoint is not None:
            checkpoint.load(accelerator, self.checkpoint, self.start, model, optimizer, fingerprints)
            self.reduction.load(self.checkpoint)
        tokenizer = getattr(train, "tokenizer", None)
        saver = checkpoint.Saver(
            accelerator,
            recipe,
            model,
            optimizer,
            fingerprints,
            settings,
            self.start,
            self.reduction,
            tokenizer,
            lambda: None if self.follower is None else self.follower.record,
            self.store,
            self.peers,
        )
        spans = self.order.spans if self.order.stages else None
        self.log = report.RunLog(
            accelerator, recipe, settings, self.start, self.num_steps, saver, self.reduction, spans, self.folder
        )
        self.step_clock = StepClock(accelerator, self.bare_model)
        self.digests = digest.Digests(accelerator, names, optimizer, settings.digest_steps)
        self.noise_meter = self.term_meter = None
        if settings.noise_scale_steps is not None:
            self.noise_meter = NoiseMeter(names, self.reduction.exact_sum)
            if sum(weight > 0 for weight in weights) > 1:
                dtype = torch.float64 if self.reduction.is_exact else None
                self.term_meter = TermMeter(list(names.values()), len(weights), dtype)
        self.recovery = Recovery(accelerator, cut, model, optimizer, self.log, self.reduction)
        self.reduction.attach(self.recovery, self.start, fingerprints)
        return model, optimizer

    def whole_step(self) -> batch_norm.WholeStep:
        """Make the object that computes batch normalisation of whole steps, for `Step.find_statistics`.

        It does nothing unless the recipe asks for that (exact_batch_norm).
        """
        return batch_norm.WholeStep(
            self.bare_model if self.recipe.exact_batch_norm else nn.Identity(), is_canonical=self.reduction.is_exact
        )

    def steps(self, train: Any) -> Iterator["Step"]:
        """Iterate over the optimizer steps from the checkpoint's on, one `Step` for each, and again for each that failed.

        Before the first step, sizes of micro-batches are tried for memory and speed; after each step, its metrics are noted,
        and a checkpoint is saved if one is due. Ends early when a signal or --max_train_minutes asks for it.

        Args:
            train: as `load_data` returned it.

        Raises:
            RunError: memory does not hold a single sample, or numbers are not finite.
        """
        accelerator, settings, recovery = self.accelerator, self.settings, self.recovery
        self._check_targets(train)
        if not settings.rehearse and not self.reduction.is_exact:  # whose size decides the bits
            micro_batch_size.fit(recovery, self._forward_backward)
        if getattr(self.recipe, "normalization", None) == "batch":
            micro_batch_size.measure_batch_norm(recovery, self.bare_model, self.compute_loss)
        weights = getattr(self.recipe, "model_name_or_path", None)
        self._say(
            f"{train}; {f'weights of {weights}' if weights else 'random weights'}; "
            f"{self.reduction.describe_cut(recovery.steps.layout)}"
            f"{self._describe_growth()}; on {accelerator.device}, mixed precision {accelerator.mixed_precision}; steps "
            f"{self.completed_steps} to {self.last_step} of {self.num_steps}{self.reduction.describe_bits()}"
        )
        self.reduction.announce(self.log, self.completed_steps)
        self.log.start()
        self.model.train()
        is_at_end = False
        while not is_at_end:
            yield from self._iterate_steps()
            is_at_end = self.completed_steps >= self.last_step or recovery.should_stop or self.has_ended_elsewhere

    def _check_targets(self, train: Any) -> None:
        """Check that each loss term has a target in the training data: one without is 0 to the end.

        Raises:
            UsageError: names the terms.
        """
        weights = self.recipe.loss_weights
        names = [name for name in find_terms_without_target(train, list(weights)) if weights[name]]
        if names:
            raise UsageError(
                f"the training data have no target of the loss {', '.join(names)}, which would be 0 in every step: look at the "
                "rows, the tokenizer and the lengths, or set the weight of the loss to 0"
            )

    def _iterate_steps(self) -> Iterator["Step"]:
        """Iterate over the steps, until the batch grows with the noise, which was not known when they were prepared."""
        accelerator, settings, recovery = self.accelerator, self.settings, self.recovery
        workers = settings.dataloader_num_workers
        try:
            stream = recovery.steps.stream(self.completed_steps, self.last_step, workers, accelerator.device)
            for data in self.step_clock.time_data(stream):
                has_grown = yield from self._take_step(data)
                # Others may be at another step; steps of a batch that has grown are others
                if recovery.should_stop or has_grown or self.completed_steps != data.step + 1:
                    return
        except HasEnded:
            self.has_ended_elsewhere = True

    def _take_step(self, data: StepData) -> Generator["Step", None, bool]:
        """Give the next step, and again where it fails; note its metrics, and save a checkpoint if one is due.

        Returns:
            Whether the batch has grown with the noise, so that later steps are others.
        """
        recovery, settings = self.recovery, self.settings
        for attempt in recovery.iterate_attempts(data):
            self.completed_steps = attempt.data.step
            step = Step(self, attempt)
            yield step
            step.check_entry()
        digests = self.digests.add_step(step.index + 1)
        if step.noise is not None:
            layers = self.noise_meter.groups
            self.log.add_noise(attempt.data, step.noise, layers, recovery.steps, step.noise_of_terms)
        self.log.step(
            attempt.data,
            attempt.sums,
            attempt.counts,
            step.grad_norm,
            step.learning_rate,
            digests,
            self.reduction.list_parts(attempt.data),
            self.step_clock.take(),
        )
        self.completed_steps += 1
        has_grown = self._follow_noise(step)
        if recovery.should_stop:
            return has_grown
        every = settings.checkpointing_steps
        is_due = self.completed_steps % every == 0 if every else recovery.should_save
        is_due = is_due and self.reduction.may_save(step.index, self.num_steps)
        if is_due and self.completed_steps < self.last_step:
            if self.reduction.saves:
                self.log.save(self.completed_steps, is_routine=every is None)
            recovery.restart_save_clock()
        return has_grown

    def evaluates_before(self, step: "Step") -> bool:
        """Tell whether an evaluation is due before a step: the first of a training, and every --eval_steps."""
        every = self.settings.eval_steps
        return step.index == 0 or bool(every and step.index % every == 0)

    def evaluate(self, model: nn.Module, held_out: Any) -> None:
        """Write losses and accuracies of held-out data (None: do nothing) after the steps so far, unless that was done."""
        if held_out is not None and self.completed_steps not in self.log.evaluated_steps:
            batch_size = self.settings.per_device_eval_batch_size
            self.log.add_evaluation(
                self.completed_steps, evaluate(self.accelerator, model, held_out, self.recipe.seed, batch_size)
            )

    def save_best(self, model: Any) -> None:
        """Keep a model, the best one so far, and the tokenizer in `best/` of the output folder. Called by all processes."""
        if launch.is_sharded(self.accelerator):
            whole = checkpoint.make_whole_model(self.accelerator, self.model, self.build)
            model = getattr(whole, "model", None)
        report.save_best(self.accelerator, self.output_dir, model, self.train.tokenizer)

    @property
    def is_finished(self) -> bool:
        """Whether the whole training, not only this session of it, is at its end."""
        return self.has_stopped_early or self.completed_steps == self.num_steps

    def finish(self, evaluate: Callable[[], object]) -> SummedLosses | None:
        """Save the last checkpoint and, at the end of training, evaluate. Called by all processes.

        Args:
            evaluate: called when all steps are done.

        Of launches that train together one does it; the others wait until it has done, to do it themselves if it dies.

        Returns:
            The whole model, to be published, on process 0 when the training is finished; else None.
        """
        if not self.reduction.ends_the_run(self):
            self.log.close()
            return None
        if self.completed_steps > self.start.step:
            self.log.save(self.completed_steps)
        if self.completed_steps == self.num_steps:
            evaluate()
        self.log.close()
        if not self.is_finished and not self.settings.rehearse:
            self._say(self._explain_early_end())
        trained_model = checkpoint.make_whole_model(self.accelerator, self.model, self.build)
        return trained_model if self.is_finished and self.accelerator.is_main_process else None

    def _explain_early_end(self) -> str:
        """Say why this session ended before the training did, and how to go on."""
        limit, flags = self.settings.stop_after_step, "--resume_from_checkpoint latest"
        if self.settings.overwrite_output_dir:
            flags += ", without --overwrite_output_dir"
        if limit is not None and self.completed_steps >= limit:
            why = f"stop_after_step is {limit}"
            flags += f"{' and' if self.settings.overwrite_output_dir else ', without'} --stop_after_step"
        elif self.recovery.stop.is_out_of_time:
            why = f"max_train_minutes is {self.settings.max_train_minutes:g}"
        else:
            why = "it was asked to stop"
        return (
            f"Ended after step {self.completed_steps} of {self.num_steps}, as {why}; saved in {self.output_dir}. To go on: the "
            f"same command with {flags}"
        )

    def publish(
        self,
        usage: str,
        best_step: int | None = None,
        facts: Mapping[str, float] | None = None,
        problem: str | None = None,
    ) -> None:
        """Write all_results.json, loss.png and the model card; push to the hub if asked for.

        Called by process 0, after the model was saved in the output folder.

        Args:
            usage: lines of Python that load the saved model; OUTPUT_DIR stands for the folder.
            best_step: step of the saved model, whose evaluation is reported; None: the last one.
            facts: further results, name -> number; None: there are none.
            problem: what went wrong with the saved model, for `close` to raise; None: nothing.
        """
        self.problem = problem
        training = card.Training(
            self.recipe,
            self.settings,
            self.accelerator,
            self.recovery.steps.layout,
            self.schedule,
            self.train,
            self.held_out,
            self.num_steps,
        )
        is_shown = not self.settings.rehearse  # a rehearsal's model is of no use, and its folder may be deleted
        with contextlib.nullcontext() if is_shown else contextlib.redirect_stdout(io.StringIO()):
            report.finish(self.log, usage, training, best_step, facts)

    def close(self) -> int:
        """Let go of the process group and of all that uses it. Called by all processes, last.

        Returns:
            Exit code: 0, or the one that tells a scheduler to start the run again.

        Raises:
            UsageError: `publish` was told of a problem.
        """
        status = self.recovery.close(self.is_finished)
        self.reduction.close()
        torch_distributed.release(self.model)
        self.model, self.optimizer = self.accelerator.free_memory(self.model, self.optimizer)
        self.accelerator.end_training()
        if self.problem is not None:
            raise UsageError(self.problem)
        return status

    def compute_loss(
        self, batch: MicroBatch, num_targets: torch.Tensor, model: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a micro-batch's part of the step's loss, and its summed losses.

        Args:
            batch: a micro-batch; it may be on the host.
            num_targets: targets of the whole step, int64 [terms].
            model: prepared or not.

        Returns:
            The loss, sum_j w_j s_j / n_j, scalar; the summed losses s_j, [terms], detached.
        """
        sums, _ = model(**to_device(batch, self.accelerator.device))
        return losses.weighted_loss(sums, num_targets, self.loss_weights), sums.detach()

    def _forward_backward(self, batch: MicroBatch, num_targets: torch.Tensor) -> None:
        """Compute a micro-batch as a script does, to try sizes of micro-batches."""
        loss, _ = self.compute_loss(batch, num_targets, self.model)
        self.accelerator.backward(loss * accumulate.loss_scale(self.accelerator))


class Step:
    """One optimizer step, a context manager around the code that computes it from its `micro_batches`.

    Attributes:
        index: number of the step; 0 is the first of the training.
        learning_rate: learning rate of this step, from the recipe's schedule.
        grad_norm: norm of the whole gradient before clipping, scalar on the device; known after `clip_grad_norm_`.
        noise: signal and noise of each layer's gradient, float64 [2, layers] on the device, in steps that are measured; known
            after `clip_grad_norm_`.
        noise_of_terms: the same of each loss term, float64 [2, terms]; None where there is only one.
    """

    def __init__(self, run: Run, attempt: Attempt):
        self.run, self.attempt = run, attempt
        self.index = attempt.data.step
        self.learning_rate = run.schedule(self.index)
        self.is_entered = self.is_scaled = False
        self.noise: torch.Tensor | None = None
        self.noise_of_terms: torch.Tensor | None = None

    @property
    def data(self) -> StepData:
        """This process's part of the step, as it is cut now."""
        return self.attempt.data

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of this process in this step, k."""
        return len(self.data.micro_batches)

    @property
    def loss_scale(self) -> int:
        """Factor of a micro-batch's loss, which undoes what gradients are divided by: k in `accelerator.backward`, and N, the
        number of processes, in DistributedDataParallel.

        With --reproducible gradients are divided by a power of two alone, so that no cut rounds them differently.
        """
        self.is_scaled = True
        return self.run.reduction.loss_scale

    @property
    def num_targets(self) -> torch.Tensor:
        """n_j: targets of each loss term in the whole step, all processes and micro-batches; int64 [terms], at least 1 each.

        Of a worker that takes steps of its own, those of its share.
        """
        return self.run.reduction.find_counts(self.attempt).clamp(min=1)

    @property
    def micro_batches(self) -> Iterator[MicroBatch]:
        """Tensors of each micro-batch on the device; `accelerator.accumulate` synchronises at the last one."""
        return self.run.reduction.micro_batches(self)

    def take(self, micro_batch: Mapping[str, torch.Tensor | None], samples: Any) -> MicroBatch:
        """Take a micro-batch of some samples to the device, and let noise be theirs."""
        self.run.noise.set_samples(samples, self.run.accelerator.device)
        return to_device(micro_batch, self.run.accelerator.device)

    def find_statistics(self, whole_step: batch_norm.WholeStep) -> None:
        """Find the statistics of batch normalisation over the whole step, in passes over its micro-batches.

        Where one micro-batch is the whole step, there is nothing to do: it has the step's statistics.
        """
        is_exact = self.run.reduction.is_exact
        if is_exact or self.run.recovery.steps.layout.gradient_accumulation_steps > 1:
            model, num_targets = self.run.bare_model, self.num_targets
            whole_step.prepare(
                self.data.micro_batches,
                lambda micro_batch: self.run.compute_loss(micro_batch, num_targets, model)[0],
                numbers=self.data.numbers if is_exact else None,
                num_cells=self.data.num_micro_batches if is_exact else None,
            )

    def clip_grad_norm_(self, max_norm: float | None) -> None:
        """Clip the whole step's gradient G to an L2 norm (None: leave it): G min(1, max_norm / (|G| + 1e-6)).

        Called by all processes between the last backward and the optimizer's step. The optimizer does not take a step with a
        gradient that is not finite.
        """
        self.run.reduction.check_scale(self)
        self.grad_norm = self.run.reduction.clip(self, max_norm)

    def make_gradient_whole(self) -> None:
        """Let the reduction make the gradient of the step whole, and measure it, where that is due."""
        run, scaler = self.run, self.run.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None and self.data.is_measured else 1.0
        if self.data.is_measured and run.term_meter is not None:
            self._measure_terms(scale)
        self.attempt.confirm_gradient()
        run.digests.add_gradients(self.index + 1)
        if self.data.is_measured:
            self.noise = run.noise_meter.finish(run.reduction.num_averaged, scale)
            self.noise_of_terms = None if run.term_meter is None else run.term_meter.finish(scale)

    def clip_whole_gradient(self, max_norm: float | None) -> torch.Tensor:
        """Clip the gradient that the parameters have; return its norm before, scalar. One that is not finite is not used."""
        run = self.run
        norm = run.reduction.clip_parameters(run.parameters, max_norm)
        run.recovery.skip_update_if_not_finite(norm)
        return norm

    def _measure_terms(self, scale: float) -> None:
        """Compute the gradients of the terms in the micro-batches of this step; `scale` is fp16's."""
        run, data, num_targets = self.run, self.data, self.num_targets

        def compute_losses(number: int) -> torch.Tensor:
            run.noise.set_samples(data.samples[number], run.accelerator.device)
            sums, _ = run.bare_model(**to_device(data.micro_batches[number], run.accelerator.device))
            return run.loss_weights * sums / num_targets * scale

        run.term_meter.measure(data.micro_batch_counts, self.attempt.counts, compute_losses)

    def add_to_log(self, sums: torch.Tensor) -> None:
        """Note the summed losses of a micro-batch, [terms], for the step's line in metrics.jsonl."""
        self.attempt.sums.append(sums.detach())

    def check_entry(self) -> None:
        """Raise if a script went on without entering the step, which would then be repeated for ever."""
        if not self.is_entered:
            raise UsageError(f"step {self.index + 1} was not taken: put what computes it inside `with step:`")

    def __enter__(self) -> "Step":
        self.is_entered = True
        for group in self.run.optimizer.param_groups:
            group["lr"] = self.learning_rate * group["lr_scale"]
        self.attempt.__enter__()
        self.run.step_clock.begin()
        if self.data.is_measured:
            self.run.noise_meter.begin(self.data.micro_batch_counts, self.attempt.counts)
        self.run.reduction.seed_noise(self)
        return self

    def __exit__(self, *error: Any) -> bool:
        return self.attempt.__exit__(*error)
