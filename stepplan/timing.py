"""The time of an optimizer step on some hardware, term by term: arithmetic, no measurement, no torch.

Letters as in `layout` and `memory`: B samples per step, N processes, b samples per forward, k micro-batches. Seconds and bytes.
Only communication overlaps with the backward, and loading with everything. Constants that arithmetic does not give are in
`CALIBRATION`, fitted to published throughputs: benchmarks/results/timing.md shows every prediction beside its number.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from samestep.cut.layout import Layout
from samestep.errors import UsageError
from samestep.printing import format_count
from stepplan.hardware import Device, Hardware
from stepplan.memory import Model, count_trained, gathered_bytes
from stepplan.transformer import Transformer

BUCKET = 25 * 2**20
"""Bytes of gradients that DDP reduces at once."""
LOGIT_EAGER, LOGIT_COMPILED = {"no": 40, "fp16": 46, "bf16": 46}, {"no": 28, "fp16": 14, "bf16": 14}
"""Bytes moved per logit in both passes, counted. A kernel per operator, in 16 bits: the matmul writes it (2), a cast (2 + 4),
log-softmax reads it twice (4 + 4 + 4), the gradient of the labels (4), of log-softmax (4 + 4 + 4), a cast (4 + 2), two matmuls
read it (2 + 2); in float32 without the casts. Compiled: written, read twice, read and written as its gradient, read by two."""
BACKWARD = 2 / 3
"""Share of a micro-batch's time that is backward, in which gradients can be reduced."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Constants that arithmetic does not give. Traffic: bytes moved per byte that the forward saves, by all kernels."""

    traffic_eager: float  # a kernel per operator
    traffic_scripted: float  # element-wise kernels fused in part, by TorchScript
    traffic_compiled: float  # element-wise kernels fused, by torch.compile or by hand
    traffic_channels_last: float  # convolutional networks with batch normalisation, a kernel per operator
    traffic_channels_first: float  # the same, with changes of layout around the tensor cores' kernels
    stall: float  # seconds per byte saved that no bandwidth shortens, convolutional networks only
    launch: float  # seconds per kernel that is not fused: launching it, filling and draining the device
    reachable_fp32: float  # part of the float32 peak that matmuls reach
    reachable_link: float  # part of the bandwidth between devices of a node that collectives reach
    reachable_network: float  # the same between nodes
    sustained: float  # part of `Device.reachable` that matmuls of `POWER_LIMITED` chips keep for minutes
    straggling: float  # spread of the time of a step over devices that wait for the slowest, as a part of it
    loading: float  # seconds of one core to decode and crop an ImageNet photograph


# `make bench NAME=timing` fits these numbers to the published rows whose sources are not held out, and rounds them to three
# digits; tests/test_timing.py compares them with that fit.
CALIBRATION = Calibration(
    traffic_eager=12.6,
    traffic_scripted=11.2,
    traffic_compiled=10.3,
    traffic_channels_last=8.18,
    traffic_channels_first=14.8,
    stall=3.5e-12,
    launch=9.51e-06,
    reachable_fp32=0.927,
    reachable_link=0.476,
    reachable_network=0.445,
    sustained=0.957,
    straggling=0.0235,
    loading=0.00455,
)

NEWTON_SCHULZ_STEPS = 5
"""Steps of Muon's iteration: each is three products, of n x m by m x n, n x n by n x n and n x n by n x m."""
POWER_LIMITED = ("h100", "h200", "h800", "gh200")
"""Chips whose large matmuls slow down at the limit of power: `Calibration.sustained`."""
REACHABLE_PCIE = 28 / 63
"""Part of PCIe's bandwidth that collectives reach: 28 of 63 GB/s among eight RTX 5090 without peer-to-peer copies,
github.com/NVIDIA/nccl/issues/1639."""

