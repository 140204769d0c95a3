"""How much sooner do recipes of today reach the losses of the classics? In one run, side by side, several seeds.

    # an hour on 2 cores, resumable
    make bench NAME=modern FLAGS='--nanogpt path/to/nanoGPT --train_file path/to/tinyshakespeare.txt'
    python benchmarks/modern.py --only gpt --seeds 1                                       # a pair that needs no files

shakespeare     nanoGPT's own train.py at its settings for a CPU, and gpt_modern_shakespeare_char_cpu
gpt             gpt2_small_cpu and gpt_modern_small_cpu, on Python's documentation
bert            bert_small_cpu and bert_modern_small_cpu, likewise

Of each seed both programs are trained to their ends, in turns of five seconds, in processes of their own that are stopped
(SIGSTOP) while the other one runs, so that a machine whose speed changes is the same for both.

- Time: of training alone, the number of steps times the mean step of a program's own log, without steps that a stop
  interrupted. Evaluations, imports and saving are left out on both sides.
- Held-out loss, at the end: shakespeare, over the same 111,539 characters of the last tenth, each predicted once, in blocks of
  64; gpt, that of the run's own evaluation, whose tokens are the same for both; bert, of masked tokens by the classic's
  held-out pairs and masks for both, although the modern one is trained on single segments with other masks.

A modern recipe reaches the classic's loss in its seconds if it ends no higher; its schedule ends at 0 there, so that earlier
losses are higher. A race that is finished is not run again: WORK/NAME-SEED.json holds it. Remove it to measure anew.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
import shakespeare
import torch
import torch.nn.functional as F
from harness import Program, ratios, spread

PAIRS = {
    "shakespeare": ("nanoGPT", "gpt_modern_shakespeare_char_cpu", 0.5),
    "gpt": ("gpt2_small_cpu", "gpt_modern_small_cpu", 0.6),
    "bert": ("bert_small_cpu", "bert_modern_small_cpu", 0.6),
}
"""Name -> the classic, the modern recipe, and the part of the classic's time that should do."""
TURN = 5.0  # seconds: most steps, of up to a second, are in one turn


def start(recipe: str, seed: int, work: Path, precision: str, threads: int, flags: list[str]) -> Program:
    """Start a recipe's program, stopped until its turn."""
    from samestep.recipe.catalog import load

    script = harness.ROOT / "scripts" / load(recipe).parts.script
    words = [*harness.launch(script, precision, "cpu.yaml", "--quiet"), "--recipe", recipe, "--seed", str(seed)]
    words += ["--output_dir", str(work / recipe), "--overwrite_output_dir", *flags]
    return Program(words, harness.ROOT, work / f"{recipe}.log", threads)


def start_nanogpt(seed: int, work: Path, train_file: Path, checkout: Path, threads: int) -> Program:
    """Start nanoGPT's train.py with another seed than the one that is written in it, stopped until its turn."""
    shakespeare.prepare_nanogpt(checkout, work, train_file)
    program = work / "nanogpt" / "train.py"
    text = program.read_text()
    assert "manual_seed(1337" in text, "nanoGPT's seed stands elsewhere"
    program.write_text(text.replace("manual_seed(1337", f"manual_seed({seed}"))
    return shakespeare.nanogpt(work, threads)


def last_loss(folder: Path) -> float:
    """Read the loss of a run's last evaluation."""
    return json.loads((folder / "all_results.json").read_text())["eval_loss"]


@torch.no_grad()
def masked_losses(folders: dict[str, Path], seed: int) -> dict[str, float]:
    """Compute the mean loss of masked tokens by models of both kinds, on the classic recipe's held-out pairs and masks."""
    from transformers import AutoTokenizer, BertForPreTraining, ModernBertForMaskedLM

    from samestep.data import sentence_pairs
    from samestep.recipe.catalog import load

    classic, modern, _ = PAIRS["bert"]
    tokenizers = [AutoTokenizer.from_pretrained(folders[name]).get_vocab() for name in (classic, modern)]
    assert tokenizers[0] == tokenizers[1], "losses of other vocabularies cannot be compared"
    _, held_out = sentence_pairs.build(load(classic, {"seed": seed}), None)
    old = BertForPreTraining.from_pretrained(folders[classic]).eval()
    new = ModernBertForMaskedLM.from_pretrained(folders[modern]).eval()
    sums, count = dict.fromkeys(folders, 0.0), 0
    for number in range(len(held_out)):
        pair = held_out.draw(0, number)
        tokens, places, labels = (torch.from_numpy(values) for values in held_out.mask(pair))
        kinds = (torch.arange(len(tokens)) >= len(pair.first) + 2).long()
        for name, logits in {
            classic: old(input_ids=tokens[None], token_type_ids=kinds[None]).prediction_logits,
            modern: new(input_ids=tokens[None]).logits,
        }.items():
            sums[name] += F.cross_entropy(logits[0, places].double(), labels, reduction="sum").item()
        count += len(labels)
    return {name: total / count for name, total in sums.items()}


