"""Projects gradients at random to few numbers: linearly, so that sums and differences survive, and norms and angles nearly.

`stepaudit.random_projection` is the same: neither package imports the other.
"""

import torch

EXACT_SIZE = 4096  # largest number of elements of a tensor that is not projected
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
        tensor: any shape and dtype.
        signs_cache: signs that earlier calls drew; new ones are added.

    Returns:
        [size(n)], float64 of float64, float32 of all else.
    """
    flat = tensor.detach().reshape(-1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    if flat.numel() <= EXACT_SIZE:
        return flat
    num_rows = flat.numel() // (GROUPS * COLUMNS)
    num_even = GROUPS * num_rows * COLUMNS
    # signs [8, 1, rows] times the even part [8, rows, 512] is [8, 1, 512]: 4096 numbers, to which the rest is added.
    signs = _draw_signs(num_rows, flat.device, flat.dtype, signs_cache)
    projected = torch.bmm(signs, flat[:num_even].view(GROUPS, num_rows, COLUMNS)).flatten()
    projected[: flat.numel() - num_even] += flat[num_even:]
    return projected


def _draw_signs(num_rows: int, device: torch.device, dtype: torch.dtype, signs_cache: Signs) -> torch.Tensor:
    """Draw signs, plus and minus 1, [GROUPS, 1, num_rows], from a seed that is the number of rows."""
    key = num_rows, device, dtype
    if key not in signs_cache:
        generator = torch.Generator().manual_seed(num_rows)
        signs = torch.randint(2, (GROUPS, 1, num_rows), generator=generator, dtype=torch.int8) * 2 - 1
        signs_cache[key] = signs.to(device, dtype)
    return signs_cache[key]
