"""Measures how often the audit is right: on every program of tests/audited/, sound or with one fault, under all its layouts.

    make bench NAME=verdicts

Each is run unchanged and recorded as `python -m recipes audit-script` does it, and compared with its reference layout. Writes
benchmarks/results/verdicts.* and the tables of docs/audit.md.
"""

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import corpus
import harness
from forked import Server

from stepaudit.causes import GUIDE, HARMLESS, KINDS
from stepaudit.judge import compare

PACKAGES = ("torch", "accelerate", "transformers", "lightning", "trl", "sentence-transformers")
# From the best to the worst.
VERDICTS = ("right", "beside", "not_a_sum", "misnamed", "missed", "false alarm", "crash")
VERDICT_TEXTS = {
    "right": "named",
    "beside": "named, with a false cause beside",
    "not_a_sum": "only `not_a_sum`",
    "misnamed": "misnamed",
    "missed": "missed",
}


def measure(server: Server, program: corpus.Program) -> dict:
    """Audit a program under each layout, and return the causes and the verdicts."""
    start, rows = harness.clock(), []
    try:
        reference = server.record([str(program.path)], corpus.variation(program.reference))
        for layout, cause in program.expected.items():
            recordings = server.record([str(program.path)], corpus.variation(layout))
            comparison = compare(reference, recordings, corpus.TOLERANCE)
            rows.append(
                {
                    "layout": "x".join(map(str, layout)),
                    "expected": cause,
                    "found": [finding.cause for finding in comparison.findings],
                    "where": [f"{finding.where}: {finding.evidence}" for finding in comparison.findings],
                    "verdict": corpus.verdict(program, layout, comparison),
                }
            )
    except RuntimeError as error:
        rows.append({"verdict": "crash", "found": [], "where": [str(error).splitlines()[-1]]})
    worst_verdict = max((row["verdict"] for row in rows), key=VERDICTS.index)
    return {
        "program": str(program),
        "about": program.about,
        "is_sound": program.path.parent.name == "sound",
        "is_blind": program.is_blind,
        "causes": program.causes,
        "verdict": worst_verdict,
        "seconds": round(harness.clock() - start, 2),
        "layouts": rows,
    }


def guide() -> str:
    """Write a section for each cause: the fault, the remedy, programs that show it."""
    examples: dict[str, list[str]] = {}
    for program in corpus.programs():
        for cause in program.causes:
            examples.setdefault(cause, []).append(f"[{program.path.stem}](../tests/audited/{program}.py)")
    lines = []
    for name, cause in KINDS.items():
        harmless = " No failure: it is said, and the verdict stays exact." if name in HARMLESS else ""
        text = cause.text[0].upper() + cause.text[1:]
        lines += [
            f"### {name}",
            "",
            f"{text}{'' if text.endswith('?') else '.'}{harmless}",
            "",
            f"**Do:** {cause.remedy}.",
        ]
        if name in examples:
            lines += ["", f"Seen in {', '.join(examples[name][:3])}."]
        lines.append("")
    return "\n".join(lines)


def tables(results: dict) -> str:
    rows = results["rows"]
    sound, faults = ([row for row in rows if row["is_sound"] == is_sound] for is_sound in (True, False))
    false_alarms = [row["program"] for row in sound if row["verdict"] != "right"]
    tally = Counter(row["verdict"] for row in faults)
    layouts = sum(len(row["layouts"]) for row in sound)
    num_blind = [sum(row["is_blind"] for row in group) for group in (sound, faults)]
    num_several = sum(any(layout.get("layout", "").count("x") == 2 for layout in row["layouts"]) for row in rows)
    counts = [
        [VERDICT_TEXTS.get(verdict, verdict), tally[verdict], f"{tally[verdict] / len(faults):.0%}"]
        for verdict in VERDICTS
        if tally[verdict] or verdict in VERDICT_TEXTS
    ]
    lines = []
    for row in faults:
        found_causes = (
            ", ".join(dict.fromkeys(f"`{name}`" for layout in row["layouts"] for name in layout["found"])) or "nothing"
        )
        text, verdict = row["about"].removeprefix("Fault: "), VERDICT_TEXTS.get(row["verdict"], row["verdict"])
        lines.append([f"{text} ([{row['program']}](../tests/audited/{row['program']}.py))", found_causes, verdict])
    accused_text = f" ({', '.join(false_alarms)})" if false_alarms else ""
    return (
        f"{len(sound)} sound programs under {layouts} layouts: {len(false_alarms)} accused{accused_text}. "
        f"{len(faults)} programs with a fault:\n\n{harness.table(' | programs | share', counts)}\n"
        f"A program counts by its worst layout; {num_several} of all are run on several processes as well. "
        f"{num_blind[1]} of those with a fault and {num_blind[0]} of the sound ones were written without a look at how the "
        "audit decides.\n\n"
        f"{harness.table('fault | what is found | verdict', lines)}\n"
        f"Exact: at most {results['about']['tolerance']:g}.\n"
    )


def part(results: dict) -> str:
    return harness.part("verdicts.py", results["about"], tables(results))


def markdown(results: dict) -> str:
    text = harness.page("How often the audit is right", "verdicts.py", results["about"], tables(results))
    return text.replace("(../tests", "(../../tests")


def main() -> None:
    parser = harness.flags("verdicts", __doc__)
    parser.add_argument("--document", type=Path, default=ROOT / GUIDE, help="gets the tables too")
    arguments = parser.parse_args()
    with Server() as server:
        rows = []
        for program in corpus.programs():
            row = measure(server, program)
            print(f"{row['program']:50} {row['verdict']} {row['seconds']} s", file=sys.stderr, flush=True)
            rows.append(row)
    results = {"about": harness.about("make bench NAME=verdicts", PACKAGES, tolerance=corpus.TOLERANCE), "rows": rows}
    harness.write(arguments.output, results, markdown(results))
    harness.write_part(arguments.document, "causes", guide())
    harness.write_part(arguments.document, "verdicts", part(results))


if __name__ == "__main__":
    main()
