"""What our step costs at least: forward, backward and optimizer step over collated micro-batches, and nothing else.

STAMPS SCRIPT FLAGS. The script prepares all as for itself: model, kernels, optimizer, caps. When it would draw its first step,
the first steps are drawn in advance and taken again and again, until this process is ended: no clipping, no log, no schedule,
no Accelerate. The learning rate is tiny, so that nothing diverges; it does not change the time. Of texts there are so many
steps that hardly any is taken twice: a few whose sizes come again and again are up to 3 % faster in bf16 than a run can be.
"""

import runpy
import sys
from collections.abc import Callable

import torch
from clock import Clock
from ours import count_real

from samestep.data.steps import StepData, Steps
from samestep.recipe.catalog import load
from samestep.recipe.recipe import Recipe
from samestep.step import losses
from samestep.training import launch

NUM_STEPS, NUM_STEPS_OF_IMAGES, LEARNING_RATE = 500, 20, 1e-6


def strip(
    clock: Clock,
    recipe: Recipe,
    num_steps: int | None = None,
    count: Callable[[StepData, str], int] = count_real,
) -> None:
    """Let the run of a recipe in this process take bare steps, `num_steps` of them or endlessly.

    Args:
        count: see `ours.stamp`.
    """
    prepare, prepare_steps, objects = launch.prepare, Steps.stream, {}

    def keep(accelerator, model, optimizer, *more):
        prepared = prepare(accelerator, model, optimizer, *more)
        objects.update(accelerator=accelerator, prepared=prepared)
        return prepared

    def stream(steps: Steps, first: int, *more):
        if not objects:  # a reference model is computed first
            return prepare_steps(steps, first, *more)
        accelerator, (prepared, optimizer) = objects["accelerator"], objects["prepared"]
        model, optimizer = accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), optimizer.optimizer
        bf16 = torch.autocast("cpu", torch.bfloat16, enabled=accelerator.mixed_precision == "bf16")
        weights = torch.tensor(list(recipe.loss_weights.values()))
        has_images = recipe.unit == "image" or getattr(recipe, "images", False)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        data = [steps[first + place] for place in range(NUM_STEPS_OF_IMAGES if has_images else NUM_STEPS)]
        number = 0
        while number != num_steps:
            step = data[number % len(data)]
            for micro_batch in step.micro_batches:
                with bf16:
                    sums, _ = model(**micro_batch)
                loss = losses.weighted_loss(sums, step.counts, weights)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.collated(count(step, recipe.unit))
            clock.step(loss.item())
            number += 1
        raise SystemExit(0)  # the run waits for steps that never come

    launch.prepare, Steps.stream = keep, stream


if __name__ == "__main__":
    strip(Clock(sys.argv[1]), load(sys.argv[sys.argv.index("--recipe") + 1]))
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