FLASH = {"flash_1": (0.50, 0.35), "flash_2": (0.73, 0.63)}
ATTENTION = {
    "h100": {"flash_1": (0.256, 0.181), "flash_2": (0.374, 0.326), "flash_3": (0.655, 0.567), "cudnn": (0.60, 0.52)},
    "b200": {"flash_2": (0.17, 0.15), "cudnn": (0.6, 0.5)},
}
"""Chip -> kernel -> parts of the 16-bit peak that the forward and the backward of fused attention reach with long samples and
heads of 128; other chips as of `FLASH`. Of an A100: both passes together 25 to 40 % by FlashAttention and 50 to 73 % by
FlashAttention-2 (Dao, 2023, arXiv:2307.08691, abstract); each pass as remembered from its figures, not opened. Of an H100:
370 and 322 TFLOP/s of 989 by FlashAttention-2, 648 and 561 by FlashAttention-3, 595 and 516 by cuDNN (Shah et al., 2024,
arXiv:2407.08608, figures 5 and 6); FlashAttention there assumed as much slower as 2. Of a B200: 379 and 334 of 2,250 by
FlashAttention-2, github.com/Dao-AILab/flash-attention/issues/1589; by cuDNN assumed."""
SAME_CHIP = {"h200": "h100", "h800": "h100", "gh200": "h100", "gb200": "b200", "b300": "b200", "gb300": "b200"}
NO_FLASH = ("v100", "t4", "2080", "titan", "mi", "gaudi")
"""Beginnings of chips for which torch has no FlashAttention-2 of this kind: its kernels for them are taken to be as fast as
version 1."""
HALF_RATE = 250
"""Keys of a query at which a kernel reaches half of that rate: 214, 260, 291, 310, 318 and 322 TFLOP/s for 512 to 16,384 tokens
(the same figure, backward of FlashAttention-2); causal, a query has half as many."""
HEAD, OTHER_HEADS = 128, 0.85
"""Rate with heads other than 128, over that with 128: 0.80 to 0.90 in the same figures for 64 and 256."""


@dataclasses.dataclass(frozen=True)
class Software:
    """Properties of a training program that decide its time.

    Attributes:
        kernels: eager, scripted, compiled, channels_last or channels_first: chooses the traffic of the calibration.
        weight_bytes: bytes moved per parameter in every micro-batch: casts, reads, the gradient and its sum.
        optimizer_bytes: bytes moved per parameter once per step: clipping and update.
        gradient_bytes: bytes of a gradient per parameter, as reduced between processes.
        overlapped: whether gradients are reduced while the last backward still runs.
        gathered_bytes: bytes of a parameter, as gathered by FSDP2 from the processes.
        frozen_bytes: bytes moved per frozen parameter in every micro-batch: its cast, and two reads of it.
        orthogonalized: rows and columns of the matrices that Muon orthogonalizes in float32, shared out over the processes.
    """

    kernels: str
    weight_bytes: float
    optimizer_bytes: float
    gradient_bytes: float = 4
    overlapped: bool = True
    gathered_bytes: float = 4
    frozen_bytes: float = 10
    orthogonalized: tuple[tuple[int, int], ...] = ()


def default_software(
    mixed_precision: str,
    *,
    kernels: str = "eager",
    optimizer_bytes: float = 40,
    sharded: bool = False,
    fsdp_gather: str = "bf16",
) -> Software:
    """Return the software of this repository's programs: sdpa attention, fused optimizers, DDP or FSDP2.

    weight_bytes: float32 4 + 4 to read twice, 4 for the gradient, 12 to add it; autocast 6 to cast, 2 + 2 to read, 8 for the
    gradient and its cast, 12 to add it. Sharded, a parameter of w bytes is received, read and written twice (6 w), and the
    gradient copied to the buffer of its reduction and sent (w or 4, and 8) where it was added.

    Args:
        mixed_precision: no, bf16 or fp16.
        kernels: as in `Software`.
        optimizer_bytes: as in `Software`; the default is for clipping and AdamW.
        sharded: FSDP2 instead of DDP.
        fsdp_gather: type in which FSDP2 gathers weights under mixed precision bf16: bf16 or fp32.
    """
    weight_bytes = 24 if mixed_precision == "no" else 30
    if not sharded:
        return Software(kernels, weight_bytes, optimizer_bytes)
    w = gathered_bytes(mixed_precision, fsdp_gather)
    # Gathered in bf16, nothing is cast: 4 to read, 2 for the gradient, 2 + 8 to reduce it
    weight_bytes = 16 if w == 2 else weight_bytes
    return Software(kernels, weight_bytes + 6 * w, optimizer_bytes, gathered_bytes=w)


