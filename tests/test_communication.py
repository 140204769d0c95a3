"""LocalSGD, DiLoCo, PowerSGD and top-k: what they compute is the recipe's, whatever the number of processes and restarts."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from common import TINIES, all_metrics, evaluations, metrics
from compare import parameters, relative
from torch import nn

from samestep.contrib.communication.algorithms import Communication, count_sent_bytes
from samestep.contrib.communication.compression import PowerSgd, TopK, Waiting
from samestep.contrib.communication.local_workers import LocalWorkers
from samestep.errors import UsageError
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from samestep.recipe.exclusions import find_refusal
from samestep.training.checkpoint import checkpoints, read

KINDS = {
    "local_sgd": "local_sgd of 4 workers every 2 steps",
    "diloco": "diloco of 4 workers every 3 steps",
    "power_sgd": "power_sgd of rank 2 from step 2",
    "top_k": "top_k 0.05 of 4 workers",
}
STEPS = 6
ALONE = SimpleNamespace(num_processes=1, process_index=0, is_main_process=True, device=torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------------- the field


@pytest.mark.parametrize(
    "text", [*KINDS.values(), "diloco of 8 workers every 500 steps, outer rate 0.4, outer momentum 0"]
)
def test_it_is_written_as_it_is_read(text):
    assert Communication.read(str(Communication.read(text))) == Communication.read(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("diloco", "written like"),
        ("diloco of 0 workers every 4 steps", "written like"),
        ("diloco of 5000 workers every 4 steps", "from 1 to 4,096"),
        (
            "diloco of 2 workers every 4 steps, outer rate 0, outer momentum 0.9",
            "outer_learning_rate is 0.0, must be above 0",
        ),
        (
            "local_sgd of 2 workers every 4 steps, outer rate 1, outer momentum 0",
            "local_sgd has no 'outer_learning_rate'",
        ),
        ("power_sgd of rank 2 from step 1", "first_step is 1, must be from 2"),
        ("top_k 1 of 4 workers", "below 1"),
    ],
)
def test_a_rule_that_is_broken_is_named(text, rule):
    with pytest.raises(UsageError, match=f"communication is .*{rule}"):
        load("gpt2_small_cpu", {"communication": text})


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("gpt2_small_cpu", {"global_batch_size": 3}, "global_batch_size is 3"),
        ("gpt2_small_cpu", {"batch_schedule": "4, 16 at 0.5", "lr_scaling_rule": "none"}, "batch_schedule"),
        ("gpt2_small_cpu", {"accumulation": "optimizer", "second_moment": "unbiased"}, "accumulation is optimizer"),
        ("resnet_digits_cpu", {"normalization": "batch"}, "normalization is batch"),
        ("gpt_modern_small_cpu", {"optimizer": "muon"}, "optimizer is muon"),
    ],
)
def test_fields_that_exclude_it(name, changes, field):
    with pytest.raises(UsageError, match=f"communication is .*{field}"):
        load(name, changes | {"communication": KINDS["diloco"]})


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("diloco", "--reproducible 2"),
        ("diloco", "--stop_after_step 4"),
        ("diloco", "--checkpointing_steps 2"),
        ("diloco", "--eval_steps 10"),
        ("diloco", "--digest_steps 3"),
        ("top_k", "--noise_scale_steps 5"),
        ("top_k", "--on_nonfinite skip"),
        ("power_sgd", "--fault_tolerance step"),
        ("power_sgd", "--reduce_dtype bf16"),
    ],
)
def test_settings_that_exclude_it(kind, flags, monkeypatch):
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", "http://localhost:1")
    argv = ["--recipe", "gpt2_small_cpu", "--communication", KINDS[kind]]
    run_settings.parse(argv, "gpt2_pretraining", "")
    with pytest.raises(UsageError, match=f"{flags.split()[0][2:]} is .*communication is .*{kind}"):
        run_settings.parse([*argv, *flags.split()], "gpt2_pretraining", "")


def test_settings_that_suit_the_exchanges():
    argv = (
        "--recipe gpt2_small_cpu --stop_after_step 6 --checkpointing_steps 3 --eval_steps 9 --on_nonfinite skip".split()
    )
    recipe, _ = run_settings.parse([*argv, "--communication", KINDS["diloco"]], "gpt2_pretraining", "")
    assert recipe.communication.num_steps == 3
    small, _ = run_settings.parse([*argv[:2], "--communication", KINDS["diloco"], "--rehearse"], "gpt2_pretraining", "")
    assert small.communication.num_steps == 1, "a rehearsal saves after its second step"


@pytest.mark.parametrize(
    "launch", [{"is_sharded": True}, {"mixed_precision": "fp16"}, {"num_processes": 5, "mixed_precision": "bf16"}]
)
def test_launches_that_exclude_it(launch):
    assert str(find_refusal(communication=Communication.read(KINDS["diloco"]), **launch)).startswith(
        "communication is diloco of 4"
    )
    assert (
        find_refusal(communication=Communication.read(KINDS["diloco"]), num_processes=4, mixed_precision="bf16") is None
    )


# --------------------------------------------------------------------------------------------------------- the algorithms


def build(num_outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, num_outputs)).double()


def rows_of(step: int, worker: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(model: nn.Module, step: int, worker: int) -> torch.Tensor:
    return model(rows_of(step, worker)).square().sum()


@pytest.mark.parametrize("kind", ["local_sgd", "diloco"])
def test_workers_do_what_the_paper_says(kind):
    """Beside W models and W AdamWs of their own, and the outer optimizer written out."""
    found, model = Communication.read(KINDS[kind].replace("4 workers", "3 workers")), build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    workers = LocalWorkers(ALONE, found, dict(model.named_parameters()), optimizer)
    models = [build() for _ in range(3)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in models]
    start, momentum = [p.detach().clone() for p in models[0].parameters()], None
    for step in range(7):  # the last exchange is after a round of one step
        for worker in range(3):
            workers.begin_worker(worker)
            for each, own in ((model, optimizer), (models[worker], optimizers[worker])):
                own.zero_grad()
                loss_of(each, step, worker).backward()
                own.step()
        assert workers.is_exchange(step, 7) == (step == 6 or (step + 1) % found.num_steps == 0)
        if workers.is_exchange(step, 7):
            workers.exchange()
            means = [sum(parts) / 3 for parts in zip(*(each.parameters() for each in models), strict=True)]
            gradients = [a - b for a, b in zip(start, means, strict=True)]
            momentum = (
                gradients if momentum is None else [0.9 * m + g for m, g in zip(momentum, gradients, strict=True)]
            )
            if kind == "diloco":
                gradients = [0.7 * (g + 0.9 * m) for g, m in zip(gradients, momentum, strict=True)]
            start = [(a - g).detach() for a, g in zip(start, gradients, strict=True)]
            for each in models:
                for parameter, value in zip(each.parameters(), start, strict=True):
                    parameter.data.copy_(value)
    for ours, true in zip(model.parameters(), start, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-13, atol=1e-15)


def test_top_k_sends_the_rest_later():
    """Nothing is lost: what was sent in all steps, and the errors, are the sum of all gradients; each sends its largest."""
    found, model = Communication.read("top_k 0.2 of 3 workers"), build()
    compression, sent, given = TopK(ALONE, found, dict(model.named_parameters())), 0.0, 0.0
    for step in range(5):
        for worker in range(3):
            compression.begin_worker(worker)
            model.zero_grad()
            loss_of(model, step, worker).backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            whole, given = gradient + compression.errors[worker], given + gradient
            compression.reduce() if worker == 2 else compression.end_worker()
            row = (whole - compression.errors[worker])[:35]  # of the first matrix
            assert row.count_nonzero() == 7
            assert row.abs()[row != 0].min() >= compression.errors[worker][:35].abs().max()
        sent += torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(sent + sum(compression.errors.values()), given, rtol=1e-12, atol=1e-13)


def test_power_sgd_is_exact_at_first_then_of_low_rank(monkeypatch):
    """And hands over as many bytes as the run says, in no other thread than the caller's."""
    sent, threads, all_reduce = [], set(), dist.all_reduce

    def record(tensor, **how):
        sent.append(tensor.nbytes)
        threads.add(threading.get_ident())
        return all_reduce(tensor, **how)

    monkeypatch.setattr(dist, "all_reduce", record)
    found, model = Communication.read("power_sgd of rank 1 from step 2"), build(12)
    compression = PowerSgd(ALONE, found, dict(model.named_parameters()), seed=3, step=0)
    try:
        for step in range(4):
            model.zero_grad()
            loss_of(model, step, 0).backward()
            true = model[2].weight.grad.clone()
            sent.clear()
            compression.reduce()
            assert step < 2 or torch.linalg.matrix_rank(model[2].weight.grad) == 1
            assert torch.equal(model[2].weight.grad, true) == (step < 2)
            way = found if step >= 2 else None
            assert sum(sent) == count_sent_bytes(way, [tuple(p.shape) for p in model.parameters()], itemsize=8)
        assert threads == {threading.get_ident()}
        assert not dist.is_initialized(), "one process needs no group"
    finally:
        compression.close()


