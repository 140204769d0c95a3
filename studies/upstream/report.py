"""Runs every reproduction today, in one batch, and with the proposals, and writes what they say.

    python studies/upstream/report.py

Writes the tables of studies/reproductions/README.md and docs/upstream.md, and the code that the page shows.
"""

import concurrent.futures
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from forked import Server

FOLDER, PAGE = ROOT / "studies" / "reproductions", ROOT / "docs" / "upstream.md"
PROPOSALS = {
    "transformers": "transformers_trainer",
    "accelerate": "accelerate_windows",
    "trl": "trl_pairs",
    "sentence": "sentence_transformers_rows",
}
"""First word of a reproduction's name -> module of this folder."""
LIBRARIES = ("accelerate", "datasets", "lightning", "sentence_transformers", "transformers.trainer", "trl")
TARGETS = "accelerator.accumulate(model, targets=(batch[:, 1:] != -100).sum())"
TRANSFORMERS, ACCELERATE = "huggingface/transformers", "huggingface/accelerate"
SENTENCE, LIGHTNING = "huggingface/sentence-transformers", "Lightning-AI/pytorch-lightning"


@dataclass(frozen=True)
class Reproduction:
    """A file of studies/reproductions.

    Args:
        name: of the file.
        thread: repository and number of a public thread about it, if one is known.
        num_processes: that it is started on.
        whole: text to replace, and what by, so that the same program takes the step of the batch; empty: its b and k.
        asks: what a program has to change beside the library.
        on_two: what cuts its batch over two processes instead, if that is tried.
    """

    name: str
    thread: tuple[str, int] | None = None
    num_processes: int = 1
    whole: dict[str, str] = field(default_factory=dict)
    asks: dict[str, str] = field(default_factory=dict)
    on_two: dict[str, str] = field(default_factory=dict)

    @property
    def proposal(self) -> str:
        return PROPOSALS.get(self.name.partition("_")[0], "")

    @property
    def text(self) -> str:
        return (FOLDER / f"{self.name}.py").read_text(encoding="utf-8")

    def in_one_batch(self) -> dict[str, str]:
        """Make the changes with which its samples are one micro-batch."""
        if self.whole:
            return self.whole
        names, b, k = re.search(r"^(b, k\b.*?) = (\d), (\d)", self.text, re.MULTILINE).groups()
        return {f"{names} = {b}, {k}": f"{names} = {int(b) * int(k)}, 1"}


K_TIMES, HALF = (TRANSFORMERS, 47688), {"b, k = 2, 2": "b, k = 2, 1"}
REPRODUCTIONS = [
    Reproduction("transformers_sequence_classifier", K_TIMES),
    Reproduction("transformers_token_classifier", K_TIMES),
    Reproduction("transformers_multiple_choice", K_TIMES),
    Reproduction("transformers_masked_lm", K_TIMES, on_two={"b, k = 2, 4": "b, k = 2, 2"}),
    Reproduction("transformers_t5", K_TIMES),
    Reproduction("transformers_bart", K_TIMES),
    Reproduction("transformers_whisper", K_TIMES),
    Reproduction("transformers_logged_loss", K_TIMES),
    Reproduction("transformers_question_answering"),
    Reproduction(
        "transformers_first_label",
        (TRANSFORMERS, 46204),
        whole={'"labels": row}': '"labels": torch.cat([torch.tensor([-100]), row[1:]])}'},
    ),
    Reproduction("transformers_moe_balance"),
    Reproduction("transformers_eval_loss", (TRANSFORMERS, 39241), whole={"b = 2": "b = 5"}),
    Reproduction(
        "transformers_two_processes", (ACCELERATE, 2316), 2, {"num_samples = 4, 1, 7": "num_samples = 4, 1, 8"}
    ),
    Reproduction("trl_dpo_tail"),
    Reproduction("trl_kto_tail"),
    Reproduction("trl_reward_tail"),
    Reproduction("trl_cpo", on_two=HALF),
    Reproduction("trl_orpo", on_two=HALF),
    Reproduction("accelerate_tail"),
    Reproduction("accelerate_ragged", asks={"accelerator.accumulate(model)": TARGETS}, on_two=HALF),
    Reproduction("accelerate_run_clm"),
    Reproduction("accelerate_run_glue"),
    Reproduction(
        "accelerate_shifted_labels",
        whole={
            "torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)": "ids",
            "(labels != -100)": "(labels[:, 1:] != -100)",
        },
    ),
    Reproduction(
        "accelerate_two_processes", (ACCELERATE, 2316), 2, whole={"b, num_samples = 4, 7": "b, num_samples = 4, 8"}
    ),
    Reproduction("lightning_tail", (LIGHTNING, 19987)),
    Reproduction("lightning_ragged"),
    Reproduction("sentence_negatives", (SENTENCE, 2916)),
    Reproduction("sentence_cached_negatives", (SENTENCE, 2916)),
    Reproduction("sentence_cosine_tail"),
]


