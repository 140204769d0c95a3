"""Samples that are laid end to end, or given as a list, are told apart by what the program itself gives the model."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from stepaudit.batches import Batches, DrawnBatch
from stepaudit.micro_batch import describe_call, has_restarts, names_owners
from stepaudit.probe import ask_model, ask_packing, ask_padding
from stepaudit.record import Recorder
from stepaudit.recording import MicroStep

LENGTHS = (3, 5, 2)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])
OWNERS = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))


class Packed(nn.Module):
    """A causal layer over a row [length], with or without a mask between its samples, or a mean of each sample."""

    def __init__(self, is_masked: bool):
        super().__init__()
        self.embed, self.is_masked = nn.Embedding(10, 4), is_masked

    def forward(self, tokens: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        starts = marks == 0 if has_restarts(marks) else F.pad(marks.diff(), (1, 0), value=1) == 1
        sample = starts.cumsum(0)
        allowed = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        allowed = allowed & (sample[:, None] == sample) if self.is_masked else allowed
        y = (allowed.to(x) / allowed.sum(1, keepdim=True)) @ x
        return y if has_restarts(marks) else y[sample.diff(append=sample[-1:] + 1) == 1]  # at the end of each sample


@pytest.mark.parametrize(("marks", "cause"), [(POSITIONS, "packing"), (OWNERS, "mixed_samples")])
def test_a_sample_that_sees_the_one_in_front_of_it_is_found(marks, cause):
    tokens = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9, 0])
    assert ask_packing(Packed(is_masked=True), (tokens, marks), {}, {0}) == ([], "")
    facts, reason = ask_packing(Packed(is_masked=False), (tokens, marks), {}, {0})
    assert (facts, reason) == ([[cause, "Packed"]], "")


class Classifier(nn.Module):
    """It takes labels, as models of transformers do, and mixes the samples of a batch."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class Pooled(nn.Module):
    """The mean of each graph's nodes."""

    def forward(self, nodes: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        sums = torch.zeros(3, 2, dtype=nodes.dtype).index_add(0, owners, nodes)
        return sums / torch.bincount(owners)[:, None]


def test_labels_in_a_row_are_no_owners():
    """The model returns something for each row: the rows are samples, and are asked as such."""
    x, labels = torch.randn(4, 2), torch.tensor([0, 0, 1, 1])
    assert ask_packing(Classifier(), (x, labels), {}, {0}) is None
    facts, _ = ask_model(Classifier(), (x, labels), {}, {0}, 4)
    assert facts == [["mixed_samples", "Classifier"]]
    assert ask_packing(Pooled(), (torch.randn(10, 2), OWNERS), {}, {0}) == ([], "")


def test_nothing_is_said_where_no_tensor_shows_where_samples_begin():
    tokens, labels = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 1, 0])
    assert ask_packing(Packed(is_masked=False), (tokens, labels), {}, {0}) is None


@pytest.mark.parametrize(
    ("values", "is_position", "is_owner"),
    [
        ([0, 1, 2, 0, 1], True, False),
        ([0, 1, 2, 3, 4], False, False),  # one sample, or a row for each
        ([0, 0, 1, 1, 2], False, True),
        ([0, 1, 0, 1, 1], False, False),  # labels
        ([1, 1, 2, 2, 3], False, False),
        ([0, 0, 0, 0, 0], False, False),
        ([0, 2, 2, 3, 3], False, False),
    ],
)
def test_positions_and_owners_are_told_from_labels(values, is_position, is_owner):
    assert (has_restarts(torch.tensor(values)), names_owners(torch.tensor(values))) == (is_position, is_owner)


def test_a_list_of_samples_has_a_row_for_each():
    samples = [torch.randn(length, 2) for length in LENGTHS]
    micro_step = MicroStep(torch.zeros(1).numpy(), True, False, False)
    describe_call(micro_step, [(nn.Identity(), (samples,), {})], None)
    assert (micro_step.num_rows, len(micro_step.rows)) == (3, 3)


