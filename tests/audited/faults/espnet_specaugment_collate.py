"""Fault: SpecAugment draws in the collate function: first the widths of all recordings of a micro-batch, then their starts, so that a recording's mask depends on the cut."""
# expect 4x4: random_collate
# expect 2x8: random_collate
# also: other_inputs
# blind 5
# thorough

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Commands(Dataset):
    def __init__(self, n=80, frames=30, mels=8):
        g = torch.Generator().manual_seed(55)
        self.speech = torch.randn(n, frames, mels, generator=g, dtype=torch.float64)
        self.label = torch.randint(6, (n,), generator=g)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return f"utt{i:04d}", {"speech": self.speech[i], "label": self.label[i]}


class CommonCollateFn:
    def __init__(self, time_mask_width=8, freq_mask_width=3, seed=0):
        self.widths = {1: time_mask_width, 2: freq_mask_width}
        self.generator = torch.Generator().manual_seed(seed)

    def mask_along_axis(self, spec, axis):
        n, size = len(spec), spec.shape[axis]
        width = torch.randint(0, self.widths[axis] + 1, (n, 1), generator=self.generator)
        start = torch.randint(0, size - self.widths[axis], (n, 1), generator=self.generator)
        place = torch.arange(size)[None]
        masked = (place >= start) & (place < start + width)
        return spec.masked_fill(masked.unsqueeze(2 if axis == 1 else 1), 0.0)

    def __call__(self, batch):
        uttids, samples = zip(*batch)
        speech = torch.stack([s["speech"] for s in samples])
        speech = self.mask_along_axis(self.mask_along_axis(speech, 1), 2)
        return uttids, {"speech": speech, "label": torch.stack([s["label"] for s in samples])}


class ESPnetCommandModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.LSTM(8, 20, batch_first=True), nn.Linear(20, 6)

    def forward(self, speech, label):
        loss = F.cross_entropy(self.decoder(self.encoder(speech)[0].mean(1)), label)
        return loss, {"loss": loss.detach()}, len(label)


class Trainer:
    @staticmethod
    def train_one_epoch(model, iterator, optimizer, accum_grad, grad_clip=5.0):
        for iiter, (_, batch) in enumerate(iterator, 1):
            loss, _, weight = model(**batch)
            loss /= accum_grad
            loss.backward()
            if iiter % accum_grad == 0:
                nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
                optimizer.step()
                optimizer.zero_grad()


b, k = flags()
torch.manual_seed(0)
model = ESPnetCommandModel().double()
loader = DataLoader(Commands(), batch_size=b, collate_fn=CommonCollateFn())
Trainer.train_one_epoch(model, loader, torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-5), k)
