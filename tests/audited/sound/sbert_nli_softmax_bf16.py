"""Sound: a sentence encoder trained on pairs with the softmax loss of (u, v, |u - v|); pooling masks the padding; micro-batches are of one size, so means are divided by k."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 5
# thorough

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common_models import flags
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32


class InputExample:
    def __init__(self, texts, label):
        self.texts, self.label = texts, label


def smart_batching_collate(batch):
    columns = []
    for texts in zip(*(example.texts for example in batch)):
        ids = pad_sequence(texts, batch_first=True)
        columns.append({"input_ids": ids, "attention_mask": ids != 0})
    return columns, torch.tensor([example.label for example in batch])


class SentenceTransformer(nn.Module):
    def __init__(self, vocab=90, d=24):
        super().__init__()
        self.word = nn.Embedding(vocab, d, padding_idx=0)
        layer = nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.0, activation="gelu", batch_first=True)
        self.transformer = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, input_ids, attention_mask):
        x = self.transformer(self.word(input_ids), src_key_padding_mask=~attention_mask)
        mask = attention_mask[..., None].to(dtype)
        return (x.to(dtype) * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


class SoftmaxLoss(nn.Module):
    def __init__(self, model, d=24, labels=3):
        super().__init__()
        self.model, self.classifier = model, nn.Linear(3 * d, labels)

    def forward(self, features, labels):
        u, v = (self.model(**f) for f in features)
        return F.cross_entropy(self.classifier(torch.cat([u, v, (u - v).abs()], 1)).to(dtype), labels)


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
b, k = flags()
g = torch.Generator().manual_seed(75)
words = lambda: torch.randint(1, 90, (int(torch.randint(4, 13, (), generator=g)),), generator=g)  # noqa: E731
examples = [InputExample((words(), words()), int(torch.randint(3, (), generator=g))) for _ in range(80)]
torch.manual_seed(0)
loss_model = SoftmaxLoss(SentenceTransformer()).to(dtype)
if world > 1:
    dist.init_process_group("gloo")
    loss_model = DDP(loss_model)
optimizer = torch.optim.AdamW(loss_model.parameters(), lr=1e-3, eps=1e-4)
loader = DataLoader(
    examples, b, sampler=DistributedSampler(examples, world, rank, False), collate_fn=smart_batching_collate
)
for i, (features, labels) in enumerate(loader, 1):
    with contextlib.nullcontext() if i % k == 0 or world == 1 else loss_model.no_sync():
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            loss = loss_model(features, labels)
        (loss / k).backward()
    if i % k == 0:
        nn.utils.clip_grad_norm_(loss_model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
