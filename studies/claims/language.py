"""Many small language models at once: rows of one matrix, which differ in rate, optimizer, and whose gradients they wait for.

All rows take the same micro-batches in the same order. A row's workers take them in turn, or at random, each with a copy of the
parameters of its own: what asynchronous training is, on one process, and a function of the seed alone.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from samestep.data.builtin.python_docs import python_pages

Result = dict[str, Any]
POINTS = 20  # of a curve of held-out losses
WORST = 100.0  # a training that diverged counts as bad, not as NaN
FORGETS = 0.95  # what delay compensation keeps of its mean square, as published
COMPENSATION = 2.0  # lambda_0, as published


@dataclasses.dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        factor: multiple of the unchanged rate.
        optimizer: sgd (m = beta1 m + (1 - beta1) g, a step of rate m) or adamw, without weight decay.
        workers: that deliver gradients; waiting: that are averaged before an update.
        order: which worker delivers next: in turn, or at random.
        correction: of asynchronous gradients: none, rate (divided by the staleness) or compensated (DC-ASGD-a).
        beta1, beta2: coefficients of the moments.
    """

    factor: float
    optimizer: str = "sgd"
    workers: int = 1
    waiting: bool = False
    order: str = "in turn"
    correction: str = "none"
    beta1: float = 0.9
    beta2: float = 0.999


class Characters(nn.Module):
    """A causal transformer of one layer, without dropout; the last product is with the embedding."""

    def __init__(self, num_characters: int, width: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.characters, self.places = nn.Embedding(num_characters, width), nn.Embedding(length, width)
        self.inner, self.between, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.attention, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, characters] of tokens [B, T]."""
        batch, length = tokens.shape
        x = self.characters(tokens) + self.places.weight
        q, k, v = self.attention(self.inner(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + torch.full((length, length), -math.inf).triu(1)
        x = x + self.mixed((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, -1))
        x = x + self.down(F.gelu(self.up(self.between(x))))
        return self.last(x) @ self.characters.weight.T


@functools.cache
def documentation(num_characters: int) -> np.ndarray:
    """Pages of Python's documentation as numbers of characters: the most frequent ones, and 0 for the rest."""
    text = np.frombuffer("\n".join(page for _, page in itertools.islice(python_pages(), 200)).encode(), np.uint8)
    frequent = np.argsort(-np.bincount(text, minlength=256), kind="stable")[: num_characters - 1]
    numbers = np.zeros(256, np.int64)
    numbers[frequent] = np.arange(1, num_characters)
    return numbers[text]


