"""Records what a change of structure must leave as it is: the bits of trainings, and the words of commands.

    python tests/record.py OUT                  # OUT: a new folder; record.json is written into it
    python tests/record.py OUT --before OLD     # checkpoints of an earlier recording are resumed, beside OUT's own
    python tests/record.py --diff OLD NEW       # what differs between two recordings; 1 if anything does

The trainings are of every recipe that trains on a CPU, by default and reproducible, and of every optional way, each on one
process, on two, and on two that shard (FSDP2): two steps, a checkpoint, and two more from the checkpoint. Of each: losses,
norms and digests, SHA-256 of the tensors of both checkpoints, fingerprints of recipe and data, or what it is refused with. The
words are those of every --help, of `plan --json` of all recipes, and of `show-data`.

Both recordings must be made on one machine: kernels of other CPUs round otherwise.
"""

import argparse
import difflib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent / "helpers")]

from common import ROOT, TINIES, all_metrics, data_flags, launch_environment, write_corpus
from forked import Server

RANDOM = (
    "--model_name_or_path none --architecture llama --vocab_size 512 --hidden_size 64 --num_hidden_layers 2 "
    "--num_attention_heads 4 --num_key_value_heads 2 --intermediate_size 128 --max_position_embeddings 256 "
    "--tie_word_embeddings true --initializer_range 0.08"
)
CHATS = "--num_train_samples 100 --num_validation_samples 10"
# Recipe -> its script and flags: fewer images and chats, and random weights where a trained model is wanted.
RECIPES = {
    "bert_small_cpu": ("pretrain_bert", ""),
    "bert_modern_small_cpu": ("pretrain_bert", ""),
    "gpt2_small_cpu": ("pretrain_gpt2", ""),
    "gpt_modern_small_cpu": ("pretrain_gpt2", ""),
    "gpt2_shakespeare_char_cpu": ("pretrain_gpt2", ""),
    "finetune_small_cpu": ("finetune_classifier", ""),
    "finetune_reviews_cpu": ("finetune_classifier", "--num_labels 3"),
    "resnet_digits_cpu": ("train_image_classifier", ""),
    "captcha_cpu": ("train_captcha", "--num_train_samples 300 --num_validation_samples 10"),
    "sft_small_cpu": ("finetune_causal_lm", CHATS),
    "dpo_small_cpu": ("finetune_causal_lm", f"{CHATS} {RANDOM}"),
}
MODES = {"default": "--per_device_train_batch_size 5", "reproducible": "--reproducible 4"}
# Name -> program, and flags beside its tiny model's; B is the batch of the other trainings.
GPT2, CHAT, IMAGES = "pretrain_gpt2", "finetune_causal_lm", "train_image_classifier"
B, LORA = "--per_device_train_batch_size 2", "--lora_rank 2 --lora_alpha 4"
WAYS = {
    "top_k": (GPT2, f"{B} --communication", "top_k 0.01 of 4 workers"),
    "power_sgd": (GPT2, f"{B} --communication", "power_sgd of rank 4 from step 2"),
    "local_sgd": (GPT2, f"{B} --digest_steps none --communication", "local_sgd of 4 workers every 2 steps"),
    "diloco": (GPT2, f"{B} --digest_steps none --communication", "diloco of 2 workers every 2 steps"),
    "reduced_in_bf16": (GPT2, f"{B} --reduce_dtype bf16"),
    "folding": (GPT2, f"{B} --accumulation optimizer --second_moment unbiased"),
    "folding_sgd": (IMAGES, f"{B} --accumulation optimizer"),
    "noise": (GPT2, f"{B} --noise_scale_steps 1"),
    "growing": (GPT2, f"{B} --lr_scaling_rule none --batch_schedule", "seesaw from 1"),
    "tokens": (GPT2, "--per_device_train_tokens 200"),
    "recomputed": (GPT2, f"{B} --gradient_checkpointing"),
    "muon": (GPT2, f"{B} --optimizer muon --muon_learning_rate 0.02 --muon_momentum 0.9 --muon_weight_decay 0.1"),
    "eight_bit": (CHAT, f"{B} {CHATS} --optimizer adamw_8bit --hidden_size 64 --intermediate_size 128"),
    "float64": (GPT2, f"{B} --dtype float64"),
    "masked": (GPT2, f"{B} --document_mask true"),
    "dropout": ("pretrain_bert", f"{B} --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"),
    "lora": (CHAT, f"{B} {CHATS} {LORA}"),
    "qlora": (CHAT, f"{B} {CHATS} {LORA} --base_quantization nf4 --hidden_size 64 --intermediate_size 128"),
    "exact_batch_norm": (IMAGES, f"{B} --normalization batch --exact_batch_norm"),
    "batch_norm": (IMAGES, f"{B} --normalization batch"),
    "layer_decay": ("finetune_classifier", f"{B} --layerwise_lr_decay 0.8"),
    "store": (GPT2, f"{B} --checkpoint_store file://FOLDER/store"),
    "copies": (GPT2, f"{B} --replicate_checkpoints"),
    "background": (GPT2, f"{B} --async_checkpointing"),
    "auto": (GPT2, "--speed auto"),
}
# Layout -> processes, launch file, precision.
LAYOUTS = {
    "1": (1, "cpu.yaml", "no"),
    "1 bf16": (1, "cpu.yaml", "bf16"),
    "2": (2, "2xcpu.yaml", "no"),
    "2 sharded": (2, "fsdp2_2xcpu.yaml", "no"),
}
VOLATILE = re.compile("seconds|per_second|_time|timestamp|memory|slowest_process|started|version|utilization|mfu")
PLANNED_ON = ("1x3090", "8xa100-80")


