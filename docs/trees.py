"""Draws the decision trees of docs/which-cut.md from docs/trees.yaml, and writes their leaves with the commands: `make docs`.

A tree is a picture in two colours, for light pages and dark ones: docs/tree-NAME-light.svg and -dark.svg.
"""

import contextlib
import io
import json
import shlex
import textwrap
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import yaml

from samestep import cli

DOCS = Path(__file__).resolve().parent
TREES: dict[str, Any] = yaml.safe_load((DOCS / "trees.yaml").read_text(encoding="utf-8"))
COLOURS = {
    "light": {"text": "#1f2328", "line": "#8c959f", "question": "#ffffff", "leaf": "#ddf4ff"},
    "dark": {"text": "#e6edf3", "line": "#768390", "question": "#0d1117", "leaf": "#12314f"},
}
SLOT, LEVEL, BOX_WIDTH, LINE, COLUMNS = 140, 116, 132, 18, 15
"""Pixels between leaves and between levels, width of a box, height of a line; letters of a line in a box."""
FONT = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
WIDTH = 120
"""Columns of a command."""


class Box(NamedTuple):
    """Places a node of a tree.

    Attributes:
        x, y: middle of its upper edge, in pixels.
        lines: its text.
        number: of a leaf, from 1; None: a question.
        children: the answers to it, with the boxes that they lead to.
    """

    x: float
    y: float
    lines: list[str]
    number: int | None
    children: "list[tuple[str, Box]]"

    @property
    def height(self) -> int:
        return LINE * len(self.lines) + 12


def list_leaves(node: dict[str, Any]) -> list[dict[str, Any]]:
    """List the leaves of a tree, from left to right."""
    if "do" in node:
        return [node]
    return [leaf for answer in node["answers"].values() for leaf in list_leaves(answer)]


def place(node: dict[str, Any], level: int = 0, first: int = 1) -> Box:
    """Place a node and what is below it: a leaf in the slot of its number, a question in the middle of its answers."""
    y = 8 + LEVEL * level
    if "do" in node:
        return Box(SLOT * (first - 0.5), y, textwrap.wrap(f"{first}: {node['do']}", COLUMNS), first, [])
    children = []
    for answer, child in node["answers"].items():
        children.append((answer, place(child, level + 1, first)))
        first += len(list_leaves(child))
    x = (children[0][1].x + children[-1][1].x) / 2
    return Box(x, y, textwrap.wrap(node["ask"], COLUMNS), None, children)


def draw_box(box: Box, colours: dict[str, str]) -> list[str]:
    """Draw a box, the lines to the answers, and these: elements of SVG."""
    fill = colours["question" if box.number is None else "leaf"]
    shapes = []
    for answer, child in box.children:
        bend = child.y - 30
        path = f"M{box.x:g},{box.y + box.height:g} V{bend:g} H{child.x:g} V{child.y:g}"
        shapes.append(f'<path d="{path}" fill="none" stroke="{colours["line"]}" stroke-width="1.5"/>')
        shapes.append(write_text(child.x + 6, child.y - 10, answer, colours, "start"))
        shapes += draw_box(child, colours)
    left = box.x - BOX_WIDTH / 2
    shapes.append(
        f'<rect x="{left:g}" y="{box.y:g}" width="{BOX_WIDTH}" height="{box.height}" rx="6" fill="{fill}" '
        f'stroke="{colours["line"]}"/>'
    )
    lines = enumerate(box.lines, 1)
    return shapes + [write_text(box.x, box.y + LINE * number, line, colours, "middle") for number, line in lines]


def write_text(x: float, y: float, text: str, colours: dict[str, str], anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colours["text"]}" text-anchor="{anchor}">{escape(text)}</text>'


def find_bottom(box: Box) -> float:
    """Find the lowest pixel of a tree."""
    return max([box.y + box.height, *(find_bottom(child) for _, child in box.children)])


def draw(name: str, colour: str) -> str:
    """Draw a tree as SVG.

    Args:
        name: a key of TREES.
        colour: a key of COLOURS.
    """
    root = place(TREES[name])
    width, height = SLOT * len(list_leaves(TREES[name])), find_bottom(root) + 8
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
        f'font-size="14" font-family="{FONT}">'
    )
    return "\n".join([head, *draw_box(root, COLOURS[colour]), "</svg>"]) + "\n"


def ask_planner(command: str) -> dict[str, Any]:
    """Return what `samestep plan` says of a command of a leaf, as JSON."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        cli.main([*shlex.split(command)[1:], "--json"])
    return json.loads(output.getvalue())


def describe_plan(leaf: dict[str, Any]) -> list[str]:
    """Write cells of a leaf whose strategy is planned: recipe, hardware, and the cut b x k x N."""
    plan = ask_planner(leaf["command"])
    sizes = [plan[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")]
    return [f"`{plan['recipe']}`", plan["hardware"], f"{plan['global_batch_size']:,} in {' x '.join(map(str, sizes))}"]


def write_leaves(name: str) -> str:
    """Write the leaves of a tree: a table of plans where they have strategies, then the commands by their numbers."""
    leaves, lines = list_leaves(TREES[name]), []
    planned = [(number, leaf) for number, leaf in enumerate(leaves, 1) if "strategy" in leaf]
    if planned:
        lines += ["| leaf | recipe | on | planned: b x k x N at most |", "|--:|---|---|---|"]
        lines += [f"| {number} | {' | '.join(describe_plan(leaf))} |" for number, leaf in planned]
        lines.append("")
    lines.append("```")
    for number, leaf in enumerate(leaves, 1):
        command = textwrap.wrap(leaf["command"], WIDTH, break_on_hyphens=False, break_long_words=False)
        lines += [f"# {number}: {leaf['do']}", " \\\n  ".join(command)]
    return "\n".join([*lines, "```"])


def draw_all() -> None:
    """Write the pictures of all trees."""
    for name in TREES:
        for colour in COLOURS:
            (DOCS / f"tree-{name}-{colour}.svg").write_text(draw(name, colour), encoding="utf-8")
