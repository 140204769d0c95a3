"""Fault: warm restarts are set to the fraction epoch + i / iterations at every micro-batch, so that a step takes the rate of its last but one micro-batch, not that of its begin."""
# expect 4x4: learning_rate
# expect 2x8: learning_rate
# also: ticks_per_micro_step
# blind 5
# thorough

import torch
from common_models import flags, vectors
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts
from torch.utils.data import DataLoader


class CFG:
    seed = 2023
    epochs = 3
    lr, min_lr = 2e-2, 1e-4
    T_0, T_mult = 1, 2
    batch_size, accumulation = flags()


class MoAModel(nn.Module):
    def __init__(self, n_features, n_targets, hidden):
        super().__init__()
        self.dense1, self.norm, self.dense2 = (
            nn.Linear(n_features, hidden),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, hidden),
        )
        self.dense3 = nn.utils.parametrizations.weight_norm(nn.Linear(hidden, n_targets))

    def forward(self, x):
        x = nn.functional.leaky_relu(self.norm(self.dense1(x)))
        return self.dense3(nn.functional.leaky_relu(self.dense2(x)))


def train_fn(model, optimizer, scheduler, loss_fn, dataloader, epoch):
    model.train()
    final_loss, iters = 0.0, len(dataloader)
    for i, (inputs, targets) in enumerate(dataloader):
        loss = loss_fn(model(inputs), targets)
        (loss / CFG.accumulation).backward()
        if (i + 1) % CFG.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step(epoch + i / iters)
        final_loss += loss.item()
    return final_loss / iters


torch.manual_seed(CFG.seed)
train = vectors(80)
model = MoAModel(12, 5, 32).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, weight_decay=1e-3)
scheduler = CosineAnnealingWarmRestarts(optimizer, CFG.T_0, CFG.T_mult, eta_min=CFG.min_lr)
loader = DataLoader(train, batch_size=CFG.batch_size)
for epoch in range(CFG.epochs):
    loss = train_fn(model, optimizer, scheduler, nn.CrossEntropyLoss(), loader, epoch)
    print(f"EPOCH {epoch}: train_loss {loss:.4f} lr {optimizer.param_groups[0]['lr']:.5f}")
