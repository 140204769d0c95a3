"""Fault: --scale_lr multiplies the rate by the micro-batch size and the number of processes, but not by the number of
accumulated micro-batches: the same global batch is trained at another rate."""

# expect 4x4: learning_rate
# expect 8x1x2: exact
# expect 4x2x2: learning_rate
# blind 7
# thorough
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags, vectors
from torch import nn
from torch.utils.data import DataLoader


class Concept(nn.Module):
    """A frozen text tower, and a new pseudo-word with a projection, learnt (textual inversion)."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(12, 16).requires_grad_(False)
        self.word = nn.Parameter(torch.zeros(16))
        self.project = nn.Linear(16, 5)

    def forward(self, x):
        return self.project(torch.tanh(self.frozen(x)) * (1 + self.word))


def main(learning_rate=2e-3, scale_lr=True):
    b, k = flags()
    accelerator = Accelerator(gradient_accumulation_steps=k)
    torch.manual_seed(0)
    model = Concept().double()
    if scale_lr:
        learning_rate = learning_rate * b * accelerator.num_processes
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=learning_rate, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(vectors(80), batch_size=b))
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(trained, 10.0)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
