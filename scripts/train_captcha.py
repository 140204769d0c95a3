"""Train a network that reads captchas: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_captcha.py --recipe captcha_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys
from pathlib import Path

gc.disable()  # while modules are imported: 1 s of 4 less; `launch.create_accelerator` turns it on

import torch
from torch import nn

from samestep.cut import layout as plan
from samestep.cut.order import Order
from samestep.data import captchas
from samestep.data.steps import Cell, Steps, to_device
from samestep.errors import exit_code
from samestep.models.networks import CaptchaReader, ways
from samestep.recipe import run_settings as run
from samestep.step import accumulate, batch_norm, losses, optim
from samestep.training import checkpoint, kernels, launch, plots, rehearsal, report
from samestep.training.evaluation import evaluate, predict
from samestep.training.recovery import Recovery

# ---------------------------------------------------------------------------------------------------------------------
# The model: a CaptchaReader that returns sums over a cell


class ReadingSums(nn.Module):
    def __init__(self, reader: CaptchaReader):
        super().__init__()
        self.reader, self.of_pixels = reader, torch.contiguous_format

    def forward(self, pixel_values, labels) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Summed losses and, when evaluating, correct predictions: [characters, strings]. See Captchas.collate."""
        logits = self.reader(pixel_values.to(self.reader.heads.weight.dtype, memory_format=self.of_pixels))
        # -log p of a string is the sum of its characters': the second loss is the first, per string.
        loss_sum = losses.cross_entropy_sum(logits.flatten(0, 1), labels.flatten())
        right = logits.argmax(-1) == labels
        return loss_sum.expand(2), None if self.training else torch.stack([right.sum(), right.all(1).sum()])


USAGE = """\
from samestep.models.networks import CaptchaReader
reader = CaptchaReader.from_pretrained("OUTPUT_DIR").eval()
reader.read(images)  # uint8 [images, height, width, 3]"""


