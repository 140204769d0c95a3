"""Fault: the L1 penalty on the weights is added in full to the loss of every micro-batch, so it counts k times."""
# expect 4x4: penalty
# expect 2x8: penalty
# thorough
# blind

import argparse

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as bce

ap = argparse.ArgumentParser()
ap.add_argument("--per_device_train_batch_size", type=int, default=16)
ap.add_argument("--gradient_accumulation_steps", type=int, default=1)
ap.add_argument("--l1", type=float, default=0.01)
args = ap.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps

# sparse logistic regression with one hidden layer: 20 features, of which only three matter
gen = torch.Generator().manual_seed(17)
features = torch.randn(85, 20, generator=gen, dtype=torch.float64)
clicked = (features[:, 0] - features[:, 3] * features[:, 7] > 0).double()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 10), torch.nn.SiLU(), torch.nn.Linear(10, 1)).double()
sgd = torch.optim.SGD(model.parameters(), lr=0.05)
weights = [p for name, p in model.named_parameters() if name.endswith("weight")]

for epoch in range(2):
    total = 0.0
    for first in range(0, len(features), b * k):
        step_x, step_y = features[first : first + b * k], clicked[first : first + b * k]
        sgd.zero_grad()
        for x, y in zip(step_x.split(b), step_y.split(b), strict=True):
            data_loss = bce(model(x).squeeze(1), y, reduction="sum") / len(step_y)
            loss = data_loss + args.l1 * sum(w.abs().sum() for w in weights)
            loss.backward()
            total += data_loss.item() * len(step_y)
        sgd.step()
    print(f"epoch {epoch}: loss {total / len(features):.4f}")
