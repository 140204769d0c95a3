"""Windows of a loader: the epoch is the caller's, the number of steps is known before, targets may have weights."""

import multiprocessing

import datasets
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from common import fresh_accelerator
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from samestep import exact_steps, exact_windows
from samestep.errors import UsageError

NUMBERS = list(range(12))
K = {"gradient_accumulation_steps": 2, "targets": len}


@pytest.fixture
def accelerator():
    fresh_accelerator()
    yield Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    fresh_accelerator()


class Shuffled(IterableDataset):
    """A stream whose order follows from its epoch."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from (torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))).tolist()


class Nameless(Shuffled):
    """One that does not say its epoch."""

    def __init__(self):
        self._number = 0

    def set_epoch(self, epoch):
        self._number = epoch

    epoch = property()

    def __iter__(self):
        yield from range(self._number, self._number + 4)


class Shared(Shuffled):
    """One whose epoch workers share."""

    def __init__(self):
        self.epoch = multiprocessing.Value("i", 0)

    def set_epoch(self, epoch):
        self.epoch.value = epoch

    def __iter__(self):
        yield from (torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch.value))).tolist()


class ShuffledBatches(Sampler):
    def __init__(self):
        self.stream = Shuffled()
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = self.stream.epoch = epoch

    def __iter__(self):
        return iter(BatchSampler(list(self.stream), 2, drop_last=False))

    def __len__(self):
        return 6


class Wrapper:
    """A loader of one's own, around one of torch's."""

    def __init__(self):
        self.dataset = Shuffled()
        self.epoch, self.loader = 0, DataLoader(self.dataset, batch_size=2)

    def set_epoch(self, epoch):
        self.epoch = epoch
        self.dataset.set_epoch(epoch)

    def __iter__(self):
        return iter(self.loader)


def distributed_loader():
    sampler = DistributedSampler(NUMBERS, num_replicas=2, rank=1)
    return DataLoader(NUMBERS, batch_size=2, sampler=sampler), sampler


def hub_stream():
    data = datasets.IterableDataset.from_generator(lambda: ({"x": number} for number in NUMBERS))
    return data.shuffle(seed=1, buffer_size=8)


def loaders(accelerator):
    """By name: a loader, and what has the caller's `set_epoch` (None: nothing)."""
    shuffled = accelerator.prepare(DataLoader(NUMBERS, batch_size=2, shuffle=True))
    yield "prepared", (shuffled, shuffled)
    shuffled = accelerator.prepare(DataLoader(NUMBERS, batch_size=2, shuffle=True))
    yield "prepared, not set", (shuffled, None)
    yield "sampler", distributed_loader()
    prepared_loader = accelerator.prepare(distributed_loader()[0])
    yield "prepared sampler", (prepared_loader, prepared_loader)
    yield "batch sampler", (DataLoader(NUMBERS, batch_sampler=(batches := ShuffledBatches())), batches)
    yield "stream", (DataLoader(stream := Shuffled(), batch_size=2), stream)
    prepared_stream = accelerator.prepare(DataLoader(Shuffled(), batch_size=2))
    yield "prepared stream", (prepared_stream, prepared_stream)
    yield "stream, not set", (DataLoader(Shuffled(), batch_size=2), None)
    yield "datasets", (DataLoader(data := hub_stream(), batch_size=2), data)
    prepared_stream = accelerator.prepare(DataLoader(hub_stream(), batch_size=2))
    yield "prepared datasets", (prepared_stream, prepared_stream)
    yield "shared", (DataLoader(shared := Shared(), batch_size=2, num_workers=1), shared)
    yield "nameless", (DataLoader(nameless := Nameless(), batch_size=2), nameless)
    yield "one's own", (wrapper := Wrapper(), wrapper)


NAMES = (
    "prepared|prepared, not set|sampler|prepared sampler|batch sampler|stream|prepared stream|stream, not set|datasets|"
    "prepared datasets|shared|nameless|one's own"
).split("|")


def flatten(batch):
    return (batch["x"] if isinstance(batch, dict) else batch).tolist()


