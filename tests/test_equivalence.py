"""The promise: the same recipe takes the same steps, however they are cut."""

import pytest
import torch
from common import TINY, evaluations, metrics
from safetensors.torch import load_file

from recipes import losses, optim, run
from recipes.data import sentence_pairs
from recipes.data.steps import Steps
from recipes.order import Order
from recipes.plan import Layout, solve_layout

# Largest micro-batch for N processes; B stands for the whole batch.
ONE_PROCESS = ["B", "8", "3", "1"]
TWO_PROCESSES = ["8", "3"]
BATCHES = [32, 10]


def flags(batch: int, cap: str, dtype: str) -> str:
    return f"--global_batch_size {batch} --per_device_train_batch_size {batch if cap == 'B' else cap} --dtype {dtype}"


def parameters(output_dir) -> torch.Tensor:
    tensors = load_file(output_dir / "checkpoint-10" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def check(output_dir, reference, dtype: str) -> None:
    """The acceptance: losses of every step to 1e-5 in fp32, parameters after 10 steps to 1e-12 in float64."""
    ours, theirs = metrics(output_dir), metrics(reference)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] == list(range(1, 11))
    for name in ("loss", "mlm_loss", "nsp_loss", "grad_norm"):
        for a, b in zip(ours, theirs, strict=True):
            assert a[name] == pytest.approx(b[name], rel=1e-5 if dtype == "float32" else 1e-11)
    for name in ("epoch", "learning_rate", "samples", "tokens"):
        assert [line[name] for line in ours] == [line[name] for line in theirs]
    last, true_last = evaluations(output_dir)[-1], evaluations(reference)[-1]
    for name in true_last if dtype == "float64" else ["step", "eval_loss"]:
        assert last[name] == pytest.approx(true_last[name], rel=1e-4 if dtype == "float32" else 1e-11)
    assert relative(parameters(output_dir), parameters(reference)) < (1e-4 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_cut_in_time_is_the_same_step(train, batch, dtype):
    reference = train("B", flags(batch, "B", dtype))
    assert all(line["grad_norm"] > 0.2 for line in metrics(reference)), "clipping must be at work"
    for cap in ONE_PROCESS[1:]:
        check(train(cap, flags(batch, cap, dtype)), reference, dtype)
    check(train("tokens", flags(batch, "B", dtype) + " --per_device_train_tokens 200"), reference, dtype)
    check(train("recomputed", flags(batch, "8", dtype) + " --gradient_checkpointing"), reference, dtype)


@pytest.mark.distributed
@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_processes", [2, 3])
def test_every_cut_in_space_is_the_same_step(train, train_on, num_processes):
    # On 3 processes B = 10 is 4 + 3 + 3, and B = 2 leaves one process without samples.
    cases = [(batch, cap, dtype) for batch in BATCHES for cap in TWO_PROCESSES for dtype in ("float32", "float64")]
    if num_processes == 3:
        cases = [(10, "3", "float64"), (2, "1", "float64")]
    folder = train_on(num_processes, {f"{b}-{cap}-{dtype}": flags(b, cap, dtype) for b, cap, dtype in cases})
    for batch, cap, dtype in cases:
        reference = folder / f"reference-{batch}-{dtype}"
        if not reference.exists():
            train(reference.name, flags(batch, "B", dtype))
        check(folder / f"{batch}-{cap}-{dtype}", reference, dtype)


def loop(script, corpus, layout: Layout, exact: bool) -> tuple[list[float], torch.Tensor]:
    """Ten steps of a plain PyTorch loop in float64, one process: by our rule, or as a mean over cells of their means."""
    argv = [*TINY, "--train_file", str(corpus), "--global_batch_size", str(layout.global_batch_size)]
    recipe, _ = run.parse(argv, "bert_pretraining", "")
    source, _ = sentence_pairs.build(recipe)
    torch.manual_seed(recipe.seed)
    model = script.PretrainingSums(script.build_model(recipe)).double().train()
    optimizer = optim.adamw(model, recipe.scaled(), recipe.weight_decay)
    order = Order(len(source), recipe.global_batch_size, recipe.seed)
    schedule = recipe.schedule(10, float(order.steps_per_epoch))
    logged = []
    for data in Steps(source, order, layout, process_index=0).loader(range(10), 0, torch.device("cpu")):
        for group in optimizer.param_groups:
            group["lr"] = schedule(data.step)
        total = 0.0
        for cell in data.cells:
            sums, _ = model(**cell)
            of_cell = torch.tensor([len(cell["masked_labels"]), len(cell["next_sentence_label"])])
            loss = losses.weighted_loss(sums, data.counts if exact else of_cell, torch.ones(2))
            loss = loss if exact else loss / len(data.cells)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        logged.append(total)
    return logged, torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


@pytest.mark.parametrize(("batch", "cap"), [(32, 8), (32, 3), (10, 3)])
def test_the_usual_mean_of_means_fails_the_same_check(script, corpus, batch, cap):
    whole = solve_layout(num_processes=1, global_batch_size=batch)
    cut = solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=cap)
    true_losses, true_parameters = loop(script, corpus, whole, exact=True)
    our_losses, our_parameters = loop(script, corpus, cut, exact=True)
    usual_losses, usual_parameters = loop(script, corpus, cut, exact=False)
    assert our_losses == pytest.approx(true_losses, rel=1e-11)
    assert relative(our_parameters, true_parameters) < 1e-12
    assert max(abs(a / b - 1) for a, b in zip(usual_losses, true_losses, strict=True)) > 1e-3
    assert relative(usual_parameters, true_parameters) > 1e-3


def test_the_script_is_the_plain_loop(script, corpus, train):
    """The script's steps are those of ten lines of PyTorch on whole batches, without Accelerate."""
    true_losses, _ = loop(script, corpus, solve_layout(num_processes=1, global_batch_size=32), exact=True)
    output_dir = train("script", flags(32, "8", "float64"))
    assert [line["loss"] for line in metrics(output_dir)] == pytest.approx(true_losses, rel=1e-11)


def test_a_step_without_masked_tokens_is_not_nan(train):
    output_dir = train("unmasked", "--global_batch_size 8 --mlm_probability 0 --per_device_train_batch_size 3")
    assert all(line["mlm_loss"] == 0 and line["loss"] == line["nsp_loss"] > 0 for line in metrics(output_dir))


def test_weights_of_the_terms(train):
    output_dir = train("weighted", "--global_batch_size 8 --mlm_loss_weight 0.5 --nsp_loss_weight 2")
    for line in metrics(output_dir):
        assert line["loss"] == pytest.approx(0.5 * line["mlm_loss"] + 2 * line["nsp_loss"], rel=1e-6)
