"""Answers about output folders of runs: `samestep compare` and `watch`."""

import contextlib
import dataclasses
import json

from samestep.cli.flags import read_folders, write_file
from samestep.printing import fold
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
