"""Compare the memory that stepplan/memory.py plans with what stepplan/trace.py traces.

    make bench NAME=memory

Every model of the catalog, in float32 and bfloat16, activations kept and recomputed, at three micro-batches: one sample, and
those whose plan takes a quarter and nearly all of an 80 GB device; and 4 layers of width 1,024 of each architecture of decoders
that has a formula, whole and with adapters. Nothing is computed and no GPU is needed.

With `--only NAME ...` some models are traced again, and the rows of the others stay as they are in the results, which are
written after every model, so that what was interrupted goes on with those that are left.
"""

import itertools
import statistics
import tempfile
from collections.abc import Iterator

import harness
import torch
import transformers

from samestep.cut.layout import solve_layout
from samestep.recipe.catalog import TASKS, catalog_names, load
from samestep.recipe.recipe import Recipe
from stepplan import hardware
from stepplan.memory import model_from_recipe
from stepplan.trace import Trace, trace_recipe
from stepplan.workload import from_recipe

DEVICE = "a100-80"
SHARES = (0.25, 0.9)  # of the device, beside a single sample
MAX_SAMPLES = 4096  # samples: beyond it a step would be larger than any recipe's
PROMISED = 0.05  # largest error
OPTIONS = ("mixed_precision", "gradient_checkpointing", "attn_implementation")
DECODERS = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
)
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1408, "head_dim": 64},
}
"""Architecture -> fields of its configuration that no recipe has: such models are read from a folder."""
DECODERS += tuple(EXPERTS)
DECODER_WAYS = (("bf16", False, "sdpa"), ("bf16", True, "sdpa"), ("no", False, "sdpa"))
WIDE = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
WIDE |= {"intermediate_size": 2816, "vocab_size": 32000, "max_seq_length": 512, "max_position_embeddings": 4096}
WIDE |= {"tie_word_embeddings": False}
METHODS = {"full": {}, "LoRA": {"lora_rank": 16, "lora_alpha": 32}}
WAYS = [
    (precision, *way) for precision in ("no", "bf16") for way in ((False, "sdpa"), (True, "sdpa"), (False, "eager"))
]


def planned(
    recipe: Recipe, b: int, mixed_precision: str, gradient_checkpointing: bool, attn_implementation: str
) -> int:
    """Compute the formula's bytes for b samples in a forward, on one process."""
    workload = from_recipe(recipe, attention=attn_implementation)
    layout = solve_layout(num_processes=1, global_batch_size=b, per_device_train_batch_size=b)
    options = {"mixed_precision": mixed_precision, "gradient_checkpointing": gradient_checkpointing}
    return workload.memory(layout, **options).total


def distinct(names: list[str]) -> dict[str, Recipe]:
    """Map names to recipes, one for each shape of a model and its samples."""
    by_model = {}
    for recipe in (recipe for recipe in map(load, names) if recipe.is_planned):
        by_model.setdefault(model_from_recipe(recipe), recipe)
    assert len({recipe.task for recipe in by_model.values()}) == sum(
        cls.parts.shape is not None for cls in TASKS.values()
    )
    return {recipe.name: recipe for recipe in by_model.values()}


def micro_batch_sizes(recipe: Recipe, *way) -> list[int]:
    """List micro-batches: one sample, and the most whose plan fits each share of the device, below MAX_SAMPLES."""
    sizes = [1]
    for share in SHARES:
        room, b, more = share * hardware.parse(DEVICE).device.memory_bytes, 1, MAX_SAMPLES
        while more - b > 1:
            middle = (b + more) // 2
            b, more = (middle, more) if planned(recipe, middle, *way) <= room else (b, middle)
        sizes.append(b)
    return sorted(set(sizes))


def compare(name: str, recipe: Recipe, b: int, *options) -> dict:
    start, way = harness.clock(), dict(zip(OPTIONS, options, strict=True))
    trace: Trace = trace_recipe(recipe, b, **way)
    formula = planned(recipe, b, *options)
    states = trace.parameters + trace.gradients + trace.moments
    return {
        "recipe": name,
        **way,
        "b": b,
        "planned": formula,
        "traced": trace.peak,
        "forward": trace.forward,
        "backward": trace.backward,
        "optimizer_step": trace.optimizer_step,
        "error": formula / trace.peak - 1,
        "error_beside_states": (formula - states) / max(1, trace.peak - states) - 1,
        "seconds": harness.clock() - start,
    }


def count_models(results: dict) -> int:
    """Count the models, each once, whether it is trained whole or by adapters."""
    return len({row["recipe"].split()[0] for row in results["rows"]})


