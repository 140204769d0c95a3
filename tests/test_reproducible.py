"""--reproducible: the same bits on any number of processes, with any restarts, dropout on."""

import pytest
from cases import thorough
from common import TINIES, metrics, model_of, task_of
from compare import hash_run

from samestep.errors import RunError, UsageError
from samestep.recipe import run_settings
from samestep.recipe.exclusions import find_refusal
from samestep.step.exact_sum import ExactSum
from samestep.training.run_step import RunStep

DROPOUT = " --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1 --attn_implementation eager"
BATCH_NORM = " --normalization batch --exact_batch_norm"
# Program -> flags beside its tiny model's.
WORKLOADS = {
    "pretrain_bert": DROPOUT,
    "pretrain_gpt2": " --resid_pdrop 0.1 --embd_pdrop 0.1 --attn_pdrop 0.1 --attn_implementation sdpa",
    "finetune_classifier": DROPOUT,
    "finetune_causal_lm": "",
    "train_captcha": BATCH_NORM,
    "train_image_classifier": BATCH_NORM,
}
FLAGS = " --global_batch_size 16 --reproducible 3 --max_train_steps 4"


@pytest.mark.distributed
@pytest.mark.parametrize("precision", ["no", thorough("bf16")])
def test_any_number_of_processes(train_on, precision):
    expected = None
    for num_processes in (1, 3):
        runs = {f"{program}/{num_processes}": flags + FLAGS for program, flags in WORKLOADS.items()}
        folder = train_on(num_processes, runs, precision=precision)
        found = {program: hash_run(folder / program / str(num_processes)) for program in WORKLOADS}
        expected = expected or found
        assert found == expected


@pytest.mark.distributed
def test_restarts_on_other_numbers_of_processes(train_on, tmp_path):
    programs = ("pretrain_bert", "train_captcha")
    train_on(1, {f"{program}/whole": WORKLOADS[program] + FLAGS for program in programs})
    for num_processes, more in ((1, " --stop_after_step 1"), (3, " --stop_after_step 3"), (2, "")):
        more += " --resume_from_checkpoint latest"
        train_on(num_processes, {f"{program}/moved": WORKLOADS[program] + FLAGS + more for program in programs})
    for program in programs:
        assert hash_run(tmp_path / program / "moved") == hash_run(tmp_path / program / "whole")


def test_it_is_the_step_of_the_recipe(train):
    """But for rounding; and the size of micro-batches does decide bits."""
    usual = metrics(train("usual", DROPOUT + FLAGS.replace("--reproducible", "--per_device_train_batch_size")))
    for size in (3, 5):
        lines = metrics(train(f"reproducible{size}", DROPOUT + FLAGS.replace("ible 3", f"ible {size}")))
        for name in ("loss", "grad_norm"):
            assert [line[name] for line in lines] == pytest.approx([line[name] for line in usual], rel=1e-5)
        assert lines != usual


def test_a_step_begins_again_with_another_quantum(train, monkeypatch):
    usual, begins, begin = metrics(train("usual", FLAGS)), [], ExactSum.begin

    def begin_badly(exact_sum, num_micro_batches):
        begins.append(num_micro_batches)
        if len(begins) == 3:
            exact_sum.last_exponent -= 30
        begin(exact_sum, num_micro_batches)

    monkeypatch.setattr(ExactSum, "begin", begin_badly)
    lines = metrics(train("again", FLAGS))
    assert len(begins) == 5
    for line, other in zip(lines, usual, strict=True):
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("program", "flags", "field"),
    [
        ("pretrain_bert", "--per_device_train_batch_size 4", "per_device_train_batch_size is 4"),
        ("pretrain_bert", "--gradient_accumulation_steps 2", "gradient_accumulation_steps is 2"),
        ("pretrain_bert", "--dtype float64", "dtype is float64"),
        ("pretrain_bert", "--speed auto", "speed is auto"),
        ("pretrain_bert", "--torch_compile", "torch_compile is true"),
        ("pretrain_bert", "--accumulation optimizer --second_moment unbiased", "accumulation is optimizer"),
        ("train_captcha", "--normalization batch --exact_batch_norm false", "normalization is batch"),
    ],
)
def test_what_depends_on_the_cut_is_refused(program, flags, field):
    argv = [*TINIES[program], "--reproducible", "4", *flags.split()]
    with pytest.raises(UsageError) as error:
        run_settings.parse(argv, task_of(program), "")
    assert len(error.value.problems) == 1
    assert field in error.value.problems[0]


def test_launches_that_are_refused():
    assert find_refusal(reproducible=4, mixed_precision="bf16") is None
    assert "fp16" in find_refusal(reproducible=4, mixed_precision="fp16").reason
    assert "FSDP" in find_refusal(reproducible=4, is_sharded=True).reason


def test_a_checkpoint_of_other_bits_is_refused(train, tmp_path):
    train("run", FLAGS + " --stop_after_step 1")
    train("usual", FLAGS.replace("--reproducible", "--per_device_train_batch_size") + " --stop_after_step 1")
    for name, size, difference in (("run", 5, "reproducible 3 there, 5 here"), ("usual", 3, "reproducible None there")):
        flags = FLAGS.replace("ible 3", f"ible {size}") + " --resume_from_checkpoint latest"
        with pytest.raises(UsageError, match=difference):
            train(name, flags, output_dir=tmp_path / name)
    train(
        "run", FLAGS.replace("--reproducible 3", "") + " --resume_from_checkpoint latest", output_dir=tmp_path / "run"
    )


def test_a_loop_that_scales_by_itself_is_refused(train, monkeypatch):
    scale = property(lambda step: step.num_micro_batches)
    monkeypatch.setattr(RunStep, "loss_scale", scale)
    with pytest.raises(UsageError, match=r"step\.loss_scale"):
        train("run", FLAGS)


def test_errors_that_no_smaller_micro_batch_mends(train, after_forward):
    """Memory that runs out, as the size of micro-batches is fixed, and kernels of a GPU that add up in any order."""
    errors = []

    def fail(model, *_, **__):
        if model.training:
            raise errors[-1]

    after_forward(model_of("pretrain_bert"), fail)
    told = "cumsum_cuda_kernel does not have a deterministic implementation, but you set ..."
    for error, words in ((MemoryError(), "3 samples"), (RuntimeError(told), "^cumsum_cuda_kernel")):
        errors.append(error)
        with pytest.raises(RunError, match=words):
            train(f"run{len(errors)}", FLAGS)