def test_sums_over_gloo_end_in_the_callers_thread():
    """In the group's own thread, the end of what a callback holds can be that of the group, which then waits for itself."""
    threads = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = Waiting(dist.group.WORLD)
        assert (group.rank(), group.size()) == (0, 1)
        for number in range(20):
            tensor = torch.full((3,), float(number))
            future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
            assert torch.equal(future.value()[0], tensor)
            future.then(lambda _: threads.append(threading.get_ident())).wait()
    finally:
        dist.destroy_process_group()
    assert threads == [threading.get_ident()] * 20


# --------------------------------------------------------------------------------------------------------- whole trainings


FLAGS = f" --global_batch_size 10 --per_device_train_batch_size 2 --max_train_steps {STEPS} --dtype float64 --resid_pdrop 0.1"
ROUNDS = dict.fromkeys(KINDS, 3) | {"local_sgd": 2}
"""Steps after which trainings are saved, and gone on with."""


def check_same(ours, theirs, skipped: int = 0) -> None:
    """Check that curves and parameters are the same to rounding; `skipped`: the steps that ours has not."""
    pairs = list(zip(metrics(ours), metrics(theirs)[skipped:], strict=True))
    for name in ("loss", "grad_norm"):
        assert [a[name] for a, _ in pairs] == pytest.approx([b[name] for _, b in pairs], rel=1e-11)
    assert evaluations(ours)[-1]["eval_loss"] == pytest.approx(evaluations(theirs)[-1]["eval_loss"], rel=1e-11)
    last = checkpoints(theirs)[-1].name
    assert relative(parameters(ours, last), parameters(theirs, last)) < 1e-12
    ours_kept, theirs_kept = (read(folder / last, "workers") for folder in (ours, theirs))
    assert ours_kept.keys() == theirs_kept.keys()
    for name, tensor in theirs_kept.items():
        torch.testing.assert_close(ours_kept[name], tensor, rtol=1e-8, atol=1e-13)


