"""Data, a small model and collectives with a gradient, shared by the programs of several kinds of parallelism."""

import os

import torch
import torch.distributed as dist
from torch import nn

VOCAB, WIDTH, LENGTH = 32, 16, 8
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def start():
    """Join the other processes, if there are any."""
    torch.manual_seed(0)
    if world > 1:
        dist.init_process_group("gloo")


def texts(n=48, ragged=True):
    """Tokens [n, LENGTH], and the next ones [n, LENGTH], -100 behind an end of its own in each row."""
    g = torch.Generator().manual_seed(5)
    rows = torch.randint(VOCAB, (n, LENGTH + 1), generator=g)
    ends = torch.randint(3, LENGTH + 1, (n,), generator=g) if ragged else torch.full((n,), LENGTH)
    places = torch.arange(LENGTH)
    return rows[:, :-1].contiguous(), rows[:, 1:].masked_fill(places >= ends[:, None], -100)


def loss_sum(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


class Block(nn.Module):
    """A layer that tensor parallelism cuts: `up` by its rows, `down` by its columns."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_blocks=2):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SumInBackward(torch.autograd.Function):
    """The input as it is; its gradient is the sum of all processes'."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        if world > 1:
            dist.all_reduce(gradient)
        return gradient


class SumInForward(torch.autograd.Function):
    """The sum of all processes'; the gradient as it is."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class JoinSequence(torch.autograd.Function):
    """All processes' parts [b, length / N, d], side by side; of the gradient the sum, and of that the own part."""

    @staticmethod
    def forward(ctx, x):
        if world == 1:
            return x.view_as(x)
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        if world == 1:
            return gradient
        dist.all_reduce(gradient)
        return gradient.chunk(world, 1)[rank].contiguous()


class SplitSequence(torch.autograd.Function):
    """The sum of all processes' [b, length, d], and of that the own part; the parts of the gradient side by side."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if world == 1:
            return x
        dist.all_reduce(x)
        return x.chunk(world, 1)[rank].contiguous()

    @staticmethod
    def backward(ctx, gradient):
        if world == 1:
            return gradient
        parts = [torch.empty_like(gradient) for _ in range(world)]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts, 1)


class Gather(torch.autograd.Function):
    """What all processes of a group have, side by side; of the gradient the sum, and of that the own part."""

    @staticmethod
    def forward(ctx, x, group, size, place, dim):
        ctx.group, ctx.size, ctx.place, ctx.dim = group, size, place, dim
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.size, ctx.dim)[ctx.place].contiguous(), None, None, None, None


class AddUp(torch.autograd.Function):
    """The sum of all processes of a group; of the gradient the sum, too."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group, x = group, x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def cut_block(block):
    """Keep this process's part of a block's matrices: plain tensors, as Megatron has them."""
    rows = 2 * WIDTH // world
    mine = slice(rank * rows, (rank + 1) * rows)
    with torch.no_grad():
        block.up.weight, block.up.bias = (nn.Parameter(p[mine].clone()) for p in (block.up.weight, block.up.bias))
        block.down.weight = nn.Parameter(block.down.weight[:, mine].clone())


class Attention(nn.Module):
    """Causal attention whose keys and values come from all processes, each of which has a part of the sequence."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x, group=None, size=1, place=0):
        own = x.shape[1]
        y = self.norm(x)
        q, k, v = self.q(y), self.k(y), self.v(y)
        if size > 1:
            k, v = (Gather.apply(t.contiguous(), group, size, place, 1) for t in (k, v))
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        queries, keys = torch.arange(own) + place * own, torch.arange(k.shape[1])
        return x + scores.masked_fill(keys > queries[:, None], -torch.inf).softmax(-1) @ v


class LongModel(nn.Module):
    """A model of long sequences; positions are given, as a process may have a part of them."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.block = Attention(), Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()

    def forward(self, tokens, positions, group=None, size=1, place=0):
        x = self.words(tokens) + self.places(positions)
        x = self.block(self.attention(x, group, size, place))
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Experts of two matrices each, stacked; those of this process are [first, first + num)."""

    def __init__(self, num=4, hidden=12):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num, WIDTH, hidden) / 4)
        self.w2 = nn.Parameter(torch.randn(num, hidden, WIDTH) / 4)

    def forward(self, x, choice, first=0):
        """Outputs [tokens, d] of the experts here; 0 for tokens [tokens] whose expert is elsewhere."""
        out = torch.zeros_like(x)
        for number in range(len(self.w1)):
            mine = choice == first + number
            out = out + mine[:, None] * (torch.tanh(x @ self.w1[number]) @ self.w2[number])
        return out


class MixtureModel(nn.Module):
    """A router sends each token to one of four experts, and weighs what comes back."""

    def __init__(self):
        super().__init__()
        self.words, self.router = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts, self.head = Experts(), nn.Linear(WIDTH, VOCAB, bias=False)
        self.double()
