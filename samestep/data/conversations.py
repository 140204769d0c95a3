"""Conversations, and pairs of answers, to samples of a causal language model: which tokens are trained is found, never guessed.

Rows are read once to one form: turns or a text before the answer, and one answer, or a preferred and a rejected one. A row is
tokenized by the tokenizer's chat template (turns) or as it is (texts), once, into a memory-mapped file. A token is trained when
the model has to predict it. Which ones are is read from the template's `{% generation %}` markers. Where it has none, the
turns before each answer are rendered alone, and must be, token for token, the beginning of the whole: what follows is the
answer. A row for which this does not hold is refused. Sequences lie end to end in a micro-batch: nothing is padded.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from transformers import AddedToken, PreTrainedTokenizerBase

from samestep._internals.datasets_rows import rows_fingerprint
from samestep.data import documents, drawn_chats
from samestep.data.arrow import ListColumn
from samestep.data.labelled_texts import READERS
from samestep.data.tokenizer import fingerprint, load_tokenizer, train_byte_level_bpe
from samestep.errors import UsageError, nearest, reason
from samestep.recipe.extras import optional

datasets, pa = optional("datasets"), optional("pyarrow")
Dataset, Features, List, Value = (getattr(datasets, name) for name in ("Dataset", "Features", "List", "Value"))

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
MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
CONTROL_TOKEN = re.compile(r"<\|[^\s<>|]+\|>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]")  # in the text of a template
MAX_PROBLEMS = 10  # different faults of rows that are reported
KEPT, CUT, TOO_LONG, UNTRAINED = range(4)
"""What became of a row: its sample is whole, or cut at max_seq_length; or it is left out, for its length or its mask."""

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


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One sample.

    Attributes:
        sample_id: its number.
        tokens: int32 [length], of a pair the preferred sequence, then the rejected one.
        is_trained: bool [length], False at the first token of a sequence.
        lengths: tokens of each sequence.
    """

    sample_id: int
    tokens: np.ndarray
    is_trained: np.ndarray
    lengths: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclasses.dataclass(frozen=True)
class MaskReport:
    """Numbers of what is trained, for a look before the training.

    Attributes:
        num_samples: samples that are used.
        num_tokens, num_trained: their tokens, and those of them that are trained.
        num_stopped: samples whose answers (of a pair: both) end with a trained stop token.
        stop_tokens: these stop tokens, as text.
        num_cut: samples that were cut at max_seq_length; they are used.
        num_dropped: rows left out because they are longer.
        num_untrained: rows left out because none of their tokens, or none of an answer's, is trained.
        num_special: samples whose text holds a special token, which is a token here, not a text.
        rule: says what is trained, and how it was found.
        max_seq_length: the largest number of tokens of a sequence.
    """

    num_samples: int
    num_tokens: int
    num_trained: int
    num_stopped: int
    stop_tokens: tuple[str, ...]
    num_cut: int
    num_dropped: int
    num_untrained: int
    num_special: int
    rule: str
    max_seq_length: int

    def __str__(self) -> str:
        """Write the report, a line or two."""
        share = f"{self.num_trained} of {self.num_tokens} tokens ({100 * self.num_trained / self.num_tokens:.1f} %)"
        if self.num_stopped:
            tokens = " or ".join(self.stop_tokens)
            stop = f"{self.num_stopped} of {self.num_samples} samples end with the stop token {tokens}"
        else:
            stop = (
                "NO sample ends with a stop token: such a model does not stop; give a template that ends turns with one"
            )
        lines = [f"trained: {share}, {self.rule}; {stop}"]
        counts = {
            f"longer than {self.max_seq_length} tokens, left out": self.num_dropped,
            f"cut at {self.max_seq_length} tokens": self.num_cut,
            "without a trained token, left out": self.num_untrained,
            "with a special token in their text": self.num_special,
        }
        if any(counts.values()):
            lines.append("samples " + "; ".join(f"{text}: {count}" for text, count in counts.items() if count))
        return "\n".join(lines)


