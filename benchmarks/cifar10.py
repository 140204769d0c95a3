"""ResNet on small images with k = 1, 4 and 8: cut, and updated at every k-th micro-batch only.

    make bench NAME=cifar10

The recipe resnet18_cifar10 made smaller (two blocks of 32 and 64 channels, 16 x 16 pixels), with group and with batch
normalisation. Data: scikit-learn's digits, and gratings that are drawn here and read from files in the form of CIFAR-10's. The
class of a grating is its direction; phase, colours and noise are drawn. All runs of a seed have the same first weights, and see
the same images in the same order.

- cut: steps of 64 images in k micro-batches, by sums: what samestep means by k.
- same rate: steps of k times 16 images at the rate of k = 1: what is told of sparse updates.
- k times the rate: the same, by the linear rule.

All in float64, so that what differs is no rounding. Rates rise over the first tenth, and stay. Training loss: the last tenth of
the images, before they are learned from. Accuracy: held-out images, by running statistics where there are any. Apart: the
largest relative difference of a step's loss from that of the same seed with k = 1. Means and standard deviations (n - 1) over
the seeds.
"""

import itertools
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification

from samestep.cut.order import Order
from samestep.data import images
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.recipe.catalog import load

B, SMALL, RATE = 64, 16, 0.05  # images of a step that is cut; of a micro-batch otherwise; for 64 images
NUM_IMAGES, NUM_DRAWN, NUM_HELD_OUT = 5120, 1400, 400  # of a run, by default; of the drawn files
KS = (1, 4, 8)
WAYS = {"cut": KS, "same rate": KS, "k times the rate": KS[1:]}
DATA, NORMALIZATIONS = ("digits", "gratings"), ("group", "batch")
CLASSES = 10
SHAPE = {"image_height": 16, "image_width": 16, "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1]}
DIGITS = {
    "dataset_name": "builtin/digits",
    "validation_fraction": 0.2,
    "num_channels": 1,
    "image_mean": [0.3],
    "image_std": [0.3],
    "augmentation": "shift",
}


class Case(NamedTuple):
    """What a run is, but for its seed: way of k, k, and the images and the rate of a step."""

    way: str
    k: int

    @property
    def batch(self) -> int:
        return B if self.way == "cut" else SMALL * self.k

    @property
    def micro_batch(self) -> int:
        return self.batch // self.k

    @property
    def rate(self) -> float:
        return RATE * {"cut": B, "same rate": SMALL, "k times the rate": self.batch}[self.way] / B


def draw_gratings(folder: Path) -> None:
    """Write gratings in the form of CIFAR-10: label and planes of 32 x 32, training images and held-out ones."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32] / 32
    for name, number in (("data_batch_1.bin", NUM_DRAWN), ("test_batch.bin", NUM_HELD_OUT)):
        labels = rng.integers(CLASSES, size=number, dtype=np.uint8)
        angle, phase = labels[:, None, None] * np.pi / CLASSES, rng.uniform(0, 2 * np.pi, (number, 1, 1))
        wave = np.sin(2 * np.pi * 4 * (x * np.cos(angle) + y * np.sin(angle)) + phase)[:, None]
        colours = rng.uniform(-60, 60, (number, 3, 1, 1))
        planes = 128 + wave * colours + rng.normal(0, 40, (number, 3, 32, 32))
        rows = [labels[:, None], planes.clip(0, 255).astype(np.uint8).reshape(number, -1)]
        (folder / name).write_bytes(np.concatenate(rows, 1).tobytes())


def build_data(data: str, folder: Path, seed: int) -> tuple[images.Images, images.Images]:
    """Build training and held-out images of a data set; gratings of both directions are no mirror images."""
    changes = DIGITS if data == "digits" else {"train_dir": str(folder), "augmentation": "shift"}
    train, held_out = images.build(load("resnet18_cifar10", SHAPE | changes | {"seed": seed}))
    assert held_out is not None
    return train, held_out


def build_model(data: str, normalization: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    changes = SHAPE | {"normalization": "group"} | (DIGITS if data == "digits" else {})
    architecture = load("resnet18_cifar10", changes).architecture
    if normalization == "group":
        return GroupNormResNet(GroupNormResNetConfig(**architecture))
    return ResNetForImageClassification(ResNetConfig(**architecture))


def train_model(
    model: nn.Module, train: images.Images, held_out: images.Images, case: Case, seed: int, num_images: int
) -> dict[str, Any]:
    """Train, and return losses of steps, the last loss, and accuracy and loss on what is held out."""
    optimizer = torch.optim.SGD(model.double().parameters(), lr=case.rate, momentum=0.9)
    order, num_steps, step_losses = Order(len(train), case.batch, seed, "carry"), num_images // case.batch, []
    model.train()
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = case.rate * min(1.0, (step + 1) / (0.1 * num_steps))
        keys = np.stack(order.samples(step), 1).tolist()
        batch = train.collate([train.draw(*key) for key in keys])
        total = 0.0
        parts = [batch[name].split(case.micro_batch) for name in ("pixel_values", "labels")]
        for pixels, labels in zip(*parts, strict=True):
            loss = F.cross_entropy(model(pixels.double().contiguous()).logits, labels, reduction="sum") / case.batch
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        step_losses.append(total)
    whole = held_out.collate([held_out.draw(0, place) for place in range(len(held_out))])
    with torch.no_grad():
        logits = model.eval()(whole["pixel_values"].double().contiguous()).logits
    return {
        "losses": step_losses,
        "loss": statistics.mean(step_losses[-max(1, num_steps // 10) :]),
        "accuracy": float((logits.argmax(-1) == whole["labels"]).float().mean()),
        "eval_loss": float(F.cross_entropy(logits, whole["labels"])),
    }


def measure(data: str, normalization: str, seed: int, folder: Path, num_images: int) -> list[dict[str, Any]]:
    """Train every way and k of a seed; the distance of curves is that of pairs."""
    train, held_out = build_data(data, folder, seed)
    rows, done = [], dict[tuple[int, int, float], dict[str, Any]]()
    for way, ks in WAYS.items():
        for k in ks:
            case = Case(way, k)
            key = case.batch, case.micro_batch, case.rate
            if key not in done:  # 64 images in 4 micro-batches come in two ways
                model = build_model(data, normalization, seed)
                done[key] = train_model(model, train, held_out, case, seed, num_images)
            row = dict(done[key])
            curve = np.array(row.pop("losses"))
            if way == "cut":
                row["apart"] = float(np.max(np.abs(curve / np.array(done[B, B, RATE]["losses"]) - 1)))
            place = {"data": data, "normalization": normalization, "way": way, "k": k, "seed": seed}
            rows.append(place | row)
            print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = harness.flags("cifar10", __doc__, only=DATA)
    parser.add_argument("--seeds", type=harness.positive, default=5)
    parser.add_argument("--num_images", type=harness.positive, default=NUM_IMAGES, help="that a run sees")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    more = {"seeds": arguments.seeds, "num_images": arguments.num_images}
    about = harness.about("make bench NAME=cifar10", ("torch", "transformers"), **more)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        draw_gratings(Path(folder))
        for data, normalization in itertools.product(arguments.only, NORMALIZATIONS):
            for seed in range(arguments.seeds):
                rows += measure(data, normalization, seed, Path(folder), arguments.num_images)
    results = {"about": about, "rows": rows}
    harness.write(arguments.output, results, parts={"cifar10": ("cifar10.md", part(results))})


def spread(values: list[float], form: str) -> str:
    """Write mean and standard deviation.

    >>> spread([1.0, 2.0, 3.0], ".1f")
    '2.0 ± 1.0'
    """
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):{form}} ± {deviation:{form}}"


def tables(results: dict[str, Any]) -> str:
    lines = []
    names = ("data", "normalization", "way", "k")
    for place in dict.fromkeys(tuple(row[name] for name in names) for row in results["rows"]):
        rows = [row for row in results["rows"] if tuple(row[name] for name in names) == place]
        case = Case(*place[2:])
        apart = f"{max(row['apart'] for row in rows):.1g}" if "apart" in rows[0] else "-"
        accuracy = spread([100 * row["accuracy"] for row in rows], ".1f")
        lines.append(
            [
                *(*place[:3], f"{case.batch} = {case.micro_batch} x {case.k}", f"{case.rate:g}"),
                *(spread([row["loss"] for row in rows], ".3f"), f"{accuracy} %", apart),
            ]
        )
    columns = "data | normalisation | k is | step | rate | training loss | held-out accuracy | apart"
    seeds = f"{results['about']['seeds']} seeds; ± is the standard deviation. Apart: the largest of all, 1 is 100 %.\n"
    return f"{harness.table(columns, lines)}\n{seeds}\n{count_lower(results['rows'])}"


def count_lower(rows: list[dict[str, Any]]) -> str:
    """Say in how many pairs of runs the training loss ended lower with k = 4 and 8 than with k = 1, at the same rate."""
    losses = {
        (row["data"], row["normalization"], row["seed"], row["k"]): row["loss"]
        for row in rows
        if row["way"] == "same rate"
    }
    pairs = [place[:3] for place in losses if place[3] == 1]
    counts = [f"{sum(losses[*pair, k] < losses[*pair, 1] for pair in pairs)} with k = {k}" for k in KS[1:]]
    told = "At the same rate the training loss ended lower than with k = 1"
    return f"{told} in {' and '.join(counts)}, of {len(pairs)} pairs each.\n"


def part(results: dict[str, Any]) -> str:
    return harness.part("cifar10.py", results["about"], tables(results))


if __name__ == "__main__":
    main()
