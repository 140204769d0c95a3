"""Losses of whole steps with micro-batches of any size, on the processes that forked.Server starts; see test_whole_batch.

Everything is in float64. The samples are ragged, a step has `NUM_SAMPLES` of them, so that 3 processes get uneven parts.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from samestep import exact_steps, noise_by_sample
from samestep.contrib.whole_batch import balance, contrastive
from samestep.contrib.whole_batch.quantities import WholeBatch

NUM_SAMPLES, VOCAB, SIZE, NUM_STEPS = 10, 40, 12, 3
GEN = torch.Generator().manual_seed(0)
TEXTS = [
    [torch.randint(1, VOCAB, (2 + (3 * number + 2 * part) % 6,), generator=GEN) for part in range(4)]
    for number in range(NUM_SAMPLES)
]
IMAGES = [
    (torch.randn(3, 4, 4, generator=GEN, dtype=torch.float64), torch.randint(-1, 3, (4, 4), generator=GEN) % 4)
    for _ in range(NUM_SAMPLES)
]


class Encoder(nn.Module):
    """Embeds texts: mean of its words' vectors, and two layers. Its temperature and bias are learned."""

    def __init__(self, p: float = 0.0):
        super().__init__()
        self.words = nn.Embedding(VOCAB, SIZE, padding_idx=0)
        self.inner, self.drop, self.outer = nn.Linear(SIZE, SIZE), nn.Dropout(p), nn.Linear(SIZE, 8)
        self.scale, self.bias = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, ids):
        mask = (ids != 0)[..., None]
        mean = (self.words(ids) * mask).sum(-2) / mask.sum(-2)
        return F.normalize(self.outer(self.drop(torch.tanh(self.inner(mean)))), dim=-1)


