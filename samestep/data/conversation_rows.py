"""Reads conversations, pairs of answers and texts from files, from the hub, or drawn, to rows of one form.

A row is turns or a text before the answer, and one answer, or a preferred and a rejected one. Its form is recognised by its
columns, and is that of all rows of a source.
"""

import glob
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from samestep.data import doctest_chats, documents, drawn_chats
from samestep.data.drawn_chats import SPLITS
from samestep.data.labelled_texts import READERS, read_rows
from samestep.errors import UsageError, nearest, reason
from samestep.recipe.extras import optional

datasets, pa = optional("datasets"), optional("pyarrow")
if TYPE_CHECKING:
    from datasets import Dataset, Features, Value
else:
    Dataset, Features, Value = datasets.Dataset, datasets.Features, datasets.Value

FEATURES = Features(dict.fromkeys(("columns", "row", "place", "source"), Value("string"))) if datasets else None
ROLES = ("system", "developer", "user", "assistant", "tool")
FORMS = {
    "messages": (("messages",), ("tools",)),
    "completion": (("prompt", "completion"), ("tools",)),
    "instruction": (("instruction", "output"), ("input",)),
    "text": (("text",), ()),
}
"""Form of a row -> the columns that it has, and those that it may have."""
PAIRS = (("chosen", "rejected"), ("prompt", "tools"))
DOCTESTS = "builtin/doctests"
BUILTIN = {"builtin/drawn_chats": False, "builtin/drawn_pairs": True, DOCTESTS: False}
"""Name of data that need no download -> whether its rows are pairs."""


MAX_SOURCES = 20
"""Entries of train_file at most that are told apart where no weights are given: more are files that a shell found."""


class Source(NamedTuple):
    """Rows of one source of a training.

    Attributes:
        entry: that of train_file or dataset_name; of several files that are read as one, all of them.
        train, held_out: rows, as `load_rows` returns them; `held_out` may be empty.
    """

    entry: str
    train: Dataset
    held_out: Dataset


def load_sources(recipe: Any) -> list[Source]:
    """Load the recipe's sources, in order, and hold rows of each out.

    Entries of dataset_name are a source each, and so are those of train_file where mixture_weights are given; else all files
    are one source, read as one. Each source has a form of its own (see `load_rows`), but turns and texts do not mix.

    Raises:
        UsageError: data that cannot be used; sources of turns beside sources of texts; a file in two sources.
    """
    wants_pairs = recipe.objective != "sft"
    options = {"wants_pairs": wants_pairs, "train_on": recipe.train_on}
    if (not recipe.train_file) == (not recipe.dataset_name):
        raise UsageError(
            f"give exactly one of train_file and dataset_name, not {'both' if recipe.train_file else 'neither'}; "
            f"dataset_name {next(iter(BUILTIN))} needs no download"
        )
    entries = list(recipe.train_file or recipe.dataset_name)
    builtins = [entry for entry in entries if entry.startswith("builtin/")]
    if builtins and recipe.validation_file is not None:
        raise UsageError(
            f"validation_file is set, but {builtins[0]} has held-out samples too: leave it out, or give train_file"
        )
    if recipe.train_file and recipe.mixture_weights is None:
        sources = [_hold_out(recipe, "train_file", load_rows(entries, **options))]
    else:
        _check_files_differ([entry for entry in entries if _is_file(recipe, entry)])
        sources = [
            _load_source(recipe, entry, name, options)
            for entry, name in zip(entries, name_sources(entries), strict=True)
        ]
    if recipe.validation_file is not None:
        held_out = load_rows(recipe.validation_file, **options)
        forms = {source.train[0]["columns"].split(", ")[0] for source in sources}
        if held_out[0]["columns"].split(", ")[0] not in forms:
            raise UsageError(
                f"validation_file has the columns {held_out[0]['columns']}, train_file {sources[0].train[0]['columns']}: give "
                "both the same form"
            )
        sources[0] = sources[0]._replace(held_out=held_out)
    rows = [(source.entry, source.train) for source in sources]
    rows += [("validation_file", sources[0].held_out)] if recipe.validation_file is not None else []
    kinds = {has_turns(part): entry for entry, part in rows}
    if len(kinds) > 1:
        raise UsageError(f"{kinds[True]} holds turns, but {kinds[False]} texts: give all sources the same kind")
    return sources


def _is_file(recipe: Any, entry: str) -> bool:
    return bool(recipe.train_file) or Path(entry).suffix.lower() in READERS


def _check_files_differ(entries: Sequence[str]) -> None:
    """Raise UsageError where two sources hold the same file."""
    owners: dict[str, str] = {}
    for entry in entries:
        for file in documents.find_files([entry], READERS)[0]:
            owner = owners.setdefault(os.path.realpath(file), entry)
            if owner != entry:
                raise UsageError(
                    f"{file} is in two sources, {owner} and {entry}: name it once, and give it the sum of the weights"
                )


