"""Losses of sums over a whole step, for `WholeBatch(..., is_sum=True)`: balance of experts, Dice."""

import torch
import torch.nn.functional as F


def sum_routing(
    router_logits: tuple[torch.Tensor, ...], num_chosen: int, is_counted: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up over the tokens of a micro-batch what the balance of experts needs to know.

    Args:
        router_logits: of each layer, [tokens, E].
        num_chosen: experts of a token, those with the largest logits.
        is_counted: bool [tokens], or of any shape with as many: tokens that are no padding; None: all.

    Returns:
        choices [layers, num_chosen, E], how many tokens chose an expert first, second, ...; probabilities [layers, E], sums;
        the number of tokens.
    """
    choices, probabilities = [], []
    for logits in router_logits:
        shares = F.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        chosen = F.one_hot(shares.topk(num_chosen, dim=-1).indices, shares.shape[-1])
        if is_counted is not None:
            is_row = is_counted.reshape(-1, 1).to(shares.device)
            shares, chosen = shares * is_row, chosen * is_row[..., None]
        choices.append(chosen.sum(0))
        probabilities.append(shares.sum(0))
    device = probabilities[0].device
    num_tokens = router_logits[0].shape[0] if is_counted is None else is_counted.sum()
    return torch.stack(choices), torch.stack(probabilities), torch.as_tensor(num_tokens, device=device)


def expert_balance(
    choices: torch.Tensor, probabilities: torch.Tensor, num_tokens: torch.Tensor, *, is_by_layer: bool = False
) -> torch.Tensor:
    """Compute the balance loss of experts over a whole step: E sum_i f_i P_i.

    f_i is the share of tokens that chose expert i, P_i the mean of its probability (Fedus et al., 2022, arXiv:2101.03961,
    equations 4 to 6). transformers' heads take the tokens of all layers together, and add up over the choices of a token.

    Args:
        choices, probabilities, num_tokens: sums over the step, of `sum_routing`.
        is_by_layer: the mean of each layer's loss, in place of all layers together.

    Returns:
        scalar: num_chosen where all experts are used alike.
    """
    num_layers, num_experts = probabilities.shape
    f, p = choices.sum(1).to(probabilities) / num_tokens, probabilities / num_tokens
    if is_by_layer:
        return num_experts * (f * p).sum() / num_layers
    return num_experts * (f.mean(0) * p.mean(0)).sum()


def sum_overlap(logits: torch.Tensor, labels: torch.Tensor, ignored: int = -100) -> tuple[torch.Tensor, torch.Tensor]:
    """Add up over the pixels of a micro-batch what Dice needs to know: [classes] each, sum p y and sum p + sum y.

    Args:
        logits: [samples, classes, ...].
        labels: int64 [samples, ...]; `ignored` where a pixel does not count.
    """
    is_counted = (labels != ignored)[:, None]
    shares = logits.softmax(1) * is_counted
    truth = F.one_hot(labels.clamp(min=0), logits.shape[1]).movedim(-1, 1) * is_counted
    axes = [0, *range(2, logits.ndim)]
    return (shares * truth).sum(axes), (shares + truth).sum(axes)


def dice(overlaps: torch.Tensor, sizes: torch.Tensor, *, smoothing: float = 1.0) -> torch.Tensor:
    """Compute the Dice loss of a whole step: 1 - mean over classes of (2 sum p y + e) / (sum p + sum y + e).

    Milletari et al., 2016, arXiv:1606.04797, over all samples of the step, not of each.

    Args:
        overlaps, sizes: [classes], sums over the step, of `sum_overlap`.
        smoothing: e.

    Returns:
        scalar, from 0 to 1.
    """
    return 1 - ((2 * overlaps + smoothing) / (sizes + smoothing)).mean()
