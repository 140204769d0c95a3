"""Sharded weights (FSDP2) beside whole ones, on two and three CPU processes: gradient, memory beside its plan, loading.

    make bench NAME=sharding

- gradient: of one step of 12 samples of 128 tokens, in micro-batches, as the scripts take it; its distance from the gradient of
  whole weights in float32, relative to it. Biases of keys are left out: attention does not depend on them, so that their
  gradients are rounding. Under bf16 the measure is how far whole weights are from float32 there, the mean of one and of three
  micro-batches.
- memory: the most that a micro-batch's forward and backward allocate over what is there before them (parameters, gradients and
  moments), from torch's profiler, without gloo's own copies; the process that needs most, beside stepplan/memory.py.
- loading: of a Llama of random weights, 2 GB in float32, from files in bfloat16, until each process has its part: read whole by
  each process and then divided, and by rows (`samestep.training.weight_files`). The most memory of each process over what it
  had before, added up, in copies of the model: its own, and with pages of the files that are mapped, which the system may take
  back. All processes must then have the same bits both ways.
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import harness
import torch

sys.path.insert(0, str(harness.ROOT / "tests" / "helpers"))
os.environ["SHARDED_LENGTH"] = "128"  # twice that of the tests: what formulas leave out weighs less

from common import launch_environment
from forked import Server
from run_loading import FIELDS, make_changes
from run_sharded import plan_more
from transformers import LlamaConfig, LlamaForCausalLM

PROMISED = 0.07  # largest error of the plan
TIMEOUT = 3000  # seconds of all cases on one number of processes
SHAPES = {"gpt2": {"num_layers": 5, "vocab_size": 1000}, "bert": {"num_layers": 5, "vocab_size": 4000}}
WAYS = [("no", "fp32", False), ("bf16", "bf16", False), ("bf16", "bf16", True), ("bf16", "fp32", False)]
"""Precision, type in which weights are gathered, whether activations are recomputed."""


LLAMA = {"vocab_size": 32000, "hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 14}
LLAMA |= {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 256}
MOST_COPIES = 1.3
"""Memory of all processes together that reading by rows takes at most, in copies of the model, with mapped pages."""


def make_cases(num_processes: int) -> dict[str, dict]:
    """Map names to the arguments of `run_sharded.measure`; of one process: whole weights."""
    cases = {}
    for kind, shape in SHAPES.items():
        if num_processes == 1:
            for precision, k in (("no", 1), ("bf16", 1), ("bf16", 3)):
                case = {"kind": kind, "precision": precision, "gather": "whole", "k": k, "shape": shape}
                cases[f"{kind} {precision} {k}"] = case
            continue
        for precision, gather, recomputed in WAYS:
            case = {"kind": kind, "precision": precision, "gather": gather, "k": 2, "shape": shape}
            cases[f"{kind} {precision} {gather} {recomputed}"] = case | {"recomputed": recomputed}
    return cases


def flatten(result: dict) -> torch.Tensor:
    """Join a gradient's tensors, but for keys' biases."""
    gradients = result["gradient"]
    return torch.cat(
        [gradients[name].double().flatten() for name in sorted(gradients) if not name.endswith("key.bias")]
    )


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def compare(whole: dict[str, dict], sharded: list[dict[str, dict]]) -> list[dict]:
    """Make a row of each case: distances of the gradient, bytes planned and measured."""
    rows = []
    for name, case in make_cases(len(sharded)).items():
        start = case["kind"]
        exact = flatten(whole[f"{start} no 1"])
        usual = [distance(flatten(whole[f"{start} bf16 {k}"]), exact) for k in (1, 3)]
        planned = plan_more(len(sharded), **case)
        measured = max(results[name]["peak"] for results in sharded)
        rows.append(
            {
                **{key: value for key, value in case.items() if key not in ("shape", "k")},
                **case["shape"],
                "num_processes": len(sharded),
                "distance": distance(flatten(sharded[0][name]), exact),
                "distance_of_whole": statistics.mean(usual) if case["precision"] == "bf16" else None,
                "planned": planned,
                "measured": measured,
                "error": planned / measured - 1,
            }
        )
    return rows


def compare_loading(folder: Path) -> list[dict]:
    """Load weights whole and by rows on 2 and 3 processes; make a row of each.

    Raises:
        SystemExit: their bits differ.
    """
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).save_pretrained(folder / "base", max_shard_size="300MB")
    environment = launch_environment(harness.ROOT / "accelerate_configs" / "2xcpu.yaml")
    rows, digests = [], {}
    with Server("run_loading", libraries=(), is_cpu=False) as server:
        for num_processes in (2, 3):
            for reads_shards in (False, True):
                case = {"changes": make_changes(folder / "base"), "reads_shards": reads_shards}
                server.run(
                    [str(folder), json.dumps({"": case})], num_processes, timeout=TIMEOUT, environment=environment
                )
                files = [folder / f"{rank}.json" for rank in range(num_processes)]
                found = [json.loads(file.read_text(encoding="utf-8"))[""] for file in files]
                assert all(each["files"] == reads_shards for each in found)
                if any(each["digests"] != digests.setdefault("digests", each["digests"]) for each in found):
                    raise SystemExit("weights that are read by rows are not those that are loaded whole")
                own, mapped = (sum(each["more"][name] for each in found) for name in FIELDS)
                row = {"num_processes": num_processes, "reads_shards": reads_shards, "copy": found[0]["copy"]}
                rows.append(row | {"own": own, "mapped": mapped, "seconds": max(each["seconds"] for each in found)})
    return rows


def describe_loading(rows: list[dict]) -> str:
    """Write the table of loading, and what it says."""
    lines = []
    for row in rows:
        copies = (row["own"] / row["copy"], (row["own"] + row["mapped"]) / row["copy"])
        cells = [row["num_processes"], "by rows" if row["reads_shards"] else "whole"]
        lines.append([*cells, *(f"{number:.2f}" for number in copies), f"{row['seconds']:.1f}"])
    size = f"{rows[0]['copy'] / 1e9:.2f} GB"
    return (
        f"Loading a model of {size} in float32 from files in bfloat16: the most memory of all processes together, in copies of "
        "the model. Both ways give the same bits.\n\n"
        + harness.table("processes | read | copies of their own | with mapped pages of the files | seconds", lines)
    )


def markdown(results: dict) -> str:
    rows, lines = results["rows"], []
    for row in rows:
        cells = [
            f"{row['kind']}, {row['num_layers']} layers",
            row["num_processes"],
            row["precision"].replace("no", "fp32"),
        ]
        cells += [row["gather"], "yes" if row["recomputed"] else "no", f"{row['distance']:.1e}"]
        cells += [f"{row['distance_of_whole']:.1e}" if row["distance_of_whole"] else "-"]
        cells += [f"{row['planned'] / 1e6:.2f}", f"{row['measured'] / 1e6:.2f}", f"{row['error']:+.1%}"]
        lines.append(cells)
    whole = [row for row in rows if row["distance_of_whole"] is None]
    half = [row["distance"] / row["distance_of_whole"] for row in rows if row["distance_of_whole"]]
    worst = max(rows, key=lambda row: abs(row["error"]))
    return harness.page(
        "Sharded beside whole weights",
        "sharding.py",
        results["about"],
        f"**In float32 the gradient is that of whole weights to {max(row['distance'] for row in whole):.0e}. Under bf16 it is "
        f"{min(half):.2f} to {max(half):.2f} times as far from float32's as whole weights under bf16 are. The plan of a "
        f"process's memory errs by {statistics.median(abs(row['error']) for row in rows):.1%} in the median, "
        f"{abs(worst['error']):.1%} at the worst.**\n\n"
        "Gradient: distance from that of whole weights in float32; whole: the distance of whole weights under bf16. MB are 1e6 "
        "bytes, of what a micro-batch needs over parameters, gradients and moments.\n\n"
        + harness.table(
            "model | processes | precision | gathered | recomputed | gradient | whole | planned MB | measured MB | error",
            lines,
        )
        + "\n"
        + describe_loading(results["loading"]),
    )


def main() -> None:
    arguments = harness.flags("sharding", __doc__).parse_args()
    environment = launch_environment(harness.ROOT / "accelerate_configs" / "2xcpu.yaml")
    measured = {}
    with tempfile.TemporaryDirectory() as name, Server("run_sharded", libraries=(), is_cpu=False) as server:
        for num_processes in (1, 2, 3):
            folder = Path(name) / str(num_processes)
            folder.mkdir()
            words = [str(folder), json.dumps(make_cases(num_processes))]
            server.run(words, num_processes, timeout=TIMEOUT, environment=environment)
            measured[num_processes] = [torch.load(folder / f"{rank}.pt") for rank in range(num_processes)]
    with tempfile.TemporaryDirectory() as name:
        loading = compare_loading(Path(name))
    rows = [row for n in (2, 3) for row in compare(measured[1][0], measured[n])]
    about = harness.about("make bench NAME=sharding", ("torch", "accelerate", "transformers"), threads=1)
    results = {"about": about, "rows": rows, "loading": loading}
    harness.write(arguments.output, results, markdown(results))
    if (worst := max(abs(row["error"]) for row in rows)) > PROMISED:
        raise SystemExit(f"the plan is off by {worst:.1%}, more than {PROMISED:.0%}")
    most = max((row["own"] + row["mapped"]) / row["copy"] for row in loading if row["reads_shards"])
    if most > MOST_COPIES:
        raise SystemExit(f"reading by rows takes {most:.2f} copies of the model, more than {MOST_COPIES}")


if __name__ == "__main__":
    main()
