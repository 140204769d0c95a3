"""Asks the windows of a program each question of the rules: losses, what stands between micro-batches, where windows end."""

import ast
import re
from collections.abc import Iterator

from stepaudit.lint import losses
from stepaudit.lint.programs import counts_micro_batches
from stepaudit.lint.syntax import Node, Source, dotted, keyword, last_name, names_in, receiver_of, targets_of
from stepaudit.lint.windows import (
    ACCUMULATE,
    GUARDED,
    INNER,
    LOADER,
    Window,
    find_accelerator_k,
    find_guards,
    is_in_every_round,
    is_one,
    is_optimizer_step,
)

Found = Iterator[tuple[str, Node, str, str]]
"""Code, node, detail, and when it holds."""
AVERAGE = re.compile(r"(\w*_)?ema(_\w+)?|averaged_model|swa_model", re.IGNORECASE)


def check_window(source: Source, window: Window) -> Found:
    """Ask a window all questions about windows."""
    if is_one(source, window.k, window.backward):
        return
    if window.kind == ACCUMULATE and window.k is None and source.has(r"\bAccelerator\("):
        return  # its k stands somewhere that is not read
    yield from _check_division(source, window)
    for call in source.calls:
        if source.is_inside(call, window.loop) and source.scope(call) is source.scope(window.backward):
            yield from _check_inside(source, window, call)
    if window.kind == GUARDED:
        yield from _check_ends(source, window)


def _where_k(source: Source, window: Window) -> str:
    """Say for which k a finding holds, where the program leaves k open."""
    if isinstance(window.k, ast.Constant):
        return ""
    return f"where {window.k_text} is more than 1"


def _check_division(source: Source, window: Window) -> Found:
    loss = losses.trace_loss(source, window)
    divisions = losses.find_divisions_by_k(loss, window)
    receiver = dotted(receiver_of(window.backward))
    where = _where_k(source, window)
    divides = _who_divides(source, window, receiver)
    if divides and divisions and not _cancels(loss, window):
        yield "SA102", divisions[0], f"{receiver}.backward divides, too", where
        return
    if not (divisions or divides):
        if _is_undivided_mean(source, loss, window, receiver):
            yield "SA103", window.backward, f"k is {window.k_text}", where
        return
    if losses.is_sum(loss) or losses.SHARED_COUNT.search(_text_of_loop(source, window)):
        return
    node = divisions[0] if divisions else window.backward
    if reason := losses.explain_raggedness(source, loss, window):
        yield "SA101", node, reason, where
    elif divisions and window.kind == GUARDED and _find_last(source, window) is not None:
        mean = losses.find_mean(source, loss) or losses.find_model_loss(source, loss, window)
        if mean is not None:
            yield "SA104", node, f"k is {window.k_text}", where


def _who_divides(source: Source, window: Window, receiver: str) -> bool:
    """Tell whether the window's backward divides by k by itself."""
    if "accelerator" in receiver:
        k = find_accelerator_k(source)
        return k is not None and not is_one(source, k, window.backward)
    return "engine" in receiver and source.has(r"deepspeed\.initialize")


def _cancels(loss: losses.Loss, window: Window) -> bool:
    """Tell whether a loss is multiplied by k somewhere, which makes up for a division."""
    factors = [part for node in loss.products for part in ast.walk(node) if isinstance(part, ast.Name | ast.Attribute)]
    return any(window.is_k(part) for part in factors)


def _is_undivided_mean(source: Source, loss: losses.Loss, window: Window, receiver: str) -> bool:
    """Tell whether a loss is surely a mean of its micro-batch that nothing divides by k."""
    if "engine" in receiver or window.kind == ACCUMULATE:
        return False
    if "accelerator" in receiver and not is_one(source, find_accelerator_k(source), window.backward):
        return False  # it divides by its own k
    if loss.divisions or loss.products or losses.is_sum(loss) or losses.find_mean(source, loss) is None:
        return False
    return not source.has(r"\.grad\b|reduction\s*=\s*[\"'](sum|none)")


