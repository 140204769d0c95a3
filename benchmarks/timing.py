"""Predict published throughputs with stepplan/timing.py, and fit its constants to them.

    make bench NAME=timing

Every row of benchmarks/published.yaml is predicted with the constants as they are in stepplan/timing.py, and with constants
fitted to all rows but this one; but those of its machine (a publisher's numbers on one kind of device); but those of its
chip, whoever published them; but those of its source, one table of one program. The fit has the rows under `sharded`, too,
and those of benchmarks/language_models.yaml, but for sources that are held_out: to these nothing is ever fitted.
"""

import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import harness
import numpy as np
import yaml
from harness import table
from language_models import compare_scaling, find_held_out, read_speeds, summarize, term_shares

from samestep.cut.layout import solve_layout
from samestep.recipe.catalog import load
from stepplan import hardware, memory, timing, transformer
from stepplan.timing import CALIBRATION, Calibration, Software, StepTime, Work

PUBLISHED = harness.ROOT / "benchmarks" / "published.yaml"
DIGITS = 3  # of the constants in stepplan/timing.py
ROUNDS, MORE_ROUNDS = 25, 4  # of a fit: from the first guesses, and from the constants of all rows
MEDIAN, WORST = 0.15, 0.35  # what is promised of the two errors without the row
REMARKABLE = 0.2  # rows further off say why
SHARDED_WORST = 0.25  # what is promised of GPTs, most of them held out
START = Calibration(10.0, 10.0, 5.0, 10.0, 10.0, 3e-12, 5e-6, 0.9, 0.8, 0.8, 0.9, 0.02, 5e-3)
MEANING = {
    "traffic_eager": "bytes moved per byte saved, a kernel per operator",
    "traffic_scripted": "the same, fused in part by TorchScript",
    "traffic_compiled": "the same, fused by torch.compile or by hand",
    "traffic_channels_last": "the same, convolutional networks",
    "traffic_channels_first": "the same, channels first",
    "stall": "seconds per byte saved that no bandwidth shortens, convolutional networks",
    "launch": "seconds per kernel",
    "reachable_fp32": "part of the float32 peak that products reach",
    "reachable_link": "part of a link's bandwidth that collectives reach within a node",
    "reachable_network": "the same between nodes",
    "sustained": "part of that rate that matmuls of Hopper chips keep",
    "straggling": "spread of a step's time over devices, as a part of it",
    "loading": "seconds of a core per photograph",
}
KINDS = {
    "error": "fitted to it too",
    "without_row": "without the row",
    "without_machine": "without its machine",
    "without_chip": "without its chip",
    "without_source": "without its source",
}
CHIPS = {"v100": "V100", "a100": "A100", "h100": "Hopper", "h200": "Hopper"}  # others by their own names


@dataclasses.dataclass(frozen=True)
class Row:
    """A published throughput, ready to be predicted."""

    published: dict
    value: float  # samples per second
    batch: int
    step: tuple  # arguments of timing.step_time
    options: dict

    def predict(self, calibration: Calibration) -> StepTime:
        return timing.step_time(*self.step, **self.options, calibration=calibration)

    def ratio(self, calibration: Calibration) -> float:
        """Compute predicted over published throughput."""
        return self.predict(calibration).samples_per_second(self.batch) / self.value


