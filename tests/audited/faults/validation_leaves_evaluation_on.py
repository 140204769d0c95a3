"""Fault: after the validation, which comes every 8 batches, the model is not put back into training: its auxiliary head is silent from then on."""
# expect 4x4: state
# expect 2x8: state
# also: parameters, num_steps
# thorough

import torch
import torch.nn.functional as F
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(12, 16), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return (self.head(h), self.aux(h)) if self.training else (self.head(h),)


model = Model().double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for number, (x, y) in enumerate(DataLoader(vectors(160), batch_size=b), 1):
    output = model(x)
    terms = [F.cross_entropy(logits, y) for logits in output]
    loss = terms[0] + 0.3 * sum(terms[1:])
    (loss / k).backward()
    if number % k == 0:
        optimizer.step()
        optimizer.zero_grad()
    if number % 8 == 0:
        model.eval()
        with torch.no_grad():
            model(torch.stack([v for v, _ in vectors(8)]))
