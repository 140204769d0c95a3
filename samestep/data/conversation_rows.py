"""Reads conversations, pairs of answers and texts from files, from the hub, or drawn, to rows of one form.

A row is turns or a text before the answer, and one answer, or a preferred and a rejected one. Its form is recognised by its
columns, and is that of all rows.
"""

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from samestep.data import documents, drawn_chats
from samestep.data.labelled_texts import READERS, read_rows
from samestep.errors import UsageError, nearest, reason
from samestep.recipe.extras import optional

datasets, pa = optional("datasets"), optional("pyarrow")
Dataset, Features, Value = datasets.Dataset, datasets.Features, datasets.Value

FEATURES = Features(dict.fromkeys(("columns", "row", "place"), Value("string"))) if datasets else None
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS = {
    "messages": (("messages",), ("tools",)),
    "completion": (("prompt", "completion"), ("tools",)),
    "instruction": (("instruction", "output"), ("input",)),
    "text": (("text",), ()),
}
"""Form of a row -> the columns that it has, and those that it may have."""
PAIRS = (("chosen", "rejected"), ("prompt", "tools"))
BUILTIN = {"builtin/drawn_chats": False, "builtin/drawn_pairs": True}
"""Name of drawn data -> whether its rows are pairs."""


def load_rows(
    train_file: Sequence[str] | None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    *,
    wants_pairs: bool = False,
    train_on: str = "assistant",
) -> Dataset:
    """Load conversations, or pairs, from exactly one of `train_file` and `dataset_name`.

    The form is recognised by the first row's columns, and all rows must have it: `messages`; `prompt` and `completion`, both
    texts or both lists of messages; `instruction`, `output` and perhaps `input`; `text`; for pairs `chosen` and `rejected`,
    perhaps with `prompt`. `messages` and what has lists of messages may have `tools`.

    Args:
        train_file: paths and globs: `.jsonl` or `.json` with an object per line, `.csv`, `.tsv`, `.parquet`. In a cell of a csv
            file `messages` and `tools` are JSON.
        dataset_name: a dataset of the hub, of which `train` is read, or a folder of one.
        dataset_config_name: the configuration of a dataset of the hub.
        wants_pairs: read pairs, which no other form can give.
        train_on: see `Conversations`; other forms than `text` need a turn of the assistant at the end unless it is `all`.

    Returns:
        A memory-mapped dataset with string columns `columns`, names of the columns that were read; `row`, JSON with `prompt`,
        `answers` and `tools`; `place`, file and line. At least one row.

    Raises:
        UsageError: names the file and the line of the first row that cannot be used, and the remedy.
    """
    if (not train_file) == (not dataset_name):
        raise UsageError(
            f"give exactly one of train_file and dataset_name, not {'both' if train_file else 'neither'}; "
            f"dataset_name {next(iter(BUILTIN))} needs no download"
        )
    options = {"wants_pairs": wants_pairs, "train_on": train_on}
    if train_file:
        files, keys = documents.find_files(train_file, READERS)
        return documents.cache_rows(_read, FEATURES, key=(keys, options, _source()), files=files, **options)
    if dataset_name.startswith("builtin/"):
        raise UsageError(f"dataset_name {dataset_name!r} does not exist: {nearest(dataset_name, BUILTIN)}")
    dataset = documents.load_hub(dataset_name, dataset_config_name, "train", None)
    reader = _RowReader(**options)

    def read(values: dict[str, Any], number: int) -> dict[str, str]:
        return reader.read(f"dataset_name {dataset_name!r}, row {number}", _without_none(values))

    return dataset.map(read, with_indices=True, remove_columns=dataset.column_names, features=FEATURES)


