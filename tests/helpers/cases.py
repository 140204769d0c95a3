"""Cases of a parametrized test: some always, the rest in `make test-thorough`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thorough(*values: Any) -> Any:
    """Mark a case, or the values of one, as one that `make test` leaves to `make test-thorough`."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def keep(cases: Iterable[Any], always: Collection[Any]) -> list[Any]:
    """Mark all cases but some as thorough. A case that is to be kept and does not exist is a mistake of the test."""
    cases = list(cases)
    assert set(always) <= set(cases), set(always) - set(cases)
    return [case if case in always else thorough(*(case if isinstance(case, tuple) else [case])) for case in cases]
