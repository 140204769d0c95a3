"""The fastest way is taken, where it is the same step."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from cases import keep
from common import DROPOUT, TINIES, all_metrics, fresh_accelerator, metrics, samples_of_steps, task_of
from compare import parameters, relative
from torch import nn

from samestep.recipe.catalog import TASKS, load
from samestep.training import capacity, kernels, launch

PROGRAMS = [*TINIES]
# Of a BERT and a GPT-2: layers with dropout are several graphs each, which take long to compile.
DROPOUTS = {
    "finetune_classifier": f"{DROPOUT} --num_hidden_layers 1",
    "pretrain_gpt2": " --n_layer 1 --embd_pdrop 0.1 --resid_pdrop 0.1 --attn_pdrop 0.1",
}
# Causal language models are not compiled here: their attention is between graphs, too, and they would take 20 s more.
COMPILED = [
    program
    for program in PROGRAMS
    if hasattr(TASKS[task_of(program)].parts.find("settings"), "torch_compile") and program != "finetune_causal_lm"
]


class Clock:
    """Stands still, but for what moves it: no measurement of this file is one of this machine."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch) -> Clock:
    """Replace the clock by which ways are measured in this process."""
    monkeypatch.setattr(kernels, "time", Clock())
    return kernels.time


class Model(nn.Module):
    """Scales its input: 2 x, one way or another."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.seconds, self.factor, self.num_calls = 0.0, 2.0, 0

    def forward(self, x):
        kernels.time.now += self.seconds
        self.num_calls += 1
        if self.factor is None:
            raise NotImplementedError("no such kernel")
        return self.drop(self.norm(self.layer(x))).square().sum()[None] * self.factor, None


class Source:
    max_length = 1

    def __len__(self):
        return 40

    def draw(self, epoch, sample_id):
        return SimpleNamespace(row=torch.arange(4) * 0.1 * (sample_id - 3), length=sample_id % 11)

    def collate(self, samples):
        assert len(samples) in (1, kernels.SAMPLES)
        ids = [place * len(self) // len(samples) for place in range(len(samples))]  # from all over the data
        assert [sample.length for sample in samples] == sorted((sample_id % 11 for sample_id in ids), reverse=True)
        return {"x": torch.stack([sample.row for sample in samples]), "counts": torch.tensor([len(samples)])}


def choose(model: Model, ways: dict[str, tuple[float, float | None]], speed: str = "auto", source=None) -> None:
    """Choose among ways: name -> seconds, factor."""
    fresh_accelerator()

    def take(seconds, factor):
        model.seconds, model.factor = seconds, factor

    candidates = {name: (lambda values=values: take(*values)) for name, values in ways.items()}
    settings = SimpleNamespace(speed=speed, dtype="float32")
    accelerator = launch.create_accelerator("no")
    kernels.choose_kernel(accelerator, load("bert_small_cpu"), settings, model, source or Source(), candidates)


def test_the_fastest_is_taken_and_remembered(capsys, monkeypatch):
    model = Model()
    choose(model, {"slow": (0.004, 2.0), "fast": (0.0, 2.0)})
    assert (model.seconds, "kernels: fast (--speed auto)" in capsys.readouterr().out) == (0.0, True)
    (values,) = json.loads(capacity.FILE.read_text()).values()
    assert values["way"] == "fast"
    num_calls = model.num_calls
    choose(model, {"slow": (0.004, 2.0), "fast": (0.001, 2.0)})
    assert (model.seconds, model.num_calls) == (0.001, num_calls)
    choose(model, {"slow": (0.004, 2.0), "fast": (0.0, 2.0)}, speed="safe")
    assert model.seconds == 0.004
    assert "kernels: slow (--speed safe)" in capsys.readouterr().out


def test_one_that_is_gone_is_not_taken():
    model = Model()
    choose(model, {"slow": (0.004, 2.0), "fast": (0.0, 2.0)})
    choose(model, {"slow": (0.004, 2.0), "other": (0.002, 2.0)})
    assert model.seconds == 0.002


@pytest.mark.parametrize(
    ("factor", "problem"),
    [
        (2.001, "it computes another gradient here, by 5.0e-04 of that of slow"),
        (None, "NotImplementedError: no such kernel"),
    ],
)
def test_a_way_that_is_another_step_is_not_taken(capsys, factor, problem):
    model = Model()
    choose(model, {"slow": (0.004, 2.0), "wrong": (0.0, factor), "right": (0.002, 2.0)})
    assert (model.seconds, model.factor) == (0.002, 2.0)
    assert f"kernels: not wrong: {problem}" in capsys.readouterr().out


@pytest.mark.parametrize("moment", ["always", "training"])
def test_memory_that_runs_out_leaves_the_first_way_to_the_trial_of_sizes(moment):
    """Which cuts the step into smaller micro-batches."""
    model = Model()
    forward = Model.forward

    def limited(self, x):
        if moment == "always" or self.training:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x)

    model.forward = limited.__get__(model)
    choose(model, {"slow": (0.004, 2.0), "fast": (0.0, 2.0)})
    assert model.seconds == 0.004


def test_the_only_way_is_not_measured(capsys, monkeypatch):
    model = Model()
    choose(model, {"only": (0.001, 2.0)})
    assert (model.seconds, model.num_calls) == (0.001, 0)
    assert capsys.readouterr().out == ""


def test_no_trace_is_left():
    model = Model().eval()
    state, noise = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    choose(model, {"slow": (0.001, 2.0), "fast": (0.0, 2.0)})
    assert all(value.equal(state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert noise.equal(torch.get_rng_state())
    assert not model.training


def measured(**seconds: list[float]) -> dict[str, float]:
    """Measure computations that take so long at their first call, their second, ...; their lists are emptied."""
    fresh_accelerator()

    def computation(durations):
        def compute():
            kernels.time.now += durations.pop(0)

        return compute

    return kernels.measure(
        launch.create_accelerator("no"), {name: computation(values) for name, values in seconds.items()}
    )


def test_what_a_computation_costs_at_first_does_not_count():
    """However long the first round takes, there is a second one."""
    times = measured(first=[4.0, 1.0], second=[9.0, 2.0], third=[9.0, 3.0])
    assert times == {"first": 1.0, "second": 2.0, "third": 3.0}


def test_what_is_slower_twice_is_measured_no_longer():
    """And the time is spent on the others: rounds of 7.6, 7.5 and 3.9 s, of which the last begins before 20 s. Once is luck."""
    near, slow = [0.1, 2.6, 2.1, 1.9], [0.1, 3.0, 3.0]
    times = measured(first=[1.0, 2.0, 2.4, 2.0], slow=slow, near=near)
    assert times == {"first": 2.0, "slow": 3.0, "near": pytest.approx(1.9)}
    assert near == slow == []


def test_when_all_others_are_slower_nothing_is_left_to_measure():
    times = measured(first=[0.1, 0.1, 0.1], other=[0.1, 0.2, 0.2])
    assert times == pytest.approx({"first": 0.1, "other": 0.2})


def test_what_takes_too_long_is_not_compared():
    times = measured(first=[5.1], second=[])
    assert times == {"first": pytest.approx(5.1), "second": float("inf")}
    assert kernels.find_fastest(times) == "first"


@pytest.mark.parametrize(("seconds", "compared"), [(0.0, {kernels.SAMPLES}), (2.0, {2}), (0.45, {5}), (180.0, {2})])
def test_samples_are_as_many_as_there_is_time_for(clock, seconds, compared):
    """Of two ways in four rounds; a sample takes so long, and ten times as long at first."""
    sizes = []

    class Timed(Model):
        def forward(self, x):
            clock.now += seconds * (1 if sizes else 10)
            sizes.append(len(x))
            return super().forward(x)

    class Ones(Source):
        def collate(self, samples):
            return {"x": torch.ones(len(samples), 4), "counts": None}

    choose(Timed(), {"one": (0.0, 2.0), "other": (0.0, 2.0)}, source=Ones())
    assert sizes[:2] == [1, 1]
    assert set(sizes[2:]) == compared


@pytest.fixture
def quarters(monkeypatch):
    """Let the third of several sizes or ways be the fastest, whatever is measured; the lists that were measured."""
    measured = []

    def measure(accelerator, computations):
        measured.append(list(computations))
        for compute in computations.values():
            compute()
        return {name: abs(number - 2) + 1.0 for number, name in enumerate(computations)}

    monkeypatch.setattr(kernels, "measure", measure)
    return measured


@pytest.mark.parametrize("program", keep(PROGRAMS, ["pretrain_bert", "pretrain_gpt2", "train_captcha"]))
def test_auto_is_the_same_step_as_safe(train, quarters, program):
    """Losses and parameters within rounding, the samples the same, in smaller micro-batches."""
    flags = "--global_batch_size 12 --record_samples --dtype float64 --max_train_steps 6"
    safe = train("safe", flags, program=program)
    assert not quarters
    auto = train("auto", f"{flags} --speed auto", program=program)
    assert quarters[-1] == [12, 6, 3, 1]
    auto_losses, safe_losses = ([line["loss"] for line in metrics(folder)] for folder in (auto, safe))
    assert auto_losses == pytest.approx(safe_losses, rel=1e-9)
    assert relative(parameters(auto, ""), parameters(safe, "")) < 1e-9
    assert samples_of_steps(auto) == samples_of_steps(safe)
    assert not [line for line in all_metrics(auto) if "event" in line]
    times = len(quarters)
    again = train("again", f"{flags} --speed auto", program=program)
    assert len(quarters) == times, "remembered"
    assert samples_of_steps(again) == samples_of_steps(safe)


def sizes(output_dir) -> list[int]:
    return [len(json.loads(line)["samples"]) for line in (output_dir / "samples.jsonl").open()]


def test_micro_batches_are_cut_by_tokens(train, quarters, capsys):
    flags = "--global_batch_size 12 --record_samples --max_train_steps 2 --speed auto"
    auto = train("auto", flags)
    assert "micro-batches: at most 144 tokens at once (--speed auto)" in capsys.readouterr().out  # 3 x 48
    assert max(sizes(auto)) >= 3
    assert len(sizes(auto)) > 2


@pytest.mark.parametrize(
    "flag", ["--per_device_train_batch_size 12", "--gradient_accumulation_steps 1", "--per_device_train_tokens 5760"]
)
def test_what_is_given_is_not_cut_smaller(train, quarters, flag):
    auto = train("auto", f"--global_batch_size 12 --record_samples --max_train_steps 2 --speed auto {flag}")
    assert all("eager" in names for names in quarters), "only kernels"
    assert sizes(auto) == [12, 12]


def test_batch_normalisation_is_not_cut_smaller(train, quarters):
    flags = "--global_batch_size 12 --record_samples --max_train_steps 2 --speed auto --normalization batch"
    auto = train("auto", flags, program="train_image_classifier")
    assert all("channels_last" in names for names in quarters)
    assert sizes(auto) == [12, 12]


@pytest.mark.distributed
def test_processes_choose_the_same(train, train_on):
    flags = "--global_batch_size 13 --dtype float64 --record_samples --max_train_steps 4"
    pair = train_on(2, {"two": f"{flags} --speed auto"}) / "two"
    single = train("one", flags)
    assert relative(parameters(pair, ""), parameters(single, "")) < 1e-9
    assert samples_of_steps(pair) == samples_of_steps(single)


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "backend"),
    keep(
        [*((program, "eager") for program in COMPILED), ("pretrain_gpt2", None)],
        [("pretrain_gpt2", "eager")],
    ),
)
def test_compiled_layers_take_the_same_steps(train, program, backend):
    """Micro-batches of other sizes in every step, dropout by sample, without compiling anew each time.

    One program's graphs become machine code, too, which takes half a minute; graphs are run as they are otherwise.
    """
    if backend is None and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        backend = "eager"  # without vectors, torch 2.13 writes code that is none
    flags = "--global_batch_size 8 --per_device_train_batch_size 4" + DROPOUTS.get(program, "")
    plain = train("plain", flags, program=program)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with (
        torch._dynamo.config.patch(fail_on_recompile_limit_hit=True),
        torch.compiler.set_stance("default", force_backend=backend),
    ):
        compiled = train("compiled", f"{flags} --torch_compile", program=program)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert bool(torch._dynamo.utils.counters["graph_break"]) == (program in DROPOUTS)  # noise is drawn between graphs
    losses = [line["loss"] for line in metrics(plain)]
    assert [line["loss"] for line in metrics(compiled)] == pytest.approx(losses, rel=1e-5)
    assert {path.name for path in compiled.iterdir()} == {path.name for path in plain.iterdir()}
