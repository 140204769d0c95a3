"""Draw dropout by sample: which numbers are dropped is a pure function of the seed, the epoch, the sample and the place in it.

Torch draws dropout from a generator, so that the noise of a sample depends on what was drawn before: on the micro-batch, the
padding, the process. Here an integer hash of (seed, epoch, sample id, module, place in the sample, feature) says whether a
number is kept. So the noise is the same for every cut of a step, after a restart, and when activations are recomputed. Nothing
is kept for the backward: it hashes again.

The hash works in three levels, so that a number costs eleven operations on half a 32-bit integer:

- 64 bits of (seed, epoch, sample id), on the host, by splitmix64 (Steele, Lea, Flood 2014).
- 64 bits of a row, a sample's place, by the same function: the key of all features of a token, or of a query's probabilities.
- 32 bits of a row's pair of features: the row's key and the pair's own are joined in two rounds of multiply and shift (the
  constants are lowbias32's, Wellons 2018). Each 16 of them are one draw: a number is kept if they are below a threshold.

A probability p is rounded to a multiple of 2^-16; kept numbers are divided by exactly the share that is kept, so that the
expectation is exact.
"""

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn

from samestep.errors import UsageError

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ROUND_1, ROUND_2 = 0x7FEB352D, 0x846CA68B
CHUNK = 2**17
"""Hashes at once on a CPU, 512 KiB: they stay in its cache. A GPU's are computed by one kernel, and stored nowhere."""


def signed(value: int, bits: int) -> int:
    """Return the signed integer of the same bits, as torch's integers are.

    >>> signed(0xFF, 8), signed(0x7F, 8)
    (-1, 127)
    """
    return value - (1 << bits) if value >> (bits - 1) else value


def mix(x: torch.Tensor) -> torch.Tensor:
    """Scramble integers, int64 of any shape: splitmix64's step and output function, one-to-one.

    >>> mix(torch.tensor([0])).item() & (2**64 - 1) == 0xE220A8397B1DCDAF  # the first output of splitmix64 from 0
    True
    """
    x = x + signed(GOLDEN, 64)
    x = (x ^ _shift(x, 30)) * signed(MIX_1, 64)
    x = (x ^ _shift(x, 27)) * signed(MIX_2, 64)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right and fill with zeros: torch's shift fills with the sign."""
    return (x >> places) & ((1 << (64 - places)) - 1)


