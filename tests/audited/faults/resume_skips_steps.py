"""Fault: going on after a checkpoint, the loader skips as many micro-batches as there were optimizer steps, so
that samples come again."""
# expect 4x4: duplicated
# expect 2x8: duplicated
# also: other_samples, other_inputs, resume_samples, dropped
# blind 1
# thorough

import io
from itertools import islice

import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

b, k = flags()
MAX_STEPS, PREEMPTED_AT = 5, 2


class FactorizationMachine(nn.Module):
    def __init__(self, fields=4, values=20, dim=6):
        super().__init__()
        self.register_buffer("offsets", torch.arange(fields) * values)
        self.bias = nn.Embedding(fields * values, 1)
        self.factors = nn.Embedding(fields * values, dim)
        nn.init.normal_(self.factors.weight, std=0.3)

    def forward(self, features):
        features = features + self.offsets
        v = self.factors(features)
        pairs = 0.5 * (v.sum(1).pow(2) - v.pow(2).sum(1)).sum(-1)
        return self.bias(features).sum((1, 2)) + pairs


def clicks(n=80):
    g = torch.Generator().manual_seed(31)
    return TensorDataset(torch.randint(20, (n, 4), generator=g), (torch.rand(n, generator=g) < 0.4).double())


def build():
    torch.manual_seed(0)
    model = FactorizationMachine().double()
    return model, torch.optim.Adagrad(model.parameters(), lr=0.1)


def train(until, checkpoint=None):
    model, optimizer = build()
    global_step = 0
    if checkpoint is not None:
        saved = torch.load(io.BytesIO(checkpoint))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        global_step = saved["step"]
    batches = islice(DataLoader(clicks(), batch_size=b), global_step, None)
    for micro, (features, clicked) in enumerate(batches, 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(features), clicked)
        (loss / k).backward()
        if micro % k == 0:
            optimizer.step()
            optimizer.zero_grad()
            global_step += 1
            if global_step == until:
                break
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": global_step}, file)
    return file.getvalue()


train(MAX_STEPS, train(PREEMPTED_AT))
