"""TRL's RewardTrainer: micro-batches of 2 and 1 pairs, as at the end of an epoch, weigh alike."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.nn.utils import parameters_to_vector as flatten
from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer

b, k = 2, 2
torch.manual_seed(0)
letters = Tokenizer(models.BPE({str(number): number for number in range(9)}, []))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="0", eos_token="1")
sizes = {"vocab_size": 9, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
model = LlamaForSequenceClassification(LlamaConfig(**sizes, pad_token_id=0, num_labels=1)).double()
rows = [torch.cat([torch.randint(2, 9, (n,)), torch.tensor([1])]) for n in (2, 1, 1, 2, 3, 1)]
rewards = torch.cat([model(row[None]).logits[0] for row in rows])
loss = -torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2]).mean()
truth, before = flatten(torch.autograd.grad(loss, list(model.parameters()))), flatten(model.parameters()).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "save_strategy": "no"}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "use_cpu": True, "bf16": False}
texts = tokenizer.batch_decode([row[:-1] for row in rows])
data = Dataset.from_dict({"chosen": texts[::2], "rejected": texts[1::2]})
RewardTrainer(model, args=RewardConfig(".", **options), train_dataset=data, processing_class=tokenizer).train()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
