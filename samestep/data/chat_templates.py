"""Renders rows of conversations by a chat template, and finds the tokens that are trained; trains tokenizers for them.

The trained tokens are inside of the template's `{% generation %}` markers. Most templates have none. Then an answer is what the
template's loop writes for its turn, from where the model begins, which the turns before it show when they are rendered alone,
to the token that ends the turn. So no template has to be edited, and the tokenizer's own is saved with the model. A row in
which this cannot be found is refused.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from transformers import AddedToken, PreTrainedTokenizerBase

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.data.arrow import Dataset, Features, Value, hash_modules, hash_parts
from samestep.data.conversation_rows import has_turns
from samestep.data.row_forms import find_beginning
from samestep.data.row_images import list_texts
from samestep.data.tables import shorten
from samestep.data.template_process import PROCESS, Part, Rendering, Request, TemplateLimitError, TemplateRefusal
from samestep.data.tokenizer import load_tokenizer, train_byte_level_bpe
from samestep.errors import UsageError, reason
from samestep.recipe.reading import format_name, read_text
from samestep.recipe.rehearsal import SESSION

REHEARSED_VOCABULARY = 1000  # of a rehearsal without the real tokenizer
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Fields of a turn's thoughts, where they are not in its content between <think> and </think>."""
CONTROL_TOKEN = re.compile(r"<[|｜][^\s<>|｜]+[|｜]?>|<[^\s<>|｜/]+[|｜]>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]")
"""Control token in the text of a template."""

TEMPLATES = {
    name: (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8").replace("\n", "")
    for name in ("chatml", "tulu")
}
"""Name of a chat template that `chat_template` may give instead of a file -> the template, with markers: `chatml` is that
of tokenizers that are trained here; `tulu` (arXiv 2306.04751) is for base models, without control tokens: roles are text."""
CHAT_TEMPLATE = TEMPLATES["chatml"]
IMAGE_TEMPLATE = (Path(__file__).parent / "templates/images.jinja").read_text(encoding="utf-8").replace("\n", "")
"""The one of tokenizers that are trained here for images."""

CLOCK, NEVER = "strftime_now", "1970-01-01"
"""Function by which a template reads the clock, and the date that it reads by any other name."""
SHORTEST = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
"""A conversation to try templates with."""
CALL: dict[str, Any] = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "get_some", "arguments": {"of_what": "some_rain"}},
}
"""A call of a tool to try templates with."""


class CallForm(NamedTuple):
    """A form of calls of tools.

    Attributes:
        takes_text: whether arguments are JSON text, not an object.
        no_content: the part of a turn that says that it has no content beside the calls.
    """

    takes_text: bool
    no_content: dict[str, str | None]


NO_CONTENTS: tuple[dict[str, str | None], ...] = ({}, {"content": None}, {"content": ""})
CALL_FORMS = [CallForm(takes_text, nothing) for nothing in NO_CONTENTS for takes_text in (False, True)]


class UnclearCallError(UsageError):
    """A call of a tool whose arguments are a text that is no object."""


