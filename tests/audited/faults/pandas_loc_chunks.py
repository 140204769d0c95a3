"""Fault: a logged batch of a bandit is cut into micro-batches by DataFrame.loc, whose end is inclusive: the first row of each
micro-batch but the first is also the last row of the one before, and counts twice."""

# expect 4x4: duplicated
# expect 2x8: duplicated
# expect 8x2: duplicated
# also: batch_size
# blind 7
# thorough
# open
import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn

FEATURES = [f"f{i}" for i in range(6)]


def click_log(n=96):
    rng = np.random.default_rng(7)
    frame = pd.DataFrame(rng.normal(size=(n, 6)), columns=FEATURES)
    frame["arm"] = rng.integers(0, 4, n)
    frame["propensity"] = rng.uniform(0.15, 0.6, n)
    frame["click"] = (rng.random(n) < 0.5).astype(float)
    return frame


def ips_terms(policy, rows, cap=4.0):
    """Negative inverse-propensity estimate of each logged decision."""
    x = torch.from_numpy(rows[FEATURES].to_numpy())
    arm = torch.from_numpy(rows["arm"].to_numpy())
    prob = F.softmax(policy(x), -1).gather(1, arm[:, None]).squeeze(1)
    ratio = prob / torch.from_numpy(rows["propensity"].to_numpy())
    return -ratio.clamp(max=cap) * torch.from_numpy(rows["click"].to_numpy())


def fit(policy, log, micro_batch, accumulate, lr=0.2):
    batch_size = micro_batch * accumulate
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    log = log.sample(frac=1.0, random_state=11).reset_index(drop=True)
    for start in range(0, len(log), batch_size):
        batch = log.iloc[start : start + batch_size].reset_index(drop=True)
        optimizer.zero_grad()
        for j in range(accumulate):
            rows = batch.loc[j * micro_batch : (j + 1) * micro_batch]
            (ips_terms(policy, rows).sum() / batch_size).backward()
        optimizer.step()


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    fit(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).double(), click_log(), b, k)
