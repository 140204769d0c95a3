"""Preference objectives: sums over the pairs and tokens of a step, however the step is cut, beside plain padded formulas."""

import copy

import pytest
import torch
import torch.nn.functional as F
from small_models import LLAMA, peak
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from samestep.contrib.preferences import chosen_cross_entropy, dpo, odds_ratio, reward, simpo, sum_terms
from samestep.step.log_probabilities import count_tokens, sequence_logps

BETA, MARGIN = 0.7, 0.3
# Objective -> weights of its terms
OBJECTIVES = {
    "dpo": {"preference": 1.0},
    "dpo and sft": {"preference": 1.0, "sft": 0.2},
    "orpo": {"sft": 1.0, "odds": 0.5},
    "simpo": {"preference": 1.0},
    "reward": {"preference": 1.0},
}
LENGTHS = [(9, 4), (3, 12), (17, 17), (2, 5), (8, 3), (5, 6), (11, 2)]  # tokens of a pair's sequences
PROMPTS = [1, 2, 5, 1, 2, 4, 1]  # first tokens, which are not trained, of both sequences of a pair
CUTS = [[range(7)], [range(3), range(3, 4), range(4, 4), range(4, 7)], [range(6), range(6, 7)]]


@pytest.fixture(scope="module")
def llama():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": 2, "initializer_range": 0.2})).double()
    model.score = nn.Linear(32, 1, bias=False).double()
    return model


def draw_sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(300, (length,), generator=generator) for pair in LENGTHS for length in pair]


SEQUENCES = draw_sequences()
REFERENCE = torch.tensor([-4.0 * length for pair in LENGTHS for length in pair], dtype=torch.float64)


