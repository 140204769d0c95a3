"""Fault (on several processes only): average_tokens_across_devices=False: each process divides by its own
number of tokens."""
# expect 4x4: shifted_labels
# expect 4x2x2: mean_of_means
# thorough
# also: logged_loss
# weights: equal 4x4

import torch
from common_models import flags, gpt2, sentences, train_with_trainer

torch.manual_seed(0)
b, k = flags()
train_with_trainer(gpt2(), sentences(80), b, k, average_tokens_across_devices=False)
