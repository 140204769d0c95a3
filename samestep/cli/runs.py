"""Answers about output folders of runs: `samestep compare`, `watch` and `advise`."""

import contextlib
import dataclasses
import json

from samestep.cli.flags import read_folders, write_file
from samestep.errors import UsageError
from samestep.printing import fold
from samestep.recipe.reading import format_name
from samestep.recipe.settings import limit, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareSettings:
    """Choose how it is printed"""

    json: bool = setting("print one JSON object", default=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Choose where the page is"""

    port: int = setting("port of the page on this machine; 0: any that is free", limit(65535, 0), default=8765)
    html: str | None = setting("file to write the page to as it is now, instead of serving it", default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdviseSettings:
    """Choose what a larger batch may cost, and what is written"""

    max_extra_tokens: float = setting(
        "share of its tokens that a larger batch may take more to the same loss", limit(1, 0.001), default=0.05
    )
    ramp: bool = setting("the changed recipe is that of a batch that grows with the noise scale", default=False)
    write_recipe: str | None = setting("file to write the changed recipe to; none: no file", default=None)
    json: bool = setting("print one JSON object", default=False)


def compare(argv: list[str]) -> int:
    """Compare two runs; return 0 if they are identical, else 1."""
    folders, settings = read_folders("compare", "RUN_A RUN_B [--json]", argv, CompareSettings, (2,))
    from samestep.training import compare_runs  # here: it imports numpy

    result = compare_runs.compare(folders)
    print(json.dumps(result, allow_nan=False) if settings.json else fold("\n".join(compare_runs.write(result))))
    return 0 if result["is_identical"] else 1


def watch(argv: list[str]) -> None:
    """Serve a page about runs until it is interrupted, or write it."""
    usage = "RUN_DIR [OTHER_RUN_DIR] [--FLAG VALUE ...]"
    folders, settings = read_folders("watch", usage, argv, WatchSettings, (1, 2))
    from samestep.training.watch import make_page, make_readers, make_server  # here: they need numpy

    runs = make_readers(folders)
    if settings.html is not None:
        for run in runs:
            run.update()
        write_file("html", settings.html, make_page(runs))
        return
    with make_server(runs, settings.port) as server:
        print(f"http://localhost:{server.server_port} shows {' and '.join(folders)}; Ctrl+C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def advise(argv: list[str]) -> int:
    """Advise on the batch of a run; return 1 if what was measured does not say, else 0."""
    folders, settings = read_folders("advise", "RUN_DIR [--FLAG VALUE ...]", argv, AdviseSettings, (1,))
    file = settings.write_recipe
    if file is not None and not file.endswith((".yaml", ".yml")):
        raise UsageError(f"write_recipe is {format_name(file)}, must end in .yaml: recipes are found by that")
    from stepplan import advice  # here: the other commands need no planner

    result, changed = advice.advise(folders[0], settings.max_extra_tokens, grows=settings.ramp)
    if file is not None and changed is not None:
        write_file("write_recipe", file, changed.to_yaml())
    else:
        file = None  # there is nothing to write
    print(json.dumps(result, allow_nan=False) if settings.json else fold("\n".join(advice.write(result, file))))
    return 1 if "unknown" in result else 0