class Attention(NamedTuple):
    """The work of fused attention for a sample.

    Attributes:
        flops: FLOPs of all pairs of tokens, the backward as two forwards: a part of `Work.flops`.
        length: tokens of a sequence.
        head_size: width of a head.
        is_causal: whether the kernel leaves out half of the pairs.
        kernel: flash_1, flash_2, flash_3 or cudnn; None: torch's choice for the device, of 2.13 cuDNN on Hopper and Blackwell
            (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, check_prefer_cudnn_attention).
    """

    flops: float
    length: int
    head_size: int
    is_causal: bool
    kernel: str | None

    def seconds(self, device: Device, mixed_precision: str) -> tuple[float, float]:
        """Compute the seconds of the forward and of the backward, which computes the scores again: 5 products for 2."""
        chip = device.name.partition("-")[0]
        chip = SAME_CHIP.get(chip, chip)
        known = ATTENTION.get(chip, FLASH)
        kernel = self.kernel or ("flash_1" if chip.startswith(NO_FLASH) else "cudnn")
        shares = known.get(kernel, known["flash_2"])
        keys = self.length / (1 + self.is_causal)
        rate = peak_flops(device, mixed_precision) * keys / (keys + HALF_RATE)
        rate *= 1.0 if self.head_size == HEAD else OTHER_HEADS
        forward = self.flops / 3 / (1 + self.is_causal) / rate
        return forward / shares[0], 2.5 * forward / shares[1]


@dataclasses.dataclass(frozen=True)
class Work:
    """The work for a sample, and the size of the model.

    Attributes:
        flops: FLOPs of the matmuls of forward and backward, a multiply-add counted as two.
        saved_bytes: bytes that the forward saves for the backward, logits excluded.
        num_parameters: parameters of the model.
        num_layers: layers of the model.
        kernels_per_layer: kernels of forward and backward, none fused.
        num_logits: logits over the vocabulary, at the places where the head scores it.
        num_photographs: photographs to decode.
        num_trained: parameters that have gradients; None: all.
        forward_share: the forward's part of `flops`, which recomputing adds.
        attention: the part that a fused kernel computes; None: attention is matmuls as others.
    """

    flops: float
    saved_bytes: float
    num_parameters: int
    num_layers: int
    kernels_per_layer: int = Transformer.kernels_per_layer
    num_logits: int = 0
    num_photographs: float = 0
    num_trained: int | None = None
    forward_share: float = 1 / 3
    attention: Attention | None = None

    @property
    def trained(self) -> int:
        """Parameters that have gradients."""
        return self.num_parameters if self.num_trained is None else self.num_trained


def count_work(model: Model, mixed_precision: str) -> Work:
    """Count the work for a whole sample of a model.

    >>> from stepplan.memory import model_from_recipe
    >>> from samestep.recipe.catalog import load
    >>> work = count_work(model_from_recipe(load("gpt2_124m")), "bf16")
    >>> round(work.flops / 1e9), round(work.saved_bytes / 1e6)
    (876, 346)
    """
    count_bytes = getattr(model, "traffic_bytes", model.saved_bytes)
    return Work(
        flops=model.flops_per_sample,
        saved_bytes=count_bytes(autocast=mixed_precision != "no"),
        num_parameters=model.num_parameters,
        num_layers=model.num_layers,
        kernels_per_layer=model.kernels_per_layer,
        num_logits=model.num_logits,
        num_trained=count_trained(model),
        forward_share=getattr(model, "forward_share", 1 / 3),
        attention=_count_attention(model) if mixed_precision != "no" else None,
    )


