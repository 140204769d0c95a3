"""Fault: Pictures have one to four tiles, padded with empty ones to the most of the micro-batch; the model gets the mask of
tiles and does not use it."""
# expect 4x4: padding
# expect 2x8: padding
# blind 8
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from common_models import flags
from media_models import Pictures
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS, START = 40, 2, 1


class Captioner(nn.Module):
    """Patches of all tiles are read together; the caption attends to them."""

    def __init__(self, dim=16):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, stride=4)
        self.tower = nn.TransformerEncoderLayer(dim, 2, 24, dropout=0.0, batch_first=True)
        self.words, self.places = nn.Embedding(VOCAB, dim), nn.Embedding(20, dim)
        self.decoder = nn.TransformerDecoderLayer(dim, 2, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tiles, tile_mask, words):
        patches = self.patches(tiles.flatten(0, 1)).flatten(2).transpose(1, 2)
        patches = patches.reshape(len(tiles), -1, patches.size(-1))
        hidden = None
        seen = self.tower(patches)
        mask = nn.Transformer.generate_square_subsequent_mask(words.size(1), dtype=seen.dtype)
        target = self.words(words) + self.places.weight[: words.size(1)]
        return self.head(self.decoder(target, seen, tgt_mask=mask, memory_key_padding_mask=hidden))


def collate(rows):
    most = max(len(tiles) for tiles, _ in rows)
    tiles = torch.stack([F.pad(tiles, (0, 0, 0, 0, 0, 0, 0, most - len(tiles))) for tiles, _ in rows])
    tile_mask = torch.tensor([[number < len(tiles) for number in range(most)] for tiles, _ in rows])
    given = pad_sequence([torch.cat([torch.tensor([START]), words]) for _, words in rows], batch_first=True)
    wanted = pad_sequence(
        [torch.cat([words, torch.tensor([EOS])]) for _, words in rows], batch_first=True, padding_value=-100
    )
    return tiles, tile_mask, given, wanted


model = Captioner().double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
batches = iter(DataLoader(Pictures(34), batch_size=b, collate_fn=collate))
while window := list(islice(batches, k)):
    num_targets = sum((batch[-1] != -100).sum() for batch in window)
    for tiles, tile_mask, given, labels in window:
        logits = model(tiles, tile_mask, given)
        (F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
