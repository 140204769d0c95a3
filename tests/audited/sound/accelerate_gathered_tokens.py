"""Exact: Accelerate prepares model, optimizer and loader, and the token counts of a step are gathered from all processes.
The summed loss times num_processes is divided by their total; gradients are clipped and reduced once per step."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# expect 2x4x2: exact
# thorough
# blind

import argparse
from contextlib import nullcontext
from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

TAGS, WORDS = 7, 90


class Tagger(nn.Module):
    """Tags every word of a sentence by the word and its two neighbours."""

    def __init__(self, width=18):
        super().__init__()
        self.embed = nn.Embedding(WORDS, width, padding_idx=0)
        self.conv = nn.Conv1d(width, 24, 3, padding=1)
        self.out = nn.Linear(24, TAGS)

    def forward(self, words, tags):
        hidden = F.gelu(self.conv(self.embed(words).transpose(1, 2))).transpose(1, 2)
        return F.cross_entropy(self.out(hidden).flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")


def collate(rows):
    words, tags = zip(*rows, strict=True)
    return {
        "words": pad_sequence(words, batch_first=True),
        "tags": pad_sequence(tags, batch_first=True, padding_value=-100),
    }


def sentences(n=80):
    gen = torch.Generator().manual_seed(25)
    for length in torch.randint(2, 18, (n,), generator=gen).tolist():
        words = torch.randint(1, WORDS, (length,), generator=gen)
        yield words, words % TAGS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = parser.parse_args()
    accelerator = Accelerator(cpu=True)  # windows are formed below, so it need not know k
    torch.manual_seed(0)
    model = Tagger().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = DataLoader(list(sentences()), batch_size=args.per_device_train_batch_size, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        batches, logged = iter(loader), 0.0
        while window := list(islice(batches, args.gradient_accumulation_steps)):
            mine = torch.tensor([sum(int((batch["tags"] != -100).sum()) for batch in window)])
            total = accelerator.gather(mine).sum()
            for j, batch in enumerate(window, 1):
                with nullcontext() if j == len(window) else accelerator.no_sync(model):
                    loss = model(**batch) * accelerator.num_processes / total
                    accelerator.backward(loss)
                logged += loss.detach()
            accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {accelerator.reduce(logged, reduction='mean'):.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