class Noise:
    """Holds the keys of the samples that a model computes now, and the keys of the rows of its tensors.

    Deep copies of a model share its noise: they drop the same numbers. A pickled one is told its samples anew.

    Args:
        seed: any integer.

    Attributes:
        samples: int64 [S], a key per sample; None before the first `set_samples`: then a sample's number is its place in the
            micro-batch, as rehearsals need.
        left: name (class) of each module of the model that draws torch's own noise.
    """

    def __init__(self, seed: int):
        self.seed = int(np.random.SeedSequence(seed % 2**64).generate_state(1, np.uint64)[0] >> 1)
        self.samples: torch.Tensor | None = None
        self.rows: dict[tuple[int, ...], torch.Tensor] = {}
        self.left: list[str] = []

    def __deepcopy__(self, memo: dict) -> "Noise":
        return self

    def __getstate__(self) -> dict:
        return vars(self) | {"samples": None, "rows": {}}

    @property
    def notes(self) -> list[str]:
        """Lines for the log: one that names the modules that draw torch's own noise, none if there are none."""
        if not self.left:
            return []
        return [
            f"dropout of {', '.join(self.left)}: draws torch's own noise, per process and micro-batch, so that another "
            "layout's losses differ by it; only nn.Dropout is drawn by sample"
        ]

    def set_samples(self, samples: Sequence[tuple[int, int]], device: torch.device | None = None) -> None:
        """Say which samples the micro-batch holds that is computed next, with its recomputation and its backward.

        Args:
            samples: (epoch, sample id) of each, in the micro-batch's order; none of them twice in a training.
            device: of the keys.
        """
        self.samples, self.rows = self._make_keys(samples, device), {}

    def _make_keys(self, samples: Sequence[tuple[int, int]], device: torch.device | None) -> torch.Tensor:
        numbers = torch.tensor(samples, dtype=torch.int64).reshape(-1, 2)
        # [S]: each number is joined to the key so far
        return mix(mix(self.seed + numbers[:, 0]) + numbers[:, 1]).to(device, non_blocking=True)

    def set_rows(self, shape: tuple[int, ...], sample: torch.Tensor, place: torch.Tensor, num_samples: int) -> None:
        """Say which rows of the micro-batch's tensors [*shape, features] are which places of which samples, where samples lie
        end to end.

        Args:
            shape: all dimensions but the last.
            sample: int64 [rows], number of each row's sample in the micro-batch; `num_samples` for rows of no sample.
            place: int64 [rows], from 0 in each sample.
            num_samples: S.
        """
        self.rows[shape] = mix(self._sample_keys(num_samples + 1, place.device)[sample] + place).view(shape)

    def row_keys(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return the keys of the rows of a tensor [*shape, features]: int64 of this shape.

        Where `set_rows` knows nothing of the shape, the first dimension is of samples, and the others are places in a sample:
        the key of [s, i, j] is mix(mix(key of s + i) + j), and of [s] that of place 0.
        """
        if tuple(shape) in self.rows:
            return self.rows[tuple(shape)]
        keys = self._sample_keys(shape[0], device)
        for size in shape[1:] or (1,):
            keys = mix(keys[..., None] + torch.arange(size, device=device))
        return keys.view(shape)

    def _sample_keys(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Return a key per sample, [num_samples], also for samples that fill a micro-batch up and are none.

        Raises:
            UsageError: fewer samples are computed than were said.
        """
        if self.samples is None:
            return self._make_keys([(0, number) for number in range(num_samples)], device)
        if num_samples == len(self.samples):
            return self.samples
        if num_samples < len(self.samples):
            raise UsageError(
                f"a dropout by sample got a tensor of {num_samples} sample(s), but set_samples said {len(self.samples)}: call "
                "noise.set_samples before each micro-batch, and let tensors at a dropout have samples first"
            )
        return torch.cat([self.samples, mix(torch.arange(len(self.samples), num_samples, device=device))])


OTHER_NOISE = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.RNNBase, nn.MultiheadAttention),
)
"""Torch's modules that draw noise with a probability `p` or `dropout`."""


