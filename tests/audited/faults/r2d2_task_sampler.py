"""Fault: the sampler draws the tasks of every micro-batch by a permutation of its own: a step of k micro-batches sees
other tasks than a step of one large batch."""

# expect 4x4: other_samples
# expect 8x2: other_samples
# blind 7
# thorough
import torch
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

torch.manual_seed(0)
b, k = flags()
META_STEPS = 4


class SinusoidTasks(Dataset):
    """Every item is a task: a support and a query set of one curve."""

    def __init__(self, n=50, shots=5, queries=10):
        g = torch.Generator().manual_seed(1)
        amplitude = torch.rand(n, 1, 1, generator=g, dtype=torch.float64) * 4 + 0.5
        phase = torch.rand(n, 1, 1, generator=g, dtype=torch.float64) * 3
        self.x = torch.rand(n, shots + queries, 1, generator=g, dtype=torch.float64) * 10 - 5
        self.y = amplitude * torch.sin(self.x - phase)
        self.shots = shots

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        s = self.shots
        return self.x[i, :s], self.y[i, :s], self.x[i, s:], self.y[i, s:]


class TaskSampler(Sampler):
    def __init__(self, num_tasks, tasks_per_batch, batches, seed=42):
        self.num_tasks, self.tasks_per_batch, self.batches = num_tasks, tasks_per_batch, batches
        self.generator = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            yield torch.randperm(self.num_tasks, generator=self.generator)[: self.tasks_per_batch].tolist()


class R2D2(nn.Module):
    """A ridge regression in closed form on learned features."""

    def __init__(self, dim=16):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, dim), nn.Tanh())
        self.log_lambda = nn.Parameter(torch.zeros(()))

    def forward(self, xs, ys, xq):
        z = self.features(xs)
        gram = z @ z.mT + self.log_lambda.exp() * torch.eye(z.size(1), dtype=z.dtype)
        return self.features(xq) @ (z.mT @ torch.linalg.solve(gram, ys))


tasks = SinusoidTasks()
model = R2D2().double()
meta_optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
loader = DataLoader(tasks, batch_sampler=TaskSampler(len(tasks), b, META_STEPS * k))
for i, (xs, ys, xq, yq) in enumerate(loader, 1):
    (nn.functional.mse_loss(model(xs, ys, xq), yq) / k).backward()
    if i % k == 0:
        meta_optimizer.step()
        meta_optimizer.zero_grad()
