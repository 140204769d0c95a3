"""Exact: dropout by sample, a function of the sample's number and not of the random stream; 77 samples."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags, mlp, vectors

from samestep import exact_steps, noise_by_sample

torch.manual_seed(0)
b, k = flags()
accelerator = Accelerator(cpu=True)
model = mlp(p=0.3)
noise = noise_by_sample(model, seed=0)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
steps = exact_steps(
    accelerator,
    vectors(77),
    torch.utils.data.default_collate,
    global_batch_size=b * k * accelerator.num_processes,
    per_device_batch_size=b,
    num_epochs=1,
    targets=lambda batch: len(batch[1]),
    noise=noise,
)
for step in steps:
    for x, y in step:
        with accelerator.accumulate(model):
            accelerator.backward(step.loss(F.cross_entropy(model(x), y, reduction="sum")))
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
