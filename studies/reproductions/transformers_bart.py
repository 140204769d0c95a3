"""BartForConditionalGeneration in transformers' Trainer: k micro-batches give k times the gradient of one batch."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from transformers import BartConfig, BartForConditionalGeneration, Trainer, TrainingArguments

b, k = 2, 4
torch.manual_seed(0)
sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
config = BartConfig(**sizes, **heads, vocab_size=50, dropout=0.0, max_position_embeddings=20)
model = BartForConditionalGeneration(config).double()
parameters = list(model.parameters())
data = [{"input_ids": torch.randint(4, 50, (6,)), "labels": torch.randint(4, 50, (5,))} for _ in range(8)]
batch = torch.utils.data.default_collate(data)
loss = cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten())
truth = flatten(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
before = flatten(parameters).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
Trainer(model, TrainingArguments(".", **options), train_dataset=data).train()
taken = before - flatten(parameters).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient {taken.norm() / truth.norm():.2f} times, error {error:.2g}")
sys.exit(error > 1e-5)