def our_sums(model, objective: str, pairs: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute sums, correct and counts of a micro-batch of pairs: one sequence at a time, without padding."""
    numbers = [number for pair in pairs for number in (2 * pair, 2 * pair + 1)]
    hidden, labels, label_sequence, last = [torch.zeros(0, 32).double()], [], [], [torch.zeros(0, 32).double()]
    for place, number in enumerate(numbers):
        tokens, prompt = SEQUENCES[number], PROMPTS[number // 2]
        states = model.model(tokens[None]).last_hidden_state[0]
        hidden.append(states[prompt - 1 : -1])
        last.append(states[-1:])
        labels += tokens[prompt:].tolist()
        label_sequence += [place] * (len(tokens) - prompt)
    labels, label_sequence = torch.tensor(labels, dtype=torch.int64), torch.tensor(label_sequence, dtype=torch.int64)
    if objective == "reward":
        logps = model.score(torch.cat(last)).squeeze(1)
    else:
        logps = sequence_logps(torch.cat(hidden), model.lm_head.weight, labels, label_sequence, len(numbers), 2000)
    num_tokens, terms = count_tokens(label_sequence, len(numbers)), list(OBJECTIVES[objective])
    sums, correct, margins = sum_terms(
        objective.split()[0], terms, logps, num_tokens, REFERENCE[numbers], beta=BETA, margin=MARGIN
    )
    assert len(margins) == len(pairs)
    return sums, correct, torch.tensor([num_tokens[::2].sum() if term == "sft" else len(pairs) for term in terms])


def plain_loss(model, objective: str) -> tuple[torch.Tensor, int]:
    """Compute the loss, and how many pairs are ranked rightly, as the papers write it: all sequences padded, logits whole."""
    size = max(map(len, SEQUENCES))
    tokens = torch.stack([F.pad(sequence, (0, size - len(sequence))) for sequence in SEQUENCES])
    is_token = torch.stack([torch.arange(size) < len(sequence) for sequence in SEQUENCES])
    prompts = torch.tensor(PROMPTS).repeat_interleave(2)[:, None]
    is_trained = is_token & (torch.arange(size) >= prompts)
    states = model.model(tokens, attention_mask=is_token.long()).last_hidden_state
    p = torch.softmax(model.lm_head(states), -1)
    log_p = (p[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2).log() * is_trained[:, 1:]).sum(1)
    chosen, rejected = log_p[0::2], log_p[1::2]
    lengths = is_trained.sum(1)
    mean_chosen, mean_rejected = chosen / lengths[0::2], rejected / lengths[1::2]
    sft = -chosen.sum() / lengths[0::2].sum()
    if objective == "reward":
        scores = model.score(states[torch.arange(len(tokens)), is_token.sum(1) - 1]).squeeze(1)
        x, weights = scores[0::2] - scores[1::2], (1.0, 0.0)
    elif objective == "simpo":
        x, weights = BETA * mean_chosen - BETA * mean_rejected - MARGIN, (1.0, 0.0)
    elif objective == "orpo":
        odds = [mean.exp() / (1 - mean.exp()) for mean in (mean_chosen, mean_rejected)]
        x, weights = (odds[0] / odds[1]).log(), (0.5, 1.0)
    else:
        x = BETA * ((chosen - REFERENCE[0::2]) - (rejected - REFERENCE[1::2]))
        weights = (1.0, 0.2 if "sft" in objective else 0.0)
    loss = (1 + torch.exp(-x)).log().mean()  # -log sigmoid(x)
    return weights[0] * loss + weights[1] * sft, ((x + MARGIN if objective == "simpo" else x) > 0).sum().item()


def gradient(loss: torch.Tensor, model) -> torch.Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True, materialize_grads=True)
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_however_a_step_is_cut_it_is_the_plain_formula(llama, objective):
    true, num_correct = plain_loss(llama, objective)
    true_gradient = gradient(true, llama)
    weights = torch.tensor(list(OBJECTIVES[objective].values()), dtype=torch.float64)
    assert 0 < num_correct < len(LENGTHS)
    for cut in CUTS:
        sums, correct, counts = zip(*(our_sums(llama, objective, pairs) for pairs in cut), strict=True)
        num_targets = torch.stack(counts).sum(0)
        losses = [(weights * part / num_targets).sum() for part in sums]
        ours = sum(gradient(loss, llama) for loss in losses)
        assert sum(losses).item() == pytest.approx(true.item(), rel=1e-12)
        assert ((ours - true_gradient).norm() / true_gradient.norm()).item() < 1e-12
        for term, number in zip(OBJECTIVES[objective], torch.stack(correct).sum(0).tolist(), strict=True):
            assert number == (0 if term == "sft" else num_correct)


@pytest.mark.parametrize("objective", ["dpo and sft", "orpo"])
def test_means_of_micro_batches_are_another_loss_where_tokens_count(llama, objective):
    """Equal numbers of pairs do not help: the control shows that the test above can fail."""
    weights = torch.tensor(list(OBJECTIVES[objective].values()), dtype=torch.float64)
    parts = [our_sums(llama, objective, pairs) for pairs in (range(0, 2), range(2, 4), range(4, 6))]
    sums, _, counts = (torch.stack(column) for column in zip(*parts, strict=True))
    assert len(counts[:, 0].unique()) > 1 or len(counts[:, 1].unique()) > 1
    exact = gradient((weights * sums.sum(0) / counts.sum(0)).sum(), llama)
    means = gradient((weights * (sums / counts).mean(0)).sum(), llama)
    assert ((means - exact).norm() / exact.norm()).item() > 1e-3


@pytest.mark.parametrize("num_sequences", [0, 1])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_pairs_are_zeros_with_a_gradient_of_zeros(objective, num_sequences):
    """One sequence without trained tokens holds padding."""
    hidden = torch.zeros(0, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 16, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.int64)
    logps = sequence_logps(hidden, weight, nothing, nothing, num_sequences)
    num_tokens = count_tokens(nothing, num_sequences)
    sums, correct, margins = sum_terms(
        objective.split()[0],
        list(OBJECTIVES[objective]),
        logps,
        num_tokens,
        torch.zeros(num_sequences),
        beta=1.0,
        margin=1.0,
    )
    sums.sum().backward()
    assert sums.tolist() == correct.tolist() == [0] * len(OBJECTIVES[objective])
    assert len(margins) == 0
    assert hidden.grad.shape == (0, 16)
    assert not weight.grad.any()


def test_log_probabilities_near_zero_have_finite_odds():
    """A sequence that the model knows by heart: float32 sums to exactly 0."""
    logps = torch.tensor([0.0, -1e-6, -1e-9, -50.0, -3.0, 0.0], requires_grad=True)
    pairs = odds_ratio(logps, torch.tensor([3, 3, 5, 2, 0, 0]))
    pairs.loss.backward()
    assert pairs.loss.isfinite()
    assert logps.grad.isfinite().all()
    # log(odds) of log p = -50 / 2 is -25, since 1 - P is 1
    assert pairs.margins[1].item() == pytest.approx(
        25 - torch.tensor(torch.finfo(torch.float32).eps).log().item(), rel=1e-5
    )


def test_equals_are_not_ranked_rightly():
    logps, num_tokens = torch.tensor([-2.0, -2.0, -1.0, -3.0]), torch.tensor([2, 2, 1, 3])
    assert dpo(logps, logps, 0.1).num_correct == 0
    for pairs in (simpo(logps, num_tokens, 2.0, 0.5), odds_ratio(logps, num_tokens)):
        assert pairs.num_correct == 0, "means are all -1"
    assert reward(logps).num_correct == 1
    assert reward(logps).margins.tolist() == [0.0, 2.0]
    assert chosen_cross_entropy(logps) == 3.0


# ---------------------------------------------------------------------------------------------------------------------
# log-probabilities in chunks


def problem(dtype=torch.float64, rows: int = 37, classes: int = 31):
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, 16, dtype=dtype, requires_grad=True)
    sequence = torch.randint(5, (rows,)).sort().values  # number 5 has no trained tokens
    return hidden, weight, torch.randint(classes, (rows,)), sequence


def whole_logps(hidden, weight, labels, sequence) -> torch.Tensor:
    log_p = (hidden @ weight.T).log_softmax(-1, dtype=torch.promote_types(weight.dtype, torch.float32))
    rows = log_p.gather(1, labels[:, None]).squeeze(1)
    return rows.new_zeros(6).index_add(0, sequence, rows)


@pytest.mark.parametrize("max_logits", [10**6, 31 * 12, 31, 1])
def test_in_chunks_log_probabilities_and_gradients_are_the_same(max_logits):
    hidden, weight, labels, sequence = problem()
    factors = torch.tensor([0.3, -2.0, 0.0, 1e-3, 7.0, 5.0], dtype=torch.float64)
    ours, true = sequence_logps(hidden, weight, labels, sequence, 6, max_logits), whole_logps(*problem())
    assert torch.allclose(ours, true, rtol=1e-14)
    assert ours[5] == 0
    true = torch.autograd.grad(whole_logps(hidden, weight, labels, sequence), (hidden, weight), factors)
    for gradient, expected in zip(torch.autograd.grad(ours, (hidden, weight), factors), true, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-13)


def test_logits_are_never_whole(tmp_path):
    """512 rows of 1,000 classes in float64 would be 4 MB; a chunk of 20 rows is 160 KB, and the gradients are 200 KB."""
    hidden, weight, labels, sequence = problem(rows=512, classes=1000)
    assert peak(lambda: sequence_logps(hidden, weight, labels, sequence, 6, 20_000).sum().backward(), tmp_path) < 10**6


def test_the_gradient_is_that_of_the_function():
    hidden, weight, labels, sequence = problem(rows=9)
    assert torch.autograd.gradcheck(lambda h, w: sequence_logps(h, w, labels, sequence, 6, 70), (hidden, weight))


def test_frozen_weights_get_no_gradient():
    hidden, weight, labels, sequence = problem()
    (sequence_logps(hidden, weight.detach(), labels, sequence, 6) ** 2).sum().backward()
    (sequence_logps(hidden.detach(), weight, labels, sequence, 6) ** 2).sum().backward()
    ours = copy.copy([hidden.grad, weight.grad])
    true = torch.autograd.grad((whole_logps(hidden, weight, labels, sequence) ** 2).sum(), (hidden, weight))
    for gradient, expected in zip(ours, true, strict=True):
        assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("max_logits", [10**6, 500])
def test_chunks_under_autocast_are_as_near_as_the_whole(max_logits):
    hidden, weight, labels, sequence = problem(torch.float32, rows=64, classes=50)
    exact = torch.autograd.grad(whole_logps(hidden, weight, labels, sequence).sum(), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        usual = torch.autograd.grad(whole_logps(hidden, weight, labels, sequence).sum(), (hidden, weight))
        logps = sequence_logps(hidden, weight, labels, sequence, 6, max_logits)
    ours = torch.autograd.grad(logps.sum(), (hidden, weight))
    assert logps.dtype == ours[0].dtype == ours[1].dtype == torch.float32
    for name in (0, 1):
        miss = (ours[name] - exact[name]).norm() / exact[name].norm()
        assert 0 < miss < 2 * (usual[name] - exact[name]).norm() / exact[name].norm()


def test_weights_kept_in_half_precision():
    hidden, weight, labels, sequence = problem(torch.bfloat16)
    logps = sequence_logps(hidden, weight, labels, sequence, 6, 500)
    logps.sum().backward()
    assert logps.dtype == torch.float32
    assert weight.grad.dtype == hidden.grad.dtype == torch.bfloat16


def test_long_sequences_are_summed_without_loss():
    """30,000 tokens in float32, one after the other, would be off by 1e-5 of the sum."""
    hidden, weight = torch.randn(30_000, 4, generator=torch.Generator().manual_seed(0)), torch.eye(5, 4)
    labels, sequence = torch.arange(30_000) % 5, torch.zeros(30_000, dtype=torch.int64)
    true = whole_logps(hidden.double(), weight.double(), labels, sequence)[0].item()
    assert sequence_logps(hidden, weight, labels, sequence, 1).item() == pytest.approx(true, rel=2e-7)
