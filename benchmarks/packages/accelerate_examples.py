"""Loops in the style of examples on Accelerate, our own code, a tiny model: left out are evaluation, tracking, checkpoints.

nlp: examples/nlp_example.py of github.com/huggingface/accelerate, which divides by k, and steps where step % k == 0. local_sgd:
examples/by_feature/local_sgd.py, there. diffusion: examples/text_to_image/train_text_to_image.py of
github.com/huggingface/diffusers: noise and times of a micro-batch come from the global generator, and the loss is a mean.
"""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from setup import RATE, arguments, bert, texts, tokenizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import BertForSequenceClassification, DataCollatorWithPadding, default_data_collator

mode = sys.argv.pop(1)
flags, words = arguments(), tokenizer()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1 if mode == "nlp" else k)
if mode == "diffusion":
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, 4, 3, padding=1))
    data = [{"latents": torch.randn(4, 8, 8)} for _ in range(77)]
    collator = default_data_collator
else:
    data = [dict(words(text)) | {"labels": number % 2} for number, text in enumerate(texts(1))]
    model, collator = bert(BertForSequenceClassification, num_labels=2), DataCollatorWithPadding(words)
loader = DataLoader(data, shuffle=True, collate_fn=collator, batch_size=b)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def predict_noise(latents):
    noise = torch.randn_like(latents)
    signal = torch.rand(len(latents), 1, 1, 1)
    return F.mse_loss(model(signal.sqrt() * latents + (1 - signal).sqrt() * noise), noise)


model.train()
if mode == "nlp":
    for step, batch in enumerate(loader):
        accelerator.backward(model(**batch).loss / k)
        if step % k == 0:
            optimizer.step()
            optimizer.zero_grad()
elif mode == "local_sgd":
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True) as local_sgd:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
                local_sgd.step()
else:
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(predict_noise(batch["latents"]))
            optimizer.step()
            optimizer.zero_grad()
