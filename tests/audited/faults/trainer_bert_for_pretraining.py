"""Fault: Trainer leaves the division to the model, and BertForPreTraining ignores num_items_in_batch."""
# expect 4x4: ignores_num_items
# also: logged_loss

import torch
from common_models import bert, flags, sentences, train_with_trainer

torch.manual_seed(0)
b, k = flags()
train_with_trainer(bert("BertForPreTraining"), sentences(80, kind="mlm"), b, k)
