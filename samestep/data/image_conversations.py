"""Conversations with images to samples of a model of images and text.

The model's own processor says how each image is written as tokens, and makes its pixels. So a sample's tokens are those of its
images, too, and its length is all that the model computes. Images are decoded once before the training, to know their tokens,
and again where a micro-batch is made.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import cached_file

from samestep._internals.image_processors import VIDEO, load_processor
from samestep.data.arrow import Dataset, hash_parts
from samestep.data.chat_templates import Part, Renderer, Rendering, Request, choose_template, make_tokenizer
from samestep.data.conversations import Conversation, Conversations
from samestep.data.row_images import list_images_of_row, mark_of, open_image
from samestep.errors import RunError, UsageError, reason
from samestep.recipe import hub
from samestep.recipe.extras import optional, require
from samestep.recipe.reading import format_name, read_json

Image = optional("PIL.Image")

BLANK = (48, 32), (200, 120, 40)
"""Size and colour of the image that stands for none."""
OWN_MARK = "<|image|>"
"""Token of images of a tokenizer that is trained here, as its template writes it."""
SHORT_AMONG = 64
"""Samples among which short ones are looked for."""
OF_TEXT = ("input_ids", "attention_mask", "text_replacement_offsets")
"""Names of what a processor returns of a text."""
TYPES = ("mm_token_type_ids", "token_type_ids")
"""Names under which models take which tokens are of images."""


def make_processor(recipe: Any, rows: Dataset) -> Any:
    """Load the processor of the recipe's model, with the recipe's chat template; without one make LLaVA's, and train its
    tokenizer on the rows.

    Raises:
        UsageError: there is none, or not one of images and text.
    """
    require("images", "training on images")
    name = recipe.tokenizer_name or recipe.model_name_or_path
    if name is None:
        from transformers import LlavaProcessor, SiglipImageProcessorPil  # here: need Pillow

        side, tokenizer = recipe.image_size, make_tokenizer(recipe, rows)
        return LlavaProcessor(
            SiglipImageProcessorPil(size={"height": side, "width": side}),
            tokenizer,
            patch_size=recipe.image_patch_size,
            vision_feature_select_strategy="full",
            chat_template=tokenizer.chat_template,
            image_token=OWN_MARK,
        )
    hub.announce(name)
    try:
        processor = load_processor(name, find_videos(name))
    except Exception as error:  # of any kind: network, names, files of others
        hint = "" if find_spec("torchvision") else " (torchvision is not installed, which it may need)"
        raise UsageError(
            f"images is true, but the processor of {format_name(name)} cannot be loaded: {reason(error)}{hint}. "
            "Give a model of images and text, with its processor's files"
        ) from None
    if not hasattr(processor, "image_processor") or getattr(processor, "image_token", None) is None:
        raise UsageError(
            f"images is true, but {format_name(name)} has a {type(processor).__name__}, which names no token of images: give a "
            "model of images and text"
        )
    template = choose_template(recipe) or processor.tokenizer.chat_template or processor.chat_template
    processor.tokenizer.chat_template = processor.chat_template = template
    return processor


def find_videos(name_or_path: str) -> dict[str, Any] | None:
    """Find the configuration of a processor's part for videos; None: it has none, or it cannot be had.

    transformers 5.24 reads it from a part of processor_config.json, or else from a file of its own.
    """
    for name, part in (("processor_config.json", VIDEO), ("video_preprocessor_config.json", None)):
        try:
            path = cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False)
            values = {} if path is None else read_json(Path(path), name)
        except Exception:  # of any kind: network, files of others; what needs the processor says so
            continue
        found = values if part is None else values.get(part)
        if isinstance(found, dict) and found:
            return found
    return None


class ImageRenderer(Renderer):
    """Turns rows with images into tokens, and finds those that are trained, which are never an image's.

    Args:
        processor: of the model, with its chat template.
        train_on, date: see `Renderer`.
    """

    def __init__(self, processor: Any, train_on: str, date: str | None = None):
        self.processor = processor
        self.written: list[str] = []  # for each image of the row
        self.image_ids: set[int] = set()  # of the tokens of the row's images
        super().__init__(processor.tokenizer, train_on, True, date)

    @property
    def rule(self) -> str:
        return f"{super().rule}, without tokens of images"

    @functools.cached_property
    def blank(self) -> dict[str, torch.Tensor]:
        """Inputs of an image of one colour, for micro-batches without an image."""
        inputs = self.processor(
            text=[self.processor.image_token], images=[[Image.new("RGB", *BLANK)]], return_tensors="pt"
        )
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}

    @property
    def key(self) -> str:
        """Hash of the processor."""
        return hash_parts(type(self.processor).__name__, self.processor.to_json_string())

    def render(self, row: Mapping[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
        self.image_ids = set()
        self.written = self._write_images(list_images_of_row(row))
        sequences = super().render(row)
        for tokens, mask in sequences:
            mask[np.isin(tokens, list(self.image_ids))] = False
        return sequences

    def _write_images(self, names: Sequence[str]) -> list[str]:
        """Find what the processor writes for each image."""
        if not names:
            return []
        pictures = [open_image(name) for name in names]
        try:
            mark = self.processor.image_token
            inputs = self.processor(text=[mark * len(names)], images=[pictures], return_text_replacement_offsets=True)
        except Exception as error:  # of any kind: each processor has its own rules
            raise UsageError(
                f"the model's {type(self.processor).__name__} refuses its images ({reason(error)}): leave out the row"
            ) from None
        written = [place["replacement"] for place in inputs["text_replacement_offsets"][0]]
        for text in set(written):
            self.image_ids |= self.special_ids.intersection(super()._encode(text))
        return written

    def encode_images(self, names: Sequence[str]) -> list[np.ndarray]:
        """Encode what the processor writes for each of a row's images, int [tokens]."""
        return [np.array(super(ImageRenderer, self)._encode(text), np.int64) for text in self._write_images(names)]

    def keeps_images(self, sequences: Sequence[tuple[np.ndarray, np.ndarray]], max_length: int) -> bool:
        return not any(np.isin(tokens[max_length:], list(self.image_ids)).any() for tokens, _ in sequences)

    def _make_request(
        self, turns: list[dict], tools: list[dict] | None, parts: list[Part], has_markers: bool = False
    ) -> Request:
        return super()._make_request([_write_parts(turn) for turn in turns], tools, parts, has_markers)

    def _encode(self, text: str) -> list[int]:
        return super()._encode(self._expand(text)[0])

    def _expand(self, text: str) -> tuple[str, np.ndarray]:
        """Write the images of a rendered text, or of its beginning, and say where its characters are then, [characters + 1]."""
        mark = self.processor.image_token
        places = [match.start() for match in re.finditer(re.escape(mark), text)]
        if len(places) > len(self.written):
            raise UsageError(
                f"it has {len(self.written)} images, but the chat template writes {len(places)} marks {mark}: write no {mark} "
                "in texts, or give another template, --chat_template FILE"
            )
        steps = np.ones(len(text), np.int64)
        for place, written in zip(places, self.written, strict=False):
            steps[place : place + len(mark)] = 0
            steps[place + len(mark) - 1] = len(written)
        parts = text.split(mark)
        whole = "".join(x for pair in zip(parts, [*self.written[: len(places)], ""], strict=True) for x in pair)
        return whole, np.concatenate([[0], np.cumsum(steps)])

    def _find_marked(
        self, request: Request, first: int, whole: Rendering, others: Sequence[Rendering]
    ) -> tuple[list[int], np.ndarray]:
        text, places = self._expand(whole.text)
        spans = [[int(places[place]) for place in span[:2]] + list(span[2:]) for span in whole.spans]
        return super()._find_marked(request, first, Rendering(text, spans), others)


