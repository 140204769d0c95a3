"""Parameters that a library keeps in flat parts are recorded as whole ones: what its optimizer is given, and what it adds."""

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F
from common import ROOT
from forked import Server
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepaudit.judge import compare
from stepaudit.keeping import FlatKeeping
from stepaudit.libraries import Libraries, Library
from stepaudit.record import Recorder
from stepaudit.script import BATCH, WINDOW, Variation

INPUTS, TARGETS = torch.randn(32, 6, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3
RATE, STEP, NUM_STEPS = 0.1, 8, 4


class FlatOptimizer:
    """Steps flat parts of a model's parameters, two of them, as ZeRO does: gradients are taken away after every backward.

    Args:
        model: whose parameters are copied from the flat parts after each step.
        keeps: (number of the micro-batch, k) -> whether its gradient is added.
    """

    def __init__(self, model: nn.Module, keeps=lambda number, k: True):
        self.model, self.keeps, self.number = model, keeps, 0
        layers = [[*layer.parameters()] for layer in model if len([*layer.parameters()])]
        self.groups = layers
        self.parts = [nn.Parameter(torch.cat([p.detach().flatten() for p in group])) for group in layers]
        self.sums = [torch.zeros_like(part) for part in self.parts]
        self.inner = torch.optim.SGD(self.parts, lr=RATE)
        self.param_groups = self.inner.param_groups

    def take_away(self, k: int) -> None:
        for total, group in zip(self.sums, self.groups, strict=True):
            if self.keeps(self.number, k):
                total += torch.cat([p.grad.flatten() for p in group])
            for p in group:
                p.grad = None
        self.number += 1

    def step(self) -> None:
        for number, (part, total) in enumerate(zip(self.parts, self.sums, strict=True)):
            part.grad = total.clone()
            total.zero_()
            self.inner.param_groups = [{**self.param_groups[0], "params": [part]}]
            self.inner.step()
            place = 0
            for p in self.groups[number]:
                p.data.copy_(part.data[place : place + p.numel()].view_as(p))
                place += p.numel()
        self.inner.param_groups, self.number = self.param_groups, 0


class FlatLibrary(Library):
    """Tells a recorder of a `FlatOptimizer`, as `stepaudit.zero` does of DeepSpeed's."""

    def __init__(self, recorder: Recorder, optimizer: FlatOptimizer):
        self.optimizer, self.recorder = optimizer, recorder
        self.keeping: FlatKeeping | None = None
        recorder.stack.callback(register_optimizer_step_pre_hook(self.begin_part).remove)
        recorder.stack.callback(register_optimizer_step_post_hook(self.end_part).remove)

    def is_inner(self, optimizer) -> bool:
        return optimizer is self.optimizer.inner

    def find_optimizers(self) -> list:
        return [self.optimizer]

    def list_parameters(self, optimizer):
        return [p for group in self.optimizer.groups for p in group]

    def assemble(self, parameter: nn.Parameter) -> torch.Tensor:
        for part, group in zip(self.optimizer.parts, self.optimizer.groups, strict=True):
            numbers = dict(zip(map(id, group), part.detach().split([p.numel() for p in group]), strict=True))
            if id(parameter) in numbers:
                return numbers[id(parameter)].clone().view_as(parameter)
        raise AssertionError

    def make_keeping(self, parameters):
        self.keeping = FlatKeeping(parameters, [p.shape for p in parameters], self.assemble, "Flat 1.0")
        return self.keeping

    def find_refusal(self, module) -> str:
        return "it is flat"

    def begin_part(self, inner, args, kwargs) -> None:
        if inner is self.optimizer.inner:
            self.keeping.begin_part(inner.param_groups[0]["params"])

    def end_part(self, inner, args, kwargs) -> None:
        if inner is self.optimizer.inner:
            self.keeping.end_part(inner.param_groups[0]["params"], self.recorder.puts_back)


def train(k: int, keeps=None, is_flat: bool = True, keep_parameters: bool = True):
    """Record a loop of k micro-batches in a step, by a flat optimizer or by SGD; return the recording and the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    flat = FlatOptimizer(model, keeps or (lambda number, k: True)) if is_flat else None
    plain = None if is_flat else torch.optim.SGD(model.parameters(), lr=RATE)
    with Recorder(keep_parameters=keep_parameters) as recorder:
        if flat:
            recorder.libraries.found.append(FlatLibrary(recorder, flat))
        for number, (x, y) in enumerate(zip(INPUTS.split(STEP // k), TARGETS.split(STEP // k), strict=True), 1):
            (F.cross_entropy(model(x), y) / k).backward()
            if flat:
                flat.take_away(k)
            if number % k:
                continue
            if flat:
                recorder.begin_step(flat, (flat,), {})
                flat.step()
                recorder.end_step(flat, (flat,), {})
            else:
                plain.step()
                plain.zero_grad()
    return recorder.recording, model


@pytest.mark.parametrize("keep_parameters", [True, False])
def test_flat_parts_are_recorded_as_the_whole_parameters_of_torch(keep_parameters):
    (flat, model), (plain, twin) = (train(1, is_flat=own, keep_parameters=keep_parameters) for own in (True, False))
    assert (flat.names, flat.shapes, flat.library) == (plain.names, plain.shapes, "Flat 1.0")
    assert len(flat.steps) == len(plain.steps) == NUM_STEPS
    for own, true in zip(flat.steps, plain.steps, strict=True):
        assert own.gradient == pytest.approx(true.gradient, rel=1e-6, abs=1e-9)
        assert own.change == pytest.approx(true.change, rel=1e-4, abs=1e-8)
        assert own.gradient.any()
        assert own.learning_rates == [RATE]
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-6)
    start = train(1, is_flat=False)[0].weights
    assert keep_parameters == bool((flat.weights == start).all() and model_has_stayed(model))


def model_has_stayed(model: nn.Module) -> bool:
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), first.parameters(), strict=True))


@pytest.mark.parametrize(
    ("keeps", "weights"),
    [
        (lambda number, k: number == k - 1, "0, 0, 0, 0.25"),
        (lambda number, k: number in (0, k - 1), "0.25, 0, 0, 0.25"),
    ],
)
def test_dropped_micro_batches_are_named_with_their_weights(keeps, weights):
    reference, sound = train(1)[0], compare([train(1)[0]], [train(4)[0]], 1e-5)
    assert sound.is_exact
    assert max(sound.loss_errors) < 1e-5, "the loss is that of all micro-batches"
    (finding,) = compare([reference], [train(4, keeps)[0]], 1e-5).findings
    assert finding.cause == "dropped_micro_batches"
    assert finding.where == "step 1, Flat 1.0"
    assert finding.evidence == f"weights {weights}, where each ought to have 0.25"


def test_a_library_whose_module_is_deleted_changes_nothing(monkeypatch):
    """The audit asks its list, and goes on as if the library were none."""
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.engine", sys)
    monkeypatch.setitem(sys.modules, "stepaudit.zero", None)
    libraries = Libraries()
    libraries.watch(Recorder())
    assert (libraries.found, libraries.unwatched) == ([], {})
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert libraries.list_parameters(optimizer) == [*model.parameters()]
    assert not libraries.is_inner(optimizer)
    assert libraries.make_keeping([*model.parameters()]).adds_up
    assert libraries.scale_loss(2.0) == 2.0


def has_deepspeed() -> bool:
    try:
        return importlib.util.find_spec("deepspeed.runtime") is not None
    except ModuleNotFoundError:
        return False


PROGRAM = ROOT / "benchmarks" / "packages" / "deepspeed_zero.py"


@pytest.mark.distributed
@pytest.mark.skipif(not has_deepspeed(), reason="DeepSpeed is not installed")
@pytest.mark.parametrize(
    "flags", [["--stage=0"], ["--stage=2"], ["--stage=2", "--offload", "--clip=0.1"], ["--stage=3"]], ids=str
)
def test_deepspeed_takes_the_same_step_in_micro_batches(flags):
    """The newest version; older ones are in benchmarks/results/deepspeed_versions.md."""
    layouts = [Variation({BATCH: b, WINDOW: k}, n) for b, k, n in (("16", "1", 1), ("4", "4", 1), ("2", "4", 2))]
    with Server(libraries=("stepaudit.program", "deepspeed.runtime.engine")) as server:
        reference, *others = [server.record([str(PROGRAM), *flags], layout) for layout in layouts]
    assert reference[0].library.startswith("DeepSpeed ") == (flags != ["--stage=0"])
    for recordings in others:
        comparison = compare(reference, recordings, 1e-5)
        assert comparison.is_exact, comparison.findings
        assert len(comparison.errors) == NUM_STEPS
        assert max(comparison.loss_errors) < 1e-5
