"""Measures how often the audit is right: on every program of tests/audited/, sound or with one fault, under all its layouts.

    make bench NAME=verdicts
    make bench NAME=verdicts FLAGS="--first_sight 3"

Each is run unchanged and recorded as `python -m recipes audit-script` does it, and compared with its reference layout. Writes
benchmarks/results/verdicts.*, the tables of docs/audit-limits.md, and the causes of docs/audit.md beside it.

With --first_sight a round of new programs is judged, and what is said of each is written into tests/audited/first_sight.json,
where it stays, whatever the audit learns from it: that rate is the one to be expected.
"""

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import corpus
import harness
from forked import Server

from stepaudit.causes import GUIDE, HARMLESS, KINDS

PACKAGES = ("torch", "accelerate", "transformers", "lightning", "trl", "sentence-transformers")
LOG = corpus.FOLDER / "first_sight.json"
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
        reference = server.record([str(program.path)], corpus.variation(program.reference, program.mesh))
        for layout, cause in program.expected.items():
            comparison = corpus.audit(server, program, reference, layout)
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


def judge_at_first_sight(server: Server, number: int) -> None:
    """Judge the blind programs of a round that are not in the log, and add them to it."""
    log = json.loads(LOG.read_text(encoding="utf-8"))
    known = {row["program"] for row in log}
    for program in corpus.programs():
        if f"\n# blind {number}\n" in program.path.read_text(encoding="utf-8") and str(program) not in known:
            row = measure(server, program)
            found = list(dict.fromkeys(cause for layout in row["layouts"] for cause in layout["found"]))
            log.append(
                {"round": number, "program": row["program"], "is_sound": row["is_sound"], "verdict": row["verdict"]}
            )
            log[-1]["found"] = [] if row["verdict"] == "right" else found
    LOG.write_text("[\n" + ",\n".join(map(json.dumps, log)) + "\n]\n", encoding="utf-8")


def first_sight() -> str:
    """Write a row for each round of the log."""
    log = json.loads(LOG.read_text(encoding="utf-8"))
    rows = []
    for number in sorted({row["round"] for row in log}):
        faults, sound = (
            [r for r in log if r["round"] == number and r["is_sound"] == is_sound] for is_sound in (False, True)
        )
        tally = Counter(row["verdict"] for row in faults)
        named = f"{tally['right']} of {len(faults)} ({tally['right'] / len(faults):.0%})"
        others = [tally[verdict] for verdict in ("beside", "not_a_sum", "misnamed", "missed")]
        accused = sum(row["verdict"] == "false alarm" for row in (*faults, *sound))
        rows.append([number, named, *others, accused, len(sound), tally["crash"]])
    kept = [row for row in log if "note" not in row or not row["is_sound"]]
    faults, sound = ([row for row in kept if row["is_sound"] == is_sound] for is_sound in (False, True))
    total = (
        f"README counts all rounds, without the sound programs that have a note: of {len(faults)} with a fault "
        f"{sum(row['verdict'] == 'right' for row in faults)} named, of {len(sound)} sound ones "
        f"{sum(row['verdict'] != 'right' for row in sound)} accused.\n\n"
    )
    notes = "".join(f"- Round {row['round']}, {row['program']}: {row['note']}.\n" for row in log if "note" in row)
    head = (
        "round | named | and a false cause | only `not_a_sum` | misnamed | missed | accused | sound programs | crashes"
    )
    return f"{harness.table(head, rows)}\n{total}{notes}"


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
    """Write how many programs are named, and the rates at first sight."""
    rows = results["rows"]
    sound, faults = ([row for row in rows if row["is_sound"] == is_sound] for is_sound in (True, False))
    false_alarms = [row["program"] for row in sound if row["verdict"] != "right"]
    tally = Counter(row["verdict"] for row in faults)
    layouts = sum(len(row["layouts"]) for row in sound)
    num_blind = [sum(row["is_blind"] for row in group) for group in (sound, faults)]
    num_several = sum(any(not layout.get("layout", "x1").endswith("x1") for layout in row["layouts"]) for row in rows)
    counts = [
        [VERDICT_TEXTS.get(verdict, verdict), tally[verdict], f"{tally[verdict] / len(faults):.0%}"]
        for verdict in VERDICTS
        if tally[verdict] or verdict in VERDICT_TEXTS
    ]
    accused_text = f" ({', '.join(false_alarms)})" if false_alarms else ""
    return (
        f"{len(sound)} sound programs under {layouts} layouts: {len(false_alarms)} accused{accused_text}. "
        f"{len(faults)} programs with a fault:\n\n{harness.table(' | programs | share', counts)}\n"
        f"A program counts by its worst layout; {num_several} of all are run on several processes as well. "
        f"{num_blind[1]} of those with a fault and {num_blind[0]} of the sound ones were written without a look at how the "
        "audit decides.\n\n"
        "At first sight, before the audit was mended by them:\n\n"
        f"{first_sight()}\n"
        f"Exact: at most {results['about']['tolerance']:g}.\n"
    )


def list_faults(results: dict) -> str:
    """Write a row for each program with a fault."""
    lines = []
    for row in [row for row in results["rows"] if not row["is_sound"]]:
        found_causes = (
            ", ".join(dict.fromkeys(f"`{name}`" for layout in row["layouts"] for name in layout["found"])) or "nothing"
        )
        text, verdict = row["about"].removeprefix("Fault: "), VERDICT_TEXTS.get(row["verdict"], row["verdict"])
        lines.append([f"{text} ([{row['program']}](../tests/audited/{row['program']}.py))", found_causes, verdict])
    return harness.table("fault | what is found | verdict", lines)


def part(results: dict) -> str:
    text = f"{tables(results)}\nEvery program: [verdicts.md](../benchmarks/results/verdicts.md).\n"
    return harness.part("verdicts.py", results["about"], text)


def markdown(results: dict) -> str:
    content = f"{tables(results)}\n{list_faults(results)}"
    text = harness.page("How often the audit is right", "verdicts.py", results["about"], content)
    return text.replace("(../tests", "(../../tests")


def main() -> None:
    parser = harness.flags("verdicts", __doc__)
    parser.add_argument("--first_sight", type=int, metavar="ROUND", help="judge programs that are new, and log it")
    arguments = parser.parse_args()
    with Server() as server:
        if arguments.first_sight is not None:
            judge_at_first_sight(server, arguments.first_sight)
            return
        rows = []
        for program in corpus.programs():
            row = measure(server, program)
            print(f"{row['program']:50} {row['verdict']} {row['seconds']} s", file=sys.stderr, flush=True)
            rows.append(row)
    results = {"about": harness.about("make bench NAME=verdicts", PACKAGES, tolerance=corpus.TOLERANCE), "rows": rows}
    parts = {"causes": (Path(GUIDE).name, guide()), "verdicts": ("audit-limits.md", part(results))}
    harness.write(arguments.output, results, markdown(results), parts=parts)


if __name__ == "__main__":
    main()
