"""Gives pytest, once the package is installed, the fixture `assert_same_step` and the option `--audit-processes`."""

from collections.abc import Callable
from typing import Any

import pytest

from stepaudit.errors import UsageError


def _parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("stepaudit").addoption(
        "--audit-processes",
        type=_parse_numbers,
        metavar="1,2",
        help="numbers of processes of assert_same_step, where a test gives none (default 1)",
    )


def add_processes(arguments: dict[str, Any], processes: list[int] | None) -> dict[str, Any]:
    """Return the arguments of an audit with the option's numbers of processes, where they have neither those nor cuts."""
    return {"processes": processes} | arguments if processes and "cuts" not in arguments else arguments


@pytest.fixture
def assert_same_step(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Return `stepaudit.assert_same_step`, whose failures show the table and the causes, and no traceback."""

    def check(*args: Any, **kwargs: Any) -> Any:
        from stepaudit import audit_step  # here: every run of pytest loads this plugin, and few need torch

        try:
            audit = audit_step(*args, **add_processes(kwargs, request.config.getoption("--audit-processes")))
        except UsageError as error:
            pytest.fail(f"assert_same_step: {error}", pytrace=False)
        if not audit.is_exact:
            pytest.fail(f"the step depends on how it is cut\n{audit}", pytrace=False)
        return audit

    return check
