"""Tries odd values for every field that can be set, and odd files and programs: each is refused in one line, or it runs.

A part of `make chaos`.

- fields: of recipes, settings of runs, device files and models' configurations, by flag and by file, and files that are none
  of them (tests/helpers/odd_inputs.py draws them from the classes themselves).
- others: what others wrote: devices, pipes and the like in each place where a file is read, contents of such files, chat
  templates, and caches that cannot be written.
- runs: lines, settings and checkpoints' states in the folder of a run, whatever reads them (tests/helpers/odd_runs.py).
- requests: what a client sends to the page of `watch`. Its answer must be one of HTTP, short where it is a refusal, and the
  next request must be answered.

Each case runs in a process of its own. It must end with 0, or with 2 and lines that begin with ERROR, the latter in 20 seconds
of a processor (runs and requests: 5 seconds whatever it does); in 2 GiB more than the libraries take (1 GiB); in no signal.
Writes benchmarks/results/bounds.*; `--only runs` leaves the rows of other parts as they are.
"""

import collections
import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
os.environ["HF_HUB_OFFLINE"] = "1"

import harness
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy
from odd_inputs import BOUNDED, CASES, Answer, Case, answer
from odd_runs import REQUEST_CASES, RUN_CASES

PARTS = {
    "fields": (CASES, 1.0),
    "others": (BOUNDED, 0.2),
    "runs": (RUN_CASES, 0.6),
    "requests": (REQUEST_CASES, 0.2),
}
"""Part -> what is drawn, and the share of --cases that it takes."""
MAX_CHARACTERS = 2000  # characters of a case and of what it wrote, in the result


def try_all(cases: SearchStrategy, num_cases: int, seed: int) -> list[tuple[Case, Answer]]:
    """Draw cases, try each, and return the cases with their answers."""
    outcomes: list[tuple[Case, Answer]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases)
    def try_case(case: Case) -> None:
        outcomes.append((case, answer(case)))
        if outcomes[-1][1].problem:
            print(f"{outcomes[-1][1].problem}: {str(case)[:MAX_CHARACTERS]}", file=sys.stderr, flush=True)

    try_case()
    return outcomes


def summary(part: str, outcomes: list[tuple[Case, Answer]]) -> list[dict]:
    """Sum up the answers of a part, in a row for each kind of case."""
    groups = collections.defaultdict(list)
    for case, outcome in outcomes:
        groups[case.kind].append(outcome)
    return [
        {
            "part": part,
            "kind": kind,
            "cases": len(answers),
            "refused": sum(outcome.code == 2 for outcome in answers),
            "accepted": sum(outcome.code == 0 for outcome in answers),
            "slowest_refusal_seconds": max((outcome.seconds for outcome in answers if outcome.code == 2), default=0.0),
            "slowest_seconds": max(outcome.seconds for outcome in answers),
            "most_memory_gib": max(outcome.memory for outcome in answers) / 2**30,
            "problems": sum(bool(outcome.problem) for outcome in answers),
        }
        for kind, answers in sorted(groups.items())
    ]


def markdown(results: dict) -> str:
    rows, problems, about = results["rows"], results["problems"], results["about"]
    total = {name: sum(row[name] for row in rows) for name in ("cases", "refused", "accepted", "problems")}
    total |= {name: max(row[name] for row in rows) for name in rows[0] if name.startswith(("slowest", "most"))}
    lines = [
        [
            *(row["kind"], row["cases"], row["refused"], row["accepted"], f"{row['slowest_refusal_seconds']:.2f} s"),
            *(f"{row['slowest_seconds']:.2f} s", f"{row['most_memory_gib']:.2f} GiB", row["problems"]),
        ]
        for row in [*rows, {"kind": "**all**"} | total]
    ]
    columns = "odd is a | cases | refused | accepted | slowest refusal | slowest | most memory | problems"
    problem_lines = "".join(f"- {problem['problem']}: `{problem['case'][:300]}`\n" for problem in problems)
    return harness.page(
        "Odd values for every field",
        "bounds.py",
        about,
        f"{harness.table(columns, lines)}\n"
        "Memory: beyond that of the imported libraries. Slowest: also of what is accepted.\n\n"
        f"{problem_lines}{chr(10) if problem_lines else ''}"
        f"Seed {about['seed']}, {sum(about['minutes'].values()):.0f} minutes.\n",
    )


def main() -> int:
    parser = harness.flags("bounds", __doc__, only=PARTS)
    parser.add_argument("--cases", type=harness.positive, default=5000, help="of fields; of other parts a share [5000]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows, problems = (
        harness.read_other_rows(arguments.output, group, "part", arguments.only) for group in ("rows", "problems")
    )
    minutes = dict.fromkeys(PARTS, 0.0)
    minutes |= harness.read(arguments.output).get("about", {}).get("minutes", {})
    for part in arguments.only:
        cases, share = PARTS[part]
        start = harness.clock()
        outcomes = try_all(cases, math.ceil(share * arguments.cases), arguments.seed)
        minutes[part] = (harness.clock() - start) / 60
        rows += summary(part, outcomes)
        problems += [
            {"part": part, "problem": outcome.problem, "case": str(case)[:MAX_CHARACTERS]}
            | {"errors": outcome.errors[-MAX_CHARACTERS:]}
            for case, outcome in outcomes
            if outcome.problem
        ]
    rows.sort(key=lambda row: list(PARTS).index(row["part"]))
    details = {"seed": arguments.seed, "minutes": minutes}
    about = harness.about("make chaos", ("hypothesis", "torch", "transformers"), **details)
    results = {"about": about, "rows": rows, "problems": problems}
    harness.write(arguments.output, results, markdown(results))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
