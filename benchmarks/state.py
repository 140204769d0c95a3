"""Which step do transformers' heads take in Trainer, TRL's trainers, and both made exact: a dated state.

    make bench NAME=state                        all of it, about half an hour; --only heads, or --only trainers

Every head of transformers that computes a loss is read, and checked as `samestep check-model --all` does it, if its
configuration allows small sizes: 7 samples, steps of 4 and of 3 samples, as 2 x 2 and 1 x 4 micro-batches. Heads for images
and texts get texts alone where these are their main input. TRL's trainers are compared with themselves in one micro-batch.
Writes benchmarks/results/state.* and docs/state-of-the-step.md.
"""

import collections
import concurrent.futures
import contextlib
import io
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "CI": "1"}
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import torch
import transformers
from common import fresh_accelerator

from samestep.contrib.heads import reading, table, tiny
from samestep.contrib.heads.comparison import CUTS, measure_distance
from samestep.contrib.heads.verdicts import VERDICTS, agrees
from samestep.errors import UsageError

PAGE = ROOT / "docs" / "state-of-the-step.md"
DOCS = "../../docs"
GUIDE = f"{DOCS}/your-trainer.md"
PARTS = ("heads", "trainers")
ROUNDING = 1e-5
"""Relative error of a step that is exact."""


@contextlib.contextmanager
def quiet():
    """Let libraries say nothing."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# TRL's trainers


def ask_trainer(name: str) -> dict[str, Any]:
    """Compare a trainer of TRL, plain and exact, with itself in one micro-batch a step."""
    import trl_runs

    def run(b: int, k: int, is_exact: bool) -> tuple[list[torch.Tensor], Any]:
        fresh_accelerator()
        with tempfile.TemporaryDirectory() as folder:
            trainer = trl_runs.make_trainer(name, Path(folder), b, k, is_exact, num_samples=7, learning_rate=0.0)
            trainer.train()
        return trainer.gradients.all, trainer

    trainer_class, _, kind, options = trl_runs.make_cases()[name]
    row: dict[str, Any] = {"trainer": name, "class": trainer_class.__name__, "data": kind, "options": options}
    cuts = [cut for cut in CUTS if kind != "judged" or cut[0] > 1]  # KTO's trainer wants two samples
    with quiet():
        whole, _ = run(4, 1, False)
        plain = [run(b, k, False)[0] for b, k in cuts]
        row["errors"] = [
            max(measure_distance(a, b) for a, b in zip(gradients, whole, strict=True)) for gradients in plain
        ]
        try:
            found = [run(b, k, True) for b, k in cuts]
        except UsageError as error:
            return row | {"refused": str(error)}
    row["exact_errors"] = [max(measure_distance(a, b) for a, b in zip(got, whole, strict=True)) for got, _ in found]
    return row | {"divisor": found[0][1].loss_divisor}


# ---------------------------------------------------------------------------------------------------------------------
# Results


def find_changes(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Find what is another verdict than in the state of other versions before; of the same versions, what was found then.

    >>> row = {"head": "A", "verdict": "exact", "exact_error": 0.0}
    >>> old = {"about": {"date": "1", "versions": {"x": "1"}}, "heads": [row, {"head": "B", "failed": "-", "read": "exact"}]}
    >>> new = {"about": {"date": "2", "versions": {"x": "2"}}, "heads": [row | {"verdict": "k times"}, row | {"head": "C"}]}
    >>> (found := find_changes(old, new))["added"], found["removed"], found["others"]
    (['C'], ['B'], [['A', 'exact; made exact: yes', 'k times; made exact: yes']])
    >>> find_changes(new | {"changes": found}, new) == found
    True
    """
    if old["about"]["versions"] == new["about"]["versions"]:
        return old.get("changes", {})
    before, now = ({row["head"]: row for row in results["heads"]} for results in (old, new))
    both = [name for name in now if name in before]
    found = {name: (describe(before[name]), describe(now[name])) for name in both}
    return {
        "since": {key: old["about"][key] for key in ("date", "versions")},
        "added": [name for name in now if name not in before],
        "removed": [name for name in before if name not in now],
        "others": [[name, *pair] for name, pair in found.items() if pair[0] != pair[1]],
    }


