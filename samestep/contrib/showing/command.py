"""Shows samples of a recipe's data: `samestep show-data`."""

import dataclasses
import sys

from samestep.cli.flags import read_recipe, write_file
from samestep.errors import UsageError
from samestep.printing import fold
from samestep.recipe.extras import require
from samestep.recipe.reading import format_name
from samestep.recipe.run_settings import check_files
from samestep.recipe.settings import choice, limit, program_name, setting

SHOWN = ("causal_lm_finetuning", "seq2seq_finetuning")
"""Tasks whose data `show-data` shows: conversations, sources with targets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowDataSettings:
    """Choose what is shown"""

    num_samples: int = setting("samples that are shown, the first ones of each source in turn", limit(1000), default=3)
    row: str | None = setting("row to show in their place: FILE:LINE as reports name it, or LINE", default=None)
    html: str | None = setting("page to write instead: samples, lengths, sources", default=None)
    on_bad_row: str = setting(
        "rows that cannot be used: refuse them all in one message, or skip them",
        choice("refuse", "skip"),
        default="refuse",
    )
    preprocessing_num_workers: int | None = setting("processes that tokenize; none: one", limit(1024), default=None)


def show_data(argv: list[str]) -> None:
    """Show samples of a recipe's data, or write a page about them."""
    recipe, settings, _, _ = read_recipe("show-data", argv, ShowDataSettings)
    if recipe.task not in SHOWN:
        script = recipe.parts.script
        program = "its program" if script is None else f"python scripts/{script}"
        raise UsageError(
            f"show-data {format_name(argv[0])}: its task is {recipe.task}, must be {' or '.join(SHOWN)}. The rows of this one "
            f"are read and counted by a rehearsal: {program} --recipe {argv[0]} --rehearse, with the flags that name your data"
        )
    require(None, f"{program_name()} show-data")
    from samestep._internals.library_output import quiet_libraries  # here: they import torch
    from samestep.contrib.showing.page import write_page
    from samestep.contrib.showing.texts import show_row, show_samples
    from samestep.training.ways import choose_build, is_streamed

    if settings.row is not None and settings.html is not None:
        raise UsageError("row is set, and html is: a page has no single row. Leave one of them out")
    if settings.html is not None and is_streamed(recipe):
        raise UsageError("html is set, but streaming is true, and a page counts all samples: leave one of them out")
    check_files(recipe)
    quiet_libraries()
    build = choose_build(recipe, recipe.parts.find("data"))
    train, held_out = build(recipe, settings.preprocessing_num_workers, settings.on_bad_row)
    if settings.row is not None:
        print("\n".join(show_row([train, held_out], settings.row, sys.stdout.isatty())))
        return
    if settings.html is not None:
        write_file("html", settings.html, write_page(recipe, train, held_out, settings.num_samples))
        report = getattr(train, "mask_report", None)
        lines = [train, *train.row_reports, *([] if report is None else [report]), f"wrote {settings.html}"]
        print(fold("\n".join(map(str, lines))))
        return
    print("\n".join(show_samples(train, settings.num_samples, sys.stdout.isatty())))
    if held_out is not None:
        print(fold(f"held out: {held_out}"))
