"""The dataset of steps: all processes together hold each step's samples once, whatever N, b and the end of the epoch."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data.steps import Steps, find_terms_without_target, to_device
from samestep.errors import UsageError


class Ragged:
    """Samples of 1 to 20 tokens; a micro-batch's counts are its tokens and its samples."""

    max_length = 20

    def draw(self, epoch: int, sample_id: int) -> SimpleNamespace:
        return SimpleNamespace(key=(epoch, sample_id), length=1 + (7 * sample_id + 3 * epoch) % 20)

    def collate(self, samples: list) -> dict:
        lengths = [sample.length for sample in samples]
        return {"lengths": torch.tensor(lengths), "none": None, "counts": torch.tensor([sum(lengths), len(samples)])}


def everything(n: int, batch: int, num_processes: int, cap: int, policy: str, num_steps: int) -> dict[int, list]:
    """List step -> sorted (epoch, sample id) over all processes and micro-batches, checked against the counts."""
    order = Order(n, batch, seed=5, epoch_end=policy)
    layout = solve_layout(num_processes=num_processes, global_batch_size=batch, per_device_train_batch_size=cap)
    steps = {}
    for step in range(num_steps):
        parts = [Steps(Ragged(), order, layout, process_index=rank)[step] for rank in range(num_processes)]
        keys = sorted(key for part in parts for micro_batch in part.samples for key in micro_batch)
        tokens = sum(Ragged().draw(*key).length for key in keys)
        assert sum(part.counts for part in parts).tolist() == [tokens, len(keys)]
        assert all(part.num_samples == len(keys) and part.num_tokens == tokens for part in parts)
        assert all(len(micro_batch) <= cap for part in parts for micro_batch in part.samples)
        steps[step] = keys
    return steps


