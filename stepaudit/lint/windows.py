"""Finds the windows of a program: where the gradients of several micro-batches are added up before the optimizer steps."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from stepaudit.lint.syntax import LOOPS, Node, Source, dotted, keyword, last_name, names_in, targets_of

WINDOW_NAME = re.compile(
    r"accum|grad_acc|gradacc|micro_?(steps|batches)|num_micro|update_freq|iter_size|\bgas\b|n_acc$", re.IGNORECASE
)
"""Names that people give to k."""
OPTIMIZER = re.compile(r"(.*_)?(opt|optim|optimizer|optimiser)s?([_\d].*)?|optim\w*", re.IGNORECASE)
LOADER = re.compile(r"load|(^|_)dl$|(^|_)iter$|batch|data", re.IGNORECASE)
SYNC = re.compile(r"sync_gradients|is_(last|update)|(do|should|need)\w*_(step|update|sync)|update_grad", re.IGNORECASE)

ACCUMULATE, GUARDED, INNER = "accumulate", "guarded", "inner"
"""Kinds of windows, by their end: Accelerate says it; the optimizer's step stands behind a condition; behind an inner loop."""


@dataclasses.dataclass
class Window:
    """A backward whose gradients are added up.

    Attributes:
        kind: see `ACCUMULATE`.
        backward: its call.
        loop: over micro-batches.
        steps: calls of optimizers' `step` that end the window.
        guard: condition in front of the step; None where there is none.
        modulo: the remainder in the condition: `step % k`; None where it is none.
        k: the number of micro-batches, as the program writes it; None where it does not say.
        context: the `with accelerator.accumulate(...)`; None for other kinds.
    """

    kind: str
    backward: ast.Call
    loop: Node
    steps: list[ast.Call]
    guard: ast.expr | None = None
    modulo: ast.BinOp | None = None
    k: ast.expr | None = None
    context: Node | None = None

    @property
    def k_text(self) -> str:
        return ast.unparse(self.k) if self.k is not None else "k"

    def is_k(self, node: Node) -> bool:
        """Tell whether an expression is the window's k, by what it says or by its name."""
        bare = node.args[0] if isinstance(node, ast.Call) and last_name(node.func) in ("float", "int") else node
        if self.k is not None and ast.unparse(bare) == ast.unparse(self.k):
            return True
        return bool(WINDOW_NAME.search(last_name(bare)))


def is_optimizer_step(call: ast.Call) -> bool:
    """Tell whether a call is the step of an optimizer, by its names.

    >>> [is_optimizer_step(ast.parse(text, mode="eval").body)
    ...     for text in ("self.optimizer.step()", "scaler.step(opt)", "optimizers[0].step()", "lr_scheduler.step()")]
    [True, True, True, False]
    """
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
        return False
    receiver = last_name(call.func.value)
    if "sched" in receiver.lower():
        return False
    return bool(OPTIMIZER.fullmatch(receiver)) or ("scaler" in receiver.lower() and bool(call.args))


def find_guards(source: Source, node: Node, loop: Node) -> Iterator[ast.expr]:
    """Yield the conditions that stand between a loop and a node: of `if`, and of `if ...: continue` in front of it."""
    inner: Node = node
    for outer in source.ancestors(node):
        if isinstance(outer, ast.If | ast.IfExp) and inner is not outer.test:
            yield outer.test
        for body in (getattr(outer, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and inner in body:
                for sibling in body[: body.index(inner)]:
                    if isinstance(sibling, ast.If) and any(isinstance(line, ast.Continue) for line in sibling.body):
                        yield sibling.test
        if outer is loop:
            return
        inner = outer


def find_modulo(source: Source, test: ast.expr, near: Node) -> ast.BinOp | None:
    """Find the remainder in a condition, or in what its names were assigned."""
    tests = [test]
    for name in names_in(test):
        tests += source.values(name, near)[-1:]
    parts: list[Node] = [part for each in tests for part in ast.walk(each)]
    return next((part for part in parts if _is_modulo(part)), None)


def _is_modulo(node: Node) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant)


def is_settled(source: Source, test: ast.expr, loop: Node) -> bool:
    """Tell whether a condition is the same in every round of a loop: a setting, nothing that the loop changes."""
    if find_modulo(source, test, loop) is not None or any(SYNC.search(name) for name in names_in(test)):
        return False
    calls = [part for part in ast.walk(test) if isinstance(part, ast.Call)]
    return not names_in(test) & source.changed_in(loop) and all(
        last_name(call.func) in ("isinstance", "hasattr", "len") for call in calls
    )


def is_in_every_round(source: Source, node: Node, loop: Node) -> bool:
    """Tell whether a node runs in every round of a loop, but for settings."""
    return all(is_settled(source, test, loop) for test in find_guards(source, node, loop))


def find_windows(source: Source) -> list[Window]:
    """List the windows of a program, one for each backward that is in one."""
    found = []
    for call in source.calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "manual_backward"):
            loops = _enclosing_loops(source, call)
            if loops and (window := _find_window(source, call, loops)) is not None:
                found.append(window)
    return found


