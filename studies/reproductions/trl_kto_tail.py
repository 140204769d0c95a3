"""TRL's KTOTrainer: micro-batches of 4 and 2 answers, as at the end of an epoch, weigh alike."""

import copy
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.nn.utils import parameters_to_vector as flatten
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import KTOConfig, KTOTrainer

b, k = 4, 2
torch.manual_seed(0)
letters = Tokenizer(models.BPE({str(number): number for number in range(9)}, []))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="0", eos_token="1")
model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=8, num_hidden_layers=1)).double()
rows = [torch.cat([torch.tensor([2, 3]), torch.randint(2, 9, (n,)), torch.tensor([1])]) for n in (2, 1, 1, 2, 3, 1)]
logps = [model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]) for row in rows]
scores = 0.1 * torch.stack([row[1:].sum() - row[1:].sum().detach() for row in logps])  # the model is its reference
loss = (1 - torch.sigmoid(scores * torch.tensor([1, -1]).repeat(3))).mean()
truth, before = flatten(torch.autograd.grad(loss, list(model.parameters()))), flatten(model.parameters()).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "save_strategy": "no"}
args = KTOConfig(".", **options, per_device_train_batch_size=b, gradient_accumulation_steps=k, use_cpu=True, bf16=False)
answers = tokenizer.batch_decode([row[2:-1] for row in rows])
data = Dataset.from_dict({"prompt": ["2 3"] * 6, "completion": answers, "label": [True, False] * 3})
KTOTrainer(model, copy.deepcopy(model), args, train_dataset=data, processing_class=tokenizer).train()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
