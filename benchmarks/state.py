"""Which step do transformers' heads take in Trainer, TRL's trainers, and both made exact: a dated state.

    make bench NAME=state                        all of it, about 15 minutes; --only heads, or --only trainers

Every head that transformers lists for texts is checked as `samestep check-model` does it, if its configuration allows small
sizes: 7 samples of different lengths, steps of 4 and of 3 samples, as 2 x 2 and 1 x 4 micro-batches. TRL's trainers are
compared with themselves in one micro-batch. Writes benchmarks/results/state.* and docs/state-of-the-step.md.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import os
import re
import signal
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

from samestep.contrib.heads import tiny
from samestep.contrib.heads.comparison import (
    CUTS,
    EXACT,
    FIRST_LABELS,
    MEAN_OF_MEANS,
    OTHER,
    TIMES_K,
    NotMeasuredError,
    compare,
    measure_distance,
)
from samestep.errors import UsageError

PAGE = ROOT / "docs" / "state-of-the-step.md"
GUIDE = "../../docs/your-trainer.md"
PARTS = ("heads", "trainers")
ROUNDING = 1e-5
"""Relative error of a step that is exact."""
SECONDS = 120  # for a head
VERDICTS = (EXACT, TIMES_K, MEAN_OF_MEANS, FIRST_LABELS, OTHER)


# ---------------------------------------------------------------------------------------------------------------------
# Heads in Trainer


@contextlib.contextmanager
def quiet():
    """Let libraries say nothing."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def end(*_: Any) -> None:
    raise TimeoutError(f"more than {SECONDS} seconds")


def ask_head(name: str) -> dict[str, Any]:
    """Compare a head; `failed` is why it could not be."""
    row: dict[str, Any] = {"head": name, "kind": tiny.list_heads()[name][0]}
    signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        with quiet():
            head = tiny.find_head(name)
            found = dataclasses.asdict(compare(head.build, head.kind))
        row |= {key: value for key, value in found.items() if value not in ("", None)}
    except (Exception, NotMeasuredError) as error:
        kind = "" if isinstance(error, NotMeasuredError) else f"{type(error).__name__}: "
        row["failed"] = f"{kind}{error}".strip().splitlines()[0][:160]
    signal.alarm(0)
    return row


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


def main() -> None:
    import trl_runs

    parser = harness.flags("state", __doc__, only=PARTS)
    parser.add_argument("--heads", nargs="+", metavar="CLASS", help="of the heads only these")
    arguments = parser.parse_args()
    heads = tiny.list_heads()
    names = arguments.heads or sorted(heads) if "heads" in arguments.only else []
    rows = harness.read_other_rows(arguments.output, "heads", "head", names)
    with concurrent.futures.ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        rows += pool.map(ask_head, names)
        cases = list(trl_runs.make_cases()) if "trainers" in arguments.only else []
        trainers = harness.read_other_rows(arguments.output, "trainers", "trainer", cases)
        trainers += pool.map(ask_trainer, cases)
    rows.sort(key=lambda row: (list(tiny.KINDS).index(row["kind"]), row["head"]))
    about = harness.about("make bench NAME=state", ("torch", "transformers", "accelerate", "trl"), 1)
    results = {"about": about, "heads": rows, "trainers": trainers}
    harness.write(arguments.output, results, markdown(results))
    if arguments.output == harness.RESULTS / "state":
        PAGE.write_text(markdown(results).replace(GUIDE, Path(GUIDE).name), encoding="utf-8")


def explain(refusal: str) -> str:
    """Say in a few words why a loss was refused."""
    kinds = {"padding": "padding", "balances experts": "a loss that balances experts", "draws at random": "noise"}
    found = [text for sign, text in kinds.items() if sign in refusal]
    return found[0] if found else "compares samples, or several counts"


def markdown(results: dict[str, Any]) -> str:
    done = [row for row in results["heads"] if "failed" not in row]
    failed = [row for row in results["heads"] if "failed" in row]
    table = []
    for kind in dict.fromkeys(row["kind"] for row in results["heads"]):
        rows = [row for row in done if row["kind"] == kind]
        counts = collections.Counter(row["verdict"] for row in rows)
        ours = [row["exact_error"] for row in rows if "exact_error" in row]
        table.append(
            [
                kind,
                len(rows),
                *(counts[name] for name in VERDICTS),
                sum(error < ROUNDING for error in ours),
                len(rows) - len(ours),
                f"{max(ours, default=0):.0e}",
            ]
        )
    names = ["exact", "k times", "mean of means", "first labels", "another"]
    columns = [
        "heads of",
        "run",
        *(f"Trainer: {name}" for name in names),
        "`exact(Trainer)`: exact",
        "refused",
        "largest error",
    ]
    lists = []
    for name in VERDICTS[1:]:
        heads = [f"`{row['head']}`" for row in done if row["verdict"] == name]
        lists += [f"**In Trainer: {name}** ({len(heads)}): {', '.join(heads)}.\n"] if heads else []
    refused = collections.defaultdict(list)
    for row in done:
        if "refusal" in row:
            refused[explain(row["refusal"])].append(f"`{row['head']}`")
    lists += [f"**Refused for {reason}** ({len(heads)}): {', '.join(heads)}.\n" for reason, heads in refused.items()]
    rough = [f"`{row['head']}` {row['exact_error']:.0e}" for row in done if row.get("exact_error", 0) >= ROUNDING]
    lists += [f"**Accepted, and above {ROUNDING:.0e}**: {', '.join(rough)}.\n"] if rough else []
    reasons = collections.Counter(re.sub(r"[\d,.]+", "N", row["failed"])[:90] for row in failed)
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
        f"{len(done)} heads of transformers were run in its Trainer, and {len(trainers)} cases of TRL's trainers, beside plain "
        f"PyTorch, in micro-batches of one process. `exact(...)` is [one line]({GUIDE}). A factor k in the gradient is "
        "hidden by AdamW and by clipping; the logged loss, SGD and the logged norm show it. A mean of means is hidden by "
        f"nothing. How the libraries could mend them: [upstream]({GUIDE}#what-libraries-could-do).\n\n"
        "## Heads in Trainer\n\n"
        f"{harness.table(columns, table)}\n"
        "*k times*: the gradient is the sum of the micro-batches' means, k of them: `**kwargs` takes the number of targets, "
        "and the head does not use it. *Mean of means*: the last step, or steps of ragged texts, weigh micro-batches alike. "
        "*First labels*: Trainer counts the first label of a row, which nothing predicts; where it is -100, as of a prompt, "
        "nothing is wrong.\n\n"
        f"{chr(10).join(lists)}\n"
        f"Not run: {len(failed)} heads, whose configuration has no small form here, or which want inputs that texts are not: "
        f"{'; '.join(f'{reason} ({count})' for reason, count in reasons.most_common(6))}; others.\n\n"
        "## TRL's trainers\n\n"
        f"{harness.table('trainer | data | options | error, 2 x 2 / 1 x 4 | made exact | mean over, or why not', trainers)}\n"
        "Error of the gradient of a step, the larger of two, beside the same trainer in one micro-batch a step. The last step "
        "has 3 samples: 2 and 1. KTO's trainer wants two samples in a micro-batch. Several processes: tests/test_exact.py.\n"
    )
    return harness.page(title, "state.py", results["about"], body)


if __name__ == "__main__":
    main()