def draw_rows(recipe: Any, split: str, num_samples: int | None, wants_pairs: bool) -> Dataset:
    """Draw the rows of a split."""
    name = recipe.dataset_name
    if BUILTIN[name] != wants_pairs:
        other = next(other for other, has_pairs in BUILTIN.items() if has_pairs == wants_pairs)
        raise UsageError(
            f"dataset_name is {name}, but objective {recipe.objective} needs {other}: set dataset_name to it"
        )
    if num_samples is None:
        field = "num_train_samples" if split == "train" else "num_validation_samples"
        raise UsageError(f"{field} is not set, but {name} is drawn: say how many samples")
    drawn = {"seed": recipe.seed, "split": split, "level": recipe.dataset_config_name or "easy"}
    source = hashlib.sha256(Path(drawn_chats.__file__).read_bytes()).hexdigest()
    key = (name, num_samples, drawn, source, _source())
    return documents.cache_rows(_drawn_rows, FEATURES, key=key, name=name, num_samples=num_samples, **drawn)


def _drawn_rows(name: str, num_samples: int, seed: int, split: str, level: str) -> Iterator[dict[str, str]]:
    columns = "prompt, chosen, rejected" if BUILTIN[name] else "messages"
    for sample_id in range(num_samples):
        chat = drawn_chats.draw_chat(seed, split, sample_id, level)
        answers = [chat.answer, chat.wrong] if BUILTIN[name] else [chat.answer]
        row = {
            "prompt": chat.messages,
            "answers": [[{"role": "assistant", "content": answer}] for answer in answers],
            "tools": None,
        }
        yield {"columns": columns, "row": json.dumps(row), "place": f"{name}, {split} {sample_id}"}


def _read(files: Sequence[str], wants_pairs: bool, train_on: str) -> Iterator[dict[str, str]]:
    """Read the rows of the files, one at a time; every fault is a `UsageError` that names the file and the line."""
    reader = _RowReader(wants_pairs, train_on)
    for file, number, values in read_rows(files):
        is_json = Path(file).suffix.lower() in (".json", ".jsonl")
        yield reader.read(f"{file}:{number}", values if is_json else _without_none(values))


