"""Waits for what another process or thread does; no other file of the tests reads a clock (test_repository.py)."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 600
"""Seconds after which a wait is a hang, which is all that they decide."""
TICK = 0.01  # seconds between two looks


def until(condition: Callable[[], Any], subject: str, seconds: float = PATIENCE) -> Any:
    """Wait until a condition holds, and return what it returned. Raises TimeoutError with the subject if it never does."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no {subject} in {seconds:.0f} s")
        time.sleep(TICK)
    return result
