"""Comparisons as text."""

from collections.abc import Sequence

from recipes.audit.judge import Comparison, Finding


def table(labels: Sequence[object], in_itself: list[Finding], comparisons: list[Comparison]) -> str:
    """One row for each layout, and below the table each cause, with the numbers of the first row that has it.

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
    lines += [f"  {finding}" for finding in in_itself]
    for label, of in zip(labels[1:], comparisons, strict=True):
        notes = "".join(f" [{causes.index(finding.cause) + 1}]" for finding in of.findings)
        if of.errors:
            numbers = f"{of.errors[0]:14.2g}, {of.errors[-1]:14.2g}  {of.ratios[0]:8.4g} {of.cosines[0]:8.4f}"
            worst = "" if of.is_exact else f"{of.worst} {of.worst_error:.2g}"
            row = f"{label!s:{width}}  {len(of.errors):5}  {numbers}  {max(of.loss_errors):10.2g}  {worst}{notes}"
            lines.append(row.rstrip())
        else:
            lines.append(f"{label!s:{width}}  not compared{notes}")
    lines += [f"[{number}] {finding}" for number, finding in enumerate(findings.values(), 1)]
    return "\n".join(lines)
