"""How often the audit is right: every program of tests/audited/, sound or with one fault, under every layout at its head.

    make bench-verdicts

Each is run unchanged and recorded as `python -m recipes audit-script` does it, and compared with its reference layout. Writes
benchmarks/results/verdicts.* and the tables of docs/audit.md.
"""

import argparse
import json
import platform
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import corpus
from forked import Server

from stepaudit.causes import GUIDE, HARMLESS, KINDS
from stepaudit.judge import compare

GUIDE_BEGIN, GUIDE_END = "<!-- causes: begin -->\n", "<!-- causes: end -->\n"
BEGIN, END = "<!-- verdicts: begin -->\n", "<!-- verdicts: end -->\n"
PACKAGES = ("torch", "accelerate", "transformers", "lightning", "trl", "sentence-transformers")
# From the best to the worst.
VERDICTS = ("right", "beside", "not_a_sum", "misnamed", "missed", "false alarm", "crash")
SHOWN = {
    "right": "named",
    "beside": "named, with a false cause beside",
    "not_a_sum": "only `not_a_sum`",
    "misnamed": "misnamed",
    "missed": "missed",
}


def measure(server: Server, program: corpus.Program) -> dict:
    """What was found under each layout."""
    started, rows = time.perf_counter(), []
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
    worst = max((row["verdict"] for row in rows), key=VERDICTS.index)
    return {
        "program": str(program),
        "about": program.about,
        "is_sound": program.path.parent.name == "sound",
        "is_blind": program.is_blind,
        "causes": program.causes,
        "verdict": worst,
        "seconds": round(time.perf_counter() - started, 2),
        "layouts": rows,
    }


def guide() -> str:
    """A section for each cause: what is wrong, what to do, programs that show it."""
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


def markdown(about: dict, rows: list[dict]) -> str:
    sound, faults = ([row for row in rows if row["is_sound"] == is_sound] for is_sound in (True, False))
    alarms = [row["program"] for row in sound if row["verdict"] != "right"]
    tally = Counter(row["verdict"] for row in faults)
    layouts = sum(len(row["layouts"]) for row in sound)
    blind = [sum(row["is_blind"] for row in of) for of in (sound, faults)]
    several = sum(any(of.get("layout", "").count("x") == 2 for of in row["layouts"]) for row in rows)
    lines = [
        f"{len(sound)} sound programs under {layouts} layouts: {len(alarms)} accused"
        + (f" ({', '.join(alarms)})" if alarms else "")
        + f". {len(faults)} programs with a fault:",
        "",
        "| | programs | share |",
        "|---|---|---|",
        *(
            f"| {SHOWN.get(of, of)} | {tally[of]} | {tally[of] / len(faults):.0%} |"
            for of in VERDICTS
            if tally[of] or of in SHOWN
        ),
        "",
        f"A program counts by its worst layout; {several} of all are run on several processes as well. {blind[1]} of those "
        f"with a fault and {blind[0]} of the sound ones were written without a look at how the audit decides.",
        "",
        "| fault | what is found | verdict |",
        "|---|---|---|",
    ]
    for row in faults:
        found = ", ".join(dict.fromkeys(f"`{name}`" for of in row["layouts"] for name in of["found"])) or "nothing"
        text, shown = row["about"].removeprefix("Fault: "), SHOWN.get(row["verdict"], row["verdict"])
        link = f"[{row['program']}](../tests/audited/{row['program']}.py)"
        lines.append(f"| {text} ({link}) | {found} | {shown} |")
    lines += [
        "",
        f"`{about['command']}`, {about['date']}: tolerance {about['tolerance']:g}; "
        + ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        + f", Python {about['python']}.",
        "",
    ]
    return "\n".join(lines)


def replaced(text: str, begin: str, end: str, new: str) -> str:
    before, rest = text.split(begin)
    return before + begin + new + end + rest.split(end)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "verdicts")
    parser.add_argument("--document", type=Path, default=ROOT / GUIDE, help="gets the tables too")
    arguments = parser.parse_args()
    with Server() as server:
        rows = []
        for program in corpus.programs():
            rows.append(measure(server, program))
            print(
                f"{rows[-1]['program']:50} {rows[-1]['verdict']} {rows[-1]['seconds']} s", file=sys.stderr, flush=True
            )
    about = {
        "command": "make bench-verdicts",
        "date": time.strftime("%Y-%m-%d"),
        "tolerance": corpus.TOLERANCE,
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
    }
    arguments.output.with_suffix(".json").write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    table = markdown(about, rows)
    generated = "Generated by `make bench-verdicts` (benchmarks/verdicts.py); do not edit.\n\n"
    arguments.output.with_suffix(".md").write_text(
        f"# How often the audit is right\n\n{generated}{table}".replace("(../tests", "(../../tests")
    )
    text = replaced(arguments.document.read_text(encoding="utf-8"), GUIDE_BEGIN, GUIDE_END, guide())
    arguments.document.write_text(replaced(text, BEGIN, END, table), encoding="utf-8")


if __name__ == "__main__":
    main()