@pytest.fixture
def recipes(tmp_path):
    """Write a recipe with each `communication`: kind -> flags."""
    for kind, text in KINDS.items():
        values = {"extends": "gpt2_small_cpu", "communication": text}
        (tmp_path / f"{kind}.yaml").write_text(json.dumps(values), encoding="utf-8")
    return {kind: f" --recipe {tmp_path / kind}.yaml{FLAGS}" for kind in KINDS}


@pytest.mark.distributed
def test_any_number_of_processes_and_restarts_do_the_same(train, train_on, recipes):
    """On 1 process and on 3, of which one computes two of four workers; gone on with from the other's checkpoint."""
    alone, runs = {}, {}
    for kind, flags in recipes.items():
        step = ROUNDS[kind]
        alone[kind] = train(kind, f"{flags} --checkpointing_steps {step}", program="pretrain_gpt2")
        runs[f"pretrain_gpt2/{kind}"] = f"{flags} --checkpointing_steps {step}"
        runs[f"pretrain_gpt2/{kind}-resumed"] = f"{flags} --resume_from_checkpoint {alone[kind]}/checkpoint-{step}"
    folder = train_on(3, runs) / "pretrain_gpt2"
    for kind, step in ROUNDS.items():
        check_same(folder / kind, alone[kind])
        check_same(folder / f"{kind}-resumed", alone[kind], step)
    again = f"{recipes['diloco']} --resume_from_checkpoint {folder}/diloco/checkpoint-3"
    check_same(train("again", again, program="pretrain_gpt2"), alone["diloco"], 3)
    last_losses = {metrics(alone[kind])[-1]["loss"] for kind in KINDS}
    assert len(last_losses) == len(KINDS), "each is another algorithm"
    (event,) = [line for line in all_metrics(alone["diloco"]) if "event" in line]
    assert "another algorithm" in event["event"]
    assert event["bytes_per_step"] * 3 == pytest.approx(event["bytes_per_exact_step"], rel=1e-4)
    assert f"another algorithm than the exact step: {KINDS['diloco']}" in (alone["diloco"] / "README.md").read_text()