def _text_of_loop(source: Source, window: Window) -> str:
    return "\n".join(source.text.splitlines()[window.loop.lineno - 1 : window.loop.end_lineno])


def _check_inside(source: Source, window: Window, call: ast.Call) -> Found:
    """Ask a call of the loop whether it stands between micro-batches and should not."""
    name = last_name(call.func)
    receiver = last_name(receiver_of(call))
    where = _where_k(source, window)
    if not is_in_every_round(source, call, window.loop):
        return
    if re.fullmatch(r"clip_grad_(norm|value)_?", name):
        if call.lineno >= window.backward.lineno:
            yield "SA201", call, dotted(call.func), where
    elif name == "zero_grad":
        if _empties_window(source, window, call, receiver):
            yield "SA202", call, f"{dotted(call.func)}()", where
    elif name in ("step", "update") and AVERAGE.fullmatch(receiver) and call.lineno > window.backward.lineno:
        yield "SA203", call, f"{dotted(call.func)}()", where
    elif name == "step" and "sched" in receiver.lower() and not call.args:
        is_loose = window.kind != ACCUMULATE or _is_unprepared(source, receiver_of(call))
        if is_loose and not counts_micro_batches(source, receiver_of(call)):
            yield "SA403", call, f"{dotted(call.func)}()", where
    elif call in window.steps and window.kind == ACCUMULATE and _is_unprepared(source, receiver_of(call)):
        yield "SA204", call, f"{dotted(call.func)}()", where


def _empties_window(source: Source, window: Window, call: ast.Call, receiver: str) -> bool:
    """Tell whether a zero_grad that runs in every round empties gradients of the window."""
    if window.kind == ACCUMULATE:
        # A prepared optimizer empties at the last micro-batch only: before its backward that is too early.
        is_in_context = source.is_inside(call, window.context)
        if _is_unprepared(source, receiver_of(call)):
            return not any(is_in_every_round(source, step, window.loop) for step in window.steps)
        return is_in_context and call.lineno < window.backward.lineno and "optim" in receiver.lower()
    names = {last_name(receiver_of(step)) for step in window.steps} | {
        last_name(a) for s in window.steps for a in s.args
    }
    return receiver in names or (receiver in ("model", "net") and len(names) == 1)


def _is_unprepared(source: Source, node: Node) -> bool:
    """Tell whether a name is given to no `prepare` of the program, as far as all that it is given has names."""
    calls = [
        call for call in source.calls if last_name(call.func) in ("prepare", "prepare_optimizer", "prepare_scheduler")
    ]
    given = [part for call in calls for part in call.args]
    if not calls or not all(isinstance(part, ast.Name | ast.Attribute | ast.Call) for part in given):
        return False
    if any(call.keywords for call in calls):
        return False
    names = {last_name(part) for part in given} | {
        last_name(target)
        for call in calls
        if (statement := source.statement(call)) is not None
        for target in targets_of(statement)
    }
    name = last_name(node)
    return isinstance(node, ast.Name) and name not in names and bool(source.assigned.get(name))


def _check_ends(source: Source, window: Window) -> Found:
    """Ask where a window of `if step % k == 0` begins and ends."""
    where = _where_k(source, window)
    compare = source.parents.get(window.modulo)
    if not isinstance(compare, ast.Compare) or len(compare.ops) != 1 or not isinstance(compare.ops[0], ast.Eq):
        return
    counter = _find_counter(source, window)
    if counter is None or not _follows_backward(window):
        return
    is_zero = isinstance(compare.comparators[0], ast.Constant) and compare.comparators[0].value == 0
    if isinstance(window.modulo.left, ast.Name) and is_zero:
        yield "SA301", compare, ast.unparse(compare), where
    if _find_last(source, window) is not None or _leaves_tail_out(source, window):
        return
    if _is_epoch(source, window) and not _steps_behind(source, window):
        yield "SA302", compare, f"if {ast.unparse(window.guard)}", where


