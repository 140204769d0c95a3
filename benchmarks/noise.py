"""Compares dropout by sample (samestep/step/noise.py) with random numbers, and with torch's dropout in time.

    make bench NAME=noise
    make bench NAME=noise FLAGS="--only cost"

- statistics: every test is of all draws, 16-bit numbers of the hash, or of the masks that they make at p = 0.1 and 0.5. It
  gives a z: how many standard deviations a count or a sum is off what random numbers give. The z of a largest value (of a
  spectrum, of all correlations) has the same probability as the value. The rule: every |z| is below `LIMIT`.
    rate, expectation    numbers that are kept; the mean of what dropout adds to random x
    uniform              chi-square of the 2^16 values
    pairs                chi-square of the 2^16 pairs of upper bytes of neighbours of many kinds; of lower bytes, too
    masks                correlation of the masks of the same neighbours
    all pairs            correlations of every two features, of every two rows: their mean square, and the largest
    spectrum             periodograms of masks in the order of features, places, samples: the largest peak of any, of their mean
    collisions           equal 32-bit hashes, each of a pair of features, beside those of random numbers
- cost: forward and backward of a BERT (4 layers of width 256, 4 heads, eager attention, p = 0.1) with a micro-batch of 4
  samples, without dropout, with torch's, and by sample, in turns, on one thread. The machine should do nothing else.
"""

import functools
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterator

import harness
import numpy as np
import torch

from samestep._internals.libc import stop_malloc_returning_memory
from samestep.models.bert_pretraining import PretrainingSums
from samestep.recipe.catalog import load
from samestep.step import noise

LIMIT = 4.5
RATES = (0.1, 0.5)
PLACES, FEATURES = 250, 1000
NUM_SAMPLES = 400
"""x 250 x 1000 = 10^8 draws."""
BLOCK = 40
"""Samples that are in memory at once."""
SEQUENCE = 2**20
"""Draws of a periodogram."""
WARM_UP = 3
MICRO_BATCH = 4
KINDS = {"none": "without", "torch": "torch's", "sample": "by sample"}
Draws = torch.Tensor
"""int32 [samples, places, features], from 0 to 2^16 - 1."""


# ---------------------------------------------------------------------------------------------------------------------
# Draws


def draw(samples: range, places: int = PLACES, *, seed: int = 0, epoch: int = 0, module: str = "layer.0") -> Draws:
    """Compute the draws that decide which numbers of tensors [samples, places, features] are kept."""
    source = noise.Noise(seed)
    source.set_samples([(epoch, sample) for sample in samples])
    keys = source.row_keys(torch.Size([len(samples), places]), torch.device("cpu")).view(torch.int32).view(-1, 2)
    columns = noise.Dropout(0.5, source, module)._column_keys(torch.empty(1, FEATURES))
    draws = noise._hash(keys[:, :1], keys[:, 1:], columns, noise._shift_on_cpu).view(torch.int16)
    return draws.view(len(samples), places, FEATURES).int() + 2**15


def list_neighbours(samples: range, places: int, draws: Draws) -> Iterator[tuple[str, Draws, Draws]]:
    """List draws beside draws that differ from them by one number, or two that might cancel."""
    yield "feature", draws[..., 1:], draws[..., :-1]
    yield "feature of the same hash", draws[..., 1::2], draws[..., ::2]
    yield "feature + 2", draws[..., 2:], draws[..., :-2]
    yield "feature + 128", draws[..., 128:], draws[..., :-128]
    yield "place", draws[:, 1:], draws[:, :-1]
    yield "sample", draws[1:], draws[:-1]
    yield "sample + 1, place - 1", draws[1:, :-1], draws[:-1, 1:]
    yield "place + 1, feature - 2", draws[:, 1:, :-2], draws[:, :-1, 2:]
    others = {
        "seed + 1": {"seed": 1},
        "epoch + 1": {"epoch": 1},
        "seed + 1, epoch - 1": {"seed": 1, "epoch": -1},
        "layer": {"module": "layer.1"},
        "module": {"module": "layer.0.attention.dropout"},
    }
    for name, change in others.items():
        yield name, draw(samples, places, **change), draws
    shifted = range(samples.start - 1, samples.stop - 1)
    yield "epoch + 1, sample - 1", draw(shifted, places, epoch=1), draws


