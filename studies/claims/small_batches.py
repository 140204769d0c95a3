"""Claims about few samples per device: how fast kernels are, what gradients are, what batch normalisation does."""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BertConfig, BertModel, ResNetConfig, ResNetForImageClassification
from verdicts import Case, Claim, Experiment, column, equal, less, spread, within

from samestep.cut import layout as plan
from samestep.cut.order import Order
from samestep.data import images
from samestep.models.resnet import GroupNormResNet, GroupNormResNetConfig
from samestep.recipe.catalog import load
from stepplan import hardware, memory, timing

HERE = (sys.modules[__name__],)
Result = dict[str, Any]
FEW = 8
"""Samples per device that are said to be enough."""
MODELS = {
    "BERT-Base, length 128": ("bert_base", {"max_seq_length": 128}),
    "GPT-2 124M, length 1024": ("gpt2_124m", {}),
    "ResNet-50": ("resnet50_imagenet_4xt4", {}),
}
DEVICES = {"t4": "fp16", "3090": "bf16", "a100-80": "bf16", "h100": "bf16"}


class Pieces(nn.BatchNorm2d):
    """Batch normalisation whose statistics are those of b images each, as if micro-batches of b came one after the other."""

    def __init__(self, channels: int, b: int):
        super().__init__(channels)
        self.b = b

    def forward(self, x: Tensor) -> Tensor:
        """Normalise images [B, C, H, W], B a multiple of b."""
        if not self.training:
            return super().forward(x)
        number = len(x) // self.b
        side_by_side = x.view(number, self.b, *x.shape[1:]).transpose(0, 1).flatten(1, 2)  # pieces as more channels
        mean, variance = x.new_zeros(number * x.shape[1]), x.new_ones(number * x.shape[1])
        weight, bias = self.weight.repeat(number), self.bias.repeat(number)
        y = F.batch_norm(side_by_side, mean, variance, weight, bias, training=True, momentum=1.0, eps=self.eps)
        with torch.no_grad():
            for name, values in (("running_mean", mean), ("running_var", variance)):
                getattr(self, name).lerp_(values.view(number, -1).mean(0), self.momentum)
        return y.view(self.b, number, *x.shape[1:]).transpose(0, 1).flatten(0, 1)


def make_network(settings: Result, b: int | None) -> nn.Module:
    """A small ResNet: batch normalisation of b images each, or with None group normalisation."""
    recipe = load("resnet_digits_cpu", settings["recipe"])
    if b is None:
        return GroupNormResNet(GroupNormResNetConfig(**recipe.architecture))
    network = ResNetForImageClassification(ResNetConfig(**recipe.architecture))
    for module in list(network.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, Pieces(child.num_features, b))
    return network


def few(settings: Result, seed: int) -> Result:
    """Speeds on this CPU and predicted ones, errors of gradients, and held-out errors of trainings."""
    return {
        "measured": measured_speeds(settings),
        "predicted": predicted_speeds(settings),
        "gradient": gradient_errors(settings, seed),
        "training": {str(b): train_digits(settings, seed, b) for b in (*settings["b"], settings["batch"], None)},
    }


# ---------------------------------------------------------------------------------------------------------------------
# Speed


