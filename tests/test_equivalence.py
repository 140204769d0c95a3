"""The promise: the same recipe takes the same steps, however they are cut."""

from functools import partial
from pathlib import Path

import pytest
import torch
from cases import keep, thorough
from common import TINIES, metrics, task_of, tiny_argv
from compare import BF16, check, parameters, relative

from samestep.cut.layout import Layout, solve_layout
from samestep.cut.order import Order
from samestep.data import sentence_pairs, token_blocks
from samestep.data.steps import Steps
from samestep.errors import UsageError
from samestep.models import bert_pretraining, gpt2_pretraining
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import TASKS, load
from samestep.step import accumulate, losses, optim
from samestep.step.noise import noise_by_sample
from samestep.training import run as training_run
from samestep.training.checkpoint import read

# Name -> program, and flags beside its tiny model's.
WORKLOADS = {
    "bert": ("pretrain_bert", " --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"),
    "packed": ("pretrain_gpt2", " --resid_pdrop 0.1 --embd_pdrop 0.1 --attn_pdrop 0.1"),
    "documents": ("pretrain_gpt2", " --packing false --train_file CORPUS/short.jsonl"),
    "masked": ("pretrain_gpt2", " --document_mask true"),
}
# A batch that grows; classifiers of texts, of pairs, of images normalised by groups, by statistics of the whole step.
OTHERS = {
    "growing": (
        "pretrain_gpt2",
        f" --recipe {Path(__file__).parent / 'helpers' / 'growing.yaml'} --warmup_ratio 0.2 --max_train_steps 10",
    ),
    "texts": (
        "finetune_classifier",
        " --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1 --layerwise_lr_decay 0.8",
    ),
    "pairs": ("finetune_classifier", " --text_column text --text_pair_column other"),
    "groups": ("train_image_classifier", ""),
    "reader": ("train_captcha", ""),
    "batch": ("train_image_classifier", " --normalization batch --exact_batch_norm"),
    "batch_reader": ("train_captcha", " --normalization batch --exact_batch_norm"),
}
# Beside them, statistics of the whole step because each process takes one micro-batch.
ALL_WORKLOADS = WORKLOADS | OTHERS | {"in_space": ("train_image_classifier", " --normalization batch")}
TARGETS = {"masked_labels", "next_sentence_label", "labels"}


STEPS = 7  # which take a batch of 10 into the second epoch


def flags(batch: int, cap: str, dtype: str) -> str:
    """B stands for the whole batch."""
    cut = f"--global_batch_size {batch} --per_device_train_batch_size {batch if cap == 'B' else cap} --dtype {dtype}"
    return f"{cut} --max_train_steps {STEPS}"


@pytest.fixture(scope="module")
def references():
    """Of this file's tests: (workload, batch, dtype) -> output folder."""
    return {}


@pytest.fixture
def reference(train, references, tmp_path_factory):
    """reference("bert", 32, "float64"): a workload's training on whole batches, once for all tests."""

    def run(workload: str, batch: int, dtype: str):
        key = workload, batch, dtype
        if key not in references:
            program, more = ALL_WORKLOADS[workload]
            folder = tmp_path_factory.mktemp("reference") / workload
            references[key] = train("", flags(batch, "B", dtype) + more, output_dir=folder, program=program)
        return references[key]

    return run


# Both batches in both precisions: in equal micro-batches and with a rest, by samples and by tokens, recomputed and not.
TOKENS = ("B", " --per_device_train_tokens 200")
RECOMPUTED = ("8", " --gradient_checkpointing")
CUTS_IN_TIME = {
    (32, "float32"): [("3", ""), RECOMPUTED],
    (32, "float64"): [("8", ""), ("3", ""), TOKENS],
    (10, "float32"): [("3", ""), TOKENS],
    (10, "float64"): [("3", ""), ("1", ""), RECOMPUTED],
}


EVERY_CUT = {(workload, 10, "float64") for workload in WORKLOADS} | {("bert", *cut) for cut in CUTS_IN_TIME}


