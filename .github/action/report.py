"""Runs the steps of action.yml: `report.py lint` and `report.py audit`; inputs come by the environment, as GitHub gives them.

Annotates lines, writes lint.sarif, lint.json, audit.json, badge.json and the job's summary. The exit code is the command's.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GREEN, RED, GREY = "brightgreen", "red", "lightgrey"


def call(words: list[str]) -> tuple[int, str]:
    """Run a command of the audit, its errors go to the log; return its exit code and what it prints."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "stepaudit", *words]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    return ended.returncode, ended.stdout


def escape(text: str, *, is_property: bool = False) -> str:
    """Write a text as GitHub's workflow commands want it."""
    pairs = [("%", "%25"), ("\r", "%0D"), ("\n", "%0A")] + [(":", "%3A"), (",", "%2C")] * is_property
    for sign, code in pairs:
        text = text.replace(sign, code)
    return text


def append(variable: str, text: str) -> None:
    """Append to a file that GitHub names in the environment, if it does."""
    if name := os.environ.get(variable):
        with open(name, "a", encoding="utf-8") as file:
            file.write(text + "\n")


def write_badge(folder: Path, message: str, color: str) -> None:
    """Write a badge as shields.io reads it from an address."""
    badge = {"schemaVersion": 1, "label": "same step", "message": message, "color": color}
    (folder / "badge.json").write_text(json.dumps(badge), encoding="utf-8")


def lint(folder: Path) -> int:
    """Lint the files, annotate their lines."""
    names = shlex.split(os.environ.get("LINT", ""))
    if not names:
        return 0
    code, text = call(["lint", *names, "--format", "json"])
    (folder / "lint.json").write_text(text, encoding="utf-8")
    (folder / "lint.sarif").write_text(call(["lint", *names, "--format", "sarif"])[1], encoding="utf-8")
    findings = json.loads(text)["findings"] if text else []
    lines = ["### stepaudit lint", ""]
    for row in findings:
        kind = "notice" if row["is_harmless"] else "error"
        place = f"file={escape(row['path'], is_property=True)},line={row['line']},col={row['column']}"
        title = escape(f"{row['code']} {row['name']}", is_property=True)
        sure = f"\nrun this audit to be sure: {row['confirm']}" if row["confirm"] else ""
        print(f"::{kind} {place},title={title}::{escape(row['message'] + chr(10) + 'do: ' + row['cure'] + sure)}")
        lines.append(f"- `{row['path']}:{row['line']}` **{row['code']}** {row['message']}")
    faults = sum(not row["is_harmless"] for row in findings)
    lines.append(f"\n{faults} faults, {len(findings) - faults} notes" if findings else "Nothing found.")
    summarize(folder, "\n".join(lines))
    write_badge(folder, f"{faults} faults in lint" if faults else "no audit", RED if faults else GREY)
    return code


def audit(folder: Path) -> int:
    """Audit the program, say its verdict."""
    program = shlex.split(os.environ.get("SCRIPT", ""))
    if not program:
        return 0
    layouts = [word for line in os.environ["VARY"].splitlines() if line.strip() for word in ("--vary", line.strip())]
    words = [*layouts, "--processes", os.environ["PROCESSES"], "--steps", os.environ["STEPS"], "--json"]
    code, text = call([*words, "--", *program])
    (folder / "audit.json").write_text(text, encoding="utf-8")
    verdict = {0: "exact", 1: "not exact"}.get(code, "audit failed")
    lines = [f"### stepaudit: {verdict}", ""]
    for row in json.loads(text)["comparisons"] if text else []:
        lines.append(f"- {row['layout']}: {'exact' if row['is_exact'] else 'NOT exact'}")
        for finding in row["findings"]:
            evidence = " ".join(filter(None, (finding["cause"], finding["where"], finding["evidence"])))
            lines += [f"  - {evidence}", f"    - do: {finding['remedy']}"]
            message = f"{row['layout']}: {evidence}\ndo: {finding['remedy']}"
            kind = "notice" if row["is_exact"] else "error"
            place = f"file={escape(program[0], is_property=True)},title={escape(finding['cause'], is_property=True)}"
            print(f"::{kind} {place}::{escape(message)}")
    summarize(folder, "\n".join(lines))
    append("GITHUB_OUTPUT", f"exact={str(code == 0).lower()}")
    write_badge(folder, verdict, {0: GREEN, 1: RED}.get(code, GREY))
    return code


def summarize(folder: Path, text: str) -> None:
    """Add a text to the job's summary, and to the report."""
    append("GITHUB_STEP_SUMMARY", text)
    with open(folder / "summary.md", "a", encoding="utf-8") as file:
        file.write(text + "\n\n")


def main() -> int:
    """Run one step of the action."""
    folder = Path(os.environ["REPORT"])
    folder.mkdir(parents=True, exist_ok=True)
    return {"lint": lint, "audit": audit}[sys.argv[1]](folder)


if __name__ == "__main__":
    sys.exit(main())
