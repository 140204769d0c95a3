"""A run goes on: smaller micro-batches when memory runs out, steps left out when numbers break; who is missing is named."""

import json
import re
import weakref
from pathlib import Path

import pytest
import torch
from cases import thorough
from common import ROOT, all_metrics, launch_environment, metrics, model_of, samples_of_steps, tiny_argv
from compare import parameters, relative, same_weights
from faults import IN_A_STEP, launch_code, limit_memory, train_with_code
from hooks import StepCount, before
from safetensors.torch import load_file
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from samestep.errors import RunError
from samestep.training import capacity, checkpoint, recovery


def events(output_dir) -> list[dict]:
    return [line for line in all_metrics(output_dir) if "event" in line]


# --------------------------------------------------------------------------------------------------------- memory


@pytest.mark.distributed
@pytest.mark.parametrize("program", ["pretrain_bert", thorough("pretrain_gpt2")])
def test_memory_that_runs_out_on_one_process_changes_nothing(train, trainings, corpus, tmp_path, program):
    """In a forward, a backward, the synchronising backward, the trial of sizes: the same steps, and nobody waits for ever."""
    flags = (
        "--global_batch_size 22 --per_device_train_batch_size 4 --max_train_steps 7 --record_samples --dtype float64"
    )
    kinds = ("forward", "backward", "second", "synchronising")
    runs = [[kind, tiny_argv(program, corpus, tmp_path / kind, flags)] for kind in (*kinds, "always")]
    words = [str(tmp_path), program, "1", json.dumps(runs)]
    environment = launch_environment(ROOT / "accelerate_configs" / "2xcpu.yaml")
    trainings.run(words, 2, environment=environment, module="run_with_fault", can_repeat=False)
    begun = [int(number) for number in re.findall(r"reductions begun: (\d+)", (tmp_path / "log-1").read_text())]
    assert begun[:3] == [0, 0, 0]
    assert begun[3] > 2, "DDP was in the middle of it"
    undisturbed = train("undisturbed", flags, program=program)
    for kind in kinds:
        first = 2 if kind == "second" else 5
        event = {"step": first, "event": "memory ran out: the step is done again in smaller micro-batches"}
        assert events(tmp_path / kind) == [event | {"per_device_train_batch_size": 2}]
        assert samples_of_steps(tmp_path / kind) == samples_of_steps(undisturbed)
        assert relative(parameters(tmp_path / kind, ""), parameters(undisturbed, "")) < 1e-12
        micro_batches = [len(json.loads(line)["samples"]) for line in (tmp_path / kind / "samples.jsonl").open()]
        assert max(micro_batches[: 6 * (first - 1)]) == 4
        assert max(micro_batches[6 * (first - 1) :]) == 2, "smaller from then on"
    assert not events(tmp_path / "always")
    assert samples_of_steps(tmp_path / "always") == samples_of_steps(undisturbed)
    lines = [json.loads(line) for line in (tmp_path / "always" / "samples.jsonl").open()]
    largest = {process: max(len(line["samples"]) for line in lines if line["process"] == process) for process in (0, 1)}
    assert largest == {0: 2, 1: 2}, "both know before the first step"


def test_memory_that_runs_out_again_and_again(train):
    """10 samples at once, then 3, then 1: each time the step is done again, with prepared steps cut anew."""
    flags = "--global_batch_size 10 --dtype float64 --record_samples --dataloader_num_workers 1"
    fits = iter([10] * 6 + [3] * 8 + [1] * 1000)  # forwards: two of the trial of sizes first
    with limit_memory("pretrain_bert", lambda: next(fits)):
        shrinking = train("shrinking", flags)
    (values,) = json.loads(capacity.FILE.read_text()).values()
    assert (values["fits"], values["fails"]) == (0, 2), "2 samples at once are known not to fit"
    plain = train("plain", flags + " --learning_rate 5e-3")
    assert [event["per_device_train_batch_size"] for event in events(shrinking)] == [5, 3, 2, 1]
    assert samples_of_steps(shrinking) == samples_of_steps(plain)
    assert relative(parameters(shrinking, ""), parameters(plain, "")) < 1e-12


