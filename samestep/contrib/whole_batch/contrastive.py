"""Contrastive losses of the rows of a whole step, for `WholeBatch`. All are means over its B samples.

Rows have length 1 (`torch.nn.functional.normalize`). Similarities are computed for a block of rows at a time, and their
gradients with them, so that memory holds few of the B x B of them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

NUM_SIMILARITIES, LEAST_ROWS = 2**19, 16
"""Similarities that a block has at most, so that memory does not grow with B; and the rows that it has at least."""
Scale: TypeAlias = float | torch.Tensor


def info_nce(
    queries: torch.Tensor,
    documents: torch.Tensor,
    negatives: torch.Tensor | None = None,
    *,
    scale: Scale = 20.0,
    is_symmetric: bool = False,
    is_false_negative: Callable[[slice], torch.Tensor] | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """Compute InfoNCE, the cross-entropy of each query's own document among those of all samples.

    L = -1/B sum_i log( exp(s q_i d_i) / (sum_j exp(s q_i d_j) + sum_j,m exp(s q_i h_jm)) )  (van den Oord et al., 2018,
    arXiv:1807.03748), what sentence-transformers calls MultipleNegativesRankingLoss. With `is_symmetric` the mean of that and
    of the documents' cross-entropy among the queries, as CLIP has it.

    Args:
        queries, documents: [B, d].
        negatives: [B, m, d], hard ones of each query, which are negatives of all queries.
        scale: s, one over the temperature; a number, or a scalar tensor that is learned.
        is_false_negative: rows -> bool [rows, B + B m], the candidates that do not count as negatives of these queries.
        block: rows at a time; None: as many as have `NUM_SIMILARITIES`.

    Returns:
        scalar.

    >>> rows = F.normalize(torch.eye(3) + 0.1)
    >>> round(info_nce(rows, rows, scale=1.0).item(), 4) == round(F.cross_entropy(rows @ rows.T, torch.arange(3)).item(), 4)
    True
    """
    candidates = documents if negatives is None else torch.cat([documents, negatives.flatten(0, 1)])

    def sum_rows(
        part: torch.Tensor, others: torch.Tensor, factor: Scale, rows: slice, masks: bool = False
    ) -> torch.Tensor:
        scores = part @ others.T * factor
        own = torch.arange(rows.start, rows.stop, device=scores.device)
        if masks and is_false_negative is not None:
            is_left_out = is_false_negative(rows).clone()
            is_left_out[torch.arange(len(own)), own] = False
            scores = scores.masked_fill(is_left_out, -torch.inf)
        return F.cross_entropy(scores, own, reduction="sum")

    losses = [sum_blocks(functools.partial(sum_rows, masks=True), queries, candidates, scale, block=block)]
    if is_symmetric:
        losses.append(sum_blocks(sum_rows, documents, queries, scale, block=block))
    return sum(losses, torch.zeros_like(losses[0])) / (len(losses) * len(queries))


def siglip(
    queries: torch.Tensor,
    documents: torch.Tensor,
    *,
    scale: Scale = 10.0,
    bias: Scale = -10.0,
    block: int | None = None,
) -> torch.Tensor:
    """Compute SigLIP's loss, which asks of each pair alone whether it belongs together (Zhai et al., 2023, arXiv:2303.15343).

    L = -1/B sum_ij log sigmoid(z_ij (s q_i d_j + b)), z_ij = 1 for i = j, else -1.

    Args:
        queries, documents: [B, d].
        scale, bias: s and b, numbers or scalar tensors that are learned.

    Returns:
        scalar.
    """

    def sum_rows(part: torch.Tensor, others: torch.Tensor, factor: Scale, shift: Scale, rows: slice) -> torch.Tensor:
        signs = -torch.ones(len(part), len(others), dtype=part.dtype, device=part.device)
        signs[torch.arange(len(part)), torch.arange(rows.start, rows.stop)] = 1
        return -F.logsigmoid(signs * (part @ others.T * factor + shift)).sum()

    return sum_blocks(sum_rows, queries, documents, scale, bias, block=block) / len(queries)


def gist(
    queries: torch.Tensor,
    documents: torch.Tensor,
    guide_queries: torch.Tensor,
    guide_documents: torch.Tensor,
    *,
    scale: Scale = 100.0,
    margin: float = 0.0,
    block: int | None = None,
) -> torch.Tensor:
    """Compute InfoNCE without the documents that a guide finds nearer to a query than its own: false negatives, mostly.

    Solatorio, 2024, arXiv:2402.16829; the candidates are the documents.

    Args:
        queries, documents: [B, d].
        guide_queries, guide_documents: [B, g], rows of the guide for the same samples.
        margin: subtracted from the guide's similarity of a query and its own document.

    Returns:
        scalar.
    """
    own = (guide_queries * guide_documents).sum(1)

    def is_false_negative(rows: slice) -> torch.Tensor:
        return guide_queries[rows] @ guide_documents.T > own[rows, None] - margin

    return info_nce(queries, documents, scale=scale, is_false_negative=is_false_negative, block=block)


def matryoshka(
    loss: Callable[..., torch.Tensor], sizes: Sequence[int], weights: Sequence[float] | None = None
) -> Callable[..., torch.Tensor]:
    """Make the loss of the first numbers of each row, sum_k w_k loss(rows[:, :size_k]), of length 1 again.

    Kusupati et al., 2022, arXiv:2205.13147.

    Args:
        loss: rows, as many tensors -> scalar.
        sizes: numbers of a row that are taken.
        weights: w_k; default 1 for each.
    """
    weights = [1.0] * len(sizes) if weights is None else weights

    def sum_sizes(*rows: torch.Tensor) -> torch.Tensor:
        losses = [
            weight * loss(*(F.normalize(each[..., :size], dim=-1) for each in rows))
            for size, weight in zip(sizes, weights, strict=True)
        ]
        return torch.stack(losses).sum()

    return sum_sizes


def sum_blocks(
    sum_rows: Callable[..., torch.Tensor],
    queries: torch.Tensor,
    candidates: torch.Tensor,
    *numbers: Scale,
    block: int | None = None,
) -> torch.Tensor:
    """Add up a loss over blocks of rows.

    Args:
        sum_rows: (queries [rows, d], candidates [B, d], numbers ..., slice of the rows) -> scalar.
        queries, candidates: [B, d].
        numbers: further arguments, which may be learned.
        block: rows at a time; None: as many as have `NUM_SIMILARITIES`.

    Returns:
        scalar.
    """
    block = block or max(LEAST_ROWS, NUM_SIMILARITIES // len(candidates))
    inputs: list[Any] = [queries, candidates, *numbers]
    if not torch.is_grad_enabled():
        inputs = [value.detach() if isinstance(value, torch.Tensor) else value for value in inputs]
    return _Blocks.apply(sum_rows, list(_cut(len(queries), block)), *inputs)


class _Blocks(torch.autograd.Function):
    """Computes the gradients of a block beside its sum: nothing of it is kept, and nothing computed again.

    Of blocks that wait for their backward (as under checkpointing) the small parts that are kept come to lie between the large
    ones that are freed, so that the heap grows with their number: by 190 MB for B = 4,096.
    """

    @staticmethod
    def forward(ctx: Any, sum_rows: Callable[..., torch.Tensor], blocks: list[slice], *inputs: Any) -> torch.Tensor:
        queries, *others = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
        needs = ctx.needs_input_grad[2:]
        slopes = [torch.zeros_like(x) for x, is_needed in zip(inputs, needs, strict=True) if is_needed]
        for value, is_needed in zip(others, needs[1:], strict=True):
            if is_needed:
                value.requires_grad_()
        total = queries.new_zeros(())
        for rows in blocks:
            with torch.enable_grad():
                part = queries[rows].requires_grad_(needs[0])
                loss = sum_rows(part, *others, rows)
            total += loss.detach()
            wanted = [x for x, is_needed in zip((part, *others), needs, strict=True) if is_needed]
            found = torch.autograd.grad(loss, wanted) if wanted else ()
            for number, gradient in enumerate(found):
                (slopes[number][rows] if needs[0] and number == 0 else slopes[number]).add_(gradient)
        ctx.save_for_backward(*slopes)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        slopes = iter(ctx.saved_tensors)
        return (*(gradients[0] * next(slopes) if is_needed else None for is_needed in ctx.needs_input_grad),)


def _cut(size: int, block: int) -> Iterator[slice]:
    for first in range(0, size, block):
        yield slice(first, min(first + block, size))