def _load_source(recipe: Any, entry: str, name: str, options: Mapping[str, Any]) -> Source:
    """Load one source, whose name in metrics is `name`; `options` are those of `load_rows`."""
    if entry.startswith("builtin/"):
        sizes = recipe.num_train_samples, recipe.num_validation_samples
        parts = [
            load_builtin(recipe, entry, split, size, options["wants_pairs"])
            for split, size in zip(SPLITS, sizes, strict=True)
        ]
        return Source(entry, *parts)
    if _is_file(recipe, entry):
        rows = load_rows([entry], names=[name], **options)
    else:
        rows = _load_dataset(entry, recipe.dataset_config_name, name, **options)
    try:
        return _hold_out(recipe, entry, rows)
    except UsageError as error:
        raise UsageError(f"{entry}: {error}") from None


def _hold_out(recipe: Any, entry: str, rows: Dataset) -> Source:
    """Hold a share of the rows out, unless the recipe names held-out files."""
    if recipe.validation_file is not None:
        return Source(entry, rows, rows.select([]))
    fraction = recipe.validation_fraction
    if fraction and len(rows) - max(2, round(fraction * len(rows))) < 2:
        raise UsageError(
            f"validation_fraction {fraction} of {len(rows)} samples leaves fewer than 2 to train on, as 2 at least are held "
            "out: lower it, set it to 0, or give more samples"
        )
    return Source(entry, *documents.split_documents(rows, fraction, recipe.seed))


def name_sources(entries: Sequence[str]) -> list[str]:
    """Name sources by their entries, for metrics: different names for different entries.

    >>> name_sources(["a/chats.jsonl", "b/chats.jsonl", "more/*.csv", "owner/set:en", "builtin/doctests"])
    ['chats', 'chats_2', 'more', 'set_en', 'doctests']
    """
    names: list[str] = []
    for entry in entries:
        parts = [part for part in Path(entry).parts if not glob.has_magic(part)] or [entry]
        last = parts[-1] if Path(entry).suffix.lower() not in READERS else Path(parts[-1]).stem
        name = re.sub(r"[^\w.-]+", "_", last).strip("_") or "files"
        number = 1 + sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in names)
        names.append(name if number == 1 else f"{name}_{number}")
    return names


def load_rows(
    train_file: Sequence[str],
    *,
    wants_pairs: bool = False,
    train_on: str = "assistant",
    names: Sequence[str] | None = None,
) -> Dataset:
    """Load conversations, or pairs, from files.

    The form is recognised by the first row's columns, and all rows must have it: `messages`; `prompt` and `completion`, both
    texts or both lists of messages; `instruction`, `output` and perhaps `input`; `text`; for pairs `chosen` and `rejected`,
    perhaps with `prompt`. `messages` and what has lists of messages may have `tools`.

    Args:
        train_file: paths, folders and globs: `.jsonl` or `.json` with an object per line, `.csv`, `.tsv`, `.parquet`. In a cell
            of a csv file `messages` and `tools` are JSON.
        wants_pairs: read pairs, which no other form can give.
        train_on: see `Conversations`; other forms than `text` need a turn of the assistant at the end unless it is `all`.
        names: of the source of each entry; None: by the entries, if there are no more than `MAX_SOURCES`; else none.

    Returns:
        A memory-mapped dataset with string columns `columns`, names of the columns that were read; `row`, JSON with `prompt`,
        `answers` and `tools`; `place`, file and line; `source`, its name. At least one row.

    Raises:
        UsageError: names the file and the line of the first row that cannot be used, and the remedy.
    """
    options: dict[str, Any] = {"wants_pairs": wants_pairs, "train_on": train_on}
    files, keys = documents.find_files(train_file, READERS)
    if names is None:
        names = name_sources(train_file) if len(train_file) <= MAX_SOURCES else ["files"] * len(train_file)
    labels: dict[str, str] = {}
    for entry, name in zip(train_file, names, strict=True):
        for file in documents.find_files([entry], READERS)[0]:
            labels.setdefault(file, name)
    labelled = [(file, labels[file]) for file in files]
    key = (keys, labelled, options, _source())
    return documents.cache_rows(_read, FEATURES, key=key, files=labelled, **options)


def split_name(entry: str) -> tuple[str, str | None, str]:
    """Split an entry of dataset_name, NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, into name, configuration and split.

    >>> split_name("openai/gsm8k:main"), split_name("HuggingFaceH4/ultrachat_200k::train_sft")
    (('openai/gsm8k', 'main', 'train'), ('HuggingFaceH4/ultrachat_200k', None, 'train_sft'))
    """
    name, config, split = [entry, "", ""] if os.path.exists(entry) else [*entry.split(":", 2), "", ""][:3]
    return name, config or None, split or "train"