def published_work(shape: dict, row: dict, software: dict) -> Work:
    """Make the work for a sample of a published row, as its software computes it.

    Transformers there save, per layer and sample, 34 T h + 5 heads T^2 bytes in pure 16-bit arithmetic, 66 and 9 in float32
    (Korthikanti et al., 2022, arXiv:2205.05198, section 4).
    """
    mixed_precision = row["mixed_precision"]
    kernels = {"kernels": software["kernels"], "attention_kernel": software.get("attention_kernel")}
    if "recipe" in shape:
        model = memory.model_from_recipe(load(shape["recipe"]))
        assert model.length == row["length"]
        return timing.count_work(dataclasses.replace(model, **kernels), mixed_precision)
    if "gpt2" in shape:
        model = transformer.gpt2(shape["gpt2"], row["length"], chunked_head=False)
        work = timing.count_work(dataclasses.replace(model, **kernels), mixed_precision)
        if software.get("is_pure"):  # 34 T h as above, less two masks of dropout
            work = dataclasses.replace(work, saved_bytes=32 * model.length * model.hidden_size * model.num_layers)
        return work
    size = {"num_parameters": shape["parameters"], "num_layers": shape["layers"]}
    if "flops" in shape:
        loaded = 1 if "cores" in row else 0
        saved = shape["saved_bytes"][mixed_precision]
        return Work(shape["flops"], saved, **size, kernels_per_layer=shape["kernels_per_layer"], num_photographs=loaded)
    vocab, h, layers, length = shape["vocabulary"], shape["hidden"], shape["layers"], row["length"]
    linear, square = (66, 9) if mixed_precision == "no" else (34, 5)
    return Work(
        transformer.bert_flops(vocab, h, shape["feed_forward"], layers, length, row["num_predicted"]),
        layers * (linear * length * h + square * shape["heads"] * length**2),
        **size,
        num_logits=row["num_predicted"] * vocab,
    )


def find_fitted(rows: list[Any]) -> list[Any]:
    """Find the rows whose sources are not held out."""
    sources = yaml.load(PUBLISHED.read_text(), yaml.CSafeLoader)["sources"]
    held_out = find_held_out() | {name for name, source in sources.items() if source.get("held_out")}
    return [row for row in rows if row.published["source"] not in held_out]


def read_others() -> list[Any]:
    """Read the other rows that constants are fitted to: GPTs and language models."""
    return find_fitted([*read(kind="sharded"), *read_speeds()])


def read(path: Path = PUBLISHED, kind: str = "rows") -> list[Row]:
    """Read published rows: `rows`, or the GPTs of the kind `sharded`."""
    published = yaml.load(path.read_text(), yaml.CSafeLoader)
    rows = []
    for row in published[kind]:
        machine = hardware.parse(row["hardware"])
        changes = {name: row[name] for name in ("memory_gb_per_s", "network_gb_per_s") if name in row}
        if "network_gb_per_s" in row:
            changes["network_per_device"] = False
        machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, **changes))
        layout = solve_layout(
            num_processes=machine.num_processes,
            per_device_train_batch_size=row["b"],
            gradient_accumulation_steps=row.get("k", 1),
        )
        software = published["software"][row["software"]]
        work = published_work(published["works"][row["work"]], row, software)
        about_model = ("attention_kernel", "is_pure")
        software = Software(**{name: value for name, value in software.items() if name not in about_model})
        step = work, layout, machine, row["mixed_precision"], software
        value = row["value"] / (row["length"] if row.get("unit") == "tokens" else 1)
        options = {"cores": row["cores"]} if "cores" in row else {}
        if kind == "sharded":
            value *= machine.num_processes
            options = {"sharded": row.get("sharded", True), "gradient_checkpointing": row["recomputed"]}
        rows.append(Row(row, value, layout.global_batch_size, step, options))
    return rows


