"""Reads in the source of a head which step Trainer takes with it in several micro-batches, without running it.

Trainer gives a head the number of labels of the whole step if its forward takes `**kwargs`, and then divides by k no longer. So
a head's step is right if its loss divides by that number, k times too large if it does not, and a mean of means if it is not
given the number. What is read is where forward hands its targets on to a loss, and whether the number goes along.
"""

import ast
import dataclasses
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_utils import PreTrainedModel as Base

from samestep.contrib.heads.tiny import list_targets
from samestep.contrib.heads.verdicts import EXACT, FIRST_LABELS, MEAN_OF_MEANS, OTHER, TIMES_K, TIMES_ONE_KTH
from samestep.step.losses import IGNORED

UNKNOWN, NO_LOSS = "unknown", "computes no loss"
NUMBER = "num_items_in_batch"
OTHER_TASKS = r"regression|multi_label|num_labels == 1"
"""Branches for targets that are no classes."""
LOSS_NAMES = r"loss|criterion|cross_entropy|objective|nll"
LABELS = frozenset({"labels"})
"""Targets that are read first: others of the same head are optional."""
DEEPEST = 6


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss of targets that a function computes.

    Attributes:
        uses_number: whether it divides by the number of labels of the step, if that is given.
        is_shifted: whether it leaves out the first label of each row.
        is_sum: whether it is a sum, whatever it is given.
        ignored: the label that counts for nothing.
    """

    uses_number: bool
    is_shifted: bool = False
    is_sum: bool = False
    ignored: int = IGNORED


@dataclasses.dataclass(frozen=True)
class Reading:
    """Holds what the source of a head says.

    Attributes:
        verdict: the step that Trainer takes with it, one of those that a comparison finds, `UNKNOWN` or `NO_LOSS`.
        takes_number: whether Trainer gives it the number of labels, and divides by k no longer.
        uses_number: whether each of its losses divides by that.
    """

    verdict: str
    takes_number: bool
    uses_number: bool


def read_head(made: Any) -> Reading:
    """Read which step Trainer takes with a class of heads."""
    takes_number, counts = _takes_number(made), _has_counted_labels(made)
    try:
        every = frozenset(list_targets(made))
        found = (
            list(_find_losses(made.forward, made, names, takes_number and counts)) for names in (every & LABELS, every)
        )
        losses = next(filter(None, found), [])
    except (OSError, SyntaxError):  # no source
        return Reading(UNKNOWN, takes_number, False)
    uses_number = bool(losses) and all(loss.uses_number for loss in losses)
    return Reading(_find_verdict(made, losses, takes_number and counts), takes_number, uses_number)


def _find_verdict(made: Any, losses: list[Loss], is_given: bool) -> str:
    if not losses:
        return NO_LOSS
    kinds = {(loss.uses_number and is_given, loss.is_sum) for loss in losses}
    if len(kinds) > 1:
        return OTHER
    ((uses_number, is_sum),) = kinds
    if not uses_number:
        return (EXACT if is_given else TIMES_ONE_KTH) if is_sum else (TIMES_K if is_given else MEAN_OF_MEANS)
    if any(loss.ignored != IGNORED for loss in losses):
        return OTHER
    shifts = {loss.is_shifted for loss in losses}
    if len(shifts) > 1 or _counts_shifted(made) != shifts.pop():
        return FIRST_LABELS if not _counts_shifted(made) else OTHER
    return EXACT


def _takes_number(made: Any) -> bool:
    """Tell what Trainer finds in its constructor: whether forward takes the number of labels of a step."""
    if hasattr(made, "accepts_loss_kwargs"):
        return bool(made.accepts_loss_kwargs)
    return any(word.kind is word.VAR_KEYWORD for word in inspect.signature(made.forward).parameters.values())


def _has_counted_labels(made: Any) -> bool:
    """Tell whether Trainer counts the labels of a batch: a tensor of this name, no list of dictionaries."""
    words = inspect.signature(made.forward).parameters
    return "labels" in words and not re.search(r"\b(list|dict)\b", str(words["labels"].annotation), re.IGNORECASE)


def _find_loss_type(made: Any) -> str | None:
    """Find what the model's constructor makes of the name of its class, or what the class sets itself."""
    for parent in made.__mro__:
        if parent is not Base and "__init__" in vars(parent) and parent.__module__.startswith("transformers.models"):
            found = re.search(r'self\.loss_type = "(\w+)"', inspect.getsource(vars(parent)["__init__"]))
            if found:
                return found[1]
    name = made.__name__
    if name in LOSS_MAPPING:
        return name
    found = re.search("|".join(LOSS_MAPPING), name)
    return found[0] if found else None


