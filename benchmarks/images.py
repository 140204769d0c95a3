"""Images per second: our programs beside a plain PyTorch loop and transformers' Trainer, on a CPU.

    make bench NAME=images

Same model, data, batch, precision and threads; every program in a process of its own, in turns of some seconds (see
harness.py), so that a machine whose speed changes is the same for all. Counted are steps only, loading included, without
the first ones and without those that the end of a turn interrupted; no program evaluates or saves inside them.

- ours: the script as users launch it: channels_last in bf16 (`networks.memory_format`), fused optimizers, freed
  memory kept (`_internals.libc.stop_malloc_returning_memory`).
- plain: the loop that every tutorial has: DataLoader, autocast, cross_entropy, torch's optimizer with its defaults.
- plain, channels_last: the same, with model and images in channels_last.
- Trainer: transformers', on the same dataset.

resnet18_photographs is ResNet-18 of the paper on JPEG photographs (made here), 16 of 224 x 224 per step, batch-normalised.

And what the loaders deliver without a model, in one process.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))

import harness
import numpy as np
import torch
import torch.nn.functional as F
import transformers
import yaml
from harness import PRECISIONS, Program, spread
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from transformers import ResNetConfig, ResNetForImageClassification
from workloads import Samples

from samestep.data import captchas, images
from samestep.models.networks import CaptchaReader
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.recipe.catalog import load

SCRIPTS = {
    "captcha_cpu": "train_captcha.py",
    "resnet_digits_cpu": "train_image_classifier.py",
    "resnet18_photographs": "train_image_classifier.py",
}
PEERS = {"plain": "plain", "plain, channels_last": "channels_last", "transformers' Trainer": "trainer"}
# Steps of a round, the first ones included, and seconds of a turn: several steps.
STEPS = {"captcha_cpu": 15, "resnet_digits_cpu": 150, "resnet18_photographs": 15}
TURNS = {"captcha_cpu": 2.0, "resnet_digits_cpu": 2.0, "resnet18_photographs": 8.0}
WARM_UP = 5


# ---------------------------------------------------------------------------------------------------------------------
# What the peers train


class WithLoss(nn.Module):
    """A network that returns the mean loss, too, as Trainer wants it."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.network(pixel_values)
        logits = getattr(logits, "logits", logits)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


def things(name_or_file: str) -> tuple:
    """Make recipe, dataset and network."""
    if name_or_file == "captcha_cpu":
        recipe = load(name_or_file, {"num_validation_samples": 64})
        source, _ = captchas.build(recipe)
        torch.manual_seed(recipe.seed)
        return recipe, Samples(source), CaptchaReader(**recipe.architecture)
    recipe = load(name_or_file)
    source, _ = images.build(recipe)
    torch.manual_seed(recipe.seed)
    if recipe.normalization == "group":
        return recipe, Samples(source), GroupNormResNet(GroupNormResNetConfig(**recipe.architecture))
    return recipe, Samples(source), ResNetForImageClassification(ResNetConfig(**recipe.architecture))


def plain(name_or_file: str, precision: str, num_steps: int, channels_last: bool) -> list[float]:
    """Measure the seconds of each step of a loop as tutorials have it."""
    recipe, dataset, network = things(name_or_file)
    network.train()
    if channels_last:
        network.to(memory_format=torch.channels_last)
    if recipe.optimizer == "sgd":
        optimizer = torch.optim.SGD(network.parameters(), recipe.learning_rate, recipe.sgd_momentum)
    else:
        optimizer = torch.optim.AdamW(network.parameters(), recipe.learning_rate)
    loader, seconds = DataLoader(dataset, recipe.global_batch_size, shuffle=True, drop_last=True), []
    start = harness.clock()
    while len(seconds) < num_steps:
        for batch in loader:
            pixel_values = batch["pixel_values"]
            if channels_last:
                pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                logits = network(pixel_values)
                logits = getattr(logits, "logits", logits)
                loss = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if len(seconds) % 10 == 0:
                print(f"loss {loss.item():.3f}")
            now = harness.clock()
            seconds.append(now - start)
            start = now
            if len(seconds) == num_steps:
                break
    return seconds


