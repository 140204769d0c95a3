"""A run of a recipe on the hardware that there is: what a script's loop leaves to objects because it is rare or long.

`Run` makes the Accelerator, finds the checkpoint to go on from, cuts the steps, saves, logs, evaluates. Its `steps` are
`Step`s: context managers around what a script does for one optimizer step. When memory runs out in one, all processes throw
their gradients away and `steps` gives the same step again, in smaller micro-batches: the same samples, so the same gradient.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep._internals import torch_distributed
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import MicroBatch, StepData, Steps, to_device
from samestep.errors import UsageError
from samestep.models.summed_losses import SummedLosses
from samestep.recipe import run_settings
from samestep.step import accumulate, batch_norm, losses, optim
from samestep.training import checkpoint, kernels, launch, rehearsal, report
from samestep.training.evaluation import evaluate
from samestep.training.recovery import Attempt, Recovery


class Run:
    """One run of a recipe.

    Args:
        argv: flags of the recipe and of the run.
        task: which recipes the script trains.
        description: of the script, for --help.

    Attributes:
        recipe: what decides the steps, flags laid over its file.
        settings: how it is run here.
        accelerator: Accelerate's.
        output_dir: folder of all results.
        loss_weights: floating [terms] on the device; known after `prepare`.
        num_steps: optimizer steps of the whole training; known after `load_data`.
        log: what is written, and the evaluations so far; known after `prepare`.

    Raises:
        UsageError: bad flags, recipe, launch, output folder or checkpoint.
    """

    def __init__(self, argv: Sequence[str], task: str, description: str):
        self.recipe, self.settings = run_settings.parse(argv, task, description)
        self.output_dir = Path(self.settings.output_dir)
        self.accelerator = launch.create_accelerator(**self.settings.for_accelerator)
        self.layout = solve_layout(
            num_processes=self.accelerator.num_processes,
            global_batch_size=self.recipe.global_batch_size,
            per_device_train_batch_size=self.settings.per_device_train_batch_size,
            gradient_accumulation_steps=self.settings.gradient_accumulation_steps,
        )
        report.open_output_dir(self.accelerator, self.settings)
        resume = self.settings.resume_from_checkpoint
        self.checkpoint, self.start = checkpoint.find(self.accelerator, resume, self.output_dir, self.recipe)
        self.num_done = self.start.step
        self.has_stopped_early = False

    def load_data(self, build: Callable[..., tuple[Any, Any]], *options: Any) -> tuple[Any, Any]:
        """Load the training data and the held-out data (None: none), and lay out the steps of the training.

        Args:
            build: of a module of `samestep.data`, called with the recipe, the number of workers and `options`.
        """
        with self.accelerator.local_main_process_first():
            train, self.held_out = build(self.recipe, self.settings.preprocessing_num_workers, *options)
        recipe = self.recipe
        self.order = Order(len(train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
        self.num_steps = recipe.max_train_steps or self.order.num_steps(recipe.num_train_epochs)
        self.last_step = min(self.num_steps, self.settings.stop_after_step or self.num_steps)
        self.schedule = recipe.schedule(self.num_steps, float(self.order.steps_per_epoch))
        return train, self.held_out

    def prepare(self, model_class: type[SummedLosses], train: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Make the model and the optimizer, as the checkpoint has them if there is one, ready for `accelerator.accumulate`.

        The fastest of the model's kernels is taken (--speed auto).

        Args:
            model_class: of a module of `samestep.models`.
            train: as `load_data` returned it.
        """
        recipe, settings, accelerator = self.recipe, self.settings, self.accelerator
        torch.manual_seed(recipe.seed)
        self.build = lambda: model_class.from_recipe(recipe, train)
        self.bare_model = model = self.build().to(getattr(torch, settings.dtype))
        candidates = model.kernel_candidates(accelerator.device, accelerator.mixed_precision, settings)
        kernels.choose(accelerator, recipe, settings, model, train, candidates)
        if getattr(settings, "gradient_checkpointing", False):
            model.recompute_activations()
        if getattr(settings, "torch_compile", False):
            model.compile_layers()
        (batch_norm.freeze if getattr(recipe, "normalization", None) == "frozen" else batch_norm.synchronize)(model)
        optimizer = optim.from_recipe(model, recipe)
        self.model, self.optimizer = model, optimizer = launch.prepare(accelerator, model, optimizer)
        self.parameters = list(model.parameters())
        weights = list(recipe.loss_weights.values())
        self.loss_weights = torch.tensor(weights, dtype=self.parameters[0].dtype, device=accelerator.device)
        cut = Steps(
            train,
            self.order,
            self.layout,
            process_index=accelerator.process_index,
            max_tokens=getattr(settings, "per_device_train_tokens", None),
            same_num_micro_batches=launch.waits_in_forward(accelerator, model),
        )
        if self.checkpoint is not None:
            checkpoint.load(accelerator, self.checkpoint, self.start, model, optimizer, train.fingerprints)
        saver = checkpoint.Saver(accelerator, recipe, model, optimizer, train.fingerprints, settings, self.start)
        self.log = report.RunLog(accelerator, recipe, settings, self.start, self.num_steps, saver)
        self.recovery = Recovery(accelerator, cut, model, optimizer, self.log)
        return model, optimizer

    def whole_step(self) -> batch_norm.WholeStep:
        """Make what computes batch normalisation of whole steps, for `Step.find_statistics`; it does nothing where the recipe
        does not ask for it (exact_batch_norm)."""
        return batch_norm.WholeStep(self.bare_model if self.recipe.exact_batch_norm else nn.Identity())

    def steps(self, train: Any) -> Iterator["Step"]:
        """Iterate over the optimizer steps from the checkpoint's on, one `Step` for each, and again for each that failed.

        Before the first, what fits into memory and what is fast is tried; after each, its metrics are noted and a checkpoint
        is saved where one is due. Ends early when a signal or --max_train_minutes asks for it.

        Args:
            train: as `load_data` returned it.

        Raises:
            RunError: memory does not hold a single sample, or numbers are not finite.
        """
        accelerator, settings, recovery = self.accelerator, self.settings, self.recovery
        rehearsal.fit(recovery, self._forward_backward)
        if getattr(self.recipe, "normalization", None) == "batch":
            rehearsal.measure_batch_norm(recovery, self.bare_model, self.loss_of)
        weights = getattr(self.recipe, "model_name_or_path", None)
        accelerator.print(
            f"{train}; {f'weights of {weights}' if weights else 'random weights'}; {recovery.steps.layout}; on "
            f"{accelerator.device}, mixed precision {accelerator.mixed_precision}; steps {self.num_done} to {self.last_step} "
            f"of {self.num_steps}"
        )
        self.model.train()
        workers = settings.dataloader_num_workers
        for data in recovery.steps.stream(self.num_done, self.last_step, workers, accelerator.device):
            for attempt in recovery.attempts(data):
                step = Step(self, attempt)
                yield step
                step.check_is_taken()
            self.log.step(attempt.data, attempt.sums, attempt.counts, step.grad_norm, step.learning_rate)
            self.num_done += 1
            if recovery.stopping:
                return
            every = settings.checkpointing_steps
            if every and self.num_done % every == 0 and self.num_done < self.last_step:
                self.log.save(self.num_done)

    def evaluates_before(self, step: "Step") -> bool:
        """Whether an evaluation is due: before the first step of a training, and every --eval_steps."""
        every = self.settings.eval_steps
        return step.index == 0 or bool(every and step.index % every == 0)

    def evaluate(self, model: nn.Module, held_out: Any) -> None:
        """Write the losses and accuracies of held-out data (None: nothing) after the steps so far, unless they are known."""
        if held_out is not None and self.num_done not in self.log.evaluated:
            batch_size = self.settings.per_device_eval_batch_size
            self.log.evaluation(
                self.num_done, evaluate(self.accelerator, model, held_out, self.recipe.seed, batch_size)
            )

    @property
    def is_finished(self) -> bool:
        """Whether the training is at its end, and not only this session of it."""
        return self.has_stopped_early or self.num_done == self.num_steps

    def finish(self, evaluate: Callable[[], object]) -> SummedLosses | None:
        """Save the last checkpoint and, at the end of training, evaluate. Called by all processes.

        Args:
            evaluate: called when all steps are done.

        Returns:
            The whole model on process 0 when the training is finished, to be published; else None.
        """
        if self.num_done > self.start.step:
            self.log.save(self.num_done)
        if self.num_done == self.num_steps:
            evaluate()
        self.log.close()
        trained = checkpoint.make_whole_model(self.accelerator, self.model, self.build)
        return trained if self.is_finished and self.accelerator.is_main_process else None

    def publish(self, usage: str, best_step: int | None = None) -> None:
        """Write all_results.json, loss.png and the model card; push to the hub if asked for. Called by process 0, after the
        model was saved in the output folder.

        Args:
            usage: lines of Python that load what was saved; OUTPUT_DIR stands for the folder.
            best_step: whose evaluation is that of what was saved; None: the last one.
        """
        report.finish(self.log, usage, best_step)

    def close(self) -> int:
        """Let go of the process group and all that used it. Called by all processes, last.

        Returns:
            Exit code: 0, or what tells a scheduler to start the run again.
        """
        status = self.recovery.exit_code(self.is_finished)
        torch_distributed.release(self.model)
        self.model, self.optimizer = self.accelerator.free_memory(self.model, self.optimizer)
        self.accelerator.end_training()
        return status

    def loss_of(
        self, batch: MicroBatch, num_targets: torch.Tensor, model: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A micro-batch's part of the step's loss, and its summed losses [terms], detached.

        Args:
            batch: a micro-batch; it may be on the host.
            num_targets: int64 [terms], of the whole step.
            model: as it is, or prepared.
        """
        sums, _ = model(**to_device(batch, self.accelerator.device))
        return losses.weighted_loss(sums, num_targets, self.loss_weights), sums.detach()

    def _forward_backward(self, batch: MicroBatch, num_targets: torch.Tensor) -> None:
        """A micro-batch as a script computes it, for rehearsals."""
        loss, _ = self.loss_of(batch, num_targets, self.model)
        self.accelerator.backward(loss * accumulate.loss_scale(self.accelerator))


class Step:
    """One optimizer step, a context manager around all of it: inside, a script goes through its `micro_batches`.

    Attributes:
        index: number of the step; 0 is the first of the training.
        learning_rate: of this step, from the recipe's schedule.
        grad_norm: scalar on the device, of the whole gradient before clipping; known after `clip_grad_norm_`.
    """

    def __init__(self, run: Run, attempt: Attempt):
        self.run, self.attempt = run, attempt
        self.index = attempt.data.step
        self.learning_rate = run.schedule(self.index)
        self.is_entered = False

    @property
    def data(self) -> StepData:
        """This process's part of the step, as it is cut now."""
        return self.attempt.data

    @property
    def num_micro_batches(self) -> int:
        """k: micro-batches of this process in this step, by which `accelerator.backward` divides."""
        return len(self.data.micro_batches)

    @property
    def num_targets(self) -> torch.Tensor:
        """n_j: targets of each loss term in the whole step, all processes and micro-batches; int64 [terms], at least 1 each."""
        return self.attempt.counts.clamp(min=1)

    @property
    def micro_batches(self) -> Iterator[MicroBatch]:
        """Tensors of each micro-batch on the device; `accelerator.accumulate` synchronises at the last one."""
        for micro_batch in accumulate.accumulate_over(self.run.accelerator, self.data.micro_batches):
            yield to_device(micro_batch, self.run.accelerator.device)

    def find_statistics(self, whole_step: batch_norm.WholeStep) -> None:
        """Find the statistics of batch normalisation over the whole step, in passes over its micro-batches.

        Where one micro-batch is the whole step, its own statistics are.
        """
        if self.run.recovery.steps.layout.gradient_accumulation_steps > 1:
            model, num_targets = self.run.bare_model, self.num_targets
            whole_step.prepare(
                self.data.micro_batches, lambda micro_batch: self.run.loss_of(micro_batch, num_targets, model)[0]
            )

    def clip_grad_norm_(self, max_norm: float | None) -> None:
        """Clip the whole step's gradient G to an L2 norm (None: leave it): G min(1, max_norm / (|G| + 1e-6)).

        Called by all processes between the last backward and the optimizer's step, which a gradient that is not finite does
        not take.
        """
        run = self.run
        self.attempt.gradient_is_complete()
        self.grad_norm = accumulate.clip(run.accelerator, run.optimizer, run.parameters, max_norm)
        run.recovery.skip_update_if_not_finite(self.grad_norm)

    def add_to_log(self, sums: torch.Tensor) -> None:
        """Note the summed losses of a micro-batch, [terms], for the step's line in metrics.jsonl."""
        self.attempt.sums.append(sums.detach())

    def check_is_taken(self) -> None:
        """Raise where a script went on without the step, whose place would come for ever."""
        if not self.is_entered:
            raise UsageError(f"step {self.index + 1} was not taken: put what computes it inside `with step:`")

    def __enter__(self) -> "Step":
        self.is_entered = True
        for group in self.run.optimizer.param_groups:
            group["lr"] = self.learning_rate * group["lr_scale"]
        self.attempt.__enter__()
        accumulate.seed_noise(self.run.accelerator, self.run.recipe.seed, self.index)
        return self

    def __exit__(self, *error: Any) -> bool:
        return self.attempt.__exit__(*error)
