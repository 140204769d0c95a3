"""Writes the generated parts of documents, from fields, docstrings, devices, results and what commands print: `make docs`."""

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sources
import support
import tables
import trees

import samestep
import stepaudit
from samestep import cli
from samestep._internals.library_output import quiet_libraries
from samestep.errors import exit_code
from samestep.recipe.catalog import TASKS
from samestep.recipe.recipe import VARIANTS, Recipe
from stepaudit.lint.formats import anchor
from stepaudit.lint.rules import CUTS, HEAD, NOTHING, PROCESSES, RULES
from stepplan.hardware import load_device, names_by_memory

DOCS = Path(__file__).resolve().parent
TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}
BEGIN, END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"


def name_type(hint: Any) -> str:
    """Name the type of a field in words."""
    if typing.get_origin(hint) is types.UnionType:
        return " or ".join(map(name_type, typing.get_args(hint)))
    if typing.get_origin(hint) is tuple:
        return f"list of {name_type(typing.get_args(hint)[0])}s"
    return "mapping" if hint in VARIANTS.values() else TYPES[hint]


def first_sentence(item: Any) -> str:
    """Return the first sentence of a docstring, on one line."""
    text = re.split(r"(?<=\.)\s", " ".join(inspect.getdoc(item).split("\n\n")[0].split()))[0]
    return f"{text.rstrip('.:')}."


def fields() -> str:
    """Write a table for each class of recipes, the most general first: what its tasks share, then what each adds."""
    classes = dict.fromkeys(cls for task in TASKS.values() for cls in reversed(task.__mro__) if issubclass(cls, Recipe))
    lines = []
    for cls in sorted(classes, key=lambda cls: len(cls.__mro__)):
        tasks = [name for name, task in TASKS.items() if issubclass(task, cls)]
        lines += [
            f"## {cls.__name__}",
            "",
            f"{first_sentence(cls)} Tasks: {', '.join(f'`{task}`' for task in tasks)}.",
            "",
        ]
        lines += ["| field | type | rule | meaning |", "|---|---|---|---|"]
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name in inspect.get_annotations(cls):
                check, mark = field.metadata["check"], "" if field.metadata["decides"] else " *"
                rule = re.sub("^must (be )?", "", check.rule) if check else ""
                cells = (f"`{field.name}`{mark}", name_type(hints[field.name]), rule, field.metadata["help"])
                lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def names() -> str:
    """List the public names of both packages, each with its first sentence; then each with its docstring, once."""
    lines: list[str] = []
    described: list[Any] = []
    for package in (samestep, stepaudit):
        items = {name: getattr(package, name) for name in sorted(package.__all__, key=str.lower)}
        lines += [f"## {package.__name__}", "", "| name | |", "|---|---|"]
        for name, item in items.items():
            text = first_sentence(item) if callable(item) else f"Names: {', '.join(item)}."
            lines.append(f"| `{name}` | {text.replace('|', chr(92) + '|')} |")
        lines.append("")
        for name, item in items.items():
            if callable(item) and item not in described:
                described.append(item)
                lines += [f"### {package.__name__}.{name}", "", "```text", write_signature(name, item), "```", ""]
                lines += [*format_docstring(inspect.getdoc(item)), ""]
    return "\n".join(lines)


def write_signature(name: str, item: Any) -> str:
    """Write how a function or class is called, without types: docstrings say those."""
    signature = inspect.signature(item)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}"
    return textwrap.fill(text, NARROW, subsequent_indent=" " * (len(name) + 1), break_on_hyphens=False)


def format_docstring(text: str) -> list[str]:
    """Format a docstring as Markdown: sections of arguments become lists, examples blocks.

    >>> format_docstring("Do it.\\n\\nArgs:\\n    a: first,\\n        in two lines.\\n    b: second.\\n\\n>>> 1\\n1")
    ['Do it.', '', 'Args:', '', '- `a`: first,', '  in two lines.', '- `b`: second.', '', '```text', '>>> 1\\n1', '```']
    """
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        head, *rest = paragraph.split("\n")
        if head.startswith(">>>"):
            lines += ["```text", paragraph, "```"]
        elif head in ("Args:", "Attributes:", "Raises:"):
            lines += [head, ""]
            for line in textwrap.dedent("\n".join(rest)).split("\n"):
                name, colon, meaning = line.partition(":")
                is_item = colon and not line.startswith(" ")
                lines.append(
                    f"- {', '.join(f'`{each}`' for each in name.split(', '))}:{meaning}"
                    if is_item
                    else f"  {line.strip()}"
                )
        elif head == "Returns:":
            lines += [head, "", textwrap.dedent("\n".join(rest))]
        else:
            lines.append(paragraph)
        lines.append("")
    return lines[:-1]


def devices() -> str:
    """Write a table of the devices of the package, the smallest memory first."""
    columns = ("name", "device", "GB", "16-bit TFLOP/s", "memory, GB/s", "link, GB/s", "between machines, GB/s", "W")
    lines = [f"| {' | '.join(columns)} |", "|---|---|--:|--:|--:|--:|--:|--:|"]
    for name in names_by_memory():
        device = load_device(name)
        rate = device.bf16_tflops or device.fp16_tflops
        rate = f"{rate:,g}" if rate else f"none; float32 {device.fp32_tflops:g}"
        network = f"{device.network_gb_per_s:g}{' each' if device.network_per_device else ''}"
        watts = "?" if device.watts is None else f"{device.watts:g}"
        rates = f"{rate} | {device.memory_gb_per_s:,g} | {device.link_gb_per_s:g} | {network} | {watts}"
        lines.append(f"| `{name}` | {device.description} | {device.memory_bytes / 1e9:.1f} | {rates} |")
    return "\n".join([*lines, "", ""])