def _follows_backward(window: Window) -> bool:
    return min(step.lineno for step in window.steps) >= window.backward.lineno


def _find_counter(source: Source, window: Window) -> str | None:
    """Return the name that counts the loop's rounds from 0, and is the one in the remainder; None for other counters."""
    if not isinstance(window.loop, ast.For):
        return None
    iterated = _unwrap(source, window.loop.iter)
    if not (isinstance(iterated, ast.Call) and last_name(iterated.func) == "enumerate" and len(iterated.args) == 1):
        return None
    if keyword(iterated, "start") is not None or not isinstance(window.loop.target, ast.Tuple):
        return None
    name = dotted(window.loop.target.elts[0])
    names = names_in(window.modulo.left)
    changed = [node for node in source.assigned.get(name, []) if source.is_inside(node, window.loop)]
    return name if names == {name} and not changed else None


def _unwrap(source: Source, node: ast.expr) -> ast.expr:
    """Take a progress bar off what a loop goes over, and follow a name once."""
    for _ in range(4):
        if isinstance(node, ast.Name) and len(values := source.values(node.id, node)) == 1:
            node = values[0]
        elif (
            isinstance(node, ast.Call)
            and last_name(node.func) in ("tqdm", "trange", "track", "progress_bar")
            and node.args
        ):
            node = node.args[0]
        else:
            break
    return node


def _is_epoch(source: Source, window: Window) -> bool:
    """Tell whether the window's loop goes once over a loader, and ends with it."""
    enumerated: Node = _unwrap(source, window.loop.iter)
    iterated = enumerated.args[0]
    inner = _unwrap(source, iterated)
    names = names_in(iterated) | names_in(inner)
    if any(re.search(r"cycle|islice|infinite|repeat|\brange\b", name) for name in names):
        return False
    return any(LOADER.search(name) for name in names)


def _find_last(source: Source, window: Window) -> Node | None:
    """Find the part of the guard that steps at the end of the loader, too."""
    tests = [
        window.guard,
        *(value for name in names_in(window.guard) for value in source.values(name, window.guard)[-1:]),
    ]
    for test in tests:
        for part in ast.walk(test):
            if isinstance(part, ast.Call) and last_name(part.func) == "len":
                return part
            if isinstance(part, ast.BoolOp) and isinstance(part.op, ast.Or):
                return part
    return None


def _leaves_tail_out(source: Source, window: Window) -> bool:
    """Tell whether rounds behind the last whole window are skipped: a condition with step // k in front of the backward."""
    for test in find_guards(source, window.backward, window.loop):
        parts = [test, *(value for name in names_in(test) for value in source.values(name, test))]
        if any(
            isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv)
            for part in parts
            for node in ast.walk(part)
        ):
            return True
    return False


def _steps_behind(source: Source, window: Window) -> bool:
    """Tell whether there is an optimizer's step behind the loop, for what is left."""
    scope = source.scope(window.loop)
    return any(
        is_optimizer_step(call) and source.scope(call) is scope and call.lineno > window.loop.end_lineno
        for call in source.calls
    )


def check_reductions(source: Source, windows: list[Window]) -> Found:
    """Ask whether DistributedDataParallel reduces at every micro-batch."""
    wrapped = [call for call in source.calls if last_name(call.func) in ("DistributedDataParallel", "DDP")]
    if not wrapped or source.has(r"no_sync|require_backward_grad_sync|set_requires_gradient_sync|accumulate\("):
        return
    for window in windows[:1]:
        if window.kind in (GUARDED, INNER) and not is_one(source, window.k, window.backward):
            yield (
                "SA501",
                window.backward,
                f"{dotted(wrapped[0].func)}, line {wrapped[0].lineno}",
                _where_k(source, window),
            )
