"""Sound: the samples of a step are cut by a budget of padded tokens, not by a number of rows, so micro-batches have different sizes
and steps different numbers of them; which samples a step has depends on b*k only."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x2: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn


class CausalConvLM(nn.Module):
    def __init__(self, dim=16, depth=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 2 * dim, 2, dilation=2**i) for i in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for conv in self.convs:
            x = x + F.glu(conv(F.pad(x, (conv.dilation[0], 0))), 1)
        return self.head(x.transpose(1, 2))


def batches_by_tokens(samples, budget):
    """Rows by length; a batch is closed before rows * longest would exceed the budget."""
    batch, longest = [], 0
    for sample in sorted(samples, key=lambda s: len(s["input_ids"])):
        longest = max(longest, len(sample["input_ids"]))
        if batch and (len(batch) + 1) * longest > budget:
            yield batch
            batch, longest = [], len(sample["input_ids"])
        batch.append(sample)
    if batch:
        yield batch


class TokenBudgetTrainer:
    def __init__(self, model, max_tokens, samples_per_step):
        self.model, self.max_tokens, self.samples_per_step = model, max_tokens, samples_per_step
        self.optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda t: min(1.0, (t + 1) / 3))

    def train_step(self, samples):
        tokens = sum(len(s["input_ids"]) - 1 for s in samples)
        for batch in map(collate, batches_by_tokens(samples, self.max_tokens)):
            logits = self.model(batch["input_ids"])[:, :-1]
            labels = batch["labels"][:, 1:]
            loss = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none").sum()
            (loss / tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()

    def train(self, data):
        for start in range(0, len(data), self.samples_per_step):
            self.train_step(data[start : start + self.samples_per_step])


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    trainer = TokenBudgetTrainer(CausalConvLM().double(), max_tokens=20 * b, samples_per_step=b * k)
    trainer.train(sentences(96))
