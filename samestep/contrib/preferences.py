"""Compute objectives of preference pairs as sums over the pairs and tokens of a micro-batch.

A pair i of the global batch S has a chosen and a rejected sequence. An objective is a margin x_i between the two and, for some,
a second term, over the tokens y of the chosen sequences that are trained. Each term has a denominator of its own:

    L = w_1 (sum_{i in S} -log sigmoid(x_i)) / |S|  +  w_2 (sum_{i in S} sum_y -log p(y)) / (number of all these tokens y in S)

Both are counted over the whole step (see `losses`): micro-batches differ in their tokens and, at the end of an epoch or where
they are cut by tokens, in their pairs, so means of micro-batches must not be averaged.

Sequences are given by their log-probabilities, summed over trained tokens: floating [sequences], pairs one after the other,
the chosen sequence first. A last sequence without a partner holds padding and is left out. The trained tokens of each sequence,
`num_tokens`, are int64 [sequences].
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from samestep.step.log_probabilities import split_pairs


class PairLoss(NamedTuple):
    """The loss of a micro-batch's pairs.

    Attributes:
        loss: sum over the pairs, scalar of the log-probabilities' dtype; 0, with a gradient of zeros, of no pairs.
        num_correct: pairs whose chosen sequence is ranked above the rejected one, int64 scalar; equals are not.
        margins: how far above, [pairs]; without a gradient.
    """

    loss: torch.Tensor
    num_correct: torch.Tensor
    margins: torch.Tensor


def dpo(logps: torch.Tensor, reference: torch.Tensor, beta: float) -> PairLoss:
    """Sum the loss of direct preference optimization (Rafailov et al. 2023, 2305.18290, equation 7).

        x = beta ((log p_chosen - log p_ref_chosen) - (log p_rejected - log p_ref_rejected))

    Sequences count by their sums, not by their means. The margin is x, a difference of implicit rewards; `reference` are the
    log-probabilities under the reference model, and beta is the strength of the tie to it.
    """
    (chosen, rejected), (ref_chosen, ref_rejected) = split_pairs(logps), split_pairs(reference.to(logps.dtype))
    margins = beta * ((chosen - ref_chosen) - (rejected - ref_rejected))
    return _sum_pairs(margins, margins)


def simpo(logps: torch.Tensor, num_tokens: torch.Tensor, beta: float, margin: float) -> PairLoss:
    """Sum the loss of simple preference optimization, without a reference model (Meng et al. 2024, 2405.14734, equation 6).

        x = beta (mean log p_chosen - mean log p_rejected) - gamma

    The margin is x + gamma, a difference of rewards; gamma, the argument `margin`, is the difference that is aimed at.
    """
    chosen, rejected = split_pairs(_mean(logps, num_tokens))
    margins = beta * (chosen - rejected)
    return _sum_pairs(margins - margin, margins)


def odds_ratio(logps: torch.Tensor, num_tokens: torch.Tensor) -> PairLoss:
    """Sum the loss of the odds ratio, ORPO's second term (Hong et al. 2024, 2403.07691, equations 4 to 7).

        x = log(odds_chosen / odds_rejected),   odds = P / (1 - P),   P = exp(mean log p)

    ORPO's first term is `chosen_cross_entropy`. The margin is x. A mean log p nearer to 0 than the dtype's epsilon, where 1 - P
    is no longer known, counts as that.
    """
    means = _mean(logps, num_tokens).clamp(max=-torch.finfo(logps.dtype).eps)
    chosen, rejected = split_pairs(means - torch.log(-torch.expm1(means)))
    margins = chosen - rejected
    return _sum_pairs(margins, margins)


def reward(scores: torch.Tensor) -> PairLoss:
    """Sum the loss of a reward model, x = r_chosen - r_rejected (Bradley and Terry 1952; Ouyang et al. 2022, 2203.02155,
    equation 1). The margin is x; scores are r, floating [sequences].
    """
    chosen, rejected = split_pairs(scores)
    return _sum_pairs(chosen - rejected, chosen - rejected)


def chosen_cross_entropy(logps: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy of the chosen sequences: the term named sft, whose denominator is their trained tokens.

    With `dpo` it is as in Llama 3 (Dubey et al. 2024, 2407.21783, section 4.1.4). Iterative RPO (Pang et al. 2024, 2404.19733,
    equation 1) divides each sequence's by the sequence's own length instead; here all tokens count the same.
    """
    return -split_pairs(logps)[0].sum()


def sum_terms(
    objective: str,
    terms: Sequence[str],
    logps: torch.Tensor,
    num_tokens: torch.Tensor,
    reference: torch.Tensor | None = None,
    *,
    beta: float | None = None,
    margin: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum the loss terms of an objective over the pairs of a micro-batch.

    Args:
        objective: dpo, orpo, simpo or reward.
        terms: names of the terms, in the order of the recipe's `loss_weights`: `sft` is `chosen_cross_entropy`, any other
            name the loss of the pairs.
        logps: floating [sequences]; of a reward model its scores.
        num_tokens: trained tokens of each sequence, int64 [sequences].
        reference, beta, margin: see the objective; None where it has none.

    Returns:
        sums, floating [terms]; int64 [terms] that holds the pairs that are ranked rightly, and 0 for `sft`; margins [pairs].
    """
    pairs = {
        "dpo": lambda: dpo(logps, reference, beta),
        "orpo": lambda: odds_ratio(logps, num_tokens),
        "simpo": lambda: simpo(logps, num_tokens, beta, margin),
        "reward": lambda: reward(logps),
    }[objective]()
    sums = [chosen_cross_entropy(logps) if term == "sft" else pairs.loss for term in terms]
    correct = [torch.zeros_like(pairs.num_correct) if term == "sft" else pairs.num_correct for term in terms]
    return torch.stack(sums), torch.stack(correct), pairs.margins


def _mean(logps: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """Compute the mean log-probability of each sequence's trained tokens, [sequences]; 0 of none."""
    return logps / num_tokens.clamp(min=1)


def _sum_pairs(x: torch.Tensor, margins: torch.Tensor) -> PairLoss:
    """Sum -log sigmoid(x) over the pairs, [pairs]."""
    margins = margins.detach()
    return PairLoss(-F.logsigmoid(x).sum(), (margins > 0).sum(), margins)
