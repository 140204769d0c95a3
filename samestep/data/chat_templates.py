"""Renders rows of conversations by a chat template, and finds the tokens that are trained; trains tokenizers for them.

The trained tokens are inside of the template's `{% generation %}` markers. Where it has none, the turns before each answer are
rendered alone, and must be, token for token, the beginning of the whole: what follows is the answer. A row for which this does
not hold is refused.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from transformers import AddedToken, PreTrainedTokenizerBase

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.data.conversation_rows import has_turns
from samestep.data.documents import shorten
from samestep.data.template_process import PROCESS, Part, Rendering, Request, TemplateLimitError, TemplateRefusal
from samestep.data.tokenizer import load_tokenizer, train_byte_level_bpe
from samestep.errors import UsageError, reason
from samestep.recipe.extras import optional
from samestep.recipe.reading import format_name, read_text
from samestep.recipe.rehearsal import SESSION

datasets = optional("datasets")
if TYPE_CHECKING:
    from datasets import Dataset, Features, Value
else:
    Dataset, Features, Value = datasets.Dataset, datasets.Features, datasets.Value

REHEARSED_VOCABULARY = 1000  # of a rehearsal without the real tokenizer
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn's thoughts, where they are not in its content between <think> and </think>."""
CONTROL_TOKEN = re.compile(r"<[|｜][^\s<>|｜]+[|｜]?>|<[^\s<>|｜/]+[|｜]>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]")
"""Control token in the text of a template."""

