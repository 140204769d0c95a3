"""Exact: a contrastive loss over the whole step by gradient caching: embeddings first, then their gradients in
chunks of b."""
# expect 4x4: exact
# expect 2x8: exact

import torch
import torch.nn.functional as F
from common_models import flags, mlp, vectors
from torch.utils.data import DataLoader

torch.manual_seed(0)
b, k = flags()
model = mlp()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for x, _ in DataLoader(vectors(80), batch_size=b * k):
    chunks = x.split(b)
    with torch.no_grad():
        embeddings = torch.cat([model(chunk) for chunk in chunks])
    embeddings.requires_grad_()
    scores = F.normalize(embeddings) @ F.normalize(embeddings.roll(1, 0)).T
    F.cross_entropy(scores, torch.arange(len(scores))).backward()
    for chunk, gradient in zip(chunks, embeddings.grad.split(b), strict=True):
        (model(chunk) * gradient).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
