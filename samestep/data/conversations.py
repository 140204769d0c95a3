"""Conversations, and pairs of answers, to samples of a causal language model.

Rows are tokenized once, into a memory-mapped file, with a mask of the tokens that are trained: those that the model has to
predict (see `chat_templates`). Sequences lie end to end in a micro-batch: nothing is padded.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from samestep._internals import chat_rendering
from samestep.data import chat_templates, template_process
from samestep.data.arrow import Dataset, Features, List, ListColumn, Value, datasets, hash_modules, hash_parts, map_once
from samestep.data.builtin import is_builtin
from samestep.data.chat_templates import Renderer, make_tokenizer, naming_template, try_template
from samestep.data.conversation_rows import HELD_OUT, Source, has_turns, load_sources, name_sources
from samestep.data.row_images import list_texts
from samestep.data.row_report import Problem, RowReport, describe_repeats, group, refuse
from samestep.data.template_process import PROCESS, TemplateLimitError
from samestep.data.tokenizer import fingerprint
from samestep.errors import UsageError
from samestep.recipe.extras import optional

compute = optional("pyarrow.compute")

READ_AHEAD = 2**17  # characters that are rendered ahead, about
KEPT, CUT, TOO_LONG, UNTRAINED, BAD = range(5)
"""Fates of a row: its sample is whole, or cut at max_seq_length; or it is left out: too long, without a trained token, or
with a fault."""
COUNTS = ("border", "state", "stops", "special", "rewritten", "turns", "trained_turns", "weightless_turns")
"""Columns of numbers of the tokenized table."""
NOTHING = "no token is trained"
IMAGES = "samestep.data.image_conversations"
"""Module of rows with images."""


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
        num_rewritten: samples with answers that the template writes otherwise in the whole than for the model that gives them.
        rule: says what is trained, and how it was found.
        sources: of a mixture, a line for each source: its samples, its weight, and its share of an epoch.
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
    sources: tuple[str, ...] = ()
    num_rewritten: int = 0

    def __str__(self) -> str:
        """Write the report, a line or two, and one for each source of a mixture."""
        share = f"{self.num_trained:,} of {self.num_tokens:,} tokens ({100 * self.num_trained / self.num_tokens:.1f} %)"
        if self.num_stopped:
            tokens = " or ".join(self.stop_tokens)
            stop = f"{self.num_stopped:,} of {self.num_samples:,} samples end with the stop token {tokens}"
        else:
            stop = (
                "NO sample ends with a stop token: such a model does not stop; give a template that ends turns with one"
            )
        lines = [f"trained: {share}, {self.rule}; {stop}"]
        counts = {
            "with a special token in their text": self.num_special,
            "with answers that begin otherwise, or follow other turns, than where the model gives them (as without thoughts): "
            "trained as in the whole": self.num_rewritten,
        }
        if any(counts.values()):
            lines.append("samples " + "; ".join(f"{text}: {count:,}" for text, count in counts.items() if count))
        return "\n".join([*lines, *self.sources])


class Conversations:
    """The samples of a dataset of conversations, or of pairs; they are the same in every epoch.

    Args:
        rows: as `load_rows` returns them, without a problem.
        table: of these rows, as `tokenize` makes it.
        renderer: of the table, with the tokenizer.
        recipe: gives `train_on` (`completions`: the answers alone; `assistant`: all turns of the assistant, beside a prompt
            those of the completion; `all`: all tokens; pairs are trained on their answers), `max_seq_length`, tokens of a
            sequence at most, `loss_weights` of the loss terms, in order, `loss_weighting` (`token`, or `sample`), on which
            `counts` depend, and `objective`, of which dpo needs log-probabilities of a reference model.
        description: names the data in messages.
        sources: whose training rows lie one after the other; where the recipe has mixture_weights, passes over each of them in
            an epoch. Empty: an epoch uses each sample once.

    Attributes:
        rows, renderer, recipe: as given.
        numbers: columns `COUNTS` of the table, int32 [rows].
        places: int64 [samples], the row of each.
        mixture: of several sources with weights, for each its number of samples and of their uses in an epoch, see
            `samestep.cut.order.Order`; else empty.
        weights: name of each source of a mixture in messages -> its weight.
        source_names: names of the sources in metrics: of files, of datasets, or of the tasks of drawn chats.
        source_numbers: int64 [samples], the place of each sample's source in `source_names`.
        max_length: tokens of a sample at most; of a pair, of both sequences.
        reference: float32 [samples, 2], summed log-probabilities of the trained tokens of the preferred and the rejected
            sequence under a reference model; zeros until they are set.
        row_reports: on the rows of each source, held-out ones included; empty until they are set.

    Raises:
        UsageError: nothing to train on.
    """

    def __init__(
        self,
        rows: Dataset,
        table: Dataset,
        renderer: Renderer,
        recipe: Any,
        *,
        description: str = "conversations",
        sources: Sequence[Source] = (),
    ):
        self.rows, self.renderer, self.recipe = rows, renderer, recipe
        self.is_pairs = _has_pairs(rows)
        self.max_length = recipe.max_seq_length * (1 + self.is_pairs)
        self.row_reports: tuple[RowReport, ...] = ()
        self.tokens, self.trained = ListColumn(table, "tokens"), ListColumn(table, "trained")
        self.numbers = {name: table.data.column(name).to_numpy() for name in COUNTS}
        self.places = np.flatnonzero(self.numbers["state"] <= CUT)
        self.reference = np.zeros((len(self.places), 2), np.float32)
        if not len(self.places):
            raise UsageError(self._explain_emptiness(description))
        self.source_names, self.source_numbers = self._find_sources()
        self.weights = dict(zip((source.entry for source in sources), recipe.mixture_weights or (), strict=False))
        self.mixture = self._mix([len(source.train) for source in sources]) if self.weights else ()

    def __len__(self) -> int:
        return len(self.places)

    def __str__(self) -> str:
        """Say how many samples there are, from which columns, and of how many tokens."""
        report = self.mask_report
        kind = "pairs of answers" if self.is_pairs else "conversations" if self.renderer.has_turns else "texts"
        left_out = {
            f"longer than {self.recipe.max_seq_length}": report.num_dropped,
            "with nothing to train": report.num_untrained,
        }
        notes = "".join(f", {count:,} {text} left out" for text, count in left_out.items() if count)
        cut = f", {report.num_cut:,} cut at {self.recipe.max_seq_length}" if report.num_cut else ""
        return (
            f"{len(self):,} {kind} (columns {self.columns}; {report.num_tokens:,} tokens, {report.num_trained:,} of them "
            f"trained{cut}{notes})"
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer with its template."""
        return self.renderer.tokenizer

    @property
    def processor(self) -> Any:
        """The tokenizer, which is saved beside the model."""
        return self.tokenizer

    def find_inputs(self, sample_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Find what the model takes of samples beside their tokens: nothing."""
        return {}

    def describe_row(self, sample_id: int) -> dict[str, Any]:
        """Describe where a sample comes from, for people: its row."""
        return {"row": self.rows[int(self.places[sample_id])]["place"]}

    def find_types(self, tokens: np.ndarray) -> dict[str, torch.Tensor]:
        """Find what the model takes beside these tokens, int64 [1, n] each: nothing."""
        return {}

    @property
    def columns(self) -> str:
        """Names of the columns that were read, in each form of the rows."""
        return "; ".join(self.rows.unique("columns"))

    def _find_sources(self) -> tuple[tuple[str, ...], np.ndarray]:
        """Find the names of sources, in their order, and the number of each sample's source."""
        names = self.rows.with_format("arrow")[:]["source"].dictionary_encode().combine_chunks()
        numbers = names.indices.to_numpy(zero_copy_only=False).astype(np.int64)[self.places]
        used, numbers = np.unique(numbers, return_inverse=True)
        return tuple(names.dictionary[int(number)].as_py() for number in used), numbers

    def _mix(self, sizes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Count the samples of each source, whose rows are `sizes`, and how many of them an epoch uses."""
        counts = np.histogram(self.places, np.cumsum([0, *sizes]) - 0.5)[0].tolist()
        mixture = tuple(
            (count, round(weight * count)) for count, weight in zip(counts, self.weights.values(), strict=True)
        )
        for (entry, weight), (count, uses) in zip(self.weights.items(), mixture, strict=True):
            if not uses:
                raise UsageError(
                    f"mixture_weights gives {entry} {weight:g}, but of its {count} samples that are {weight * count:.3g} in an "
                    "epoch: raise it, or leave the source out"
                )
        return mixture

    def list_mixture(self) -> list[tuple[str, int, float, int, float]]:
        """List of each source of a mixture its entry, samples, weight, uses in an epoch, and their share."""
        total = sum(uses for _, uses in self.mixture)
        pairs = zip(self.weights.items(), self.mixture, strict=False)
        return [(entry, count, weight, uses, uses / total) for (entry, weight), (count, uses) in pairs]

    def count_by_source(self, ids: np.ndarray) -> dict[str, int]:
        """Count the samples of each source of a mixture among samples `ids`."""
        borders = np.cumsum([0, *(count for count, _ in self.mixture)]) - 0.5
        counts = np.histogram(ids, borders)[0].tolist()
        return dict(zip(name_sources([*self.weights]), counts, strict=True))

    def choose_samples(self, num_samples: int) -> list[int]:
        """Choose samples to be shown, or answered: the first ones of each source, in turn; sorted."""
        by_source = [np.flatnonzero(self.source_numbers == number) for number in range(len(self.source_names))]
        ranks = np.empty(len(self), np.int64)  # place of each sample among those of its source
        for ids in by_source:
            ranks[ids] = np.arange(len(ids))
        return sorted(np.lexsort((self.source_numbers, ranks))[:num_samples].tolist())

    def _explain_emptiness(self, description: str) -> str:
        recipe, states = self.recipe, self.numbers["state"]
        if (states == TOO_LONG).any():
            return (
                f"{description}: all {len(states)} rows are longer than max_seq_length {recipe.max_seq_length}: raise it, or "
                "set truncation to cut"
            )
        return (
            f"{description}: no token of any row is trained (train_on {recipe.train_on}). Put {{% generation %}} and "
            "{% endgeneration %} around the assistant's turns in the chat template, or take the markers out. Or raise "
            "max_seq_length, if answers are cut off"
        )

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of all that the samples are made of: the tokenizer, the template, the tokens, and which are trained."""
        return {
            "tokenizer": fingerprint(self.tokenizer),
            "template": hash_parts(self.renderer.template, self.tokenizer.special_tokens_map),
            "conversations": hash_parts(self.tokens.digest(), self.numbers["border"].tobytes()),
            "mask": self.trained.digest(),
            **({"date": self.renderer.date} if self.renderer.date else {}),
        } | ({"mixture": hash_parts(self.mixture)} if self.mixture else {})

    @functools.cached_property
    def mask_report(self) -> MaskReport:
        """The numbers of tokens, of trained ones, and of stop tokens."""
        used = {name: values[self.places] for name, values in self.numbers.items()}
        stop_ids = np.unique(used["stops"][used["stops"] >= 0]).tolist()
        num_states = np.bincount(self.numbers["state"], minlength=BAD)
        total = sum(uses for _, uses in self.mixture)
        return MaskReport(
            num_samples=len(self),
            num_tokens=self.tokens.num_values,
            num_trained=sum(int(values.sum()) for values in self.trained.values),
            num_stopped=int(np.sum(used["stops"] >= 0)),
            stop_tokens=tuple(self.tokenizer.convert_ids_to_tokens(stop_ids)),
            num_cut=int(num_states[CUT]),
            num_dropped=int(num_states[TOO_LONG]),
            num_untrained=int(num_states[UNTRAINED]),
            num_special=int(used["special"].sum()),
            rule=self.renderer.rule,
            sources=tuple(
                f"source {entry}: {count} samples, weight {weight:g}, {uses} of the {total} samples of an epoch "
                f"({100 * share:.1f} %)"
                for entry, count, weight, uses, share in self.list_mixture()
            ),
            num_rewritten=int(used["rewritten"].sum()),
        )

    def draw(self, epoch: int, sample_id: int) -> Conversation:
        """Return a sample; it is the same in every epoch."""
        place = self.places[sample_id]
        tokens, border = self.tokens[place], int(self.numbers["border"][place])
        lengths = (border, len(tokens) - border) if self.is_pairs else (len(tokens),)
        return Conversation(int(sample_id), tokens, self.trained[place].view(bool), lengths)

    def longest(self) -> Conversation:
        """Return a sample of max_length tokens, all trained but the first of each sequence."""
        num_sequences = 1 + self.is_pairs
        is_trained = np.ones((num_sequences, self.recipe.max_seq_length), bool)
        is_trained[:, 0] = False
        tokens = np.full(self.max_length, self.tokenizer.eos_token_id, np.int32)
        return Conversation(0, tokens, is_trained.ravel(), (self.recipe.max_seq_length,) * num_sequences)

    def find_question(self, sample_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Find the tokens before a sample's last answer (of a pair: the preferred one), and the answer's own tokens.

        Returns:
            both int32; the answer ends with the stop token, where there is one. With train_on `all` only the first token
            is before.
        """
        sample = self.draw(0, sample_id)
        tokens, is_trained = sample.tokens[: sample.lengths[0]], sample.is_trained[: sample.lengths[0]]
        end = int(np.flatnonzero(is_trained)[-1]) + 1
        start = end - sum(1 for _ in itertools.takewhile(bool, is_trained[:end][::-1]))
        return tokens[:start], tokens[start:end]

    def collate(self, samples: list[Conversation]) -> dict[str, torch.Tensor]:
        """Make a micro-batch of S samples, Q sequences end to end, without padding; no samples make a token of no sequence.

        Returns:
            input_ids, position_ids: int64 [1, n]; positions begin anew in each sequence.
            ends: int32 [Q + 1], 0 and the end of each sequence; of pairs the preferred, then the rejected one.
            labels: int64 [m], the trained tokens.
            label_index: int64 [m], for each its predecessor's place in the row.
            label_sequence: int64 [m], number of the sequence of each.
            reference: float32 [Q], see the class; only with objective dpo.
            counts: int64 [terms].
        """
        lengths = np.array([length for sample in samples for length in sample.lengths], np.int64)
        tokens = np.concatenate([sample.tokens for sample in samples] or [np.array([self.tokenizer.eos_token_id])])
        is_trained = np.concatenate([sample.is_trained for sample in samples] or [np.zeros(1, bool)])
        ends = np.concatenate([[0], np.cumsum(lengths)])  # [Q + 1]
        sequence, places = np.repeat(np.arange(len(lengths)), lengths), np.flatnonzero(is_trained)
        position_ids = np.arange(len(sequence)) - np.repeat(ends[:-1], lengths) if samples else np.zeros(1, np.int64)
        micro_batch = {
            "input_ids": torch.from_numpy(tokens.astype(np.int64))[None],
            "position_ids": torch.from_numpy(position_ids)[None],
            "ends": torch.from_numpy(ends.astype(np.int32)),
            "labels": torch.from_numpy(tokens[places].astype(np.int64)),
            "label_index": torch.from_numpy(places - 1),
            "label_sequence": torch.from_numpy(sequence[places]),
        }
        if self.recipe.objective == "dpo":
            ids = [sample.sample_id for sample in samples]
            micro_batch["reference"] = torch.from_numpy(self.reference[np.array(ids, np.int64)].ravel())
        num_targets = {
            "lm": len(places) if self.recipe.loss_weighting == "token" else len(samples),
            "sft": int(np.sum(sequence[places] % 2 == 0)),  # those of the preferred sequences
        }
        counts = [num_targets.get(term, len(samples)) for term in self.recipe.loss_weights]
        return micro_batch | {"counts": torch.tensor(counts)}


def build(
    recipe: Any, num_workers: int | None = None, on_bad_row: str = "refuse", date: str | None = None
) -> tuple[Conversations, Conversations | None]:
    """Build the recipe's training and held-out samples, see `samestep.data`.

    Args:
        recipe: of the task causal_lm_finetuning.
        date: what a template reads from the clock, in ISO's format; None: today.
    """
    try_template(recipe)
    sources = load_sources(recipe)
    bad = [problem for source in sources for problem in source.report.bad]
    rows, held_out = (
        datasets.concatenate_datasets([getattr(source, part) for source in sources]) for part in ("train", "held_out")
    )
    cutting = recipe.max_seq_length, recipe.truncation == "cut", num_workers
    with contextlib.closing(PROCESS):
        try:
            with naming_template(recipe):
                renderer = _make_renderer(recipe, rows, date)
                tokenizer = renderer.tokenizer
                table = tokenize(rows, tokenizer, renderer, *cutting, "training conversations")
                other = tokenize(held_out, tokenizer, renderer, *cutting, "held-out conversations")
                reports = _report_rows(sources, table, other, renderer, recipe.max_seq_length)
        except UsageError as error:
            if bad and on_bad_row == "refuse":  # all at once
                raise UsageError([*map(str, group(bad)), *error.problems]) from None
            raise
        if on_bad_row == "refuse" or (table.data.column("state").to_numpy() == BAD).all():
            bad = [problem for report in reports for problem in report.bad]
            refuse(bad, sum(report.num_read for report in reports))
        tokenizer.model_max_length = recipe.max_seq_length  # saved with it: a pipeline truncates to that
        mixed = [source for source in sources if source.entry != HELD_OUT]
        make_samples = importlib.import_module(IMAGES).ImageConversations if recipe.images else Conversations
        train = make_samples(rows, table, renderer, recipe, description="training conversations", sources=mixed)
        if not all(is_builtin(source.entry) for source in sources):
            last = reports[-1]
            reports = (*reports[:-1], last._replace(notes=[*last.notes, *describe_repeats(rows, held_out, ["row"])]))
        train.row_reports = reports
    if not len(held_out):
        return train, None
    return train, make_samples(held_out, other, renderer, recipe, description="held-out conversations")


def _make_renderer(recipe: Any, rows: Dataset, date: str | None) -> Renderer:
    train_on = "completions" if _has_pairs(rows) else recipe.train_on
    if recipe.images:
        images = importlib.import_module(IMAGES)
        return images.ImageRenderer(images.make_processor(recipe, rows), train_on, date)
    return Renderer(make_tokenizer(recipe, rows), train_on, has_turns(rows), date)


def _has_pairs(rows: Dataset) -> bool:
    return len(json.loads(rows[0]["row"])["answers"]) > 1


def _report_rows(
    sources: Sequence[Source], table: Dataset, other: Dataset, renderer: Renderer, max_seq_length: int
) -> tuple[RowReport, ...]:
    """Report on the rows of each source; `table` and `other` are those of its training and its held-out rows."""
    reports, starts = [], [0, 0]
    for source in sources:
        counts, left_out, bad = dict.fromkeys(COUNTS, 0), [], list(source.report.bad)
        num_states = np.zeros((2, BAD + 1), np.int64)  # of training and of held-out rows
        for kind, (rows, tokens) in enumerate(((source.train, table), (source.held_out, other))):
            start, end = starts[kind], starts[kind] + len(rows)
            starts[kind] = end
            if not len(rows):
                continue
            part = {name: tokens.data.column(name).slice(start, end - start).to_numpy() for name in COUNTS}
            states = part["state"]
            num_states[kind] = np.bincount(states, minlength=BAD + 1)
            for name in ("turns", "trained_turns", "weightless_turns"):
                counts[name] += int(part[name][states <= CUT].sum())
            for state, reason in ((TOO_LONG, f"longer than max_seq_length {max_seq_length}"), (UNTRAINED, NOTHING)):
                places = np.flatnonzero(states == state)
                left_out += [Problem(place, reason) for place in rows.select(places)["place"]] if len(places) else []
            places = np.flatnonzero(states == BAD)
            problems = tokens.data.column("problem").slice(start, end - start).take(places).to_pylist()
            bad += map(Problem, rows.select(places)["place"] if len(places) else [], problems)
        used_fields = {name for name in source.report.unused if "[]." in name and _is_shown(name, source, renderer)}
        reports.append(
            source.report._replace(
                num_used=int(num_states[:, : CUT + 1].sum()),
                num_cut=int(num_states[:, CUT].sum()),
                num_held_out=int(num_states[1, : CUT + 1].sum()),
                bad=bad,
                left_out=left_out,
                columns=[*source.report.columns, *sorted(used_fields)],
                unused={name: count for name, count in source.report.unused.items() if name not in used_fields},
                notes=[*source.report.notes, *_note(counts, renderer)],
            )
        )
    return tuple(reports)


def _note(counts: Mapping[str, int], renderer: Renderer) -> list[str]:
    """Say what may surprise of a source's turns, or texts."""
    notes = []
    if counts["weightless_turns"]:
        notes.append(f"turns of weight 0, not trained: {counts['weightless_turns']:,}")
    missing = counts["turns"] - counts["trained_turns"] - counts["weightless_turns"]
    if renderer.train_on == "completions" and missing > 0:
        notes.append(
            f"WARNING: train_on completions leaves out {missing:,} of {counts['turns']:,} turns of the assistant "
            f"({100 * missing / counts['turns']:.1f} %): --train_on assistant trains them"
        )
    if not renderer.has_turns and renderer.tokenizer.chat_template is not None:
        notes.append("plain text: no template (the tokenizer has one, which needs messages)")
    return notes


def _is_shown(name: str, source: Source, renderer: Renderer) -> bool:
    """Tell whether the template uses a field of turns, `COLUMN[].FIELD`, in the first row that has it."""
    field = name.rpartition("[].")[2]
    for rows in (source.train, source.held_out):
        names = rows.with_format("arrow").select_columns("unused")[:]["unused"]
        place = compute.index(compute.match_substring(names, json.dumps(name)), True).as_py()
        if place < 0:
            continue
        row = json.loads(rows[place]["row"])
        without = row | {
            "prompt": _leave_out_field(row["prompt"], field),
            "answers": [_leave_out_field(answer, field) for answer in row["answers"]],
        }
        if without == row:
            return False
        try:
            sequences = renderer.render(row)
        except UsageError:
            return False
        try:
            others = renderer.render(without)
        except UsageError:
            return True
        return any(
            not np.array_equal(*pair) for pair in zip((s[0] for s in sequences), (o[0] for o in others), strict=True)
        )
    return False


def _leave_out_field(turns: Sequence[Mapping[str, Any]], field: str) -> list[dict[str, Any]]:
    return [{key: value for key, value in turn.items() if key != field} for turn in turns]


def tokenize(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    renderer: Renderer,
    max_seq_length: int,
    cuts: bool,
    num_workers: int | None,
    description: str,
) -> Dataset:
    """Tokenize rows once, into a memory-mapped table with what became of each; a row that cannot be shown has a `problem`.

    Args:
        rows: as `load_rows` returns them, without a problem.
        tokenizer, renderer: with its template.
        max_seq_length: tokens of a sequence at most.
        cuts: whether longer sequences are cut at their end; else their rows are left out.
        num_workers: processes that tokenize.
        description: names the data in messages.

    Raises:
        UsageError: a template that takes too much.
    """
    columns = {name: List(Value(kind)) for name, kind in (("tokens", "int32"), ("trained", "uint8"))}
    columns |= dict.fromkeys(COUNTS, Value("int32")) | {"problem": Value("string")}
    arguments = {"renderer": renderer, "max_seq_length": max_seq_length, "cuts": cuts}
    key: tuple = fingerprint(tokenizer), tokenizer.special_tokens_map, renderer.template, renderer.date
    modules = (__name__, chat_templates.__name__, template_process.__name__, chat_rendering.__name__)
    key += renderer.train_on, max_seq_length, cuts, hash_modules(*modules)
    if renderer.key is not None:
        key += renderer.key, importlib.import_module(IMAGES).list_marks(rows)
    options: dict[str, Any] = {"fn_kwargs": arguments, "features": Features(columns)}
    return map_once(rows, _tokenize, key, description, num_workers, **options)


def _tokenize(batch: dict[str, list], renderer: Renderer, max_seq_length: int, cuts: bool) -> dict[str, list]:
    """Turn rows into `tokens` and `trained` (of a pair both sequences, end to end), `border`, the length of the first one, and
    what became of them."""
    columns: dict[str, list] = {name: [] for name in ("tokens", "trained", *COUNTS, "problem")}
    nothing = (np.zeros(0, np.int32), np.zeros(0, bool))
    for place, row in _read_ahead(batch["row"], renderer):
        sequences, state, stop, problem = [nothing], KEPT, -1, None
        try:
            sequences = renderer.render(row)
            if len(sequences) > 1 and np.array_equal(sequences[0][0], sequences[1][0]):
                raise UsageError("chosen and rejected are the same tokens: leave out the row")
            if "untrained" in row and len(sequences) == 1:
                _leave_out_turns(row, *sequences[0], renderer)
        except TemplateLimitError as error:  # which other rows would take, too
            raise TemplateLimitError(f"{error} ({batch['place'][place]})") from None
        except UsageError as error:
            problem, state = str(error), BAD
        if state == KEPT and max(len(tokens) for tokens, _ in sequences) > max_seq_length:
            state = CUT if cuts and renderer.keeps_images(sequences, max_seq_length) else TOO_LONG
            sequences = [(tokens[:max_seq_length], trained[:max_seq_length]) for tokens, trained in sequences]
            is_equal = len(sequences) > 1 and np.array_equal(sequences[0][0], sequences[1][0])
        else:
            is_equal = False
        if state <= CUT and (is_equal or not all(mask.any() for _, mask in sequences)):
            state = UNTRAINED
        if state > CUT:
            sequences = [nothing]
        elif state == KEPT:
            stop = min(renderer.find_stop(*sequence) for sequence in sequences)
        turns = _count_turns(row) if row.get("trains_prompt") and len(sequences) == 1 else (0, 0, 0)
        flags = int(renderer.holds_special(row)), int(renderer.is_rewritten)
        values = (len(sequences[0][0]), state, stop, *flags, *turns)
        columns["tokens"].append(np.concatenate([tokens for tokens, _ in sequences]))
        columns["trained"].append(np.concatenate([mask for _, mask in sequences]).astype(np.uint8))
        columns["problem"].append(problem)
        for name, value in zip(COUNTS, values, strict=True):
            columns[name].append(value)
    return columns


def _count_turns(row: Mapping[str, Any]) -> tuple[int, int, int]:
    """Count the turns of the assistant, those that are trained, and those of weight 0."""
    answer, untrained = row["answers"][0], row.get("untrained", ())
    before, answers = (sum(turn["role"] == "assistant" for turn in turns) for turns in (row["prompt"], answer))
    weightless = sum(number >= len(row["prompt"]) for number in untrained)
    return before + answers, answers - weightless, len(untrained)


def _leave_out_turns(row: Mapping[str, Any], tokens: np.ndarray, is_trained: np.ndarray, renderer: Renderer) -> None:
    """Take the turns of weight 0 out of the mask, in which each turn of the assistant is a run.

    Raises:
        UsageError: turns that the template does not keep apart.
    """
    first = len(row["prompt"])
    turns = [(first + place, turn) for place, turn in enumerate(row["answers"][0]) if turn["role"] == "assistant"]
    edges = np.flatnonzero(np.diff(is_trained, prepend=False, append=False)).reshape(-1, 2)
    is_clear = len(edges) == len(turns)
    for (number, turn), (start, end) in zip(turns, edges, strict=False):
        content = "".join(list_texts(turn.get("content"))).rpartition("</think>")[2].strip()
        is_clear &= content in renderer.tokenizer.decode(tokens[start:end])
        if number in row["untrained"]:
            is_trained[start:end] = False
    if not is_clear and any(number in row["untrained"] for number, _ in turns):
        raise UsageError(
            "a turn of weight 0 is not to be trained, but the template does not keep the turns of the assistant apart. Leave "
            "out the row, or give a template with {% generation %} markers around each turn, --chat_template FILE"
        )


def _read_ahead(texts: Sequence[str], renderer: Renderer) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read rows and their numbers, a few at a time, for which the renderer asks at once."""
    rows: list[dict[str, Any]] = []
    size = 0
    for place, text in enumerate(texts):
        row = json.loads(text)
        prompt = row["prompt"]
        # Each turn's beginning may be rendered
        size += len(text) * (len(prompt) + 1 if isinstance(prompt, list) else 1)
        if renderer.train_on == "assistant" and row.get("trains_prompt"):
            row["prompt"], row["answers"] = [], [prompt + answer for answer in row["answers"]]
        rows.append(row)
        if size > READ_AHEAD or place == len(texts) - 1:
            renderer.ask(rows)
            yield from enumerate(rows, start=place + 1 - len(rows))
            rows, size = [], 0
