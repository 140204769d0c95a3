"""Saves a model of sequence to sequence as a folder that transformers loads, and that generates as it was trained."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from samestep._internals.transformers_models import shift_right
from samestep.models import adapters
from samestep.models.pretrained import save_pretrained
from samestep.recipe.tasks.seq2seq_finetuning import Seq2SeqFineTuning

USAGE = """\
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
model = AutoModelForSeq2SeqLM.from_pretrained("OUTPUT_DIR")
tokenizer = AutoTokenizer.from_pretrained("OUTPUT_DIR")
tokens = model.generate(**tokenizer(SOURCE, return_tensors="pt"))
tokenizer.batch_decode(tokens, skip_special_tokens=True)"""

SPEECH_USAGE = """\
import soundfile
from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer
model = AutoModelForSpeechSeq2Seq.from_pretrained("OUTPUT_DIR")
tokenizer = AutoTokenizer.from_pretrained("OUTPUT_DIR")
sound, rate = soundfile.read("recording.wav")  # one channel, 16,000 numbers a second
inputs = AutoFeatureExtractor.from_pretrained("OUTPUT_DIR")(sound, sampling_rate=rate, return_tensors="pt")
tokenizer.batch_decode(model.generate(**inputs), skip_special_tokens=True)"""


def choose_generation(model: Any, source: Any) -> None:
    """Let a model generate as it is trained: from the token before its targets on, first those that are forced.

    Args:
        model: of transformers.
        source: the training data, `Pairs`.
    """
    labels = torch.tensor(source.draw(0, 0).labels.tolist())[None]
    config = model.generation_config
    config.decoder_start_token_id = int(shift_right(model, labels)[0, 0])
    config.eos_token_id, config.pad_token_id = source.tokenizer.eos_token_id, source.tokenizer.pad_token_id
    if source.processor is not None:
        _choose_speech(config, source)
    elif source.forced and labels[0, 0] == source.forced[0]:
        config.forced_bos_token_id = source.forced[0]
    positions = [getattr(model.config, name, None) for name in ("max_target_positions", "max_position_embeddings")]
    most = min([position for position in positions if position is not None], default=2**24)
    # Tokens before those that are generated take positions, too
    config.max_length, config.max_new_tokens = None, min(source.recipe.max_target_length, most - 1 - len(source.forced))


def _choose_speech(config: Any, source: Any) -> None:
    """Let a model of speech write what it hears in the recipe's languages, and no times."""
    config.forced_decoder_ids = None
    config.suppress_tokens = config.begin_suppress_tokens = None
    if source.forced:
        is_same = source.recipe.source_language == source.recipe.target_language
        config.language, config.task = source.recipe.source_language, "transcribe" if is_same else "translate"


def save(sums: Any, folder: Path, recipe: Seq2SeqFineTuning, train: Any, best: Path | None = None) -> str:
    """Save the model, adapters merged into its weights, and the tokenizer.

    Args:
        sums: `Seq2SeqSums`.
        folder: gets the files.
        recipe: the run's.
        train: the training data, with the tokenizer.
        best: folder of the best model of `Run.save_best`, which is saved instead; None: this one.

    Returns:
        Lines of Python that load the model and generate, OUTPUT_DIR standing for the folder.
    """
    if best is not None and recipe.lora_rank is not None:
        adapters.load_adapter(sums.model, best)
    elif best is not None:
        sums.model.load_state_dict(load_file(best / "model.safetensors"), strict=False)  # tied weights are there once
        sums.model.tie_weights()
    model = sums.model if recipe.lora_rank is None else sums.model.merge_and_unload()
    save_pretrained(model, train.tokenizer, folder)
    if train.processor is not None:
        train.processor.save_pretrained(folder)
        return SPEECH_USAGE
    return USAGE.replace("SOURCE", repr(recipe.source_prefix + train.sources.describe(0)))
