"""Batch normalisation: how far a cut takes the step's gradient, and what exact statistics of the whole step cost.

    make bench NAME=batch_norm

The deviation is that of `whole_step.deviation`, with which training logs it: the relative error of a step's gradient, its
statistics taken from micro-batches of b images, beside that of the whole batch; at the start, and after a few epochs' worth of
exact steps. The cost is the time of a step with `WholeStep` (--exact_batch_norm) over that of the ordinary step, the same
micro-batches in both, taking turns; medians. In float32. The digits and captchas are the recipes' own; ResNets see random
numbers.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial

import harness
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from samestep.contrib.whole_step import WholeStep, deviation
from samestep.data import captchas, images
from samestep.models.networks import CaptchaReader
from samestep.recipe.catalog import load
from samestep.step import batch_norm, losses, optim

RESNETS = {
    "ResNet-18": {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]},
    "ResNet-50": {"layer_type": "bottleneck", "hidden_sizes": [256, 512, 1024, 2048], "depths": [3, 4, 6, 3]},
}


class Case:
    """A model, its optimizer, and micro-batches of a step: `images(size)` makes the pixels and labels of a step."""

    def __init__(self, title: str, network: nn.Module, optimizer, draw: Callable[[int, int], tuple], batch: int):
        self.title, self.network, self.optimizer, self.draw, self.batch = title, network.train(), optimizer, draw, batch
        batch_norm.synchronize(network)
        self.whole = WholeStep(network)

    def micro_batches(self, step: int, size: int) -> list[tuple]:
        pixels, labels = self.draw(step, self.batch)
        return list(zip(pixels.split(size), labels.split(size), strict=True))

    def loss(self, micro_batch: tuple) -> torch.Tensor:
        """Compute the micro-batch's share of the mean over the step."""
        pixels, labels = micro_batch
        logits = self.network(pixels)
        logits = getattr(logits, "logits", logits).flatten(0, -2)
        return losses.cross_entropy_sum(logits, labels.flatten()) / (self.batch * labels[0].numel())

    def step(self, micro_batches: list[tuple], exact: bool) -> float:
        """Take a step; its seconds."""
        start = harness.clock()
        if exact:
            self.whole.prepare(micro_batches, self.loss)
        for micro_batch in micro_batches:
            (self.loss(micro_batch) + self.whole.correction() if exact else self.loss(micro_batch)).backward()
        self.whole.finish()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return harness.clock() - start


def from_recipe(name: str, module, build, batch: int) -> Case:
    recipe = load(name, {"normalization": "batch", "global_batch_size": batch})
    source, _ = module.build(recipe)

    def draw(step: int, size: int) -> tuple:
        rng = torch.Generator().manual_seed(step)
        places = torch.randint(len(source), (size,), generator=rng).tolist()
        micro_batch = source.collate([source.draw(step, place) for place in places])
        return micro_batch["pixel_values"], micro_batch["labels"]

    torch.manual_seed(0)
    network = build(recipe)
    return Case(f"{name}, normalization batch", network, optim.from_recipe(network, recipe), draw, batch)


def resnet_case(name: str, size: int, batch: int) -> Case:
    torch.manual_seed(0)
    network = ResNetForImageClassification(ResNetConfig(**RESNETS[name], embedding_size=64, num_labels=1000))

    def draw(step: int, number: int) -> tuple:
        rng = torch.Generator().manual_seed(step)
        labels = torch.randint(1000, (number,), generator=rng)
        return torch.randn(number, 3, size, size, generator=rng), labels

    return Case(f"{name}, {size} x {size}", network, optim.sgd(network, 0.05, 0.9, 0.0), draw, batch)


def measure(case: Case, sizes: list[int], num_steps: int, num_timed: int) -> list[dict]:
    rows = []
    initial = {size: deviation(case.network, case.micro_batches(0, size), case.loss) for size in sizes}
    for step in range(num_steps):
        case.step(case.micro_batches(step, case.batch), exact=False)  # one micro-batch: exact as it is
    for size in sizes:
        micro_batches = case.micro_batches(num_steps, size)
        row = {
            "model": case.title,
            "layers": len(case.whole.layers),
            "B": case.batch,
            "b": size,
            "k": len(micro_batches),
        }
        row |= {
            "first": initial[size],
            "steps": num_steps,
            "later": deviation(case.network, micro_batches, case.loss),
        }
        calls = {
            "cut": partial(case.step, micro_batches, exact=False),
            "exact": partial(case.step, micro_batches, exact=True),
        }
        seconds = {name: statistics.median(times) for name, times in harness.in_turns(calls, num_timed).items()}
        row |= {"forward_passes": case.whole.num_forward_passes, "adjoint_passes": case.whole.num_adjoint_passes}
        row["cost"] = seconds["exact"] / seconds["cut"]
        rows.append(row)
        print(row, file=sys.stderr)
    return rows


def main() -> None:
    arguments = harness.flags("batch_norm", __doc__, rounds=5).parse_args()
    digits = from_recipe(
        "resnet_digits_cpu",
        images,
        lambda recipe: ResNetForImageClassification(ResNetConfig(**recipe.architecture)),
        64,
    )
    reader = from_recipe("captcha_cpu", captchas, lambda recipe: CaptchaReader(**recipe.architecture), 128)
    rows = measure(digits, [32, 16, 8], 100, arguments.rounds)
    rows += measure(reader, [64, 32], 30, arguments.rounds)
    rows += measure(resnet_case("ResNet-18", 64, 32), [16, 8], 5, arguments.rounds)
    rows += measure(resnet_case("ResNet-50", 64, 32), [16], 5, arguments.rounds)
    about = harness.about("make bench NAME=batch_norm", ("torch", "transformers"), pairs=arguments.rounds)
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, parts={"batch norm": ("noise-and-batch-norm.md", part(results))})


def tables(results: dict) -> str:
    rows = [
        [
            *(row["model"], row["layers"], f"{row['B']} = {row['b']} x {row['k']}", f"{row['first']:.2g}"),
            *(f"{row['later']:.2g} (step {row['steps']})", f"{row['forward_passes']} + {row['adjoint_passes']}"),
            f"{row['cost']:.1f}",
        ]
        for row in results["rows"]
    ]
    columns = "model | layers | batch | error at the start | later | passes, forward + adjoint | time, exact / cut"
    return f"{harness.table(columns, rows)}\nTime: medians of {results['about']['pairs']} pairs of steps in float32.\n"


def part(results: dict) -> str:
    return harness.part("batch_norm.py", results["about"], tables(results))


if __name__ == "__main__":
    main()
