"""Sound: cycles of a triangular rate; the weights are averaged in the second half of a cycle, per update; each cycle begins from
the average of the one before, with the optimizer's state emptied."""

# expect 4x4: exact
# expect 2x8: exact
# expect 1x16: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader


class BagOfTokens(nn.Module):
    def __init__(self, dim=16, classes=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=0)
        self.score, self.head = nn.Linear(dim, 1), nn.Linear(dim, classes)

    def forward(self, ids, mask):
        h = self.embed(ids)
        weight = self.score(h).squeeze(-1).masked_fill(mask == 0, float("-inf")).softmax(-1)
        return self.head(torch.einsum("bt,btd->bd", weight, h))


class CyclicSWA:
    def __init__(self, model, optimizer, cycle, low, high):
        self.model, self.optimizer, self.cycle, self.low, self.high = model, optimizer, cycle, low, high
        self.average, self.updates = AveragedModel(model), 0

    def set_rate(self):
        phase = (self.updates % self.cycle) / (self.cycle - 1)
        for group in self.optimizer.param_groups:
            group["lr"] = self.high - (self.high - self.low) * phase

    def after_update(self):
        self.updates += 1
        place = self.updates % self.cycle
        if place == 0 or place > self.cycle // 2:
            self.average.update_parameters(self.model)
        if place == 0:
            self.model.load_state_dict(self.average.module.state_dict())
            self.average.n_averaged.zero_()
            self.optimizer.state.clear()


def main():
    torch.manual_seed(0)
    b, k = flags()
    model = BagOfTokens().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa = CyclicSWA(model, optimizer, cycle=4, low=0.05, high=0.5)
    loader = DataLoader(sentences(128, kind="cls"), batch_size=b, collate_fn=collate)
    for i, batch in enumerate(loader):
        logits = model(batch["input_ids"], batch["attention_mask"])
        (F.cross_entropy(logits, batch["labels"]) / k).backward()
        if i % k == k - 1:
            swa.set_rate()
            optimizer.step()
            optimizer.zero_grad()
            swa.after_update()


if __name__ == "__main__":
    main()