# ---------------------------------------------------------------------------------------------------------------------
# Tests


def quantile(log_probability: float) -> float:
    """Give the z above which a normal number is with a probability, given its logarithm.

    >>> round(quantile(math.log(0.5)), 6), round(quantile(math.log(0.0013498980)), 4)
    (0.0, 3.0)
    """
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        # log of 1 - Phi(z)
        above = torch.special.log_ndtr(torch.tensor(-middle, dtype=torch.float64)).item()
        low, high = (middle, high) if above > log_probability else (low, middle)
    return low


def of_largest(probability: float, count: int) -> float:
    """Give the z of the largest of `count` values, which one value exceeds with a probability."""
    if not probability:  # less than a float can be
        return math.inf
    log_none = count * math.log1p(-min(probability, 1 - 1e-16))  # log of the probability that no value exceeds it
    return quantile(math.log(-math.expm1(log_none)) if log_none > -30 else -math.exp(log_none))


class ChiSquare:
    """Counts values from 0 to 2^16 - 1."""

    def __init__(self) -> None:
        self.counts = torch.zeros(2**16, dtype=torch.int64)

    def add(self, values: Draws) -> None:
        self.counts += torch.bincount(values.flatten(), minlength=2**16)

    def z(self) -> float:
        expected, freedom = self.counts.sum().item() / 2**16, 2**16 - 1
        chi_square = ((self.counts.double() - expected).square() / expected).sum().item()
        return (chi_square - freedom) / math.sqrt(2 * freedom)


class Sum:
    """Adds numbers of mean 0 and known variance."""

    def __init__(self) -> None:
        self.sum, self.variance = 0.0, 0.0

    def add(self, value: float, variance: float) -> None:
        self.sum, self.variance = self.sum + value, self.variance + variance

    def z(self) -> float:
        return self.sum / math.sqrt(self.variance)


