"""A run of a recipe on the hardware at hand: the work that a script's loop leaves to objects because it is rare or long.

`Run` makes the Accelerator, finds the checkpoint to go on from, cuts the steps, saves, logs, evaluates. Its `steps` are
`RunStep`s: context managers around a script's code for one optimizer step. When memory runs out in a step, all processes throw
their gradients away and `steps` gives the same step again, in smaller micro-batches: the same samples, so the same gradient.
"""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep import interrupt
from samestep._internals import torch_distributed
from samestep._internals.library_output import quiet_libraries
from samestep.cut.layout import solve_layout
from samestep.data.row_report import report_rows
from samestep.data.steps import StepData, check_data, check_terms
from samestep.errors import UsageError
from samestep.models.pretrained import find_config
from samestep.models.summed_losses import SummedLosses
from samestep.printing import fold
from samestep.recipe import run_settings
from samestep.step.batch_norm import StepStatistics
from samestep.training import checkpoint, launch, micro_batch_size, publishing, ways
from samestep.training.evaluation import evaluate
from samestep.training.network import Network, make_network
from samestep.training.output_folder import open_output_dir
from samestep.training.parts import Part, collect_state, find_part
from samestep.training.plan import Plan, cut_steps
from samestep.training.recovery import Recovery
from samestep.training.reduction import HasEnded
from samestep.training.report import RunLog
from samestep.training.run_step import RunStep
from samestep.training.session_texts import describe_session, explain_early_end
from samestep.training.starting import Start
from samestep.training.step import Step


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
    network: Network
    recovery: Recovery

    def __init__(self, argv: Sequence[str], task: str | Sequence[str], description: str):
        notes: list[str] = []
        self.recipe, self.settings = run_settings.parse(
            argv, task, description, find_config=find_config, say=notes.append
        )
        interrupt.outlive_readers()
        quiet_libraries()
        settings, options = self.settings, {"recipe": self.recipe} | self.settings.accelerator_options
        kind = ways.choose_accelerator(settings)
        self.accelerator = accelerator = launch.create_accelerator(kind=kind, **options)
        self.say(*notes)
        if settings.rehearse:
            arguments = argv, task, description
            self.recipe = ways.rehearse(accelerator, self.recipe, self.output_dir, arguments, self.say)
        self.reduction = ways.choose_reduction(accelerator, self.recipe, settings)
        layout = solve_layout(
            num_processes=self.reduction.num_parts or accelerator.num_processes,
            global_batch_size=self.recipe.global_batch_size,
            per_device_train_batch_size=ways.choose_batch_size(accelerator, self.recipe, settings),
            gradient_accumulation_steps=settings.gradient_accumulation_steps,
        )
        self.folder = ways.choose_folder(settings)
        open_output_dir(accelerator, settings, self.folder)
        self.reduction.join(self.folder)
        copies = ways.open_copies(accelerator, settings)
        self.start = Start(accelerator, self.recipe, settings, argv, self.folder, copies)
        self.reduction.check_checkpoint(self.start.checkpoint, self.start.state, self.say)
        self.plan = Plan(self.recipe, settings, layout)
        self.parts: list[Part] = []
        self.completed_steps = self.start.state.step
        self.has_stopped_early = False
        self.problem: str | None = None

    def say(self, *texts: str) -> None:
        """Print texts on process 0, folded where the terminal is narrow."""
        for text in texts:
            self.accelerator.print(fold(text))

    @property
    def output_dir(self) -> Path:
        return Path(self.settings.output_dir)

    @property
    def num_steps(self) -> int:
        return self.plan.num_steps

    @property
    def loss_weights(self) -> torch.Tensor:
        return self.network.loss_weights

    @property
    def bare_model(self) -> SummedLosses:
        """The model without wrapping; known after `prepare`."""
        return self.network.bare_model

    @property
    def date(self) -> str:
        return self.start.date

    @functools.cached_property
    def log(self) -> RunLog:
        return find_part(self.parts, RunLog)

    def load_data(self, build: Callable[..., tuple[Any, Any]], *options: Any) -> tuple[Any, Any]:
        """Load the training data and the held-out data (None: none), and lay out the steps of the training.

        Args:
            build: function of a module of `samestep.data`, called with the recipe, the number of workers and `options`.
        """
        with self.accelerator.local_main_process_first():
            build = ways.choose_build(self.recipe, build)
            self.data = check_data(build(self.recipe, self.settings.preprocessing_num_workers, *options))
        train, held_out = self.data
        if held_out is None:
            self.say("nothing is held out, so nothing is evaluated: --validation_fraction 0.1 holds out a tenth")
        report_rows(train, ways.find_list_folder(self), self.say)
        mixture = getattr(train, "mixture", ())
        num_uses = sum(uses for _, uses in mixture) if mixture else getattr(train, "num_samples", len(train))
        self.plan.lay_out(num_uses, mixture, self.start.stages)
        if changes := self.start.check_earlier_steps(self.plan, self.reduction):
            self.say(changes)
        if self.settings.rehearse:
            self.plan.shorten()
        return train, held_out

    def prepare(self, model_class: type[SummedLosses], train: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make the model and the optimizer, as the checkpoint has them if there is one, ready for `accelerator.accumulate`.

        With --speed auto the model takes the fastest of its kernels.

        Args:
            model_class: class of a module of `samestep.models`.
            train: as `load_data` returned it.
        """
        accelerator, start, reduction = self.accelerator, self.start, self.reduction
        self.network = make_network(self, model_class, train)
        trained = self.network.trained
        cut = cut_steps(self, train)
        step, describe = start.state.step, functools.partial(collect_state, self.parts)
        self.saver = checkpoint.Saver(
            accelerator, self.recipe, self.settings, trained, step, reduction, describe, start.copies
        )
        ways.make_parts(self, self.parts)
        self.recovery = Recovery(accelerator, cut, trained.model, trained.optimizer, self.log, reduction, self.saver)
        reduction.attach(self.recovery, start.state, trained.data_fingerprints)
        return trained.model, trained.optimizer

    def add_reference(self, model_class: type[SummedLosses]) -> None:
        """Give pairs their log-probabilities under the model with which the training begins. Called by all processes.

        Args:
            model_class: class of a module of `samestep.models`.
        """
        ways.add_reference(self, model_class)

    def whole_step(self) -> StepStatistics:
        """Make the object that knows of whole steps what a micro-batch does not, for `RunStep.find_statistics`.

        It does nothing unless the recipe asks for it (exact_batch_norm, router_loss, router_z_loss_weight).
        """
        return ways.make_statistics(self)

    def whole_batch(self) -> Any:
        """Make what computes a loss of all samples of a step: `samestep.contrib.whole_batch.run_loss.RunLoss`."""
        return ways.make_whole_batch(self)

    def steps(self, train: Any) -> Iterator[RunStep]:
        """Iterate over the optimizer steps from the checkpoint's on, one for each, and again for each that failed.

        Before the first step, sizes of micro-batches are tried for memory and speed; after each step, its metrics are noted,
        and a checkpoint is saved if one is due. Ends early when a signal or --max_train_minutes asks for it.

        Args:
            train: as `load_data` returned it.

        Raises:
            RunError: memory does not hold a single sample, or numbers are not finite.
        """
        settings, recovery = self.settings, self.recovery
        check_terms(train, self.recipe.loss_weights)
        if not settings.rehearse and not self.reduction.is_exact:  # whose size decides the bits
            micro_batch_size.fit_micro_batch(recovery, self.network.forward_backward)
        self.say(describe_session(self, train))
        self.reduction.announce(self.log, self.completed_steps)
        for part in self.parts:
            part.start()
        self.network.model.train()
        is_at_end = False
        while not is_at_end:
            yield from self._iterate_steps()
            is_at_end = self.completed_steps >= self.plan.last_step or recovery.should_stop or self.reduction.has_ended

    def _iterate_steps(self) -> Iterator[RunStep]:
        """Iterate over the steps, until the plan changes, which was not known when they were prepared."""
        recovery, order, workers = self.recovery, self.plan.order, self.settings.dataloader_num_workers
        stream = recovery.steps.stream(self.completed_steps, self.plan.last_step, workers, self.accelerator.device)
        for part in self.parts:
            stream = part.watch(stream)
        with contextlib.suppress(HasEnded):
            for data in stream:
                yield from self._take_step(data)
                # Others may be at another step; steps of another plan are others
                is_next = self.completed_steps == data.step + 1 and self.plan.order is order
                if recovery.should_stop or not is_next:
                    return

    def _take_step(self, data: StepData) -> Iterator[RunStep]:
        """Give the next step, and again where it fails; let parts note it, and save a checkpoint if one is due."""
        recovery, every = self.recovery, self.settings.checkpointing_steps
        for attempt in recovery.iterate_attempts(data):
            self.completed_steps = attempt.data.step
            step = RunStep(self, attempt)
            yield step
            step.check_entry()
        for part in self.parts:
            part.end_step(step)
        self.completed_steps += 1
        if recovery.should_stop:
            return
        is_due = self.completed_steps % every == 0 if every else recovery.should_save
        is_due = is_due and self.reduction.may_save(step.index, self.num_steps)
        if is_due and self.completed_steps < self.plan.last_step:
            saving = recovery.save(self.completed_steps, is_routine=every is None) if self.reduction.saves else 0.0
            recovery.restart_save_clock(saving)

    def evaluates_before(self, step: Step) -> bool:
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
        publishing.save_best(self, model)

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
        ends_the_run = self.reduction.ends_the_run(self)
        if ends_the_run and self.completed_steps > self.start.state.step:
            self.recovery.save(self.completed_steps)
        if ends_the_run and self.completed_steps == self.num_steps:
            evaluate()
        for part in self.parts:
            part.close()
        self.recovery.end_session()
        if not ends_the_run:
            return None
        if not self.is_finished and not self.settings.rehearse:
            self.say(explain_early_end(self))
        trained_model = self.network.make_whole_model()
        return trained_model if self.is_finished and self.accelerator.is_main_process else None

    def publish(
        self,
        usage: str,
        best_step: int | None = None,
        facts: Mapping[str, float] | None = None,
        problem: str | None = None,
    ) -> None:
        """Write all_results.json, and what parts of the run write about it: loss.png, the model card, an upload to the hub.

        Called by process 0, after the model was saved in the output folder.

        Args:
            usage: lines of Python that load the saved model; OUTPUT_DIR stands for the folder.
            best_step: step of the saved model, whose evaluation is reported; None: the last one.
            facts: further results, name -> number; None: there are none.
            problem: what went wrong with the saved model, for `close` to raise; None: nothing.
        """
        self.problem = problem
        is_shown = not self.settings.rehearse  # a rehearsal's model is of no use, and its folder may be deleted
        with contextlib.nullcontext() if is_shown else contextlib.redirect_stdout(io.StringIO()):
            publishing.publish(self, usage, best_step, facts or {})

    def close(self) -> int:
        """Let go of the process group and of all that uses it. Called by all processes, last.

        Returns:
            Exit code: 0, or the one that tells a scheduler to start the run again.

        Raises:
            UsageError: `publish` was told of a problem.
        """
        status, trained = self.recovery.close(self.is_finished), self.network.trained
        self.reduction.close()
        torch_distributed.release(trained.model)
        trained.model, trained.optimizer = self.accelerator.free_memory(trained.model, trained.optimizer)
        self.accelerator.end_training()
        self.parts.clear()  # they know the run
        if self.problem is not None:
            raise UsageError(self.problem)
        return status


def report_more(run: Run, data: Any) -> None:
    """Say what became of the rows of further data, and list those that are left out beside the others."""
    report_rows(data, ways.find_list_folder(run), run.say, is_more=True)
