"""Compares the output folders of two runs: `samestep compare`."""

import dataclasses
import json

from samestep.cli.flags import read_folders
from samestep.printing import fold
from samestep.recipe.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Choose how it is printed"""

    json: bool = setting("print one JSON object", default=False)


def compare(argv: list[str]) -> int:
    """Compare two runs; return 0 if they are identical, else 1."""
    folders, settings = read_folders("compare", "RUN_A RUN_B [--json]", argv, CompareSettings, (2,))
    from samestep.contrib.comparing import compare_runs  # here: it imports numpy

    result = compare_runs.compare(folders)
    print(json.dumps(result, allow_nan=False) if settings.json else fold("\n".join(compare_runs.write(result))))
    return 0 if result["is_identical"] else 1
