"""Who is slow is named: from times that each process takes by itself, gathered with the losses."""

import gc
import json
import types
import weakref

import pytest
from accelerate import Accelerator
from common import all_metrics, tiny_argv
from faults import train_with_code
from torch import nn

from samestep.contrib import stragglers
from samestep.contrib.watching.watch import RunReader

SLOW = """
import os, types
from samestep.models.bert_pretraining import PretrainingSums
from samestep.contrib import stragglers
stragglers.NUM_WINDOWS = 2
times = []
stragglers.time = types.SimpleNamespace(perf_counter=lambda: sum(times))
seconds, forward = (0.25, 0.5)[int(os.environ["RANK"])], PretrainingSums.forward
PretrainingSums.forward = lambda *a, **k: times.append(seconds) or forward(*a, **k)
"""
"""By their clocks, a forward takes process 0 0.25 s, and process 1 0.5 s."""


@pytest.mark.distributed
def test_a_slow_process_is_named(trainings, corpus, tmp_path):
    flags = "--global_batch_size 8 --logging_steps 2"
    codes, said = train_with_code(
        trainings, SLOW, tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags), tmp_path
    )
    assert codes == {0: 0, 1: 0}
    steps = [line for line in all_metrics(tmp_path / "run") if "loss" in line]
    assert [line["slowest_process"] for line in steps] == [1] * 10
    for line in steps[1:]:
        assert [line[f"compute_seconds_{name}"] for name in ("min", "mean", "max")] == [0.25, 0.375, 0.5]
    (event,) = [line for line in all_metrics(tmp_path / "run") if "event" in line]
    assert (event["step"], event["event"]) == (4, "process 1 is slower than the others, which wait for it")
    assert "process 1 is slower than the others" in said
    reader = RunReader(tmp_path / "run")
    reader.update()
    page = reader.describe()
    assert page["events"][0] == event
    assert "compute_seconds_max" in page["curves"]
    assert "slowest_process" not in page["curves"]
    json.dumps(page)


def test_chance_and_trifles_are_no_stragglers():
    slow, even, trifle = [(1.0, 0.0), (1.0, 0.0), (1.5, 0.0)], [(1.0, 0.0)] * 3, [(0.01, 0.0), (0.01, 0.0), (0.02, 0.0)]
    watch = stragglers.StragglerWatch()
    said = [watch.add([step]) for step in [slow] * 4 + [even] + [trifle] * 9 + [slow] * 9]
    assert said.index((2, 1.5, 1.0)) == 18, "5 times one after the other"
    assert sum(answer is not None for answer in said) == 1
    assert stragglers.StragglerWatch().add([[(9.0, 0.0)]]) is None, "one process"


def test_waiting_for_data_counts():
    watch = stragglers.StragglerWatch()
    assert [watch.add([[(1.0, 0.5), (1.0, 0.0), (1.0, 0.0)]]) for _ in range(5)][-1] == (0, 1.5, 1.0)
    assert stragglers.summarize([(0.0, 0.1), (0.0, 0.2)]) == {"data_seconds_max": 0.2, "slowest_process": 1}


def test_the_model_does_not_hold_the_run():
    """A parameter's hook is not seen by Python's garbage collector: what it holds lives as long as the model."""
    run = types.SimpleNamespace(bare_model=nn.Linear(1, 1), accelerator=Accelerator(cpu=True))
    model, reference = run.bare_model, weakref.ref(stragglers.Stragglers(run))
    del run
    gc.collect()
    assert reference() is None
    assert model.weight.requires_grad