WIDTH, NARROW = 128, 84
"""Columns of a document, and of a block that a page of the site shows whole."""
EXAMPLES = {
    "One hardware": "plan gpt2_124m --on 8xa100-80 --price_per_hour 1.5 --start 2026-11-28T09:30 --interruptions_per_day 2",
    "Several": "plan gpt2_124m --on 1x3090,4xl4,1xh100,8xa100-80 --price_per_hour 0.25,0.7,2.5,1.5 --sort cost",
    "In reverse": "plan --what_fits 1x3090 --price_per_hour 0.25",
    "A refusal": "plan gpt2_xl_8xa100 --on 1x3090",
}
"""Title -> a command, whose output planner.md shows."""


def examples() -> str:
    """Write what commands print. One that is refused stands in the block of its output, because no test runs it."""
    lines = []
    for title, command in EXAMPLES.items():
        code, output = run(command)
        shown = f"samestep {command}"
        lines += [f"### {title}", ""]
        lines += ["```text", f"$ {shown}"] if code else ["```", shown, "```", "", "```text"]
        lines += [
            "\n".join(
                textwrap.fill(line, WIDTH, break_on_hyphens=False) if len(line) > WIDTH else line
                for line in output.rstrip().splitlines()
            )
        ]
        lines += ["```", ""]
    return "\n".join(lines)


def plan() -> str:
    """Write a comparison of hardware, as it is printed."""
    command = "plan llama3_8b_lora_3090 --on 1x3090,1xh100 --num_train_samples 49000"
    return f"```text\n$ samestep {command}\n{run(command)[1].strip()}\n```\n"


def run(command: str) -> tuple[int, str]:
    """Run a command of `samestep` in this process; return its exit code and what it prints."""
    output, argv = io.StringIO(), sys.argv
    sys.argv = ["samestep"]  # the program that its texts name
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.chdir(DOCS.parent):
            code = exit_code(lambda: cli.main(shlex.split(command)))
    finally:
        sys.argv = argv
    return code, output.getvalue()


def lint_rules() -> str:
    """Write a section for each rule of the lint, and a list of them in front."""
    sure = {
        CUTS: "an audit of two cuts",
        PROCESSES: "an audit on one and two processes",
        HEAD: "the command `check-model` with the head, or an audit of two cuts",
        NOTHING: "nothing that runs: the step itself does not show it",
    }
    lines = ["| rule | | |", "|---|---|---|"]
    lines += [
        f"| [{code}](#{anchor(code)}) | {rule.name} | {'note' if rule.is_harmless else 'fault'} |"
        for code, rule in RULES.items()
    ]
    for code, rule in RULES.items():
        symptom = f"{rule.symptom[0].upper()}{rule.symptom[1:]}."
        lines += ["", f"### {code} {rule.name}", "", symptom, "", f"**Do:** {rule.cure}."]
        lines += ["", f"**To be sure:** {sure[rule.confirmed_by]}."]
    return "\n".join(lines)


TASK_PAGES = {
    "bert_pretraining": "docs/pretraining-bert.md",
    "modernbert_pretraining": "docs/pretraining-bert.md",
    "gpt2_pretraining": "docs/pretraining-gpt2.md",
    "causal_lm_pretraining": "docs/pretraining-gpt2.md",
    "text_classification": "docs/finetuning.md",
    "causal_lm_finetuning": "docs/language-models.md",
    "seq2seq_finetuning": "docs/seq2seq.md",
    "embedding_training": "docs/embeddings.md",
    "image_classification": "docs/images.md",
    "captcha_recognition": "docs/captchas.md",
}
PARTS: dict[tuple[str, str], Callable[[], str]] = {
    ("README.md", "plan"): plan,
    ("README.md", "results"): tables.front,
    ("docs/reliability.md", "survives"): tables.what_survives,
    ("docs/speed.md", "speed"): tables.speed,
    ("docs/recipe-fields.md", "fields"): fields,
    ("docs/python-api.md", "names"): names,
    ("docs/devices.md", "devices"): devices,
    ("docs/planner.md", "examples"): examples,
    ("docs/support.md", "support"): support.support,
    ("docs/support.md", "communication"): support.communication,
    ("docs/support.md", "rules"): support.rules,
    ("docs/lint.md", "rules"): lint_rules,
    ("docs/sources.md", "states"): sources.count_states,
    ("docs/sources.md", "rows"): sources.rows,
    ("docs/sources.md", "commands"): sources.commands,
    **{("docs/which-cut.md", name): functools.partial(trees.write_leaves, name) for name in trees.TREES},
    ("docs/hardware.md", "launch files"): support.launch_files,
    **{(page, task): functools.partial(support.make_catalog, task) for task, page in TASK_PAGES.items()},
}
"""Document and name of a generated part -> what makes it. Benchmarks write their own parts."""


def write(document: str, name: str) -> str:
    """Return a document with a generated part written anew."""
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = (DOCS.parent / document).read_text(encoding="utf-8").split(begin)
    space = "" if document == "README.md" else "\n"  # where lines are few
    return head + begin + space + PARTS[document, name]().strip("\n") + "\n" + space + end + rest.split(end)[1]


if __name__ == "__main__":
    quiet_libraries()
    trees.draw_all()
    for document, name in PARTS:
        (DOCS.parent / document).write_text(write(document, name), encoding="utf-8")
        print(f"wrote {document}, {name}", file=sys.stderr)
