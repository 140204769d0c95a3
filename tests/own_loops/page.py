"""Writes the diffs of two pages of docs/ from the programs of before/ and after/.

python tests/own_loops/page.py
"""

import difflib
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
PAGES = {
    ROOT / "docs" / "your-own-loop.md": ("accelerate_loop", "epochs", "causal_lm", "streaming", "trainer_bert"),
    ROOT / "docs" / "adversaries-and-rewards.md": ("gan", "reinforce"),
}
"""Page -> the programs whose diffs it shows."""
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
CONTEXT = 2  # lines around a change


def changed_lines(before: str, after: str) -> int:
    """Lines replaced, added or taken away; not empty ones."""
    old, new = ([line for line in text.splitlines() if line.strip()] for text in (before, after))
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for tag, a, b, c, d in blocks if tag != "equal")


def read(name: str) -> tuple[str, str]:
    """A program before and after."""
    before, after = ((FOLDER / folder / f"{name}.py").read_text(encoding="utf-8") for folder in ("before", "after"))
    return before, after


def section(name: str) -> str:
    """Between the markers of a program: how many lines change, and which."""
    before, after = read(name)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=CONTEXT)
    shown = ["…" if line.startswith("@@") else line for line in lines][3:]
    where = f"[before](../tests/own_loops/before/{name}.py), [after](../tests/own_loops/after/{name}.py)"
    return f"\n{changed_lines(before, after)} lines change ({where}):\n\n```diff\n" + "\n".join(shown) + "\n```\n"


def page(path: Path) -> str:
    """A page with its sections as they follow from the programs."""
    text = path.read_text(encoding="utf-8")
    for name in PAGES[path]:
        head, rest = text.split(BEGIN.format(name), 1)
        _, tail = rest.split(END.format(name), 1)
        text = head + BEGIN.format(name) + section(name) + END.format(name) + tail
    return text


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(page(path), encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)
