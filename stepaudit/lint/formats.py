"""Writes findings for people, for programs, and for what shows them beside the code (SARIF 2.1.0)."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from stepaudit.lint.rules import GUIDE, RULES, Finding

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def anchor(code: str) -> str:
    """Return the anchor of a rule's section on the page.

    >>> anchor("SA201")
    'sa201-clipping-inside-the-window'
    """
    return f"{code} {RULES[code].name}".lower().replace(" ", "-")


def format_text(findings: Sequence[Finding], num_files: int) -> str:
    """Write findings for people: line, what happens, what to do, what to run to be sure; a last line that counts."""
    lines = []
    for finding in findings:
        cell = f"cell {finding.cell}:" if finding.cell else ""
        kind = "note: " if finding.is_harmless else ""
        lines.append(f"{finding.path}:{cell}{finding.line}:{finding.column}: {finding.code} {kind}{finding.message}")
        lines.append(f"    do: {finding.rule.cure}")
        if finding.confirm:
            lines.append(f"    run this audit to be sure: {finding.confirm}")
    lines.append(f"{count(findings)} in {num_files} file{'s' * (num_files != 1)}")
    if findings:
        codes = sorted({finding.code for finding in findings})
        lines[-1] += f"; {GUIDE} says more of {', '.join(codes)}; `# stepaudit: ignore[CODE]` behind a line silences it"
    return "\n".join(lines)


def count(findings: Sequence[Finding]) -> str:
    """Say how many findings there are, notes apart.

    >>> count([])
    'nothing found'
    """
    counts = Counter(finding.is_harmless for finding in findings)
    parts = [f"{counts[False]} fault{'s' * (counts[False] != 1)}"] * (counts[False] > 0)
    parts += [f"{counts[True]} note{'s' * (counts[True] != 1)}"] * (counts[True] > 0)
    return ", ".join(parts) or "nothing found"


def format_json(findings: Sequence[Finding], num_files: int) -> str:
    """Write findings as one JSON object."""
    rows = [
        {
            "path": finding.path,
            "line": finding.line,
            "column": finding.column,
            "cell": finding.cell or None,
            "code": finding.code,
            "name": finding.rule.name,
            "is_harmless": finding.is_harmless,
            "message": finding.message,
            "cure": finding.rule.cure,
            "confirm": finding.confirm or None,
        }
        for finding in findings
    ]
    return json.dumps({"num_files": num_files, "findings": rows})


def format_sarif(findings: Sequence[Finding], num_files: int) -> str:
    """Write findings as SARIF 2.1.0, with the fields that GitHub's code scanning needs."""
    codes = sorted(RULES)
    rules = [
        {
            "id": code,
            "name": "".join(word.title() for word in RULES[code].name.split()),
            "shortDescription": {"text": RULES[code].name},
            "fullDescription": {"text": RULES[code].symptom},
            "help": {"text": RULES[code].cure, "markdown": f"{RULES[code].cure}\n\n{GUIDE}#{anchor(code)}"},
            "defaultConfiguration": {"level": "note" if RULES[code].is_harmless else "warning"},
            "properties": {"tags": ["training", "gradient-accumulation"]},
        }
        for code in codes
    ]
    results = [_to_result(finding, codes.index(finding.code)) for finding in findings]
    driver = {"name": "stepaudit lint", "rules": rules}
    return json.dumps(
        {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}
    )


def _to_result(finding: Finding, index: int) -> dict[str, Any]:
    place = f"cell {finding.cell}, line {finding.line}: " if finding.cell else ""
    sure = f" Run this audit to be sure: {finding.confirm}" if finding.confirm else ""
    region = {"startLine": 1 if finding.cell else finding.line, "startColumn": 1 if finding.cell else finding.column}
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": "note" if finding.is_harmless else "warning",
        "message": {"text": f"{place}{finding.message}. Do: {finding.rule.cure}.{sure}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": PurePath(finding.path).as_posix(), "uriBaseId": "%SRCROOT%"},
                    "region": region,
                }
            }
        ],
        "partialFingerprints": {"stepauditLint/v1": f"{finding.code}:{finding.detail}"},
    }
