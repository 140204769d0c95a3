"""Odd values for every field that can be set: each is refused in one line, or it runs. A part of `make chaos`.

Fields of recipes, settings of runs, device files and models' configurations, by flag and by file, and files that are none of
them (tests/helpers/odd_inputs.py draws them from the classes themselves). Each case runs in a process of its own. It must end
with 0, or with 2 and lines that begin with ERROR, the latter in 5 seconds; in 2 GiB more than the libraries take; in no
signal, and in 60 seconds whatever it does. Writes benchmarks/results/bounds.*.
"""

import collections
import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))
os.environ["HF_HUB_OFFLINE"] = "1"

import harness
import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from odd_inputs import CASES, Answer, Case, answer

MOST_SHOWN = 2000  # characters of a case and of what it wrote, in the result


def try_all(num_cases: int, seed: int) -> list[tuple[Case, Answer]]:
    """Draw cases, and what was done with each."""
    tried: list[tuple[Case, Answer]] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CASES)
    def every_case(case: Case) -> None:
        tried.append((case, answer(case)))
        if tried[-1][1].problem:
            print(f"{tried[-1][1].problem}: {str(case)[:MOST_SHOWN]}", file=sys.stderr, flush=True)

    every_case()
    return tried


def summary(tried: list[tuple[Case, Answer]]) -> list[dict]:
    """A row for each kind of case."""
    groups = collections.defaultdict(list)
    for case, answered in tried:
        groups[case.kind].append(answered)
    return [
        {
            "kind": kind,
            "cases": len(answers),
            "refused": sum(of.code == 2 for of in answers),
            "accepted": sum(of.code == 0 for of in answers),
            "slowest_refusal_seconds": max((of.seconds for of in answers if of.code == 2), default=0.0),
            "slowest_seconds": max(of.seconds for of in answers),
            "most_memory_gib": max(of.memory for of in answers) / 2**30,
            "problems": sum(bool(of.problem) for of in answers),
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
    found = "".join(f"- {each['problem']}: `{each['case'][:300]}`\n" for each in problems)
    return harness.page(
        "Odd values for every field",
        "bounds.py",
        about,
        f"{harness.table(columns, lines)}\n"
        "Memory: beyond that of the imported libraries. Slowest: also of what is accepted.\n\n"
        f"{found}{chr(10) if found else ''}"
        f"Seed {about['seed']}, {about['minutes']:.0f} minutes.\n",
    )


def main() -> int:
    parser = harness.flags("bounds", __doc__)
    parser.add_argument("--cases", type=harness.positive, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = harness.clock()
    tried = try_all(arguments.cases, arguments.seed)
    problems = [
        {"problem": answered.problem, "case": str(case)[:MOST_SHOWN], "errors": answered.errors[-MOST_SHOWN:]}
        for case, answered in tried
        if answered.problem
    ]
    more = {"seed": arguments.seed, "minutes": (harness.clock() - began) / 60}
    about = harness.about("make chaos", ("hypothesis", "torch", "transformers"), **more)
    results = {"about": about, "rows": summary(tried), "problems": problems}
    harness.write(arguments.output, results, markdown(results))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