def describe(results: dict) -> str:
    """Say how far plans are from traces, for docs/planner.md."""
    errors = [abs(row["error"]) for row in results["rows"]]
    return (
        f"Memory is a formula. Of {count_models(results)} models, in {len(errors)} cases, it differs from what torch itself "
        "allocates (`--trace`) by\n"
        f"{statistics.median(errors):.1%} in the median, at most by {max(errors):.1%} "
        "([benchmarks/results/memory.md](../benchmarks/results/memory.md)).\n"
    )


def markdown(results: dict) -> str:
    rows, lines = results["rows"], []
    worst = max(rows, key=lambda row: abs(row["error"]))
    for row in rows:
        moment = max(("forward", "backward", "optimizer_step"), key=row.get).replace("_", " ")
        precision = {"no": "fp32"}.get(row["mixed_precision"], row["mixed_precision"])
        cells = [row["recipe"], precision, "yes" if row["gradient_checkpointing"] else "no"]
        cells += [row["attn_implementation"], row["b"]]
        cells += [f"{row['planned'] / 1e9:.3f}", f"{row['traced'] / 1e9:.3f}", moment]
        lines.append([*cells, f"{row['error']:+.1%}", f"{row['error_beside_states']:+.1%}"])
    columns = (
        "recipe | precision | recomputed | attention | b | planned GB | traced GB | fullest | error | beside the states"
    )
    return harness.page(
        "Planned beside traced memory",
        "memory.py",
        results["about"],
        f"{len(rows)} steps of {count_models(results)} models, traced in "
        f"{results['about']['seconds']:.0f} s on one core.\n\n"
        f"**Error of the plan: median {statistics.median(abs(row['error']) for row in rows):.1%}, worst "
        f"{abs(worst['error']):.1%}** ({worst['recipe']}, b = {worst['b']}).\n\n"
        "The plan is stepplan/memory.py's formula, the trace stepplan/trace.py's, which takes in what CUDA allocates "
        "otherwise. GB are 1e9 bytes.\n"
        f"Micro-batches b: one sample, and those planned to take {SHARES[0]:.0%} and {SHARES[1]:.0%} of {DEVICE}, "
        f"at most {MAX_SAMPLES - 1:,}.\n"
        "Beside the states: the error of all but parameters, gradients and moments.\n\n"
        f"{harness.table(columns, lines)}",
    )


def trace_model(name: str, recipe: Recipe | None) -> Iterator[dict]:
    """Trace the steps of a recipe of the catalog, or of an architecture of decoders, full and with adapters."""
    if recipe is None:
        with tempfile.TemporaryDirectory() as folder:
            shape = WIDE | {"architecture": name}
            if name in EXPERTS:
                transformers.AutoConfig.for_model(name, **WIDE, **EXPERTS[name]).save_pretrained(folder)
                shape = {"model_name_or_path": folder, "max_seq_length": WIDE["max_seq_length"]}
            for method, changes in METHODS.items():
                recipe = load("sft_small_cpu", shape | changes)
                for way, b in itertools.product(DECODER_WAYS, (2, 16)):
                    yield compare(f"{name} {method}", recipe, b, *way)
        return
    ways = [(precision, False, "sdpa") for precision in ("no", "bf16")]
    for way in WAYS if model_from_recipe(recipe).has_equal_layers else ways:
        for b in micro_batch_sizes(recipe, *way):
            yield compare(name, recipe, b, *way)


def main() -> None:
    models = distinct(catalog_names()) | dict.fromkeys(DECODERS)
    arguments = harness.flags("memory", __doc__, only=models).parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows: dict[str, list[dict]] = {}
    if set(arguments.only) < set(models):
        for row in harness.read(arguments.output).get("rows", []):
            rows.setdefault(row["recipe"].split()[0], []).append(row)
    for name in arguments.only:
        rows[name] = list(trace_model(name, models[name]))
        for row in rows[name]:
            print(f"{row['recipe']} b={row['b']} {[row[option] for option in OPTIONS]} {row['error']:+.1%}", flush=True)
        found = [row for model in models for row in rows.get(model, [])]
        seconds = sum(row["seconds"] for row in found)
        about = harness.about("make bench NAME=memory", ("torch", "transformers"), seconds=seconds)
        results, is_last = {"about": about, "rows": found}, name == arguments.only[-1]
        parts = {"memory": ("planner.md", describe(results))}
        harness.write(arguments.output, results, markdown(results), is_last, parts)
    if missing := [name for name in models if name not in rows]:
        print(f"not traced yet: --only {' '.join(missing)}")
    for row in found:
        if abs(row["error"]) > PROMISED:
            raise SystemExit(f"the plan of {row['recipe']} is off by {row['error']:+.1%}, more than {PROMISED:.0%}")


if __name__ == "__main__":
    main()
