"""Few numbers that stand for many: linear, so that differences, ratios and angles of gradients can be read from them."""

from collections.abc import Iterable

import torch

WHOLE = 4096  # parameters of at most so many numbers are kept as they are


def sketch(tensors: Iterable[torch.Tensor | None], like: list[torch.Tensor]) -> torch.Tensor:
    """A random projection of each tensor, one after the other.

    A tensor of n <= 4096 numbers is kept whole. A larger one is laid out as a matrix G of 4,096 columns, and s G is kept, a row
    of random signs s that depend on n only: E |s G|^2 = |G|^2 (Johnson and Lindenstrauss 1984; with signs Achlioptas 2003,
    doi 10.1016/S0022-0000(03)00025-4). One pass over the memory, as fast as a norm.

    Args:
        tensors: any shapes and dtypes, None for zeros; each is forgotten before the next is asked for.
        like: tensors of the same shapes, for those that are None.

    Returns:
        float64 [numbers] on the host.
    """
    parts = []
    for tensor, shape in zip(tensors, like, strict=True):
        if tensor is None:
            parts.append(torch.zeros(size(shape.numel()), dtype=torch.float64))
            continue
        tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        flat = tensor.detach().reshape(-1)
        flat = flat if flat.dtype == torch.float64 else flat.float()
        if flat.numel() > WHOLE:
            num_rows = flat.numel() // WHOLE
            signs = _signs(num_rows + 1, flat.device, flat.dtype)
            body, rest = flat[: num_rows * WHOLE].view(num_rows, WHOLE), flat[num_rows * WHOLE :]
            flat = signs[:-1] @ body
            flat[: rest.numel()] += signs[-1] * rest
        parts.append(flat.double().cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def size(num_numbers: int) -> int:
    """How many numbers stand for a tensor of `num_numbers`."""
    return min(num_numbers, WHOLE)


_cache: dict[tuple, torch.Tensor] = {}


def _signs(num: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    key = num, device, dtype
    if key not in _cache:
        generator = torch.Generator().manual_seed(num)
        _cache[key] = (torch.randint(2, (num,), generator=generator, dtype=torch.int8) * 2 - 1).to(device, dtype)
    return _cache[key]
