"""Loops of `exact_steps` and `exact_windows` on the processes that forked.Server starts: what each case leaves, in RANK.json.

Every case takes the same optimizer steps on any number of processes, and says its weights and its mean losses.
"""

import contextlib
import json
import os
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from samestep import evaluate, exact_steps, exact_windows, per_sample

GEN = torch.Generator().manual_seed(0)
POINTS = [(torch.randn(4, generator=GEN), torch.randn(1, generator=GEN)) for _ in range(26)]
TEXTS = [torch.randint(2, 30, (3 + number * 5 % 9,), generator=GEN) for number in range(19)]


def squares(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(x)


def masked(model, batch):
    logits = model(batch["input_ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), count_masked(batch)


def count_masked(batch):
    return (batch["labels"] != -100).sum()


def mask(samples):
    """Collate as for a masked language model: padded, one of three tokens masked by torch's own generator."""
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    is_masked = (torch.rand(ids.shape) < 1 / 3) & (ids != 0)
    return {"input_ids": ids.masked_fill(is_masked, 1), "labels": ids.where(is_masked, -100)}


class Stream(IterableDataset):
    """Streams POINTS, of which a process takes every size-th, or all."""

    def __init__(self, first=0, size=1):
        self.first, self.size = first, size

    def __iter__(self):
        return islice(POINTS, self.first, None, self.size)


def build(accelerator, kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 1) if kind == "points" else nn.Sequential(nn.Embedding(30, 8), nn.Tanh(), nn.Linear(8, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return accelerator.prepare(model, optimizer)


def train(accelerator, model, optimizer, steps, loss):
    """Train; every other step in the words of the scripts."""
    losses, ends = [], []
    for step in steps:
        is_written_out = step.index % 2 == 1
        for batch in step.micro_batches if is_written_out else step:
            with accelerator.accumulate(model):
                if is_written_out:
                    sums, _ = loss(model, batch)
                    accelerator.backward((sums / step.num_targets.clamp(min=1)).sum() * step.loss_scale)
                    step.add_to_log(sums)
                else:
                    accelerator.backward(step.loss(loss(model, batch)))
                optimizer.step()
                optimizer.zero_grad()
        losses.append(step.mean_loss().item())
        ends.append(step.is_last_of_epoch)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return {"losses": losses, "weights": weights.tolist(), "ends": ends}


def len_or_none(steps):
    try:
        return len(steps)
    except TypeError:
        return None


def cases(accelerator):
    size, rank = accelerator.num_processes, accelerator.process_index

    def points(batch):
        return len(batch[0])

    def windows(loader, k, num_epochs=2, loss=squares, count=points):
        model, optimizer = build(accelerator, "points")
        steps = exact_windows(accelerator, loader, gradient_accumulation_steps=k, targets=count, num_epochs=num_epochs)
        return train(accelerator, model, optimizer, steps, loss) | {"length": len_or_none(steps)}

    def shuffled(num_skipped=0, k=6 // size):
        """Read three epochs in one call; or the second one, resumed in its middle, and the third one."""
        with setting(accelerator.dataloader_config, "use_seedable_sampler", True):
            torch.manual_seed(3)
            loader = accelerator.prepare(DataLoader(POINTS, batch_size=2, shuffle=True))
        if not num_skipped:
            return windows(loader, k, 3)
        model, optimizer = build(accelerator, "points")
        settings = {"gradient_accumulation_steps": k, "targets": points}
        loader.set_epoch(1)
        parts = [exact_windows(accelerator, skip_first_batches(loader, num_skipped), **settings)]
        result = train(accelerator, model, optimizer, parts[0], squares)
        loader.set_epoch(2)
        parts.append(exact_windows(accelerator, loader, **settings))
        second = train(accelerator, model, optimizer, parts[1], squares)
        both = {name: result[name] + second[name] for name in ("losses", "ends")}
        return second | both | {"length": sum(map(len, parts))}

    def synchronised(run):
        """With GradientAccumulationPlugin(sync_each_batch=True)."""
        with setting(accelerator.gradient_state.plugin_kwargs, "sync_each_batch", True):
            return run()

    def steps(kind, data, collate, B, b, loss, count, **more):
        model, optimizer = build(accelerator, kind)
        settings = {"global_batch_size": B, "per_device_batch_size": b, "targets": count}
        return train(accelerator, model, optimizer, exact_steps(accelerator, data, collate, **settings, **more), loss)

    k = 6 // size
    # A full last window, read ahead from a prepared loader; a last window of 2 samples
    yield "prepared", lambda: windows(accelerator.prepare(DataLoader(POINTS[:24], batch_size=2)), k)
    yield "prepared, tail", lambda: windows(accelerator.prepare(DataLoader(POINTS, batch_size=2)), k)
    yield "prepared stream", lambda: windows(accelerator.prepare(DataLoader(Stream(), batch_size=2)), k, 1)
    yield "own shards", lambda: windows(DataLoader(Stream(rank, size), batch_size=2), k)
    yield "shuffled", shuffled
    yield "shuffled, resumed", lambda: shuffled(6 // size)
    yield (
        "weighted",
        lambda: windows(
            accelerator.prepare(DataLoader(POINTS, batch_size=2)), k, 2, weighted, lambda b: weigh(b[1]).sum()
        ),
    )
    yield (
        "synchronised",
        lambda: synchronised(lambda: windows(accelerator.prepare(DataLoader(POINTS, batch_size=2)), k)),
    )
    # All samples on process 0: the others never see one
    alone = DataLoader(POINTS, batch_size=12) if rank == 0 else []
    yield "others have none", lambda: windows(alone, 1, 1)
    yield "idle", lambda: steps("points", POINTS, stack, 2, 1, squares, points)
    yield "resumed", lambda: steps("points", POINTS, stack, 7, 2, squares, points, num_steps=5, first_step=3)
    yield (
        "weighted steps",
        lambda: steps("points", POINTS, stack, 5, 2, weighted, lambda b: weigh(b[1]).sum(), num_epochs=2),
    )
    yield "synchronised steps", lambda: synchronised(lambda: steps("points", POINTS, stack, 7, 2, squares, points))
    collate = per_sample(mask, seed=3)
    yield "masks", lambda: steps("texts", TEXTS, collate, 6, 2, masked, count_masked, num_epochs=2)
    yield (
        "by length",
        lambda: steps("texts", TEXTS, collate, 6, 4, masked, count_masked, length=len, max_tokens=24, epoch_end="keep"),
    )
    model, _ = build(accelerator, "points")
    for name, data in {"26": POINTS, "2": POINTS[:2]}.items():
        yield (
            f"evaluate {name}",
            lambda data=data: evaluate(accelerator, model, data, squares, per_device_batch_size=3).tolist(),
        )
        loader = accelerator.prepare(DataLoader(data, batch_size=4))
        yield f"evaluate {name}, prepared", lambda loader=loader: evaluate(accelerator, model, loader, squares).tolist()


def weighted(model, batch):
    """Squared errors times weights, the last of which is 0.3 of a whole target alone: a sum of weights below 1."""
    x, y = batch
    return (weigh(y) * (model(x) - y).square()).sum(), weigh(y).sum()


def weigh(y):
    return torch.where(y > 0, 0.013, 0.002).double() * (y > -1)


@contextlib.contextmanager
def setting(options, name, value):
    """Set an attribute or an item for a while."""
    before = dict(options) if isinstance(options, dict) else vars(options).copy()
    options.__setitem__(name, value) if isinstance(options, dict) else setattr(options, name, value)
    try:
        yield
    finally:
        options.update(before) if isinstance(options, dict) else vars(options).update(before)
        if isinstance(options, dict) and name not in before:
            del options[name]


def stack(samples):
    return torch.utils.data.default_collate(samples)


def main(folder: str) -> None:
    accelerator = Accelerator()
    results = {name: case() for name, case in cases(accelerator)}
    (Path(folder) / f"{accelerator.process_index}.json").write_text(json.dumps(results))
    accelerator.wait_for_everyone()
    os._exit(0)