class Experts(nn.Module):
    """Two layers of a router over 4 experts, which are matrices, and a head; returns what each token's router says, too."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, SIZE, padding_idx=0)
        self.routers = nn.ModuleList(nn.Linear(SIZE, 4) for _ in range(2))
        self.experts = nn.ParameterList(nn.Parameter(torch.randn(4, SIZE, SIZE) / 3) for _ in range(2))
        self.head = nn.Linear(SIZE, VOCAB)

    def forward(self, ids):
        x, all_logits = self.words(ids), []
        for router, experts in zip(self.routers, self.experts, strict=True):
            logits = router(x)
            weights, chosen = logits.softmax(-1).topk(2)
            x = x + (torch.einsum("...d,...kdf->...kf", x, experts[chosen]) * weights[..., None]).sum(-2)
            all_logits.append(logits.flatten(0, -2))
        return self.head(x), tuple(all_logits)


def pad(texts):
    return pad_sequence(texts, batch_first=True)


def collate_texts(samples):
    queries, documents, *negatives = zip(*samples, strict=True)
    hard = pad([text for pair in zip(*negatives, strict=True) for text in pair]).view(len(samples), 2, -1)
    return {"queries": pad(queries), "documents": pad(documents), "negatives": hard}


def collate_images(samples):
    pixels, labels = zip(*samples, strict=True)
    labels = torch.stack(labels)
    return {"pixels": torch.stack(pixels), "labels": labels.where(labels < 3, -100)}


def embed(model, batch):
    return model(batch["queries"]), model(batch["documents"])


def embed_three(model, batch):
    return *embed(model, batch), model(batch["negatives"])


def embed_guided(model, batch):
    """Add rows of a guide, which needs no weights here: the words themselves, counted."""
    guides = [
        F.normalize(F.one_hot(batch[name], VOCAB).sum(1)[:, 1:].double(), dim=-1) for name in ("queries", "documents")
    ]
    return *embed(model, batch), *guides


def count_routes(model, batch):
    ids = batch["queries"]
    return balance.sum_routing(model(ids)[1], 2, ids != 0)


def count_overlap(model, batch):
    return balance.sum_overlap(model(batch["pixels"]), batch["labels"])


def segmenter():
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 3, 1))


def symmetric(model):
    return lambda q, d: contrastive.info_nce(q, d, scale=model.scale.exp(), is_symmetric=True, block=4)


def sigmoid(model):
    return lambda q, d: contrastive.siglip(q, d, scale=model.scale.exp(), bias=model.bias, block=3)


CASES = {
    "info_nce": (Encoder, embed, lambda model: lambda q, d: contrastive.info_nce(q, d, scale=5.0)),
    "negatives": (
        Encoder,
        embed_three,
        lambda model: lambda q, d, h: contrastive.info_nce(q, d, h, scale=5.0, block=3),
    ),
    "symmetric": (Encoder, embed, symmetric),
    "siglip": (Encoder, embed, sigmoid),
    "gist": (Encoder, embed_guided, lambda model: lambda *rows: contrastive.gist(*rows, scale=5.0, margin=0.3)),
    "matryoshka": (Encoder, embed, lambda model: contrastive.matryoshka(contrastive.info_nce, (8, 4), (1.0, 0.5))),
    "dropout": (lambda: Encoder(0.3), embed, symmetric),
    "experts": (Experts, count_routes, lambda model: balance.expert_balance),
    "experts by layer": (
        Experts,
        count_routes,
        lambda model: lambda *sums: balance.expert_balance(*sums, is_by_layer=True),
    ),
    "dice": (segmenter, count_overlap, lambda model: balance.dice),
}
"""Name -> model, quantities, (bare model) -> loss."""
LEARNED = {"symmetric": ("scale",), "dropout": ("scale",), "siglip": ("scale", "bias")}
SUMS = ("experts", "experts by layer", "dice")


def build(name):
    torch.manual_seed(0)
    return CASES[name][0]().double()


def train(name: str, b: int) -> dict[str, torch.Tensor]:
    """Take a few steps; gradients of each [steps, n], losses that the log has, losses that `look` returned."""
    accelerator = Accelerator(cpu=True)
    bare = build(name)
    noise = noise_by_sample(bare, seed=0) if name == "dropout" else None
    # a parameter that no step needs would make DistributedDataParallel wait for it
    for key, parameter in bare.named_parameters():
        parameter.requires_grad_(key not in ("scale", "bias") or key in LEARNED.get(name, ()))
        if name.startswith("experts") and key.startswith(("head", "experts.1")):
            parameter.requires_grad_(False)
    model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
    _, compute, make_loss = CASES[name]
    parameters = [getattr(bare, key) for key in LEARNED.get(name, ())]
    whole = WholeBatch(model, compute, make_loss(bare), is_sum=name in SUMS, parameters=parameters)
    data, collate = (IMAGES, collate_images) if name == "dice" else (TEXTS, collate_texts)
    steps = exact_steps(
        accelerator,
        data,
        collate,
        global_batch_size=NUM_SAMPLES,
        per_device_batch_size=b,
        targets=lambda batch: len(next(iter(batch.values()))),
        num_steps=NUM_STEPS,
        noise=noise,
    )
    gradients, logged, looked = [], [], []
    for step in steps:
        looked.append(whole.look(step))
        for batch in step:
            with accelerator.accumulate(model):
                accelerator.backward(whole.loss(step, compute(model, batch)))
                if accelerator.sync_gradients:
                    gradients.append(torch.cat([p.grad.flatten() for p in bare.parameters() if p.requires_grad]))
                optimizer.step()
                optimizer.zero_grad()
        logged.append(step.mean_loss())
    return {"gradients": torch.stack(gradients), "logged": torch.stack(logged), "looked": torch.stack(looked)}


def main(folder: str) -> None:
    """Train all cases in micro-batches of 2 on this process's part."""
    torch.set_num_threads(1)
    found = {name: train(name, 2) for name in CASES}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    os._exit(0)
