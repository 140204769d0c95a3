"""Shows the recipes of the catalog: `samestep list` and `show`."""

from samestep.cli.commands import make_parser
from samestep.cli.flags import split_words
from samestep.errors import UsageError
from samestep.printing import fold
from samestep.recipe import catalog as recipes
from samestep.recipe.reading import format_value
from samestep.recipe.settings import program_name


def list_recipes(argv: list[str]) -> None:
    """List the recipes whose line has all the words."""
    words, flags = split_words(argv)
    parser = make_parser("list", "[WORD ...]")
    parser.parse(flags)
    lines, names = [], recipes.catalog_names()
    width = max(map(len, names))
    for name in names:
        recipe = recipes.load(name)
        lines.append(f"{name:{width}} B {recipe.global_batch_size:<6} {recipe.description}")
    lines = [line for line in lines if all(word.lower() in line.lower() for word in words)]
    if not lines:
        raise UsageError(
            f"no recipe has {format_value(' '.join(words))} in its line: {parser.prog} without words shows all"
        )
    print(fold("\n".join(lines), indent=width + len(" B 000000 ")))


def show_recipe(argv: list[str]) -> None:
    """Show every field of a recipe, as `recipe.yaml` of a run has them."""
    words, flags = split_words(argv)
    parser = make_parser("show", "RECIPE")
    parser.parse(flags)
    if len(words) != 1:
        raise UsageError(f"{parser.prog}: it needs one recipe, and nothing else ({program_name()} list shows them)")
    print(recipes.load(words[0]).to_yaml(), end="")
