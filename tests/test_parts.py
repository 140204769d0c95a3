"""Parts of a run: a new one is a class and a line of the list, and its methods are called in the order of a step."""

import pytest
from common import metrics

from samestep.training import ways
from samestep.training.parts import Part

FLAGS = "--global_batch_size 8 --max_train_steps 2 --logging_steps 2"
STEP = ["begin_step", "gradient_computed", "gradient_reduced", "end_step"]
EVALUATION = ["score", "evaluated"]
READ = ["read", "read", "add_to_line", "add_to_line", "lines_written"]


class Recorder(Part):
    """Notes what it is told, and adds to each line."""

    calls: list[str]

    def __init__(self, run):
        self.num_steps = run.num_steps
        Recorder.calls = []

    def __getattribute__(self, name):
        if hasattr(Part, name) and not name.startswith("_"):
            Recorder.calls.append(name)
        return super().__getattribute__(name)

    def read(self, number):
        return number / self.num_steps

    def add_to_line(self, line, counts, values):
        line["progress"] = sum(values)


@pytest.fixture
def place():
    ways.PARTS.insert(0, ("test_parts:Recorder", lambda run: run.settings.logging_steps == 2))
    yield
    del ways.PARTS[0]


def test_a_part_is_called_in_the_order_of_a_step(place, train, corpus):
    from test_parts import Recorder  # as the list imports it

    folder = train("run", f"{FLAGS} --validation_file {corpus}")
    noted = [name for name in Recorder.calls if name not in ("state", "describe")]
    assert noted == ["start", "watch", *EVALUATION, *STEP, *STEP, *READ, *EVALUATION, "close", "publish", "upload"]
    assert [line["progress"] for line in metrics(folder)] == [0.5, 1.0]


def test_a_part_that_is_not_asked_for_is_not_made(place, train):
    from test_parts import Recorder

    Recorder.calls = ["none"]
    train("run", FLAGS.replace("--logging_steps 2", "--logging_steps 1"))
    assert Recorder.calls == ["none"]
