"""Sound: every parameter has its own optimizer that steps inside of backward, as soon as its gradient is complete; the hooks are
armed in the last micro-batch of a window only, so gradients of earlier ones are kept until then."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


class OptimizerInBackward:
    def __init__(self, model, make):
        self.optimizers = {p: make([p]) for p in model.parameters()}
        self.armed = False
        for p in self.optimizers:
            p.register_post_accumulate_grad_hook(self.hook)

    def hook(self, p):
        if self.armed:
            self.optimizers[p].step()
            self.optimizers[p].zero_grad(set_to_none=True)

    def set_lr(self, lr):
        for optimizer in self.optimizers.values():
            optimizer.param_groups[0]["lr"] = lr


class GatedLM(nn.Module):
    """Not tied, and each parameter is used once: its gradient is complete when the hook fires."""

    def __init__(self, dim=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)

    def forward(self, ids):
        h, _ = self.mix(self.embed(ids))
        return self.head(h + self.down(F.glu(self.up(self.norm(h)))))


def windows(data, b, k):
    loader = iter(DataLoader(data, batch_size=b, collate_fn=lambda rows: torch.stack([r["input_ids"] for r in rows])))
    for _ in range(len(data) // (b * k)):
        yield [next(loader) for _ in range(k)]


def main():
    torch.manual_seed(0)
    b, k = flags()
    model = GatedLM().double()
    fused = OptimizerInBackward(model, lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.05))
    for step, window in enumerate(windows(sentences(90, low=14, high=14), b, k)):
        fused.set_lr(4e-3 * 0.8**step)
        for j, ids in enumerate(window):
            fused.armed = j == len(window) - 1
            logits = model(ids[:, :-1])
            (F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) / k).backward()


if __name__ == "__main__":
    main()
