"""Nothing inside a step looks at a number on the device: the host runs ahead and never waits for it.

Accumulation in the optimizer reads one: the factor by which the last step was clipped. So does `accumulate.clip` on CPUs, which
do not run ahead of themselves: here it clips as elsewhere.
"""

import pytest
import torch
from common import TINIES, metrics, model_of
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.step import accumulate
from samestep.training.recovery import Attempt

aten = torch.ops.aten
LOOKS = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2}
"""What needs a device's numbers on the host, or a shape that depends on them."""
CASES = {program: [program] for program in TINIES} | {
    "documents masked": ["pretrain_gpt2", "--document_mask true"],
    "a document per sample": ["pretrain_gpt2", "--packing false"],
    "eager": ["pretrain_gpt2", "--document_mask true --attn_implementation eager"],
    "sdpa": ["pretrain_bert", "--attn_implementation sdpa"],
}


class Looks(TorchDispatchMode):
    """Collects the names of operators that make the host wait."""

    operators: list[str] = []  # noqa: RUF012

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in LOOKS:
            self.operators.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def looks(monkeypatch):
    """Collect the names of operators inside steps that make the host wait."""
    enter, leave, modes = Attempt.__enter__, Attempt.__exit__, []
    Looks.operators.clear()
    monkeypatch.setattr(accumulate, "_cpu_gradients", lambda *_: [])

    def entering(attempt):
        modes.append(Looks().__enter__())
        return enter(attempt)

    def leaving(attempt, *error):
        modes.pop().__exit__(None, None, None)
        return leave(attempt, *error)

    monkeypatch.setattr(Attempt, "__enter__", entering)
    monkeypatch.setattr(Attempt, "__exit__", leaving)
    return Looks.operators


@pytest.mark.parametrize("case", CASES)
def test_a_step_never_waits_for_the_device(train, looks, case):
    program, *flags = CASES[case]
    flags = " ".join(["--global_batch_size 8 --per_device_train_batch_size 3 --max_train_steps 2", *flags])
    folder = train("run", flags, program=program)
    assert len(metrics(folder)) == 2
    assert not looks


def test_that_it_would_be_noticed(train, looks, after_forward):
    def look(model, outputs, first_index, **micro_batch):
        assert first_index.sum() >= 0

    after_forward(model_of("pretrain_bert"), look)
    train("run", "--global_batch_size 8 --max_train_steps 1")
    assert "aten._local_scalar_dense.default" in looks
