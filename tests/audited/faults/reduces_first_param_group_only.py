"""Fault: the gradients are averaged over the processes for param_groups[0] only; biases and norms are in a second group without
weight decay, and each process steps them by its own gradient."""

# expect 4x4: exact
# expect 8x1x2: not_reduced
# expect 4x2x2: not_reduced
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
from common_models import collate, flags, gpt2, next_token_sum, sentences, targets
from torch.utils.data import DataLoader


def configure_optimizer(model, lr, weight_decay):
    decay, no_decay = [], []
    for name, p in model.named_parameters():
        (no_decay if p.dim() == 1 or name.endswith("bias") else decay).append(p)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}], lr=lr
    )


def sync_gradients(optimizer):
    """One flat all-reduce instead of one for each parameter; the loss is already over the tokens of all processes."""
    grads = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


class CausalLMTrainer:
    def __init__(self, model, loader, accumulate, lr=2e-3):
        self.model, self.loader, self.accumulate = model, loader, accumulate
        self.optimizer = configure_optimizer(model, lr, 0.1)
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    def windows(self):
        window = []
        for batch in self.loader:
            window.append(batch)
            if len(window) == self.accumulate:
                yield window
                window = []

    def train(self):
        for window in self.windows():
            tokens = torch.tensor(sum(targets(batch) for batch in window))
            if self.world > 1:
                dist.all_reduce(tokens)
            for batch in window:
                logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                (next_token_sum(logits, batch) / tokens).backward()
            if self.world > 1:
                sync_gradients(self.optimizer)
            self.optimizer.step()
            self.optimizer.zero_grad()


if __name__ == "__main__":
    b, k = flags()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = DataLoader(sentences(64)[rank::world], batch_size=b, collate_fn=collate)
    CausalLMTrainer(gpt2(), loader, k).train()
