"""Draw dropout by sample: which numbers are dropped is a pure function of the seed, the epoch, the sample and the place in it.

Torch draws dropout from a generator, so that the noise of a sample depends on what was drawn before: on the micro-batch, the
padding, the process. Here an integer hash of (seed, epoch, sample id, module, place in the sample, feature) says whether a
number is kept. So the noise is the same for every cut of a step, after a restart, and when activations are recomputed. For the
backward a CPU keeps a bit per number; a GPU, whose kernel hashes for less than it reads, keeps nothing and hashes again.

The hash works in three levels, so that a number costs eight operations on half a 32-bit integer:

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

from samestep._internals.torch_tracing import is_fake
from samestep.errors import UsageError

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
ROUND_1, ROUND_2 = 0x7FEB352D, 0x846CA68B
CHUNK = 2**17
"""Hashes at once on a CPU, 512 KiB: they stay in its cache. A GPU's are computed by one kernel, and stored nowhere."""

MINUS_ZERO = torch.tensor(-0.0)
"""The zero whose sum with any number has that number's bits."""


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
    return (x >> places) & ((1 << (8 * x.element_size() - places)) - 1)


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
        return self.rows.setdefault(tuple(shape), keys.view(shape))

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
                f"a dropout by sample got a tensor of {num_samples} sample(s), but set_samples said {len(self.samples)}. Call "
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
        return _Drop.apply(x, keys.reshape(-1), self._column_keys(x), None, self.threshold, self.scale)

    def _column_keys(self, x: torch.Tensor) -> torch.Tensor:
        """Return a key for each pair of features of this module, int32 [ceil(features / 2)]."""
        features = x.shape[-1]
        if (features, x.device) not in self.columns:
            keys = mix(mix(torch.tensor(self.number)) + torch.arange((features + 1) // 2))
            self.columns[features, x.device] = keys.view(torch.int32)[::2].clone().to(x.device)
        return self.columns[features, x.device]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, keys, columns, bits, threshold, scale):
        rows = x.reshape(-1, x.shape[-1])
        if is_fake(x):  # traced for a GPU, as which one kernel counts
            result = rows * scale
        elif x.device.type == "cuda":
            result = _compile_kernel()(rows, keys.view(torch.int32).view(-1, 2), columns, threshold, scale)
        else:
            result, bits = _keep(rows, keys, columns, bits, threshold, scale)
            keys = columns = None
        ctx.save_for_backward(keys, columns, bits)
        ctx.constants = threshold, scale
        return result.view(x.shape)

    @staticmethod
    def backward(ctx, gradient):
        return _Drop.apply(gradient, *ctx.saved_tensors, *ctx.constants), *[None] * 5


def _keep(
    rows: torch.Tensor,
    keys: torch.Tensor | None,
    columns: torch.Tensor | None,
    bits: torch.Tensor | None,
    threshold: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `scale` x where a number x is kept, else 0, on a CPU.

    Args:
        rows: floating [r, features].
        keys, columns: int64 [r], int32 [ceil(features / 2)]; None if there are bits.
        bits: what a former call returned for the same numbers; None: they are drawn.
        threshold: draws below it, int16, keep a number.

    Returns:
        The numbers, [r, features], and a bit for each, 1 if it is kept: uint8 [ceil(r features / 8)].
    """
    features, is_drawn = rows.shape[1], bits is None
    size = 8 * max(1, CHUNK // (4 * max(1, features)))  # rows at once; their bits fill bytes
    halves = keys.view(torch.int32).view(-1, 2) if is_drawn else None
    result = torch.empty_like(rows, memory_format=torch.contiguous_format)
    drawn = [np.empty(0, np.uint8)]
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        to, values = result[part], rows[part]
        # numpy has bool, bits and shifts of unsigned integers; torch takes longer for them than for the hash
        if is_drawn:
            draws = _hash(halves[part, :1], halves[part, 1:], columns, _shift_on_cpu).view(torch.int16)  # [r, 2 c]
            kept = np.less(draws.numpy()[:, :features], threshold)
            drawn.append(np.packbits(kept))
        else:
            kept = np.unpackbits(bits.numpy()[start * features // 8 :], count=to.numel())
        kept = torch.from_numpy(kept.view(np.int8)).view(to.shape)  # 1 or 0
        if rows.element_size() == 2:
            words = to.view(torch.int16).copy_(kept)
            words *= values.view(torch.int16)  # of bits: x or 0
            to *= scale
        else:
            torch.addcmul(MINUS_ZERO, to.copy_(kept), values, value=scale, out=to)
    return result, torch.from_numpy(np.concatenate(drawn)) if is_drawn else bits


def _keep_at_once(
    rows: torch.Tensor, halves: torch.Tensor, columns: torch.Tensor, threshold: int, scale: float
) -> torch.Tensor:
    """Compute what `_keep` does with operations that torch.compile makes one kernel of: each feature's pair is hashed anew."""
    feature = torch.arange(rows.shape[1], device=rows.device)
    hashed = _hash(halves[:, :1], halves[:, 1:], columns[feature // 2], _shift)  # int32 [r, features]
    # Of a pair the first draw is the lower half, as where int32 is viewed as int16; 2^15 makes both sides unsigned
    draws = ((hashed >> (16 * (feature % 2)).to(torch.int32)) + 2**15) & 0xFFFF
    return rows * (draws < threshold + 2**15) * scale


@functools.cache
def _compile_kernel() -> Callable[..., torch.Tensor]:
    return torch.compile(_keep_at_once, dynamic=True)


def _hash(
    first: torch.Tensor, second: torch.Tensor, columns: torch.Tensor, shift: Callable[[torch.Tensor, int], torch.Tensor]
) -> torch.Tensor:
    """Hash rows and pairs of features: int32 [r, 1], [r, 1] and [c] -> [r, c], two draws of 16 bits each."""
    x = first ^ columns
    x *= signed(ROUND_1, 32)
    x ^= shift(x, 15)
    x += second
    x *= signed(ROUND_2, 32)
    x ^= shift(x, 16)
    return x


def _shift_on_cpu(x: torch.Tensor, places: int) -> torch.Tensor:
    """Compute `_shift` of int32 in one pass: numpy, unlike torch, shifts unsigned integers."""
    return torch.from_numpy(np.right_shift(x.numpy().view(np.uint32), np.uint32(places)).view(np.int32))


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
