"""Exact: Trainer with LlamaForCausalLM, which honours num_items_in_batch; 80 ragged samples whose first label
is -100."""
# expect 4x4: exact
# expect 2x8: exact
# thorough
# also: logged_loss

import torch
from common_models import flags, llama, sentences, train_with_trainer

torch.manual_seed(0)
b, k = flags()
data = sentences(80)
for sample in data:
    sample["labels"][0] = -100
train_with_trainer(llama(), data, b, k)