class Spectrum:
    """Adds up periodograms of masks; each power has mean 1, and exceeds x with probability exp(-x)."""

    def __init__(self, length: int) -> None:
        self.length, self.largest, self.count = length, 0.0, 0
        self.sum = torch.zeros(length // 2 - 1, dtype=torch.float64)

    def add(self, mask: torch.Tensor, share: float) -> None:
        """Add a mask, bool of any shape, in its order; what is left at the end is not looked at."""
        flat = mask.flatten()
        for sequence in flat[: len(flat) // self.length * self.length].view(-1, self.length):
            wave = torch.fft.rfft(sequence.float() - share)[1:-1]
            power = wave.abs().double().square() / (self.length * share * (1 - share))
            self.largest, self.count = max(self.largest, power.max().item()), self.count + 1
            self.sum += power

    def z_of_peak(self) -> float:
        return of_largest(math.exp(-self.largest), self.count * len(self.sum))

    def z_of_mean(self) -> float:
        count = torch.tensor(float(self.count), dtype=torch.float64)
        return of_largest(torch.special.gammaincc(count, self.sum.max()).item(), len(self.sum))


def count_kept_share(p: float) -> float:
    """Give the share of numbers that are kept: 1 - p, rounded to a multiple of 2^-16."""
    return round((1 - p) * 2**16) / 2**16


def correlate_all_pairs(mask: torch.Tensor) -> dict[str, float]:
    """Correlate every two columns of a mask, bool [n, columns], whose numbers are kept with probability 1/2."""
    signs = mask.float() * 2 - 1
    products = (signs.T @ signs / math.sqrt(len(signs)))[tuple(torch.triu_indices(*(2 * [signs.shape[1]]), 1))].double()
    probability = 2 * torch.special.ndtr(-products.abs().max()).item()
    return {
        "mean square": (products.square().mean().item() - 1) / math.sqrt(2 / len(products)),
        "largest": of_largest(probability, len(products)),
    }


def compare_collisions(hashes: np.ndarray) -> float:
    """Count equal numbers among 32-bit hashes, [n]."""
    n, cells = len(hashes), 2.0**32
    ordered = np.sort(hashes)
    load_factor = n / cells
    expected = n + cells * math.expm1(-load_factor)  # n less the cells that n random numbers fill
    variance = cells * (math.exp(-load_factor) - (1 + load_factor) * math.exp(-2 * load_factor))
    return (int((ordered[1:] == ordered[:-1]).sum()) - expected) / math.sqrt(variance)


def run_tests(num_samples: int, places: int, block: int, sequence: int) -> dict[str, float]:
    """Run all tests on the draws of `num_samples` samples with `places` places.

    Args:
        block: samples at once, at least 2.
        sequence: draws of a periodogram, a power of two.

    Returns:
        test -> z
    """
    sums: dict[str, Sum] = {}
    chi_squares: dict[str, ChiSquare] = {}
    spectra: dict[str, Spectrum] = {}
    hashes = []
    generator = torch.Generator().manual_seed(0)
    shares = {p: count_kept_share(p) for p in RATES}
    z: dict[str, float] = {}
    for start in range(0, num_samples, block):
        samples = range(start, min(start + block, num_samples))
        draws = draw(samples, places)
        chi_squares.setdefault("uniform", ChiSquare()).add(draws)
        for name, a, b in (("feature", draws[..., 1:], draws[..., :-1]), ("place", draws[:, 1:], draws[:, :-1])):
            chi_squares.setdefault(f"pairs: lower bytes, {name}", ChiSquare()).add((a << 8 & 0xFF00) + (b & 0xFF))
        for name, a, b in list_neighbours(samples, places, draws):
            chi_squares.setdefault(f"pairs: {name}", ChiSquare()).add((a >> 8 << 8) + (b >> 8))
            for p, share in shares.items():
                x, y = a < share * 2**16, b < share * 2**16
                both, either = (x & y).sum().item(), x.sum().item() + y.sum().item()
                covariance = both - share * either + share**2 * x.numel()
                sums.setdefault(f"masks: {name}, p = {p}", Sum()).add(
                    covariance, x.numel() * (share * (1 - share)) ** 2
                )
        for p, share in shares.items():
            mask = draws < share * 2**16
            kept = mask.sum().item() - share * mask.numel()
            sums.setdefault(f"rate: p = {p}", Sum()).add(kept, mask.numel() * share * (1 - share))
            orders = {"features": mask, "places": mask.transpose(1, 2), "samples": mask.permute(1, 2, 0)}
            for name, ordered in orders.items():
                spectra.setdefault(f"{name}, p = {p}", Spectrum(sequence)).add(ordered, share)
        hashes.append(((draws[..., 1::2] << 16) + draws[..., ::2]).flatten().numpy())
        x = torch.randn(draws.shape, generator=generator)
        source = noise.Noise(0)
        source.set_samples([(0, sample) for sample in samples])
        for p, share in shares.items():
            added = noise.Dropout(p, source, "layer.0").train()(x).double() - x
            variance = x.double().square().sum().item() * (1 - share) / share
            sums.setdefault(f"expectation: p = {p}", Sum()).add(added.sum().item(), variance)
        if not start:
            mask = draws.flatten(0, 1) < 2**15
            for name, part in (("features", mask[:20000]), ("rows", mask[:3000].T)):
                z |= {f"all pairs: {name}, {kind}": value for kind, value in correlate_all_pairs(part).items()}
    z["collisions"] = compare_collisions(np.concatenate(hashes))
    for name, spectrum in spectra.items():
        z |= {f"spectrum: {name}, peak": spectrum.z_of_peak(), f"spectrum: {name}, mean": spectrum.z_of_mean()}
    return z | {name: test.z() for name, test in itertools.chain(chi_squares.items(), sums.items())}


def find_failures(z: dict[str, float]) -> dict[str, float]:
    """Find the tests that break the rule."""
    return {name: value for name, value in z.items() if not abs(value) < LIMIT}


# ---------------------------------------------------------------------------------------------------------------------
# Cost


def make_step(kind: str, precision: str) -> Callable[[], None]:
    """Make a function that computes a micro-batch's forward and backward."""
    p = 0.0 if kind == "none" else 0.1
    changes = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
    recipe = load("bert_small_cpu", changes | {"hidden_dropout_prob": p, "attention_probs_dropout_prob": p})
    torch.manual_seed(0)
    model = PretrainingSums.from_recipe(recipe).train()
    source = noise.noise_by_sample(model, 0) if kind == "sample" else None
    micro_batch = PretrainingSums.example(recipe, MICRO_BATCH)

    def step() -> None:
        if source is not None:
            source.set_samples([(0, sample) for sample in range(MICRO_BATCH)])
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**micro_batch)[0].sum()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def measure_cost(precision: str, rounds: int) -> dict:
    """Measure the seconds of each kind of dropout in every round."""
    steps = {kind: make_step(kind, precision) for kind in KINDS}
    calls = {kind: functools.partial(harness.seconds, step) for kind, step in steps.items()}
    return {"precision": precision, "seconds": harness.in_turns(calls, rounds, WARM_UP)}


# ---------------------------------------------------------------------------------------------------------------------
# Results


def main() -> None:
    parser = harness.flags("noise", __doc__, rounds=25, only=("statistics", "cost"), precisions=True, threads=True)
    parser.set_defaults(threads=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    stop_malloc_returning_memory()  # as programs do
    about = harness.about("make bench NAME=noise", ("torch", "transformers"), arguments.threads)
    file = arguments.output.with_suffix(".json")
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if "statistics" in arguments.only:
        z = run_tests(NUM_SAMPLES, PLACES, BLOCK, SEQUENCE)
        results["statistics"] = {"about": about, "num_draws": NUM_SAMPLES * PLACES * FEATURES, "z": z}
    if "cost" in arguments.only:
        rows = [measure_cost(precision, arguments.rounds) for precision in arguments.precisions]
        results["cost"] = {"about": about, "rows": rows}
    harness.write(arguments.output, {"about": about} | results, markdown({"about": about} | results))


def markdown(results: dict) -> str:
    body = ""
    if "statistics" in results:
        body += describe_statistics(results["statistics"])
    if "cost" in results:
        body += describe_cost(results["cost"])
    about = {"command": results["about"]["command"]}
    return harness.page("Dropout by sample beside random numbers and torch's dropout", "noise.py", about, body)


def describe_statistics(part: dict) -> str:
    z, failures = part["z"], find_failures(part["z"])
    groups: dict[str, list[float]] = {}
    for name, value in z.items():
        groups.setdefault(name.partition(":")[0], []).append(value)
    rows = [
        [name, len(values), f"{math.sqrt(statistics.fmean(v * v for v in values)):.2f}", f"{max(values, key=abs):+.2f}"]
        for name, values in groups.items()
    ]
    chance = len(z) * 2 * torch.special.ndtr(torch.tensor(-LIMIT, dtype=torch.float64)).item()
    verdict = "holds" if not failures else f"**is broken** by {', '.join(failures)}"
    every = harness.table("test | z", [[name, f"{value:+.2f}"] for name, value in z.items()])
    return (
        f"## Statistics\n\n{part['num_draws']:,} draws. The rule, every |z| below {LIMIT}, {verdict}. With random numbers "
        f"one of {len(z)} tests would break it with a probability of {chance:.1g}.\n\n"
        f"{harness.table('tests | number | root mean square of z | largest', rows)}\n"
        f"{harness.provenance(part['about'])}.\n\n<details><summary>Every test</summary>\n\n{every}\n</details>\n\n"
    )


def describe_cost(part: dict) -> str:
    rows = []
    for row in part["rows"]:
        seconds = row["seconds"]
        for kind, text in KINDS.items():
            more = [value - 1 for value in harness.ratios(seconds[kind], seconds["none"])]
            milliseconds = harness.spread([1e3 * value for value in seconds[kind]], ".1f")
            rows.append([row["precision"], text, milliseconds, harness.spread(more, "+.1%")])
    num_rounds = len(part["rows"][0]["seconds"]["none"])
    return (
        "## Cost\n\nForward and backward of a micro-batch of 4 samples, BERT 4 x 256, eager attention, p = 0.1. Medians "
        f"(smallest to largest) of {num_rounds} rounds, in turns.\n\n"
        f"{harness.table('precision | dropout | ms | more than without', rows)}\n{harness.provenance(part['about'])}.\n"
    )


if __name__ == "__main__":
    main()
