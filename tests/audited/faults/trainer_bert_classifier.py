"""Fault: Trainer leaves the division to the model, and BertForSequenceClassification ignores num_items_in_batch."""
# expect 4x4: ignores_num_items
# thorough
# also: logged_loss

import torch
from common_models import bert, flags, sentences, train_with_trainer

torch.manual_seed(0)
b, k = flags()
train_with_trainer(bert("BertForSequenceClassification"), sentences(80, kind="cls"), b, k)