def _count_attention(model: Any) -> Attention | None:
    """Count the work of a fused kernel; None: the model stores its scores, or has no formula."""
    if getattr(model, "stores_scores", True):
        return None
    return Attention(
        model.attention_flops, model.sequence_length, model.head_size, model.is_causal, model.attention_kernel
    )


# ---------------------------------------------------------------------------------------------------------------------
# All-reduce: seconds for p participants, S bytes each, Bw bytes/s and a seconds of latency per message, on links of both
# directions.


def naive(p: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Let all send to one participant, which sends the sum to all, one after the other: 2 (p - 1) (a + S / Bw)."""
    return 2 * (p - 1) * (latency + num_bytes / bandwidth)


def tree(p: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Reduce to a root and broadcast from it, along a binomial tree: 2 ceil(log2 p) (a + S / Bw).

    Reference: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH, 2005, section 4.
    """
    return 2 * (p - 1).bit_length() * (latency + num_bytes / bandwidth)


def recursive_doubling(p: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Exchange everything with a partner twice as far in every round: floor(log2 p) (a + S / Bw).

    It takes two rounds more, before and after, where p is no power of two. Reference: Thakur et al., 2005, section 4.5.
    """
    rounds = p.bit_length() - 1 + (2 if p & (p - 1) else 0)
    return rounds * (latency + num_bytes / bandwidth)


def ring(p: int, num_bytes: float, bandwidth: float, latency: float) -> float:
    """Reduce-scatter and all-gather around a ring: 2 (p - 1) a + 2 ((p - 1) / p) S / Bw.

    Reference: Patarasuk, Yuan, Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, 2009, section 4.
    """
    return 2 * (p - 1) * (latency + num_bytes / p / bandwidth)


AllReduce = Callable[[int, float, float, float], float]
ALL_REDUCE: dict[str, AllReduce] = {way.__name__: way for way in (naive, tree, recursive_doubling, ring)}


def all_reduce(hardware: Hardware, num_bytes: float, calibration: Calibration = CALIBRATION) -> float:
    """Compute the seconds to sum `num_bytes` over all processes: the fastest algorithm within a node, then between nodes.

    Over several nodes: reduce-scatter and all-gather inside each node, together a ring, and in between every device sums its
    part with its peers of the other nodes, together S bytes over the network of a node.
    """
    device = hardware.device
    link = reachable_link(device, calibration), device.link_latency_us / 1e6
    network = hardware.network_gb_per_s * 1e9 * calibration.reachable_network, device.network_latency_us / 1e6
    if hardware.num_nodes == 1:
        return min(algorithm(hardware.num_devices, num_bytes, *link) for algorithm in ALL_REDUCE.values())
    fastest = min(algorithm(hardware.num_nodes, num_bytes, *network) for algorithm in ALL_REDUCE.values())
    return ring(hardware.num_devices, num_bytes, *link) + fastest


def all_gather(hardware: Hardware, num_bytes: float, calibration: Calibration = CALIBRATION) -> float:
    """Compute the seconds until every process has the `num_bytes` that all hold together: half a ring.

        (p - 1) (a + S / p / Bw),   over one ring through all devices, which crosses the network between nodes

    A reduce-scatter takes the same time.
    """
    device, p = hardware.device, hardware.num_processes
    bandwidth, latency = reachable_link(device, calibration), device.link_latency_us
    if hardware.num_nodes > 1:
        network = hardware.network_gb_per_s * 1e9 * calibration.reachable_network
        bandwidth, latency = min(bandwidth, network), max(latency, device.network_latency_us)
    return ring(p, num_bytes, bandwidth, latency / 1e6) / 2


def reachable_link(device: Device, calibration: Calibration = CALIBRATION) -> float:
    """Compute the bytes per second and direction that collectives reach between devices of a node."""
    part = REACHABLE_PCIE if device.link.startswith("PCIe") else calibration.reachable_link
    return device.link_gb_per_s * 1e9 * part


# ---------------------------------------------------------------------------------------------------------------------
# One step


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by cause, for the process with the largest share.

    Attributes:
        products: matmuls at the rate that the device reaches.
        attention: fused attention at the rate of its kernel.
        memory_traffic: reads and writes of the kernels between the matmuls.
        weights: casts and reads of the weights, gradients and their sum, in every micro-batch.
        launches: starting kernels.
        stragglers: waiting for the slowest device.
        optimizer: clipping and update.
        loading: waiting for samples that do not load behind the computation.
        exposed_communication: waiting for other processes.
        communication: all communication, hidden or not; not part of the total.
        at_peak: the step's matmuls alone, at the peak of all devices; not part of the total.
    """

    products: float
    attention: float
    memory_traffic: float
    weights: float
    launches: float
    stragglers: float
    optimizer: float
    loading: float
    exposed_communication: float
    communication: float
    at_peak: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return float(sum(dataclasses.astuple(self))) - self.communication - self.at_peak

    @property
    def share_of_peak(self) -> float:
        """Model FLOPs utilisation, a share of 1; recomputing does not count."""
        return self.at_peak / self.total

    def samples_per_second(self, global_batch_size: int) -> float:
        """Compute B / total, the samples of all processes per second."""
        return global_batch_size / self.total

    def tokens_per_second(self, global_batch_size: int, length: int) -> float:
        """Compute B T / total, the tokens of all processes per second, for samples of T tokens."""
        return global_batch_size * length / self.total


def step_time(
    work: Work,
    layout: Layout,
    hardware: Hardware,
    mixed_precision: str,
    software: Software,
    *,
    gradient_checkpointing: float = False,
    sharded: bool = False,
    num_shards: int | None = None,
    reduce_every_micro_batch: bool = False,
    cores: float = math.inf,
    calibration: Calibration = CALIBRATION,
) -> StepTime:
    """Predict the seconds of an optimizer step, for the process with the largest share s = ceil(B / N).

        products         s flops / (peak x reachable), without those of fused attention
        attention        at the rate of its kernel: `Attention.seconds`
        memory_traffic   s saved_bytes (traffic / memory bandwidth + stall), the stall for convolutional networks only,
                         and s num_logits times the bytes moved for each / memory bandwidth
        weights          k (N_trained weight_bytes + N_frozen frozen_bytes) / memory bandwidth
        launches         k kernels launch; none when compiled
        stragglers       sqrt(2 ln N) straggling of all that: the slowest of N whose times scatter normally
        optimizer        N_trained optimizer_bytes / memory bandwidth, sharded: divided by N; with Muon `_orthogonalization`
        loading          s num_photographs loading / cores, less all of the above except the optimizer, at least 0
        communication    sum of the gradients in buckets of 25 MiB, once; hidden behind the backward, 2 / 3 of the last
                         micro-batch: `reduce_in_buckets` says what is exposed
          sharded        two all-gathers of the weights (gathered_bytes each) and a reduce-scatter of the gradients in every
                         micro-batch, layer by layer; hidden behind the micro-batch except the first gather and the last
                         reduction

    The device does one thing at a time: matmuls and traffic add up, where the roofline takes the larger of the two
    (Williams, Waterman, Patterson, Roofline, 2009), since kernels between matmuls wait for bandwidth alone.

    Args:
        work: work for one sample.
        layout: B, N, b and k; N must be the hardware's.
        hardware: N devices and the links between them.
        mixed_precision: no, bf16 or fp16.
        software: `default_software` for this repository's programs.
        gradient_checkpointing: activations recomputed in the backward: a second forward, a third more work, beside frozen
            weights half; or the share of layers for which they are.
        sharded: FSDP2 instead of DDP.
        num_shards: devices that divide the weights, at most those of a node, where groups of them hold them all (HSDP); None:
            all devices divide.
        reduce_every_micro_batch: DDP without `no_sync`, for comparison.
        cores: cores of the host, per process, that load samples.
        calibration: other constants, to fit them.

    Raises:
        UsageError: a precision that the device lacks, or a layout for another number of processes.
    """
    if layout.num_processes != hardware.num_processes:
        raise UsageError(
            f"{hardware} has {format_count(hardware.num_processes, 'process')}, the layout {layout.num_processes}"
        )
    # All wait for the process with the largest share
    device, share, k = hardware.device, layout.shares[0], layout.gradient_accumulation_steps
    bandwidth = device.memory_gb_per_s * 1e9
    # Recomputing is a forward more: its products, its traffic, its reads of the weights, its launches
    passes = 1 + gradient_checkpointing * work.forward_share
    fused = software.kernels in ("scripted", "compiled")
    stall = calibration.stall if software.kernels.startswith("channels") else 0.0
    traffic = getattr(calibration, f"traffic_{software.kernels}")

    fused_flops, attention = 0.0, 0.0
    if work.attention is not None:
        forward, backward = work.attention.seconds(device, mixed_precision)
        fused_flops, attention = work.attention.flops, share * ((1 + gradient_checkpointing) * forward + backward)
    rate = reachable_flops(device, mixed_precision, calibration)
    again = passes * work.flops - fused_flops * (1 + gradient_checkpointing / 3)
    products = share * again / rate
    logits = work.num_logits * (LOGIT_COMPILED if fused else LOGIT_EAGER)[mixed_precision] / bandwidth
    memory_traffic = share * (passes * work.saved_bytes * (traffic / bandwidth + stall) + logits)
    moved = work.trained * software.weight_bytes + (work.num_parameters - work.trained) * software.frozen_bytes
    weights = passes * k * moved / bandwidth
    launches = 0.0 if fused else passes * k * work.num_layers * work.kernels_per_layer * calibration.launch
    computing = products + attention + memory_traffic + weights + launches
    stragglers = calibration.straggling * math.sqrt(2 * math.log(layout.num_processes)) * computing
    parts = (num_shards or layout.num_processes) if sharded else 1
    if num_shards is not None and not (sharded and num_shards <= hardware.num_devices):
        raise UsageError(f"num_shards is {num_shards}, must be at most the {hardware.num_devices} devices of a node")
    communication, exposed = _communication(
        work, software, hardware, k, computing / k, sharded, reduce_every_micro_batch, calibration, num_shards
    )
    optimizer = work.trained * software.optimizer_bytes / bandwidth / parts
    orthogonalization, exchange, exposed_exchange = _orthogonalization(software, hardware, sharded, calibration)
    return StepTime(
        products=products,
        attention=attention,
        memory_traffic=memory_traffic,
        weights=weights,
        launches=launches,
        stragglers=stragglers,
        optimizer=optimizer + orthogonalization,
        loading=max(0.0, share * work.num_photographs * calibration.loading / cores - computing),
        exposed_communication=exposed + exposed_exchange,
        communication=communication + exchange,
        at_peak=layout.global_batch_size * work.flops / (peak_flops(device, mixed_precision) * layout.num_processes),
    )


def _orthogonalization(
    software: Software, hardware: Hardware, sharded: bool, calibration: Calibration
) -> tuple[float, float, float]:
    """Compute the seconds of `samestep.contrib.optim.muon`'s products in float32, N matrices at a time, and of their exchange.

    Results are sent, 4 bytes per number, while the next ones are computed, but for those of the last round. Where weights are
    sharded, what they are computed from is gathered before.

    Returns:
        Seconds of the products; of the exchange; and of the part of the exchange that is not hidden behind the products.
    """
    if not software.orthogonalized:
        return 0.0, 0.0, 0.0
    n = hardware.num_processes
    flops = sorted((count_orthogonalization(*shape) for shape in software.orthogonalized), reverse=True)
    seconds = sum(flops[::n]) / reachable_flops(hardware.device, "no", calibration)
    if n == 1:
        return seconds, 0.0, 0.0
    num_bytes = 4 * sum(rows * columns for rows, columns in software.orthogonalized)
    exchange = all_gather(hardware, num_bytes, calibration)
    num_rounds = len(flops[::n])
    exposed = max(0.0, exchange - seconds) + exchange / num_rounds + exchange * sharded
    return seconds, exchange * (1 + sharded), exposed


def count_orthogonalization(rows: int, columns: int) -> int:
    """Count the FLOPs of `samestep.contrib.optim.muon.orthogonalize`, as its `count_flops` does.

    >>> count_orthogonalization(768, 3072) == count_orthogonalization(3072, 768) == 10 * 768**2 * (2 * 3072 + 768)
    True
    """
    n, m = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * 2 * (2 * n * n * m + n**3)


def peak_flops(device: Device, mixed_precision: str) -> float:
    """Return the peak FLOP/s of matmuls in a precision, as the vendor states it.

    Raises:
        UsageError: the device has no matmuls in that precision.
    """
    peak = device.tflops(mixed_precision)
    if peak is None:
        raise UsageError(f"{device.name} has no {mixed_precision} products: use --mixed_precision fp16 or no")
    return peak * 1e12


def reachable_flops(device: Device, mixed_precision: str, calibration: Calibration = CALIBRATION) -> float:
    """Compute the FLOP/s that large matmuls reach: the device's own part of its 16-bit peak, in float32 one part for all."""
    part = calibration.reachable_fp32 if mixed_precision == "no" else device.reachable
    if mixed_precision != "no" and device.name.partition("-")[0] in POWER_LIMITED:
        part *= calibration.sustained
    return peak_flops(device, mixed_precision) * part


def _communication(
    work: Work,
    software: Software,
    hardware: Hardware,
    k: int,
    seconds: float,
    sharded: bool,
    reduce_every_micro_batch: bool,
    calibration: Calibration,
    num_shards: int | None = None,
) -> tuple[float, float]:
    """Compute the seconds of communication in a step, and how many of them are not hidden behind micro-batches of `seconds`."""
    if hardware.num_processes == 1:
        return 0.0, 0.0
    if sharded:
        size, trained = work.num_parameters / work.num_layers, work.trained / work.num_layers
        group = hardware if num_shards is None else dataclasses.replace(hardware, num_devices=num_shards, num_nodes=1)
        gather = all_gather(group, software.gathered_bytes * size, calibration)
        reduction = all_gather(group, software.gradient_bytes * trained, calibration)
        if num_shards is not None:  # each device then sums its part with its peers of the other groups
            num_groups = hardware.num_processes // num_shards
            peers = dataclasses.replace(hardware, num_devices=1, num_nodes=num_groups)
            reduction += all_reduce(peers, software.gradient_bytes * trained / num_shards, calibration)
        total = work.num_layers * (2 * gather + reduction)
        return k * total, k * min(total, max(0.0, total - seconds) + gather + reduction)
    # Gradients that are not overlapped are one bucket, which begins when the backward ends
    num_bytes, backward = software.gradient_bytes * work.trained, BACKWARD * seconds
    size, hiding = (BUCKET, backward) if software.overlapped else (math.inf, 0.0)
    total, exposed = reduce_in_buckets(hardware, num_bytes, hiding, calibration, size)
    times = k if reduce_every_micro_batch else 1
    return times * total, times * exposed


def reduce_in_buckets(
    hardware: Hardware,
    num_bytes: float,
    backward: float,
    calibration: Calibration = CALIBRATION,
    bucket_bytes: float = BUCKET,
) -> tuple[float, float]:
    """Compute the seconds of the sum of gradients in buckets, and how many of them the backward does not hide.

        total    n t,   n = ceil(bytes / bucket) buckets of t = all_reduce(bytes / n)
        exposed  max(t, total - backward (1 - 1 / n))

    The first bucket begins when the backward has filled it, after 1 / n of its time, and the last when it ends, so that nothing
    hides that one. `make bench NAME=overlap` measures both.

    Args:
        hardware: the processes, and what connects them.
        num_bytes: bytes of all gradients.
        backward: seconds of the last backward; 0: nothing is hidden.
        calibration: other constants.
        bucket_bytes: bytes that are reduced at once; infinity: all.
    """
    num_buckets = max(1, math.ceil(num_bytes / bucket_bytes))  # adapters may match nothing
    bucket = all_reduce(hardware, num_bytes / num_buckets, calibration)
    total = num_buckets * bucket
    return total, max(bucket, total - backward * (1 - 1 / num_buckets))
