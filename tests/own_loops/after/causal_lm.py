"""A causal language model of transformers, in Accelerate's loop."""

import argparse

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

from samestep import exact_steps


def collate(samples):
    ids = pad_sequence(samples, batch_first=True)
    labels = pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
texts = [torch.arange(n) * n % 49 + 1 for n in (3 + 7 * number % 13 for number in range(77))]

accelerator = Accelerator()
torch.manual_seed(0)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
count = lambda batch: (batch["labels"][:, 1:] != -100).sum()  # the first token is never predicted
sizes = {"global_batch_size": 15, "per_device_batch_size": b, "num_epochs": 2}
model, optimizer = accelerator.prepare(model, optimizer)
for step in exact_steps(accelerator, texts, collate, targets=count, **sizes):
    for batch in step:
        with accelerator.accumulate(model):
            loss = step.loss(model(**batch).loss * count(batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
