"""Fault: a hand-made model takes **kwargs, so that Trainer passes num_items_in_batch and leaves the division to it, but its loss is a mean."""
# expect 4x4: ignores_num_items
# expect 2x8: ignores_num_items
# also: factor, mean_of_means
# blind 4

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences, train_with_trainer
from torch import nn
from transformers.modeling_outputs import TokenClassifierOutput


class ConvTagger(nn.Module):
    """A tagger of part of speech with gated convolutions; padded positions are emptied."""

    def __init__(self, width=20, tags=6):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.convs = nn.ModuleList([nn.Conv1d(width, 2 * width, 3, padding=1) for _ in range(2)])
        self.classifier = nn.Linear(width, tags)

    def forward(self, input_ids, attention_mask, labels=None, **kwargs):
        mask = attention_mask[:, None]
        x = self.embed(input_ids).transpose(1, 2) * mask
        for conv in self.convs:
            x = (x + F.glu(conv(x), dim=1)) * mask
        logits = self.classifier(x.transpose(1, 2))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return TokenClassifierOutput(loss=loss, logits=logits)


def tagged(n=80):
    data = sentences(n, 4, 20)
    for sample in data:
        sample["labels"] = sample["input_ids"] % 6
    return data


torch.manual_seed(0)
b, k = flags()
train_with_trainer(ConvTagger().double(), tagged(), b, k)
