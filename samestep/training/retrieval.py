"""Score embeddings by retrieval: whether a query finds its own text among all texts."""

import torch

BLOCK = 256
"""Queries whose similarities are in memory at a time."""


@torch.no_grad()
def score(queries: torch.Tensor, texts: torch.Tensor, keys: torch.Tensor) -> dict[str, float]:
    """Compute recall@1, recall@10 and nDCG@10 of queries, each with one text that belongs to it.

    A text that several samples have is one text. The rank of a query's own text is 1 + the number of other texts that are as
    near or nearer; with one relevant text nDCG@10 is the mean of 1 / log2(1 + rank), and 0 from rank 11 on.

    Args:
        queries: floating [n, d].
        texts: floating [n, m, d], each sample's own text first.
        keys: int64 [n, m], equal for equal texts, negative where there is none.

    >>> rows = torch.eye(3)
    >>> score(rows, rows[[0, 2, 1], None], torch.tensor([[5], [6], [7]]))
    {'recall_at_1': 0.3333333333333333, 'recall_at_10': 1.0, 'ndcg_at_10': 0.6666666666666666}
    """
    flat, vectors = keys.flatten(), texts.flatten(0, 1)
    is_there = (flat >= 0).nonzero().squeeze(1)
    known, number = flat[is_there].unique(return_inverse=True)
    # [texts that differ]: a sample that has it
    first = torch.full((len(known),), len(flat), device=flat.device).scatter_reduce(0, number, is_there, "amin")
    documents, own = vectors[first], torch.searchsorted(known, keys[:, 0].contiguous())
    ranks = []
    for start in range(0, len(queries), BLOCK):
        rows = slice(start, start + BLOCK)
        similarities = queries[rows] @ documents.T
        others = similarities >= similarities.gather(1, own[rows, None])
        ranks.append(others.sum(1).clamp(min=1))  # its own text is among them
    rank = torch.cat(ranks).double()
    gains = torch.where(rank <= 10, 1 / (1 + rank).log2(), 0.0)
    return {
        "recall_at_1": (rank == 1).double().mean().item(),
        "recall_at_10": (rank <= 10).double().mean().item(),
        "ndcg_at_10": gains.mean().item(),
    }