def _without_none(value: Any) -> Any:
    """Leave out keys without a value, which tables add so that all rows have the same keys."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


class _RowReader:
    """Brings rows to one form; the first row decides which columns are read."""

    def __init__(self, wants_pairs: bool, train_on: str):
        self.wants_pairs, self.train_on = wants_pairs, train_on
        self.form: str | None = None
        self.required: tuple[str, ...] = ()
        self.optional: tuple[str, ...] = ()
        self.columns: tuple[str, ...] = ()
        self.has_turns: bool | None = None

    def read(self, location: str, values: Mapping[str, Any]) -> dict[str, str]:
        """Return a row of `FEATURES`. Raises UsageError where it cannot be used."""
        if self.form is None:
            self._recognise(location, list(values))
        present = [name for name, value in values.items() if value is not None]
        is_new_prompt = self.form == "pair" and "prompt" in present and "prompt" not in self.required
        if is_new_prompt or not set(self.required) <= set(present):
            raise UsageError(
                f"{location} has the columns {documents.list_names(present)}, but the first row is read by "
                f"{', '.join(self.columns)}: give all rows the same columns"
            )
        tools = _parse_json(location, "tools", values.get("tools")) if "tools" in self.optional else None
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise UsageError(f"{location}: tools must be a list of objects (JSON schemas): mend it, or leave it out")
        prompt, answers = getattr(self, f"_read_{self.form}")(location, values)
        has_turns = isinstance(prompt, list)
        self.has_turns = has_turns if self.has_turns is None else self.has_turns
        if has_turns != self.has_turns:
            kinds = ("turns", "texts") if has_turns else ("texts", "turns")
            raise UsageError(f"{location} holds {kinds[0]}, but the first row {kinds[1]}: give all rows the same kind")
        if tools and not has_turns:
            raise UsageError(f"{location}: tools need turns, but its columns hold texts: give lists of messages")
        try:
            row = json.dumps({"prompt": prompt, "answers": answers, "tools": tools or None})
        except TypeError as error:
            raise UsageError(f"{location} holds a value that JSON has not: {reason(error)}") from None
        return {"columns": ", ".join(self.columns), "row": row, "place": location}

    def _recognise(self, location: str, present: Sequence[str]) -> None:
        forms = {"pair": PAIRS} if self.wants_pairs else FORMS
        found = [form for form, (required, _) in forms.items() if set(required) <= set(present)]
        if len(found) > 1:
            found = [form for form in found if form != "text"]  # beside others it is their rendering
        if len(found) > 1:
            names = " and ".join(", ".join(forms[form][0]) for form in found)
            raise UsageError(
                f"{location} has the columns {names}, which both hold conversations: leave out one of them"
            )
        if not found:
            rule = " or ".join(", ".join(required) for required, _ in forms.values())
            is_pair = not self.wants_pairs and set(PAIRS[0]) <= set(present)
            hint = "; chosen and rejected need objective dpo, orpo, simpo or reward" if is_pair else ""
            raise UsageError(
                f"{location} has the columns {documents.list_names(present)}, must have {rule}{hint}: rename them"
            )
        self.form = found[0]
        required, self.optional = forms[self.form]
        prompt = ("prompt",) if self.form == "pair" and "prompt" in present else ()
        self.required = prompt + required
        self.columns = self.required + tuple(name for name in self.optional if name in present and name not in prompt)

    def _read_messages(self, location: str, values: Mapping[str, Any]) -> tuple[Any, list]:
        messages = _check_messages(location, "messages", _parse_json(location, "messages", values["messages"]))
        if messages[-1]["role"] != "assistant":
            if self.train_on != "all":
                raise UsageError(
                    f"{location}: the last turn is of the role {messages[-1]['role']}, must be of the assistant: leave it out, "
                    "or set train_on to all"
                )
            return messages, [[]]
        return messages[:-1], [messages[-1:]]

    def _read_completion(self, location: str, values: Mapping[str, Any]) -> tuple[Any, list]:
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            _check_text(location, "prompt", prompt)
            return prompt, [_check_text(location, "completion", completion)]
        prompt, completion = (
            _check_messages(location, name, value) for name, value in (("prompt", prompt), ("completion", completion))
        )
        self._check_answer(location, "completion", completion)
        return prompt, [completion]

    def _read_instruction(self, location: str, values: Mapping[str, Any]) -> tuple[Any, list]:
        parts = [_check_text(location, "instruction", values["instruction"])]
        if values.get("input"):
            parts.append(_check_text(location, "input", values["input"]))
        answer = {"role": "assistant", "content": _check_text(location, "output", values["output"])}
        return [{"role": "user", "content": "\n\n".join(parts)}], [[answer]]

    def _read_text(self, location: str, values: Mapping[str, Any]) -> tuple[Any, list]:
        if self.train_on != "all":
            raise UsageError(
                f"{location}: text has no turns, but train_on is {self.train_on}: set train_on to all, or give messages"
            )
        return "", [_check_text(location, "text", values["text"])]

    def _read_pair(self, location: str, values: Mapping[str, Any]) -> tuple[Any, list]:
        answers, prompt = [values["chosen"], values["rejected"]], values.get("prompt")
        if all(isinstance(answer, str) for answer in answers):
            for name, answer in zip(PAIRS[0], answers, strict=True):
                _check_text(location, name, answer)
            if prompt is not None:
                _check_text(location, "prompt", prompt)
        else:
            answers = [_check_messages(location, *item) for item in zip(PAIRS[0], answers, strict=True)]
            prompt, answers = self._split_prompt(location, prompt, answers)
        if answers[0] == answers[1]:
            raise UsageError(f"{location}: chosen and rejected are equal: leave out the row")
        return prompt, answers

    def _split_prompt(self, location: str, prompt: Any, answers: list[list]) -> tuple[list, list[list]]:
        """Find the turns before the answers: those of `prompt`, or those with which both lists begin."""
        if isinstance(prompt, str):
            turn = {"role": "user", "content": _check_text(location, "prompt", prompt)}
            if any(answer[0]["role"] == "user" and answer[0]["content"] != prompt for answer in answers):
                raise UsageError(
                    f"{location}: prompt is a text, but chosen or rejected begins with another turn of the user: leave out "
                    "prompt"
                )
            begins = [answer[0]["role"] == "user" for answer in answers]
            if all(begins):
                answers = [answer[1:] for answer in answers]
            elif any(begins):
                raise UsageError(f"{location}: only one of chosen and rejected begins with the prompt: mend the row")
            prompt = [turn]
        elif prompt is None:
            shared = [
                first
                for first, _ in itertools.takewhile(lambda turns: turns[0] == turns[1], zip(*answers, strict=False))
            ]
            if len(shared) == min(map(len, answers)):
                raise UsageError(
                    f"{location}: chosen or rejected is the beginning of the other: mend or leave out the row"
                )
            prompt, answers = shared, [answer[len(shared) :] for answer in answers]
        else:
            prompt = _check_messages(location, "prompt", prompt)
        for name, answer in zip(PAIRS[0], answers, strict=True):
            self._check_answer(location, name, answer)
        if not prompt:
            raise UsageError(
                f"{location}: chosen and rejected share no turn before the answer: give prompt, or that turn"
            )
        return prompt, answers

    def _check_answer(self, location: str, column: str, turns: Sequence[Mapping[str, Any]]) -> None:
        if not turns or turns[0]["role"] != "assistant" or turns[-1]["role"] != "assistant":
            raise UsageError(
                f"{location}: {column} must begin and end with a turn of the assistant, behind the prompt: mend it"
            )


def _parse_json(location: str, column: str, value: Any) -> Any:
    """Parse a value that a table holds as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{location}: {column} is a text that is not JSON ({reason(error)}): mend it") from None


