"""Lets a causal language model answer held-out prompts, and counts the answers that are exactly the data's."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from samestep.models import stop_tokens
from samestep.models.image_text import to_dtype
from samestep.training.parts import Part
from samestep.training.run import Run

FILE = "generations.jsonl"
"""File of the last evaluation's answers, a line each."""


class Answers(Part):
    """Lets the model answer held-out prompts at each evaluation, the first ones of each source in turn (--num_generations).

    An answer is right if it is equal to the data's but for spaces around them. All processes share the work, but with sharded
    weights, which each token needs whole: there all compute all answers together. The answers do not depend on the number of
    processes, since what is computed together does not. Process 0 writes them to `FILE` in the output folder.

    The tokenizer's eos_token ends an answer, as do the tokens that end texts in the model's generation_config, among which are
    the trained ones.
    """

    def __init__(self, run: Run):
        self.run = run

    def score(self) -> dict[str, float]:
        """Return the shares of the answers that are right.

        Returns:
            exact_match, and SOURCE/exact_match of each source, where there are several; nothing without prompts.
        """
        accelerator, model, settings = self.run.accelerator, self.run.bare_model, self.run.settings
        _, source = self.run.data
        ids = source.choose_samples(settings.num_generations)
        questions = [source.find_question(sample_id) for sample_id in ids]
        # Where all is trained, a prompt is a beginning of the text, behind which its images would stand
        has_prompts = not (self.run.recipe.images and self.run.recipe.train_on == "all")
        if not questions or not has_prompts or not model.causal_lm.can_generate():  # a reward model does not
            return {}
        tokenizer, answers = source.tokenizer, []
        lengths = [len(prompt) for prompt, _ in questions]
        size = 1 if self.run.recipe.images else settings.per_device_eval_batch_size  # images belong to a prompt
        batches = make_batches(lengths, size, may_pad=not model.is_padded)
        is_sharded = isinstance(model, FSDPModule)
        share = batches if is_sharded else batches[accelerator.process_index :: accelerator.num_processes]
        with model.own_attention() as causal_lm, gathered_root(model):
            ends = find_ends(causal_lm, tokenizer)
            for batch in share:
                prompts = [questions[place][0] for place in batch]
                more = source.find_inputs([ids[place] for place in batch]) | source.find_types(prompts[0])
                with accelerator.autocast():  # the model alone, not what computes its inputs
                    texts = continue_greedily(causal_lm, prompts, settings.generation_length, ends, is_sharded, more)
                answers += zip(batch, texts, strict=True)
        tokens = dict(gather_object(answers))

        def read(text: Sequence[int]) -> str:
            return tokenizer.decode(text, skip_special_tokens=True).strip()

        lines = []
        for place, (prompt, expected) in enumerate(questions):
            line = {"prompt": tokenizer.decode(prompt), "answer": read(tokens[place]), "expected": read(expected)}
            lines.append(line | {"is_right": line["answer"] == line["expected"]} | source.describe_row(ids[place]))
        if accelerator.is_main_process:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (Path(settings.output_dir) / FILE).write_text(text, encoding="utf-8")
        is_right: dict[str, list[bool]] = {"": [line["is_right"] for line in lines]}
        for sample_id, line in zip(ids, lines, strict=True) if len(source.source_names) > 1 else ():
            is_right.setdefault(f"{source.source_names[source.source_numbers[sample_id]]}/", []).append(
                line["is_right"]
            )
        return {f"{name}exact_match": sum(values) / len(values) for name, values in is_right.items()}


@contextlib.contextmanager
def gathered_root(model: nn.Module) -> Iterator[None]:
    """Let parts of a model be called within this context: what no layer of its own holds is gathered, if it is sharded.

    Called by all processes, which must call the same parts. The model has computed a forward before.
    """
    if isinstance(model, FSDPModule):
        model.unshard()
    try:
        yield
    finally:
        if isinstance(model, FSDPModule):
            model.reshard()


def find_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Find the tokens that end an answer."""
    ends = {*stop_tokens.list_ends(getattr(model, "generation_config", None)), tokenizer.eos_token_id}
    return sorted(end for end in ends if end is not None)


def make_batches(lengths: Sequence[int], batch_size: int, may_pad: bool) -> list[list[int]]:
    """Cut prompts into batches of at most `batch_size`, from the shortest to the longest: their places.

    Args:
        lengths: tokens of each prompt.
        batch_size: prompts of a batch, at most.
        may_pad: whether a batch may have prompts of several lengths.

    >>> make_batches([2, 1, 2, 2], 2, may_pad=True), make_batches([2, 1, 2, 2], 2, may_pad=False)
    ([[1, 0], [2, 3]], [[1], [0, 2], [3]])
    """
    places = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups = [places] if may_pad else [list(group) for _, group in groupby(places, lengths.__getitem__)]
    return [group[first : first + batch_size] for group in groups for first in range(0, len(group), batch_size)]


@torch.no_grad()
def continue_greedily(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    ends: Sequence[int],
    is_sharded: bool = False,
    more: Mapping[str, torch.Tensor] | None = None,
) -> list[list[int]]:
    """Continue prompts by the likeliest tokens, up to the first of `ends`, which is left out.

    Shorter prompts are padded on their left, where nothing attends.

    Args:
        model: a causal language model; is left in the mode in which it was.
        prompts: token ids of each.
        num_tokens: the largest number of tokens of a continuation; what the model has no positions for is left out.
        ends: tokens that end a text.
        is_sharded: whether each token needs all processes, so that none may stop before the others.
        more: what the model takes beside tokens, such as pixels; None: nothing.

    Returns:
        Token ids of each continuation.
    """
    length = max(map(len, prompts))
    num_positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if num_positions is not None:
        num_tokens = min(num_tokens, num_positions - length)
    if num_tokens < 1:
        return [[] for _ in prompts]
    was_training = model.training
    model.eval()
    input_ids = torch.full((len(prompts), length), ends[0])
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, length - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, length - len(prompt) :] = 1
    tokens = model.generate(
        input_ids=input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=list(ends),
        pad_token_id=ends[0],
        synced_gpus=is_sharded,
        **{name: to_dtype(value, model.dtype).to(model.device) for name, value in (more or {}).items()},
    )
    model.train(was_training)
    rows = tokens[:, length:].tolist()
    stops = [next((place for place, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[:stop] for row, stop in zip(rows, stops, strict=True)]