def read(accelerator, loader, **more):
    """Read a loader as a loop does, without training."""
    seen = []
    targets = {"targets": lambda batch: len(flatten(batch))}
    for step in exact_windows(accelerator, loader, **K | targets | more):
        step._is_first = False
        for batch in step:
            seen += flatten(batch)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_the_epoch_is_the_callers(accelerator, name):
    """Epoch by epoch as without samestep, from epoch 0 and from epoch 3; and several epochs in one call go on from there."""
    assert list(dict(loaders(accelerator))) == NAMES
    for first in (0, 3):
        torch.manual_seed(1)
        alone, part = dict(loaders(accelerator))[name]
        wanted = []
        for epoch in range(first, first + 3):
            if part is not None:
                part.set_epoch(epoch)
            wanted.append([number for batch in alone for number in flatten(batch)])
        torch.manual_seed(1)
        loader, part = dict(loaders(accelerator))[name]
        seen = []
        for epoch in range(first, first + 3):
            if part is not None:
                part.set_epoch(epoch)
            seen.append(read(accelerator, loader))
        assert seen == wanted
        if name == "stream, not set":
            continue  # three epochs in one call: no loop of torch's reads them so
        torch.manual_seed(1)
        loader, part = dict(loaders(accelerator))[name]
        if part is not None:
            part.set_epoch(first)
        if name == "nameless":
            with pytest.raises(UsageError, match="Nameless has set_epoch and no attribute epoch"):
                read(accelerator, loader, num_epochs=3)
        else:
            assert read(accelerator, loader, num_epochs=3) == [number for epoch in wanted for number in epoch]
    assert len({tuple(epoch) for epoch in wanted}) == (1 if name == "stream, not set" else 3)


def test_a_run_is_resumed_in_a_later_epoch(accelerator):
    def build():
        torch.manual_seed(1)
        return accelerator.prepare(DataLoader(NUMBERS, batch_size=2, shuffle=True))

    loader = build()
    whole = [read(accelerator, loader) for _ in range(3)]
    loader = build()
    loader.set_epoch(1)
    steps = exact_windows(accelerator, skip_first_batches(loader, 2), **K)
    assert len(steps) == 2
    assert read(accelerator, skip_first_batches(loader, 2)) == whole[1][4:]
    loader.set_epoch(2)
    assert read(accelerator, loader) == whole[2]
    with pytest.raises(UsageError, match="skips its first batches in every epoch"):
        exact_windows(accelerator, skip_first_batches(loader, 2), **K, num_epochs=2)


@pytest.mark.parametrize("size", [1, 4, 5, 12])
@pytest.mark.parametrize("num_epochs", [1, 3])
def test_the_number_of_steps_is_known_and_the_last_of_an_epoch_is_marked(accelerator, size, num_epochs):
    plain = DataLoader(NUMBERS, batch_size=size)
    for loader in (plain, list(plain), accelerator.prepare(plain), DataLoader(NUMBERS, size, drop_last=True)):
        steps = exact_windows(accelerator, loader, **K, num_epochs=num_epochs)
        ends = [step.is_last_of_epoch for step in steps]
        per_epoch = -(-len(loader) // 2)
        assert len(steps) == len(ends) == per_epoch * num_epochs
        assert ends == ([False] * (per_epoch - 1) + [True]) * num_epochs
    ends = [step.is_last_of_epoch for step in exact_windows(accelerator, iter(plain), **K)]
    assert ends == [False] * (len(ends) - 1) + [True]


def test_a_stream_has_no_length_but_an_end(accelerator):
    for loader in (DataLoader(Shuffled(), batch_size=5), accelerator.prepare(DataLoader(Shuffled(), batch_size=5))):
        steps = exact_windows(accelerator, loader, **K, num_epochs=2)
        with pytest.raises(TypeError, match=r"exact_windows has no len\(\).*stream.*number of steps yourself"):
            len(steps)
        assert [step.is_last_of_epoch for step in list(steps)] == [False, True] * 2


@pytest.mark.parametrize("epoch_end", ["carry", "keep", "drop"])
def test_the_last_step_of_an_epoch_of_a_dataset_is_marked(accelerator, epoch_end):
    settings = {"global_batch_size": 5, "per_device_batch_size": 5, "targets": len, "epoch_end": epoch_end}
    steps = exact_steps(accelerator, NUMBERS, torch.tensor, **settings, num_epochs=3)
    ends = [step.index for step in steps if step.is_last_of_epoch]
    # Of 12 samples in steps of 5: with `carry` the steps hold samples 0-4, 5-9, 10-14, 15-19, 20-24, 25-29, 30-34, 35-39
    assert ends == {"carry": [2, 4, 7], "keep": [2, 5, 8], "drop": [1, 3, 5]}[epoch_end]
    assert len(steps) == ends[-1] + 1
    resumed = exact_steps(accelerator, NUMBERS, torch.tensor, **settings, num_steps=len(steps), first_step=3)
    assert [step.index for step in resumed if step.is_last_of_epoch] == ends[1:]


# ---------------------------------------------------------------------------------------------------------------------
# Weights of targets

WEIGHT = torch.tensor([0.005, 0.02, 0.0013])
"""All of a step together weigh less than 1."""


def draw_pictures():
    """Draw pictures of 3 x 3 pixels, some of which have no label (255); of the last one all."""
    generator = torch.Generator().manual_seed(0)
    pictures = []
    for number in range(6):
        labels = torch.randint(0, 3, (3, 3), generator=generator)
        labels[torch.rand(3, 3, generator=generator) < number / 8] = 255
        pictures.append((torch.randn(2, 3, 3, generator=generator), labels))
    pictures[-1][1].fill_(255)
    return pictures


def weigh(labels):
    return WEIGHT.double()[labels[labels != 255]].sum()


def gradient(accelerator, pictures, size, targets=weigh):
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 1)
    criterion = nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255, reduction="sum")
    for step in exact_windows(
        accelerator,
        DataLoader(pictures, batch_size=size),
        gradient_accumulation_steps=len(pictures),
        targets=lambda batch: targets(batch[1]),
    ):
        for images, labels in step:
            with accelerator.accumulate(model):
                accelerator.backward(step.loss(criterion(model(images), labels)))
    return model.weight.grad, step.mean_loss()


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_class_weights_have_an_exact_form(accelerator, size):
    """The same as nn.CrossEntropyLoss(weight, ignore_index=255) of all pictures at once, also where all weights are below 1."""
    pictures = draw_pictures()
    torch.manual_seed(0)
    model = nn.Conv2d(2, 3, 1)
    images, labels = (torch.stack(parts) for parts in zip(*pictures, strict=True))
    loss = F.cross_entropy(model(images), labels, weight=WEIGHT, ignore_index=255)
    loss.backward()
    grad, mean = gradient(accelerator, pictures, size)
    assert torch.allclose(grad, model.weight.grad, rtol=1e-5, atol=1e-7)
    assert mean.item() == pytest.approx(loss.item(), rel=1e-5)
    for other in (lambda labels: weigh(labels).item(), lambda labels: weigh(labels).float()[None].double()[0]):
        assert torch.allclose(gradient(accelerator, pictures, size, other)[0], grad, rtol=1e-6)