def trainer(name_or_file: str, precision: str, num_steps: int) -> list[float]:
    """Measure the seconds of each step of transformers' Trainer."""
    recipe, dataset, network = things(name_or_file)

    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            times.append(harness.clock())

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=recipe.global_batch_size,
            learning_rate=recipe.learning_rate,
            optim="sgd" if recipe.optimizer == "sgd" else "adamw_torch",
            bf16=precision == "bf16",
            use_cpu=True,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            dataloader_drop_last=True,
            disable_tqdm=True,
            max_grad_norm=0,
        )
        transformers.Trainer(WithLoss(network), arguments, train_dataset=dataset, callbacks=[Clock()]).train()
    return np.diff(times).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# The comparison


def write_photographs(folder: Path) -> Path:
    """Write 128 JPEG photographs of 500 x 375 in two classes, and the recipe that trains on them."""
    rng = np.random.default_rng(0)
    for number in range(128):
        path = folder / "photos" / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(256, size=(60, 80, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)
    resnet18 = {"layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    data = {"train_dir": str(folder / "photos"), "num_labels": 2, "validation_fraction": 0.1, "num_train_samples": 115}
    values = {"extends": "resnet50_imagenet_4xt4", "global_batch_size": 16} | resnet18 | data
    file = folder / "resnet18_photographs.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def ours(name: str, recipe: str, precision: str, num_steps: int, work: Path, threads: int) -> Program:
    words = harness.launch(ROOT / "scripts" / SCRIPTS[name], precision)
    words += ["--recipe", recipe, "--max_train_steps", str(num_steps)]
    words += ["--num_warmup_steps", "5", "--output_dir", str(work / f"ours-{precision}")]
    words += ["--num_validation_samples", "64"] if name == "captcha_cpu" else []
    return Program(words, work, work / f"ours-{precision}.log", threads)


def peer(kind: str, recipe: str, precision: str, num_steps: int, work: Path, threads: int) -> Program:
    file = work / f"{kind}-{precision}.json"
    words = [sys.executable, __file__, "--peer", kind, recipe, precision, str(num_steps), str(file)]
    return Program(words, work, file.with_suffix(".log"), threads)


def rate(batch: int, seconds: list[float]) -> float:
    """Compute images per second, without the first steps and steps that the end of a turn interrupted."""
    counted = seconds[WARM_UP:]
    longest = 3 * statistics.median(counted)
    return batch / statistics.mean(second for second in counted if second < longest)


def measure(name: str, recipe: str, num_steps: int, threads: int) -> dict[str, dict[str, float]]:
    """Measure images per second of each program, by precision, in one round."""
    batch, results = load(recipe).global_batch_size, {}
    with tempfile.TemporaryDirectory() as folder:
        work, running = Path(folder), []
        for precision in PRECISIONS:
            running.append(ours(name, recipe, precision, num_steps, work, threads))
            running += [peer(kind, recipe, precision, num_steps, work, threads) for kind in PEERS.values()]
        harness.run_in_turns(running, TURNS[name])
        for precision in PRECISIONS:
            lines = (work / f"ours-{precision}" / "metrics.jsonl").read_text().splitlines()
            seconds = [line["seconds"] for line in map(json.loads, lines) if "seconds" in line]
            results[precision] = {"ours": rate(batch, seconds)}
            for title, kind in PEERS.items():
                results[precision][title] = rate(batch, json.loads((work / f"{kind}-{precision}.json").read_text()))
    return results


def loading(photographs: Path) -> list[dict]:
    """Measure images per second that one process delivers, ready for a model."""
    rows = []
    cases = {
        "captchas of 60 x 160, from the memory map": (captchas, load("captcha_cpu")),
        "digits, shifted": (images, load("resnet_digits_cpu")),
        "JPEG photographs of 500 x 375, decoded, cropped and flipped to 224 x 224": (images, load(str(photographs))),
    }
    for title, (module, recipe) in cases.items():
        source, _ = module.build(recipe)
        seconds = []
        for round_ in range(6):
            places = [(place + 64 * round_) % len(source) for place in range(64)]
            start = harness.clock()
            source.collate([source.draw(round_, place) for place in places])
            seconds.append(harness.clock() - start)
        rows.append({"source": title, "images_per_second": 64 / statistics.median(seconds)})
    return rows


def main() -> None:
    parser = harness.flags("images", __doc__, rounds=3, only=SCRIPTS, threads=True)
    parser.add_argument("--steps", type=harness.positive, help="of a round; none: by recipe")
    parser.add_argument("--peer", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        kind, name, precision, num_steps, file = arguments.peer
        if kind == "trainer":
            seconds = trainer(name, precision, int(num_steps))
        else:
            seconds = plain(name, precision, int(num_steps), channels_last=kind == "channels_last")
        Path(file).write_text(json.dumps(seconds))
        return
    rows = harness.read_other_rows(arguments.output, "rows", "recipe", arguments.only)
    with tempfile.TemporaryDirectory() as folder:
        photographs = write_photographs(Path(folder))
        for name in arguments.only:
            num_steps, recipe = arguments.steps or STEPS[name], str(photographs) if name == photographs.stem else name
            subprocess.run(
                [sys.executable, __file__, "--peer", "plain", recipe, "no", "1", "/dev/null"], check=True
            )  # draws
            rounds = []
            for _ in range(arguments.rounds):
                rounds.append(measure(name, recipe, num_steps, arguments.threads))
                print(name, rounds[-1], file=sys.stderr)
            rows.append({"recipe": name, "steps": num_steps - WARM_UP, "rounds": rounds})
        loaded = loading(photographs)
    rows.sort(key=lambda row: row["recipe"])
    about = harness.about("make bench NAME=images", ("torch", "accelerate", "transformers"), arguments.threads)
    results = {"about": about, "rows": rows, "loading": loaded}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    speeds, bf16 = [], []
    for row in results["rows"]:
        for precision in PRECISIONS:
            rounds = [numbers[precision] for numbers in row["rounds"]]
            ratios = [spread([numbers["ours"] / numbers[title] for numbers in rounds], ".2f") for title in PEERS]
            speeds.append([row["recipe"], precision, spread([numbers["ours"] for numbers in rounds], ",.0f"), *ratios])
        bf16_ratios = [
            [numbers["bf16"]["ours"] / numbers["no"][name] for numbers in row["rounds"]] for name in ("ours", "plain")
        ]
        bf16.append([row["recipe"], *(spread(values, ".2f") for values in bf16_ratios)])
    loaded = [[row["source"], f"{row['images_per_second']:,.0f}"] for row in results["loading"]]
    steps = ", ".join(f"{row['steps']} steps of {row['recipe']}" for row in results["rows"])
    head = ["recipe", "precision", "ours, images/s", *(f"ours / {title}" for title in PEERS)]
    return harness.page(
        "Images per second",
        "images.py",
        results["about"],
        f"{harness.table(head, speeds)}\n"
        "Ours in bf16, channels_last, beside float32, channels first:\n\n"
        f"{harness.table('recipe | bf16 / ours in float32 | bf16 / plain in float32', bf16)}\n"
        f"What one process loads, without a model:\n\n{harness.table('source | images/s', loaded)}\n"
        f"Medians (smallest to largest) of {len(results['rows'][0]['rounds'])} rounds of {steps}, all programs of a round in "
        "turns.\n",
    )


if __name__ == "__main__":
    main()
