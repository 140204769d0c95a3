"""The output of other libraries between the lines of a run, and the progress of both: in one style, on a terminal in
place, in a file in a line now and then."""

import functools
import logging
import os
import sys
import time

import huggingface_hub.utils.logging as hub_logging
import tqdm.std
import transformers.utils.logging as transformers_logging

SECONDS = 5
"""A library's progress bar is shown when its work takes longer."""
LINE_SECONDS = 10
"""Seconds between lines of progress where there is no terminal; later, a fiftieth of the time that has passed."""
LINE = "{desc}: {n_fmt}/{total_fmt} {unit}, {remaining} left{postfix}"
BAR = "{desc}: {n_fmt}/{total_fmt} {unit} |{bar}| {remaining} left{postfix}"
UNKNOWN = "{desc}: {n_fmt} {unit} in {elapsed}"
BAR_WIDTH = 8
"""Columns of a bar, at least."""
display_in_place, clear_in_place = tqdm.std.tqdm.display, tqdm.std.tqdm.clear
"""tqdm's own, which `show_progress_in_one_style` replaces."""

# bitsandbytes 0.50 warns when it is imported, which transformers does by way of peft, that an optional kernel of CPUs is not
# installed: so this module is imported before models are (samestep/models/__init__.py).
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quiet_libraries() -> None:
    """Hide the progress bars of short work, and the warnings of transformers and of the hub's client.

    datasets 5.2: `datasets.utils.tqdm.tqdm` makes all its bars; tqdm's own `delay` has no global default, and without any
    bars a large corpus would seem to hang. transformers 5.24: the LOAD REPORT is a warning, and what is wrong with weights
    ends a run anyway. huggingface_hub 2.4 warns of each of five retries per file. What the libraries' own variables
    (TRANSFORMERS_VERBOSITY, HF_HUB_VERBOSITY) ask for stays.
    """
    if (module := sys.modules.get("datasets.utils.tqdm")) is not None and not hasattr(module.tqdm, "is_delayed"):
        init = module.tqdm.__init__

        def init_delayed(self, *args, **kwargs):
            init(self, *args, **{"delay": SECONDS} | kwargs)

        module.tqdm.__init__, module.tqdm.is_delayed = init_delayed, True
    show_progress_in_one_style()
    transformers_logging.set_tqdm_hook(lambda factory, args, kwargs: factory(*args, **{"delay": SECONDS} | kwargs))
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    if not {"HF_HUB_VERBOSITY", "HF_DEBUG"} & os.environ.keys():
        hub_logging.set_verbosity_error()


def show_progress_in_one_style(line_seconds: float = LINE_SECONDS) -> None:
    """Let every bar of tqdm, whichever library draws it, say what, how much of it, and the time that is left.

    Args:
        line_seconds: see `LINE_SECONDS`.

    tqdm 4.70: a bar overwrites its line by a carriage return, ten times a second, also in a file, where all of it stays. Its
    style can be set for each bar only.
    """
    display = functools.partialmethod(_display, line_seconds=line_seconds)
    tqdm.std.tqdm.display, tqdm.std.tqdm.clear, tqdm.std.tqdm.__str__ = display, _clear, _write


def _is_terminal(bar: tqdm.std.tqdm) -> bool:
    return bool(getattr(bar.fp, "isatty", lambda: False)())


def _display(bar: tqdm.std.tqdm, msg: str | None = None, pos: int | None = None, *, line_seconds: float) -> bool | None:
    """Show a bar; in a file write a line if it is time for one, or if the bar is closed, whose end of line tqdm writes."""
    if _is_terminal(bar):
        return display_in_place(bar, msg, pos)
    now = time.monotonic()
    bar.line_time = getattr(bar, "line_time", now)
    is_between = bar.n > bar.initial and bar.n != bar.total  # the last line is written when the bar is closed
    is_due = now - bar.line_time >= max(line_seconds, bar.format_dict["elapsed"] / 50)
    if msg is None and (bar.disable or (is_between and is_due)):
        bar.line_time = now
        bar.fp.write(str(bar) + ("" if bar.disable else "\n"))
        bar.fp.flush()
    return None


def _clear(bar: tqdm.std.tqdm, nolock: bool = False) -> None:
    if _is_terminal(bar):
        clear_in_place(bar, nolock)


def _write(bar: tqdm.std.tqdm) -> str:
    """Write a bar in one line; where the terminal is too narrow, what stands last is left out."""
    values = bar.format_dict
    width, postfix, has_end = values["ncols"], values["postfix"] or "", bool(values["total"])
    values |= {"unit": values["unit"].strip(), "bar_format": LINE if has_end else UNKNOWN, "ncols": None}
    if not width or not has_end or not _is_terminal(bar):
        return bar.format_meter(**values)
    while len(bar.format_meter(**values | {"postfix": postfix})) > width - BAR_WIDTH - 3 and postfix:
        postfix = postfix.rpartition(", ")[0]
    return bar.format_meter(**values | {"postfix": postfix, "bar_format": BAR, "ncols": width})
