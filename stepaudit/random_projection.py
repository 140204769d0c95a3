"""Random projections of gradients: linear, so that sums and differences survive, and so do, nearly, norms and angles."""

from collections.abc import Iterable

import torch

WHOLE = 4096  # tensors of at most so many numbers are kept as they are
GROUPS, COLUMNS = 8, 512

Signs = dict[tuple, torch.Tensor]


def project(tensor: torch.Tensor, known: Signs) -> torch.Tensor:
    """A random projection of a tensor, where it lies.

    A tensor of n <= 4096 numbers is kept whole. A larger one is laid out as 8 matrices G_i of 512 columns, and of each s_i G_i
    is kept, s_i a row of random signs that depends on n only: E |s_i G_i|^2 = |G_i|^2 (Johnson and Lindenstrauss 1984; with
    signs Achlioptas 2003, doi 10.1016/S0022-0000(03)00025-4). What does not fill a row of each is added as it is. The length's
    standard error is |G| / 4 where all rows are alike, and |G| / 90 where they have nothing in common. As fast as a norm.

    Args:
        tensor: any shape and dtype.
        known: signs that earlier calls drew; new ones are added.

    Returns:
        [size(n)], float64 of float64, float32 of all else.
    """
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    if flat.numel() <= WHOLE:
        return flat
    num_rows = flat.numel() // (GROUPS * COLUMNS)
    num_even = GROUPS * num_rows * COLUMNS
    signs = _signs(num_rows, flat.device, flat.dtype, known)
    projected = torch.bmm(signs, flat[:num_even].view(GROUPS, num_rows, COLUMNS)).flatten()
    projected[: flat.numel() - num_even] += flat[num_even:]
    return projected


def size(num_numbers: int) -> int:
    """How many numbers stand for a tensor of `num_numbers`."""
    return min(num_numbers, WHOLE)


def sketch(tensors: Iterable[torch.Tensor | None], like: list[torch.Tensor]) -> torch.Tensor:
    """The projection of each tensor, one after the other.

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
        else:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            parts.append(project(whole, _known).double().cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


_known: Signs = {}


def _signs(num: int, device: torch.device, dtype: torch.dtype, known: Signs) -> torch.Tensor:
    """[GROUPS, 1, num] of plus and minus 1."""
    key = num, device, dtype
    if key not in known:
        generator = torch.Generator().manual_seed(num)
        signs = torch.randint(2, (GROUPS, 1, num), generator=generator, dtype=torch.int8) * 2 - 1
        known[key] = signs.to(device, dtype)
    return known[key]
