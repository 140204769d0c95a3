"""Train a ResNet that tells images apart: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_image_classifier.py --recipe resnet_digits_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys
from pathlib import Path

gc.disable()  # while modules are imported: 1 s of 4 less; `launch.create_accelerator` turns it on

import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from samestep.cut import layout as plan
from samestep.cut.order import Order
from samestep.data import images
from samestep.data.steps import Cell, Steps, to_device
from samestep.errors import exit_code
from samestep.models.networks import ways
from samestep.models.pretrained import initial_model
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.recipe import run_settings as run
from samestep.recipe.recipe import ImageClassification
from samestep.step import accumulate, batch_norm, losses, optim
from samestep.training import checkpoint, kernels, launch, rehearsal, report
from samestep.training.evaluation import evaluate, predict
from samestep.training.plots import plot_predictions
from samestep.training.recovery import Recovery

# ---------------------------------------------------------------------------------------------------------------------
# The model: transformers' ResNet that returns the sum over a cell


class ClassificationSums(nn.Module):
    def __init__(self, resnet: ResNetForImageClassification, label_smoothing: float):
        super().__init__()
        self.resnet, self.of_pixels, self.label_smoothing = resnet, torch.contiguous_format, label_smoothing

    def forward(self, pixel_values, labels) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Summed loss and, when evaluating, correct predictions, both [1]. See Images.collate."""
        logits = self.resnet(pixel_values.to(self.resnet.dtype, memory_format=self.of_pixels)).logits
        loss_sum = losses.cross_entropy_sum(logits, labels, self.label_smoothing)
        return loss_sum[None], None if self.training else losses.num_correct(logits, labels)[None]


def build_model(recipe: ImageClassification, classes: list[str]) -> ResNetForImageClassification:
    """The recipe's architecture, with random weights or those of model_name_or_path."""
    names = {"id2label": dict(enumerate(classes)), "label2id": {name: place for place, name in enumerate(classes)}}
    if recipe.normalization == "group":
        model_class, config = GroupNormResNet, GroupNormResNetConfig(**recipe.architecture, **names)
    else:
        model_class, config = ResNetForImageClassification, ResNetConfig(**recipe.architecture, **names)
    return initial_model(model_class, config, recipe.model_name_or_path, head="classifier")


USAGE = """\
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("OUTPUT_DIR", trust_remote_code=True)
image = AutoImageProcessor.from_pretrained("OUTPUT_DIR")(Image.open("it.png").convert("MODE"), return_tensors="pt")
model.config.id2label[model(**image).logits.argmax().item()]"""


def main(argv: list[str]) -> int:
    # -----------------------------------------------------------------------------------------------------------------
    # What: the recipe. How here: the layout

    recipe, settings = run.parse(argv, "image_classification", __doc__)
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
        train, held_out = images.build(recipe, settings.preprocessing_num_workers, settings.on_bad_sample)
    order = Order(len(train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
    num_steps = recipe.max_train_steps or order.num_steps(recipe.num_train_epochs)
    schedule = recipe.schedule(num_steps, float(order.steps_per_epoch))

    torch.manual_seed(recipe.seed)
    resnet = build_model(recipe, train.classes)
    model = ClassificationSums(resnet, recipe.label_smoothing).to(getattr(torch, settings.dtype))
    of_resnet = ways(model, resnet, accelerator.device, accelerator.mixed_precision)
    kernels.choose(accelerator, recipe, settings, model, train, of_resnet)
    (batch_norm.freeze if recipe.normalization == "frozen" else batch_norm.synchronize)(model)
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
        if held_out is not None and step not in log.evaluated:
            batch_size = settings.per_device_eval_batch_size
            log.evaluation(step, evaluate(accelerator, model, held_out, recipe.seed, batch_size))

    rehearsal.fit(recovery, forward_backward)
    rehearsal.measure_batch_norm(recovery, bare, share)
    accelerator.print(
        f"{train}; {steps.layout}; on {accelerator.device}, mixed precision {accelerator.mixed_precision}; steps "
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
        resnet.eval()
        resnet.save_pretrained(output_dir)
        images.processor(recipe).save_pretrained(output_dir)
        if held_out is not None:
            cell, places = predict(resnet, held_out, 256)
            names = ([train.classes[place] for place in labels.tolist()] for labels in (cell["labels"], places))
            picture = plot_predictions(held_out.pictures(cell["pixel_values"]), *names)
            (output_dir / "predictions.png").write_bytes(picture)
        report.finish(log, USAGE.replace("MODE", "RGB" if recipe.num_channels == 3 else "L"))
    status = recovery.exit_code(step == num_steps)
    model, optimizer = accelerator.free_memory(model, optimizer)  # before the process group: see `Recovery.exit_code`
    accelerator.end_training()
    return status


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
