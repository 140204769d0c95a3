"""Writes comparisons as text."""

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from stepaudit.causes import CAUSES, Finding, join_parts
from stepaudit.judge import Comparison


def table(
    labels: Sequence[object],
    reference_findings: list[Finding],
    comparisons: list[Comparison],
    tolerances: Sequence[float] = (),
) -> str:
    """Write one row for each layout, and below the table each cause, with the numbers of each row, and its remedy.

    Steps with other samples than the reference's are not compared, and not counted.

    Args:
        labels: of the layouts, the reference first.
        reference_findings: faults of the reference by itself.
        comparisons: of the other layouts with the reference.
        tolerances: of the comparisons, where each has its own.
    """
    notes = [f" (tolerance {tolerance:g})" for tolerance in tolerances] or [""] * len(comparisons)
    titles = [str(labels[0]), *(f"{label}{note}" for label, note in zip(labels[1:], notes, strict=True))]
    width = max(map(len, ["layout", *titles]))
    findings_by_row = [reference_findings, *(comparison.findings for comparison in comparisons)]
    causes = list(dict.fromkeys(finding.cause for row in findings_by_row for finding in row))
    row_marks = ["".join(f" [{causes.index(finding.cause) + 1}]" for finding in row) for row in findings_by_row]
    lines = [
        f"{'layout':{width}}  steps   error of the first, last step   |g|/|r|   cosine  loss error  worst parameter",
        f"{titles[0]:{width}}  the reference{row_marks[0]}",
    ]
    for title, comparison, marks in zip(titles[1:], comparisons, row_marks[1:], strict=True):
        compared_steps = [t for t, error in enumerate(comparison.errors) if error == error]
        if compared_steps:
            first_step, last_step = compared_steps[0], compared_steps[-1]
            numbers = (
                f"{comparison.errors[first_step]:14.2g}, {comparison.errors[last_step]:14.2g}  "
                f"{comparison.ratios[first_step]:8.4g} {comparison.cosines[first_step]:8.4f}"
            )
            worst_parameter = "" if comparison.is_exact else f"{comparison.worst} {comparison.worst_error:.2g}"
            largest_error = max(comparison.loss_errors[t] for t in compared_steps)
            row = (
                f"{title:{width}}  {len(compared_steps):5}  {numbers}  {largest_error:10.2g}  {worst_parameter}{marks}"
            )
            lines.append(row.rstrip())
        else:
            lines.append(f"{title:{width}}  not compared{marks}")
    for number, cause in enumerate(causes, 1):
        found = [
            (str(label), finding)
            for label, row in zip(labels, findings_by_row, strict=True)
            for finding in row
            if finding.cause == cause
        ]
        explanation, *evidence = _explain(found)
        lines += [f"[{number}] {explanation}", *evidence, *write_remedy(found[0][1].remedy)]
    return "\n".join(lines)


def write_remedy(remedy: str) -> list[str]:
    """Write a remedy, each other way to do it on a line of its own.

    >>> write_remedy("divide by n; shortest with samestep: exact_steps(...); in a Trainer: exact(Trainer)")
    ['    do: divide by n', '    or, shortest with samestep: exact_steps(...)', '    or, in a Trainer: exact(Trainer)']
    """
    first, *others = re.split("; (?=shortest with samestep|in a Trainer)", remedy)
    return [f"    do: {first}", *(f"    or, {other}" for other in others)]


def fold_lines(text: str, columns: int) -> str:
    """Break lines between words, as a terminal of so many columns would break them inside words.

    >>> print(fold_lines("layout   steps   error\\n[1] aa bb cc dd\\n    do: ee ff gg", 14))
    layout   steps
        error
    [1] aa bb cc
        dd
        do: ee ff
        gg
    """
    lines = []
    for line in text.split("\n"):
        options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False, "subsequent_indent": "    "}
        lines += textwrap.wrap(line, columns, **options) if len(line) > columns else [line]
    return "\n".join(lines)


def _explain(found: list[tuple[str, Finding]]) -> list[str]:
    """Explain a cause once, on the first line; where layouts have other numbers, those of each are on a line of their own.

    Args:
        found: findings of one cause, each with the label of its layout.
    """
    first = found[0][1]
    places = {finding.where for _, finding in found}
    shared = first.where if len(places) == 1 else ""
    labels: dict[str, list[str]] = {}  # numbers -> layouts that have them
    for label, finding in found:
        own = finding.evidence if shared else join_parts(finding.where, finding.evidence)
        labels.setdefault(own, []).append(label)
    if len(labels) == 1:
        return [str(first)]
    return [
        join_parts(CAUSES[first.cause], shared),
        *(f"    {join_parts('; '.join(own), numbers)}" for numbers, own in labels.items()),
    ]