def describe(row: dict[str, Any]) -> str:
    """Describe a head's row in a few words: Trainer's step, and the exact one."""
    if "failed" in row:
        return f"not run, read: {row['read']}"
    is_exact = row.get("exact_error", 1.0) < ROUNDING
    return f"{row['verdict']}; made exact: {'yes' if is_exact else 'refused' if 'refusal' in row else 'nearly'}"


def main() -> None:
    import trl_runs

    parser = harness.flags("state", __doc__, only=PARTS)
    parser.add_argument("--heads", nargs="+", metavar="CLASS", help="of the heads only these")
    arguments = parser.parse_args()
    names = (arguments.heads or list(tiny.list_heads())) if "heads" in arguments.only else []
    rows = harness.read_other_rows(arguments.output, "heads", "head", names)
    rows += table.ask_heads(
        names, lambda row: print(f"{row['head']}: {row.get('verdict') or row['failed']}", flush=True)
    )
    for row in rows:
        if "read" not in row:  # of a file of an older release
            row["read"] = reading.read_head(tiny.find_class(row["head"])).verdict
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        cases = list(trl_runs.make_cases()) if "trainers" in arguments.only else []
        trainers = harness.read_other_rows(arguments.output, "trainers", "trainer", cases)
        trainers += pool.map(ask_trainer, cases)
    rows.sort(key=lambda row: (tiny.ORDER.index(row["kind"]), row["head"]))
    about = harness.about("make bench NAME=state", ("torch", "transformers", "accelerate", "trl"), 1)
    results = {"about": about, "heads": rows, "trainers": trainers}
    if before := harness.read(arguments.output):
        results["changes"] = find_changes(before, results)
    harness.write(arguments.output, results, markdown(results))
    if arguments.output == harness.RESULTS / "state":
        PAGE.write_text(markdown(results).replace(f"{DOCS}/", ""), encoding="utf-8")


def explain(refusal: str) -> str:
    """Say in a few words why a loss was refused."""
    kinds = {"padding": "padding", "balances experts": "a loss that balances experts", "draws at random": "noise"}
    found = [text for sign, text in kinds.items() if sign in refusal]
    return found[0] if found else "compares samples, or several counts"


def gather(rows: list[dict[str, Any]], *keys: str) -> list[list[Any]]:
    """List the values of `keys`, how many heads have them, and which.

    >>> gather([{"head": "A", "why": "x"}, {"head": "B", "why": "x"}], "why")
    [['x', 2, '`A`, `B`']]
    """
    groups = collections.defaultdict(list)
    for row in rows:
        groups[tuple(row[key] for key in keys)].append(f"`{row['head']}`")
    order = {name: place for place, name in enumerate(VERDICTS)}
    ordered = sorted(groups.items(), key=lambda group: order.get(group[0][0], 0))
    return [[*values, len(heads), ", ".join(heads)] for values, heads in ordered]


def write_changes(changes: dict[str, Any]) -> str:
    """Write what changed since the state of other versions."""
    if not changes:
        return ""
    versions = ", ".join(f"{name} {number}" for name, number in changes["since"]["versions"].items())
    lines = [f"- `{name}`: {old}. Now: {new}." for name, old, new in changes["others"]]
    for name, heads in (("New", changes["added"]), ("Gone", changes["removed"])):
        lines += [f"- {name}: {', '.join(f'`{head}`' for head in heads)}."] if heads else []
    text = "\n".join(lines) or "- Nothing."
    return f"## What changed\n\nSince the state of {changes['since']['date']} ({versions}):\n\n{text}\n\n"