class Conversations:
    """The samples of a dataset of conversations, or of pairs; they are the same in every epoch.

    Args:
        rows: as `load_rows` returns them.
        tokenizer: with an eos_token; and with a chat template, if rows have turns.
        train_on: `completions`: the answers alone; `assistant`: all turns of the assistant; `all`: all tokens. Pairs are
            trained on their answers.
        max_seq_length: tokens of a sequence at most.
        truncation: `drop` leaves out samples with a longer sequence, `cut` cuts sequences at their end.
        terms: names of the loss terms, in order.
        loss_weighting: `token`, or `sample`, which `counts` depend on.
        has_reference: whether micro-batches hold log-probabilities of a reference model.
        num_workers: processes that tokenize.
        description: names the data in messages.

    Raises:
        UsageError: rows that the template cannot show as they are; no template; nothing to train on.
    """

    def __init__(
        self,
        rows: Dataset,
        tokenizer: PreTrainedTokenizerBase,
        *,
        train_on: str,
        max_seq_length: int,
        truncation: str,
        terms: Sequence[str] = ("lm",),
        loss_weighting: str = "token",
        has_reference: bool = False,
        num_workers: int | None = None,
        description: str = "conversations",
    ):
        self.rows, self.tokenizer, self.max_seq_length, self.train_on = rows, tokenizer, max_seq_length, train_on
        self.terms, self.loss_weighting, self.has_reference = tuple(terms), loss_weighting, has_reference
        self.columns = rows[0]["columns"]
        self.is_pairs = "chosen" in self.columns
        self.max_length = max_seq_length * (1 + self.is_pairs)
        tokenizer.model_max_length = max_seq_length  # saved with it: a pipeline truncates to that
        self.renderer = Renderer(tokenizer, "completions" if self.is_pairs else train_on, _has_turns(rows))
        settings = (self.renderer.train_on, max_seq_length, truncation)
        columns = {name: List(Value(kind)) for name, kind in (("tokens", "int32"), ("trained", "uint8"))}
        columns |= dict.fromkeys(("border", "state", "stops", "special"), Value("int32")) | {"problem": Value("string")}
        table = rows.map(
            _tokenize,
            batched=True,
            remove_columns=rows.column_names,
            features=Features(columns),
            fn_kwargs={"renderer": self.renderer, "max_seq_length": max_seq_length, "cuts": truncation == "cut"},
            num_proc=num_workers,
            desc=f"Tokenizing {description}",
            new_fingerprint=_hash(
                rows_fingerprint(rows), fingerprint(tokenizer), self.renderer.template, settings, _source()
            ),
        )
        problems: dict[str, list[int]] = {}  # message -> rows
        for place, problem in enumerate(table.data.column("problem").to_pylist()):
            if problem is not None:
                problems.setdefault(problem, []).append(place)
        if problems:
            raise UsageError([_report_problem(rows, *item) for item in list(problems.items())[:MAX_PROBLEMS]])
        self.tokens, self.trained = ListColumn(table, "tokens"), ListColumn(table, "trained")
        self.borders, self.states, self.stops, self.special = (
            table.data.column(name).to_numpy() for name in ("border", "state", "stops", "special")
        )
        self.places = np.flatnonzero(self.states <= CUT)  # [samples], the row of each
        self.reference = np.zeros((len(self.places), 2), np.float32)
        if not len(self.places):
            raise UsageError(self._explain_emptiness(description))

    def __len__(self) -> int:
        return len(self.places)

    def __str__(self) -> str:
        """Say how many samples there are, from which columns, and of how many tokens."""
        report = self.mask_report
        kind = "pairs of answers" if self.is_pairs else "conversations" if self.renderer.has_turns else "texts"
        left_out = {
            f"longer than {self.max_seq_length}": report.num_dropped,
            "with nothing to train": report.num_untrained,
        }
        notes = "".join(f", {count} {text} left out" for text, count in left_out.items() if count)
        cut = f", {report.num_cut} cut at {self.max_seq_length}" if report.num_cut else ""
        return (
            f"{len(self)} {kind} (columns {self.columns}; {report.num_tokens} tokens, {report.num_trained} of them trained"
            f"{cut}{notes})"
        )

    def _explain_emptiness(self, description: str) -> str:
        if (self.states == TOO_LONG).any():
            return (
                f"{description}: all {len(self.states)} rows are longer than max_seq_length {self.max_seq_length}: raise it, "
                "or set truncation to cut"
            )
        return (
            f"{description}: no token of any row is trained (train_on {self.train_on}): put {{% generation %}} and "
            "{% endgeneration %} around the assistant's turns in the chat template, or take the markers out; or raise "
            "max_seq_length, if answers are cut off"
        )

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, the template, the tokens, and which are trained."""
        return {
            "tokenizer": fingerprint(self.tokenizer),
            "template": _hash(self.renderer.template),
            "conversations": _hash(self.tokens.digest(), self.borders.tobytes()),
            "mask": self.trained.digest(),
        }

    @functools.cached_property
    def mask_report(self) -> MaskReport:
        """The numbers of tokens, of trained ones, and of stop tokens."""
        lengths = self.tokens.lengths()
        trained, stops = [self.trained[place] for place in self.places], self.stops[self.places]
        stop_ids = np.unique(stops[stops >= 0]).tolist()
        return MaskReport(
            num_samples=len(self),
            num_tokens=int(lengths[self.places].sum()),
            num_trained=int(sum(map(np.sum, trained))),
            num_stopped=int(np.sum(stops >= 0)),
            stop_tokens=tuple(self.tokenizer.convert_ids_to_tokens(stop_ids)),
            num_cut=int(np.sum(self.states == CUT)),
            num_dropped=int(np.sum(self.states == TOO_LONG)),
            num_untrained=int(np.sum(self.states == UNTRAINED)),
            num_special=int(self.special[self.places].sum()),
            rule=self.renderer.rule,
            max_seq_length=self.max_seq_length,
        )

    def draw(self, epoch: int, sample_id: int) -> Conversation:
        """Return a sample; it is the same in every epoch."""
        place = self.places[sample_id]
        tokens, border = self.tokens[place], int(self.borders[place])
        lengths = (border, len(tokens) - border) if self.is_pairs else (len(tokens),)
        return Conversation(int(sample_id), tokens, self.trained[place].view(bool), lengths)

    def longest(self) -> Conversation:
        """Return a sample of max_length tokens, all trained but the first of each sequence."""
        num_sequences = 1 + self.is_pairs
        is_trained = np.ones((num_sequences, self.max_seq_length), bool)
        is_trained[:, 0] = False
        tokens = np.full(self.max_length, self.tokenizer.eos_token_id, np.int32)
        return Conversation(0, tokens, is_trained.ravel(), (self.max_seq_length,) * num_sequences)

    def find_question(self, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the tokens before a sample's last answer (of a pair: the preferred one), and the answer's own tokens.

        Returns:
            both int32; the answer ends with the stop token, where there is one.
        """
        sample = self.draw(0, sample_id)
        tokens, is_trained = sample.tokens[: sample.lengths[0]], sample.is_trained[: sample.lengths[0]]
        end = int(np.flatnonzero(is_trained)[-1]) + 1
        start = end - sum(1 for _ in itertools.takewhile(bool, is_trained[:end][::-1]))
        return tokens[:start], tokens[start:end]

    def collate(self, samples: list[Conversation]) -> dict[str, torch.Tensor]:
        """Make a micro-batch of S samples, all Q sequences end to end, without padding; no samples make one token, not trained.

        Returns:
            input_ids, position_ids: int64 [1, n]; positions begin anew in each sequence.
            ends: int32 [Q + 1], 0 and the end of each sequence; of pairs the preferred, then the rejected one.
            labels: int64 [m], the trained tokens.
            label_index: int64 [m], for each its predecessor's place in the row.
            label_sequence: int64 [m], number of the sequence of each.
            reference: float32 [Q], see `set_reference`; only with `has_reference`.
            counts: int64 [terms].
        """
        lengths = np.array([length for sample in samples for length in sample.lengths] or [1])
        tokens = np.concatenate([sample.tokens for sample in samples] or [np.array([self.tokenizer.eos_token_id])])
        is_trained = np.concatenate([sample.is_trained for sample in samples] or [np.zeros(1, bool)])
        ends = np.concatenate([[0], np.cumsum(lengths)])
        sequence, places = np.repeat(np.arange(len(lengths)), lengths), np.flatnonzero(is_trained)
        micro_batch = {
            "input_ids": torch.from_numpy(tokens.astype(np.int64))[None],
            "position_ids": torch.from_numpy(np.arange(len(tokens)) - np.repeat(ends[:-1], lengths))[None],
            "ends": torch.from_numpy(ends.astype(np.int32)),
            "labels": torch.from_numpy(tokens[places].astype(np.int64)),
            "label_index": torch.from_numpy(places - 1),
            "label_sequence": torch.from_numpy(sequence[places]),
        }
        if self.has_reference:
            ids = [sample.sample_id for sample in samples]
            micro_batch["reference"] = torch.from_numpy(self.reference[ids].ravel())
        num_targets = {
            "lm": len(places) if self.loss_weighting == "token" else len(samples),
            "sft": int(np.sum(sequence[places] % 2 == 0)),  # those of the preferred sequences
        }
        counts = [num_targets.get(term, len(samples)) for term in self.terms]
        return micro_batch | {"counts": torch.tensor(counts)}

    def set_reference(self, log_probabilities: np.ndarray) -> None:
        """Keep the log-probabilities of the answers under the reference model, for micro-batches from now on.

        Args:
            log_probabilities: floating [samples, 2], sums over the trained tokens of the preferred and the rejected sequence.
        """
        self.reference = np.asarray(log_probabilities, np.float32).reshape(len(self), 2)

    def show(self, num_samples: int, colour: bool = False) -> list[str]:
        """Write the first samples as text, their trained tokens marked, and the mask report.

        Args:
            num_samples: at most.
            colour: mark by escape sequences of a terminal instead of `[[...]]`.
        """
        before, after = ("\x1b[1;4m", "\x1b[0m") if colour else ("[[", "]]")
        lines = []
        for sample_id in range(min(num_samples, len(self))):
            sample, start = self.draw(0, sample_id), 0
            lines.append(f"--- sample {sample_id} ({self.rows[int(self.places[sample_id])]['place']})")
            for length, name in zip(sample.lengths, ("chosen", "rejected"), strict=False):
                tokens, mask = (values[start : start + length] for values in (sample.tokens, sample.is_trained))
                borders = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), length]
                parts = []
                for first, last in itertools.pairwise(borders):
                    text = _printable(self.tokenizer.decode(tokens[first:last]))
                    parts.append(f"{before}{text}{after}" if mask[first] else text)
                heading = f"{name}: " if self.is_pairs else ""
                lines += [f"{heading}{length} tokens, {int(mask.sum())} trained", "".join(parts).rstrip("\n")]
                start += length
        return [*lines, "---", str(self), str(self.mask_report)]


