"""Programs whose gradients accumulate in the optimizer: any cut is the same step of SGD; what cannot be is refused or said."""

import pytest
import torch
from cases import thorough
from common import metrics, model_of, tiny_argv
from compare import parameters, relative
from faults import train_with_code

from samestep.cut.layout import solve_layout
from samestep.errors import RunError, UsageError
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import load
from samestep.recipe.exclusions import find_refusal
from samestep.training.checkpoint import read
from stepplan.memory import model_from_recipe
from stepplan.trace import trace_recipe
from stepplan.workload import from_recipe

SGD = "--accumulation optimizer --max_grad_norm none --dtype float64 --global_batch_size 22 "
ADAMW = "--accumulation optimizer --second_moment unbiased --dtype float64 --global_batch_size 22 "


def test_sgd_is_exact_however_it_is_cut_in_time(train):
    whole = "--max_grad_norm none --dtype float64 --global_batch_size 22"
    reference = train("gradient", whole, program="train_image_classifier")
    for cap in (22, 8, 3):
        cut = train(f"cut-{cap}", SGD + f"--per_device_train_batch_size {cap}", program="train_image_classifier")
        assert relative(parameters(cut), parameters(reference)) < 1e-12
        losses = [[line["loss"] for line in metrics(folder)] for folder in (cut, reference)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-11)
        norms = [[line["grad_norm"] for line in metrics(folder)] for folder in (cut, reference)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-9), "every parameter is small enough to be kept whole"


@pytest.mark.distributed
def test_sgd_is_exact_however_it_is_cut_in_space(train, train_on):
    """Two processes, three samples at once; and a run that one process began is continued by two, AdamW's, too."""
    reference = train(
        "gradient", "--max_grad_norm none --dtype float64 --global_batch_size 22", program="train_image_classifier"
    )
    for name, program, flags in (("sgd", "train_image_classifier", SGD), ("adamw", "pretrain_bert", ADAMW)):
        train(f"{program}/{name}", flags + "--per_device_train_batch_size 8 --stop_after_step 5", program=program)
    runs = {
        "train_image_classifier/cut": SGD + "--per_device_train_batch_size 3",
        "train_image_classifier/sgd": SGD + "--per_device_train_batch_size 3 --resume_from_checkpoint latest",
        "pretrain_bert/adamw": ADAMW + "--per_device_train_batch_size 4 --resume_from_checkpoint latest",
    }
    folder = train_on(2, runs)
    for name in ("train_image_classifier/cut", "train_image_classifier/sgd"):
        assert relative(parameters(folder / name), parameters(reference)) < 1e-12
    assert [line["step"] for line in metrics(folder / "pretrain_bert" / "adamw")] == list(range(1, 11))


def test_adamw_says_what_it_is_and_goes_on_as_undisturbed(train, capsys):
    """Clipping at work; the checkpoint holds what the next step needs, and torch's names for it."""
    flags = ADAMW + "--per_device_train_batch_size 6"
    whole = train("whole", flags)
    text = capsys.readouterr().out
    assert "the cut is not exact, because AdamW's second moment is estimated (unbiased)" in text
    assert all(line["grad_norm"] > 0.2 for line in metrics(whole)), "clipping must be at work"
    train("parts", flags + " --stop_after_step 4")
    parts = train("parts", flags + " --resume_from_checkpoint latest")
    assert torch.equal(parameters(parts), parameters(whole))
    names = {name.rsplit("/", 1)[1] for name in read(parts / "checkpoint-10", "optimizer")}
    assert names == {"step", "exp_avg", "exp_avg_sq", "clip"}