def markdown(results: dict[str, Any]) -> str:
    done = [row for row in results["heads"] if "failed" not in row]
    failed = [row for row in results["heads"] if "failed" in row]
    counted = []
    for kind in dict.fromkeys(row["kind"] for row in results["heads"]):
        rows = [row for row in done if row["kind"] == kind]
        counts = collections.Counter(row["verdict"] for row in rows)
        ours = [row["exact_error"] for row in rows if "exact_error" in row]
        counted.append(
            [
                kind,
                sum(row["kind"] == kind for row in results["heads"]),
                len(rows),
                *(counts[name] for name in VERDICTS),
                sum(error < ROUNDING for error in ours),
                len(rows) - len(ours),
                f"{max(ours, default=0):.0e}",
            ]
        )
    names = ["exact", "k times", "1 / k", "mean of means", "first labels", "shared", "another"]
    columns = [
        "heads of",
        "read",
        "run",
        *(f"Trainer: {name}" for name in names),
        "`exact(Trainer)`: exact",
        "refused",
        "largest error",
    ]
    wrong = [row for row in done if row["verdict"] != VERDICTS[0]]
    lists = [harness.table("in Trainer | heads of | number | which", gather(wrong, "verdict", "kind")), ""]
    refused = [row | {"reason": explain(row["refusal"])} for row in done if "refusal" in row]
    lists += ["What `exact(Trainer)` refuses, in one line before the first step:", ""]
    lists += [harness.table("refused for | number | which", gather(refused, "reason")), ""]
    rough = [f"`{row['head']}` {row['exact_error']:.0e}" for row in done if row.get("exact_error", 0) >= ROUNDING]
    lists += [f"Accepted, and above {ROUNDING:.0e}: {', '.join(rough)}.\n"] if rough else []
    agreed = sum(agrees(row["read"], row["verdict"]) for row in done)
    others = [f"`{row['head']}` ({row['read']})" for row in done if not agrees(row["read"], row["verdict"])]
    only_read = [
        [f"`{row['head']}`", row["read"], "-" if row["failed"] == row["read"] else row["failed"].replace("|", "\\|")]
        for row in failed
    ]
    trainers = [
        [
            row["class"],
            row["data"],
            ", ".join(f"{key}={value}" for key, value in row["options"].items()) or "-",
            " / ".join(f"{error:.0e}" for error in row["errors"]),
            " / ".join(f"{error:.0e}" for error in row["exact_errors"]) if "exact_errors" in row else "refused",
            row.get("divisor") or explain(row["refused"]),
        ]
        for row in results["trainers"]
    ]
    title = "The state of the step"
    body = (
        f"{len(results['heads'])} heads of transformers were read, and {len(done)} of them run in its Trainer. Beside them "
        f"stand {len(trainers)} cases of TRL's trainers. All are compared with plain PyTorch, in micro-batches of one process. "
        f"`exact(...)` is [one line]({GUIDE}). A factor k in the gradient is hidden by AdamW and by clipping; the logged loss, "
        "SGD and the logged norm show it. A mean of means is hidden by nothing. Heads for images and texts, or sounds and "
        "texts, were given texts alone where these are their main input. Loops of other libraries: "
        f"[audited]({DOCS}/audited.md). How the libraries could mend theirs: [upstream]({DOCS}/upstream.md).\n\n"
        "## Heads in Trainer\n\n"
        f"{harness.table(columns, counted)}\n"
        "*k times*: the gradient is the sum of the k micro-batches' means. `**kwargs` takes the number of targets, "
        "and the head does not use it. *1 / k*: a sum, which Trainer divides by k. *Mean of means*: the last step, or steps of "
        "ragged texts, weigh micro-batches alike. *First labels*: Trainer counts the first label of a row, which nothing "
        "predicts; where it is -100, as of a prompt, nothing is wrong. *Shared*: "
        "Trainer divides rightly, and the model lets samples of a micro-batch see each other's padding, or normalises by the "
        "batch.\n\n"
        f"{chr(10).join(lists)}\n"
        f"What was read in the source is what was run for {agreed} of {len(done)} heads"
        f"{'; not for ' if others else ''}{', '.join(others)}.\n\n"
        f"{write_changes(results.get('changes', {}))}"
        "## Heads that were read only\n\n"
        "The verdict is what their source says, and was not run. A head that computes no loss takes targets all the same, and "
        f"Trainer cannot train it.\n\n{harness.table('head | read | why it was not run', only_read)}\n\n"
        "## TRL's trainers\n\n"
        f"{harness.table('trainer | data | options | error, 2 x 2 / 1 x 4 | made exact | mean over, or why not', trainers)}\n"
        "Error of the gradient of a step, the larger of two, beside the same trainer in one micro-batch a step. The last step "
        "has 3 samples: 2 and 1. KTO's trainer wants two samples in a micro-batch. Several processes: tests/test_exact.py.\n"
    )
    return harness.page(title, "state.py", results["about"], body)


if __name__ == "__main__":
    main()
