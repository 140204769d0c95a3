"""Comparisons as text."""

from collections.abc import Sequence

from stepaudit.causes import Finding
from stepaudit.judge import Comparison


def table(labels: Sequence[object], in_itself: list[Finding], comparisons: list[Comparison]) -> str:
    """One row for each layout, and below the table each cause, with the numbers of the first row that has it, and its remedy.

    Steps whose samples are not the reference's are not compared, and not counted.

    Args:
        labels: the reference's first.
        in_itself: findings of the reference.
        comparisons: with the reference, of the other labels.
    """
    width = max(len(str(label)) for label in ["layout", *labels])
    findings: dict[str, Finding] = {}  # of each cause the first one
    for finding in (finding for of in comparisons for finding in of.findings):
        findings.setdefault(finding.cause, finding)
    causes = list(findings)
    lines = [
        f"{'layout':{width}}  steps   error of the first, last step   |g|/|r|   cosine  loss error  worst parameter",
        f"{labels[0]!s:{width}}  the reference",
    ]
    for finding in in_itself:
        lines += [f"  {finding}", f"    do: {finding.remedy}"]
    for label, of in zip(labels[1:], comparisons, strict=True):
        notes = "".join(f" [{causes.index(finding.cause) + 1}]" for finding in of.findings)
        compared = [t for t, error in enumerate(of.errors) if error == error]
        if compared:
            first, last = compared[0], compared[-1]
            numbers = (
                f"{of.errors[first]:14.2g}, {of.errors[last]:14.2g}  {of.ratios[first]:8.4g} {of.cosines[first]:8.4f}"
            )
            worst = "" if of.is_exact else f"{of.worst} {of.worst_error:.2g}"
            largest = max(of.loss_errors[t] for t in compared)
            row = f"{label!s:{width}}  {len(compared):5}  {numbers}  {largest:10.2g}  {worst}{notes}"
            lines.append(row.rstrip())
        else:
            lines.append(f"{label!s:{width}}  not compared{notes}")
    for number, finding in enumerate(findings.values(), 1):
        lines += [f"[{number}] {finding}", f"    do: {finding.remedy}"]
    return "\n".join(lines)