class Dropout(nn.Dropout):
    """Drops numbers as `nn.Dropout` does, but by sample.

    Args:
        p: probability of dropping a number.
        noise: the model's, with the samples of the micro-batch.
        name: the module's name in the model, which tells its noise from that of others.
    """

    def __init__(self, p: float, noise: Noise, name: str):
        super().__init__(p)
        self.noise, self.number = noise, zlib.crc32(name.encode())
        # int16 numbers below `threshold` are kept: a share of `kept` / 2^16
        kept = round((1 - p) * 2**16)
        self.threshold, self.scale = kept - 2**15, 2**16 / max(1, kept)
        self.columns: dict[tuple[int, torch.device], torch.Tensor] = {}

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"columns": {}}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop numbers of a tensor [..., features], whose rows `Noise.row_keys` knows; the same shape and dtype."""
        return self.drop(x) if self.training and self.p else x

    @torch.compiler.disable  # the keys change with every micro-batch
    def drop(self, x: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        """Drop numbers of a tensor [*rows, features], given the keys of its rows, int64 [*rows]; None: `Noise.row_keys`."""
        if self.p == 1:
            return x * 0
        if self.threshold == 2**15:  # p is rounded to 0
            return x
        if x.ndim == 1:  # a number for each sample
            return self.drop(x[:, None], keys)[:, 0]
        if keys is None:
            keys = self.noise.row_keys(x.shape[:-1], x.device)
        return _Drop.apply(x, keys.reshape(-1), self._column_keys(x), self.threshold, self.scale)

    def _column_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return a key for each pair of features of this module, int32 [ceil(features / 2)]."""
        features = x.shape[-1]
        if (features, x.device) not in self.columns:
            keys = mix(mix(torch.tensor(self.number)) + torch.arange((features + 1) // 2))
            self.columns[features, x.device] = keys.view(torch.int32)[::2].clone().to(x.device)
        return self.columns[features, x.device]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keys, columns, threshold, scale):
        ctx.save_for_backward(keys, columns)
        ctx.constants = threshold, scale
        return _keep(x, keys, columns, threshold, scale)

    @staticmethod
    def backward(ctx, gradient):
        return _Drop.apply(gradient, *ctx.saved_tensors, *ctx.constants), None, None, None, None


def _keep(x: torch.Tensor, keys: torch.Tensor, columns: torch.Tensor, threshold: int, scale: float) -> torch.Tensor:
    """Compute `scale` x where it is kept, else 0.

    Args:
        x: floating [..., features].
        keys: int64 [rows].
        columns: int32 [ceil(features / 2)].
        threshold: draws below it, int16, keep a number.
    """
    rows = x.reshape(-1, x.shape[-1])
    halves = keys.view(torch.int32).view(-1, 2)
    if x.device.type == "cuda":
        return _compile_kernel()(rows, halves, columns, threshold, scale).view(x.shape)
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    size = max(1, CHUNK // len(columns))
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        draws = _hash(halves[part, :1], halves[part, 1:], columns).view(torch.int16)  # [r, 2 c]
        kept = draws[:, : x.shape[-1]].lt_(threshold)  # 1 or 0, int16: bool would take longer than the hash
        if x.element_size() == 2:
            torch.mul(rows[part].view(torch.int16), kept, out=result[part].view(torch.int16))  # of bits: x or 0
        else:
            result[part].copy_(kept).mul_(rows[part])
        result[part].mul_(scale)
    return result.view(x.shape)


def _keep_at_once(
    rows: torch.Tensor, halves: torch.Tensor, columns: torch.Tensor, threshold: int, scale: float
) -> torch.Tensor:
    """Compute what `_keep` does with operations that torch.compile makes one kernel of: each feature's pair is hashed anew."""
    feature = torch.arange(rows.shape[1], device=rows.device)
    hashed = _hash(halves[:, :1], halves[:, 1:], columns[feature // 2])  # int32 [r, features]
    # Of a pair the first draw is the lower half, as where int32 is viewed as int16; 2^15 makes both sides unsigned
    draws = ((hashed >> (16 * (feature % 2)).to(torch.int32)) + 2**15) & 0xFFFF
    return rows * (draws < threshold + 2**15) * scale


@functools.cache
def _compile_kernel() -> Callable[..., torch.Tensor]:
    return torch.compile(_keep_at_once, dynamic=True)


def _hash(first: torch.Tensor, second: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Hash rows and pairs of features: int32 [r, 1], [r, 1] and [c] -> [r, c], two draws of 16 bits each."""
    x = first ^ columns
    x *= signed(ROUND_1, 32)
    y = x >> 15
    y &= 0x1FFFF
    x ^= y
    x += second
    x *= signed(ROUND_2, 32)
    torch.bitwise_right_shift(x, 16, out=y)
    y &= 0xFFFF
    x ^= y
    return x


def noise_by_sample(model: nn.Module, seed: int) -> Noise:
    """Replace every `nn.Dropout` of a model by one that draws by sample, in place.

    Tensors at a dropout must have samples first, and no padding in front of a sample. A second call gives all of them a new
    noise, also those of adapters that were added after the first. Other modules with noise (`OTHER_NOISE`,
    classes of one's own, a model that is itself an `nn.Dropout`) stay as they are and are named in the noise's `left`. Dropout
    that a model applies by function, as kernels of attention do, stays as it is and is not seen.

    Args:
        model: its modules named as they will be in every run: the names enter the noise.
        seed: of the noise.

    Returns:
        The noise, whose `set_samples` is to be called before each micro-batch.
    """
    noise = Noise(seed)
    for name, module in list(model.named_modules()):
        for child_name, child in module.named_children():
            if type(child) in (nn.Dropout, Dropout):
                full_name = f"{name}.{child_name}" if name else child_name
                setattr(module, child_name, Dropout(child.p, noise, full_name).train(child.training))
    for name, module in model.named_modules():
        probability = getattr(module, "p", getattr(module, "dropout", 0))
        if isinstance(module, OTHER_NOISE) and type(module) is not Dropout and probability:
            noise.left.append(f"{name} ({type(module).__name__})" if name else type(module).__name__)
    return noise
