"""Fault: Trainer counts the first label of each row, which GPT-2 never predicts: the gradient is too small
under every cut."""
# expect 4x4: shifted_labels
# also: logged_loss
# weights: equal

import torch
from common_models import flags, gpt2, sentences, train_with_trainer

torch.manual_seed(0)
b, k = flags()
model = gpt2()
del model._loss_function
train_with_trainer(model, sentences(80), b, k)
