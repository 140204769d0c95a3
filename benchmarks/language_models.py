"""Plan the memory and the time of published trainings of language models, and compare them with what was printed.

    make bench NAME=language_models

Every row of benchmarks/language_models.yaml, and of the speeds to which nothing is fitted also the GPTs of
benchmarks/published.yaml. Memory has no constant that is fitted to a row, but what some programs keep was found by their own
rows (`SEEN`): the errors of all other sources are those of programs as their sources say. Constants of the time are fitted by
`make bench NAME=timing`, but to no source that is held_out.
"""

import dataclasses
import functools
import json
import statistics
from collections.abc import Sequence
from typing import Any

import harness
import yaml

from samestep.cut.layout import solve_layout
from stepplan import base_models, certainty, hardware, timing
from stepplan.hardware import Hardware
from stepplan.memory import Memory, planned_memory
from stepplan.peers import PeerDecoder, PeerTuning, adjust_gradients
from stepplan.placement import RESERVED
from stepplan.timing import CALIBRATION, Calibration, Software, StepTime, Work

PUBLISHED = harness.ROOT / "benchmarks" / "language_models.yaml"
DIGITS = 3
SEEN = ("litgpt", "litgpt_tables", "fms_acceleration")
"""Sources by whose peaks the model was chosen: copies of the inputs of matrices in 4 bits, whole weights that stay, and a copy
in the update. At first sight the 20 peaks of the last one were planned 6.7 % wrong in the median, 14 of them within 15 %."""
UNITS = {"GiB": 2**30, "GB": 1e9}


@functools.cache
def read_rows(kind: str) -> Any:
    """Read the published rows, memory or time, or the programs, models or sources."""
    return yaml.load(PUBLISHED.read_text(encoding="utf-8"), yaml.CSafeLoader)[kind]


def make_decoder(row: dict[str, Any], programs: dict[str, dict[str, Any]]) -> PeerDecoder:
    """Make the model of a row as its program computes it."""
    method = PeerTuning(
        rank=row.get("rank"),
        targets=tuple(row.get("targets", ("all-linear",))),
        weight_bytes=row.get("weights", 2),
        matrix_bytes=row.get("weights", 2),
        adapter_bytes=2,
        is_quantized="quantized" in row,
        doubles_scales=row.get("quantized") != "single",
    )
    config = read_rows("models").get(row["model"]) or base_models.find_base_model(row["model"])
    shape = base_models.shape_from_config(config, row["model"])
    program = dict(programs[row["program"]])
    if program.pop("unties_head", False):
        shape = dataclasses.replace(shape, tied_head=False)
    return PeerDecoder(shape=shape, sequence_length=row["length"], method=method, **program)


def plan_memory(row: dict[str, Any], programs: dict[str, dict[str, Any]]) -> Memory:
    """Plan the bytes of one process of a row."""
    machine = hardware.parse(row["hardware"])
    layout = solve_layout(
        num_processes=machine.num_processes,
        per_device_train_batch_size=row["b"],
        gradient_accumulation_steps=row.get("k", 1),
    )
    model, gradient_bytes = make_decoder(row, programs), row.get("weights", 2)
    memory = planned_memory(
        model,
        layout,
        mixed_precision="bf16",
        gradient_checkpointing=row["recomputed"] != "none",
        sharded=row.get("sharded", False),
        offloaded=row.get("offloaded", False),
        moment_bytes=row["moments"],
        gradient_bytes=gradient_bytes,
    )
    return adjust_gradients(memory, model, layout, gradient_bytes)


