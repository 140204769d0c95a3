"""Trainings as run_clm_no_trainer does them, blocks of one length: the last window of an epoch is divided by k."""

import sys

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator

b, k = 2, 4
accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
model = LlamaForCausalLM(LlamaConfig(**sizes)).double()
blocks = torch.randint(50, (3, 6))
loss = cross_entropy(model(blocks).logits[:, :-1].flatten(0, 1), blocks[:, 1:].flatten())
truth, before = flatten(torch.autograd.grad(loss, list(model.parameters()))), flatten(model.parameters()).detach()
data = [{"input_ids": block, "labels": block} for block in blocks]
loader = DataLoader(data, shuffle=True, collate_fn=default_data_collator, batch_size=b)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader)
for batch in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