SHORT = "--global_batch_size 7 --max_train_steps 4 --dtype float64 --per_device_train_batch_size 2"
# Program -> flags
OTHERS = {
    "pretrain_bert": "--hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1",
    "finetune_causal_lm": "--lora_rank 2 --lora_alpha 4",
    "train_image_classifier": "--normalization group",
}


@pytest.mark.thorough
@pytest.mark.distributed
def test_other_programs(train, train_on, tmp_path):
    """Two loss terms, adapters, SGD and channels last: 3 workers on 1 process and on 2."""
    alone, runs = {}, {}
    for program, more in OTHERS.items():
        name = TINIES[program][1]
        file = tmp_path / f"{program}.yaml"
        kind = KINDS["top_k" if program == "finetune_causal_lm" else "diloco"].replace("4 workers", "3 workers")
        file.write_text(json.dumps({"extends": name, "communication": kind}), encoding="utf-8")
        flags = f" --recipe {file} {SHORT} {more}"
        alone[program] = train(program, flags, program=program)
        runs[f"{program}/two"] = flags
    folder = train_on(2, runs)
    for program, whole in alone.items():
        check_same(folder / program / "two", whole)


@pytest.mark.distributed
def test_gradients_in_16_bits_are_not_exact(train, train_on):
    """torch's hooks round what two processes send, bf16 more than fp16; one process sends nothing."""
    flags = "--global_batch_size 10 --max_train_steps 4"
    exact = train("exact", f"{flags} --reduce_dtype bf16", program="pretrain_gpt2")
    runs = {f"pretrain_gpt2/{name}": f"{flags} --reduce_dtype {name}" for name in ("own", "bf16", "fp16")}
    folder = train_on(2, runs) / "pretrain_gpt2"
    errors = {}
    for name in ("own", "bf16", "fp16"):
        errors[name] = relative(parameters(folder / name, "checkpoint-4"), parameters(exact, "checkpoint-4"))
    assert errors["own"] < 1e-5 < 1e-4 < errors["fp16"] < errors["bf16"] < 0.1
    assert "not the exact step" in (folder / "bf16" / "README.md").read_text()
    assert "one process sends no gradients" in (exact / "README.md").read_text()
    assert "Communication" not in (folder / "own" / "README.md").read_text()


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ("--reproducible 2", "reproducible"),
        ("--fault_tolerance step", "fault_tolerance"),
        ("--accumulation optimizer --second_moment unbiased", "accumulation"),
    ],
)
def test_what_excludes_gradients_in_16_bits(flags, field):
    argv = f"--recipe gpt2_small_cpu --reduce_dtype bf16 {flags}".split()
    with pytest.raises(UsageError, match=f"{field} is .*reduce_dtype is '?bf16|reduce_dtype is bf16.*{field} is"):
        run_settings.parse(argv, "gpt2_pretraining", "")
    assert "reduce_dtype is bf16" in str(find_refusal(is_sharded=True, reduce_dtype="bf16"))


def test_a_longer_training_has_another_last_exchange(train, tmp_path):
    """After 3 steps, which a training of 6 steps in rounds of 2 has not."""
    argv = "--global_batch_size 4 --dtype float64 --lr_scheduler_type constant"
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps({"extends": "gpt2_small_cpu", "communication": KINDS["local_sgd"]}), encoding="utf-8")
    argv += f" --recipe {file}"
    short = train("short", f"{argv} --max_train_steps 3", program="pretrain_gpt2")
    with pytest.raises(UsageError, match="workers exchanged their parameters"):
        train(
            "no", f"{argv} --max_train_steps 6 --resume_from_checkpoint {short}/checkpoint-3", program="pretrain_gpt2"
        )
