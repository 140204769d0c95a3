"""Lets a causal language model answer held-out prompts, and counts the answers that are exactly the data's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FILE = "generations.jsonl"
"""File of the last evaluation's answers, a line each."""


class Prompt(NamedTuple):
    """A prompt of held-out data.

    Attributes:
        tokens: its token ids, up to where the answer begins.
        expected: text of the data's answer.
    """

    tokens: Sequence[int]
    expected: str


def judge(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    num_tokens: int,
    batch_size: int,
    output_dir: Path,
) -> dict[str, float]:
    """Let the model answer prompts, and measure how many answers are right: equal to the data's but for spaces around them.

    Called by all processes, which share the work. The answers do not depend on the number of processes, since what is computed
    together does not. Process 0 writes them to `FILE` in the output folder.

    Args:
        accelerator: of the processes.
        model: a causal language model, the same on every process.
        tokenizer: its eos_token ends an answer, as do the tokens of the model's generation_config that end texts.
        prompts: the prompts; none: there is nothing to measure.
        num_tokens: the largest number of tokens of an answer.
        batch_size: prompts in one forward, at most.
        output_dir: the run's.

    Returns:
        exact_match: share of the answers that are right; nothing without prompts.
    """
    if not prompts:
        return {}
    batches = make_batches([prompt.tokens for prompt in prompts], batch_size)
    ends = find_ends(model, tokenizer)
    answers = []
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        with accelerator.autocast():
            rows = continue_greedily(model, [prompts[place].tokens for place in batch], num_tokens, ends)
        answers += list(zip(batch, tokenizer.batch_decode(rows, skip_special_tokens=True), strict=True))
    texts = dict(gather_object(answers))
    lines = [
        {
            "prompt": tokenizer.decode(list(prompt.tokens)),
            "answer": texts[place],
            "expected": prompt.expected,
            "is_right": texts[place].strip() == prompt.expected.strip(),
        }
        for place, prompt in enumerate(prompts)
    ]
    if accelerator.is_main_process:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (output_dir / FILE).write_text(text, encoding="utf-8")
    return {"exact_match": sum(line["is_right"] for line in lines) / len(lines)}


def find_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Find the tokens that end an answer."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = ends if isinstance(ends, list) else [ends]
    return sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None})


def make_batches(prompts: Sequence[Sequence[int]], batch_size: int) -> list[list[int]]:
    """Cut prompts into batches of equal length, so that nothing is padded: places of `prompts`, at most `batch_size` each.

    >>> make_batches([[1, 2], [3], [4, 5], [6, 7]], 2)
    [[1], [0, 2], [3]]
    """
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(place)
    return [
        by_length[length][first : first + batch_size]
        for length in sorted(by_length)
        for first in range(0, len(by_length[length]), batch_size)
    ]


@torch.no_grad()
def continue_greedily(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], num_tokens: int, ends: Sequence[int]
) -> list[list[int]]:
    """Continue prompts of equal length by the likeliest tokens, up to the first of `ends`, which is left out.

    Args:
        model: a causal language model; is left in the mode in which it was.
        prompts: token ids of each.
        num_tokens: the largest number of tokens of a continuation; what the model has no positions for is left out.
        ends: tokens that end a text.

    Returns:
        Token ids of each continuation.
    """
    num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if num_positions is not None:
        num_tokens = min(num_tokens, num_positions - len(prompts[0]))
    if num_tokens < 1:
        return [[] for _ in prompts]
    was_training = model.training
    model.eval()
    input_ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    tokens = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
    )
    model.train(was_training)
    rows = tokens[:, input_ids.shape[1] :].tolist()
    stops = [next((place for place, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]
