"""What is trained with the chat templates of released models, as they are: their texts are those that TRL holds.

    make bench NAME=templates

Each template renders chats of several kinds, and drawn ones with system turns, tools and thoughts. A chat is right where the
tokens are those of `render_jinja_template`, where each answer is one run of trained tokens that holds all words of its turn and
no other's (of turns that follow one another, where the template makes one of them), begins behind what `add_generation_prompt`
gives, and ends with a special token; and where arguments of calls as text and as objects give the same tokens. Everything else
must be refused in one line.
"""

import contextlib
import datetime
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import harness
import jinja2
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from samestep.data.chat_templates import CONTROL_TOKEN, Renderer
from samestep.errors import UsageError

HEADER = re.compile(r"\s*(<[^<>]*>)*\s*(assistant|model\n|Assistant|CHATBOT|<[|｜](assistant|Assistant|CHATBOT))")
WORD = re.compile(r"w\d+x")
CALL = "w0x"
"""Name of the tool of all chats."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": CALL,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "c"}},
                "required": ["city"],
            },
        },
    }
]
KINDS = {
    "one answer": "ua",
    "system": "sua",
    "several answers": "uauaua",
    "tools": "uctaua",
    "thoughts": "uhuh",
    "thoughts and tools": "uktkthuh",
    "the assistant begins": "aua",
    "two answers in a row": "uaa",
    "a call at the end": "uc",
}
"""Kind of a chat -> its turns: system, user, answer, call, result of a tool, thoughts and answer, thoughts and call."""


def templates() -> dict[str, str]:
    """Read the templates of released models that TRL holds, and those that it has changed for training, `*_training`."""
    files = sorted((Path(find_spec("trl").origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def make_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes and of the control tokens of a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokens = [*dict.fromkeys([*CONTROL_TOKEN.findall(template), "<turn|>", "</s>"])]
    more = {"additional_special_tokens": [token for token in tokens if token not in ("</s>", "<s>")]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="</s>", bos_token="<s>", **more)
    tokenizer.chat_template = template
    return tokenizer


def make_turns(letters: str, calls_as_text: bool = False) -> list[dict]:
    """Make turns of different words, see `KINDS`."""
    turns = []
    for number, letter in enumerate(letters):
        content, other = f"w{2 * number + 1}x", f"w{2 * number + 2}x"
        if letter in "ck":
            arguments = f'{{"city": "{content}"}}' if calls_as_text else {"city": content}
            call = {"id": "call00001", "type": "function", "function": {"name": CALL, "arguments": arguments}}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        elif letter == "t":
            turn = {"role": "tool", "name": CALL, "tool_call_id": "call00001", "content": content}
        else:
            role = {"s": "system", "u": "user"}.get(letter, "assistant")
            turn = {"role": role, "content": content}
        turns.append(turn | ({"reasoning_content": other} if letter in "hk" else {}))
    return turns


def draw(number: int) -> str:
    """Draw the turns of a chat with thoughts and tools, see `KINDS`."""
    rng = np.random.default_rng(number)
    letters = "s" * int(rng.integers(2))
    has_thoughts, has_tools = rng.random(2) < 0.5
    for _ in range(rng.integers(1, 4)):
        letters += "u"
        if has_tools and rng.random() < 0.7:
            letters += ("k" if has_thoughts else "c") + "t"
        letters += "h" if has_thoughts else "a"
    return letters


def render(renderer: Renderer, letters: str, calls_as_text: bool = False) -> tuple[list[int], np.ndarray]:
    """Render turns, all answers trained."""
    turns = make_turns(letters, calls_as_text)
    tools = TOOLS if set(letters) & set("ck") else None
    ((tokens, mask),) = renderer.render({"prompt": [], "answers": [turns], "tools": tools})
    return tokens.tolist(), mask


def render_by_transformers(tokenizer: PreTrainedTokenizerFast, letters: str) -> Iterator[list[int]]:
    """Render turns by transformers, calls in each form that some templates need."""
    tools = TOOLS if set(letters) & set("ck") else None
    for as_text, content in itertools.product((False, True), ({}, {"content": None}, {"content": ""})):
        turns = [
            {key: value for key, value in turn.items() if key != "content"} | content
            if turn.get("tool_calls")
            else turn
            for turn in make_turns(letters, as_text)
        ]
        with contextlib.suppress(jinja2.TemplateError, TypeError):
            options = {"tools": tools, "chat_template": tokenizer.chat_template} | tokenizer.special_tokens_map
            (text,), _ = render_jinja_template(conversations=[turns], **options)
            yield tokenizer(text, add_special_tokens=False)["input_ids"]


def judge(renderer: Renderer, letters: str) -> str:
    """Judge what is trained of turns: right, right but for the stop token, refused: why, or WRONG: why."""
    try:
        tokens, mask = render(renderer, letters)
        as_text = render(renderer, letters, calls_as_text=True)
    except UsageError as error:
        return f"refused: {error}" if "\n" not in str(error) else f"WRONG: {error}"
    if tokens != as_text[0] or (mask != as_text[1]).any():
        return "WRONG: arguments as text give other tokens"
    tokenizer = renderer.tokenizer
    if tokens not in list(render_by_transformers(tokenizer, letters)):
        return "WRONG: other tokens than those of transformers"
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]))).reshape(-1, 2)
    runs = [tokenizer.decode(tokens[start:end]) for start, end in edges]
    turns = make_turns(letters)
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    groups = [[number] for number in answers]
    if len(runs) < len(answers):  # the template makes one turn of answers that follow one another
        groups = [list(group) for _, group in itertools.groupby(answers, lambda n: n - answers.index(n))]
    if len(runs) != len(groups):
        return f"WRONG: {len(runs)} runs of trained tokens for {len(answers)} answers"
    for run, group in zip(runs, groups, strict=True):
        words, must, may = set(WORD.findall(run)), set(), set()
        for number in group:
            must |= {f"w{2 * number + 1}x"} | ({CALL} if letters[number] in "ck" else set())
            thought = {f"w{2 * number + 2}x"} if letters[number] in "hk" else set()
            may |= must | thought
            must |= thought if number == len(turns) - 1 else set()
        if not must <= words <= may:
            return f"WRONG: turn {group[0] + 1} trains {run!r}"
        if HEADER.match(run):
            return f"WRONG: turn {group[0] + 1} trains the header of {run!r}"
    written = [[token for token in tokens[start:end] if tokenizer.decode([token]).strip()] for start, end in edges]
    kept = [run[-1] in renderer.special_ids for run in written]  # white space may follow
    return "right" if all(kept) else "right, but some answers have no stop token in the template"


def measure(template: str, num_drawn: int) -> dict:
    """Judge chats of each kind, and drawn ones."""
    renderer = Renderer(make_tokenizer(template), "assistant", True, datetime.date.today().isoformat())
    kinds = {kind: judge(renderer, letters) for kind, letters in KINDS.items()}
    drawn = Counter(judge(renderer, draw(number)).split(":")[0].split(",")[0] for number in range(num_drawn))
    return {"kinds": kinds, "drawn": dict(drawn)}


def tables(results: dict) -> str:
    """Show the kinds of chats that are trained exactly or refused, for each template."""
    signs, notes = {"right": "yes"}, []
    lines = []
    for name, row in results["rows"].items():
        cells = []
        for verdict in row["kinds"].values():
            text = verdict.partition(": ")[0]
            cells.append(signs.get(text, "yes, no stop" if text.startswith("right") else text))
        drawn = row["drawn"]
        lines.append([f"`{name}`", *cells, f"{drawn.get('right', 0)} / {drawn.get('refused', 0)}"])
        notes += [drawn.get("WRONG", 0) + sum(cell == "WRONG" for cell in cells)]
    table = harness.table(["template", *KINDS, "drawn: right / refused"], lines)
    return (
        f"{table}\n{len(lines)} templates; {sum(notes)} chats are trained otherwise than they should be. `refused`: in one "
        "line, which\nnames the reason, mostly the template's own: roles that must alternate, no tools, no thoughts. "
        "`no stop`: the template\nwrites no token that ends the last answer, which the log says.\n"
    )


def part(results: dict) -> str:
    return harness.part("templates.py", results["about"], tables(results))


def main() -> None:
    parser = harness.flags("templates", __doc__)
    parser.add_argument("--num_drawn", type=harness.positive, default=200, help="drawn chats for each template [200]")
    arguments = parser.parse_args()
    rows = {}
    for name, template in templates().items():
        rows[name] = measure(template, arguments.num_drawn)
        print(
            name,
            rows[name]["drawn"],
            *filter(lambda text: "WRONG" in text, rows[name]["kinds"].values()),
            file=sys.stderr,
        )
    results = {"about": harness.about("make bench NAME=templates", ("trl", "transformers", "jinja2")), "rows": rows}
    harness.write(arguments.output, results, parts={"templates": ("chat-templates.md", part(results))})


if __name__ == "__main__":
    main()