@pytest.mark.parametrize(
    ("workload", "batch", "dtype"),
    [
        case if case in EVERY_CUT else thorough(*case)
        for case in ((workload, *cut) for workload in WORKLOADS for cut in CUTS_IN_TIME)
    ],
)
def test_every_cut_in_time_is_the_same_step(train, reference, workload, batch, dtype):
    program, more = WORKLOADS[workload]
    whole = reference(workload, batch, dtype)
    assert all(line["grad_norm"] > 0.2 for line in metrics(whole)), "clipping must be at work"
    for cap, way in CUTS_IN_TIME[batch, dtype]:
        check(train(cap + way[:8], flags(batch, cap, dtype) + more + way, program=program), whole, dtype)


@pytest.mark.parametrize(
    ("batch", "cap", "dtype"), [thorough(32, "8", "float32"), (10, "3", "float64"), thorough(10, "1", "float64")]
)
@pytest.mark.parametrize("workload", OTHERS)
def test_every_cut_in_time_is_the_same_step_of_other_workloads(train, reference, workload, batch, cap, dtype):
    program, more = OTHERS[workload]
    whole = reference(workload, batch, dtype)
    assert all(line["grad_norm"] > 0.2 for line in metrics(whole)), "clipping must be at work"
    check(train(cap, flags(batch, cap, dtype) + more, program=program), whole, dtype, norms=1e-3)


def test_batch_normalisation_is_another_step_when_it_is_cut_in_time(train):
    """Statistics are those of a micro-batch: the control of `batch` above, and of its own case below."""
    run = partial(train, program="train_image_classifier")
    reference, cut = (run(cap, flags(10, cap, "float64") + " --normalization batch") for cap in ("B", "5"))
    assert relative(parameters(cut), parameters(reference)) > 1e-2


# N -> workload, batch, cap, dtype; all in one launch, for processes take longer to start than to train.
CUTS_IN_SPACE = {
    "2": [
        *((workload, 32, "8", "float32") for workload in ("bert", "documents", "pairs", "groups")),
        *((workload, 10, "3", "float64") for workload in ("growing", "texts", "batch_reader")),
    ],
    "2, of workloads of 3": [
        *((workload, 10, "3", "float64") for workload in (*WORKLOADS, "reader", "batch")),
        ("in_space", 10, "B", "float64"),
    ],
    # B = 10 is 4 + 3 + 3, and B = 2 leaves one process without samples, also where images are normalised by their batch.
    "3": [
        *((workload, 10, "3", "float64") for workload in (*WORKLOADS, "batch")),
        *((workload, 2, "1", "float64") for workload in ("bert", "documents")),
        *(("reader", 10, "3", "float32"), ("batch_reader", 2, "1", "float64"), ("in_space", 2, "B", "float64")),
    ],
}


@pytest.mark.distributed
@pytest.mark.parametrize("cuts", keep(CUTS_IN_SPACE, ["3"]))
def test_every_cut_in_space_is_the_same_step(reference, train_on, cuts):
    runs = {}
    for workload, batch, cap, dtype in CUTS_IN_SPACE[cuts]:
        program, more = ALL_WORKLOADS[workload]
        runs[f"{program}/{workload}-{batch}"] = flags(batch, cap, dtype) + more
    assert len(runs) == len(CUTS_IN_SPACE[cuts])
    folder = train_on(int(cuts[0]), runs)
    for workload, batch, _, dtype in CUTS_IN_SPACE[cuts]:
        ours = folder / ALL_WORKLOADS[workload][0] / f"{workload}-{batch}"
        check(ours, reference(workload, batch, dtype), dtype, norms=1e-5 if workload in WORKLOADS else 1e-3)


