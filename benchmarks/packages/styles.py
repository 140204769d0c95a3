"""Loops in the style of programs that no package holds: our own code after a public file, with tiny models and drawn data.

timm: train.py of github.com/huggingface/pytorch-image-models: full batches only; the last window is divided by its own k.
open_clip: src/open_clip_train/train.py of github.com/mlfoundations/open_clip, accum_freq: the features of a window come first,
without a gradient, then each micro-batch again beside the others' features, with a learned scale. torchtune:
recipes/full_finetune_single_device.py of github.com/pytorch/torchtune: sums of tokens' losses, and gradients divided by the
number of the window's tokens. openrlhf: openrlhf/trainer/sft_trainer.py of github.com/OpenRLHF/OpenRLHF 0.11.2: divided by the
tokens of the window; windows that are not full are left out. verl: losses of github.com/verl-project/verl 0.9.1, token-mean,
with the tokens of the global batch.
"""

import sys
from itertools import islice

import torch
import torch.nn.functional as F
from setup import NUM_SAMPLES, RATE, SIZES, arguments, llama, texts, tokenizer
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

mode = sys.argv.pop(1)
flags, words = arguments(), tokenizer()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]


def collate(samples):
    ids = pad_sequence([torch.tensor(sample["input_ids"]) for sample in samples], batch_first=True)
    mask = pad_sequence([torch.ones(len(sample["input_ids"])) for sample in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask.long()}


def compute_token_losses(batch):
    """Compute the loss of every token behind the first of its row, and which of them are no padding."""
    logits = model(**batch).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    return losses, batch["attention_mask"][:, 1:]


def step() -> None:
    optimizer.step()
    optimizer.zero_grad()


if mode == "timm":
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    data = [(torch.randn(3, 8, 8), number % 5) for number in range(NUM_SAMPLES)]
    loader = DataLoader(data, batch_size=b, drop_last=True)
elif mode == "open_clip":
    model = nn.ModuleDict({"image": nn.Linear(12, 8), "text": nn.Embedding(SIZES["vocab_size"], 8)})
    model.logit_scale = nn.Parameter(torch.tensor(10.0).log())
    data = [(torch.randn(12), number % 29) for number in range(NUM_SAMPLES)]
    loader = DataLoader(data, batch_size=b, drop_last=True)
else:
    model, data = llama(), [dict(words(text)) for text in texts(1)]
    loader = DataLoader(data, batch_size=b, collate_fn=collate)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
batches = iter(loader)

if mode == "timm":
    num_last = len(loader) % k
    for index, (images, classes) in enumerate(loader):
        num_micro_batches = num_last if index >= len(loader) - num_last else k
        (F.cross_entropy(model(images), classes) / num_micro_batches).backward()
        if (index + 1) % k == 0 or index + 1 == len(loader):
            step()
elif mode == "open_clip":

    def encode(images, words):
        return F.normalize(model["image"](images), dim=-1), F.normalize(model["text"](words), dim=-1)

    while len(window := list(islice(batches, k))) == k:
        with torch.no_grad():
            features = [encode(*batch) for batch in window]
        for number, batch in enumerate(window):
            parts = [*features[:number], encode(*batch), *features[number + 1 :]]
            images, captions = (torch.cat(part) for part in zip(*parts, strict=True))
            logits, own = model.logit_scale.exp() * images @ captions.T, torch.arange(len(images))
            ((F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2).backward()
        step()
elif mode == "torchtune":
    num_tokens = 0
    for index, batch in enumerate(loader):
        losses, mask = compute_token_losses(batch)
        num_tokens += mask.sum()
        (losses * mask).sum().backward()
        if (index + 1) % k == 0:
            for parameter in model.parameters():
                parameter.grad /= num_tokens
            step()
            num_tokens = 0
else:
    while window := list(islice(batches, k)):
        if mode == "openrlhf" and len(window) < k:
            continue
        num_tokens = sum(batch["attention_mask"][:, 1:].sum() for batch in window)
        for batch in window:
            losses, mask = compute_token_losses(batch)
            ((losses * mask).sum() / num_tokens).backward()
        step()
