"""Sound: a reward model is stopped in the middle of its epoch and built anew from the checkpoint: the loader
skips steps * k micro-batches."""
# expect 4x4: exact
# expect 2x8: exact
# blind 1
# thorough

import os
import tempfile

import torch
import torch.nn.functional as F
from accelerate import skip_first_batches
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

b, k = flags()


class RewardModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 14, padding_idx=0)
        self.rnn, self.score = nn.GRU(14, 14, batch_first=True), nn.Linear(14, 1, bias=False)

    def forward(self, ids):
        out, _ = self.rnn(self.embed(ids))
        last = (ids != 0).sum(1) - 1
        return self.score(out[torch.arange(len(ids)), last]).squeeze(-1)


def comparisons(n=77, length=12):
    g = torch.Generator().manual_seed(61)
    ids = torch.randint(1, 40, (n, 2, length), generator=g)
    lengths = torch.randint(3, length + 1, (n, 2, 1), generator=g)
    return TensorDataset(ids.masked_fill(torch.arange(length) >= lengths, 0), torch.rand(n, generator=g).double())


def fit(stop_at=None, checkpoint=None):
    torch.manual_seed(0)
    model = RewardModel().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    data, step = comparisons(), 0
    loader = DataLoader(data, batch_size=b)
    if checkpoint:
        saved = torch.load(checkpoint)
        step = saved.pop("step")
        for name, part in {"model": model, "optimizer": optimizer, "scheduler": scheduler}.items():
            part.load_state_dict(saved[name])
        loader = skip_first_batches(loader, step * k)
    seen = step * b * k
    in_step = min(b * k, len(data) - seen)
    for ids, margin in loader:
        chosen, rejected = model(ids.flatten(0, 1)).view(-1, 2).unbind(1)
        reward = -F.logsigmoid(chosen - rejected - margin) + 0.01 * (chosen + rejected).pow(2)
        (reward.sum() / in_step).backward()
        seen += len(ids)
        if seen % (b * k) == 0 or seen == len(data):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step, in_step = step + 1, min(b * k, len(data) - seen)
            if step == stop_at:
                states = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")
                torch.save({"step": step, **{name: part.state_dict() for name, part in states.items()}}, path)
                return path


fit(checkpoint=fit(stop_at=2))
