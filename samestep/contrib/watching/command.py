"""Shows runs as a live page in the browser: `samestep watch`."""

import contextlib
import dataclasses

from samestep.cli.flags import read_folders, write_file
from samestep.recipe.settings import limit, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchSettings:
    """Choose where the page is"""

    port: int = setting("port of the page on this machine; 0: any that is free", limit(65535, 0), default=8765)
    html: str | None = setting("file to write the page to as it is now, instead of serving it", default=None)


def watch(argv: list[str]) -> None:
    """Serve a page about runs until it is interrupted, or write it."""
    usage = "RUN_DIR [OTHER_RUN_DIR] [--FLAG VALUE ...]"
    folders, settings = read_folders("watch", usage, argv, WatchSettings, (1, 2))
    from samestep.contrib.watching.watch import make_page, make_readers, make_server  # here: they need numpy

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
