"""Sound: a GradScaler used in the documented order: the scale (which doubles at every step here) changes between windows
only, and the sum is unscaled once, clipped and stepped at the end of the window."""

# expect 4x4: exact
# expect 8x2: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
b, k = flags()
MELS, FRAMES = 8, 24

g = torch.Generator().manual_seed(1)
lengths = torch.randint(8, FRAMES + 1, (96,), generator=g)
valid = torch.arange(FRAMES)[None] < lengths[:, None]
mels = torch.randn(96, FRAMES, MELS, generator=g, dtype=torch.float64) * valid[..., None]
wake = (mels.sum((1, 2)) > 0).double()


class CRNN(nn.Module):
    """Convolution over valid frames, GRU up to the last valid one, attention over valid ones."""

    def __init__(self, dim=12):
        super().__init__()
        self.conv = nn.Conv1d(MELS, dim, 5, padding=2)
        self.gru = nn.GRU(dim, dim, batch_first=True)
        self.score, self.out = nn.Linear(dim, 1), nn.Linear(dim, 1)

    def forward(self, mels, lengths):
        valid = torch.arange(mels.size(1))[None] < lengths[:, None]
        h = torch.relu(self.conv(mels.mT)).mT * valid[..., None]
        packed = nn.utils.rnn.pack_padded_sequence(h, lengths, batch_first=True, enforce_sorted=False)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=mels.size(1))
        weight = self.score(h).masked_fill(~valid[..., None], float("-inf")).softmax(1)
        return self.out((weight * h).sum(1)).squeeze(1)


model = CRNN().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=96 // (b * k) + 1)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_factor=2.0, growth_interval=1)
for i, (x, n, y) in enumerate(DataLoader(TensorDataset(mels, lengths, wake), batch_size=b), 1):
    loss = F.binary_cross_entropy_with_logits(model(x, n), y, pos_weight=torch.tensor(2.0)) / k
    scaler.scale(loss).backward()
    if i % k == 0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scheduler.step()