def make_trainings(corpus: Path) -> dict[str, list[str]]:
    """Make the trainings of one layout: name -> program and its arguments."""
    made = {}
    for recipe, (program, flags) in RECIPES.items():
        data = data_flags(program, corpus)
        for mode, words in MODES.items():
            made[f"{recipe} {mode}"] = [program, "--recipe", recipe, *flags.split(), *data, *words.split()]
    for way, (program, flags, *last) in WAYS.items():
        made[f"way {way}"] = [program, *TINIES[program], *data_flags(program, corpus), *flags.split(), *last]
    return made


def record_trainings(server: Server, layout: str, folder: Path, corpus: Path, before: Path | None, only: str) -> dict:
    """Train on a layout; return name -> what each training left."""
    num_processes, launch_file, precision = LAYOUTS[layout]
    environment = launch_environment(ROOT / "accelerate_configs" / launch_file, "--mixed_precision", precision)
    trainings = {name: call for name, call in make_trainings(corpus).items() if re.search(only, f"{layout} {name}")}
    runs = folder / "runs" / layout.replace(" ", "_")
    runs.mkdir(parents=True)
    always = ["--global_batch_size", "12", "--speed", "safe"]
    always += [] if "fsdp2" in launch_file else ["--digest_steps", "1"]  # of whole tensors
    calls, earlier = [], {}
    for name, call in trainings.items():
        place = runs / name.replace(" ", "_")
        words = [word.replace("FOLDER", str(place)) for word in [call[0], *always, *call[1:]]]
        resumed = ["--resume_from_checkpoint", "latest", "--stop_after_step", "4"]
        calls.append([*words, "--output_dir", f"{place}/run", "--stop_after_step", "2"])
        calls.append([*words, "--output_dir", f"{place}/run", *resumed])
        if before and (before / place.relative_to(folder) / "run" / "checkpoint-2").exists():
            shutil.copytree(before / place.relative_to(folder) / "run", f"{place}/earlier")
            shutil.rmtree(f"{place}/earlier/checkpoint-4", ignore_errors=True)
            earlier[name] = [*words, "--output_dir", f"{place}/earlier", *resumed]
    printed = run_calls(server, runs, [*calls, *earlier.values()], num_processes, environment)
    recorded = {}
    for number, name in enumerate(trainings):
        place = runs / name.replace(" ", "_")
        ends = [text.rsplit("\nEND ", 1)[1].strip() for said in printed[2 * number : 2 * number + 2] for text in said]
        recorded[name] = {"ends": [end.replace(str(runs), "RUNS") for end in ends], **describe(place / "run")}
        if name in earlier:
            old = json.loads((before / "record.json").read_text())["trainings"][layout][name]
            now = describe(place / "earlier")
            recorded[name]["earlier"] = list(find_differences({key: old[key] for key in now}, now))
    return recorded


