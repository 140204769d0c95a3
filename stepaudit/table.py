"""Writes comparisons as text."""

from collections.abc import Sequence

from stepaudit.causes import Finding
from stepaudit.judge import Comparison


def table(labels: Sequence[object], reference_findings: list[Finding], comparisons: list[Comparison]) -> str:
    """Write one row for each layout, and below the table each cause, with the numbers of its first row, and its remedy.

    Steps with other samples than the reference's are not compared, and not counted.

    Args:
        labels: of the layouts, the reference first.
        reference_findings: faults of the reference by itself.
        comparisons: of the other layouts with the reference.
    """
    width = max(len(str(label)) for label in ["layout", *labels])
    findings_by_row = [reference_findings, *(comparison.findings for comparison in comparisons)]
    findings: dict[str, Finding] = {}  # cause -> its first finding
    for finding in (finding for row_findings in findings_by_row for finding in row_findings):
        findings.setdefault(finding.cause, finding)
    causes = list(findings)
    row_marks = ["".join(f" [{causes.index(finding.cause) + 1}]" for finding in row) for row in findings_by_row]
    lines = [
        f"{'layout':{width}}  steps   error of the first, last step   |g|/|r|   cosine  loss error  worst parameter",
        f"{labels[0]!s:{width}}  the reference{row_marks[0]}",
    ]
    for label, comparison, marks in zip(labels[1:], comparisons, row_marks[1:], strict=True):
        compared_steps = [t for t, error in enumerate(comparison.errors) if error == error]
        if compared_steps:
            first_step, last_step = compared_steps[0], compared_steps[-1]
            numbers = (
                f"{comparison.errors[first_step]:14.2g}, {comparison.errors[last_step]:14.2g}  "
                f"{comparison.ratios[first_step]:8.4g} {comparison.cosines[first_step]:8.4f}"
            )
            worst_parameter = "" if comparison.is_exact else f"{comparison.worst} {comparison.worst_error:.2g}"
            largest_error = max(comparison.loss_errors[t] for t in compared_steps)
            row = f"{label!s:{width}}  {len(compared_steps):5}  {numbers}  {largest_error:10.2g}  {worst_parameter}{marks}"
            lines.append(row.rstrip())
        else:
            lines.append(f"{label!s:{width}}  not compared{marks}")
    for number, finding in enumerate(findings.values(), 1):
        lines += [f"[{number}] {finding}", f"    do: {finding.remedy}"]
    return "\n".join(lines)
