"""A task of one's own, outside of the package: an MLP that fits a sine, by one registration."""

import sys
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from samestep.errors import exit_code
from samestep.models.summed_losses import SummedLosses
from samestep.recipe.recipe import Parts, Recipe, register
from samestep.training.run import Run


@dataclass(frozen=True, kw_only=True)
class CurveFitting(Recipe):
    loss_weights: ClassVar = {"square": 1.0}


class Point(NamedTuple):
    x: float
    length: int = 1


class Curve(list):
    max_length, fingerprints = 1, {"curve": "sine"}

    def draw(self, epoch, sample_id):
        return self[sample_id]

    def longest(self):
        return self[0]

    def __str__(self):
        return f"{len(self)} points"

    def collate(self, points):
        x = torch.tensor([[point.x] for point in points]).reshape(-1, 1)
        return {"x": x, "y": x.sin(), "counts": torch.tensor([len(points)])}


class CurveSums(SummedLosses):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x, y):
        dtype = self.layers[0].weight.dtype
        errors = self.layers(x.to(dtype)) - y.to(dtype)
        return torch.stack([errors.square().sum()]), (errors.abs() < 0.1).sum()[None]


def build(recipe, num_workers=None):
    curve = Curve(Point(number / 10) for number in range(61))
    return curve, curve


register("curve_fitting", CurveFitting, Parts(data=build, model=CurveSums))


def main(argv):
    run = Run(argv, "curve_fitting", description=__doc__)
    train, held_out = run.load_data(build)
    model, optimizer = run.prepare(CurveSums, train)
    for step in run.steps(train):
        with step:
            for batch in step.micro_batches:
                with run.accelerator.accumulate(model):
                    sums, _ = model(**batch)
                    loss = (run.loss_weights * sums / step.num_targets).sum()
                    run.accelerator.backward(loss * step.loss_scale)
                    step.add_to_log(sums)
                    if run.accelerator.sync_gradients:
                        step.clip_grad_norm_(run.recipe.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
    run.finish(lambda: run.evaluate(model, held_out))
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
