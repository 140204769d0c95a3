"""Fault: the masked positions are drawn for each padded micro-batch in collate from the global generator."""
# expect 4x4: other_inputs
# expect 2x8: other_inputs
# thorough
# also: random_collate
# blind

from argparse import ArgumentParser
from itertools import islice

import torch
from torch import nn
from torch.utils.data import DataLoader

PAD, MASK, VOCAB = 0, 1, 40


class Encoder(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, width), nn.Embedding(16, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.out(self.layer(x, src_key_padding_mask=ids == PAD))


def collate(sentences):
    ids = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD)
    chosen = (torch.rand(ids.shape) < 0.2) & (ids != PAD)
    return ids.masked_fill(chosen, MASK), ids.masked_fill(~chosen, -100)


parser = ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()

g = torch.Generator().manual_seed(5)
lengths = torch.randint(5, 15, (77,), generator=g).tolist()
corpus = [torch.randint(2, VOCAB, (n,), generator=g) for n in lengths]
torch.manual_seed(0)
model = Encoder().double()
opt = torch.optim.SGD(model.parameters(), lr=0.05)
batches = iter(DataLoader(corpus, batch_size=args.per_device_train_batch_size, collate_fn=collate))
while window := list(islice(batches, args.gradient_accumulation_steps)):
    masked = sum(int((labels != -100).sum()) for _, labels in window)
    for ids, labels in window:
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
        (loss / masked).backward()
    opt.step()
    opt.zero_grad()