def fit(rows: list[Any], start: Calibration, num_rounds: int) -> Calibration:
    """Fit constants that make the sum of |log(predicted / published)| small, by Gauss-Newton steps.

    In logarithms of the constants, each row weighted by 1 / sqrt(|error|), at most 1 / sqrt(0.05): a robust fit, which a
    few wrong rows do not move much.
    """
    names = [field.name for field in dataclasses.fields(Calibration)]

    def constants(logarithms: np.ndarray) -> Calibration:
        return Calibration(**dict(zip(names, np.exp(logarithms).tolist(), strict=True)))

    def errors(logarithms: np.ndarray) -> np.ndarray:
        calibration = constants(logarithms)
        return np.log([row.ratio(calibration) for row in rows])

    point = np.log(dataclasses.astuple(start))
    for _ in range(num_rounds):
        now = errors(point)
        slopes = np.stack([(errors(point + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(point))], axis=1)
        weights = np.maximum(0.05, np.abs(now)) ** -0.5
        damped = np.vstack([slopes * weights[:, None], 1e-2 * np.eye(len(point))])
        step = np.linalg.lstsq(damped, np.concatenate([-now * weights, np.zeros(len(point))]), rcond=None)[0]
        point = point + np.clip(step, -0.3, 0.3)
    return constants(point)


def rounded(calibration: Calibration) -> Calibration:
    """Round to the digits that stepplan/timing.py holds."""
    values = dataclasses.asdict(calibration).items()
    return Calibration(**{name: float(f"{value:.{DIGITS}g}") for name, value in values})


def groups(row: Row) -> dict[str, str]:
    """Name what else is left out with a row."""
    name = row.step[2].device.name
    chip = CHIPS.get(name.split("-")[0], name)
    return {"machine": row.published["machine"], "chip": chip, "source": row.published["source"]}


def measure(rows: list[Row]) -> dict:
    """Make the fit and every prediction."""
    others = read_others()
    fitted = fit(rows + others, START, ROUNDS)
    row_groups = [groups(row) for row in rows]
    fits = {
        group: fit(
            others + [row for row, row_group in zip(rows, row_groups, strict=True) if group not in row_group.items()],
            START,
            ROUNDS,
        )
        for group in sorted({group for row_group in row_groups for group in row_group.items()})
    }
    lines = []
    for index, (row, row_group) in enumerate(zip(rows, row_groups, strict=True)):
        alone = fit(rows[:index] + rows[index + 1 :] + others, fitted, MORE_ROUNDS)
        step = row.predict(CALIBRATION)
        lines.append(
            row.published
            | {
                "samples_per_second": row.value,
                "predicted": step.samples_per_second(row.batch),
                "error": row.ratio(CALIBRATION) - 1,
                "without_row": row.ratio(alone) - 1,
                **{f"without_{group[0]}": row.ratio(fits[group]) - 1 for group in row_group.items()},
                "seconds": dataclasses.asdict(step) | {"total": step.total, "share_of_peak": step.share_of_peak},
            }
        )
    about = harness.about("make bench NAME=timing", ("numpy",))
    sharded = predict_sharded()
    scaling = compare_scaling(sharded, ("source", "work"))
    return {
        "about": about,
        "fitted": dataclasses.asdict(fitted),
        "num_fitted": len(rows) + len(others),
        "rows": lines,
        "others": predict_without_source(rows, others),
        "sharded": sharded,
        "scaling": scaling,
    }


def predict_without_source(rows: list[Any], others: list[Any]) -> list[dict]:
    """Predict the fitted GPTs and language models by constants that are fitted without their source."""
    lines = []
    for source in dict.fromkeys(row.published["source"] for row in others):
        alone = fit([row for row in rows + others if row.published["source"] != source], START, ROUNDS)
        for row in others:
            if row.published["source"] == source:
                names = {name: row.published[name] for name in ("source", "hardware", "length")}
                lines.append(names | {"without_source": row.ratio(alone) - 1})
    return lines


def list_several_nodes(results: dict) -> list[dict]:
    """List the fitted rows of several nodes."""
    rows = results["rows"] + results["others"]
    return [row for row in rows if hardware.parse(row["hardware"]).num_nodes > 1]


def find_width(rows: list[dict], share: float = 0.9) -> float:
    """Find the width of the range that holds a share of the speeds, by constants fitted without their source."""
    widths = sorted(abs(math.log1p(row["without_source"])) for row in rows)
    return math.expm1(widths[math.ceil(share * len(widths)) - 1])


def predict_sharded() -> list[dict]:
    """Predict the GPTs, and say whether something was fitted to their source."""
    lines, rows = [], read(kind="sharded")
    fitted = {row.published["source"] for row in find_fitted(rows)}
    for row in rows:
        step = row.predict(CALIBRATION)
        predicted = row.published["value"] * row.ratio(CALIBRATION)
        seconds = dataclasses.asdict(step) | {"total": step.total, "share_of_peak": step.share_of_peak}
        changed = {"predicted": predicted, "error": row.ratio(CALIBRATION) - 1, "seconds": seconds}
        changed["is_held_out"] = row.published["source"] not in fitted
        lines.append(row.published | changed | {"num_devices": row.step[1].num_processes})
    return lines


def is_far(row: dict) -> bool:
    """Whether a prediction is so far off that the row must say why; without its source, constants are guesses."""
    return max(abs(row[kind]) for kind in ("error", "without_row", "without_machine", "without_chip")) > REMARKABLE


def summary(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Compute median and largest absolute error of each kind."""
    sizes = {kind: [abs(row[kind]) for row in rows] for kind in KINDS}
    return {kind: (statistics.median(values), max(values)) for kind, values in sizes.items()}


def by_machine(rows: list[dict]) -> dict[str, tuple[int, float, float]]:
    """Compute number of rows, median and largest absolute error of each machine, its rows unseen."""
    sizes = {}
    for row in rows:
        sizes.setdefault(row["machine"], []).append(abs(row["without_machine"]))
    return {machine: (len(values), statistics.median(values), max(values)) for machine, values in sorted(sizes.items())}


def describe(results: dict) -> str:
    """Say how far predicted speeds are from published ones, for docs/planner.md."""
    errors, others = summary(results["rows"]), [abs(row["error"]) for row in results["sharded"] if row["is_held_out"]]
    row, machine, source = (errors[f"without_{kind}"] for kind in ("row", "machine", "source"))
    return (
        f"Speed is predicted by arithmetic with {len(results['fitted'])} constants, which are fitted to "
        f"{results['num_fitted']} published throughputs of other\n"
        f"programs. The median error is {row[0]:.1%} of one that was left out of the fit, {machine[0]:.1%} of a machine that "
        f"was, {source[0]:.1%} of a\nsource that was; the worst is {source[1]:.1%}. "
        f"Of {len(others)} throughputs of GPTs, to which nothing is fitted, it is\n"
        f"{statistics.median(others):.1%}, the worst {max(others):.1%} "
        "([benchmarks/results/timing.md](../benchmarks/results/timing.md)).\n"
    )


def _label(row: dict) -> str:
    length = f", {row['length']}" if "length" in row else ""
    return f"{row['work']}{length}"


def markdown(results: dict) -> str:
    rows = results["rows"]
    errors = table(
        "constants | median | worst",
        [[KINDS[kind], f"{middle:.1%}", f"{largest:.1%}"] for kind, (middle, largest) in summary(rows).items()],
    )
    constants = table(
        "constant | value | meaning",
        [[f"`{name}`", f"{value:.{DIGITS}g}", MEANING[name]] for name, value in results["fitted"].items()],
    )
    predictions = table(
        [
            *"source | machine | work | hardware | precision | b | k | published | predicted".split(" | "),
            *(*KINDS.values(), "of peak"),
        ],
        [
            [
                row["source"],
                row["machine"],
                _label(row),
                row["hardware"],
                {"no": "fp32"}.get(row["mixed_precision"], row["mixed_precision"]),
                str(row["b"]),
                str(row.get("k", 1)),
                f"{row['samples_per_second']:,.1f}",
                f"{row['predicted']:,.1f}",
                *(f"{row[kind]:+.0%}" for kind in KINDS),
                f"{row['seconds']['share_of_peak']:.0%}",
            ]
            for row in rows
        ],
    )
    far = [row for row in rows if is_far(row)]
    far.sort(key=lambda row: -abs(row["without_machine"]))
    reasons = table(
        "source | work | hardware | without its machine | why",
        [[row["source"], _label(row), row["hardware"], f"{row['without_machine']:+.0%}", row["why"]] for row in far],
    )
    sharded = table(
        "source | held out | work | hardware | software | b | recomputed | published | predicted | error | of peak",
        [
            [
                *(
                    row["source"],
                    "yes" if row["is_held_out"] else "",
                    _label(row),
                    row["hardware"],
                    row["software"],
                    str(row["b"]),
                    f"{row['recomputed']:g}",
                ),
                *(f"{row['value']:,.0f}", f"{row['predicted']:,.0f}", f"{row['error']:+.1%}"),
                f"{row['seconds']['share_of_peak']:.0%}",
            ]
            for row in results["sharded"]
        ],
    )
    by_source = table(
        "source, unseen | rows | median | worst",
        [
            [name, str(count), f"{half:.1%}", f"{largest:.1%}"]
            for name, (count, half, largest) in summarize(rows, "without_source").items()
        ],
    )
    scaling = table(
        "source | work | devices | published | predicted | error",
        [
            [
                *(row["source"], row["work"], f"{row['devices'][0]} to {row['devices'][1]}"),
                *(f"{row['published']:.3f}", f"{row['predicted']:.3f}", f"{row['error']:+.1%}"),
            ]
            for row in results["scaling"]
        ],
    )
    by_name = by_machine(rows)
    middle = statistics.median(middle for _, middle, _ in by_name.values())
    machines = table(
        "machine, unseen | rows | median | worst",
        [[name, str(count), f"{half:.1%}", f"{largest:.1%}"] for name, (count, half, largest) in by_name.items()],
    )
    guesses = ", ".join(f"{value:g}" for value in dataclasses.astuple(START))
    far_apart = list_several_nodes(results)
    return harness.page(
        "Predicted beside published throughput",
        "timing.py",
        results["about"],
        f"{len(rows)} published numbers from {len(by_name)} machines, each predicted by stepplan/timing.py. "
        f"{len(results['fitted'])} constants are fitted, also to {results['num_fitted'] - len(rows)} rows of GPTs and language "
        "models:\nto all rows; to all but the predicted one; to all but those of its machine, "
        "its chip, its source.\nA constant that only the rows left out decide stays at a first guess: "
        f"{guesses}.\n\n"
        f"{errors}\n"
        f"Most rows are V100s. Every machine counted once, the median error is {middle:.1%}:\n\n"
        f"{machines}\n"
        "By source, the constants fitted without it:\n\n"
        f"{by_source}\n"
        f"Of {len(far_apart)} of these, and of GPTs and language models, on several nodes 9 of 10 lie within "
        f"{find_width(far_apart):.1%}.\n\n"
        "By term of a step's seconds: its share, and the error of rows in which it is a fifth or more.\n\n"
        f"{table('term | share | mean error', term_shares(rows, 'seconds'))}\n"
        f"{constants}\n"
        f"Samples per second. Error: predicted over published, less 1. Sources and what their programs do: "
        "benchmarks/published.yaml.\n\n"
        f"{predictions}\n"
        f"Further off than {REMARKABLE:.0%}:\n\n"
        f"{reasons}\n"
        "GPTs, most of them sharded (FSDP): tokens per second and device, predicted with the constants above; to those that "
        "are held out,\nnothing is fitted. Recomputed: share of the forward that the backward computes again. Llama: "
        "language_models.md.\n\n"
        f"{sharded}\n"
        "Speed per device on more devices, over that on few:\n\n"
        f"{scaling}",
    )


def main() -> None:
    arguments = harness.flags("timing", __doc__).parse_args()
    results = measure(read())
    parts = {"time": ("planner.md", describe(results))}
    harness.write(arguments.output, results, markdown(results), parts=parts)
    for source, (count, middle, worst) in summarize(results["rows"], "without_source").items():
        print(f"{source:16} {count:3} rows, without it: median {middle:.1%}, worst {worst:.1%}")
    for term, share, error in term_shares(results["rows"], "seconds"):
        print(f"{term:21} {share:>4} of the total, mean error where it is a fifth: {error}")
    for row in results["scaling"]:
        few, many = row["devices"]
        print(f"{row['source']:12} {row['work']:9} {few} to {many} devices: {row['error']:+.1%}")
    fitted = rounded(Calibration(**results["fitted"]))
    if fitted != CALIBRATION:
        print(f"stepplan/timing.py must hold {fitted}; then run this again")


if __name__ == "__main__":
    main()
