"""Models with an encoder and a decoder, taught to write targets of sources, in 12 ways to shift what the decoder reads.

    python shifted.py --case bart_inputs_shifted_again

A decoder reads the token that starts a target, then the target: it is one place behind its labels. The first six ways shift
once too often, or not at all, in collators, models and losses. The last six look alike, and are right.
"""

import argparse

import torch
import torch.nn.functional as F
from common_models import flags
from media_models import whisper
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MBartConfig,
    MBartForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.bart.modeling_bart import shift_tokens_right
from transformers.trainer_pt_utils import LabelSmoother

VOCAB, EOS = 40, 2
SHAPE = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "use_cache": False}
SHAPE |= {
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": VOCAB,
    "dropout": 0.0,
}


def bart():
    return BartForConditionalGeneration(BartConfig(**SHAPE, decoder_start_token_id=EOS))


def mbart():
    return MBartForConditionalGeneration(MBartConfig(**SHAPE))


def pegasus():
    return PegasusForConditionalGeneration(PegasusConfig(**SHAPE, max_position_embeddings=40))


class ShiftingT5(T5ForConditionalGeneration):
    """Prepares the decoder's inputs, whatever it is given for them."""

    def forward(self, decoder_input_ids, **inputs):
        return super().forward(
            decoder_input_ids=self.prepare_decoder_input_ids_from_labels(decoder_input_ids), **inputs
        )


def t5(kind=T5ForConditionalGeneration):
    sizes = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return kind(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False))


def draw_pairs(num_samples, is_speech):
    """Draw sources (tokens, or frames of a spectrogram) and the words of their targets."""
    g = torch.Generator().manual_seed(58)
    for _ in range(num_samples):
        source = torch.randint(5, VOCAB, (int(torch.randint(3, 12, (), generator=g)),), generator=g)
        frames = torch.randn(8, 60, generator=g, dtype=torch.float64)
        words = torch.randint(5, VOCAB, (int(torch.randint(3, 9, (), generator=g)),), generator=g)
        yield (frames if is_speech else source), words


def collate(rows, start=(), end=(EOS,)):
    """Make a batch: sources, and labels of the words between some other tokens, padded by -100."""
    sources, targets = zip(*rows, strict=True)
    labels = [torch.cat([torch.tensor(start, dtype=torch.int64), words, torch.tensor(end)]) for words in targets]
    labels = pad_sequence(labels, batch_first=True, padding_value=-100)
    if sources[0].ndim > 1:
        return {"input_features": torch.stack(sources), "labels": labels}
    source = pad_sequence(sources, batch_first=True)
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def log_probabilities(logits, labels):
    """Sum -log p of the labels, without a loss function of torch."""
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -chosen[labels != -100].sum()


# ---------------------------------------------------------------------------------------------- once too often, or not at all


def bart_inputs_shifted_again(model, batch):
    labels = batch.pop("labels")
    inputs = shift_tokens_right(labels, 1, EOS)  # in a collator
    return cross_entropy(model(**batch, decoder_input_ids=shift_tokens_right(inputs, 1, EOS)).logits, labels)


def t5_prepared_and_again_in_the_model(model, batch):
    labels = batch["labels"]
    inputs = model.prepare_decoder_input_ids_from_labels(labels)
    return model(**batch, decoder_input_ids=inputs).loss * (labels != -100).sum()


def pegasus_inputs_not_shifted(model, batch):
    labels = batch.pop("labels")
    return cross_entropy(model(**batch, decoder_input_ids=labels.masked_fill(labels == -100, 0)).logits, labels)


def mbart_labels_shifted_again_by_the_loss(model, batch):
    labels = batch["labels"]
    logits = model(**batch).logits  # the model shifts by its own rule
    return cross_entropy(logits[:, :-1], labels[:, 1:])


def whisper_log_probabilities_of_the_next(model, batch):
    labels = batch.pop("labels")
    inputs = shift_tokens_right(labels, 0, 1)
    logits = model(**batch, decoder_input_ids=inputs).logits
    return log_probabilities(logits[:, :-1], labels[:, 1:])


def t5_smoother_told_to_shift(model, batch):
    labels = batch.pop("labels")
    output = model(**batch, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels))
    return LabelSmoother(0.1)(output, labels, shift_labels=True) * (labels[:, 1:] != -100).sum()


# ------------------------------------------------------------------------------------------------------------------ right


def bart_whole_targets_shifted_by_the_loss(model, batch):
    """The inputs are the labels, which the model is given for its loss: that one is not used."""
    labels = batch["labels"]
    logits = model(**batch, decoder_input_ids=labels.masked_fill(labels == -100, 1)).logits
    return cross_entropy(logits[:, :-1], labels[:, 1:])


def t5_prepared_and_smoothed(model, batch):
    labels = batch.pop("labels")
    output = model(**batch, decoder_input_ids=model.prepare_decoder_input_ids_from_labels(labels))
    return LabelSmoother(0.1)(output, labels) * (labels != -100).sum()


def pegasus_start_cut_before_the_model(model, batch):
    batch["labels"] = batch["labels"][:, 1:].contiguous()  # the data keep the start in front
    return cross_entropy(model(**batch).logits, batch["labels"])


def whisper_start_in_front_of_both(model, batch):
    """The labels begin with the start, which the model shifts in once more; the loss leaves that place out."""
    labels = batch["labels"]
    return cross_entropy(model(**batch).logits[:, 1:], labels[:, 1:])


def mbart_last_token_in_front(model, batch):
    return cross_entropy(model(**batch).logits, batch["labels"])


def t5_two_tokens_ahead(model, batch):
    """A second term predicts the token behind the next one."""
    labels = batch["labels"]
    logits = model(**batch).logits
    return cross_entropy(logits, labels) + 0.1 * cross_entropy(logits[:, :-1], labels[:, 1:])


LANGUAGE = {"end": (EOS, 4)}
CASES = {
    bart_inputs_shifted_again: (bart, {}),
    t5_prepared_and_again_in_the_model: (lambda: t5(ShiftingT5), {}),
    pegasus_inputs_not_shifted: (pegasus, {}),
    mbart_labels_shifted_again_by_the_loss: (mbart, LANGUAGE),
    whisper_log_probabilities_of_the_next: (whisper, {}),
    t5_smoother_told_to_shift: (t5, {}),
    bart_whole_targets_shifted_by_the_loss: (bart, {"start": (EOS,)}),
    t5_prepared_and_smoothed: (t5, {}),
    pegasus_start_cut_before_the_model: (pegasus, {"start": (0,)}),
    whisper_start_in_front_of_both: (whisper, {"start": (1, 3)}),
    mbart_last_token_in_front: (mbart, LANGUAGE),
    t5_two_tokens_ahead: (t5, {}),
}
"""Way -> model, and tokens around the words of a target."""
WRONG = [way.__name__ for way in CASES][:6]


def main():
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--case", choices=[way.__name__ for way in CASES])
    way = globals()[parser.parse_known_args()[0].case]
    b, k = flags(parser)
    torch.manual_seed(0)
    make, tokens = CASES[way]
    model = make().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = list(draw_pairs(32, make is whisper))
    loader = DataLoader(rows, batch_size=b, collate_fn=lambda rows: collate(rows, **tokens))
    batches, num_words = list(loader), 16 * 5  # a constant divides the sums: this is not about counts
    for first in range(0, len(batches), k):
        for batch in batches[first : first + k]:
            (way(model, dict(batch)) / num_words).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
