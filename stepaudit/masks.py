"""Reports which tokens of a batch are trained: `report_mask`. A wrong mask is wrong on every layout: no cut shows it."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from stepaudit.causes import Finding
from stepaudit.errors import UsageError

IGNORED = -100
SHOWN = 3  # samples in the text of a report


@dataclasses.dataclass(frozen=True)
class MaskReport:
    """Holds which tokens of a batch are trained.

    Attributes:
        num_tokens: of each sample, padding left out as far as it can be told.
        num_trained: of each sample, tokens with a label.
        stops: of each sample, whether a token that ends a text is among its labels.
        has_stops: of each sample, whether such a token is in its input.
        texts: of the first samples, with the trained parts in brackets; empty without a tokenizer that decodes.
        num_media: trained tokens that stand for a picture or a sound.
        shift: what `find_shift` says.
    """

    num_tokens: list[int]
    num_trained: list[int]
    stops: list[bool]
    has_stops: list[bool]
    texts: list[str]
    num_media: int = 0
    shift: str = ""

    @property
    def share(self) -> float:
        """Trained tokens, divided by all tokens."""
        return sum(self.num_trained) / max(1, sum(self.num_tokens))

    @property
    def untrained_samples(self) -> list[int]:
        """Rows without a label."""
        return [row for row, number in enumerate(self.num_trained) if not number]

    @property
    def findings(self) -> list[Finding]:
        """Name what is wrong: `no_targets`, `untrained_stop`, `media_tokens`, `label_shift`."""
        findings, rows = [], self.untrained_samples
        if rows:
            places = ", ".join(map(str, rows[:5])) + ("..." if len(rows) > 5 else "")
            findings.append(Finding("no_targets", f"rows {places}", f"{len(rows)} of {len(self.num_trained)} samples"))
        if len(rows) < len(self.num_trained) and not any(self.stops):
            where = f"in {sum(self.has_stops)} of {len(self.stops)} samples, and a label in none"
            findings.append(Finding("untrained_stop", "", where))
        if self.num_media:
            findings.append(Finding("media_tokens", "", f"{self.num_media} of {sum(self.num_trained)} trained tokens"))
        return findings + ([Finding("label_shift", "", self.shift)] if self.shift else [])

    def __str__(self) -> str:
        lines = [
            f"{sum(self.num_trained)} of {sum(self.num_tokens)} tokens are trained ({self.share:.0%}), "
            f"in {len(self.num_trained) - len(self.untrained_samples)} of {len(self.num_trained)} samples; "
            f"{sum(self.stops)} train a token that ends the text"
        ]
        lines += [f"  {text}" for text in self.texts]
        for finding in self.findings:
            lines += [str(finding), f"    do: {finding.remedy}"]
        return "\n".join(lines)


def report_mask(input_ids: torch.Tensor, labels: torch.Tensor, tokenizer: Any) -> MaskReport:
    """Report which tokens of a batch are trained, whether those that end a text are, and which samples have none.

    Args:
        input_ids: int64 [samples, length].
        labels: int64 [samples, length], at the places of the tokens that they are (models shift them), -100 where none is
            trained. The first of each row is never predicted, and not counted.
        tokenizer: with `eos_token_id`, a number or several, and, where it has them, `pad_token_id`, `decode` and
            `image_token_id`. Another token ends a turn of some chat templates: give an object with that one.

    Returns:
        The report, which can be printed.

    Raises:
        UsageError: other shapes, or no `eos_token_id`.
    """
    if input_ids.ndim != 2 or input_ids.shape != labels.shape:
        raise UsageError(
            f"input_ids are {list(input_ids.shape)}, labels {list(labels.shape)}: both must be [samples, length]"
        )
    stop_ids = read_stop_ids(tokenizer)
    if not stop_ids:
        raise UsageError(f"{type(tokenizer).__name__}.eos_token_id is None: the token that ends a text must be known")
    input_ids, labels = input_ids.cpu(), labels.cpu().clone()
    labels[:, 0] = IGNORED
    is_trained, is_stop = labels != IGNORED, torch.isin(input_ids, torch.tensor(stop_ids))
    pad_id = getattr(tokenizer, "pad_token_id", None)
    is_padding = (
        (input_ids == pad_id) & ~is_trained if pad_id is not None and pad_id not in stop_ids else ~is_trained & False
    )
    texts = []
    if hasattr(tokenizer, "decode"):
        pairs = zip(input_ids[:SHOWN], is_trained[:SHOWN], ~is_padding[:SHOWN], strict=True)
        texts = [_mark(tokenizer, ids[kept], trained[kept]) for ids, trained, kept in pairs]
    return MaskReport(
        num_tokens=(~is_padding).sum(1).tolist(),
        num_trained=is_trained.sum(1).tolist(),
        stops=torch.isin(labels, torch.tensor(stop_ids)).any(1).tolist(),
        has_stops=is_stop.any(1).tolist(),
        texts=texts,
        num_media=count_tokens(labels, read_media_ids(tokenizer)),
        shift=find_shift(input_ids, labels),
    )


def read_stop_ids(owner: Any) -> list[int]:
    """Read the tokens that end a text from a tokenizer or a model's config: `eos_token_id` is one, several or None."""
    value = getattr(owner, "eos_token_id", None)
    if isinstance(value, Iterable):
        return [int(number) for number in value]
    return [] if value is None else [int(value)]