class Rows:
    """Parameters [R, P] of R trainings, and the gradients of all at once.

    Args:
        settings: width, heads, length, characters, b, held_out.
        seed: of the first weights, which all rows share, and of the micro-batches.
    """

    def __init__(self, settings: Result, seed: int):
        self.settings = settings
        torch.manual_seed(seed)
        self.model = Characters(*(settings[key] for key in ("characters", "width", "heads", "length")))
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.first = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        self.text = documentation(settings["characters"])
        self.rng = np.random.default_rng(seed)
        self.gradients = vmap(grad_and_value(self.loss), in_dims=(0, None))
        self.losses = vmap(self.loss, in_dims=(0, None))
        cut = len(self.text) * 9 // 10  # what is held out comes after
        self.train_until, self.held_out = cut, self.draw(settings["held_out"], cut, len(self.text))

    def loss(self, parameters: Tensor, tokens: Tensor) -> Tensor:
        """Mean cross entropy of tokens [B, T + 1], parameters [P]."""
        pieces = parameters.split([shape.numel() for shape in self.shapes.values()])
        named = {name: piece.view(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        logits = functional_call(self.model, named, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def draw(self, number: int, first: int, end: int) -> Tensor:
        """Sequences [number, T + 1] from anywhere in [first, end) of the text."""
        starts = self.rng.integers(first, end - self.settings["length"] - 1, number)
        return torch.from_numpy(self.text[starts[:, None] + np.arange(self.settings["length"] + 1)])


def arrivals(rows: Sequence[Row], micro_steps: int, seed: int) -> np.ndarray:
    """The worker that delivers at every micro-step [T, R]: in turn, or each with the same probability.

    Workers whose times are exponential and alike deliver at random. Rows that wait read the newest parameters: worker 0.
    """
    t, drawn = np.arange(micro_steps), np.random.default_rng((seed, 1)).random(micro_steps)
    columns = []
    for row in rows:
        at = t % row.workers if row.order == "in turn" else (drawn * row.workers).astype(int)
        columns.append(np.zeros_like(t) if row.waiting else at)
    return np.stack(columns, 1)


def train(rows: Sequence[Row], settings: Result, seed: int) -> tuple[list[list[float]], str]:
    """Train all rows over the same micro-batches.

    Returns:
        Held-out losses of every row at POINTS points, and a digest of all last parameters.
    """
    lot, steps = Rows(settings, seed), settings["micro_steps"]
    who = torch.from_numpy(arrivals(rows, steps, seed))
    every, number = torch.arange(len(rows)), max(row.workers for row in rows)
    theta = lot.first.repeat(len(rows), 1)
    copies, read_at = theta.repeat(number, 1, 1), torch.zeros(number, len(rows))
    update, window = Update(rows, theta), torch.tensor([row.workers if row.waiting else 1 for row in rows])
    total, updates = torch.zeros_like(theta), torch.zeros(len(rows))
    curve: list[Tensor] = []
    for step in range(steps):
        used = copies[who[step], every]
        gradients, _ = lot.gradients(used, lot.draw(settings["b"], 0, lot.train_until))
        staleness = updates - read_at[who[step], every]
        total += gradients
        due = (step + 1) % window == 0
        rate = settings["rate"] * min(1.0, (step + 1) / (steps / 10))
        theta = update(theta, total / window[:, None], theta - used, staleness, rate, due)
        total[due], updates = 0.0, updates + due
        copies[who[step], every], read_at[who[step], every] = theta, updates
        if (step + 1) * POINTS // steps > step * POINTS // steps:
            with torch.no_grad():
                curve.append(lot.losses(theta, lot.held_out).nan_to_num(WORST, WORST).clamp(max=WORST))
    digest = hashlib.sha256(theta.numpy().tobytes()).hexdigest()
    return [[round(each, 4) for each in losses] for losses in torch.stack(curve, 1).tolist()], digest


class Update:
    """The steps of all rows' optimizers: SGD and AdamW, with corrections for stale gradients.

    rate: by 1 / staleness (Zhang et al. 2016, arXiv:1511.05950).
    compensated: g + lambda_0 / sqrt(mean square of g) g g (theta now - theta read) (Zheng et al. 2017, arXiv:1609.08326).
    """

    def __init__(self, rows: Sequence[Row], theta: Tensor):
        def column(values: list[float]) -> Tensor:
            return torch.tensor(values)[:, None]

        self.factor = column([row.factor for row in rows])
        self.beta1, self.beta2 = column([row.beta1 for row in rows]), column([row.beta2 for row in rows])
        self.adamw = column([row.optimizer == "adamw" for row in rows])
        self.by_staleness = column([row.correction == "rate" for row in rows])
        self.compensated = torch.tensor([row.correction == "compensated" for row in rows])
        self.m, self.v = torch.zeros_like(theta), torch.zeros_like(theta)
        self.mean_square = torch.zeros_like(theta[self.compensated])
        self.done = torch.zeros(len(rows), 1)

    def __call__(self, theta: Tensor, g: Tensor, moved: Tensor, staleness: Tensor, rate: float, due: Tensor) -> Tensor:
        """Parameters [R, P] after the step; rows that are not due stay as they are.

        Args:
            theta: parameters.
            g: gradients.
            moved: theta - what the gradients were computed at.
            staleness: updates between the two [R].
            rate: of this step, before each row's factor.
            due: rows that are updated [R].
        """
        which = self.compensated
        if which.any():
            square = g[which].square()
            self.mean_square = FORGETS * self.mean_square + (1 - FORGETS) * square
            g = g.clone()
            g[which] += COMPENSATION / (self.mean_square + 1e-7).sqrt() * square * moved[which]
        due = due[:, None]
        self.done += due
        self.m = torch.where(due, self.beta1 * self.m + (1 - self.beta1) * g, self.m)
        self.v = torch.where(due, self.beta2 * self.v + (1 - self.beta2) * g * g, self.v)
        corrected = self.m / (1 - self.beta1**self.done).clamp(min=1e-8)
        root = (self.v / (1 - self.beta2**self.done).clamp(min=1e-8)).sqrt() + 1e-8
        direction = torch.where(self.adamw, corrected / root, self.m)
        by = torch.where(self.by_staleness, 1 / staleness.clamp(min=1)[:, None], torch.ones(1))
        # AdamW's unchanged rate is a hundredth of SGD's, so that one grid of factors serves both
        scale = torch.where(self.adamw, torch.tensor(0.01), torch.tensor(1.0))
        return torch.where(due, theta - rate * scale * self.factor * by * direction, theta)
