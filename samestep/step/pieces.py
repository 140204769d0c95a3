"""Large tensors in pieces that are computed one after the other."""

import torch

PIECES = {"cpu": 2**17}  # numbers computed at once, so that a CPU's cache holds them
PIECE = 2**25  # the same elsewhere, so that temporaries stay small


def count_at_once(device: torch.device) -> int:
    """Count the numbers of a tensor that are computed at once on a device."""
    return PIECES.get(device.type, PIECE)


def split_memory(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a small tensor as it is; split a large one, which fills its memory, into flat pieces in memory order."""
    size = count_at_once(tensor.device)
    return (tensor,) if tensor.numel() <= size else tensor.as_strided((tensor.numel(),), (1,)).split(size)