def _write_parts(turn: dict[str, Any]) -> dict[str, Any]:
    """Write a turn's content in parts, as templates of models of images take it, and without the images themselves."""
    content = turn.get("content")
    if isinstance(content, list):
        return turn | {
            "content": [{"type": "image"} if part["type"] == "image" else part for part in content],
        }
    if not content:
        return turn
    return turn | {"content": [{"type": "text", "text": content}]}


class ImageConversations(Conversations):
    """The samples of a dataset of conversations with images; see `Conversations`."""

    renderer: ImageRenderer

    @property
    def processor(self) -> Any:
        """The processor, which is saved beside the model."""
        return self.renderer.processor

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        hashes = [hash_parts(*self._list_contents(place)) for place in self.places.tolist()]
        return super().fingerprints | {"processor": self.renderer.key, "images": hash_parts(*hashes)}

    def _list_contents(self, place: int) -> list[str]:
        """List name and size of the image files of a row, without their folders, and contents of other images."""
        marks = [mark_of(name) for name in self._list_images(place)]
        return [str(mark[0]) if len(mark) == 1 else f"{mark[0].rpartition('/')[2]}\0{mark[1]}" for mark in marks]

    def _list_images(self, place: int) -> list[str]:
        return list_images_of_row(json.loads(self.rows[place]["row"]))

    def find_inputs(self, sample_ids: Sequence[int]) -> dict[str, torch.Tensor]:
        """Make the pixels of samples, in the order of their images, and what belongs to them; nothing without images."""
        inputs = [self._make_pixels(sample_id) for sample_id in sample_ids]
        return join_pixels([values for values in inputs if values])

    def locate_images(self, sample_id: int) -> list[tuple[str, int, int]]:
        """Locate the images of a sample: each as `row_images.read_image` names it, and its first token and the one behind it.

        An image whose tokens cannot be told from the text around them has no length.
        """
        names, tokens = self._list_images(int(self.places[sample_id])), self.draw(0, sample_id).tokens
        found, start = [], 0
        for name, own in zip(names, self.renderer.encode_images(names), strict=True):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[start:], len(own)) if len(own) else tokens[:0]
            places = np.flatnonzero((windows == own).all(1)) if 0 < len(own) <= len(tokens) - start else tokens[:0]
            first = start + (int(places[0]) if len(places) else 0)
            start = first + len(own) * bool(len(places))
            found.append((name, first, start))
        return found

    def describe_row(self, sample_id: int) -> dict[str, Any]:
        names = self._list_images(int(self.places[sample_id]))
        return super().describe_row(sample_id) | {
            "images": ["in the row" if name[:5] == "data:" else name for name in names]
        }

    def _make_pixels(self, sample_id: int) -> dict[str, torch.Tensor]:
        place = int(self.places[sample_id])
        names = self._list_images(place)
        if not names:
            return {}
        try:
            pictures = [open_image(name) for name in names]
        except UsageError as error:
            raise RunError(f"{self.rows[place]['place']}: {error}, or restore it, and resume") from None
        text = [self.processor.image_token * len(names)]
        inputs = self.processor(text=text, images=[pictures], return_tensors="pt")
        return {name: value for name, value in inputs.items() if name not in (*OF_TEXT, *TYPES)}

    def find_types(self, tokens: np.ndarray) -> dict[str, torch.Tensor]:
        """Find which tokens are of images, int64 [1, n], under the name by which the model takes it; nothing if it does not."""
        name = next((name for name in TYPES if name in self.renderer.blank), None)
        if name is None:
            return {}
        return {name: torch.tensor(self.processor.create_mm_token_type_ids([tokens.tolist()]))}

    def longest(self) -> Conversation:
        """Return a sample of max_length tokens with the most tokens of images that a sample has, of whose images it has the
        number."""
        counts = [int(np.isin(self.tokens[place], list(self.image_ids)).sum()) for place in self.places.tolist()]
        sample_id, filler = int(np.argmax(counts)), super().longest()
        tokens = filler.tokens.copy()
        own = self.draw(0, sample_id).tokens
        tokens[: len(own)] = own
        return Conversation(
            sample_id, tokens, filler.is_trained & ~np.isin(tokens, list(self.image_ids)), filler.lengths
        )

    def choose_short(self) -> list[int]:
        """Choose, among the first samples, the shortest two with images, and the shortest without: as many as there are."""
        sample_ids, chosen = range(min(len(self), SHORT_AMONG)), []
        for number, has_images in ((2, True), (1, False)):
            kind = [place for place in sample_ids if has_images == bool(self._list_images(int(self.places[place])))]
            chosen += sorted(kind, key=lambda sample_id: len(self.tokens[int(self.places[sample_id])]))[:number]
        return chosen

    @functools.cached_property
    def image_ids(self) -> set[int]:
        """Ids of the tokens of images."""
        return self.renderer.special_ids.intersection(self.renderer.blank["input_ids"].flatten().tolist())

    def collate(self, samples: list[Conversation]) -> dict[str, torch.Tensor]:
        """Make a micro-batch, see `Conversations`, with the pixels of its images and what the processor says of them."""
        micro_batch = super().collate(samples)
        types = self.find_types(micro_batch["input_ids"][0].numpy())
        return micro_batch | types | self.find_inputs([sample.sample_id for sample in samples])


def join_pixels(inputs: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join what a processor made of the images of samples, one sample after the other, images of several sizes padded by zeros.

    Where it makes a row of images for each sample, [1, images, ...], all images become one row.
    """
    if not inputs:
        return {}
    dim = int(inputs[0]["pixel_values"].ndim == 5)
    joined = {}
    for name in inputs[0]:
        values = [value[name] for value in inputs]
        largest = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
        padded = []
        for value in values:
            shape = [*value.shape[: dim + 1], *largest[dim + 1 :]]
            if list(value.shape) != shape:
                full = value.new_zeros(shape)
                full[tuple(map(slice, value.shape))] = value
                value = full
            padded.append(value)
        joined[name] = torch.cat(padded, dim)
    return joined


def list_marks(rows: Dataset) -> str:
    """Hash what tells of the rows' image files that they are as they were."""
    names = (
        name for row in rows.with_format("arrow")[:]["row"].to_pylist() for name in list_images_of_row(json.loads(row))
    )
    return hash_parts(*(str(mark_of(name)) for name in names))
