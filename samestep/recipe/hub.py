"""Says before the hub is asked how to do without it: without a network its client tries again for a minute or more."""

import functools
import os
import sys
from pathlib import Path

from samestep.recipe.reading import format_name, has_hub_form

WAY_OUT = "without a network set HF_HUB_OFFLINE=1, which ends the wait, or give a folder"


def is_asked_for(name: str) -> bool:
    """Tell whether the hub is asked for a name: it is no folder here, and HF_HUB_OFFLINE is not set."""
    is_offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() not in ("", "0", "FALSE", "NO", "OFF")
    return has_hub_form(name) and not is_offline and not Path(name).expanduser().exists()


@functools.cache  # it is asked for several files of a name
def announce(name: str) -> None:
    """Print one line before the hub is asked for a name, on process 0."""
    if is_asked_for(name) and os.environ.get("RANK", "0") == "0":
        print(f"asking the hub for {format_name(name)}; {WAY_OUT}", file=sys.stderr, flush=True)


def describe_way_out(name: str) -> str:
    """Describe, for the end of an error about a name that was asked for, how to do without the hub; empty: it was not."""
    return f"; {WAY_OUT}" if is_asked_for(name) else ""