def race(name: str, seed: int, arguments: Any) -> dict[str, Any]:
    """Train the classic and the modern one with a seed, in turns: {program: [seconds of training, held-out loss]}."""
    classic, modern, _ = PAIRS[name]
    threads, precision = arguments.threads, arguments.precision
    flags = arguments.flags.split()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if name == "shakespeare":
            train_file = arguments.train_file.resolve()
            checkout = arguments.nanogpt.resolve()
            flags += ["--train_file", str(train_file)]
            programs = {
                classic: start_nanogpt(seed, work, train_file, checkout, threads),
                modern: start(modern, seed, work, precision, threads, flags),
            }
        else:
            programs = {name: start(name, seed, work, precision, threads, flags) for name in (classic, modern)}
        harness.run_in_turns(programs.values(), TURN)
        folders = {name: work / name for name in programs}
        if name == "shakespeare":
            seconds = {
                classic: shakespeare.train_seconds(work, "nanoGPT", TURN),
                modern: harness.train_seconds(folders[modern], TURN),
            }
            losses = {classic: shakespeare.nanogpt_validation(work)[0]}
            losses[modern] = shakespeare.our_validation(work, modern)[0]
        else:
            seconds = {name: harness.train_seconds(folder, TURN) for name, folder in folders.items()}
            is_bert = name == "bert"
            losses = masked_losses(folders, seed) if is_bert else {name: last_loss(folders[name]) for name in folders}
    return {program: [seconds[program], losses[program]] for program in programs}


def main() -> None:
    parser = harness.flags("modern", __doc__, only=PAIRS, threads=True)
    parser.add_argument("--seeds", type=harness.positive, default=5, help="of each pair [5]")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--train_file", type=Path, help="tiny Shakespeare")
    parser.add_argument("--precision", choices=harness.PRECISIONS, default=harness.PRECISION, help="of our programs")
    parser.add_argument("--flags", default="", help="of our programs, to shorten them")
    parser.add_argument("--work", type=Path, default=harness.ROOT / "runs" / "modern", help="folder of finished races")
    arguments = parser.parse_args()
    if "shakespeare" in arguments.only and not (arguments.nanogpt and arguments.train_file):
        parser.error("shakespeare needs --nanogpt and --train_file; --only gpt bert needs neither")
    rows = harness.read_other_rows(arguments.output, "rows", "name", arguments.only)
    about = harness.about(
        "make bench NAME=modern",
        ("torch", "transformers", "accelerate"),
        arguments.threads,
        precision=arguments.precision,
        flags=arguments.flags,
    )
    arguments.work.mkdir(parents=True, exist_ok=True)
    for name in arguments.only:
        classic, modern, goal = PAIRS[name]
        races = []
        for seed in range(42, 42 + arguments.seeds):
            file = arguments.work / f"{name}-{arguments.precision}-{seed}.json"
            if not file.exists():
                file.write_text(json.dumps(race(name, seed, arguments)))
            races.append(json.loads(file.read_text()))
            print(name, seed, races[-1], file=sys.stderr, flush=True)
        row = {"name": name, "classic": classic, "modern": modern, "goal": goal}
        for number, value in enumerate(("seconds", "losses")):
            row[value] = {program: [race[program][number] for race in races] for program in (classic, modern)}
        rows.append(row)
        results = {"about": about, "rows": rows}
        parts, is_last = {"modern": ("optimizers.md", part(results))}, name == arguments.only[-1]
        harness.write(arguments.output, results, markdown(results), is_last, parts)


def describe(results: dict[str, Any]) -> str:
    """Write the table, and what is compared."""
    rows, about = [], results["about"]
    for row in results["rows"]:
        classic, modern = row["classic"], row["modern"]
        times = ratios(row["seconds"][modern], row["seconds"][classic])
        losses = {program: statistics.median(values) for program, values in row["losses"].items()}
        reached = "yes" if losses[modern] <= losses[classic] else "no"
        for program in (classic, modern):
            cells = [
                program,
                spread(row["losses"][program], ".4f"),
                f"{statistics.median(row['seconds'][program]):.0f}",
            ]
            is_modern = program == modern
            cells += [spread(times, ".2f") if is_modern else "1", f"{row['goal']:g}" if is_modern else ""]
            rows.append([*cells, reached if is_modern else ""])
    count = max(len(row["losses"][row["classic"]]) for row in results["rows"])
    flags = f" Shortened: {about['flags']}." if about["flags"] else ""
    return (
        f"{harness.table('program | held-out loss | training, s | / the classic | goal | reaches its loss', rows)}\n"
        f"Medians of {count} seeds (smallest to largest); ours in {'float32' if about['precision'] == 'no' else 'bf16'}."
        f"{flags}\n"
    )


def part(results: dict[str, Any]) -> str:
    return harness.part("modern.py", results["about"], describe(results))


def markdown(results: dict[str, Any]) -> str:
    return harness.page("Recipes of today beside the classics", "modern.py", results["about"], describe(results))


if __name__ == "__main__":
    main()