@pytest.mark.distributed
def test_sharded_weights_take_the_same_steps(reference, train_on):
    """FSDP2 on two processes; B = 9 in micro-batches of 4 leaves one of them with an empty micro-batch in every step."""
    cases = [
        ("packed", 9, "4", "float32", ""),
        ("packed", 9, "4", "float64", " --gradient_checkpointing"),
        ("documents", 10, "3", "float64", " --per_device_train_tokens 100"),
        ("masked", 10, "3", "float64", ""),
        ("bert", 9, "4", "float64", ""),
    ]
    runs = {
        f"{WORKLOADS[workload][0]}/{workload}-{dtype}": flags(batch, cap, dtype) + WORKLOADS[workload][1] + more
        for workload, batch, cap, dtype, more in cases
    }
    folder = train_on(2, runs, "fsdp2_2xcpu")
    for workload, batch, _, dtype, _ in cases:
        ours, whole = folder / WORKLOADS[workload][0] / f"{workload}-{dtype}", reference(workload, batch, dtype)
        check(ours, whole, dtype)
        assert relative(parameters(ours, ""), parameters(whole, "")) < 1e-4


@pytest.mark.distributed
def test_sharded_in_bf16_rounds_as_unsharded_does(train, train_on, monkeypatch):
    """Gradients are reduced, weights and moments kept in fp32; autocast alone decides what is computed in bf16.

    By the same kernel, which depends on the precision and on the machine where it is not given.
    """
    run = flags(10, "3", "float32") + " --attn_implementation eager"
    exact = metrics(train("exact", run, program="pretrain_gpt2"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    rounded = metrics(train("rounded", run, program="pretrain_gpt2"))
    folder = train_on(2, {"pretrain_gpt2/sharded": run}, "fsdp2_2xcpu", precision="bf16") / "pretrain_gpt2" / "sharded"
    for name in ("loss", "grad_norm"):
        true, usual, ours = ([line[name] for line in lines] for lines in (exact, rounded, metrics(folder)))
        for rounding in (usual, ours):
            error = max(abs(a / b - 1) for a, b in zip(rounding, true, strict=True))
            print(f"{name}: {error / BF16:.3f} roundings")
            assert 1e-5 < error < 4 * BF16, "more than in float32"
    tensors = read(folder / f"checkpoint-{STEPS}", "model")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}


def loop(scripts, corpus, workload: str, layout: Layout, exact: bool) -> tuple[list[float], torch.Tensor]:
    """The steps of a plain PyTorch loop in float64, one process: by our rule, or as a mean over micro-batches of their
    means."""
    program, more = WORKLOADS[workload]
    argv = tiny_argv(program, corpus, "unused", f"--global_batch_size {layout.global_batch_size}{more}")
    script = {"pretrain_bert": bert_pretraining, "pretrain_gpt2": gpt2_pretraining}[program]
    if program == "pretrain_bert":
        recipe, settings = run.parse(argv, "bert_pretraining", "")
        source, _ = sentence_pairs.build(recipe)
        torch.manual_seed(recipe.seed)
        model = script.build_model(recipe)
    else:
        recipe, settings = run.parse(argv, "gpt2_pretraining", "")
        source, _ = token_blocks.build(recipe)
        torch.manual_seed(recipe.seed)
        model = script.build_model(recipe, source.end_of_text)
    model = script.PretrainingSums(model).double().train()
    next(iter(model.kernel_candidates(torch.device("cpu"), "no", settings).values()))()
    noise = noise_by_sample(model, recipe.seed)
    optimizer = optim.adamw(model, recipe.scaled_hyperparameters(), recipe.weight_decay)
    order = Order(len(source), recipe.global_batch_size, recipe.seed)
    schedule = recipe.schedule(STEPS, float(order.steps_per_epoch))
    logged = []
    for data in Steps(source, order, layout, process_index=0).stream(0, STEPS, 0, torch.device("cpu")):
        for group in optimizer.param_groups:
            group["lr"] = schedule(data.step)
        total = 0.0
        for micro_batch, samples in zip(data.micro_batches, data.samples, strict=True):
            noise.set_samples(samples)
            sums, _ = model(**micro_batch)
            of_micro_batch = torch.tensor([len(micro_batch[name]) for name in micro_batch if name in TARGETS])
            loss = losses.weighted_loss(sums, data.counts if exact else of_micro_batch, torch.ones(len(sums)))
            loss = loss if exact else loss / len(data.micro_batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(total)
    return logged, torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


@pytest.mark.parametrize("workload", ["bert", "documents"])
@pytest.mark.parametrize(("batch", "cap"), [thorough(32, 8), thorough(32, 3), (10, 3)])
def test_the_usual_mean_of_means_fails_the_same_check(scripts, corpus, workload, batch, cap):
    whole = solve_layout(num_processes=1, global_batch_size=batch)
    cut = solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=cap)
    true_losses, true_parameters = loop(scripts, corpus, workload, whole, exact=True)
    our_losses, our_parameters = loop(scripts, corpus, workload, cut, exact=True)
    usual_losses, usual_parameters = loop(scripts, corpus, workload, cut, exact=False)
    assert our_losses == pytest.approx(true_losses, rel=1e-11)
    assert relative(our_parameters, true_parameters) < 1e-12
    assert max(abs(a / b - 1) for a, b in zip(usual_losses, true_losses, strict=True)) > 1e-3
    assert relative(usual_parameters, true_parameters) > 1e-3


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_script_is_the_plain_loop(scripts, corpus, train, workload):
    """The script's steps are those of ten lines of PyTorch on whole batches, without Accelerate."""
    whole = solve_layout(num_processes=1, global_batch_size=32)
    true_losses, _ = loop(scripts, corpus, workload, whole, exact=True)
    program, more = WORKLOADS[workload]
    output_dir = train("script", flags(32, "8", "float64") + more, program=program)
    assert [line["loss"] for line in metrics(output_dir)] == pytest.approx(true_losses, rel=1e-11)


def test_a_step_without_masked_tokens_is_not_nan(train, monkeypatch):
    """A training of such steps alone is refused; one of them may come by chance."""
    monkeypatch.setattr(training_run, "check_terms", lambda *_: None)
    output_dir = train("unmasked", "--global_batch_size 8 --mlm_probability 0 --per_device_train_batch_size 3")
    assert all(line["mlm_loss"] == 0 and line["loss"] == line["nsp_loss"] > 0 for line in metrics(output_dir))


def test_a_loss_without_any_target_is_refused_unless_its_weight_is_0(train):
    flags = "--global_batch_size 8 --mlm_probability 0 --stop_after_step 1"
    with pytest.raises(UsageError, match="no target of the loss mlm"):
        train("unmasked", flags)
    (line,) = metrics(train("weightless", f"{flags} --mlm_loss_weight 0"))
    assert line["loss"] == line["nsp_loss"] > 0


def test_weights_of_the_terms(train):
    output_dir = train("weighted", "--global_batch_size 8 --mlm_loss_weight 0.5 --nsp_loss_weight 2")
    for line in metrics(output_dir):
        assert line["loss"] == pytest.approx(0.5 * line["mlm_loss"] + 2 * line["nsp_loss"], rel=1e-6)


@pytest.mark.parametrize("program", TINIES)
def test_under_float64_the_weights_of_the_loss_are_float64(program, train, monkeypatch, after_forward):
    """0.7 and 1.9 are no numbers of float32, which would be 1.7e-8 off."""
    names, given = load(TINIES[program][1]).loss_weights, [0.7, 1.9]
    kind = TASKS[task_of(program)]
    monkeypatch.setattr(kind, "loss_weights", property(lambda self: dict(zip(names, given, strict=False))))
    seen, totals, count = [], [], accumulate.total_counts

    def watch(model, outputs, **micro_batch):
        if totals and outputs[0].requires_grad:
            outputs[0].register_hook(lambda gradient: seen.append((totals[-1].tolist(), gradient.tolist())))

    def noted(accelerator, counts):
        totals.append(count(accelerator, counts))
        return totals[-1]

    after_forward(kind.parts.find("model"), watch)
    monkeypatch.setattr(accumulate, "total_counts", noted)
    train("run", "--dtype float64 --stop_after_step 1 --global_batch_size 4", program=program)
    assert len(seen) == 1
    for counts, gradient in seen:
        plain = [weight / count for weight, count in zip(given, counts, strict=False)]
        assert gradient == pytest.approx(plain, rel=1e-14, abs=0)
