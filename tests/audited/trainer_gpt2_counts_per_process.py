"""Fault (on several processes only): average_tokens_across_devices=False: each process divides by its own number of tokens."""

import torch
from common_models import flags, gpt2, sentences, train_with_trainer

torch.manual_seed(0)
b, k = flags()
train_with_trainer(gpt2(), sentences(80), b, k, average_tokens_across_devices=False)