def measured_speeds(settings: Result) -> Result:
    """Samples per second in micro-batches of b, over those in one of `most`: medians of rounds in turns.

    Times are of the processor: what else runs on the machine counts little.
    """
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
    bert = BertModel(BertConfig(vocab_size=512, max_position_embeddings=128, **shape), add_pooling_layer=False)
    dense = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    digits = make_network(settings, None)
    calls: dict[str, Callable[[int], Tensor]] = {
        "a transformer, 2 x 128, length 128": lambda b: bert(torch.zeros(b, 128, dtype=torch.long)).last_hidden_state,
        "a ResNet on digits": lambda b: digits(torch.zeros(b, 1, 32, 32)).logits,
        "linear layers, 4 x 512, a vector each": lambda b: dense(torch.zeros(b, 512)),
    }
    sizes, most = settings["sizes"], settings["sizes"][-1]
    times: dict[tuple[str, int], list[float]] = {}
    for number in range(settings["rounds"] + 1):
        for name, call in calls.items():
            for b in sizes:
                start = time.process_time()
                for _ in range(most // b):
                    call(b).square().mean().backward()
                if number:  # the first round warms up
                    times.setdefault((name, b), []).append(time.process_time() - start)
    return {
        name: {
            str(b): statistics.median(
                whole / part for part, whole in zip(times[name, b], times[name, most], strict=True)
            )
            for b in sizes
        }
        for name in calls
    }


def predicted_speeds(settings: Result) -> Result:
    """The same by stepplan.timing, on one device, for one step of `most` samples."""
    found: Result = {}
    most = settings["sizes"][-1]
    for device, precision in DEVICES.items():
        for title, (name, changes) in MODELS.items():
            model = memory.model_from_recipe(load(name, changes))
            work, software = timing.count_work(model, precision), timing.default_software(precision)
            if title == "ResNet-50":
                software = timing.default_software(precision, kernels="channels_last")
            seconds = {
                b: timing.step_time(
                    work,
                    plan.solve_layout(num_processes=1, global_batch_size=most, per_device_train_batch_size=b),
                    hardware.parse(f"1x{device}"),
                    precision,
                    software,
                ).total
                for b in settings["sizes"]
            }
            found[f"{title}, {device}, {precision}"] = {str(b): seconds[most] / seconds[b] for b in seconds}
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Gradients, and trainings


def batches(settings: Result, seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """The steps' images and labels, and those that are held out."""
    train, held_out = images.build(load("resnet_digits_cpu", settings["recipe"] | {"seed": seed}))
    order, found = Order(len(train), settings["batch"], seed), []
    for step in range(settings["steps"]):
        epochs, ids = order.samples(step)
        found.append(train.collate([train.draw(*each) for each in zip(epochs.tolist(), ids.tolist(), strict=True)]))
    rest = held_out.collate([held_out.draw(0, place) for place in range(len(held_out))])
    steps = [(each["pixel_values"].contiguous(), each["labels"]) for each in found]
    return steps, (rest["pixel_values"].contiguous(), rest["labels"])


def gradient_errors(settings: Result, seed: int) -> Result:
    """Relative distance of a step's first gradient, in micro-batches of b, from that of the whole batch; float64."""
    pixels, labels = batches(settings | {"steps": 1}, seed)[0][0]
    found: Result = {}
    for kind in ("group", "batch"):
        gradients = {}
        for b in (settings["batch"], *settings["b"]):
            torch.manual_seed(seed)
            network = make_network(settings, None if kind == "group" else b).double().train()
            cut = settings["batch"] if kind == "batch" else b  # Pieces cut by themselves
            for x, y in zip(pixels.double().split(cut), labels.split(cut), strict=True):
                (F.cross_entropy(network(x).logits, y, reduction="sum") / len(labels)).backward()
            gradients[b] = torch.cat([p.grad.flatten() for p in network.parameters()])
        whole = gradients[settings["batch"]]
        found[kind] = {str(b): float((gradients[b] - whole).norm() / whole.norm()) for b in settings["b"]}
    return found


def train_digits(settings: Result, seed: int, b: int | None) -> Result:
    """Held-out loss and error after SGD with momentum 0.9, warm-up over the first tenth."""
    steps, (pixels, labels) = batches(settings, seed)
    torch.manual_seed(seed)
    network = make_network(settings, b).train()
    optimizer = torch.optim.SGD(network.parameters(), lr=settings["rate"], momentum=0.9)
    for number, (x, y) in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = settings["rate"] * min(1.0, (number + 1) / (len(steps) / 10))
        F.cross_entropy(network(x).logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = network.eval()(pixels).logits
    return {
        "loss": float(F.cross_entropy(logits, labels)),
        "error": float((logits.argmax(-1) != labels).float().mean()),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Claims


def few_claims(results: list[Result]) -> list[Claim]:
    def slow(kind: str) -> tuple[Case, ...]:
        return tuple(
            within(f"{name}: {b} samples", [100 * each for each in column(results, kind, name, b)], 0, 80, " %")
            for name, of in results[0][kind].items()
            for b in of
            if int(b) < FEW
        )

    def enough(kind: str) -> tuple[Case, ...]:
        return tuple(
            within(name, [100 * each for each in column(results, kind, name, str(FEW))], 80, 1000, " %")
            for name in results[0][kind]
        )

    sizes = list(results[0]["gradient"]["group"])
    whole = str(SETTINGS["batch"])
    error = {b: column(results, "training", b, "error") for b in results[0]["training"]}
    loss = {b: column(results, "training", b, "loss") for b in results[0]["training"]}
    most = SETTINGS["sizes"][-1]
    return [
        Claim(
            f"Fewer than {FEW} samples leave kernels idle: at most 80 % of the speed with {most}, on this CPU.",
            slow("measured"),
            "It is work that fills a device, not samples: 128 tokens are as good as 128 vectors.",
        ),
        Claim(
            f"Fewer than {FEW} samples leave kernels idle: at most 80 % of the speed with {most}, on GPUs (predicted).",
            slow("predicted"),
            "Reading weights and starting kernels is the same for one sample and for many. What it is of a step, the planner "
            "says where it is more than 30 %.",
        ),
        Claim(
            f"{FEW} samples are enough: 80 % of the speed with {most} and more.",
            enough("measured") + enough("predicted"),
        ),
        Claim(
            f"Fewer than {FEW} samples per device make the gradient's statistics worse.",
            tuple(
                less(
                    f"{kind} normalisation, {b} samples: relative error below that with {FEW}",
                    column(results, "gradient", kind, str(FEW)),
                    column(results, "gradient", kind, b),
                )
                for kind in ("batch",)
                for b in sizes
                if int(b) < FEW
            )
            + tuple(
                _not_exact(f"no batch normalisation, {b} samples", column(results, "gradient", "group", b))
                for b in sizes
                if int(b) < FEW
            ),
            "The step's gradient is a sum over the global batch, however it is cut. Batch normalisation takes statistics of "
            "what is on a device: relative errors of the gradient "
            + "; ".join(f"{b}: {spread(column(results, 'gradient', 'batch', b))}" for b in sizes)
            + ".",
        ),
        Claim(
            f"With batch normalisation, fewer than {FEW} samples per device train worse (held-out loss, beside all {whole}).",
            tuple(less(f"{b} samples", loss[whole], loss[b]) for b in sizes if int(b) < FEW),
            "Errors of classification: "
            + "; ".join(f"{b} samples {spread(error[b])}" for b in error if b != "None")
            + f"; group normalisation {spread(error['None'])}.",
        ),
        Claim(
            f"With batch normalisation, {FEW} samples per device train as well as all {whole} at once.",
            tuple(_no_worse(f"{b} samples", loss[b], loss[whole]) for b in sizes if int(b) >= FEW),
        ),
    ]


def _not_exact(name: str, errors: list[float]) -> Case:
    exact = equal(name, errors, 1e-12, "relative error: ")
    return Case(exact.name, exact.measured, not exact.holds, "equal")


def _no_worse(name: str, ours: list[float], theirs: list[float]) -> Case:
    worse = less(name, theirs, ours)
    return Case(name, worse.measured, not worse.holds, "less")


SETTINGS: Result = {
    "recipe": {"hidden_sizes": [8, 16, 16], "embedding_size": 8},
    "batch": 64,
    "b": [2, 4, 8, 16],
    "steps": 60,
    "rate": 0.05,
    "sizes": [1, 2, 4, 8, 16, 32],
    "rounds": 3,
}
EXPERIMENTS = [
    Experiment(
        "few",
        "Few samples per device",
        "Speed: forward and backward of 32 samples in micro-batches of 1 to 32, processor time, medians of 3 rounds in turns; "
        "of GPUs by stepplan.timing. Gradients and trainings: the recipe resnet_digits_cpu made smaller (channels 8 to 16), "
        "64 digits a step, statistics of batch normalisation from 2 to 64 of them, 60 steps of SGD with momentum "
        "0.9. The same samples and first weights for all runs of a seed.",
        SETTINGS,
        few,
        few_claims,
        HERE,
        minutes=0.5,
        quick={"b": [4, 8], "steps": 5, "sizes": [4, 8, 16], "rounds": 1},
    ),
]
