"""Losses of the whole step, computed in micro-batches, beside plain PyTorch on one large batch."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from run_whole_batch import (
    CASES,
    IMAGES,
    NUM_SAMPLES,
    TEXTS,
    build,
    collate_images,
    collate_texts,
    embed,
    train,
)
from torch import nn

from samestep import exact_steps
from samestep.contrib.whole_batch import balance, contrastive
from samestep.contrib.whole_batch.quantities import WholeBatch
from samestep.errors import UsageError

TEXT_BATCH, IMAGE_BATCH = collate_texts(TEXTS), collate_images(IMAGES)
NUMBERS = torch.arange(NUM_SAMPLES)


# ---------------------------------------------------------------------------------------------------------------------
# Plain PyTorch


def cross_entropy(scores):
    return F.cross_entropy(scores, NUMBERS)


def plain_info_nce(model):
    q, d = embed(model, TEXT_BATCH)
    return cross_entropy(5 * q @ d.T)


def plain_negatives(model):
    q, d = embed(model, TEXT_BATCH)
    return cross_entropy(5 * q @ torch.cat([d, model(TEXT_BATCH["negatives"]).reshape(-1, 8)]).T)


def plain_symmetric(model):
    q, d = embed(model, TEXT_BATCH)
    scores = model.scale.exp() * q @ d.T
    return (cross_entropy(scores) + cross_entropy(scores.T)) / 2


def plain_siglip(model):
    q, d = embed(model, TEXT_BATCH)
    signs = 2 * torch.eye(NUM_SAMPLES) - 1
    return torch.log1p(torch.exp(-signs * (model.scale.exp() * q @ d.T + model.bias))).sum() / NUM_SAMPLES


def plain_gist(model):
    q, d = embed(model, TEXT_BATCH)
    counts = [torch.stack([torch.bincount(text[i], minlength=40).double() for text in TEXTS]) for i in (0, 1)]
    guide = F.normalize(counts[0]) @ F.normalize(counts[1]).T
    is_nearer = guide > guide.diagonal()[:, None] - 0.3
    assert 0 < (is_nearer & ~torch.eye(NUM_SAMPLES, dtype=torch.bool)).sum() < NUM_SAMPLES * (NUM_SAMPLES - 1)
    scores = 5 * q @ d.T
    return cross_entropy(scores.masked_fill(is_nearer & ~torch.eye(NUM_SAMPLES, dtype=torch.bool), -torch.inf))


def plain_matryoshka(model):
    q, d = embed(model, TEXT_BATCH)
    short = F.normalize(q[:, :4]), F.normalize(d[:, :4])
    return cross_entropy(20 * q @ d.T) + 0.5 * cross_entropy(20 * short[0] @ short[1].T)


def plain_experts(model, is_by_layer=False):
    ids = TEXT_BATCH["queries"]
    is_token = (ids != 0).flatten()
    layers = [logits[is_token].softmax(-1) for logits in model(ids)[1]]
    losses = [balance_of(p) for p in (layers if is_by_layer else [torch.cat(layers)])]
    return sum(losses) / len(losses)


def balance_of(p):
    """Count as transformers does: the shares of tokens by place among the chosen ones, added up."""
    chosen = F.one_hot(p.topk(2).indices, 4).double().mean(0)
    return 4 * (chosen * p.mean(0)).sum()


def plain_dice(model):
    p = model(IMAGE_BATCH["pixels"]).softmax(1)
    labels = IMAGE_BATCH["labels"]
    scores = []
    for number in range(3):
        inside, truth = p[:, number][labels != -100], (labels[labels != -100] == number).double()
        scores.append((2 * (inside * truth).sum() + 1) / (inside.sum() + truth.sum() + 1))
    return 1 - torch.stack(scores).mean()


PLAIN = {
    "info_nce": plain_info_nce,
    "negatives": plain_negatives,
    "symmetric": plain_symmetric,
    "siglip": plain_siglip,
    "gist": plain_gist,
    "matryoshka": plain_matryoshka,
    "experts": plain_experts,
    "experts by layer": lambda model: plain_experts(model, is_by_layer=True),
    "dice": plain_dice,
}


def distance(a, b):
    return (torch.dist(a, b) / b.norm()).item()


@pytest.mark.parametrize("name", PLAIN)
def test_every_cut_has_the_gradient_of_one_large_batch(name):
    model = build(name)
    loss = PLAIN[name](model)
    loss.backward()
    found = {b: train(name, b) for b in (NUM_SAMPLES, 4, 1)}
    trained = [p for key, p in model.named_parameters() if p.grad is not None]
    true = torch.cat([p.grad.flatten() for p in trained])
    for each in found.values():
        assert distance(each["gradients"][0], true) < 1e-12
        assert each["looked"][0].item() == pytest.approx(loss.item(), rel=1e-12)
        assert torch.allclose(each["logged"], each["looked"], rtol=1e-12)
        assert distance(each["gradients"], found[NUM_SAMPLES]["gradients"]) < 1e-11


def test_the_mean_of_micro_batches_is_another_loss():
    model = build("info_nce")
    plain_info_nce(model).backward()
    true = model.outer.weight.grad.clone()
    model.zero_grad()
    for first in (0, 5):
        q, d = embed(model, {key: value[first : first + 5] for key, value in TEXT_BATCH.items()})
        (F.cross_entropy(5 * q @ d.T, torch.arange(5)) / 2).backward()
    assert distance(model.outer.weight.grad, true) > 0.05


def test_dropout_is_the_same_in_both_forwards():
    found = [train("dropout", b)["gradients"] for b in (NUM_SAMPLES, 3, 1)]
    for other in found[1:]:
        assert distance(other, found[0]) < 1e-11
    assert distance(found[0], train("symmetric", 3)["gradients"]) > 0.05


@pytest.mark.distributed
@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_take_the_same_step(run_processes, num_processes):
    """3 processes with micro-batches of 2 have 4, 3 and 3 of 10 samples."""
    alone = {name: train(name, 2) for name in CASES}
    for found in run_processes("run_whole_batch", num_processes):
        for name, each in found.items():
            assert distance(each["gradients"], alone[name]["gradients"]) < 1e-11, name
            assert torch.allclose(each["logged"], alone[name]["looked"], rtol=1e-12), name


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def take_step(compute, loss=lambda q, d: contrastive.info_nce(q, d), model=None, looks=True):
    accelerator = Accelerator(cpu=True)
    model = model or build("info_nce")
    whole = WholeBatch(model, compute, loss)
    sizes = {"global_batch_size": NUM_SAMPLES, "per_device_batch_size": 4}
    for step in exact_steps(accelerator, TEXTS, collate_texts, **sizes, targets=lambda batch: len(batch["queries"])):
        if looks:
            whole.look(step)
        for batch in step:
            with accelerator.accumulate(model):
                accelerator.backward(whole.loss(step, compute(model, batch)))


def test_what_is_refused():
    noisy = nn.Sequential(build("info_nce"), nn.Dropout(0.5))

    def shuffled(model, batch):
        return model(batch["queries"]), model(batch["negatives"]).flatten(0, 1)

    with pytest.raises(UsageError, match=r"rows for a micro-batch, must return one row for each sample"):
        take_step(shuffled)
    with pytest.raises(UsageError, match="a micro-batch gave other numbers in look: is there dropout"):
        take_step(embed, model=noisy)
    with pytest.raises(UsageError, match="that look did not see"):
        take_step(embed, looks=False)
    with pytest.raises(UsageError, match="must return one finite number"):
        take_step(embed, loss=lambda q, d: q @ d.T)
    with pytest.raises(UsageError, match="must return one finite number"):
        take_step(embed, loss=lambda q, d: (q * torch.inf).sum())


def test_noise_of_torch_is_the_same_in_both_forwards():
    """It depends on the cut, as without this; but look has seen it."""
    accelerator, model = Accelerator(cpu=True), nn.Sequential(build("info_nce"), nn.Dropout(0.5))
    whole = WholeBatch(model, embed, contrastive.info_nce)
    sizes = {"global_batch_size": NUM_SAMPLES, "per_device_batch_size": 4, "num_steps": 2}
    for step in exact_steps(accelerator, TEXTS, collate_texts, **sizes, targets=lambda batch: len(batch["queries"])):
        torch.manual_seed(step.index)
        whole.look(step)
        state = torch.get_rng_state()
        for batch in step:
            with accelerator.accumulate(model):
                with whole.same_noise():
                    rows = embed(model, batch)
                accelerator.backward(whole.loss(step, rows))
        assert torch.equal(torch.get_rng_state(), state)
    assert model[0].outer.weight.grad.norm() > 0


def test_extremes_have_a_defined_result():
    """One sample, samples that are all alike, experts without a token, classes without a pixel."""
    row = F.normalize(torch.ones(1, 4))
    assert contrastive.info_nce(row, row).item() == 0
    same = row.expand(6, 4)
    assert contrastive.info_nce(same, same, is_symmetric=True).item() == pytest.approx(torch.tensor(6.0).log().item())
    assert contrastive.gist(same, same, same, same).isfinite()
    everything = contrastive.gist(same, same, same, same, margin=2.0)  # no negative is left
    assert everything.item() == pytest.approx(0)
    logits = torch.full((5, 4), -30.0)
    logits[:, 1] = 30
    sums = balance.sum_routing((logits,), 1)
    assert balance.expert_balance(*sums).item() == pytest.approx(4)
    overlap = balance.sum_overlap(torch.randn(2, 3, 4), torch.full((2, 4), -100))
    assert balance.dice(*overlap).item() == 0


def test_blocks_change_no_number():
    q, d = (F.normalize(torch.randn(9, 4, dtype=torch.float64), dim=-1) for _ in range(2))
    for block in (1, 4, 9, 100):
        assert contrastive.info_nce(q, d, block=block).item() == pytest.approx(cross(20 * q @ d.T), rel=1e-13)


def cross(scores):
    return F.cross_entropy(scores, torch.arange(len(scores))).item()