def main(argv: list[str]) -> int:
    # -----------------------------------------------------------------------------------------------------------------
    # What: the recipe. How here: the layout

    recipe, settings = run.parse(argv, "captcha_recognition", __doc__)
    output_dir = Path(settings.output_dir)
    accelerator = launch.create_accelerator(**settings.for_accelerator)
    layout = plan.solve_layout(
        num_processes=accelerator.num_processes,
        global_batch_size=recipe.global_batch_size,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
    )
    report.open_output_dir(accelerator, settings)
    found, start = checkpoint.find(accelerator, settings.resume_from_checkpoint, output_dir, recipe)

    # -----------------------------------------------------------------------------------------------------------------
    # Things: data, model, optimizer, learning rate

    with accelerator.local_main_process_first():
        train, held_out = captchas.build(recipe, settings.preprocessing_num_workers)
    order = Order(len(train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
    num_steps = recipe.max_train_steps or order.num_steps(recipe.num_train_epochs)
    schedule = recipe.schedule(num_steps, float(order.steps_per_epoch))

    torch.manual_seed(recipe.seed)
    reader = CaptchaReader(**recipe.architecture)
    model = ReadingSums(reader).to(getattr(torch, settings.dtype))
    of_reader = ways(model, reader, accelerator.device, accelerator.mixed_precision)
    kernels.choose(accelerator, recipe, settings, model, train, of_reader)
    batch_norm.synchronize(model)
    whole_step = batch_norm.WholeStep(model if recipe.exact_batch_norm else nn.Identity())
    optimizer = optim.of_recipe(model, recipe)
    bare, (model, optimizer) = model, launch.prepare(accelerator, model, optimizer)
    parameters = list(model.parameters())
    weights = torch.tensor(list(recipe.loss_weights.values()), dtype=parameters[0].dtype, device=accelerator.device)
    steps = Steps(
        train,
        order,
        layout,
        process_index=accelerator.process_index,
        same_num_cells=launch.waits_in_forward(accelerator, model),
    )

    # -----------------------------------------------------------------------------------------------------------------
    # Where we were, and where to stop

    if found is not None:
        checkpoint.load(accelerator, found, start, model, optimizer, train.fingerprints)
    last_step = min(num_steps, settings.stop_after_step or num_steps)
    saver = checkpoint.Saver(accelerator, recipe, model, optimizer, train.fingerprints, settings, start)
    log = report.RunLog(accelerator, recipe, settings, start, num_steps, saver)
    recovery = Recovery(accelerator, steps, model, optimizer, log)

    def share(cell: Cell, counts: torch.Tensor, network: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """A cell's share of the step's loss, and its summed losses [terms]."""
        sums, _ = network(**to_device(cell, accelerator.device))
        return losses.weighted_loss(sums, counts, weights), sums.detach()

    def forward_backward(cell: Cell, counts: torch.Tensor) -> torch.Tensor:
        """A micro-step: adds its part of the step's gradient, and returns its summed losses [terms]."""
        loss, sums = share(cell, counts, model)
        loss = loss + whole_step.correction()
        accelerator.backward(loss * accumulate.loss_scale(accelerator))
        return sums

    def evaluate_at(step: int) -> None:
        if step not in log.evaluated:
            batch_size = settings.per_device_eval_batch_size
            log.evaluation(step, evaluate(accelerator, model, held_out, recipe.seed, batch_size))

    rehearsal.fit(recovery, forward_backward)
    rehearsal.measure_batch_norm(recovery, bare, share)
    accelerator.print(
        f"{len(train)} images; {steps.layout}; on {accelerator.device}, mixed precision {accelerator.mixed_precision}; steps "
        f"{start.step} to {last_step} of {num_steps}"
    )

    # -----------------------------------------------------------------------------------------------------------------
    # Go

    model.train()
    step = start.step
    for data in steps.stream(step, last_step, settings.dataloader_num_workers, accelerator.device):
        if step == 0 or (settings.eval_steps and step % settings.eval_steps == 0):
            evaluate_at(step)
        learning_rate = schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for attempt in recovery.attempts(data):  # a second one, in smaller cells, if memory runs out
            with attempt:
                accumulate.seed_noise(accelerator, recipe.seed, step)
                if steps.layout.gradient_accumulation_steps > 1:  # else a micro-step's statistics are the whole step's
                    whole_step.prepare(attempt.data.cells, lambda cell, n=attempt.counts: share(cell, n, bare)[0])
                for cell in accumulate.micro_steps(accelerator, attempt.data.cells):
                    with accelerator.accumulate(model):
                        attempt.sums.append(forward_backward(cell, attempt.counts))
                        if accelerator.sync_gradients:
                            attempt.gradient_is_complete()
                            grad_norm = accumulate.clip(accelerator, optimizer, parameters, recipe.max_grad_norm)
                            recovery.hold_back(grad_norm)
                        optimizer.step()
                        optimizer.zero_grad()
                whole_step.finish()
        log.step(attempt.data, attempt.sums, attempt.counts, grad_norm, learning_rate)
        step += 1
        if recovery.stopping:
            break
        if settings.checkpointing_steps and step % settings.checkpointing_steps == 0 and step < last_step:
            log.save(step)

    # -----------------------------------------------------------------------------------------------------------------
    # Done

    if step > start.step:
        log.save(step)
    if step == num_steps:
        evaluate_at(num_steps)
    log.close()
    if step == num_steps and accelerator.is_main_process:
        reader.eval()
        reader.save_pretrained(output_dir)
        cell, places = predict(reader, held_out, 256)
        texts = reader.texts(cell["labels"]), reader.texts(places)
        picture = plots.plot_predictions(held_out.pictures(cell["pixel_values"]), *texts)
        (output_dir / "predictions.png").write_bytes(picture)
        report.finish(log, USAGE)
    status = recovery.exit_code(step == num_steps)
    model, optimizer = accelerator.free_memory(model, optimizer)  # before the process group: see `Recovery.exit_code`
    accelerator.end_training()
    return status


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