def _report_problem(rows: Dataset, problem: str, places: Sequence[int]) -> str:
    """Name the first of the rows that have a problem, and the number of the others."""
    more = f" ({len(places) - 1} more rows have the same problem)" if len(places) > 1 else ""
    return f"{rows[places[0]]['place']}: {problem}{more}"


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def build(recipe: Any, num_workers: int | None = None) -> tuple[Conversations, Conversations | None]:
    """Build the recipe's training and held-out samples; None when nothing is held out.

    Args:
        recipe: of the task causal_lm_finetuning: gives the data, the tokenizer, the template, and what is trained.
        num_workers: processes that tokenize.

    Raises:
        UsageError: data, tokenizer or template that cannot be used.
    """
    wants_pairs = recipe.objective != "sft"
    source = {"wants_pairs": wants_pairs, "train_on": recipe.train_on}
    if recipe.dataset_name in BUILTIN:
        sizes = recipe.num_train_samples, recipe.num_validation_samples
        rows, held_out = (
            _draw(recipe, split, size, wants_pairs) for split, size in zip(drawn_chats.SPLITS, sizes, strict=True)
        )
    else:
        rows = load_rows(recipe.train_file, recipe.dataset_name, recipe.dataset_config_name, **source)
        if recipe.validation_file is not None:
            held_out = load_rows(recipe.validation_file, **source)
            if held_out[0]["columns"].split(", ")[0] != rows[0]["columns"].split(", ")[0]:
                raise UsageError(
                    f"validation_file has the columns {held_out[0]['columns']}, train_file {rows[0]['columns']}: give both the "
                    "same form"
                )
        else:
            rows, held_out = documents.split_documents(rows, recipe.validation_fraction, recipe.seed)
    tokenizer = make_tokenizer(recipe, rows)
    settings = {
        "train_on": recipe.train_on,
        "max_seq_length": recipe.max_seq_length,
        "truncation": recipe.truncation,
        "terms": tuple(recipe.loss_weights),
        "loss_weighting": recipe.loss_weighting,
        "has_reference": recipe.objective == "dpo",
        "num_workers": num_workers,
    }
    train = Conversations(rows, tokenizer, **settings, description="training conversations")
    if not len(held_out):
        return train, None
    return train, Conversations(held_out, tokenizer, **settings, description="held-out conversations")