def _enclosing_loops(source: Source, node: Node) -> list[Node]:
    scope = source.scope(node)
    return [outer for outer in source.ancestors(node, scope) if isinstance(outer, LOOPS)]


def _find_window(source: Source, backward: ast.Call, loops: list[Node]) -> Window | None:
    scope = source.scope(backward)
    all_steps = [call for call in source.calls if is_optimizer_step(call) and source.scope(call) is scope]
    loop = loops[0]
    steps = [call for call in all_steps if source.is_inside(call, loop)]
    for outer in source.ancestors(backward, scope):
        if isinstance(outer, ast.With | ast.AsyncWith):
            for item in outer.items:
                if isinstance(item.context_expr, ast.Call) and last_name(item.context_expr.func) == "accumulate":
                    return Window(ACCUMULATE, backward, loop, steps, k=find_accelerator_k(source), context=outer)
    if steps:
        return _find_guarded(source, backward, loop, steps)
    if len(loops) > 1 and isinstance(loop, ast.For) and (k := _find_inner_k(loop)) is not None:
        steps = [call for call in all_steps if source.is_inside(call, loops[1]) and call.lineno > loop.lineno]
        if steps and all(is_in_every_round(source, call, loops[1]) for call in steps):
            return Window(INNER, backward, loop, steps, k=k)
    return None


def _find_guarded(source: Source, backward: ast.Call, loop: Node, steps: list[ast.Call]) -> Window | None:
    own, guard, modulo = [], None, None
    tests_of_backward = set(find_guards(source, backward, loop))
    for call in steps:
        if is_in_every_round(source, call, loop):
            return None
        for test in find_guards(source, call, loop):
            found = find_modulo(source, test, call)
            if found is not None and test not in tests_of_backward:
                own.append(call)
                guard, modulo = guard or test, modulo or found
                break
    if not own or any(_has_backward(source, call, loop) for call in own):
        return None
    return Window(GUARDED, backward, loop, own, guard, modulo, modulo.right)


def _has_backward(source: Source, step: ast.Call, loop: Node) -> bool:
    """Tell whether the branch of a step has a backward of its own."""
    branch = next((outer for outer in source.ancestors(step, loop) if isinstance(outer, ast.If)), None)
    return branch is not None and any(source.is_inside(call, branch) for call in source.calls_of(r".*\.backward"))


def _find_inner_k(loop: ast.For) -> ast.expr | None:
    """Find the k of a loop over micro-batches, by its names; None for other loops."""
    iterated = loop.iter
    if isinstance(iterated, ast.Call) and last_name(iterated.func) in ("enumerate", "tqdm", "trange") and iterated.args:
        iterated = iterated.args[0]
    if isinstance(iterated, ast.Call) and last_name(iterated.func) in ("range", "trange") and len(iterated.args) == 1:
        names = names_in(iterated.args[0]) | {dotted(target) for target in targets_of(loop)}
        return iterated.args[0] if any(WINDOW_NAME.search(name) or "micro" in name for name in names) else None
    if re.search(r"micro|chunk", last_name(iterated)):
        return ast.Call(ast.Name("len"), [iterated], [])
    return None


def find_accelerator_k(source: Source) -> ast.expr | None:
    """Find what Accelerator is given as k; the constant 1 where it is given none."""
    for call in source.calls:
        if last_name(call.func) in ("Accelerator", "GradientAccumulationPlugin"):
            for name in ("gradient_accumulation_steps", "num_steps"):
                if (value := keyword(call, name)) is not None:
                    return value
    if any(last_name(call.func) == "Accelerator" and _is_plain(call) for call in source.calls):
        return ast.Constant(1)
    return None


def _is_plain(call: ast.Call) -> bool:
    """Tell whether a call of Accelerator leaves k at 1: no plugin, nothing unpacked into it."""
    return all(word.arg not in (None, "gradient_accumulation_plugin") for word in call.keywords)


def is_one(source: Source, k: ast.expr | None, near: Node) -> bool:
    """Tell whether a k is 1, as far as the program says."""
    if isinstance(k, ast.Name | ast.Attribute):
        values = source.values(dotted(k), near)
        k = values[0] if len(values) == 1 else k
    return isinstance(k, ast.Constant) and k.value == 1