CHAT_TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>tools' }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{%- else %}{{ message['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Template of tokenizers that are trained here: ChatML, with markers."""
TULU_TEMPLATE = (
    "{{- bos_token or '' }}{%- for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{{- '' if loop.last else '\\n' }}"
    "{%- else %}{{ message['content'] + '\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{%- endif %}"
)
"""Template for base models, whose vocabulary has no control tokens: roles are text (Tulu, arXiv 2306.04751), with markers."""
TEMPLATES = {"chatml": CHAT_TEMPLATE, "tulu": TULU_TEMPLATE}
"""Name of a chat template that `chat_template` may give instead of a file."""


class Renderer:
    """Turns rows into tokens, and finds those that are trained.

    Args:
        tokenizer: with an eos_token; with a chat template for rows with turns.
        train_on: see `Conversations`.
        has_turns: whether rows have turns; else texts.

    Raises:
        UsageError: no chat template where rows have turns, or one that is not Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str, has_turns: bool):
        self.tokenizer, self.train_on, self.has_turns = tokenizer, train_on, has_turns
        self.special_ids = set(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.special_tokens = tuple(tokenizer.convert_ids_to_tokens(sorted(self.special_ids)))
        self.template = tokenizer.chat_template if has_turns else None
        if not has_turns:
            return
        if self.template is None:
            raise UsageError(
                "the tokenizer has no chat template, but the rows have turns: give one, --chat_template FILE, or texts "
                "(columns prompt and completion, or text)"
            )
        self.token_texts = dict(tokenizer.special_tokens_map)
        try:
            next(PROCESS.take(self._make_request([{"role": "user", "content": "a"}], None, [Part(1)])))
        except (TemplateRefusal, ValueError) as error:  # ValueError: several templates, none the default
            if isinstance(error, TemplateLimitError):
                raise
            if isinstance(error, ValueError) or error.is_syntax:  # it may refuse this turn, but not those of the rows
                raise UsageError(
                    f"the chat template cannot be used: {reason(error)}: mend it, or give --chat_template FILE"
                ) from None

    def find_template(self, tools: list | None) -> str:
        """Find the template that is used with these tools."""
        return self.tokenizer.get_chat_template(None, tools)

    @property
    def rule(self) -> str:
        """What is trained, and how it is found, for people."""
        if self.train_on == "all":
            return "all tokens"
        if not self.has_turns:
            return f"the text behind the prompt, and {self.tokenizer.eos_token}"
        turns = "the last turn of the assistant" if self.train_on == "completions" else "all turns of the assistant"
        if MARKER.search(self.find_template(None)):
            return f"{turns} by the generation markers of the template"
        return f"{turns} by rendering the turns before each answer"

    def render(self, row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens int32 [length] of each sequence of a row, and whether each is trained, bool [length].

        Raises:
            UsageError: a row that cannot be shown as it is, or in which the trained tokens cannot be found.
        """
        prompt, answers = row["prompt"], row["answers"]
        if isinstance(prompt, list):
            sequences = [self._render_turns(prompt, answer, row["tools"]) for answer in answers]
        else:
            sequences = self._render_texts(prompt, answers)
        for _, mask in sequences:
            mask[0] = False  # nothing before it predicts it
        return [(np.array(tokens, np.int32), mask) for tokens, mask in sequences]

    def _render_texts(self, prompt: str | None, answers: Sequence[str]) -> list[tuple[list[int], np.ndarray]]:
        """Tokenize texts, ended by the eos_token; without a prompt two answers share the tokens with which both begin."""
        eos = self.tokenizer.eos_token_id

        def encode(text: str) -> list[int]:
            tokens = self.tokenizer(text, verbose=False)["input_ids"]
            return tokens[:-1] if tokens and tokens[-1] == eos else tokens

        sequences = [encode((prompt or "") + answer) for answer in answers]
        before = encode(prompt) if prompt else []
        if prompt is None:
            before = [
                first
                for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*sequences, strict=False))
            ]
        for tokens in sequences:
            if tokens[: len(before)] != before:
                raise UsageError(
                    "the prompt's last tokens change when the completion follows it, so that the answer has no beginning: move "
                    "the space or line break between them from the prompt's end to the completion's beginning"
                )
        first = 0 if self.train_on == "all" else len(before)
        return [([*tokens, eos], np.arange(len(tokens) + 1) >= first) for tokens in sequences]

    def _render_turns(
        self, prompt: list[dict], answer: list[dict], tools: list[dict] | None
    ) -> tuple[list[int], np.ndarray]:
        request = self._plan(prompt, answer, tools)
        turns, first, has_markers = request.turns, self._find_first(prompt), request.has_markers
        renderings = self._render(request)
        whole = next(renderings)
        _check_nothing_is_lost(turns, tools, whole.text)
        if has_markers:
            return self._find_marked(turns, tools, first, whole, renderings)
        tokens = self._encode(whole.text)
        if self.train_on == "all":
            return tokens, np.ones(len(tokens), bool)
        return tokens, self._find_answers(turns, tools, tokens, first, renderings)

    def ask(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Ask ahead for what `render` will need for rows, which it then gets without waiting."""
        if self.has_turns:
            PROCESS.ask([self._plan(row["prompt"], answer, row["tools"]) for row in rows for answer in row["answers"]])

    def _find_first(self, prompt: list[dict]) -> int:
        """Find the number of the first turn that may be trained."""
        return 0 if self.train_on == "assistant" else len(prompt)

    def _plan(self, prompt: list[dict], answer: list[dict], tools: list[dict] | None) -> Request:
        """List the parts of a conversation that have to be rendered to find what is trained."""
        turns, first = prompt + answer, self._find_first(prompt)
        has_markers = self.train_on != "all" and MARKER.search(self.find_template(tools)) is not None
        parts = [Part(len(turns))]
        if has_markers and first:
            parts.append(Part(first, begins_answer=True))
        elif not has_markers and self.train_on != "all":
            answers = [place for place, turn in enumerate(turns) if place >= first and turn["role"] == "assistant"]
            for place in answers if 0 not in answers else ():  # the first turn of all has no beginning
                parts += [Part(place, begins_answer=True), *[Part(place + 1)] * (place < len(turns) - 1)]
        return self._make_request(turns, tools, parts, has_markers)

    def _make_request(
        self, turns: list[dict], tools: list[dict] | None, parts: list[Part], has_markers: bool = False
    ) -> Request:
        return Request(self.find_template(tools), self.token_texts, turns, tools, parts, has_markers)

    def _render(self, request: Request) -> Iterator[Rendering]:
        try:
            yield from PROCESS.take(request)
        except TemplateRefusal as error:
            raise UsageError(
                f"the chat template refuses it ({error}): mend the row, or give another template, --chat_template FILE"
            ) from None

    def _render_whole(self, turns: list[dict], tools: list[dict] | None) -> str:
        return next(self._render(self._make_request(turns, tools, [Part(len(turns))]))).text

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _find_marked(
        self, turns: list[dict], tools: list[dict] | None, first: int, whole: Rendering, renderings: Iterator[Rendering]
    ) -> tuple[list[int], np.ndarray]:
        """Find the tokens, and those inside of the template's markers, of the turns from number `first` on.

        Args:
            turns, tools: of the conversation.
            first: number of a turn.
            whole: the conversation.
            renderings: where `first` is not 0, the beginning up to it.
        """
        encoding = self.tokenizer(whole.text, add_special_tokens=False, verbose=False)
        tokens = encoding["input_ids"]
        mask = np.zeros(len(tokens), bool)
        for start, end in whole.spans:  # as apply_chat_template does with return_assistant_tokens_mask
            start_token, end_token = encoding.char_to_token(start), encoding.char_to_token(end - 1)
            if start_token is None:
                break
            mask[start_token : end_token + 1 if end_token else len(tokens)] = True
        is_assistant = np.array([turn["role"] == "assistant" for turn in turns])
        num_answers = _count_runs(is_assistant & (np.arange(len(turns)) >= first))
        if first:
            before = self._encode(next(renderings).text)
            starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)  # of each run of marked tokens
            is_one_run_per_turn = (
                len(starts) == _count_runs(is_assistant) and not is_assistant[first - 1 : first + 1].all()
            )
            if tokens[: len(before)] == before:
                mask[: len(before)] = False
            elif is_one_run_per_turn:
                mask[: starts[-num_answers]] = False
            else:
                self._refuse_beginning(turns[:first], tools, tokens, before)
        num_marked = _count_runs(mask)
        if 0 < num_marked < num_answers:
            raise UsageError(
                f"the template's markers hold tokens of {num_marked} of {num_answers} turns of the assistant: mend them in a "
                "copy of the template, --chat_template FILE, or set train_on to completions"
            )
        end = self._find_end_of_turn(tokens)
        if end is not None and mask.any() and not mask[end]:
            last = tokens[np.flatnonzero(mask)[-1]]
            if last not in self.special_ids:
                token = self.tokenizer.convert_ids_to_tokens(tokens[end])
                raise UsageError(
                    f"the template's markers end before {token}, so that the model would not learn to stop: move "
                    "{% endgeneration %} behind it, in a copy of the template, --chat_template FILE"
                )
        return tokens, mask

    def _find_answers(
        self,
        turns: list[dict],
        tools: list[dict] | None,
        tokens: list[int],
        first: int,
        renderings: Iterator[Rendering],
    ) -> np.ndarray:
        """Find the tokens of the assistant's turns from number `first` on.

        Args:
            turns, tools: of the conversation.
            tokens: of the whole of it.
            first: number of a turn.
            renderings: for each of these turns the beginning up to it, and with it, unless that is the whole.
        """
        mask = np.zeros(len(tokens), bool)
        for number, turn in enumerate(turns):
            if number < first or turn["role"] != "assistant":
                continue
            if number == 0:
                raise UsageError(
                    "the first turn is the assistant's, whose beginning only a template with {% generation %} markers shows: "
                    "give one, --chat_template FILE, or leave out the turn"
                )
            before = self._encode(next(renderings).text)
            is_last = number == len(turns) - 1
            after = tokens if is_last else self._encode(next(renderings).text)
            if tokens[: len(before)] != before:
                self._refuse_beginning(turns[:number], tools, tokens, before)
            if tokens[: len(after)] != after:
                self._refuse_beginning(turns[: number + 1], tools, tokens)
            end = self._find_end_of_turn(after)
            mask[len(before) : len(after) if end is None else end + 1] = True
        return mask

    def _refuse_beginning(
        self, turns: list[dict], tools: list[dict] | None, tokens: list[int], before: list[int] | None = None
    ) -> NoReturn:
        """Raise UsageError for turns that are rendered otherwise when others follow.

        Args:
            turns, tools: as they are rendered.
            tokens: of the whole conversation.
            before: tokens of `turns` and of the beginning of an answer; None: the fault is not there.
        """
        others = ", or set train_on to completions" if self.train_on == "assistant" else ""
        alone = self._encode(self._render_whole(turns, tools))
        if before is not None and tokens[: len(alone)] == alone:
            begun, given = (repr(self.tokenizer.decode(ids[len(alone) :][:20])) for ids in (before, tokens))
            raise UsageError(
                f"the chat template begins an answer that the model is to give with {begun}, but one that is given with "
                f"{given}, so that the trained tokens cannot be found: give a template with {{% generation %}} markers, "
                "--chat_template FILE"
            )
        raise UsageError(
            f"the chat template renders the beginning, up to turn {len(turns)}, otherwise when more turns follow, so that the "
            "trained tokens cannot be found: give a template with {% generation %} markers, --chat_template FILE"
            + others
        )

    def _find_end_of_turn(self, tokens: list[int]) -> int | None:
        """Find the place of the last special token, if nothing but white space follows it."""
        for place in range(len(tokens) - 1, -1, -1):
            if tokens[place] in self.special_ids:
                return place
            if self.tokenizer.decode(tokens[place]).strip():
                return None
        return None

    def encode_question(self, turns: list[dict[str, Any]]) -> list[int]:
        """Return the tokens of turns, and of the beginning of the answer to the last one."""
        part = Part(len(turns), begins_answer=True)
        return self._encode(next(self._render(self._make_request(turns, None, [part]))).text)

    def find_end_token(self) -> str | None:
        """Find the special token with which the template ends a turn of the assistant; None: it has none."""
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        tokens = self._encode(self._render_whole(turns, None))
        end = self._find_end_of_turn(tokens)
        return None if end is None else self.tokenizer.convert_ids_to_tokens(tokens[end])

    def find_stop(self, tokens: np.ndarray, is_trained: np.ndarray) -> int:
        """Return the id of the stop token that ends a sequence and is trained, or -1."""
        end = self._find_end_of_turn(tokens.tolist())
        if end is not None and is_trained[end]:
            return int(tokens[end])
        last = int(tokens[np.flatnonzero(is_trained)[-1]])
        return last if last in self.special_ids else -1

    def holds_special(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a turn's content holds a special token as text."""
        turns = [*row["prompt"], *(turn for answer in row["answers"] for turn in answer)] if self.has_turns else []
        return any(token in turn.get("content", "") for turn in turns for token in self.special_tokens)


def _count_runs(values: Sequence[bool] | np.ndarray) -> int:
    """Count the runs of True.

    >>> _count_runs([True, True, False, True])
    2
    """
    return int(np.sum(np.diff(np.concatenate([[0], np.asarray(values, np.int8)])) > 0))


def _check_nothing_is_lost(turns: list[dict], tools: list[dict] | None, text: str) -> None:
    """Check that a rendered text holds the content of each turn, in order, and the names of tools and of calls."""
    place = 0
    for number, turn in enumerate(turns, start=1):
        parts = [turn.get("content", "")]
        if turn["role"] == "assistant":
            before, _, content = parts[0].rpartition("</think>")
            thought = before.rpartition("<think>")[2] or next(
                (turn[name] for name in THOUGHTS if isinstance(turn.get(name), str)), ""
            )
            # Templates leave out the thoughts of earlier turns, as they do when the model answers
            parts = [thought, content] if number == len(turns) else [content]
        for part in map(str.strip, parts):
            start, size = text.find(part, place), len(part)
            if start < 0 and turn["role"] == "tool":  # some templates write what a tool returned as JSON
                part_as_json = json.dumps(part, ensure_ascii=False)[1:-1]
                start, size = text.find(part_as_json, place), len(part_as_json)
            if start < 0:
                fault = "puts into another place" if part in text else "leaves out or changes"
                raise UsageError(
                    f"the chat template {fault} the content of turn {number} (role {turn['role']}): give a template that keeps "
                    "it, --chat_template FILE, or mend the row"
                )
            place = start + size
        for name in _find_names(turn.get("tool_calls") or []):
            start = text.find(name, place)
            if start < 0:
                raise UsageError(
                    f"the chat template leaves out turn {number}'s call of the tool {shorten(name)!r}: give a template with "
                    "tool calls, --chat_template FILE, or leave out the row"
                )
            place = start + len(name)
    lost = [name for name in _find_names(tools or []) if name not in text]
    if lost:
        raise UsageError(
            f"the chat template leaves out the tool {shorten(lost[0])!r}: give a template with tools, --chat_template FILE, or "
            "leave tools out"
        )


def _find_names(items: Sequence[Any]) -> list[str]:
    """Find the names of tools, or of those that are called."""
    functions = [item.get("function", item) for item in items if isinstance(item, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    return [name for name in names if isinstance(name, str)]


# ---------------------------------------------------------------------------------------------------------------------
# the tokenizer


def make_tokenizer(recipe: Any, rows: Dataset) -> PreTrainedTokenizerBase:
    """Load the recipe's tokenizer, or train byte-level BPE on the rows; with the recipe's chat template, its own, or ours.

    A trained tokenizer has the control tokens of the template, and the one that ends a turn as eos_token.

    Raises:
        UsageError: a tokenizer or a template that cannot be used, or a vocab_size that is too small.
    """
    template = None if recipe.chat_template is None else _read_template(recipe.chat_template)
    name = recipe.tokenizer_name or recipe.model_name_or_path
    if name is not None:
        is_required = recipe.model_name_or_path is not None or SESSION in os.environ
        vocab_size = recipe.vocab_size or sys.maxsize
        try:
            tokenizer = load_tokenizer(name, vocab_size, ("eos_token",), "GPT-2", is_required=is_required)
            tokenizer.chat_template = template or tokenizer.chat_template
            return tokenizer
        except UsageError as error:
            if SESSION not in os.environ:
                raise
            if os.environ.get("RANK", "0") == "0":  # a rehearsal has random weights anyway
                print(
                    f"{error}. This rehearsal trains a tokenizer of its own: lengths and template are not the real ones"
                )
    template = (template or CHAT_TEMPLATE) if has_turns(rows) else None
    vocab_size = recipe.vocab_size or REHEARSED_VOCABULARY
    control_tokens = list(dict.fromkeys(CONTROL_TOKEN.findall(template or "")))
    smallest = 257 + len(control_tokens)
    if vocab_size < smallest:
        raise UsageError(
            f"vocab_size is {vocab_size}, must be {smallest} or more: 256 bytes, <|endoftext|>"
            f"{''.join(f', {token}' for token in control_tokens)}"
        )
    texts = rows.map(
        _join_texts,
        remove_columns=rows.column_names,
        features=Features({"text": Value("string")}),
        new_fingerprint=hashlib.sha256(Path(__file__).read_bytes() + rows_fingerprint(rows).encode()).hexdigest()[:16],
    )
    tokenizer = train_byte_level_bpe(texts, vocab_size - len(control_tokens), splits_digits=True)
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens], special_tokens=True
    )
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    if template is not None:
        with naming_template(recipe):
            tokenizer.eos_token = Renderer(tokenizer, "assistant", True).find_end_token() or tokenizer.eos_token
    return tokenizer


def try_template(recipe: Any) -> None:
    """Refuse a template file that is missing, or takes too much for the shortest conversation, before data are read."""
    if recipe.chat_template is not None:
        turns = [{"role": "user", "content": "a"}]
        with naming_template(recipe), contextlib.suppress(TemplateRefusal):  # which `Renderer` reports
            next(PROCESS.take(Request(_read_template(recipe.chat_template), {}, turns, None, [Part(1)])))


@contextlib.contextmanager
def naming_template(recipe: Any) -> Iterator[None]:
    """Name the template of a recipe in the error of one that takes too much."""
    try:
        yield
    except TemplateLimitError as error:
        name = f"chat_template {format_name(recipe.chat_template)}"
        if recipe.chat_template is None:
            name = f"the chat template of {format_name(recipe.tokenizer_name or recipe.model_name_or_path)}"
        raise UsageError(f"{name} {error}") from None


def _read_template(file: str) -> str:
    if file in TEMPLATES:
        return TEMPLATES[file]
    origin = f"chat_template {format_name(file)}"
    remedy = f"name a file with a Jinja template, or one of {', '.join(TEMPLATES)}"
    try:
        template = read_text(Path(file).expanduser(), origin)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}: {remedy}") from None
    if not template.strip():
        raise UsageError(f"{origin} is empty: {remedy}")
    return template


def _join_texts(row: dict[str, str]) -> dict[str, str]:
    """Join all that a tokenizer should know of a row."""
    values = json.loads(row["row"])
    parts = [values["prompt"] or "", *values["answers"]]
    texts = [
        part if isinstance(part, str) else f"{part['role']}\n{part.get('content', '')}" for part in _flatten(parts)
    ]
    return {"text": "\n".join(texts)}


def _flatten(parts: Sequence[Any]) -> Iterator[Any]:
    for part in parts:
        yield from part if isinstance(part, list) else [part]