# ---------------------------------------------------------------------------------------------------------------------
# rows


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


def _draw(recipe: Any, split: str, num_samples: int | None, wants_pairs: bool) -> Dataset:
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
    for file in files:
        number = 0
        try:
            for number, values in READERS[Path(file).suffix.lower()](file):
                is_json = Path(file).suffix.lower() in (".json", ".jsonl")
                yield reader.read(f"{file}:{number}", values if is_json else _without_none(values))
        except UsageError:
            raise
        except (OSError, pa.ArrowException, ValueError, OverflowError) as error:  # ValueError: cells of a damaged table
            raise UsageError(
                f"data file {file} cannot be read: {reason(error)}. Write it anew, or leave it out"
            ) from error
        if not number:
            raise UsageError(f"data file {file} holds no row: leave it out")


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
        self.columns: tuple[str, ...] = ()
        self.has_turns: bool | None = None

    def read(self, location: str, values: Mapping[str, Any]) -> dict[str, str]:
        """Return a row of `FEATURES`. Raises UsageError where it cannot be used."""
        if self.form is None:
            self._recognise(location, list(values))
        missing = [name for name in self.required if values.get(name) is None]
        if missing:
            present = documents.list_names([name for name, value in values.items() if value is not None])
            raise UsageError(
                f"{location} has no {documents.list_names(missing)}, only {present}, but the first row is read by the columns "
                f"{', '.join(self.columns)}: give all rows the same columns"
            )
        tools = _parse_json(location, "tools", values.get("tools")) if "tools" in self.columns else None
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
        required, optional_columns = forms[self.form]
        self.columns = (*(name for name in optional_columns if name == "prompt" and name in present), *required)
        self.required = tuple(name for name in self.columns)
        self.columns += tuple(name for name in optional_columns if name != "prompt" and name in present)

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
        if "prompt" not in self.columns:
            prompt = None
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
        if not content.strip() and not (role == "assistant" and turn.get("tool_calls")):
            raise UsageError(f"{where}: the turn of the role {role} is empty: fill it in, or leave out the row")
        documents.check_text(where, content)
    return turns