def read_media_ids(owner: Any) -> list[int]:
    """Read the tokens that stand for a picture, a video or a sound from a tokenizer or a model's config."""
    names = [f"{kind}_token_{end}" for kind in ("image", "video", "audio") for end in ("id", "index")]
    values = {getattr(owner, name, None) for name in names}
    return sorted(value for value in values if isinstance(value, int) and value >= 0)


def count_tokens(tokens: torch.Tensor, ids: list[int]) -> int:
    """Count the tokens that are one of `ids`."""
    return int(torch.isin(tokens, torch.tensor(ids, device=tokens.device)).sum()) if ids else 0


def find_offset(inputs: torch.Tensor, labels: torch.Tensor, right: int = 0) -> int | None:
    """Find how many places behind the next token the one lies that each place is trained on: 0, as it should be, 1 or -1.

    Args:
        inputs: int64 [samples, length], of a decoder.
        labels: int64 [samples, length], -100 where none is trained.
        right: places from a label to the same token of the inputs, as it should be.

    Returns:
        None: none of these, or it cannot be told.
    """
    if inputs.shape != labels.shape or labels.ndim != 2 or labels.shape[1] < 3:
        return None

    def fits(places: int) -> bool:
        """Tell whether each trained label is the input so many places behind it, where there is one."""
        own = labels[:, max(0, -places) : labels.shape[1] - max(0, places)]
        other = inputs[:, max(0, places) : inputs.shape[1] + min(0, places)]
        is_trained = own != IGNORED
        return bool(is_trained.any() and (own == other)[is_trained].all())

    return next((offset for offset in (0, 1, -1) if fits(right + offset)), None)


def describe_shift(offset: int | None) -> str | None:
    """Say what an offset of `find_offset` means; empty: nothing is wrong, None: it is unknown."""
    texts = {0: "", 1: "each place is trained on the token behind the next one"}
    texts[-1] = "each place is trained on the token that it reads"
    return None if offset is None else texts[offset]


def find_shift(inputs: torch.Tensor, labels: torch.Tensor, is_shifted: bool = False) -> str:
    """Say what a place is trained on, where that is another token than the next one; empty: it is, or it cannot be told.

    Args:
        inputs: int64 [samples, length], of a decoder.
        labels: int64 [samples, length], -100 where none is trained.
        is_shifted: whether the inputs are one place later than the labels, as of a decoder behind an encoder.
    """
    return describe_shift(find_offset(inputs, labels, int(is_shifted))) or ""


def _mark(tokenizer: Any, ids: torch.Tensor, is_trained: torch.Tensor) -> str:
    """Decode a sample, with its trained parts in brackets."""
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or is_trained[end] != is_trained[start]:
            text = tokenizer.decode(ids[start:end].tolist())
            parts.append(f"[{text}]" if is_trained[start] else text)
            start = end
    return " ".join(parts).replace("\n", "\\n")