def compare_memory(row: dict[str, Any], programs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Compare the plan of a row with its peak, or tell whether it is refused as it ought to be."""
    memory, device = plan_memory(row, programs), hardware.parse(row["hardware"]).device
    room = row.get("gib", 0) * 2**30 or device.memory_bytes
    planned, is_oom = memory.total + row.get("buffers", 0), row["peak"] == "OOM"
    is_refused = planned + RESERVED > room
    published = None if is_oom else row["peak"] * UNITS[row["unit"]]
    return row | {
        "published": published,
        "planned": planned,
        "items": memory.items,
        "error": None if is_oom else planned / published - 1,
        "is_refused": is_refused,
        "is_right": is_refused == is_oom,
    }


FLOAT8_RATE = 2
"""Rate of matmuls in 8 bits, over the rate in 16: the ratio of the peaks."""


@dataclasses.dataclass(frozen=True)
class SpeedRow:
    """A published speed, ready to be predicted: the work of a sample, and how its program computes it."""

    published: dict[str, Any]
    decoder: PeerDecoder
    machine: Hardware
    work: Work
    software: Software

    @property
    def _recomputed(self) -> float:
        return {"none": 0.0, "all": 1.0, "selective": 0.5}[self.published["recomputed"]]

    def predict(self, calibration: Calibration = CALIBRATION) -> StepTime:
        """Predict the seconds of a step."""
        row, machine = self.published, self.machine
        layout = solve_layout(
            num_processes=machine.num_processes,
            per_device_train_batch_size=row["b"],
            gradient_accumulation_steps=row["k"],
        )
        step = timing.step_time(
            *(self.work, layout, machine, "bf16", self.software),
            gradient_checkpointing=self._recomputed,
            sharded=row.get("sharded", False),
            num_shards=row.get("num_shards"),
            calibration=calibration,
        )
        if row.get("offloaded", False):
            step = offload(step, self.work, self.software, machine, row["k"])
        share = row.get("tensor_parallel", 1)
        if share == 1:
            return step
        # Two sums of a layer's output in the forward, two in the backward, and two more where it is recomputed
        sums = row["k"] * self.decoder.num_layers * (4 + 2 * self._recomputed)
        size = 2 * row["b"] * self.decoder.length * self.decoder.hidden_size
        pair = dataclasses.replace(machine, num_devices=share, num_nodes=1)
        exposed = step.exposed_communication + sums * timing.all_reduce(pair, size, calibration)
        return dataclasses.replace(step, exposed_communication=exposed)

    def speed(self, calibration: Calibration = CALIBRATION) -> float:
        """Predict the tokens per second and device."""
        row = self.published
        tokens = row["b"] * row["k"] * row["length"] / row.get("tensor_parallel", 1)
        return tokens / self.predict(calibration).total

    def ratio(self, calibration: Calibration = CALIBRATION) -> float:
        """Compute predicted over published speed."""
        return self.speed(calibration) / self.published["value"]


def make_speed_row(row: dict[str, Any], programs: dict[str, dict[str, Any]]) -> SpeedRow:
    """Make a row ready to be predicted."""
    decoder, machine = make_decoder(row, programs), hardware.parse(row["hardware"], row.get("network"))
    share = row.get("tensor_parallel", 1)
    if "memory_gb_per_s" in row:
        device = dataclasses.replace(machine.device, memory_gb_per_s=row["memory_gb_per_s"])
        machine = dataclasses.replace(machine, device=device)
    # Devices that share layers are one process of the step, with the layer's work divided between them
    machine = dataclasses.replace(machine, num_devices=machine.num_devices // share)
    work = timing.count_work(decoder, "bf16")
    attention = work.attention
    if row.get("float8"):
        in_layers = 1 - decoder.num_outside / decoder.num_parameters
        layers = (work.flops - attention.flops) * in_layers
        work = dataclasses.replace(work, flops=work.flops - layers * (1 - 1 / FLOAT8_RATE))
    work = dataclasses.replace(
        work,
        flops=work.flops / share,
        saved_bytes=work.saved_bytes / share,
        num_logits=work.num_logits / share,
        num_parameters=work.num_parameters // share,
        num_trained=work.trained // share,
        attention=attention._replace(flops=attention.flops / share),
    )
    is_mixed, is_sharded = row.get("weights", 2) == 4, row.get("sharded", False)
    software = Software(
        kernels=decoder.kernels,
        weight_bytes=28 if is_mixed else 10,  # 16-bit weights: two reads, a gradient, its sum
        frozen_bytes=10 if "quantized" in row else 4 + 12 * is_sharded,  # two reads; of 4 bits their copies, too
        optimizer_bytes=row.get("update", 40 if is_mixed else 14),
        gradient_bytes=row.get("reduces", row.get("weights", 2)),
        gathered_bytes=2,
    )
    return SpeedRow(row, decoder, machine, work, software)


def read_speeds() -> list[SpeedRow]:
    """Read the published speeds."""
    programs = read_rows("programs")
    return [make_speed_row(row, programs) for row in read_rows("time")]


def find_held_out() -> set[str]:
    """Find the sources to which nothing is fitted."""
    return {name for name, source in read_rows("sources").items() if source.get("held_out")}


HOST_LINK, HOST_MEMORY = 25e9, 200e9
"""Bytes per second between a device and its host, and of the memory of a host with several devices: PCIe 4.0 x16 and eight
channels of DDR4-3200, of which four fifths and all are reached. Assumed."""


def offload(step: StepTime, work: Work, software: Software, machine: Hardware, k: int) -> StepTime:
    """Add the time of weights, gradients and moments that are divided and in host memory (FSDP2's CPU offload).

    They cross `HOST_LINK` for every gather and reduction, and `HOST_MEMORY` in the update.
    """
    num_bytes = 2 * software.gathered_bytes * work.num_parameters + software.gradient_bytes * work.trained
    computing = step.products + step.memory_traffic + step.weights + step.launches
    waiting = max(0.0, k * num_bytes / machine.num_processes / HOST_LINK - computing)
    update = work.trained * software.optimizer_bytes / HOST_MEMORY / machine.num_nodes
    return dataclasses.replace(step, exposed_communication=step.exposed_communication + waiting, optimizer=update)


def compare_time(rows: list[SpeedRow]) -> list[dict[str, Any]]:
    """Compare predictions with throughputs, and say whether something was fitted to their source."""
    held_out, results = find_held_out(), []
    for row in rows:
        step, predicted = row.predict(), row.speed()
        results.append(
            row.published
            | {
                "predicted": predicted,
                "error": predicted / row.published["value"] - 1,
                "is_held_out": row.published["source"] in held_out,
                "seconds": dataclasses.asdict(step) | {"total": step.total},
                "num_devices": row.machine.num_processes * row.published.get("tensor_parallel", 1),
            }
        )
    return results


SAME = ("source", "model", "program", "float8", "rank")
"""Fields that rows of one series share."""


def compare_scaling(rows: list[dict[str, Any]], same: Sequence[str] = SAME) -> list[dict[str, Any]]:
    """Compare what more devices keep of the speed per device, of rows of the same chip that differ in their number.

    Args:
        rows: with hardware, num_devices, value and predicted.
        same: names of the other fields that they share.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        name = " ".join([hardware.parse(row["hardware"]).device.name, *(str(row.get(key, "")) for key in same)])
        groups.setdefault(name, []).append(row)
    pairs = []
    for group in groups.values():
        few, many = min(group, key=lambda row: row["num_devices"]), max(group, key=lambda row: row["num_devices"])
        if few["num_devices"] == many["num_devices"]:
            continue
        published, predicted = many["value"] / few["value"], many["predicted"] / few["predicted"]
        keys = {key: few.get(key) for key in same} | {"why": few.get("why", many.get("why"))}
        pairs.append(
            keys
            | {"devices": [few["num_devices"], many["num_devices"]], "published": published, "predicted": predicted}
            | {"error": predicted / published - 1}
        )
    return pairs


def measure() -> dict[str, Any]:
    """Make all comparisons."""
    published = yaml.load(PUBLISHED.read_text(encoding="utf-8"), yaml.CSafeLoader)
    programs = published["programs"]
    time = compare_time(read_speeds())
    return {
        "about": harness.about("make bench NAME=language_models", ()),
        "sources": published["sources"],
        "programs": programs,
        "memory": [compare_memory(row, programs) for row in published["memory"]],
        "time": time,
        "unfitted": summarize_kinds([row for row in time if row["is_held_out"]] + read_unfitted_gpts()),
        "fitted": summarize_kinds([row for row in time if not row["is_held_out"]]),
        "scaling": compare_scaling(time),
    }


def summarize(rows: list[dict[str, Any]], key: str = "error") -> dict[str, tuple[int, float, float]]:
    """Map each source, and all, to the number of its rows with an error, the median and the largest one."""
    errors: dict[str, list[float]] = {"all": []}
    for row in rows:
        if row[key] is not None:
            errors.setdefault(row["source"], []).append(abs(row[key]))
            errors["all"].append(abs(row[key]))
    return {source: (len(values), statistics.median(values), max(values)) for source, values in errors.items()}


def share_within(rows: list[dict[str, Any]], limit: float) -> float:
    """Compute the share of rows whose error is at most `limit`."""
    return statistics.mean(abs(row["error"]) <= limit for row in rows if row["error"] is not None)


def read_unfitted_gpts() -> list[dict[str, Any]]:
    """Read the predictions of GPTs to which nothing is fitted, as `make bench NAME=timing` wrote them."""
    rows = json.loads((harness.RESULTS / "timing.json").read_text(encoding="utf-8"))["sharded"]
    return [row for row in rows if row["is_held_out"]]


def find_kinds(row: dict[str, Any]) -> list[str]:
    """Find the kinds of setting of a row of speeds, the first one by its devices."""
    machine = hardware.parse(row["hardware"])
    single, one_node = machine.num_processes == 1, machine.num_nodes == 1
    kinds = ["one device" if single else "one node" if one_node else "several nodes"]
    kinds += ["above 4,096 tokens"] * (row["length"] > 4096) + ["adapters"] * ("rank" in row)
    return [*kinds, "all"]


def is_in_range(row: dict[str, Any]) -> bool:
    """Whether the range that a plan would print holds the published speed."""
    is_host_bound = certainty.is_host_bound(row["seconds"]["launches"], row["seconds"]["total"])
    band = certainty.HOST_BAND if is_host_bound else certainty.find_band(hardware.parse(row["hardware"]))
    return 1 / (1 + band) <= 1 + row["error"] <= 1 + band


def summarize_kinds(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Map each kind of setting to its number of rows, median error, shares within 10, 15 and 25 %, and in their ranges."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for kind in find_kinds(row):
            kinds.setdefault(kind, []).append(row)
    return {
        kind: {
            "rows": len(group),
            "median": statistics.median(abs(row["error"]) for row in group),
            **{f"{limit:.0%}": share_within(group, limit) for limit in (0.1, 0.15, 0.25)},
            "in range": statistics.mean(map(is_in_range, group)),
        }
        for kind, group in kinds.items()
    }


NO_TERMS = {"total", "at_peak", "communication", "share_of_peak"}
"""Values of a step's time that are no part of its total."""


def leave_out_seen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List the rows of memory of sources by which nothing was chosen."""
    return [row for row in rows if row["source"] not in SEEN]


def term_shares(rows: list[dict[str, Any]], name: str) -> list[list[str]]:
    """List each term's mean share of the total, and the mean error of rows in which it is at least a fifth."""
    lines = []
    terms = {term for row in rows for term, value in row[name].items() if value} - NO_TERMS
    for term in sorted(terms):
        shares = [(row[name][term] / sum_terms(row[name]), row["error"]) for row in rows if row["error"] is not None]
        large = [error for share, error in shares if share >= 0.2]
        mean = statistics.mean(share for share, _ in shares)
        error = f"{statistics.mean(large):+.1%} in {len(large)} rows" if large else "-"
        lines.append([term.replace("_", " "), f"{mean:.0%}", error])
    return lines


def sum_terms(terms: dict[str, float]) -> float:
    """Sum the terms that are parts of a whole."""
    return terms.get("total") or sum(terms.values())


def describe(results: dict[str, Any]) -> str:
    """Say how far plans are from published trainings of language models, for docs/planner.md."""
    num_peaks, peaks, _ = summarize(leave_out_seen(results["memory"]))["all"]
    unfitted = results["unfitted"]["all"]
    return (
        f"Of {unfitted['rows']} published speeds of language models to which nothing is fitted, the median error is "
        f"{unfitted['median']:.1%}, {unfitted['15%']:.0%} lie within\n15%, and {unfitted['in range']:.0%} in the range "
        f"that the plan prints; of {num_peaks} published peaks of memory that nothing was\nchosen by the median error is "
        f"{peaks:.1%} "
        "([benchmarks/results/language_models.md](../benchmarks/results/language_models.md)).\n"
    )


def markdown(results: dict[str, Any]) -> str:
    """Write the tables."""
    memory, time = results["memory"], results["time"]

    def by_source(rows: list[dict[str, Any]], key: str = "error") -> str:
        lines = [
            [source, str(n), f"{middle:.1%}", f"{worst:.1%}"]
            for source, (n, middle, worst) in summarize(rows, key).items()
        ]
        return harness.table("source | rows | median | worst", lines)

    def kinds_table(kinds: dict[str, dict[str, float]]) -> str:
        lines = [
            [
                kind,
                f"{row['rows']}",
                *(f"{row[name]:.1%}" if name == "median" else f"{row[name]:.0%}" for name in names),
            ]
            for kind, row in kinds.items()
        ]
        return harness.table(f"kind | rows | {' | '.join(names)}", lines)

    names = ("median", "10%", "15%", "25%", "in range")

    def label(row: dict[str, Any]) -> str:
        kind = "full" if row.get("rank") is None else f"{'QLoRA' if 'quantized' in row else 'LoRA'} {row['rank']}"
        return f"{row['model']} {kind}{', float8' if row.get('float8') else ''}"

    def describe(row: dict[str, Any]) -> list[str]:
        names = (row["source"], label(row), row["hardware"], row["length"], row["b"], row["program"], row["recomputed"])
        return [str(name) for name in names]

    memory_lines = [
        [
            *describe(row),
            "OOM" if row["published"] is None else f"{row['published'] / 1e9:.1f}",
            f"{row['planned'] / 1e9:.1f}",
            ("refused" if row["is_refused"] else "ACCEPTED") if row["published"] is None else f"{row['error']:+.1%}",
        ]
        for row in memory
    ]
    time_lines = [
        [
            *describe(row),
            *(
                f"{row['value']:,}",
                f"{row['predicted']:,.0f}",
                f"{row['error']:+.1%}",
                "" if row["is_held_out"] else "yes",
            ),
        ]
        for row in time
    ]
    scaling_lines = [
        [
            *(row["source"], row["model"], f"{row['program']}{' float8' * bool(row['float8'])}"),
            *(f"{row['devices'][0]} to {row['devices'][1]}", f"{row['published']:.3f}", f"{row['predicted']:.3f}"),
            f"{row['error']:+.1%}",
        ]
        for row in results["scaling"]
    ]
    ooms = [row for row in memory if row["published"] is None]
    ran = [row for row in memory if row["published"] is not None]
    unseen = leave_out_seen(ran)
    right = sum(row["is_refused"] for row in ooms), sum(not row["is_refused"] for row in ran)
    source_lines = [
        [name, source["about"].strip(), source["assumed"].strip(), source["url"]]
        for name, source in results["sources"].items()
    ]
    columns = "source | model | hardware | length | b | program | recomputed |"
    return harness.page(
        "Published language models",
        "language_models.py",
        results["about"],
        f"**Memory**: {len(unseen)} peaks of sources that nothing was chosen by, error "
        f"{summarize(unseen)['all'][1]:.1%} in the median, within 15 % in {share_within(unseen, 0.15):.0%}. All {len(ran)} "
        f"peaks, error of the plan {summarize(memory)['all'][1]:.1%} in the median, within 15 % in "
        f"{share_within(memory, 0.15):.0%}; {right[0]} of {len(ooms)} that ran out of memory are refused, {right[1]} of "
        f"{len(ran)} that ran are accepted.\n"
        f"**Time**: {results['unfitted']['all']['rows']} speeds to which nothing is fitted, GPTs of published.yaml among them: "
        f"{results['unfitted']['all']['median']:.1%} in the median, within 15 % in "
        f"{results['unfitted']['all']['15%']:.0%}.\n\n"
        f"Memory has no fitted constant; what some programs keep was found by their own rows ({' and '.join(SEEN)}). "
        "The constants of time are those of timing.md. "
        "What the programs do follows from their sources or is assumed, by source:\n\n"
        + harness.table("source | printed | assumed | where", source_lines)
        + "\nMemory by source:\n\n"
        + by_source(memory)
        + "\nMemory by term: its share, and the error of rows in which it is a fifth or more.\n\n"
        + harness.table("term | share | mean error", term_shares(memory, "items"))
        + "\nGB, 1e9 bytes:\n\n"
        + harness.table(f"{columns} published | planned | error", memory_lines)
        + "\nSpeeds to which nothing is fitted, by kind; in range: in the range that a plan prints.\n\n"
        + kinds_table(results["unfitted"])
        + "\nSpeeds of which some constant was fitted to their source:\n\n"
        + kinds_table(results["fitted"])
        + "\nTime by source:\n\n"
        + by_source(time)
        + "\nTime by term:\n\n"
        + harness.table("term | share | mean error", term_shares(time, "seconds"))
        + "\nTokens per second and device:\n\n"
        + harness.table(f"{columns} published | predicted | error | fitted", time_lines)
        + "\nSpeed per device on more devices, over that on few:\n\n"
        + harness.table("source | model | program | devices | published | predicted | error", scaling_lines),
    )


def main() -> None:
    arguments = harness.flags("language_models", __doc__).parse_args()
    results = measure()
    parts = {"language models": ("planner.md", describe(results))}
    harness.write(arguments.output, results, markdown(results), parts=parts)
    for name, limit, parts in (("memory", 0.15, "items"), ("time", 0.25, "seconds")):
        rows = results[name]
        for source, (count, middle, worst) in summarize(rows).items():
            print(f"{name:6} {source:16} {count:3} rows, median {middle:.1%}, worst {worst:.1%}")
        print(f"{name:6} within {limit:.0%}: {share_within(rows, limit):.0%}")
        for term, share, error in term_shares(rows, parts):
            print(f"{name:6} {term:21} {share:>4} of the total, mean error where it is a fifth: {error}")
    for name in ("unfitted", "fitted"):
        for kind, row in results[name].items():
            print(
                f"{name:8} {kind:18} {row['rows']:3} rows, median {row['median']:.1%}, within 15% {row['15%']:.0%}, "
                f"in range {row['in range']:.0%}"
            )
    for row in results["scaling"]:
        few, many = row["devices"]
        print(f"{row['source']:15} {row['model']:14} {few} to {many} devices: {row['error']:+.1%}")


if __name__ == "__main__":
    main()
