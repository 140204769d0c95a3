"""TRL's ORPOTrainer: one term is a mean over tokens, one over pairs, each of the micro-batch."""

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch.nn.utils import parameters_to_vector as flatten
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

b, k = 2, 2
torch.manual_seed(0)
letters = Tokenizer(models.BPE({str(number): number for number in range(9)}, []))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="0", eos_token="1")
model = LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=64, intermediate_size=8, num_hidden_layers=1)).double()
ids = [[2, 3, *torch.randint(2, 9, (n,)), 1] for n in (2, 1, 1, 2, 8, 1, 4, 1)]
logps = [model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]) for row in map(torch.tensor, ids)]
means = torch.stack([row[1:].mean() for row in logps])
odds = means - torch.log1p(-means.exp())
loss = -torch.cat(logps[::2]).mean() - 0.1 * torch.nn.functional.logsigmoid(odds[::2] - odds[1::2]).mean()
truth, before = flatten(torch.autograd.grad(loss, list(model.parameters()))), flatten(model.parameters()).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "save_strategy": "no"}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "use_cpu": True, "bf16": False}
answers = tokenizer.batch_decode([row[2:-1] for row in ids])
data = Dataset.from_dict({"prompt": ["2 3"] * 4, "chosen": answers[::2], "rejected": answers[1::2]})
ORPOTrainer(model, args=ORPOConfig(".", **options), train_dataset=data, processing_class=tokenizer).train()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