class ChatTemplate:
    """A tokenizer and its chat template, which is asked what it writes for turns.

    Args:
        tokenizer: with an eos_token; with a chat template for rows with turns.
        has_turns: whether rows have turns; else texts, and the template is not asked.
        date: what a template reads from the clock, in ISO's format; None: today.

    Attributes:
        date: what the template reads from the clock; None: it does not read it.

    Raises:
        UsageError: no chat template where rows have turns, or one that is not Jinja.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, has_turns: bool, date: str | None = None):
        self.tokenizer, self.has_turns = tokenizer, has_turns
        self.date: str | None = None
        self.openings: dict[str, list[str]] = {}  # of each template that was asked for them
        self.call_forms: dict[str, CallForm] = {}
        self.special_ids = set(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self.special_tokens = tuple(tokenizer.convert_ids_to_tokens(sorted(self.special_ids)))
        self.closing_ids = set(self.special_ids)  # of tokens that can end a turn
        self.template = tokenizer.chat_template if has_turns else None
        if not has_turns:
            return
        if self.template is None:
            raise UsageError(
                "the tokenizer has no chat template, but the rows have turns: give one, --chat_template FILE, or texts "
                "(columns prompt and completion, or text)"
            )
        self.token_texts = dict(tokenizer.special_tokens_map)
        if CLOCK in json.dumps(self.template):  # of several templates any
            self.date = date or datetime.date.today().isoformat()
        try:
            next(PROCESS.take(self._make_request(SHORTEST[:1], None, [Part(1)])))
        except (TemplateRefusal, ValueError) as error:  # ValueError: several templates, none the default
            if isinstance(error, TemplateLimitError):
                raise
            if isinstance(error, ValueError) or error.is_syntax:  # it may refuse this turn, but not those of the rows
                raise UsageError(
                    f"the chat template cannot be used: {reason(error)}: mend it, or give --chat_template FILE"
                ) from None
        added = set(tokenizer.added_tokens_decoder) - self.special_ids
        if added:  # one may end every turn, although it is not special
            with contextlib.suppress(UsageError):  # the template may refuse them
                tokens = self._encode(self._render_whole(SHORTEST, None))
                last = next((token for token in reversed(tokens) if tokenizer.decode([token]).strip()), None)
                self.closing_ids |= added & {last}

    def find_template(self, tools: list | None) -> str:
        """Find the template that is used with these tools."""
        return self.tokenizer.get_chat_template(None, tools)

    def _make_request(
        self, turns: list[dict], tools: list[dict] | None, parts: list[Part], has_markers: bool = False
    ) -> Request:
        if any(None in turn.values() for turn in turns):
            turns = [
                {
                    key: value
                    for key, value in turn.items()
                    if value is not None or (key == "content" and "tool_calls" in turn)
                }
                for turn in turns
            ]
        return Request(
            self.find_template(tools), self.token_texts, turns, tools, parts, has_markers, self.date or NEVER
        )

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

    def _find_openings(self, tools: list[dict] | None) -> list[str]:
        """Find what a template may write for a turn of the assistant before the part that the model writes, the longest first.

        It is what the model is given to answer, or the part of it with which turns in the middle begin: templates of models
        that think may give `<think>` as well.
        """
        template = self.find_template(tools)
        if template not in self.openings:
            turns = [
                {"role": role, "content": text} for role, text in zip(("user", "assistant") * 2, "axby", strict=True)
            ]
            request = self._make_request(turns, tools, [Part(4), Part(1), Part(1, begins_answer=True)])
            self.openings[template] = []
            with contextlib.suppress(TemplateRefusal):
                whole, alone, asked = PROCESS.take(request)
                spans = {number: whole.text[start:end] for start, end, number in whole.spans}
                end = max((end for _, end, _ in alone.spans), default=0)
                if spans.keys() == {0, 1, 2, 3} and asked.text[:end] == alone.text[:end]:
                    opening = asked.text[end:]
                    shared = "".join(find_beginning(opening, spans[1], spans[3]))
                    self.openings[template] = [text for text in dict.fromkeys((opening, shared)) if text or not opening]
        return self.openings[template]

    def _write_calls(self, turns: list[dict], tools: list[dict] | None) -> list[dict]:
        """Write calls of tools as the template takes them, whether their arguments are objects or JSON text.

        Raises:
            UnclearCallError: a text is no object, where the template takes objects.
        """
        if not any(turn.get("tool_calls") for turn in turns):
            return turns
        form, written = self._find_call_form(tools), []
        for number, turn in enumerate(turns, start=1):
            if calls := turn.get("tool_calls"):
                turn = turn | {"tool_calls": [_write_call(number, call, form.takes_text) for call in calls]}
                if not turn.get("content"):
                    turn = {key: value for key, value in turn.items() if key != "content"} | form.no_content
            written.append(turn)
        return written

    def _find_call_form(self, tools: list[dict] | None) -> "CallForm":
        """Find the form in which a template takes calls: the first in which it writes one as it is."""
        template = self.find_template(tools)
        if template not in self.call_forms:
            self.call_forms[template] = next(filter(lambda form: self._takes(form, tools), CALL_FORMS), CALL_FORMS[0])
        return self.call_forms[template]

    def _takes(self, form: "CallForm", tools: list[dict] | None) -> bool:
        """Tell whether a template writes a call in this form as it is: not as text within text, nor as Python writes it."""
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [_write_call(2, CALL, form.takes_text)], **form.no_content},
            {"role": "tool", "name": CALL["function"]["name"], "tool_call_id": CALL["id"], "content": "17"},
            {"role": "assistant", "content": "b"},
        ]
        try:
            text = next(PROCESS.take(self._make_request(turns, tools, [Part(4)]))).text
        except TemplateRefusal:
            return False
        ((key, value),) = CALL["function"]["arguments"].items()
        unwanted = f"'{key}'", f'\\"{key}', "None", "undefined"
        return all(word in text for word in (CALL["function"]["name"], key, value)) and not any(
            word in text for word in unwanted
        )

    def _find_end_of_turn(self, tokens: list[int]) -> int | None:
        """Find the place of the last token that can end a turn, if nothing but white space follows it."""
        for place in range(len(tokens) - 1, -1, -1):
            if tokens[place] in self.closing_ids:
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
        (whole,) = self._render(self._make_request(SHORTEST, None, [Part(2)]))
        end_of_turn = max((end for _, end, turn in whole.spans if turn == 1), default=len(whole.text))
        tokens = self._encode(whole.text)
        end = self._find_end_of_turn(self._encode(whole.text[:end_of_turn])) or self._find_end_of_turn(tokens)
        return None if end is None else self.tokenizer.convert_ids_to_tokens(tokens[end])


class Renderer(ChatTemplate):
    """Turns rows into tokens, and finds those that are trained.

    Args:
        tokenizer, has_turns, date: see `ChatTemplate`.
        train_on: see `Conversations`.

    Attributes:
        is_rewritten: whether the last row holds answers before which the model saw other turns than the whole has.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: str, has_turns: bool, date: str | None = None):
        super().__init__(tokenizer, has_turns, date)
        self.train_on, self.is_rewritten = train_on, False

    @property
    def rule(self) -> str:
        """A sentence for people on which tokens are trained, and how they are found."""
        if self.train_on == "all":
            return "all tokens"
        if not self.has_turns:
            return f"the text behind the prompt, and {self.tokenizer.eos_token}"
        turns = "the last turn of the assistant" if self.train_on == "completions" else "all turns of the assistant"
        how = "the generation markers" if MARKER.search(self.find_template(None)) else "the turns"
        clock = "" if self.date is None else f", which reads {self.date} from the clock, on any day"
        return f"{turns} by {how} of the template{clock}"

    def render(self, row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens int32 [length] of each sequence of a row, and whether each is trained, bool [length].

        Turns of the prompt are not trained, unless all tokens are.

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
            before = find_beginning(*sequences)
        for tokens in sequences:
            if tokens[: len(before)] != before:
                raise UsageError(
                    "the prompt's last tokens change when the completion follows it, so that the answer has no beginning. Move "
                    "the space or line break between them from the prompt's end to the completion's beginning"
                )
        first = 0 if self.train_on == "all" else len(before)
        return [([*tokens, eos], np.arange(len(tokens) + 1) >= first) for tokens in sequences]

    def _render_turns(
        self, prompt: list[dict], answer: list[dict], tools: list[dict] | None
    ) -> tuple[list[int], np.ndarray]:
        self.is_rewritten = False
        request = self._plan(prompt, answer, tools)
        whole, *others = self._render(request)  # all of them, before any other is asked for
        _check_nothing_is_lost(request.turns, tools, whole.text)
        if request.has_markers:
            return self._find_marked(request, len(prompt), whole, others)
        tokens = self._encode(whole.text)
        if self.train_on == "all":
            return tokens, np.ones(len(tokens), bool)
        return tokens, self._find_answers(request, len(prompt), whole, others, tokens)

    def ask(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Ask ahead for what `render` will need for rows, which it then gets without waiting."""
        if self.has_turns:
            requests: list[Request] = []
            for row in rows:
                with contextlib.suppress(UnclearCallError):  # which `render` raises
                    requests += [self._plan(row["prompt"], answer, row["tools"]) for answer in row["answers"]]
            PROCESS.ask(requests)

    def _plan(self, prompt: list[dict], answer: list[dict], tools: list[dict] | None) -> Request:
        """List the parts of a conversation that have to be rendered to find what is trained."""
        turns, first = self._write_calls(prompt + answer, tools), len(prompt)
        has_markers = self.train_on != "all" and MARKER.search(self.find_template(tools)) is not None
        parts = [Part(len(turns))]
        if has_markers and first:
            parts.append(Part(first, begins_answer=True))
        elif not has_markers and self.train_on != "all":
            answers = [place for place, turn in enumerate(turns) if place >= first and turn["role"] == "assistant"]
            parts += [Part(place, begins_answer=True) for place in answers if place]  # no turn is before the first
        return self._make_request(turns, tools, parts, has_markers)

    def _find_marked(
        self, request: Request, first: int, whole: Rendering, others: Sequence[Rendering]
    ) -> tuple[list[int], np.ndarray]:
        """Find the tokens, and those inside of the template's markers, of the turns from number `first` on.

        Args:
            request: for the conversation.
            first: number of a turn.
            whole, others: the conversation and, where `first` is not 0, the beginning up to it, rendered.
        """
        turns = request.turns
        encoding = self.tokenizer(whole.text, add_special_tokens=False, verbose=False)
        tokens = encoding["input_ids"]
        mask = np.zeros(len(tokens), bool)
        openings = [opening for opening in self._find_openings(request.tools) if opening]
        for start, end in whole.spans:  # as apply_chat_template does with return_assistant_tokens_mask
            # Some markers begin before what the model is given to answer, which it never has to write
            start += next((len(text) for text in openings if whole.text.startswith(text, start, end)), 0)
            start_token, end_token = encoding.char_to_token(start), encoding.char_to_token(end - 1)
            if start_token is None:
                break
            mask[start_token : end_token + 1 if end_token else len(tokens)] = True
        is_assistant = np.array([turn["role"] == "assistant" for turn in turns])
        num_answers = _count_runs(is_assistant & (np.arange(len(turns)) >= first))
        if first:
            before = self._encode(others[0].text)
            starts = np.flatnonzero(np.diff(mask, prepend=False) & mask)  # of each run of marked tokens
            is_one_run_per_turn = (
                len(starts) == _count_runs(is_assistant) and not is_assistant[first - 1 : first + 1].all()
            )
            if tokens[: len(before)] == before:
                mask[: len(before)] = False
            elif is_one_run_per_turn:
                mask[: starts[-num_answers]] = False
            else:
                self._refuse_beginning(request, first, tokens, before)
        num_marked = _count_runs(mask)
        if 0 < num_marked < num_answers:
            raise UsageError(
                f"the template's markers hold tokens of {num_marked} of {num_answers} turns of the assistant. Mend them in a "
                "copy of the template, --chat_template FILE, or set train_on to completions"
            )
        end = self._find_end_of_turn(tokens)
        if end is not None and mask.any() and not mask[end]:
            last = tokens[np.flatnonzero(mask)[-1]]
            if last not in self.special_ids:
                token = self.tokenizer.convert_ids_to_tokens(tokens[end])
                raise UsageError(
                    f"the template's markers end before {token}, so that the model would not learn to stop. Move "
                    "{% endgeneration %} behind it, in a copy of the template, --chat_template FILE"
                )
        return tokens, mask

    def _find_answers(
        self, request: Request, first: int, whole: Rendering, others: Sequence[Rendering], tokens: list[int]
    ) -> np.ndarray:
        """Find the tokens of the assistant's turns from number `first` on.

        Args:
            request: for the conversation.
            first: number of a turn.
            whole, others: the conversation and, for each of these turns, the beginning up to it, rendered.
            tokens: of the conversation.
        """
        turns, tools, renderings = request.turns, request.tools, iter(others)
        mask, spans = np.zeros(len(tokens), bool), _find_spans(turns, whole)
        for number, turn in enumerate(turns):
            if number < first or turn["role"] != "assistant":
                continue
            before = next(renderings).text if number else None
            is_last, span = number == len(turns) - 1, spans.get(number)
            start = self._find_start(number, tools, whole.text, before, span)
            begun = self._encode(whole.text[:start] if start is not None else before or "")
            if start is None or tokens[: len(begun)] != begun:
                self._refuse_beginning(request, number, tokens, begun)
            if span is not None:
                text = whole.text[: span[1]]
            else:  # then what follows must change nothing
                text = whole.text if is_last else self._render_whole(turns[: number + 1], tools)
            may_stop = is_last or turns[number + 1]["role"] != "assistant"
            end = self._find_end(tokens, len(begun), tokens if text == whole.text else self._encode(text), may_stop)
            if end is None and (text := text.rstrip()):  # white space may be one token with that of the next turn
                end = self._find_end(tokens, len(begun), self._encode(text), may_stop)
            if end is None:
                self._refuse_beginning(request, number + 1, tokens)
            mask[len(begun) : end] = True
        return mask

    def _find_start(
        self, number: int, tools: list[dict] | None, text: str, before: str | None, span: tuple[int, int] | None
    ) -> int | None:
        """Find the first character of an answer; None: it is not known.

        Args:
            number: of its turn.
            tools: of the conversation.
            text: the whole.
            before: what the model sees before it answers; None: the answer is the first turn.
            span: first character of what the template writes for the turn, and the one after the last; None: not known.
        """
        is_kept = before is not None and text.startswith(before) and (span is None or span[0] <= len(before) <= span[1])
        if is_kept and (span is None or span[0] < len(before)):
            return len(before)
        for opening in self._find_openings(tools) if span is not None else ():
            if text.startswith(opening, span[0], span[1]) and (opening or (number and not is_kept)):
                self.is_rewritten |= number > 0
                return span[0] + len(opening)
        return len(before) if is_kept else None

    def _find_end(self, tokens: list[int], start: int, given: list[int], may_stop: bool) -> int | None:
        """Find the place behind an answer's last token, which is its stop token if it has one; None: it is not known.

        Args:
            tokens: of the conversation.
            start: place of the answer's first token.
            given: tokens of the conversation up to the end of what the template writes for the turn.
            may_stop: whether a special token that follows, such as that of the user's next turn, stops the model.
        """
        if tokens[: len(given)] != given:
            return None
        end = self._find_end_of_turn(given)
        if end is not None and end >= start:
            return end + 1
        for place in range(len(given), len(tokens)) if may_stop else ():
            if tokens[place] in self.special_ids:
                return place + 1
            if self.tokenizer.decode(tokens[place]).strip():
                break
        return len(given)

    def _refuse_beginning(
        self, request: Request, num_turns: int, tokens: list[int], before: list[int] | None = None
    ) -> NoReturn:
        """Raise UsageError for the first turns of a conversation, which are rendered otherwise when others follow.

        Args:
            tokens: of the whole conversation.
            before: tokens of these turns and of the beginning of an answer; None: the fault is not there.
        """
        others = ", or set train_on to completions" if self.train_on == "assistant" else ""
        if not num_turns:
            raise UsageError(
                "the first turn is the assistant's, whose beginning only a template with {% generation %} markers shows. "
                "Give one, --chat_template FILE, or leave out the turn"
            )
        alone = self._encode(self._render_whole(request.turns[:num_turns], request.tools))
        if before is not None and tokens[: len(alone)] == alone:
            begun, given = (repr(self.tokenizer.decode(ids[len(alone) :][:20])) for ids in (before, tokens))
            raise UsageError(
                f"the chat template begins an answer that the model is to give with {begun}. But one that is given begins with "
                f"{given}, so that its tokens cannot be found. Give a template with {{% generation %}} markers, "
                "--chat_template FILE"
            )
        raise UsageError(
            f"the chat template renders the beginning, up to turn {num_turns}, otherwise when more turns follow, so that the "
            "trained tokens cannot be found. Give a template with {% generation %} markers, --chat_template FILE"
            + others
        )

    def keeps_images(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]], max_length: int) -> bool:
        """Tell whether sequences that are cut at `max_length` tokens keep all of their images: texts have none."""
        return True

    @property
    def key(self) -> str | None:
        """Hash of what makes tokens beside the tokenizer; None: nothing does."""
        return None

    def find_stop(self, tokens: np.ndarray, is_trained: np.ndarray) -> int:
        """Return the id of the stop token that ends a sequence and is trained, or -1."""
        end = self._find_end_of_turn(tokens.tolist())
        if end is not None and is_trained[end]:
            return int(tokens[end])
        last = int(tokens[np.flatnonzero(is_trained)[-1]])
        return last if last in self.closing_ids else -1

    def holds_special(self, row: Mapping[str, Any]) -> bool:
        """Tell whether a turn's content holds a special token as text."""
        turns = [*row["prompt"], *(turn for answer in row["answers"] for turn in answer)] if self.has_turns else []
        texts = [text for turn in turns for text in list_texts(turn.get("content"))]
        return any(token in text for text in texts for token in self.special_tokens)


def _write_call(number: int, call: Any, takes_text: bool) -> Any:
    """Write a call of turn `number` with arguments as JSON text, or as an object.

    Raises:
        UnclearCallError: a text is no object, where one is needed.
    """
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, (str, dict)):
        return call
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
        elif not takes_text:
            raise UnclearCallError(
                f"turn {number} calls the tool {shorten(str(function.get('name')))!r} with arguments that are a text, but no "
                f"JSON object ({shorten(arguments)!r}): write them as an object"
            )
    if takes_text and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _find_spans(turns: list[dict], whole: Rendering) -> dict[int, tuple[int, int]]:
    """Find the characters that a template's loop writes for each turn of the assistant: the first, the one after the last.

    Left out are turns that it writes in several parts, or not there; and those behind which a turn is written at another place,
    which may be among them.
    """
    parts: dict[int, list[tuple[int, int]]] = {}
    spans: dict[int, tuple[int, int]] = {}
    for start, end, number in whole.spans:
        parts.setdefault(number, []).append((start, end))
    for number, turn in enumerate(turns):
        own = parts.get(number, [])
        if turn["role"] != "assistant":
            if not own and spans:
                del spans[max(spans)]
            continue
        answer = "".join(list_texts(turn.get("content"))).rpartition("</think>")[2]  # without thoughts
        if len(own) == 1 and answer.strip() in whole.text[slice(*own[0])]:
            spans[number] = own[0]
    return spans


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
        parts = list_texts(turn.get("content")) or [""]
        if turn["role"] == "assistant":
            before, _, content = parts[0].rpartition("</think>")
            thought = before.rpartition("<think>")[2] or next(
                (turn[name] for name in THOUGHTS if isinstance(turn.get(name), str)), ""
            )
            # Templates leave out the thoughts of earlier turns, as they do when the model answers
            parts = [*([thought] if number == len(turns) else []), content, *parts[1:]]
        for part in map(str.strip, parts):
            start, size = text.find(part, place), len(part)
            if start < 0 and turn["role"] == "tool":  # some templates write what a tool returned as JSON
                part_as_json = json.dumps(part, ensure_ascii=False)[1:-1]
                start, size = text.find(part_as_json, place), len(part_as_json)
            if turn["role"] in ("system", "developer") and part in text:
                continue  # some templates move it, to the beginning or into the user's last turn
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
    template = choose_template(recipe)
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
    default = IMAGE_TEMPLATE if recipe.images else CHAT_TEMPLATE
    template = (template or default) if has_turns(rows) else None
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
        new_fingerprint=hash_parts(hash_modules(__name__), rows_fingerprint(rows)),
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
        with naming_template(recipe), contextlib.suppress(TemplateRefusal):  # which `Renderer` reports
            next(PROCESS.take(Request(_read_template(recipe.chat_template), {}, SHORTEST[:1], None, [Part(1)])))


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


def choose_template(recipe: Any) -> str | None:
    """Read the template that a recipe gives; None: it gives none."""
    return None if recipe.chat_template is None else _read_template(recipe.chat_template)


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
    parts = [part if isinstance(part, list) else [part] for part in (values["prompt"] or "", *values["answers"])]
    return {
        "text": "\n".join(
            part if isinstance(part, str) else f"{part['role']}\n{''.join(list_texts(part.get('content')))}"
            for part in itertools.chain(*parts)
        )
    }
