"""Comparisons of two runs by what they leave."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from common import all_metrics, evaluations, metrics
from safetensors.torch import load_file

from samestep.recipe.run_fields import TIMES
from samestep.training.checkpoint import checkpoints, read

BF16 = 2**-8
"""Largest relative error of a number that is rounded to bfloat16. A result that several roundings lead to is a few of them away
from the exact one, by whatever kernel they are."""


def untimed_metrics(output_dir) -> list[dict]:
    times = ("seconds", *TIMES)
    return [{name: v for name, v in line.items() if name not in times} for line in all_metrics(output_dir)]


def same_weights(a, b) -> bool:
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (a, b))
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def parameters(output_dir, checkpoint: str | None = None) -> torch.Tensor:
    """Read the parameters of a checkpoint, by default the last, or ("") of the model that a finished run leaves."""
    folder = checkpoints(output_dir)[-1] if checkpoint is None else output_dir / checkpoint
    tensors = load_file(output_dir / "model.safetensors") if checkpoint == "" else read(folder, "model")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def check(output_dir, reference, dtype: str, norms: float = 1e-5) -> None:
    """Check the acceptance: losses of every step to 1e-5 in fp32 (its gradient's norm to `norms`), parameters after the last
    one to 1e-12 in float64."""
    ours, theirs = metrics(output_dir), metrics(reference)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, len(theirs) + 1))
    for name in [name for name in theirs[0] if name.endswith(("loss", "grad_norm"))]:
        for a, b in zip(ours, theirs, strict=True):
            tolerance = norms if name == "grad_norm" else 1e-5
            assert a[name] == pytest.approx(b[name], rel=tolerance if dtype == "float32" else 1e-11)
    for name in ("epoch", "learning_rate", "samples", "tokens"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs]
    last, true_last = evaluations(output_dir)[-1], evaluations(reference)[-1]
    for name in true_last if dtype == "float64" else ["step", "eval_loss"]:
        assert last[name] == pytest.approx(true_last[name], rel=1e-4 if dtype == "float32" else 1e-11)
    assert relative(parameters(output_dir), parameters(reference)) < (1e-4 if dtype == "float32" else 1e-12)


def hash_run(output_dir: Path) -> dict[str, str]:
    """Hash what a run wrote: its curve, its parameters, its moments."""
    hashes = {"metrics": hashlib.sha256(json.dumps(untimed_metrics(output_dir)).encode()).hexdigest()}
    for part in ("model", "optimizer"):
        whole = hashlib.sha256()
        for name, tensor in sorted(read(checkpoints(output_dir)[-1], part).items()):
            whole.update(name.encode() + tensor.numpy().tobytes())
        hashes[part] = whole.hexdigest()
    return hashes
