"""Find the tokens by which a trained model ends its answers, and keep them in its generation_config, beside those of its base.

A template ends turns by a token of its own, which need not be the eos_token of the base: a base that ends texts by
<|endoftext|> is trained to end turns by <|im_end|>. `generate` stops at the tokens of the generation_config alone.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from samestep.data.conversations import CUT

MAX_BLANKS = 3
"""Tokens of white space that a template may write behind the token that ends a turn."""


def find_trained(source: Any) -> list[int]:
    """Find the ids of tokens that end what is trained: sorted, none where no token does.

    Args:
        source: of conversations: special tokens at the ends of sequences and of trained turns, and added tokens that are
            trained nowhere else. Of blocks of tokens: the token between documents. None: nothing is known.
    """
    if getattr(source, "end_of_text", None) is not None:
        return [int(source.end_of_text)]
    if not hasattr(source, "numbers"):
        return []
    tokenizer, added = source.tokenizer, source.tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
    size = max(len(tokenizer), *(number + 1 for number in (*added, *special)))
    num_ends, num_trained = np.zeros(size, np.int64), np.zeros(size, np.int64)
    columns = zip(source.tokens.values, source.trained.values, source.tokens.offsets, strict=True)
    for (tokens, trained, offsets), first_row in zip(columns, source.tokens.first_rows, strict=False):
        is_trained, rows = trained.astype(bool), slice(first_row, first_row + len(offsets) - 1)
        ends = np.flatnonzero(is_trained & ~np.append(is_trained[1:], False))
        is_cut = source.numbers["state"][rows] == CUT
        starts = offsets[:-1][is_cut]
        lasts = [source.numbers["border"][rows][is_cut] + starts, offsets[1:][is_cut]]
        ends = np.setdiff1d(ends, np.concatenate(lasts) - 1)
        for _ in range(MAX_BLANKS):
            blank = [number for number in np.unique(tokens[ends]).tolist() if _is_blank(tokenizer, number, added)]
            is_blank = np.isin(tokens[ends], blank) & (ends > 0)
            ends = np.where(is_blank & is_trained[ends - 1], ends - 1, ends)
        num_ends += np.bincount(tokens[ends], minlength=size)
        num_trained += np.bincount(tokens[is_trained], minlength=size)
    found = {int(stop) for stop in np.unique(source.numbers["stops"][source.places]) if stop >= 0}
    # A special token may be written inside of a turn, too
    found |= {number for number in special if num_ends[number] and 2 * num_ends[number] >= num_trained[number]}
    found |= {number for number in added if num_ends[number] and num_ends[number] == num_trained[number]}
    return sorted(found)


def _is_blank(tokenizer: Any, number: int, added: Any) -> bool:
    return number not in added and not tokenizer.decode([number]).strip()


def list_ends(config: Any) -> list[int]:
    """List the tokens that end texts by a generation_config, of a model or its file; None has none."""
    ends = getattr(config, "eos_token_id", None)
    return [] if ends is None else list(ends) if isinstance(ends, list) else [ends]


def add(model: Any, source: Any) -> None:
    """Add the tokens that `find_trained` finds to a model's generation_config, in place, behind those that it has.

    Args:
        model: of transformers; one that does not generate stays as it is.
        source: of the samples.
    """
    config = getattr(model, "generation_config", None)
    if config is None or not model.can_generate():
        return
    ends = list(dict.fromkeys([*list_ends(config), *find_trained(source)]))
    if ends == list_ends(config):
        return
    config.eos_token_id = ends if len(ends) > 1 else ends[0]
    # transformers saves a config with questionable values of others only as it was read
    with tempfile.TemporaryDirectory() as folder:
        config.to_json_file(Path(folder, "generation_config.json"))
        model.generation_config = type(config).from_pretrained(folder)
