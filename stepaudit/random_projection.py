"""Projects gradients at random to few numbers: linearly, so that sums and differences survive, and norms and angles nearly."""

import os
from collections.abc import Iterable

import torch

from stepaudit.mesh import VARIABLE

EXACT_SIZE = 4096  # largest number of elements of a tensor that is not projected
WHOLE_SIZE = 2**20  # the same, where parts of tensors are put together (`together.py`)
GROUPS, COLUMNS = 8, 512

Signs = dict[tuple, torch.Tensor]


def project(tensor: torch.Tensor, signs_cache: Signs) -> torch.Tensor:
    """Project a tensor at random, on its device.

    A tensor of n <= 4096 numbers is returned whole. A larger one is laid out as 8 matrices G_i of 512 columns, each of which is
    replaced by s_i G_i, s_i a row of random signs that depends on n only: E |s_i G_i|^2 = |G_i|^2 (Johnson and Lindenstrauss
    1984; with signs Achlioptas 2003, doi 10.1016/S0022-0000(03)00025-4). The numbers at the end that do not fill a row of each
    matrix are added as they are. The length's standard error is |G| / 4 where all rows are alike, and |G| / 90 where they have
    nothing in common. A projection is as fast as a norm.

    Args:
        tensor: any shape, dtype and layout. A complex number counts as two, a sparse tensor as the dense one.
        signs_cache: signs that earlier calls drew; new ones are added.

    Returns:
        [size(tensor)], float64 of float64 and complex128, float32 of all else.
    """
    flat = _to_numbers(tensor)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    if flat.numel() <= get_exact_size():
        return flat
    num_rows = flat.numel() // (GROUPS * COLUMNS)
    num_even = GROUPS * num_rows * COLUMNS
    # signs [8, 1, rows] times the even part [8, rows, 512] is [8, 1, 512]: 4096 numbers, to which the rest is added.
    signs = _draw_signs(num_rows, flat.device, flat.dtype, signs_cache)
    projected = torch.bmm(signs, flat[:num_even].view(GROUPS, num_rows, COLUMNS)).flatten()
    projected[: flat.numel() - num_even] += flat[num_even:]
    return projected


def _to_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real numbers of a tensor [any], dense."""
    tensor = tensor.detach()
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)


def size(tensor: torch.Tensor) -> int:
    """Return the size of the projection of a tensor."""
    number = tensor.numel() * (2 if tensor.is_complex() else 1)
    return number if number <= get_exact_size() else EXACT_SIZE


def get_exact_size() -> int:
    """Return the largest number of elements that are not projected: of a program that is given a mesh, more."""
    return WHOLE_SIZE if VARIABLE in os.environ else EXACT_SIZE


def sketch(tensors: Iterable[torch.Tensor | None], parameters: list[torch.Tensor]) -> torch.Tensor:
    """Project each tensor, and join the projections.

    Args:
        tensors: any shapes and dtypes, None for zeros; each is freed before the next one is made.
        parameters: tensors of the same shapes, which give the sizes of those that are None.

    Returns:
        float64 [sum of the projections' sizes] on the host.
    """
    parts = []
    for tensor, parameter in zip(tensors, parameters, strict=True):
        if tensor is None:
            parts.append(torch.zeros(size(parameter), dtype=torch.float64))
        else:
            full_tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            parts.append(project(full_tensor, _SIGNS_CACHE).double().cpu())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


_SIGNS_CACHE: Signs = {}


def _draw_signs(num_rows: int, device: torch.device, dtype: torch.dtype, signs_cache: Signs) -> torch.Tensor:
    """Draw signs, plus and minus 1, [GROUPS, 1, num_rows], from a seed that is the number of rows."""
    key = num_rows, device, dtype
    if key not in signs_cache:
        generator = torch.Generator().manual_seed(num_rows)
        signs = torch.randint(2, (GROUPS, 1, num_rows), generator=generator, dtype=torch.int8) * 2 - 1
        signs_cache[key] = signs.to(device, dtype)
    return signs_cache[key]