WAYS = {
    "today": lambda case: ("", {}, case.num_processes),
    "in one batch": lambda case: ("", case.in_one_batch(), case.num_processes),
    "mended": lambda case: (case.proposal, case.asks, case.num_processes) if case.proposal else None,
    "two processes": lambda case: ("", case.on_two, 2) if case.on_two else None,
    "two processes, mended": lambda case: (case.proposal, case.asks | case.on_two, 2) if case.on_two else None,
}
"""Way to run a reproduction -> the proposal, the changes, the number of processes; None: it is not run so."""


def run(server: Server, case: Reproduction, way: str) -> tuple[str, int]:
    """Run a reproduction in one of `WAYS`: its first process's last line, and its exit code.

    Raises:
        RuntimeError: it ends with an error.
    """
    proposal, changes, num_processes = WAYS[way](case)
    with tempfile.TemporaryDirectory() as folder:
        server.run([folder, case.name, proposal, json.dumps(changes)], num_processes, module="run_reproduction")
        found = json.loads((Path(folder) / "0.json").read_text(encoding="utf-8"))
    return found["line"], found["code"]


def about(case: Reproduction) -> str:
    """Name the library of a reproduction, and its version here."""
    library = case.name.partition("_")[0].replace("sentence", "sentence-transformers")
    return f"{library} {version(library)}"


def write_today(today: dict[str, str]) -> str:
    """Write the table of the README."""
    lines = ["| file | seen with | prints today | known as |", "|---|---|---|---|"]
    for case in REPRODUCTIONS:
        known = "-"
        if case.thread:
            repository, number = case.thread
            known = f"[{repository.rpartition('/')[2]} {number}](https://github.com/{repository}/issues/{number})"
        how = " (on two processes)" if case.num_processes > 1 else ""
        lines.append(f"| [{case.name}.py]({case.name}.py){how} | {about(case)} | {today[case.name]} | {known} |")
    return "\n".join(lines)


def shorten(line: str) -> str:
    """Shorten what a reproduction prints to its number.

    >>> shorten("wrong: gradient 4.00 times, error 3"), shorten("right: gradient with an error of 3e-08")
    ('3', 'exact')
    """
    if line.startswith("right:"):
        return "exact"
    found = re.search(r"error(?: of)? (\S+)|is (\S+), .* (\S+)$", line)
    return found[1] or f"{found[2]}, not {found[3]}"


def write_mended(found: dict[str, dict[str, str]]) -> str:
    """Write the table of the page."""
    lines = [
        "| reproduction | today | with the proposal | on two processes: today | with it |",
        "|---|---|---|---|---|",
    ]
    for case in REPRODUCTIONS:
        if case.proposal:
            ways = ["today", "mended", "two processes", "two processes, mended"]
            cells = [shorten(found[case.name][way]) if way in found[case.name] else "-" for way in ways]
            name = f"[{case.name}](../studies/reproductions/{case.name}.py)"
            lines.append(f"| {name}{' (two processes)' if case.num_processes > 1 else ''} | {' | '.join(cells)} |")
    return "\n".join(lines)


def read_code(name: str, part: str) -> str:
    """Read a part of a proposal, between two of its comments `# page: PART`."""
    text = (Path(__file__).with_name(f"{name}.py")).read_text(encoding="utf-8")
    return text.partition(f"# page: {part}\n")[2].partition("\n# page: ")[0].strip()


def insert(text: str, name: str, content: str) -> str:
    """Put content between the markers of a page."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    return f"{text.partition(begin)[0]}{begin}\n{content}\n{end}{text.partition(end)[2]}"


def write_code(text: str) -> str:
    """Write the code of the page anew."""
    for name, part in re.findall(r"<!-- (\w+)/(\w+): begin -->", text):
        text = insert(text, f"{name}/{part}", f"```python\n{read_code(name, part)}\n```")
    return text


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:

        def measure(case: Reproduction) -> dict[str, str]:
            with Server("run_reproduction", LIBRARIES, address=f"{folder}/socket") as server:
                return {way: run(server, case, way)[0] for way in WAYS if WAYS[way](case)}

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            names = [case.name for case in REPRODUCTIONS]
            found = dict(zip(names, pool.map(measure, REPRODUCTIONS), strict=True))
    for name, ways in found.items():
        print(name, ways)
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    today = write_today({name: ways["today"] for name, ways in found.items()})
    (FOLDER / "README.md").write_text(insert(readme, "today", today), encoding="utf-8")
    page = write_code(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(insert(page, "mended", write_mended(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
