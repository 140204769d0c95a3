"""The rendering of chat templates, and the turn that each part of a rendered text is of."""

import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from transformers.utils import chat_template_utils

BEGINS, ENDS = "turn begins", "turn ends"  # filters that a tracked template calls
TRANSPARENT = (nodes.Template, nodes.If, nodes.With, nodes.Scope, nodes.ScopedEvalContextModifier, nodes.Block)
"""Nodes of a template whose body is written at once, not into a value that the template may use at another place."""


class _Tracker:
    """Notes which turn is being written: that of the innermost loop over turns.

    Attributes:
        place: characters written so far.
        spans: [first character, the one after the last, number of the turn], in order.
    """

    def begin(self, turns: Sequence[Mapping[str, Any]]) -> None:
        self.numbers = {id(turn): number for number, turn in enumerate(turns)}
        self.loops: list[tuple[int, int | None]] = []  # loops that run, and the turn that each is at
        self.place = self.first = 0
        self.spans: list[list[int]] = []

    @jinja2.pass_context  # so that Jinja does not compute it when it compiles
    def turn_begins(self, _: Any, loop: int, *values: Any) -> str:
        turn = next((self.numbers[id(value)] for value in values if id(value) in self.numbers), None)
        if not self.loops or self.loops[-1] != (loop, turn):
            self.turn_ends(_, loop)
            self.loops.append((loop, turn))
        return ""

    @jinja2.pass_context
    def turn_ends(self, _: Any, loop: int) -> str:
        self._note()
        for depth, (number, _) in enumerate(self.loops):
            if number == loop:
                del self.loops[depth:]
        return ""

    def _note(self) -> None:
        turn = next((turn for _, turn in reversed(self.loops) if turn is not None), None)
        if turn is not None and self.place > self.first:
            if self.spans and self.spans[-1][1:] == [self.first, turn]:
                self.spans[-1][1] = self.place
            else:
                self.spans.append([self.first, self.place, turn])
        self.first = self.place


TRACKER = _Tracker()


class _TrackedTemplate:
    """A template that notes which turn each part of a text is of, as transformers renders it."""

    def __init__(self, template: jinja2.Template):
        self.template = template

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        pieces: list[str] = []
        TRACKER.begin(messages)
        for piece in self.template.generate(messages=messages, **variables):
            pieces.append(piece)
            TRACKER.place += len(piece)
        return "".join(pieces)


def render_turns(
    template: str,
    turns: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    now: str,
    has_markers: bool,
    variables: Mapping[str, Any],
) -> tuple[str, list[list[int]]]:
    """Render a conversation as `apply_chat_template` does, at a time of our choice.

    transformers 5.24, `_compile_jinja_template` of chat_template_utils: it has no documented way to give a template another
    clock, or to learn which turn a character is of. Its environment is used as it is: limits, filters and extensions. The tree
    of the template gets calls at the beginning of each round of its loops, which write nothing.

    Args:
        template: in Jinja.
        turns, tools: of the conversation.
        now: time that the template reads from the clock, in ISO's format.
        has_markers: find what the template's markers hold, not the turns.
        variables: others that the template sees.

    Returns:
        the text, and [first character, the one after the last] of what each marker holds; without markers [first, last,
        number of the turn] of what loops over turns write: nothing of a loop in a macro or in a block that is no output.
    """
    compiled = _compile(template, now, not has_markers)
    compile_anew = chat_template_utils._compile_jinja_template
    chat_template_utils._compile_jinja_template = lambda _: compiled
    try:
        texts, spans = chat_template_utils.render_jinja_template(
            conversations=[turns],
            tools=tools,
            documents=None,
            chat_template=template,
            return_assistant_tokens_mask=has_markers,
            **variables,
        )
    finally:
        chat_template_utils._compile_jinja_template = compile_anew
    return texts[0], [list(span) for span in spans[0]] if has_markers else TRACKER.spans


@functools.lru_cache(maxsize=8)
def _compile(template: str, now: str, is_tracked: bool) -> Any:
    """Compile a template. Raises jinja2.TemplateSyntaxError."""
    environment = chat_template_utils._compile_jinja_template("").environment
    environment.filters |= {BEGINS: TRACKER.turn_begins, ENDS: TRACKER.turn_ends}
    clock = {"strftime_now": datetime.datetime.fromisoformat(now).strftime}
    if not is_tracked:
        return environment.from_string(template, clock)
    tree = environment.parse(template)
    tree.body = list(_track(tree.body, environment))
    return _TrackedTemplate(environment.from_string(tree, clock))


def _track(body: Sequence[nodes.Node], environment: jinja2.Environment) -> Iterator[nodes.Node]:
    """Yield the nodes of a body, with calls to a tracker in the loops."""
    for node in body:
        is_loop = isinstance(node, nodes.For) and not node.recursive
        if is_loop or isinstance(node, TRANSPARENT):
            for name in ("body", "elif_", "else_"):
                if inner := getattr(node, name, None):
                    setattr(node, name, list(_track(inner, environment)))
        if not is_loop:
            yield node
            continue
        number = nodes.Const(id(node))
        names = [
            nodes.Name(name.name, "load")
            for name in (node.target, *node.target.find_all(nodes.Name))
            if isinstance(name, nodes.Name)
        ]
        node.body.insert(0, _call(BEGINS, number, names, node, environment))
        yield node
        yield _call(ENDS, number, [], node, environment)


def _call(
    name: str, number: nodes.Expr, values: list[nodes.Expr], place: nodes.Node, environment: jinja2.Environment
) -> nodes.Node:
    """Make a statement that calls a filter: Jinja calls those at once, functions by its sandbox."""
    call = nodes.ExprStmt(nodes.Filter(number, name, values, [], None, None))
    call.set_environment(environment)
    return call.set_lineno(place.lineno)