def _counts_shifted(made: Any) -> bool:
    """Tell whether Trainer leaves out the first label of each row when it counts."""
    is_causal = LOSS_MAPPING.get(_find_loss_type(made) or "") is ForCausalLMLoss
    return is_causal and not _find_setting(made, "is_encoder_decoder")


@functools.cache
def _make_config(made: Any) -> Any:
    types = made.config_class
    return (types if isinstance(types, type) else types.__args__[0])()


def _find_setting(made: Any, path: str) -> Any:
    """Find a field of the usual configuration of a class; None: it has none."""
    try:
        return functools.reduce(getattr, path.split("."), _make_config(made))
    except Exception:  # of configurations that cannot be made without values
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Source


@dataclasses.dataclass(frozen=True)
class _Source:
    """A function as it is written."""

    node: ast.FunctionDef
    names: dict[str, Any]
    """Names of its module."""

    @classmethod
    @functools.cache
    def of(cls, function: Callable) -> "_Source":
        function = inspect.unwrap(function)
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(node, ast.FunctionDef)
        return cls(node, function.__globals__)

    @property
    def words(self) -> list[str]:
        arguments = self.node.args
        return [word.arg for word in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    @property
    def calls(self) -> list[ast.Call]:
        return [node for node in _walk(self.node) if isinstance(node, ast.Call)]

    def find_derived(self, names: frozenset[str]) -> frozenset[str]:
        """Find what is computed from some names, but no losses, outputs or inputs."""
        found = set(names)
        for _ in range(3):
            for node in _walk(self.node):
                if (
                    isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)
                    and node.value
                    and _uses(node.value, found)
                ):
                    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                        found |= {part.id for part in ast.walk(target) if isinstance(part, ast.Name)}
            found = {
                name for name in found if name in names or not re.search(r"loss|output|input|mask|logits|self", name)
            }
        return frozenset(found)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Walk through code, without the branches for targets that are no classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If) and re.search(OTHER_TASKS, ast.unparse(child.test)):
            for other in child.orelse:
                yield other
                yield from _walk(other)
        else:
            yield from _walk(child)


def _uses(node: ast.AST, names: Any) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _find_losses(
    function: Callable, made: Any, targets: frozenset[str], is_given: bool, depth: int = 0
) -> Iterator[Loss]:
    """Find the losses that a function computes from targets.

    Args:
        made: the class of heads it is a method of; None: of none.
        targets: names of its arguments.
        is_given: whether it gets the number of labels.
    """
    source = _Source.of(function)
    if depth > DEEPEST:
        return
    derived = source.find_derived(targets)
    carriers = {NUMBER} | ({source.node.args.kwarg.arg} if source.node.args.kwarg else set())
    divides = any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _uses(node.right, {NUMBER})
        for node in ast.walk(source.node)
    )
    if divides and NUMBER in source.words:
        yield Loss(uses_number=is_given)
        return
    for call in source.calls:
        parts = [*call.args, *(word.value for word in call.keywords)]
        if not any(_uses(part, derived) for part in parts):
            continue
        hands_on = is_given and any(word.value is not None and _uses(word.value, carriers) for word in call.keywords)
        yield from _follow(call, source, made, derived, hands_on, depth)


