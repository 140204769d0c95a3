"""Who is slow is named: from times that each process takes by itself, gathered with the losses."""

import json

import pytest
from common import all_metrics, tiny_argv
from faults import train_with_code

from samestep.training import stragglers
from samestep.training.watch import RunReader

SLOW = """
import os, time
from samestep.training import stragglers
stragglers.NUM_WINDOWS = 2
if os.environ["RANK"] == "1":
    from samestep.models.bert_pretraining import PretrainingSums
    forward = PretrainingSums.forward
    PretrainingSums.forward = lambda *a, **k: time.sleep(0.1) or forward(*a, **k)
"""


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_slow_process_is_named(trainings, corpus, tmp_path):
    flags = "--global_batch_size 8 --logging_steps 2"
    codes, said = train_with_code(
        trainings, SLOW, tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags), tmp_path
    )
    assert codes == {0: 0, 1: 0}
    steps = [line for line in all_metrics(tmp_path / "run") if "loss" in line]
    assert [line["slowest_process"] for line in steps] == [1] * 10
    for line in steps[1:]:
        assert 0 < line["compute_seconds_min"] < line["compute_seconds_mean"] < line["compute_seconds_max"]
        assert line["compute_seconds_max"] > 0.1, "its own time"
    assert min(line["compute_seconds_min"] for line in steps) < 0.1, "without waiting for the other"
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
