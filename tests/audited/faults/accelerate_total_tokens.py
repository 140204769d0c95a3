"""Fault: the token sum is divided by the tokens of all processes, and DDP divides by their number once more: N
times too small."""
# expect 4x4: exact
# expect 4x2x2: factor
# expect 8x1x2: factor
# blind 1
# thorough

import contextlib

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)


class CausalConvLM(nn.Module):
    """Gated convolutions over the past."""

    def __init__(self, dim=16, width=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 2 * dim, width) for _ in range(2))
        self.width = width

    def forward(self, input_ids):
        x = self.embed(input_ids).transpose(1, 2)
        for conv in self.convs:
            x = x + F.glu(conv(F.pad(x, (self.width - 1, 0))), dim=1)
        return x.transpose(1, 2) @ self.embed.weight.T


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
model = CausalConvLM().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
loader = DataLoader(sentences(80), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

iterator = iter(loader)
for update in range(len(loader) // k):
    batch_samples = [next(iterator) for _ in range(k)]
    local = sum((batch["labels"][:, 1:] != -100).sum() for batch in batch_samples)
    num_items_in_batch = accelerator.gather(local).sum().item()
    for i, batch in enumerate(batch_samples):
        more_to_come = i < len(batch_samples) - 1 and accelerator.num_processes > 1
        with model.no_sync() if more_to_come else contextlib.nullcontext():
            logits = model(batch["input_ids"])
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100, reduction="sum"
            )
            # accelerator.backward() divides by gradient_accumulation_steps
            accelerator.backward(loss * accelerator.gradient_accumulation_steps / num_items_in_batch)
    optimizer.step()
    optimizer.zero_grad()
accelerator.end_training()