def _follow(
    call: ast.Call, source: _Source, made: Any, derived: frozenset[str], hands_on: bool, depth: int
) -> Iterator[Loss]:
    """Follow a call that gets targets to the losses that it computes."""
    name = ast.unparse(call.func)
    ignored = _find_ignored(call)
    if name == "super().forward" and made is not None:
        parents = made.__mro__[1:]
        parent: Any = next(parent for parent in parents if "forward" in vars(parent))
        yield from _find_losses(
            parent.forward, parent, _name_targets(call, parent.forward, derived), hands_on, depth + 1
        )
    elif name == "self.loss_function" and made is not None:
        function = LOSS_MAPPING[_find_loss_type(made) or "ForCausalLM"]
        for loss in _read_function(function, hands_on, ignored, depth):
            is_shifted = loss.is_shifted and not _gives_unshifted(call, source, derived)
            yield dataclasses.replace(loss, is_sum=loss.is_sum or _is_sum(call, made), is_shifted=is_shifted)
    elif re.search(r"ctc_loss", name):
        yield Loss(False, is_sum=_is_sum(call, made))
    elif (
        re.fullmatch(r"\w+", name)
        and inspect.isfunction(source.names.get(name))
        and re.search(LOSS_NAMES, name.lower())
    ):
        yield from _read_function(source.names[name], hands_on, ignored, depth)
    elif name.startswith("self.") and made is not None and (found := _find_called(name, made)) is not None:
        words = _name_targets(call, found[0], derived)
        if words:
            yield from _find_losses(*found, words, hands_on, depth + 1)
    elif re.search(LOSS_NAMES, name.lower().rpartition(".")[2]) and not name.endswith("Output"):
        yield Loss(False)


def _read_function(function: Callable, hands_on: bool, ignored: int | None, depth: int) -> Iterator[Loss]:
    """Read a function that computes a loss from labels."""
    source = _Source.of(function)
    words = frozenset(word for word in source.words if re.search("label|target|position", word))
    default = inspect.signature(function).parameters.get("ignore_index")
    for loss in _find_losses(function, None, words, hands_on, depth + 1) or ():
        own = ignored if ignored is not None else default.default if default is not None else loss.ignored
        yield dataclasses.replace(
            loss,
            is_shifted=loss.is_shifted or function is ForCausalLMLoss,
            ignored=own if isinstance(own, int) else loss.ignored,
        )


def _gives_unshifted(call: ast.Call, source: _Source, derived: frozenset[str]) -> bool:
    """Tell whether a call gives labels as they are in place of shifted ones."""
    for word in call.keywords:
        if word.arg == "shift_labels" and _uses(word.value, derived):
            made = [
                ast.unparse(node.value)
                for node in _walk(source.node)
                if isinstance(node, ast.Assign) and _assigns(node, word.value)
            ]
            return not any("pad(" in text or "1:" in text for text in made)
    return False


def _assigns(node: ast.Assign, name: ast.AST) -> bool:
    """Tell whether a statement gives a value to a name."""
    return ast.unparse(node.targets[0]) == ast.unparse(name)


def _is_sum(call: ast.Call, made: Any) -> bool:
    """Tell whether a call asks for a sum: by its name, or by a field of the usual configuration."""
    said = next((ast.unparse(word.value) for word in call.keywords if word.arg == "reduction"), "")
    if said.startswith("self.config.") and made is not None:
        return bool(_find_setting(made, said.removeprefix("self.config.")) == "sum")
    return said.strip("'\"") == "sum"


def _find_ignored(call: ast.Call) -> int | None:
    """Find the label that a call lets count for nothing; 255 where it is a field that is named so; None: not said."""
    for word in call.keywords:
        if word.arg == "ignore_index":
            try:
                return int(ast.literal_eval(word.value))
            except ValueError:
                return 255 if "semantic" in ast.unparse(word.value) else None
    return None


def _name_targets(call: ast.Call, function: Callable, derived: frozenset[str]) -> frozenset[str]:
    """Name the arguments of a function that a call gives targets to."""
    words = [word for word in _Source.of(function).words if word != "self"]
    given = {word.arg for word in call.keywords if word.arg and _uses(word.value, derived)}
    given |= {word for word, value in zip(words, call.args, strict=False) if _uses(value, derived)}
    return frozenset(word for word in given if "input" not in word and "mask" not in word and word in words)


def _find_called(name: str, made: Any) -> tuple[Callable, Any] | None:
    """Find what `self.name(...)` calls: a method, or forward of a module whose class the constructor says."""
    attribute = name.removeprefix("self.")
    method = getattr(made, attribute, None)
    if inspect.isfunction(method):
        return method, made
    for parent in made.__mro__:
        if "__init__" not in vars(parent) or not parent.__module__.startswith("transformers."):
            continue
        source = _Source.of(vars(parent)["__init__"])
        for node in ast.walk(source.node):
            if (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == name
                and isinstance(node.value, ast.Call)
            ):
                found: Any = source.names.get(ast.unparse(node.value.func))
                is_module = isinstance(found, type) and issubclass(found, nn.Module)
                if is_module:
                    return found.forward, found
    return None
