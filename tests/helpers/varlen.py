"""The kernel of attention for samples of any length, which only GPUs have, computed on a CPU."""

from itertools import pairwise

import torch


def reference_varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, *, scale, window_size):
    """Compute what torch's kernel of that name computes; windows are of as many queries as keys."""
    parts = []
    for (start_q, stop_q), (start_k, stop_k) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        assert 0 < stop_q - start_q <= longest_q
        assert 0 < stop_k - start_k <= longest_k
        scores = torch.einsum("qhd,khd->hqk", q[start_q:stop_q], k[start_k:stop_k]) * scale
        if window_size != (-1, -1):
            before, after = window_size
            place = torch.arange(scores.shape[1])
            distance = place - place[:, None]
            scores = scores.masked_fill((distance < -before) | (distance > after), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[start_k:stop_k]))
    return torch.cat(parts)