def test_the_failed_micro_batch_is_let_go_of_before_anything_else(train, after_forward, monkeypatch):
    """Its activations must not be in the way of the zeros that a process that failed reduces with the others."""
    train("before", "--global_batch_size 8")  # after which it is known how many samples fit
    agree, failed, contexts = recovery.Recovery.agree, [], []
    saved = weakref.WeakSet()

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    class Saved:
        """One of the tensors that a forward saves for its backward."""

        def __init__(self, tensor):
            self.tensor = tensor.detach()  # which does not know the graph, so that there is no cycle
            saved.add(self)

    def begin(model, _):
        if isinstance(model, model_of("pretrain_bert")) and torch.is_grad_enabled() and not saved and not failed:
            contexts.append(torch.autograd.graph.saved_tensors_hooks(Saved, lambda packed: packed.tensor))
            contexts[-1].__enter__()

    def end(model, outputs, **_):
        if contexts:
            contexts.pop().__exit__()
            assert len(saved) > 10
            outputs[0].register_hook(fail)

    def note(self, has_failed, *more):
        if has_failed:
            failed.append(len(saved))
        return agree(self, has_failed, *more)

    after_forward(model_of("pretrain_bert"), end)
    monkeypatch.setattr(recovery.Recovery, "agree", note)
    handle = register_module_forward_pre_hook(begin)
    try:
        train("run", "--global_batch_size 8")
    finally:
        handle.remove()
    assert failed == [0]


def test_not_even_one_sample(train):
    fits = iter([10] * 4 + [0] * 1000)
    flags = "--global_batch_size 10 --checkpointing_steps 1"
    with (
        limit_memory("pretrain_bert", lambda: next(fits)),
        pytest.raises(
            RunError, match=r"memory ran out in step 3 with one sample in a micro-batch.*--gradient_checkpointing"
        ),
    ):
        train("run", flags)


def test_errors_that_are_not_memory_are_not_swallowed(train, after_forward):
    def broken(*_, **__):
        raise RuntimeError("something else")

    after_forward(model_of("pretrain_bert"), broken)
    with pytest.raises(RuntimeError, match="something else"):
        train("run", "--global_batch_size 10 --validation_fraction 0")


def test_memory_that_runs_out_in_the_optimizer_is_said(train):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    handle = register_optimizer_step_pre_hook(fail)
    try:
        with pytest.raises(RunError, match="memory ran out in the optimizer's step 1, which cannot be cut"):
            train("run", "--global_batch_size 10")
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------------ numbers that break


@pytest.fixture
def broken_gradient(after_forward):
    """Let the loss of the micro-batch with sample `sample` be `value` in training step 4."""

    def install(program: str, value: float, in_loss: bool = True):
        broken, first = [], done.value

        def breaking(model, outputs, **micro_batch):
            sums, correct = outputs
            if torch.is_grad_enabled() and done.value - first == 3 and not broken:
                broken.append(True)  # in the first micro-batch only
                if in_loss:
                    sums = sums * value
                else:
                    sums.register_hook(lambda gradient: gradient * value)
            return sums, correct

        after_forward(model_of(program), breaking)

    with StepCount() as done:
        yield install


@pytest.mark.parametrize("program", ["pretrain_bert", "pretrain_gpt2"])
@pytest.mark.parametrize("in_loss", [True, False])
def test_a_gradient_that_is_not_finite_stops_the_run_as_it_was(train, broken_gradient, program, in_loss, tmp_path):
    """Noticed six steps later, when the log is read: by then nothing has changed, and the state before it is saved."""
    flags = "--global_batch_size 9 --per_device_train_batch_size 4 --record_samples"
    whole = train("whole", flags, program=program)
    broken_gradient(program, float("nan"), in_loss)
    source = (
        r"loss is not finite \(process 0, micro-batch 0, samples \d+ \(epoch 0\), "
        if in_loss
        else "their gradient is not finite"
    )
    with pytest.raises(RunError, match=rf"step 4: .*{source}.*those after step 3, and saved"):
        train("run", flags, program=program)
    run = tmp_path / "run"
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert max(samples_of_steps(run)) == 3
    earlier = train("before", flags + " --stop_after_step 3", program=program)
    assert same_weights(run / "checkpoint-3", earlier / "checkpoint-3")
    assert (run / "checkpoint-3" / "optimizer.safetensors").read_bytes() == (
        earlier / "checkpoint-3" / "optimizer.safetensors"
    ).read_bytes()
    assert whole != run


