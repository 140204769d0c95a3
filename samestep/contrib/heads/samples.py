"""Samples for heads of transformers, drawn by their numbers, so that no data is needed.

What a sample consists of follows from what the head's forward takes, and the sizes in its configuration: texts of 5 to 12
tokens, images, videos, waves or spectrograms. A head for images and texts, or sounds and texts, gets texts alone where its main
input is text: its loss is the same. What is predicted follows from the kind of the head.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from samestep.contrib.heads.sizes import FRAMES, LENGTH, MELS, PIXELS, SIZES, find_field
from samestep.step.losses import IGNORED

Sample = dict[str, Any]
FLOAT_BOXES = ("udop",)
FREQUENCIES_FIRST = ("whisper",)
"""Types of models whose spectrograms have frequencies as rows."""
WAVE = 6400
"""Numbers of a wave."""
MEL_FIELDS = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
INPUTS = ("input_ids", "pixel_values", "pixel_values_videos", "input_values", "input_features")
"""Main inputs that can be drawn."""
PADDING = {"input_ids": 0, "attention_mask": 0, "bbox": 0}
LISTS = ("mask_labels", "class_labels")
"""Targets that a batch has as a list, with an entry for each sample, besides lists of dictionaries."""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Draws samples for a head, and joins them.

    Attributes:
        kind: of the head.
        main: name of its main input.
        names: what its forward takes.
        config: of small sizes; None: of texts.
    """

    kind: str
    main: str = "input_ids"
    names: frozenset[str] = frozenset()
    config: Any = None

    @property
    def is_seq2seq(self) -> bool:
        return bool(getattr(self.config, "is_encoder_decoder", False))

    def draw(self, number: int) -> Sample:
        """Draw a sample; where several tokens are predicted, as many as the number says."""
        length = 5 + number * 5 % 8
        ids = (torch.arange(length) * (number + 3) + number * number) % 50 + 5
        ids[-1] = SIZES["eos_token_id"]
        if self.main == "input_ids" or "bbox" in self.names:
            sample: Sample = {"input_ids": ids}
        else:
            sample = {self.main: self._draw_numbers(self.main, number)}
        if "bbox" in self.names:
            boxes = torch.tensor([[1, 2, 5, 9]]) + number + torch.arange(length).view(-1, 1)
            sample["bbox"] = boxes / LENGTH if self.config.model_type in FLOAT_BOXES else boxes
        targets = TARGETS.get(self.kind, draw_class)
        if self.kind in LANGUAGE and not (self.is_seq2seq or self.kind == "speech, CTC"):
            targets = draw_next
            sample.setdefault("input_ids", ids)
        return sample | targets(number, ids, self)

    def _draw_numbers(self, name: str, number: int) -> torch.Tensor:
        """Draw an image, a video, a wave or a spectrogram."""
        size = {
            "pixel_values": lambda: self.find_image(),
            "pixel_values_videos": lambda: (self.find("num_frames", default=4), *self.find_image()),
            "input_values": lambda: (WAVE,),
            "input_features": lambda: (FRAMES, self.find(*MEL_FIELDS, default=MELS)),
        }[name]()
        if self.config.model_type in FREQUENCIES_FIRST:
            size = size[::-1]
        if (
            name == "input_values" and self.find("max_length") and self.find("num_mel_bins")
        ):  # spectrograms by another name
            size = (self.find("max_length"), self.find("num_mel_bins"))
        if name == "pixel_values" and self.kind == "video classification":
            size = (self.find("num_frames", default=4), *size)
        generator = torch.Generator().manual_seed(number)
        return torch.randn(size, generator=generator)

    def find(self, *names: str, default: Any = None) -> Any:
        """Find a field of the configuration."""
        found = find_field(self.config, *names) if self.config is not None else None
        return default if found is None else found

    def find_image(self) -> tuple[int, int, int]:
        """Find the size of an image: channels, height, width."""
        side = self.find("image_size", default=PIXELS)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return self.find("num_channels", "in_channels", default=3), height, width

    def join(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Join samples: padded to the longest, and answers to 16 tokens, over which they are a softmax."""
        batch: dict[str, Any] = {}
        for name in samples[0]:
            values = [sample[name] for sample in samples]
            if name in LISTS or not isinstance(values[0], torch.Tensor):
                batch[name] = values
            else:
                batch[name] = (
                    pad_sequence(values, True, PADDING.get(name, IGNORED)) if values[0].ndim else torch.stack(values)
                )
        if self.main == "input_features" and "attention_mask" in self.names and not self.is_seq2seq:
            batch["attention_mask"] = torch.ones(batch[self.main].shape[:2], dtype=torch.long)
        if "input_ids" in batch:
            ids = [sample["input_ids"] for sample in samples]
            batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in ids], True, 0)
            if self.kind == "question answering":
                room = (0, 16 - batch["input_ids"].shape[1])
                batch |= {name: nn.functional.pad(batch[name], room) for name in ("input_ids", "attention_mask")}
                if "bbox" in batch:
                    batch["bbox"] = nn.functional.pad(batch["bbox"], (0, 0, *room))
            if self.kind == "multiple choice":
                others = pad_sequence([row.roll(1) for row in ids], True, 0)
                batch["input_ids"] = torch.stack([batch["input_ids"], others], 1)
                batch["attention_mask"] = torch.stack([batch["attention_mask"]] * 2, 1)
        return batch


def draw_class(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw one of two classes."""
    return {"labels": torch.tensor(number % 2)}


def draw_next(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw labels of a language model: all tokens, of some texts without the first ones."""
    return {"labels": torch.where(torch.arange(len(ids)) >= number % 3, ids, IGNORED)}


def draw_masked(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw labels of a few tokens."""
    return {"labels": torch.where(torch.arange(len(ids)) % (2 + number % 3) == 0, ids, IGNORED)}


def draw_tokens(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw classes of a few tokens."""
    return {"labels": torch.where(draw_masked(number, ids, samples)["labels"] != IGNORED, ids % 2, IGNORED)}


def draw_span(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw the first and the last token of an answer."""
    return {"start_positions": torch.tensor(number % 3), "end_positions": torch.tensor(1 + number % 4)}


def draw_text(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw another text, shorter."""
    return {"labels": ids[: 3 + number * 3 % 4]}


def draw_pair(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw masked tokens, and whether two sentences follow each other, as the head names it."""
    pair = {name: torch.tensor(number % 2) for name in ("next_sentence_label", "sentence_order_label")}
    return draw_masked(number, ids, samples) | {name: value for name, value in pair.items() if name in samples.names}


def draw_map(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw a class for each pixel, and some without one."""
    _, height, width = samples.find_image()
    pixels = torch.arange(height * width).view(height, width)
    hole = samples.find("semantic_loss_ignore_index", default=255)
    return {"labels": torch.where(pixels % (2 + number % 3) == 0, pixels // 7 % 2, hole)}


def draw_depth(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw a depth for each pixel."""
    return {"labels": 1 + torch.rand(samples.find_image()[1:], generator=torch.Generator().manual_seed(number))}


def draw_boxes(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw one to three boxes with their classes and masks."""
    size = 1 + number % 3
    masks = torch.zeros(size, *samples.find_image()[1:])
    for place in range(size):
        masks[place, 8 * place : 8 * place + 12, 4:20] = 1
    boxes = torch.tensor([[0.3 + 0.1 * place, 0.4, 0.2, 0.2 + 0.05 * number] for place in range(size)])
    return {"labels": {"class_labels": torch.arange(size) % 2, "boxes": boxes, "masks": masks}}


def draw_masks(number: int, ids: torch.Tensor, samples: Samples) -> Sample:
    """Draw one to three masks with their classes."""
    boxes = draw_boxes(number, ids, samples)["labels"]
    return {"mask_labels": boxes["masks"], "class_labels": boxes["class_labels"]}


LANGUAGE = ("sequence to sequence", "image-text to text", "speech to text", "causal language model")
TARGETS: dict[str, Callable[[int, torch.Tensor, Samples], Sample]] = {
    "token classification": draw_tokens,
    "question answering": draw_span,
    "masked language model": draw_masked,
    "causal language model": draw_next,
    **dict.fromkeys(("sequence to sequence", "image-text to text", "speech to text", "speech, CTC"), draw_text),
    "pretraining": draw_pair,
    "semantic segmentation": draw_map,
    "depth estimation": draw_depth,
    "object detection": draw_boxes,
    "segmentation by masks": draw_masks,
}
"""Functions that draw targets, by kind; a class for all else."""