# ---------------------------------------------------------------------------------------------------------------------
# tokens


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
        try:
            self.find_template(None)
            tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        except (jinja2.TemplateSyntaxError, ValueError) as error:  # ValueError: several templates, none the default
            raise UsageError(
                f"the chat template cannot be used: {reason(error)}: mend it, or give --chat_template FILE"
            ) from None
        except Exception:  # of any kind: a template may refuse this turn, but not those of the rows
            return

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
        turns = prompt + answer
        text = self._apply(turns, tools)
        _check_nothing_is_lost(turns, tools, text)
        tokens = self._encode(text)
        if self.train_on == "all":
            return tokens, np.ones(len(tokens), bool)
        first = 0 if self.train_on == "assistant" else len(prompt)
        if MARKER.search(self.find_template(tools)):
            return tokens, self._find_marked(turns, tools, tokens, first)
        return tokens, self._find_answers(turns, tools, tokens, first)

    def _apply(self, turns: list[dict], tools: list[dict] | None, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(turns, tools=tools, **({"tokenize": False} | options))
        except Exception as error:  # of any kind: others wrote the template
            raise UsageError(
                f"the chat template refuses it ({reason(error)}): mend the row, or give another template, --chat_template FILE"
            ) from None

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _find_marked(self, turns: list[dict], tools: list[dict] | None, tokens: list[int], first: int) -> np.ndarray:
        """Find the tokens inside of the template's markers, of the turns from number `first` on."""
        encoding = self._apply(turns, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        mask = np.array(encoding["assistant_masks"], bool)
        if first:
            before = self._encode(self._apply(turns[:first], tools, add_generation_prompt=True))
            self._check_beginning(before, tokens, first)
            mask[: len(before)] = False
        end = self._find_end_of_turn(tokens)
        if end is not None and mask.any() and not mask[end]:
            last = tokens[np.flatnonzero(mask)[-1]]
            if last not in self.special_ids:
                token = self.tokenizer.convert_ids_to_tokens(tokens[end])
                raise UsageError(
                    f"the template's markers end before {token}, so that the model would not learn to stop: move "
                    "{% endgeneration %} behind it, in a copy of the template, --chat_template FILE"
                )
        return mask

    def _find_answers(self, turns: list[dict], tools: list[dict] | None, tokens: list[int], first: int) -> np.ndarray:
        """Find the tokens of the assistant's turns from number `first` on, by rendering the turns before each."""
        mask = np.zeros(len(tokens), bool)
        for number, turn in enumerate(turns):
            if number < first or turn["role"] != "assistant":
                continue
            if number == 0:
                raise UsageError(
                    "the first turn is the assistant's, whose beginning only a template with {% generation %} markers shows: "
                    "give one, --chat_template FILE, or leave out the turn"
                )
            before = self._encode(self._apply(turns[:number], tools, add_generation_prompt=True))
            is_last = number == len(turns) - 1
            after = tokens if is_last else self._encode(self._apply(turns[: number + 1], tools))
            self._check_beginning(before, tokens, number)
            if not is_last:
                self._check_beginning(after, tokens, number + 1)
            end = self._find_end_of_turn(after)
            mask[len(before) : len(after) if end is None else end + 1] = True
        return mask

    def _check_beginning(self, before: list[int], tokens: list[int], num_turns: int) -> None:
        if tokens[: len(before)] != before:
            others = ", or set train_on to completions" if self.train_on == "assistant" else ""
            raise UsageError(
                f"the chat template renders the beginning, up to turn {num_turns}, otherwise when more turns follow, so that "
                "the trained tokens cannot be found: give a template with {% generation %} markers, --chat_template FILE"
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


def _check_nothing_is_lost(turns: list[dict], tools: list[dict] | None, text: str) -> None:
    """Check that a rendered text holds the content of each turn, in order, and the names of tools and of calls."""
    place = 0
    for number, turn in enumerate(turns, start=1):
        content = turn.get("content", "")
        if turn["role"] == "assistant":
            content = content.rpartition("</think>")[2]  # templates leave out the thoughts of earlier turns
        content = content.strip()
        start = text.find(content, place)
        if start < 0:
            fault = "puts into another place" if content in text else "leaves out or changes"
            raise UsageError(
                f"the chat template {fault} the content of turn {number} (role {turn['role']}): give a template that keeps it, "
                "--chat_template FILE, or mend the row"
            )
        place = start + len(content)
    calls = [call for turn in turns for call in turn.get("tool_calls") or []]
    for kind, items in (("tool", tools or []), ("call of the tool", calls)):
        names = [item.get("function", item).get("name") for item in items if isinstance(item, dict)]
        lost = [name for name in names if isinstance(name, str) and name not in text]
        if lost:
            raise UsageError(
                f"the chat template leaves out the {kind} {documents.shorten(lost[0])!r}: give a template with tools, "
                "--chat_template FILE, or leave tools out"
            )


def _tokenize(batch: dict[str, list], renderer: Renderer, max_seq_length: int, cuts: bool) -> dict[str, list]:
    """Turn rows into `tokens` and `trained` (of a pair both sequences, end to end), `border`, the length of the first one, and
    what became of them."""
    columns: dict[str, list] = {
        name: [] for name in ("tokens", "trained", "border", "state", "stops", "special", "problem")
    }
    nothing = (np.zeros(0, np.int32), np.zeros(0, bool))
    for text in batch["row"]:
        row, sequences, state, stop, problem = json.loads(text), [nothing], KEPT, -1, None
        try:
            sequences = renderer.render(row)
            if len(sequences) > 1 and np.array_equal(sequences[0][0], sequences[1][0]):
                raise UsageError("chosen and rejected are the same tokens: leave out the row")
        except UsageError as error:
            problem = str(error)
        if problem is None and max(len(tokens) for tokens, _ in sequences) > max_seq_length:
            state = CUT if cuts else TOO_LONG
            sequences = [tuple(values[:max_seq_length] for values in sequence) for sequence in sequences]
            is_equal = len(sequences) > 1 and np.array_equal(sequences[0][0], sequences[1][0])
        else:
            is_equal = False
        if problem is None and state != TOO_LONG and (is_equal or not all(mask.any() for _, mask in sequences)):
            state = UNTRAINED
        if problem is not None or state > CUT:
            sequences = [nothing]
        elif state == KEPT:
            stop = min(renderer.find_stop(*sequence) for sequence in sequences)
        columns["tokens"].append(np.concatenate([tokens for tokens, _ in sequences]))
        columns["trained"].append(np.concatenate([mask for _, mask in sequences]).astype(np.uint8))
        columns["border"].append(len(sequences[0][0]))
        columns["state"].append(state)
        columns["stops"].append(stop)
        columns["special"].append(int(renderer.holds_special(row)))
        columns["problem"].append(problem)
    return columns


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
        is_required = recipe.model_name_or_path is not None
        vocab_size = recipe.vocab_size or sys.maxsize
        tokenizer = load_tokenizer(name, vocab_size, ("eos_token",), "GPT-2", is_required=is_required)
        tokenizer.chat_template = template or tokenizer.chat_template
        return tokenizer
    has_turns = _has_turns(rows)
    template = (template or CHAT_TEMPLATE) if has_turns else None
    control_tokens = list(dict.fromkeys(CONTROL_TOKEN.findall(template or "")))
    smallest = 257 + len(control_tokens)
    if recipe.vocab_size < smallest:
        raise UsageError(
            f"vocab_size is {recipe.vocab_size}, must be {smallest} or more: 256 bytes, <|endoftext|>"
            f"{''.join(f', {token}' for token in control_tokens)}"
        )
    texts = rows.map(
        _join_texts,
        remove_columns=rows.column_names,
        features=Features({"text": Value("string")}),
        new_fingerprint=_hash(rows_fingerprint(rows), "texts", _source()),
    )
    tokenizer = train_byte_level_bpe(texts, recipe.vocab_size - len(control_tokens))
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control_tokens], special_tokens=True
    )
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = template
    if has_turns:
        renderer = Renderer(tokenizer, "assistant", has_turns)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        tokens = renderer._encode(renderer._apply(turns, None))
        end = renderer._find_end_of_turn(tokens)
        if end is not None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(tokens[end])
    return tokenizer


def _has_turns(rows: Dataset) -> bool:
    return isinstance(json.loads(rows[0]["row"])["prompt"], list)


def _read_template(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"chat_template {file!r} cannot be read ({reason(error)}): name a file with a Jinja template"
        ) from None


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


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _source() -> str:
    """Hash this file, so that cached rows are made anew when it changes."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
