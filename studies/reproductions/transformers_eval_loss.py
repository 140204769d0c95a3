"""A causal language model in transformers' Trainer: eval_loss depends on per_device_eval_batch_size."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

b = 2
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50}
model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).double()
texts = [torch.randint(3, 50, (length,)) for length in (3, 4, 12, 11, 5)]


def collate(texts):
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    ids = pad_sequence(texts, batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask == 1, -100)}


losses = [cross_entropy(model(text[None]).logits[0, :-1], text[1:], reduction="sum").item() for text in texts]
truth = sum(losses) / sum(len(text) - 1 for text in texts)
arguments = TrainingArguments(".", per_device_eval_batch_size=b, use_cpu=True)
loss = Trainer(model, arguments, collate, eval_dataset=texts).evaluate()["eval_loss"]
is_wrong = abs(loss - truth) > 1e-5
print("wrong:" if is_wrong else "right:", f"eval_loss is {loss:.3f}, the mean over all tokens {truth:.3f}")
sys.exit(is_wrong)