def _check_text(location: str, column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(
            f"{location}: {column} holds {type(value).__name__}, not text: give all of its columns the same kind"
        )
    if not value.strip():
        raise UsageError(f"{location}: {column} is empty: fill it in, or leave out the row")
    documents.check_text(location, value)
    return value


def _check_messages(location: str, column: str, value: Any) -> list[dict[str, Any]]:
    """Check turns, and return them without keys of no value."""
    if not isinstance(value, list) or not value or not all(isinstance(turn, dict) for turn in value):
        kind = "an empty list" if value == [] else type(value).__name__
        raise UsageError(f"{location}: {column} holds {kind}, must be a list of objects with role and content: mend it")
    turns = [{key: item for key, item in turn.items() if item is not None} for turn in value]
    for number, turn in enumerate(turns, start=1):
        where, role, content = f"{location}: {column}, turn {number}", turn.get("role"), turn.get("content", "")
        if role not in ROLES:
            name = repr(documents.shorten(role)) if isinstance(role, str) else "missing, or no text"
            raise UsageError(f"{where}: role is {name}, must be one of {', '.join(ROLES)}: rename it")
        if not isinstance(content, str):
            raise UsageError(f"{where}: content holds {type(content).__name__}, not text: write it as text")
        if not isinstance(turn.get("tool_calls", []), list):
            raise UsageError(f"{where}: tool_calls holds {type(turn['tool_calls']).__name__}, must be a list: mend it")
        if not content.strip() and not (role == "assistant" and turn.get("tool_calls")):
            raise UsageError(f"{where}: the turn of the role {role} is empty: fill it in, or leave out the row")
        documents.check_text(where, content)
    return turns


def has_turns(rows: Dataset) -> bool:
    """Tell whether rows have turns; else they have texts."""
    return isinstance(json.loads(rows[0]["row"])["prompt"], list)


def _source() -> str:
    """Hash this file, so that cached rows are read anew when it changes."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
