"""Qwen3-MoE in transformers' Trainer: the loss that balances experts is a micro-batch's, and is added k times."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

b, k = 2, 4
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.1}
config = Qwen3MoeConfig(**sizes, **experts, vocab_size=50, output_router_logits=True)
model = Qwen3MoeForCausalLM(config)
rows = torch.randint(50, (8, 6))
output, parameters = model(rows), list(model.parameters())
router = output.router_logits[0].softmax(-1)  # [tokens, experts]
used = torch.zeros_like(router).scatter(1, router.topk(2).indices, 1.0).mean(0)
loss = cross_entropy(output.logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()) + 0.4 * (used * router.mean(0)).sum()
truth = flatten(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
before = flatten(parameters).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
data = [{"input_ids": row, "labels": row} for row in rows]
Trainer(model, TrainingArguments(".", **options), train_dataset=data).train()
error = ((before - flatten(parameters).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-4 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-4)