class Scale(nn.Module):
    """A transform of one sample, as torchvision's are modules."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return sample / 2


def test_transforms_that_are_modules_do_not_take_the_place_of_the_model():
    """They are called for every sample in front of the model, which is what is asked."""
    torch.manual_seed(0)
    model, scale = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), Scale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder() as recorder:
        for _ in range(2):
            samples = [scale(torch.randn(4, dtype=torch.float64)) for _ in range(80)]
            model(torch.stack(samples)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [step.micro_steps[0].num_rows for step in recorder.recording.steps] == [80, 80]
    assert recorder.recording.facts == [["batch_norm", "1 (BatchNorm1d)"]]


@pytest.mark.parametrize("targets", [[1, 1], [1, 2]])
def test_labels_of_a_few_samples_tell_no_batch(targets):
    """A loss is given what a GAN takes for real, say, and these are some batch's labels, too: the next batch is used."""
    batches, x = Batches(), torch.arange(12.0).view(2, 2, 3)
    for number, labels in enumerate(([0, 3], targets)):
        batches.pending_batches.append(
            DrawnBatch(7, [2 * number, 2 * number + 1], None, 0, (x[number], torch.tensor(labels)))
        )
    batches.newest_dataset = 7
    assert batches.use([(None, (x[1].tanh(), torch.tensor(targets)), {})]).samples == [0, 1]
    assert batches.use([(None, (x[1].clone(),), {})]).samples == [2, 3]


@pytest.mark.parametrize("has_decoder", [False, True])
def test_a_decoder_is_not_asked_by_the_padding_of_the_encoder(has_decoder):
    """Its outputs may be as wide as the inputs, by chance."""
    model, output = nn.Identity(), torch.ones(2, 3, 4, requires_grad=True)
    model.config = SimpleNamespace(is_encoder_decoder=has_decoder)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    output.sum().backward()
    assert ask_padding(model, (), {"input_ids": mask, "attention_mask": mask}, [output], 2) is not has_decoder


class Noise:
    """Collates to a number that the global generator draws."""

    def __call__(self, samples: list[int]) -> torch.Tensor:
        return torch.rand(1)


def test_a_collating_object_that_is_asked_again_leaves_the_generators():
    def draw() -> list[float]:
        torch.manual_seed(0)
        return [float(batch) for batch in DataLoader(range(6), batch_size=2, collate_fn=Noise())]

    expected = draw()
    with Recorder(1):
        assert draw() == expected


@pytest.mark.parametrize("patch", ["closure", "partial", "hook"])
def test_a_copy_of_a_patched_model_computes_itself(patch):
    """TRL's trainers put a function into the place of `forward` that calls the old one: a question must reach no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    plain, old = copy.deepcopy(model), model.forward
    if patch == "closure":
        model.forward = lambda *args, **kwargs: old(*args, **kwargs)
    elif patch == "partial":
        model.forward = functools.partial(type(model).forward, model)
    else:
        model.register_forward_hook(lambda module, args, output: output + 0 * model[0](args[0]).sum())
    x = torch.randn(8, 4, dtype=torch.float64)
    with Recorder() as recorder:
        for twin in (model, plain):
            optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
            for rows in x.split(4):
                twin(rows).square().mean().backward()
            optimizer.step()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert recorder.recording.facts == [["batch_norm", "1 (BatchNorm1d)"]]


def test_a_model_whose_copy_computes_the_model_is_not_asked():
    """What is not reached by copying (here a list) is refused, and the gradients stay as they are."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
    old = [model.forward]
    model.forward = lambda x: old[0](x)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.0), torch.randn(8, 4, dtype=torch.float64)
    with Recorder() as recorder:
        for rows in x.split(4):
            model(rows).square().sum().backward()
        optimizer.step()
    recording = recorder.recording
    assert recording.unasked == "RuntimeError: a copy of it calls the Linear of the program itself"
    assert not any(m.is_hooked for m in recording.steps[0].micro_steps)


def test_a_loader_of_prompts_that_come_again_tells_no_samples():
    """All answers are generated with the first batch; a micro-batch computes some of them, which has no tensor of the batch."""
    batches = Batches()
    for _ in range(3):
        batches.pending_batches.append(DrawnBatch(7, [0, 0, 1, 1], None, 0, ["a", "a", "b", "b"]))
    batches.newest_dataset = 7
    calls = [(None, (torch.arange(6.0).view(2, 3),), {})]
    assert [batches.use(calls).samples for _ in range(3)] == [[0, 0, 1, 1], None, None]