@pytest.mark.parametrize("policy", ["carry", "keep", "drop"])
@pytest.mark.parametrize("n", [13, 31, 97])
@pytest.mark.parametrize("batch", [5, 12])
def test_prime_lengths_on_a_prime_number_of_processes(n, batch, policy):
    per_epoch = {"carry": -(-2 * n // batch), "keep": 2 * -(-n // batch), "drop": 2 * (n // batch)}[policy]
    layouts = [(1, 12), (2, 3), (3, 2), (5, 1), (7, 2)]
    first, *others = (everything(n, batch, *layout, policy, per_epoch) for layout in layouts)
    assert all(other == first for other in others)
    for epoch in range(2):
        ids = [sample for keys in first.values() for e, sample in keys if e == epoch]
        assert len(ids) == len(set(ids)) == (n // batch * batch if policy == "drop" else n)


def test_the_loader_prepares_the_same_steps_in_workers():
    order = Order(31, 7, seed=5)
    steps = Steps(Ragged(), order, solve_layout(num_processes=1, global_batch_size=7), process_index=0)
    cpu = torch.device("cpu")
    alone, helped = (list(steps.stream(3, 9, workers, cpu)) for workers in (0, 2))
    assert [data.step for data in alone] == [data.step for data in helped] == list(range(3, 9))
    assert [data.samples for data in alone] == [data.samples for data in helped]


@pytest.mark.parametrize(("at_once", "ends"), [(1, [3, 4, 5, 6]), (2, [3, 5, 5, 7]), (100, [3, 14, 14, 14])])
def test_small_steps_are_prepared_several_at_a_time(at_once, ends):
    prepared, events = [], []

    class Noted(Steps):
        def __getitem__(self, step):
            prepared.append(step)
            return super().__getitem__(step)

    steps = Noted(Ragged(), Order(31, 7, seed=5), solve_layout(num_processes=1, global_batch_size=7), process_index=0)
    steps.burst_size = at_once * steps[3].num_bytes
    prepared.clear()
    for data in steps.stream(3, 15, 0, torch.device("cpu")):
        events.append((data.step, prepared[-1]))
    assert [last for _, last in events[:4]] == ends
    assert [step for step, _ in events] == prepared == list(range(3, 15))


def test_any_step_at_once():
    order = Order(10**9, 64, seed=5)
    steps = Steps(Ragged(), order, solve_layout(num_processes=1, global_batch_size=64), process_index=0)
    data = steps[10**7]
    assert data.num_samples == 64
    assert data.epoch == pytest.approx((10**7 + 1) * 64 / 10**9)
    assert np.unique([sample for _, sample in data.samples[0]]).size == 64


def test_to_device_leaves_none_alone():
    assert to_device({"a": torch.ones(1), "b": None}, torch.device("cpu"))["b"] is None


def test_a_token_cap_below_the_longest_sample():
    layout = solve_layout(num_processes=1, global_batch_size=7)
    with pytest.raises(UsageError, match="per_device_train_tokens is 19, but a sample can have 20 tokens"):
        Steps(Ragged(), Order(31, 7, seed=5), layout, process_index=0, max_tokens=19)


def test_the_same_number_of_micro_batches_on_every_process():
    """For sharded models, whose every forward needs all processes: empty micro-batches at the end, the same samples."""
    layout = solve_layout(num_processes=3, global_batch_size=10, per_device_train_batch_size=2)
    order = Order(31, 10, seed=5)

    def parts(same: bool) -> list:
        return [
            Steps(Ragged(), order, layout, process_index=rank, max_tokens=25, same_num_micro_batches=same)[0]
            for rank in range(3)
        ]

    filled, plain = parts(True), parts(False)
    assert len({len(part.micro_batches) for part in plain}) > 1, "else nothing is tested"
    assert {len(part.micro_batches) for part in filled} == {max(len(part.micro_batches) for part in plain)}
    for ours, theirs in zip(filled, plain, strict=True):
        assert [micro_batch for micro_batch in ours.samples if micro_batch] == theirs.samples
        assert ours.counts.tolist() == theirs.counts.tolist()


@pytest.mark.parametrize("max_tokens", [None, 60])
@pytest.mark.parametrize("step", range(5))
def test_half_caps_make_the_largest_micro_batches_smaller(step, max_tokens):
    """Rows and, under a cap on them, tokens with padding; down to one sample, which cannot be cut."""
    layout = solve_layout(num_processes=1, global_batch_size=12)
    steps = Steps(Ragged(), Order(31, 12, seed=5), layout, process_index=0, max_tokens=max_tokens)

    def largest() -> tuple[int, int]:
        micro_batches = [micro_batch["lengths"] for micro_batch in steps[step].micro_batches]
        return max(map(len, micro_batches)), max(
            len(micro_batch) * int(micro_batch.max()) for micro_batch in micro_batches
        )

    rows, tokens = largest()
    while rows > 1:
        assert steps.halve(step)
        fewer_rows, fewer_tokens = largest()
        assert fewer_rows <= (rows + 1) // 2
        assert max_tokens is None or fewer_tokens <= max(20, (tokens + 1) // 2)
        rows, tokens = fewer_rows, fewer_tokens
    assert not steps.halve(step)


class Terms:
    """Samples with targets of three loss terms: the first has them in each, the second in one, the third in none."""

    def __init__(self, size: int, place: int):
        self.size, self.place = size, place

    def __len__(self) -> int:
        return self.size

    def draw(self, epoch: int, sample_id: int) -> int:
        assert epoch == 0
        return sample_id

    def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
        return {"counts": torch.tensor([len(samples), samples.count(self.place), 0])}


@pytest.mark.parametrize("place", [0, 1, 99])
def test_terms_without_a_target_are_found(place):
    names = ["each", "one", "none"]
    assert find_terms_without_target(Terms(100, place), names) == ["none"]
    assert find_terms_without_target(Terms(100, 100), names) == ["one", "none"]
    assert find_terms_without_target(Terms(0, 0), names) == names
    assert find_terms_without_target(Terms(100, 90), names, 10) == ["none"], (
        "those that are looked at are spread over all"
    )