def test_a_state_that_is_saved_already_is_not_written_again(train, broken_gradient):
    made = []
    broken_gradient("pretrain_bert", float("nan"))
    with (
        before("os.rename", lambda _, to, *__: made.append(Path(to).name)),
        pytest.raises(RunError, match="those after step 3, and saved"),
    ):
        train("run", "--global_batch_size 9 --per_device_train_batch_size 4 --checkpointing_steps 3")
    assert [name for name in made if "checkpoint" in name] == ["checkpoint-3"]


def test_such_steps_are_left_out_and_counted(train, broken_gradient, real_figures):
    flags = "--global_batch_size 9 --per_device_train_batch_size 4 --on_nonfinite skip --checkpointing_steps 3"
    earlier = train("before", flags + " --stop_after_step 3")
    broken_gradient("pretrain_bert", float("inf"))
    run = train("run", flags + " --stop_after_step 4")
    states = [folder / name for folder, name in ((run, "checkpoint-4"), (earlier, "checkpoint-3"))]
    assert same_weights(*states)
    ours, theirs = (load_file(state / "optimizer.safetensors") for state in states)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    train("run", flags + " --resume_from_checkpoint latest")
    assert [line.get("skipped") for line in metrics(run)] == [None] * 3 + [True] + [None] * 6
    assert metrics(run)[3]["loss"] is None
    assert json.loads((run / "all_results.json").read_text())["skipped_steps"] == 1
    assert all(line["loss"] is not None for line in metrics(run)[4:])


# --------------------------------------------------------------------------------------------- processes, signals


IMPATIENT = """
from datetime import timedelta
from torch.distributed import distributed_c10d
hang = accumulate.seed_noise
def note_then_lose_patience(accelerator, seed, step):
    if step == 3:
        for group in distributed_c10d._world.pg_map:
            distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    hang(accelerator, seed, step)
accumulate.seed_noise = note_then_lose_patience
"""


@pytest.mark.distributed
def test_a_process_that_hangs_is_named(trainings, corpus, tmp_path):
    """The others are patient until then, so that a busy machine is none that hangs."""
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", "--global_batch_size 8")
    hang = IN_A_STEP.format(code="signal.pause()")
    codes, said = train_with_code(trainings, hang + IMPATIENT, argv, tmp_path)
    assert codes[0] == 1
    errors = [line for line in said.splitlines() if line.startswith("ERROR")]
    assert len(errors) == 1
    assert errors[0].startswith("ERROR: step 4: no answer from process 1 of 2: it hangs (longer than --ddp_timeout)")


@pytest.mark.distributed
@pytest.mark.parametrize("more", ["", " --async_checkpointing"])
def test_an_owner_of_a_part_that_cannot_write_it(trainings, corpus, tmp_path, more):
    """With sharded weights process 0 hears of process 1's full disk, and makes no checkpoint of what it lacks."""
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", "--global_batch_size 8 --checkpointing_steps 2" + more)
    code = (
        "from samestep.training import checkpoint\n        def full(*_): raise OSError(28, 'No space left on device')\n"
        "        checkpoint.safetensors.torch.save_file = full"
    )
    codes, said = train_with_code(trainings, IN_A_STEP.format(code=code), argv, tmp_path, "fsdp2_2xcpu")
    assert codes[0] == 1
    for step in (4, 6, 8, 10):
        reason = r"\(process 1: .*No space left on device\); the newest is checkpoint-2\. Training goes on"
        assert re.search(rf"WARNING: checkpoint-{step} could not be written .* {reason}", said)
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == ["checkpoint-2"]
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 11))


@pytest.mark.thorough  # two generations of processes take half a minute to start; test_restarts.py looks at what they agree on
@pytest.mark.distributed
def test_crashed_workers_are_started_again_and_the_run_goes_on(train, corpus, tmp_path):
    """The command of docs/reliability.md: a worker kills itself; the curve is that of an undisturbed run."""
    flags = "--global_batch_size 8 --checkpointing_steps 2 --resume_from_checkpoint latest --dtype float64"
    mark = tmp_path / "killed"
    code = (
        f"pass\n    if step == 6 and accelerator.process_index == 0 and not os.path.exists({str(mark)!r}):\n"
        f"        open({str(mark)!r}, 'w').close(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags)
    finished = launch_code(code, argv, tmp_path, "--max_restarts", "2", "--monitor_interval", "0.5")
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert mark.exists()
    whole = train("whole", flags)
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 11))
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-10)
    assert relative(parameters(tmp_path / "run", ""), parameters(whole, "")) < 1e-12