def _load_dataset(entry: str, config: str | None, source: str, wants_pairs: bool, train_on: str) -> Dataset:
    """Load a dataset of the hub, or a folder of one; see `load_rows`."""
    name, own_config, split = split_name(entry)
    dataset = documents.load_hub(name, own_config or config, split, None)
    reader = _RowReader(wants_pairs, train_on)

    def read(values: dict[str, Any], number: int) -> dict[str, str]:
        return reader.read(f"dataset_name {name!r}, row {number}", _without_none(values)) | {"source": source}

    return dataset.map(read, with_indices=True, remove_columns=dataset.column_names, features=FEATURES)


def load_builtin(recipe: Any, entry: str, split: str, num_samples: int | None, wants_pairs: bool) -> Dataset:
    """Load the rows of a split of data that need no download: they are drawn, or examples of Python's own modules.

    Args:
        entry: of dataset_name, see `BUILTIN`.
        split: train or validation.
        num_samples: to draw; examples are as many as there are.
    """
    name, config, _ = split_name(entry)
    if name not in BUILTIN:
        raise UsageError(f"dataset_name {name!r} does not exist: {nearest(name, BUILTIN)}")
    if BUILTIN[name] != wants_pairs:
        other = next(other for other, has_pairs in BUILTIN.items() if has_pairs == wants_pairs)
        raise UsageError(
            f"dataset_name is {name}, but objective {recipe.objective} needs {other}: set dataset_name to it"
        )
    config = config or recipe.dataset_config_name
    if name == DOCTESTS:
        if config is not None:
            raise UsageError(f"dataset_name {name} has no configuration, but {config} was given: leave it out")
        key = (sys.version, split, _hash_file(doctest_chats), _source())
        return documents.cache_rows(_doctest_rows, FEATURES, key=key, split=split)
    if num_samples is None:
        field = "num_train_samples" if split == "train" else "num_validation_samples"
        raise UsageError(f"{field} is not set, but {name} is drawn: say how many samples")
    drawn = {"seed": recipe.seed, "split": split, "level": config or "easy"}
    draws = (name, num_samples, drawn, _hash_file(drawn_chats), _source())
    return documents.cache_rows(_drawn_rows, FEATURES, key=draws, name=name, num_samples=num_samples, **drawn)


def _drawn_rows(name: str, num_samples: int, seed: int, split: str, level: str) -> Iterator[dict[str, str]]:
    columns = "prompt, chosen, rejected" if BUILTIN[name] else "messages"
    for sample_id in range(num_samples):
        chat = drawn_chats.draw_chat(seed, split, sample_id, level)
        answers = [chat.answer, chat.wrong] if BUILTIN[name] else [chat.answer]
        place = f"{name}, {split} {sample_id}"
        yield _make_row(columns, chat.messages, answers, place, chat.task)


def _doctest_rows(split: str) -> Iterator[dict[str, str]]:
    for example in doctest_chats.find_examples():
        if example.split == split:
            turns = [{"role": "user", "content": example.prompt}]
            yield _make_row("messages", turns, [example.answer], f"{DOCTESTS}, {example.module}", "doctests")


def _make_row(
    columns: str, turns: Sequence[Mapping], answers: Sequence[str], place: str, source: str
) -> dict[str, str]:
    row = {
        "prompt": turns,
        "answers": [[{"role": "assistant", "content": answer}] for answer in answers],
        "tools": None,
    }
    return {"columns": columns, "row": json.dumps(row), "place": place, "source": source}


def _read(files: Sequence[tuple[str, str]], wants_pairs: bool, train_on: str) -> Iterator[dict[str, str]]:
    """Read the rows of files, each with its source's name; a fault is a `UsageError` that names the file and the line."""
    reader, sources = _RowReader(wants_pairs, train_on), dict(files)
    for file, number, values in read_rows(list(sources)):
        is_json = Path(file).suffix.lower() in (".json", ".jsonl")
        row = reader.read(f"{file}:{number}", values if is_json else _without_none(values))
        yield row | {"source": sources[file]}


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
        """Return a row of `FEATURES`, but for its source. Raises UsageError where it cannot be used."""
        if self.form is None:
            self._recognise(location, list(values))
        present = [name for name, value in values.items() if value is not None]
        if missing := [name for name in self.required if name in values and values[name] is None]:
            raise UsageError(f"{location}: {missing[0]} holds no value (null): fill it in, or leave out the row")
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


def _hash_file(module: ModuleType) -> str:
    return hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()


def _source() -> str:
    """Hash this file, so that cached rows are read anew when it changes."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
