"""Brings rows of the forms that people have to one: turns or a text before the answer, and one answer, or two of a pair.

A row's form is recognised by its columns. Whatever is known to change what a row says is used, or the row is refused; other
columns, and fields of turns, are named as not used.
"""

import ast
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from samestep.data import row_images
from samestep.data.row_files import find_fault_of_text
from samestep.data.row_report import write_unused
from samestep.data.tables import list_names, shorten
from samestep.errors import UsageError, is_utf8, nearest, reason
from samestep.recipe.tasks.causal_lm_finetuning import COLUMNS, UNUSED

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_NAMES = {role: role for role in ROLES} | {"human": "user"}
ROLE_NAMES |= dict.fromkeys(("gpt", "chatgpt", "bot", "ai", "model"), "assistant")
ROLE_NAMES |= dict.fromkeys(("function", "observation", "tool_response", "ipython"), "tool")
ROLE_NAMES |= dict.fromkeys(("function_call", "tool_call"), "function_call")
"""Name of a role in files, ShareGPT's among them -> its name here; `function_call`: a call of a tool, in JSON."""
TURNS, PAIR = COLUMNS["turns"], COLUMNS["pair"]
QUESTIONS, CONTEXTS = COLUMNS["question"], COLUMNS["context"]
USUAL = (("prompt", "completion"), ("instruction", "output"), ("question", "answer"), ("instruction", "response"))
"""Question and answer that belong together, where a row has several of both."""
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
WEIGHTS = ("weight", "weights", "sample_weight", "loss_weight")
TRAINED = WEIGHTS + tuple(
    "train training trained trainable is_trained do_train to_train loss loss_mask has_loss use_loss compute_loss learn".split()
)
"""Fields of a turn that say with 1 or true that it is trained, with 0 or false that it is not."""
NOT_TRAINED = tuple(
    "masked is_masked mask_loss ignore ignored ignore_loss skip skip_loss no_loss no_train not_trained exclude".split()
)
"""Fields that say the opposite."""
MAY_MASK = re.compile(
    r"(^|_)(weights?|train\w*|loss\w*|mask\w*|learn\w*|superv\w*|ignored?|skip\w*|targets?|labels?)(_|$)", re.I
)
"""Field that may say whether a turn is trained."""
CHANGING = re.compile(
    r"(^|_|\b)(system|prompts?|instructions?|questions?|quer(y|ies)|history|tools?|functions?|messages?|conversations?|chats?|"
    r"dialog(ue)?s?|contexts?|inputs?|posts?|problems?|persona|chosen|rejected|images?|audios?|videos?)$",
    re.I,
)
"""Column of another name that may change what a row says, if it holds texts."""
SAID = 20  # characters of a text that may be a part of another one
NUMBERS = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
TURNS_AS_TEXT = re.compile(r"\s*\[?\s*\{\s*(['\"])(role|from|content|value|weight|name)\1\s*:")
PLAIN_TURN = {"role", "content"}
TEXT_PARTS = ("text", "input_text", "output_text")
TOOL_CALL = "a call of a tool as JSON: an object with name and arguments"


