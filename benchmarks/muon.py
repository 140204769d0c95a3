"""Muon's orthogonalization: how it multiplies rounding in float32 and in bfloat16, and what it costs beside a step.

    make bench NAME=muon

- Rounding: the gradient of 16 blocks of random tokens by gpt2_small_cpu's model with random weights, computed in one
  micro-batch and in micro-batches of one block each. Of every matrix of a layer the relative difference of both gradients, and
  of the updates that follow from them: by torch.optim.Muon, which orthogonalizes in bfloat16, and by ours.
- Cost: the seconds of orthogonalizing the matrices of GPT-2 (124M) on this machine's CPU beside those of forward and backward
  of one block of 1,024 tokens, in float32 and in turns; a step of the recipe has 512 such blocks and orthogonalizes once.
- Planned: the same share for 8 GPUs, by the planner, with work shared out over the processes.
"""

import json
import statistics
import sys
from typing import Any

import harness
import torch
from torch import nn

BATCH, COST_BATCH = 16, 512


def differences(gradients: list[list[torch.Tensor]], update: Any) -> list[float]:
    """Compute of each matrix the relative difference of what `update` makes of two gradients."""
    pairs = [[update(gradient).double() for gradient in pair] for pair in zip(*gradients, strict=True)]
    return [((a - b).norm() / b.norm()).item() for a, b in pairs]


def torch_update(gradient: torch.Tensor) -> torch.Tensor:
    """Take one step of torch.optim.Muon from zero with a gradient."""
    weight = nn.Parameter(torch.zeros_like(gradient))
    weight.grad = gradient.clone()
    torch.optim.Muon([weight], lr=1.0, weight_decay=0.0).step()
    return weight.detach()


def measure_rounding() -> dict[str, list[float]]:
    from samestep.contrib.optim.muon import find_matrices, orthogonalize
    from samestep.models.gpt2_pretraining import PretrainingSums
    from samestep.recipe.catalog import load

    torch.manual_seed(0)
    recipe = load("gpt2_small_cpu")
    model = PretrainingSums.from_recipe(recipe, None)
    matrices = find_matrices(model)
    tokens = torch.randint(recipe.vocab_size, (BATCH, recipe.block_size + 1))
    gradients = []
    for size in (BATCH, 1):
        model.zero_grad()
        for part in tokens.split(size):
            sums, _ = model(part[:, :-1], None, part[:, 1:].flatten(), None)
            (sums.sum() / tokens[:, 1:].numel()).backward()
        gradients.append([matrix.grad.clone() for matrix in matrices])
    return {
        "gradient": differences(gradients, lambda gradient: gradient),
        "torch.optim.Muon, bfloat16": differences(gradients, torch_update),
        "this repository, float32": differences(gradients, orthogonalize),
    }


def measure_cost(rounds: int) -> dict[str, list[float]]:
    from samestep.contrib.optim.muon import find_matrices, orthogonalize
    from samestep.models.gpt2_pretraining import PretrainingSums
    from samestep.recipe.catalog import load

    recipe = load("gpt2_124m")
    model = PretrainingSums.from_recipe(recipe, None)
    matrices = find_matrices(model)
    batch = {**model.example(recipe, 1), "input_ids": torch.randint(recipe.vocab_size, (1, recipe.block_size))}

    def step() -> float:
        model.zero_grad()
        return harness.seconds(lambda: model(**batch)[0].sum().backward())

    def iterate() -> float:
        return harness.seconds(lambda: [orthogonalize(matrix.detach()) for matrix in matrices])

    return harness.in_turns({"block": step, "orthogonalization": iterate}, rounds)


def plan_cost() -> dict[str, float]:
    from samestep.recipe.catalog import load
    from stepplan.hardware import parse
    from stepplan.placement import place
    from stepplan.workload import from_recipe

    changes = {"optimizer": "muon", "muon_learning_rate": 0.005, "muon_momentum": 0.95, "muon_weight_decay": 0.1}
    changes |= {"global_batch_size": COST_BATCH}
    shares = {}
    for name in ("8xa100-80", "8xa100-40", "8xh100"):
        times = [
            place(from_recipe(load("gpt2_124m", more)), parse(name)).time.total
            for more in (changes, {"global_batch_size": COST_BATCH})
        ]
        shares[name] = times[0] / times[1] - 1
    return shares


def main() -> None:
    arguments = harness.flags("muon", __doc__, rounds=3, only=("rounding", "cost")).parse_args()
    file = arguments.output.with_suffix(".json")
    results = {"about": harness.about("make bench NAME=muon", ("torch", "transformers")), "planned": plan_cost()}
    if file.exists():
        results = json.loads(file.read_text(encoding="utf-8")) | results
    if "rounding" in arguments.only:
        results["rounding"] = measure_rounding()
    if "cost" in arguments.only:
        results["cost"] = measure_cost(arguments.rounds)
    harness.write(arguments.output, results, parts={"muon": ("optimizers.md", part(results))})


def cost_share(cost: dict[str, list[float]]) -> float:
    """Compute the share that orthogonalization adds to a step.

    >>> cost_share({"block": [2.0], "orthogonalization": [10.24]})
    0.01
    """
    return statistics.median(cost["orthogonalization"]) / (COST_BATCH * statistics.median(cost["block"]))


def tables(results: dict[str, Any]) -> str:
    rows = [[name, f"{statistics.median(v):.1e}", f"{max(v):.1e}"] for name, v in results["rounding"].items()]
    shares = ", ".join(f"{share:.1%} on {name}" for name, share in results["planned"].items())
    measured = ""
    if cost := results.get("cost"):
        block, iteration = (statistics.median(cost[name]) for name in ("block", "orthogonalization"))
        share = f"{cost_share(cost):.2%} of the step"
        measured = f" On this CPU all matrices take {iteration:.1f} s, and a block {block:.2f} s: {share}."
    return (
        f"{harness.table('difference of two cuts of one step | median of all matrices | largest', rows)}\n"
        f"What orthogonalization adds to a step of {COST_BATCH} blocks of GPT-2 (124M): planned, work shared out, "
        f"{shares}.{measured}\n"
    )


def part(results: dict[str, Any]) -> str:
    return harness.part("muon.py", results["about"], tables(results))


if __name__ == "__main__":
    sys.exit(main())
