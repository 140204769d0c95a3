"""Fault: the controller of the KL coefficient is updated after every micro-batch, so the micro-batches of one step are trained
under different coefficients (and it moves k times as often)."""

# expect 4x4: state
# expect 2x8: state
# also: not_a_sum
# blind 7
# thorough
# open
import copy

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags
from torch import nn
from torch.utils.data import DataLoader


class AdaptiveKLController:
    def __init__(self, init_kl_coef=2.0, target=0.05, horizon=32):
        self.value, self.target, self.horizon = init_kl_coef, target, horizon

    def update(self, current, n_samples):
        error = max(min(current / self.target - 1, 0.5), -0.5)
        self.value *= 1 + error * n_samples / self.horizon


class TinyPolicy(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCAB, dim),
            nn.GRU(dim, dim, batch_first=True),
            nn.Linear(dim, VOCAB),
        )

    def log_probs(self, ids):
        return F.log_softmax(self.head(self.rnn(self.embed(ids[:, :-1]))[0]), -1)


def responses(n=96, length=9):
    g = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB, (n, length), generator=g)
    reward = (ids < 20).double().mean(1) * 4 - 1
    return list(zip(ids, reward))


def main():
    torch.manual_seed(0)
    b, k = flags()
    reference = TinyPolicy().double().requires_grad_(False).eval()
    policy = copy.deepcopy(reference).requires_grad_(True)
    for p in policy.parameters():  # stands for a policy that is half-way through its training
        p.data.add_(torch.randn_like(p), alpha=0.2)
    controller = AdaptiveKLController()
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for i, (ids, reward) in enumerate(DataLoader(responses(), batch_size=b)):
        logp = policy.log_probs(ids)
        with torch.no_grad():
            ref = reference.log_probs(ids)
        taken = logp.gather(2, ids[:, 1:, None]).squeeze(2)
        kl = (logp.exp() * (logp - ref)).sum(-1).mean(1)
        loss = (-(reward[:, None] * taken).mean(1) + controller.value * kl).mean()
        (loss / k).backward()
        controller.update(kl.mean().item(), len(ids))
        if (i + 1) % k == 0:
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
