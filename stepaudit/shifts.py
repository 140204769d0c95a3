"""Compares what a decoder reads with the targets in the graph of the loss: one place ahead, or shifted wrongly.

A label that is shifted twice, or not at all, is so under every cut. And it may be right in the batch: a collator, the model and
the loss shift. So the targets are those that the loss keeps for its backward, and the inputs those that the decoder is given.
"""

from typing import Any

import torch
from torch import nn

from stepaudit._internals import find_targets, tree_leaves
from stepaudit.graph import list_nodes
from stepaudit.masks import IGNORED, describe_shift, find_offset

SHIFTING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the names of models that shift labels themselves."""
DECODING = (*SHIFTING, "ForSeq2SeqLM", "EncoderDecoderModel", "MTModel")
"""Ends of the names of models whose decoder predicts the token behind each one that it reads."""
MAX_INPUTS = 16  # that are kept between two backwards
START = "labels begin with decoder_start_token_id, which the model puts in front of them"


def shifts_labels(module: nn.Module, ends: tuple[str, ...] = SHIFTING) -> bool:
    """Tell whether a module is of a class, or of a subclass of one, whose name ends with one of `ends`."""
    return any(kind.__name__.endswith(ends) for kind in type(module).__mro__)


class Shifts:
    """Keeps what decoders read since the last backward.

    Attributes:
        found: how the targets of the last backward are shifted; empty: rightly, None: that is unknown.
    """

    def __init__(self) -> None:
        self.inputs: list[tuple[torch.Tensor, Any]] = []  # tokens, int64 [samples, length], and the model's config
        self.decoders: dict[int, Any] = {}  # id of a decoder behind an encoder -> its model's config
        self.is_decoding: dict[type, bool] = {}
        self.found: str | None = None

    def note(self, module: nn.Module, named_inputs: dict[str, Any]) -> None:
        """Note what a module is called with, if it is a decoder: of a model alone, or behind an encoder."""
        config = self.decoders.get(id(module))
        kind = type(module)
        if kind not in self.is_decoding:
            self.is_decoding[kind] = shifts_labels(module, DECODING)
        if config is None and self.is_decoding[kind]:
            config = getattr(module, "config", None)
            if getattr(config, "is_encoder_decoder", False) and hasattr(module, "get_decoder"):
                self.decoders[id(module.get_decoder())] = config
                return
        tokens = named_inputs.get("input_ids")
        is_text = isinstance(tokens, torch.Tensor) and tokens.ndim == 2 and not tokens.is_floating_point()
        if config is not None and is_text and len(self.inputs) < MAX_INPUTS:
            self.inputs.append((tokens, config))

    def look(self, roots: Any) -> None:
        """Look at the targets of a loss that is about to be differentiated, and forget what was read for it."""
        inputs, self.inputs = self.inputs, []
        self.found = None
        if not inputs:
            return
        tensors = [leaf for leaf in tree_leaves(roots) if isinstance(leaf, torch.Tensor)]
        targets = [
            found for node in list_nodes([t.grad_fn for t in tensors]) if (found := find_targets(node)) is not None
        ]
        pairs = [_compare(*read, *written) for read in inputs for written in targets]
        known = [text for text in pairs if text is not None]
        self.found = min(known, default=None)  # of several terms and calls, one that is right ("") is enough


def _compare(
    tokens: torch.Tensor, config: Any, targets: torch.Tensor, is_ignored: torch.Tensor, first: int | None
) -> str | None:
    """Say how targets are shifted against the tokens that a decoder reads, as `Shifts.found`.

    Args:
        tokens: int64 [samples, length].
        config: names the token that starts a target.
        targets: int64 [samples x length], flattened, or one fewer of each sample.
        is_ignored: bool, as many: which are no targets.
        first: place of each sample's first target; None: unknown.
    """
    num_samples, length = tokens.shape
    if not num_samples or targets.numel() not in (num_samples * length, num_samples * (length - 1)):
        return None
    targets, is_ignored = targets.reshape(num_samples, -1), is_ignored.reshape(num_samples, -1)
    start = getattr(config, "decoder_start_token_id", None)
    labels = targets.masked_fill(is_ignored, IGNORED)
    width = targets.shape[1]
    # The loss leaves out the last place, or the first one
    places = range(length - width + 1) if first is None or first > length - width else [first]
    offsets = [find_offset(tokens[:, place : place + width], labels, right=1) for place in places]
    if 0 in offsets and width == length and start is not None and not getattr(config, "is_decoder", False):
        is_start = (targets[:, 0] == start) & (tokens[:, 0] == start) & ~is_ignored[:, 0]
        return START if bool(is_start.all()) else ""
    return describe_shift(0 if 0 in offsets else next((offset for offset in offsets if offset is not None), None))
