"""Shows the recipes of the catalog, and their data: `samestep list`, `show` and `show-data`."""

import dataclasses
import sys

from samestep.cli.commands import make_parser
from samestep.cli.flags import read_recipe, split_words, write_file
from samestep.errors import UsageError
from samestep.printing import fold
from samestep.recipe import catalog as recipes
from samestep.recipe.extras import require
from samestep.recipe.reading import format_name, format_value
from samestep.recipe.settings import choice, limit, program_name, setting

CONVERSATIONS = "causal_lm_finetuning"
"""Task whose data `show-data` shows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowDataSettings:
    """Choose what is shown"""

    num_samples: int = setting("samples that are shown, the first ones of each source in turn", limit(1000), default=3)
    html: str | None = setting("page to write instead: samples, lengths, sources", default=None)
    on_bad_row: str = setting(
        "rows that cannot be used: refuse them all in one message, or skip them",
        choice("refuse", "skip"),
        default="refuse",
    )
    preprocessing_num_workers: int | None = setting("processes that tokenize; none: one", limit(1024), default=None)


def list_recipes(argv: list[str]) -> None:
    """List the recipes whose line has all the words."""
    words, flags = split_words(argv)
    parser = make_parser("list", "[WORD ...]")
    parser.parse(flags)
    lines = []
    for name in recipes.catalog_names():
        recipe = recipes.load(name)
        lines.append(f"{name:26} B {recipe.global_batch_size:<6} {recipe.description}")
    lines = [line for line in lines if all(word.lower() in line.lower() for word in words)]
    if not lines:
        raise UsageError(
            f"no recipe has {format_value(' '.join(words))} in its line: {parser.prog} without words shows all"
        )
    print(fold("\n".join(lines), indent=37))


def show_recipe(argv: list[str]) -> None:
    """Show every field of a recipe, as `recipe.yaml` of a run has them."""
    words, flags = split_words(argv)
    parser = make_parser("show", "RECIPE")
    parser.parse(flags)
    if len(words) != 1:
        raise UsageError(f"{parser.prog}: it needs one recipe, and nothing else ({program_name()} list shows them)")
    print(recipes.load(words[0]).to_yaml(), end="")


def show_data(argv: list[str]) -> None:
    """Show samples of a recipe's data, or write a page about them."""
    recipe, settings, _, _ = read_recipe("show-data", argv, ShowDataSettings)
    if recipe.task != CONVERSATIONS:
        others = [other for other in recipes.catalog_names() if recipes.load(other).task == CONVERSATIONS]
        problem = f"its task is {recipe.task}, must be {CONVERSATIONS}: {', '.join(others) or 'none'}"
        raise UsageError(f"show-data {format_name(argv[0])}: {problem}")
    require(None, f"{program_name()} show-data")
    from samestep._internals.library_output import quiet_libraries  # here: they import torch
    from samestep.data import conversation_page, conversations

    quiet_libraries()
    train, held_out = conversations.build(recipe, settings.preprocessing_num_workers, settings.on_bad_row)
    if settings.html is not None:
        write_file("html", settings.html, conversation_page.write(recipe, train, held_out, settings.num_samples))
        reports = "\n".join(map(str, train.row_reports))
        print(fold(f"{train}\n{reports}\n{train.mask_report}\nwrote {settings.html}"))
        return
    print("\n".join(train.show(settings.num_samples, sys.stdout.isatty())))
    if held_out is not None:
        print(fold(f"held out: {held_out}"))