def test_adamw_is_near_the_exact_one(train):
    """In one piece the gradient is exact and only clipping differs; in four the second moment is an estimate."""
    reference = metrics(train("gradient", "--global_batch_size 32 --dtype float64 --max_grad_norm none"))
    flags = ADAMW + "--global_batch_size 32 --max_grad_norm none --per_device_train_batch_size "
    whole, four = (metrics(train(f"cap-{cap}", flags + str(cap))) for cap in (32, 8))
    assert [line["loss"] for line in whole] == pytest.approx([line["loss"] for line in reference], rel=1e-11)
    losses = [[line["loss"] for line in lines] for lines in (four, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_memory_that_runs_out_ends_the_run(train, after_forward):
    """After the sizes were tried, in the third micro-batch of the second step: what is folded cannot be taken back."""
    calls = []

    def limited(*_, **__):
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 2 + 6 + 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    after_forward(model_of("pretrain_bert"), limited)
    with pytest.raises(RunError, match=r"in step 2, some gradients .* smaller --per_device_train_batch_size than 4"):
        train("short", ADAMW + "--per_device_train_batch_size 4")


@pytest.mark.distributed
def test_memory_that_runs_out_on_one_process_ends_both(trainings, corpus, tmp_path):
    """In the last backward, when some buckets are being reduced: nobody waits for ever."""
    flags = ADAMW + "--per_device_train_batch_size 4"
    code = (
        "import run_with_fault\nfrom samestep.models import bert_pretraining\n"
        "run_with_fault.prepare()\nrun_with_fault.limit_memory(bert_pretraining.PretrainingSums, 1, 'synchronising')"
    )
    argv = tiny_argv("pretrain_bert", corpus, tmp_path / "run", flags)
    codes, said = train_with_code(trainings, code, argv, tmp_path)
    assert codes[0] == 1
    assert "memory ran out on another process in step 5" in said


def test_a_gradient_that_is_not_finite_ends_the_run_without_a_checkpoint(train, after_forward):
    calls = []

    def breaking(model, outputs, **micro_batch):
        sums, correct = outputs
        calls.append(torch.is_grad_enabled())
        return (sums * float("nan") if sum(calls) == 20 else sums), correct

    after_forward(model_of("pretrain_bert"), breaking)
    flags = ADAMW + "--per_device_train_batch_size 4 --checkpointing_steps 1 --logging_steps 1"
    with pytest.raises(RunError, match=r"not finite.*Resume from a checkpoint before it"):
        train("broken", flags)


def test_what_cannot_be_is_refused(corpus, tmp_path):
    def parse(program: str, flags: str):
        task = {"pretrain_bert": "bert_pretraining", "train_image_classifier": "image_classification"}[program]
        return run.parse(tiny_argv(program, corpus, tmp_path, flags), task, "")

    with pytest.raises(UsageError, match="on_nonfinite is skip, but with accumulation optimizer"):
        parse("pretrain_bert", ADAMW + "--on_nonfinite skip")
    with pytest.raises(
        UsageError, match=r"second_moment is null, but .* optimizer and adamw it must be one of unbiased"
    ):
        parse("pretrain_bert", "--accumulation optimizer")
    with pytest.raises(UsageError, match=r"second_moment is unbiased, but .* optimizer and sgd it must be null"):
        parse("train_image_classifier", SGD + "--second_moment unbiased")
    with pytest.raises(UsageError, match=r"second_moment is unbiased, but .* gradient and adamw it must be null"):
        parse("pretrain_bert", "--second_moment unbiased")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"mixed_precision": "fp16"}, "mixed_precision is fp16, where a step"),
        ({"is_sharded": True}, "the launch file shards weights"),
    ],
)
def test_launches_that_cannot_be_are_refused(launch, message):
    recipe = load("gpt2_small_cpu", {"accumulation": "optimizer", "second_moment": "unbiased"})
    assert find_refusal(recipe, **launch).reason.startswith(f"accumulation is optimizer, but {message}")
    assert find_refusal(recipe, mixed_precision="bf16", is_sharded=False) is None


@pytest.mark.parametrize(("name", "b"), [thorough("bert_base", 8), ("resnet50_imagenet_4xt4_b512", 2)])
def test_four_bytes_per_parameter_are_saved(name, b):
    """On fake tensors, a micro-batch that is not the first; and in the plan."""
    few = {"num_hidden_layers": 4} if "bert" in name else {"depths": (1, 1, 1, 1)}
    folded = few | {"accumulation": "optimizer", "second_moment": "unbiased" if "bert" in name else None}
    recipes = [load(name, few), load(name, folded)]
    traces = [trace_recipe(recipe, b, mixed_precision="bf16") for recipe in recipes]
    saved = 4 * traces[0].num_parameters
    assert traces[1].gradients == 0
    assert traces[0].peak - traces[1].peak == pytest.approx(saved, rel=0.1)
    assert traces[1].moments == pytest.approx(traces[0].moments, rel=0.001)
    layout = solve_layout(
        num_processes=1, global_batch_size=recipes[0].global_batch_size, per_device_train_batch_size=b
    )
    planned = [from_recipe(recipe).memory(layout, mixed_precision="bf16") for recipe in recipes]
    assert planned[0].total - planned[1].total == 4 * model_from_recipe(recipes[0]).num_parameters
    assert planned[1].total == pytest.approx(traces[1].peak, rel=0.1)