def run_calls(
    server: Server,
    folder: Path,
    calls: list[list[str]],
    num_processes: int = 1,
    environment: dict[str, str] | None = None,
) -> list[list[str]]:
    """Run calls one after the other in the same processes; return what each printed on each process, its end last."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls.json").write_text(json.dumps(calls))
    server.run(
        [str(folder), f"{folder}/calls.json"],
        num_processes,
        timeout=3600,
        environment=environment,
        module="run_record",
        can_repeat=False,
    )
    numbers = range(len(calls))
    return [[(folder / f"{number}.{rank}.txt").read_text() for rank in range(num_processes)] for number in numbers]


def describe(run: Path) -> dict:
    """Describe the folder of a run: its lines without times, SHA-256 of the tensors of its newest checkpoint."""
    if not (run / "metrics.jsonl").exists():
        return {}
    lines = [{key: value for key, value in line.items() if not VOLATILE.search(key)} for line in all_metrics(run)]
    tensors, followed = {}, {}
    for manifest in sorted(run.glob("checkpoint-*/manifest.json")):
        files = json.loads(manifest.read_text())["files"]
        tensors[manifest.parent.name] = {name: files[name]["sha256"] for name in files if name.endswith(".safetensors")}
        state = json.loads(manifest.with_name("state.json").read_text())
        followed = {key: value for key, value in state.items() if "fingerprint" in key}
    return {"lines": lines, "tensors": tensors, "fingerprints": followed}


def record_words(server: Server, folder: Path, only: str) -> dict[str, str]:
    """Return what commands print: NAME -> text."""
    from samestep.cli.commands import COMMANDS
    from samestep.recipe.catalog import catalog_names, load

    calls = {"samestep --help": ["samestep", "--help"], "list": ["samestep", "list"]}
    calls |= {f"{command} --help": ["samestep", command, "--help"] for command in COMMANDS}
    for name in catalog_names():
        script = load(name).parts.script.removesuffix(".py")
        calls[f"{script} {name} --help"] = [script, "--recipe", name, "--help"]
        calls[f"plan {name}"] = ["samestep", "plan", name, "--json"]
        calls |= {f"plan {name} on {on}": ["samestep", "plan", name, "--json", "--on", on] for on in PLANNED_ON}
        calls[f"plan {name} in words"] = [
            "samestep",
            "plan",
            name,
            "--on",
            PLANNED_ON[1],
            "--start",
            "2026-01-05T09:00",
        ]
    for name in ("sft_small_cpu", "dpo_small_cpu", "gpt2_small_cpu", "bert_small_cpu", "finetune_small_cpu"):
        calls[f"show-data {name}"] = ["samestep", "show-data", name]
    calls = {name: call for name, call in calls.items() if re.search(only, name)}
    printed = run_calls(server, folder / "words", list(calls.values()))
    return {name: text.replace(str(ROOT), "ROOT") for name, (text,) in zip(calls, printed, strict=True)}


def record_fingerprints() -> dict[str, str]:
    """Return the fingerprint of each recipe of the catalog."""
    from samestep.recipe.catalog import catalog_names, load

    return {name: load(name).fingerprint for name in catalog_names()}


def find_differences(old: object, new: object, place: str = "") -> Iterator[str]:
    """Yield a line for each value that differs between two recordings."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in (old.keys() | new.keys()) - {"earlier"}:
            if key in old and key in new:
                yield from find_differences(old[key], new[key], f"{place} > {key}")
            else:
                yield f"{place} > {key}: only in the {'old' if key in old else 'new'} one"
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from find_differences(*pair, f"{place} > {number}")
    elif isinstance(old, str) and isinstance(new, str) and old != new:
        yield from (
            f"{place}: {line}" for line in difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
        )
    elif old != new:
        yield f"{place}: {old!r} -> {new!r}"


def record(out: Path, before: Path | None, only: str) -> dict:
    """Record all whose name matches; `out` is a new folder."""
    out.mkdir(parents=True)
    recorded: dict[str, object] = {"fingerprints": record_fingerprints(), "trainings": {}}
    with Server("run_record", ()) as server:
        corpus = write_corpus(out)
        recorded["words"] = record_words(server, out, only)
        for layout in LAYOUTS:
            recorded["trainings"][layout] = record_trainings(server, layout, out, corpus, before, only)
            (out / "record.json").write_text(json.dumps(recorded, indent=1) + "\n")
    return recorded


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--before", type=Path, help="a folder of an earlier recording, whose checkpoints are resumed")
    parser.add_argument("--only", default="", help="regular expression: record what has it in its name")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("OLD", "NEW"))
    arguments = parser.parse_args()
    if arguments.diff:
        old, new = (json.loads((folder / "record.json").read_text()) for folder in arguments.diff)
        differences = sorted(find_differences(old, new))
        print(*differences[:200], f"{len(differences)} differences", sep="\n")
        return bool(differences)
    recorded = record(arguments.out.resolve(), arguments.before and arguments.before.resolve(), arguments.only)
    failed = 0
    for layout, trainings in recorded["trainings"].items():
        refused = [
            f"{name}: {parts['ends'][0]}"
            for name, parts in trainings.items()
            if "checkpoint-4" not in parts.get("tensors", ())
        ]
        other = [line for name, parts in trainings.items() for line in parts.get("earlier", ())]
        print(
            f"{layout}: {len(trainings) - len(refused)} trained, {len(refused)} did not", *refused, *other, sep="\n  "
        )
        failed += len(other)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
