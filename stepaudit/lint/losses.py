"""Follows a loss from its backward to what computes it: is it a mean, over how many targets, divided by what?"""

import ast
import dataclasses
import re
from collections.abc import Iterator

from stepaudit.lint.syntax import Node, Source, dotted, keyword, last_name, names_in, receiver_of
from stepaudit.lint.windows import Window

FUNCTION = re.compile(
    r"(cross_entropy|nll_loss|mse_loss|l1_loss|smooth_l1_loss|huber_loss|binary_cross_entropy(_with_logits)?|kl_div|ctc_loss)"
)
"""Losses of torch.nn.functional that are means by default."""
MODULE = re.compile(r"(CrossEntropy|NLL|MSE|L1|SmoothL1|Huber|BCE|BCEWithLogits|KLDiv|CTC)Loss")
SHARED_COUNT = re.compile(
    r"num_items|reduction\s*=\s*[\"']sum|\.gather\(|total_(tokens|targets)|all_reduce|num_tokens|token_count"
)
"""Words of programs that count the targets of a whole step."""
COLLATOR = re.compile(r"DataCollatorFor(LanguageModeling|Seq2Seq|TokenClassification|WholeWordMask|CompletionOnlyLM)")


@dataclasses.dataclass
class Loss:
    """The expressions that a loss was made from, from its backward back.

    Attributes:
        divisions: each with its divisor.
        products: multiplications.
    """

    parts: list[ast.expr]
    divisions: list[tuple[Node, ast.expr]]
    products: list[Node]

    @property
    def calls(self) -> Iterator[ast.Call]:
        return (node for part in self.parts for node in ast.walk(part) if isinstance(node, ast.Call))


def trace_loss(source: Source, window: Window) -> Loss:
    """Follow the loss of a window's backward through the assignments of its loop."""
    found = Loss([], [], [])
    names: set[str] = set()
    todo: list[Node] = [_find_loss(window.backward)]
    while todo:
        node = todo.pop()
        if node is None:
            continue
        found.parts.append(node)
        for part in ast.walk(node):
            _note_factor(found, part)
        for name in names_in(node) - names:
            names.add(name)
            for assignment in source.assigned.get(name, []):
                if source.is_inside(assignment, window.loop) and assignment.lineno <= window.backward.lineno:
                    todo.append(getattr(assignment, "value", None))
                    _note_factor(found, assignment)
    return found


def _note_factor(loss: Loss, node: Node) -> None:
    """Note what a loss is divided by, or multiplied with."""
    match node:
        case ast.BinOp(op=ast.Div(), right=factor) | ast.AugAssign(op=ast.Div(), value=factor):
            loss.divisions.append((node, factor))
        case ast.Call(func=ast.Attribute(attr="div" | "div_" | "true_divide"), args=[factor]):
            loss.divisions.append((node, factor))
        case ast.BinOp(op=ast.Mult()) | ast.AugAssign(op=ast.Mult()):
            loss.products.append(node)
        case ast.Call(func=ast.Attribute(attr="mul" | "mul_" | "multiply")):
            loss.products.append(node)


def _find_loss(backward: ast.Call) -> ast.expr | None:
    """Find the loss of a backward: its receiver, or what an accelerator, a scaler or an engine is given."""
    receiver = receiver_of(backward)
    if isinstance(receiver, ast.Call) and last_name(receiver.func) in ("scale", "scale_loss") and receiver.args:
        return receiver.args[0]
    if backward.args and re.search(r"accelerator|engine|fabric|self|scaler|model|optim", dotted(receiver)):
        return backward.args[0]
    return receiver


def find_divisions_by_k(loss: Loss, window: Window) -> list[Node]:
    """List where a loss is divided by the window's k, or multiplied by 1 / k."""
    found: list[Node] = []
    for node, divisor in loss.divisions:
        names = [divisor, *([divisor.left, divisor.right] if isinstance(divisor, ast.BinOp) else [])]
        if any(window.is_k(name) for name in names):
            found.append(node)
    return found


def is_sum(loss: Loss) -> bool:
    """Tell whether a loss may be a sum, or divided by a count of more than its micro-batch."""
    if any(last_name(call.func) in ("sum", "nansum") for call in loss.calls):
        return True
    return any(names_in(part) and SHARED_COUNT.search(ast.unparse(part)) for part in loss.parts)


def find_mean(source: Source, loss: Loss) -> ast.Call | None:
    """Find the call that makes a loss a mean over its micro-batch; None where that is not sure."""
    for call in loss.calls:
        name = last_name(call.func)
        if FUNCTION.fullmatch(name) and keyword(call, "reduction") is None:
            return call
        module = find_module(source, call)
        if module is not None and keyword(module, "reduction") is None:
            return call
    return None


def find_module(source: Source, call: ast.Call) -> ast.Call | None:
    """Find the loss module of torch.nn that a call calls: `criterion(...)`, where `criterion = nn.CrossEntropyLoss()`."""
    values = source.values(dotted(call.func), call) if not isinstance(call.func, ast.Call) else [call.func]
    if len(values) == 1 and isinstance(values[0], ast.Call):
        made: Node = values[0]
        while last_name(made.func) in ("to", "cuda") and isinstance(made.func.value, ast.Call):
            made = made.func.value
        if MODULE.fullmatch(last_name(made.func)):
            return made
    return None


def find_model_loss(source: Source, loss: Loss, window: Window) -> ast.expr | None:
    """Find the loss that a model of transformers has returned: `outputs.loss`, `model(**batch).loss`, `outputs[0]`."""
    for part in loss.parts:
        nodes: list[Node] = list(ast.walk(part))
        for node in nodes:
            is_loss = isinstance(node, ast.Attribute) and node.attr == "loss"
            is_first = isinstance(node, ast.Subscript) and getattr(node.slice, "value", None) == 0
            if not (is_loss or is_first):
                continue
            made = node.value
            if isinstance(made, ast.Name):
                values = [v for v in source.values(made.id, node) if source.is_inside(v, window.loop)]
                made = values[-1] if values else made
            if isinstance(made, ast.Call) and "model" in last_name(made.func).lower():
                return node
    return None


def explain_raggedness(source: Source, loss: Loss, window: Window) -> str:
    """Say why micro-batches have different numbers of targets; empty where the program does not show it."""
    if (mean := find_mean(source, loss)) is not None:
        for call in (mean, find_module(source, mean)):
            if call is not None and keyword(call, "ignore_index") is not None:
                return "ignore_index leaves targets out of the mean"
    if find_model_loss(source, loss, window) is not None:
        if (found := COLLATOR.search(source.text)) and not (
            found[1] == "LanguageModeling" and _is_causal_collator(source)
        ):
            return f"{found[0]} leaves labels out"
        if source.has(
            r"(labels?\w*|targets?)\b[^\n]*=\s*-100\b|masked_fill\w*\([^\n]*-100|label_pad_token_id|IGNORE_INDEX"
        ):
            return "labels of -100 are left out of the mean"
    return ""


def _is_causal_collator(source: Source) -> bool:
    """Tell whether DataCollatorForLanguageModeling only pads: mlm=False."""
    return source.has(r"mlm\s*=\s*False")