class _Plan(NamedTuple):
    """A way to read rows with the same columns.

    Attributes:
        form: answer, messages, pair or text.
        question: its column; None: it has none. Of messages it is the column of turns.
        answers: columns of them, two of a pair; of texts the text's.
        contexts: columns that follow the question.
        system, history, tools: columns of these; None: it has none.
        labels, weights: columns that may only say that the row is trained as any other.
        others: columns that change what a row says, but are not read: they must be empty, or repeat what is read.
        unused: names of all other columns.
        is_plain: whether texts stay texts; else they become turns.
        columns: those that are read, for people.
        images: the column of images, where rows may have them.
    """

    form: str
    question: str | None
    answers: Sequence[str]
    contexts: Sequence[str]
    system: str | None
    history: str | None
    tools: str | None
    labels: Sequence[str]
    weights: Sequence[str]
    others: Sequence[str]
    unused: Sequence[str]
    is_plain: bool
    columns: str
    images: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that each row must have."""
        return (*([] if self.question is None else [self.question]), *self.answers)


class TurnReader:
    """Reads texts and turns in the forms that people have, and notes the fields of turns.

    Args:
        left_out: names of fields that say nothing.
        takes_images: whether turns may hold images.

    Attributes:
        folder: to which paths of images are relative; None: this process's.
        fields: of the row's turns, beside role and content, as `COLUMN[].FIELD`.
        has_untrained: whether a turn of the row is not to be trained.
    """

    def __init__(self, left_out: set[str], takes_images: bool = False):
        self.left_out, self.takes_images = left_out, takes_images
        self.folder: str | None = None
        self.fields: set[str] = set()
        self.has_untrained = False

    def read_value(self, column: str, value: Any) -> Any:
        """Read a text, or turns, also those that are written as text."""
        if isinstance(value, str):
            if value.lstrip()[:1] in ("[", "{") and TURNS_AS_TEXT.match(value):
                return self.read_turns(column, value)
            return _check_text(column, value)
        if isinstance(value, list | dict):
            return self.read_turns(column, value)
        raise UsageError(f"{column} holds {type(value).__name__}, not text: write it as text")

    def read_turns(self, column: str, value: Any) -> list[dict[str, Any]]:
        """Read turns in one of the forms that people have."""
        if isinstance(value, str):
            value = _parse(column, value)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list) or not value:
            kind = "an empty list" if value == [] else type(value).__name__
            raise UsageError(f"{column} holds {kind}, must be a list of objects with role and content: mend it")
        turns = []
        for number, turn in enumerate(value, start=1):
            if (
                type(turn) is dict
                and turn.keys() == PLAIN_TURN
                and turn["role"] in ROLES
                and type(content := turn["content"]) is str
                and content
                and not content.isspace()
                and (content.isascii() or is_utf8(content))
            ):
                turns.append(turn)
            else:
                turns.append(self._read_turn(column, number, turn))
        return turns

    def _read_turn(self, column: str, number: int, value: Any) -> dict[str, Any]:
        """Read a turn, and note its fields beside role, content and calls of tools."""
        where = f"{column}, turn {number}"
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise UsageError(
                f"{column} holds a list with {kind}, must be a list of objects with role and content: mend it"
            )
        turn = {key: item for key, item in value.items() if item is not None}
        for ours, theirs in (("role", "from"), ("content", "value")):
            if theirs in turn and ours not in turn:
                turn = {ours: turn.pop(theirs)} | turn
        role = ROLE_NAMES.get(turn["role"]) if isinstance(turn.get("role"), str) else None
        if role is None:
            given = turn.get("role")
            name = repr(shorten(given)) if isinstance(given, str) else "missing, or no text"
            raise UsageError(f"{where}: role is {name}, must be one of {', '.join(ROLES)}: rename it")
        turn["role"] = role
        if isinstance(turn.get("content"), list):
            turn["content"] = self._read_parts(column, where, turn["content"])
        if role == "function_call":
            turn |= {"role": "assistant", "content": "", "tool_calls": _read_calls(where, turn.get("content"))}
            role = "assistant"
        elif "function_call" in turn and role == "assistant" and "tool_calls" not in turn:
            turn["tool_calls"] = _read_calls(where, turn.pop("function_call"))
        content = turn.get("content", "")
        if isinstance(content, list):  # of a turn with images
            content = row_images.MARK + "".join(row_images.list_texts(content))
        if not isinstance(content, str):
            raise UsageError(f"{where}: content holds {type(content).__name__}, not text: write it as text")
        calls = turn.get("tool_calls", [])
        if not isinstance(calls, list):
            raise UsageError(f"{where}: tool_calls holds {type(calls).__name__}, must be a list: mend it")
        if not content.strip() and not (role == "assistant" and calls):
            others = [key for key in turn if key not in ("role", "content")]
            hint = f", beside {list_names(others)}" if others else ""
            raise UsageError(f"{where}: the turn of the role {role} is empty{hint}: fill it in, or leave out the row")
        _check_unicode(where, content)
        if len(turn) > 2:
            self._read_fields(column, where, turn)
        return turn

    def _read_fields(self, column: str, where: str, turn: dict[str, Any]) -> None:
        """Read the fields of a turn beside role and content: whether it is trained; others are noted, and kept."""
        is_trained = True
        for name in [key for key in turn if key not in ("role", "content")]:
            value, low = turn[name], name.lower()
            if name == "tool_calls" and turn["role"] == "assistant":
                continue
            if low in MEDIA and _is_full(value):
                raise UsageError(f"{where}: it holds {name}, but only text is trained: leave out the row")
            self.fields.add(f"{column}[].{name}")
            if name in self.left_out or not (low in TRAINED + NOT_TRAINED or MAY_MASK.search(low)):
                continue
            number = value if isinstance(value, int | float) else NUMBERS.get(str(value).lower())
            if low not in TRAINED + NOT_TRAINED:
                raise UsageError(
                    f"{where}: {name} may say that it is not trained, which is not clear. Write weight 0 or 1 in its place, or "
                    f"leave it out, --columns {UNUSED}={name}"
                )
            if number not in (0, 1):
                raise UsageError(
                    f"{where}: {name} is {shorten(str(value))}, but a turn is trained (1) or not (0): write one of them"
                )
            del turn[name]
            is_trained &= bool(number) != (low in NOT_TRAINED)
            if turn["role"] == "assistant" or not number:
                self.fields.discard(f"{column}[].{name}")  # it is used
        if not is_trained and turn["role"] == "assistant":
            turn["weight"] = 0
            self.has_untrained = True

    def _read_parts(self, column: str, where: str, parts: Sequence[Any]) -> str | list[dict[str, Any]]:
        """Read a content in parts; texts without an image are joined, a line each, as servers of models do."""
        read: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, str):
                read.append({"type": "text", "text": part})
                continue
            part = {key: item for key, item in part.items() if item is not None} if isinstance(part, dict) else {}
            kind = part.get("type", "text")
            if kind in row_images.PARTS and self.takes_images:
                read.append({"type": "image"})
                if not row_images.is_place(part):
                    read[-1]["image"] = row_images.read_image(where, part, self.folder)
                continue
            if kind not in TEXT_PARTS:
                known = "text and images are" if self.takes_images else "text is"
                hint = "set images to true, or " if kind in row_images.PARTS else ""
                raise UsageError(
                    f"{where}: content holds a part of the type {shorten(str(kind))!r}, but only {known} trained: {hint}leave "
                    "out the row"
                )
            if not isinstance(part.get("text"), str):
                raise UsageError(f"{where}: content holds a part without text: write it as text")
            self.fields |= {f"{column}[].content[].{key}" for key in part if key not in ("type", "text")}
            read.append({"type": "text", "text": part["text"]})
        if any(part["type"] == "image" for part in read):
            return read
        return "\n".join(row_images.list_texts(read))

    def read_history(self, column: str, value: Any) -> list[dict[str, Any]]:
        """Read earlier questions and answers: turns, or pairs of texts."""
        if isinstance(value, str):
            value = _parse(column, value)
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            return self.read_turns(column, value)
        turns = []
        for number, item in enumerate(value if isinstance(value, list) else [None], start=1):
            if not (isinstance(item, list | tuple) and len(item) == 2):
                raise UsageError(f"{column} must be a list of pairs, question and answer, or of turns: mend it")
            for role, content in zip(("user", "assistant"), item, strict=True):
                turns.append({"role": role, "content": _check_text(f"{column}, pair {number}", content)})
        return turns


class RowReader:
    """Brings rows to one form; the first row that can be read decides which form the others must have.

    Args:
        wants_pairs: read pairs, which no other form can give.
        train_on: see `Conversations`.
        columns: name in files -> name of `COLUMNS`, or `UNUSED`: it is left out.
        takes_images: whether rows may hold images; then all of them are turns.
    """

    def __init__(self, wants_pairs: bool, train_on: str, columns: Mapping[str, str], takes_images: bool = False):
        self.wants_pairs, self.train_on, self.names = wants_pairs, train_on, dict(columns)
        self.turns = TurnReader({name for name, target in columns.items() if target == UNUSED}, takes_images)
        self.plans: dict[tuple[str, ...], _Plan | UsageError] = {}
        self.first: _Plan | None = None
        self.has_turns: bool | None = None

    def read(self, values: Mapping[str, Any]) -> dict[str, str | None]:
        """Return a row of `conversation_rows.FEATURES`, but for its place and source. Raises UsageError where it cannot."""
        if self.names:
            values = self._rename(values)
        names = tuple(values)
        plan = self.plans.get(names)
        if plan is None:
            try:
                plan = self._recognise(names)
            except UsageError as error:
                plan = error
            if len(self.plans) < 10_000:  # rows may each have columns of their own
                self.plans[names] = plan
        if isinstance(plan, UsageError):
            raise plan
        for name in plan.required:
            if values[name] is None:
                raise UsageError(f"{name} holds no value (null): fill it in, or leave out the row")
        first = self.first
        if first is not None and plan is not first and (plan.form, plan.required) != (first.form, first.required):
            raise UsageError(
                f"its columns are {list_names(names)}, but the first row is read by {first.columns}: give all rows the same "
                "columns, or each form its own file"
            )
        self.turns.fields, self.turns.has_untrained = set(), False
        prompt, answers = getattr(self, f"_read_{plan.form}")(plan, values)
        if self.turns.takes_images:
            _place_images(plan, values, [*prompt, *itertools.chain(*answers)], self.turns.folder)
        tools = None if plan.tools is None else _read_tools(plan.tools, values[plan.tools])
        has_turns = isinstance(prompt, list)
        if self.has_turns is not None and has_turns != self.has_turns:
            kinds = ("turns", "texts") if has_turns else ("texts", "turns")
            raise UsageError(f"it holds {kinds[0]}, but the first row {kinds[1]}: give all rows the same columns")
        unused = [name for name in plan.unused if values[name] is not None]
        if plan.labels or plan.weights or plan.others:
            unused += _check_others(plan, values, prompt, answers)
        row: dict[str, Any] = {"prompt": prompt, "answers": answers, "tools": tools or None}
        if plan.form == "messages" or (plan.history is not None and not self.wants_pairs):
            row["trains_prompt"] = True
        if self.turns.has_untrained:
            row["untrained"] = self._find_untrained(prompt, answers)
        try:
            text = json.dumps(row)
        except TypeError as error:
            raise UsageError(f"it holds a value that JSON has not: {reason(error)}") from None
        self.first, self.has_turns = first or plan, has_turns
        unused += sorted(self.turns.fields)
        return {"columns": plan.columns, "row": text, "unused": write_unused(tuple(unused))}

    def _rename(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Give columns the names to which `columns` maps them; those that are left out keep theirs."""
        renamed: dict[str, Any] = {}
        for name, value in values.items():
            target = self.names.get(name, name)
            new = name if target == UNUSED else target
            if new in renamed:
                raise UsageError(
                    f"columns maps two columns to {new}, or one beside a column {new}: map the other one to {UNUSED}"
                )
            renamed[new] = value
        return renamed

    def _recognise(self, present: Sequence[str]) -> _Plan:
        """Find how rows with these columns are read."""
        own: dict[str, str] = {}  # name in lower case -> name
        for name in present:
            if name not in self.turns.left_out:
                own.setdefault(name.strip().lower(), name)

        def find(names: Iterable[str]) -> list[str]:
            return [own[name] for name in names if name in own]

        turns, questions, contexts, answers = (
            find(COLUMNS[kind]) for kind in ("turns", "question", "context", "answer")
        )
        pair, text = find(PAIR), find(COLUMNS["text"])
        form = ""
        question: str | None = None
        read: list[str] = []  # of the answers
        if self.wants_pairs:
            if len(pair) == 2:
                form, read, question = "pair", pair, next(iter([*questions, *turns, *contexts]), None)
        elif turns:
            form, question = "messages", turns[0]
        elif (questions or contexts) and answers:
            form = "answer"
            usual = [names for names in USUAL if set(names) <= set(own)]
            both = [own[name] for name in usual[0]] if usual else [[*questions, *contexts][0], answers[0]]
            question, read = both[0], both[1:]
        elif text:
            form, read = "text", text[:1]
        if not form:
            _refuse_columns(present, pair, self.wants_pairs, self.names)
        system, history, tools = (next(iter(find(COLUMNS[kind])), None) for kind in ("system", "history", "tools"))
        contexts = [name for name in contexts if name != question]
        if form in ("messages", "text"):
            contexts, history = [], None
        if form == "text":
            system = tools = None
        images = next(iter(find(row_images.COLUMNS)), None) if self.turns.takes_images else None
        is_read = {question, *read, *contexts, system, history, tools, images}
        changing = [*TURNS, *QUESTIONS, *CONTEXTS, *COLUMNS["system"], *COLUMNS["history"], *COLUMNS["tools"], *MEDIA]
        changing += [*PAIR, "functions"]
        others = [name for name in find(changing) if name not in is_read]
        others += [
            name for name in present if name not in {*is_read, *others, *self.turns.left_out} and CHANGING.search(name)
        ]
        if form == "messages" and any(name in others for name in questions):
            others += [name for name in answers if name not in is_read]
        labels = find(COLUMNS["label"]) if form in ("messages", "answer") else []
        weights = find(WEIGHTS)
        unused = [name for name in present if name not in {*is_read, *others, *labels, *weights}]
        is_plain = form == "text" or (
            form != "messages"
            and not (contexts or system or history or tools or self.turns.takes_images)
            and str(question or "prompt").lower() == "prompt"
            and read[0].lower() in ("completion", *PAIR)
        )
        sources = {target: name for name, target in self.names.items()}
        used = (question, *read, *contexts, system, history, tools, *labels, *weights, images)
        columns = ", ".join(
            f"{name}={sources[name]}" if sources.get(name, name) != name else name for name in used if name is not None
        )
        read_from = (form, question, read, contexts, system, history, tools)
        return _Plan(*read_from, labels, weights, others, unused, is_plain, columns, images)

    # -----------------------------------------------------------------------------------------------------------------
    # forms

    def _read_messages(self, plan: _Plan, values: Mapping[str, Any]) -> tuple[list, list]:
        name = str(plan.question)
        turns = self.turns.read_turns(name, values[name])
        turns = self._read_before(plan, values, turns) + turns
        if turns[-1]["role"] != "assistant":
            if self.train_on != "all":
                raise UsageError(
                    f"the last turn is of the role {turns[-1]['role']}, must be of the assistant: leave it out, or set "
                    "train_on to all"
                )
            return turns, [[]]
        return turns[:-1], [turns[-1:]]

    def _read_answer(self, plan: _Plan, values: Mapping[str, Any]) -> tuple[Any, list]:
        question = self.turns.read_value(str(plan.question), values[str(plan.question)])
        answer = self.turns.read_value(plan.answers[0], values[plan.answers[0]])
        if isinstance(question, str) and isinstance(answer, str) and plan.is_plain and not self.has_turns:
            return question, [answer]
        turns = self._make_question(plan, values, question)
        if isinstance(answer, str):
            answer = [{"role": "assistant", "content": answer}]
        _check_answer(plan.answers[0], answer)
        return turns, [answer]

    def _read_text(self, plan: _Plan, values: Mapping[str, Any]) -> tuple[str, list]:
        if self.train_on != "all":
            raise UsageError(
                f"text has no turns, but train_on is {self.train_on}: set train_on to all, or give messages"
            )
        return "", [_check_text(plan.answers[0], values[plan.answers[0]])]

    def _read_pair(self, plan: _Plan, values: Mapping[str, Any]) -> tuple[Any, list]:
        answers = [self.turns.read_value(name, values[name]) for name in plan.answers]
        question = None if plan.question is None else self.turns.read_value(plan.question, values[plan.question])
        is_text = all(isinstance(value, str) for value in answers)
        if is_text and (question is None or isinstance(question, str)) and plan.is_plain and not self.has_turns:
            prompt: Any = question
            if question is None and answers[0].split(None, 1)[0] != answers[1].split(None, 1)[0]:
                raise UsageError(
                    "chosen and rejected share no beginning, so that their question is missing: give prompt, or say which "
                    "column it is, --columns prompt=NAME"
                )
        else:
            if is_text and question is None:
                raise UsageError(
                    "chosen and rejected are texts without a prompt, so that nothing can come before them: give prompt"
                )
            answers = [
                [{"role": "assistant", "content": value}] if isinstance(value, str) else value for value in answers
            ]
            prompt, answers = self._split_prompt(plan, values, question, answers)
        if answers[0] == answers[1]:
            raise UsageError("chosen and rejected are equal: leave out the row")
        return prompt, answers

    def _split_prompt(
        self, plan: _Plan, values: Mapping[str, Any], question: Any, answers: list[list]
    ) -> tuple[list, list[list]]:
        """Find the turns before the answers: those of the question, or those with which both lists begin."""
        if isinstance(question, list) and any(question == answer for answer in answers):
            question = None  # one of the answers, repeated
        if isinstance(question, str):
            begins = [_begins_with(answer, question) for answer in answers]
            if any(turns[0]["role"] != "assistant" for turns, begun in zip(answers, begins, strict=True) if not begun):
                raise UsageError(
                    f"{plan.question} is a text, but chosen or rejected begins with another turn of the user: leave out "
                    f"{plan.question}"
                )
            if any(begins):
                if not all(begins):
                    raise UsageError(f"only one of chosen and rejected begins with the {plan.question}: mend the row")
                question = None
        elif question is not None:
            begins = [answer[: len(question)] == question for answer in answers]
            if all(begins):
                answers = [answer[len(question) :] for answer in answers]
        if question is None:
            shared = find_beginning(*answers)
            if len(shared) == min(map(len, answers)):
                if answers[0] == answers[1]:
                    raise UsageError("chosen and rejected are equal: leave out the row")
                raise UsageError("chosen or rejected is the beginning of the other: mend or leave out the row")
            answers = [answer[len(shared) :] for answer in answers]
            prompt = self._read_before(plan, values, shared) + shared
            if plan.contexts and any(_is_full(values[name]) for name in plan.contexts):
                raise UsageError(
                    f"{plan.contexts[0]} has no question to which it belongs: give prompt, or leave it out"
                )
        else:
            prompt = self._make_question(plan, values, question)
        for name, answer in zip(PAIR, answers, strict=True):
            _check_answer(name, answer)
        if not prompt:
            raise UsageError("chosen and rejected share no turn before the answer: give prompt, or that turn")
        return prompt, answers

    def _make_question(self, plan: _Plan, values: Mapping[str, Any], question: Any) -> list[dict[str, Any]]:
        """Make the turns before the answer: the system's, the history's, and the question with what follows it."""
        contexts = [_check_text(name, values[name]) for name in plan.contexts if _is_full(values[name])]
        if isinstance(question, list):
            if contexts:
                raise UsageError(
                    f"{plan.question} holds turns, and {plan.contexts[0]} has no place among them: leave it out, or write it "
                    "into a turn"
                )
        else:
            question = [{"role": "user", "content": "\n\n".join([question, *contexts])}]
        return self._read_before(plan, values, question) + question

    def _read_before(
        self, plan: _Plan, values: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """Make the turns of the columns system and history."""
        before: list[dict[str, Any]] = []
        if plan.system is not None and _is_full(values[plan.system]):
            content = _check_text(plan.system, values[plan.system])
            if turns and turns[0]["role"] in ("system", "developer"):
                if str(turns[0]["content"]).strip() != content.strip():
                    raise UsageError(
                        f"{plan.system} says something else than the turn of the system: leave one of them out"
                    )
            else:
                before.append({"role": "system", "content": content})
        if plan.history is not None and _is_full(values[plan.history]):
            before += self.turns.read_history(plan.history, values[plan.history])
        return before

    def _find_untrained(self, prompt: list[dict], answers: list[list[dict]]) -> list[int]:
        """Find the numbers of turns that are not trained, and take the marks away."""
        if self.train_on == "all" and not self.wants_pairs:
            raise UsageError(
                "a turn of weight 0 is not to be trained, but train_on is all: set train_on to assistant, or leave it out"
            )
        if self.wants_pairs and any("weight" in turn for answer in answers for turn in answer):
            raise UsageError("chosen or rejected holds a turn of weight 0, but both are compared: leave out the row")
        numbers = []
        for number, turn in enumerate([*prompt, *answers[0]]):
            if turn.pop("weight", 1) == 0:
                numbers.append(number)
        for turn in itertools.chain(*answers):
            turn.pop("weight", None)
        return numbers


def _refuse_columns(
    present: Sequence[str], pair: Sequence[str], wants_pairs: bool, mapped: Mapping[str, str]
) -> NoReturn:
    """Raise UsageError for columns by which a row cannot be read, of which `mapped` are named by the recipe."""
    if missing := [name for name, target in mapped.items() if target not in (*present, UNUSED)]:
        sources = {target: name for name, target in mapped.items()}
        names = [sources.get(name, name) for name in present]
        raise UsageError(
            f"columns names {shorten(missing[0])}, but its columns are {list_names(names)}: {nearest(missing[0], names)}"
        )
    rule = "messages (or conversations), or prompt, completion, or instruction, output, or text"
    if wants_pairs:
        rule = "chosen, rejected"
    is_pair = not wants_pairs and len(pair) == 2
    hint = "; chosen and rejected need objective dpo, orpo, simpo or reward" if is_pair else ""
    targets = PAIR if wants_pairs else [name for names in COLUMNS.values() for name in names]
    near = [(close[0], name) for name in present if (close := get_close_matches(name.lower(), targets, 1, 0.7))]
    target, name = next((pair for pair in near if pair[0] != pair[1].lower()), (targets[0], "NAME"))
    raise UsageError(
        f"its columns are {list_names(present)}, must be {rule}{hint}: name those that are called otherwise, --columns "
        f"{target}={shorten(name)}"
    )


def find_beginning(*parts: Sequence[Any]) -> list[Any]:
    """Find the elements with which all parts begin.

    >>> find_beginning("<a>b", "<a>c", "<a>")
    ['<', 'a', '>']
    """
    same = itertools.takewhile(lambda each: all(one == each[0] for one in each), zip(*parts, strict=False))
    return [first for first, *_ in same]


def _check_others(plan: _Plan, values: Mapping[str, Any], prompt: Any, answers: Sequence[Any]) -> list[str]:
    """Check the columns that would change what a row says: they must say nothing, or what is read already; list the latter."""
    unused = []
    for name in plan.labels:
        value = values[name]
        number = (
            NUMBERS.get(str(value).lower()) if isinstance(value, bool | str) else value if value in (0, 1) else None
        )
        if value is not None and number == 0:
            raise UsageError(
                f"{name} is {shorten(str(value))}, which marks an answer that is not wanted, but objective sft trains all. "
                f"Leave out such rows, or make pairs (chosen, rejected) of them"
            )
        if value is not None and number is None:
            unused.append(name)
    for name in plan.weights:
        value = values[name]
        number = value if isinstance(value, int | float) else NUMBERS.get(str(value).lower())
        if _is_full(value) and number != 1:
            raise UsageError(
                f"{name} is {shorten(str(value))}, but every row counts the same: leave out the row, write 1, or leave out the "
                f"column, --columns {UNUSED}={name}"
            )
    others = [name for name in plan.others if _is_full(values[name])]
    if not others:
        return unused
    if isinstance(prompt, list):
        turns = itertools.chain(prompt, *answers)
        contents = {text.strip() for turn in turns for text in row_images.list_texts(turn.get("content", ""))}
    else:
        contents = {prompt or "", *answers}

    def is_said(text: str) -> bool:
        text = text.strip()
        return text in contents or (
            (len(text) >= SAID or plan.is_plain) and any(text in content for content in contents)
        )

    for name in others:
        value, low = values[name], name.lower()
        if low in MEDIA:
            hint = "set images to true, or " if low in row_images.COLUMNS else ""
            raise UsageError(f"{name} is not empty, but only text is trained: {hint}leave out the row")
        if low == "functions":
            raise UsageError(
                f"{name} is not used, but may change the answers: rename it to tools, or leave out the row"
            )
        if low in PAIR:
            raise UsageError(
                f"{name} is not used by objective sft: set objective to dpo, orpo, simpo or reward, or leave it out, --columns "
                f"{UNUSED}={name}"
            )
        is_known = any(low in names for names in COLUMNS.values())
        if not is_known and not isinstance(value, str | list | dict):
            continue  # a number says nothing that is trained
        if not all(map(is_said, _find_texts(name, value))):
            raise UsageError(
                f"{name} changes what the row says, but is not used beside {plan.columns}: leave it out, --columns "
                f"{UNUSED}={name}, or leave the others out"
            )
    return unused + others


def _find_texts(column: str, value: Any) -> list[str]:
    """Find the texts of a value: itself, or the contents of its turns; a value of another kind is one that nothing says."""
    if isinstance(value, str) and TURNS_AS_TEXT.match(value):
        value = _parse(column, value)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        return [str(turn.get("content", turn.get("value", turn))) for turn in value]
    return [f"{column}: {value!r}"]


def _begins_with(turns: Sequence[Mapping[str, Any]], question: str) -> bool:
    """Tell whether turns begin with a question, perhaps behind a turn of the system."""
    first = next((turn for turn in turns if turn["role"] not in ("system", "developer")), None)
    return (
        first is not None
        and first["role"] == "user"
        and any(turn["role"] == "user" and turn["content"].strip() == question.strip() for turn in turns)
    )


def _check_answer(column: str, turns: Sequence[Mapping[str, Any]]) -> None:
    if not turns or turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
        raise UsageError(f"{column} must begin and end with a turn of the assistant, behind the prompt: mend it")


def _is_full(value: Any) -> bool:
    """Tell whether a value says something: it is not null, empty, or blank, nor an empty list as text."""
    if isinstance(value, str):
        return bool(value) and value.strip() not in ("", "[]", "{}", "null", "None")
    if isinstance(value, list | tuple | dict):
        return bool(value)
    return value is not None


def _place_images(plan: _Plan, values: Mapping[str, Any], turns: Sequence[dict[str, Any]], folder: str | None) -> None:
    """Put the images of a row's column into its turns."""
    if plan.form == "text":
        raise UsageError("text has no turns, but images is true: give messages, or set images to false")
    value = None if plan.images is None else values[plan.images]
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        value = _parse(str(plan.images), value)
    listed = value if isinstance(value, list | tuple) else [value] if _is_full(value) else []
    images = [row_images.read_image(str(plan.images), image, folder) for image in listed]
    row_images.place_images(turns, images, at_the_beginning=plan.form == "answer")


def _read_tools(column: str, value: Any) -> list[dict[str, Any]] | None:
    if not _is_full(value):
        return None
    value = _parse(column, value) if isinstance(value, str) else value
    value = [value] if isinstance(value, dict) else value
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UsageError(f"{column} must be a list of objects (JSON schemas): mend it, or leave it out")
    return value


def _read_calls(where: str, value: Any) -> list[dict[str, Any]]:
    """Read calls of tools from JSON, or an object, with name and arguments."""
    if isinstance(value, str):
        value = _parse(f"{where}: {TOOL_CALL}", value)
    calls = value if isinstance(value, list) else [value]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise UsageError(f"{where} must hold {TOOL_CALL}: mend it")
    return [{"type": "function", "function": call} for call in calls]


def _parse(column: str, value: str) -> Any:
    """Parse a value that a table holds as text: JSON, or a list as Python writes it."""
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        fault = reason(error)
    try:
        if value.lstrip()[:1] in ("[", "{", "("):
            return ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        pass
    raise UsageError(f"{column} is a text that is not JSON ({fault}): write it as JSON") from None


def _check_text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{column} holds {type(value).__name__}, not text: write it as text")
    if not value or value.isspace():
        raise UsageError(f"{column} is empty: fill it in, or leave out the row")
    _check_unicode(column, value)
    return value


def _check_unicode(where: str, value: str) -> None:
    if problem := find_fault_of_text(value):
        raise UsageError(f"{where}: {problem}")
