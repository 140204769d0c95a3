"""Says what Trainer's step is with a head: `samestep check-model`."""

import contextlib
import io
import sys
from collections.abc import Iterator

from samestep.cli.commands import make_parser
from samestep.contrib.heads.verdicts import EXACT
from samestep.errors import UsageError, exit_code
from samestep.printing import fold
from samestep.recipe import hub


def check_model(argv: list[str]) -> int:
    """Check heads; return 0 if Trainer's step is exact with all of them, else 1."""
    parser = make_parser("check-model", "MODEL ... | --all")
    parser.add_argument(
        "models", nargs="*", default=[], metavar="MODEL", help="class of transformers, folder, or name on the hub"
    )
    text = "all heads of the installed transformers, which takes half an hour"
    parser.add_argument("--all", action="store_true", default=False, help=text)
    given = parser.parse_args(argv)
    if bool(given.models) == given.all:
        parser.error("give models, or --all")
    return exit_code(_check_all if given.all else lambda: _check(given.models))


def _check_all() -> int:
    from samestep.contrib.heads import table, tiny

    return 0 if table.print_table(list(tiny.list_heads())) else 1


def _check(models: list[str]) -> int:
    print(f"checking {', '.join(models)}: Trainer's step in several cuts", file=sys.stderr, flush=True)
    import torch  # here: it takes seconds
    import transformers

    from samestep._internals import library_output  # first: it also silences what the others import
    from samestep.contrib.heads import comparison, reading, table, tiny

    library_output.quiet_libraries()
    torch.set_num_threads(1)
    is_right = True
    for text in models:
        if "/" in text:  # else the name of a class
            hub.announce(text)
        with _silence():
            head = tiny.find_head(text)
            try:
                found = comparison.compare(head.build, head.samples)
            except comparison.NotMeasuredError as error:
                raise UsageError(f"{head.name} cannot be checked: {error}") from None
            except (UsageError, KeyboardInterrupt):
                raise
            except Exception as error:
                read = reading.read_head(getattr(transformers, head.name)).verdict
                raise UsageError(
                    f"{head.name} cannot be run in small sizes: {table.explain_failure(error)}. Read in its source, Trainer's "
                    f"step in several micro-batches is: {read}"
                ) from None
        print(fold("\n".join(_describe(head.name, found))), flush=True)
        is_right &= found.verdict == EXACT
    return 0 if is_right else 1


def _describe(name: str, found) -> Iterator[str]:
    """Describe a comparison in lines."""
    import transformers

    from samestep.contrib.heads import comparison

    cuts = " and ".join(f"{b} x {k}" for b, k in comparison.CUTS)
    yield f"{name}, transformers {transformers.__version__}: random weights of small sizes, steps of 4 and 3 samples"
    norms = " and ".join(f"{norm:.2f}" for norm in found.norms)
    more = f"; |g| / |r| of a full step: {norms}" if found.verdict != EXACT else ""
    yield f"  Trainer, in {cuts} micro-batches: {found.verdict}, error {found.error:.1e}{more}"
    if found.refusal:
        yield f"  exact(Trainer): refused: {found.refusal}"
    else:
        way = f"; its loss is a mean over {found.divisor}" if found.divisor else ""
        yield f"  exact(Trainer): error {found.exact_error:.1e}{way}"
    if found.verdict == EXACT:
        yield (
            "  That is Trainer's own loss. A compute_loss or compute_loss_func of yours is another one: samestep lint train.py "
            "reads it, samestep audit-script runs it"
        )
    if found.packing:
        yield f"  packed rows: samples see each other: {found.packing}"
    if found.verdict != EXACT and not found.refusal:
        yield "  do: from samestep import exact; trainer = exact(Trainer)(...) (docs/your-trainer.md)"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Drop what libraries say."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