def test_weights_that_are_none(accelerator):
    pictures = draw_pictures()
    for value, word in ((-1.0, "negative"), (float("nan"), "finite"), (float("inf"), "finite")):
        with pytest.raises(UsageError, match=word):
            gradient(accelerator, pictures, 2, lambda labels, value=value: torch.tensor(value))
    with pytest.raises(UsageError, match="above 0"):
        gradient(accelerator, pictures[-1:], 1)
    values = iter([2, 0.5, 0.5])
    with pytest.raises(UsageError, match="whole numbers in the first step"):
        list(exact_windows(accelerator, NUMBERS, gradient_accumulation_steps=1, targets=lambda batch: next(values)))


def test_a_weighted_mean_is_found(accelerator):
    pictures = draw_pictures()[:2]
    criterion = nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=255)
    model = nn.Conv2d(2, 3, 1)
    windows = {"gradient_accumulation_steps": 1, "targets": lambda batch: weigh(batch[1])}
    for step in exact_windows(accelerator, DataLoader(pictures, batch_size=2), **windows):
        for images, labels in step:
            with accelerator.accumulate(model):
                loss = criterion(model(images), labels)
                with pytest.raises(UsageError, match="a mean"):
                    step.loss(loss)
                step.loss(loss * weigh(labels))  # times the weights it is the sum


def test_a_term_without_weights_counts_nothing(accelerator):
    """Also where its weights are 0 in the whole step."""
    model = nn.Linear(1, 1)
    terms = {"gradient_accumulation_steps": 2, "targets": lambda batch: torch.tensor([0.5, float(batch[0] == 0)])}
    for step in exact_windows(accelerator, DataLoader([0.0, 1.0, 2.0, 3.0], batch_size=1), **terms):
        for batch in step:
            with accelerator.accumulate(model):
                sums = torch.stack([model(batch[:, None].float()).sum(), 0 * model.weight.sum()])
                assert step.loss(sums).isfinite()
                accelerator.backward(step.loss(sums))
        assert step.mean_loss().isfinite().all()
    assert step.num_targets.tolist() == [1.0, 0.0]
