"""Reference log-probabilities of pairs, computed by one of N processes; a fork server imports this."""

import os
from pathlib import Path
from types import SimpleNamespace

import torch
from accelerate import PartialState
from common import fresh_accelerator
from torch import nn

from samestep.step.log_probabilities import count_tokens, sequence_logps
from samestep.training.launch import create_accelerator

NUM_PAIRS, BATCH_SIZE = 23, 4


class Pairs:
    """Pairs of random sequences, laid end to end without padding; a prompt of one token."""

    max_length = 40

    def __init__(self, seed: int = 0, num_pairs: int = NUM_PAIRS):
        self.seed, self.num_pairs = seed, num_pairs

    def __len__(self) -> int:
        return self.num_pairs

    def draw(self, epoch: int, sample_id: int) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(1000 * self.seed + sample_id)
        lengths = torch.randint(2, 20, (2,), generator=generator).tolist()
        tokens = [torch.randint(50, (length,), generator=generator) for length in lengths]
        return SimpleNamespace(length=sum(lengths), tokens=tokens)

    def collate(self, samples: list) -> dict:
        sequences = [tokens for sample in samples for tokens in sample.tokens]
        nothing = torch.zeros(0, dtype=torch.int64)
        labels = [torch.full((len(tokens) - 1,), number) for number, tokens in enumerate(sequences)]
        lengths = [len(tokens) for tokens in sequences] or [0]  # no samples: one sequence without tokens
        return {
            "inputs": torch.cat([nothing, *(tokens[:-1] for tokens in sequences)]),
            "labels": torch.cat([nothing, *(tokens[1:] for tokens in sequences)]),
            "label_sequence": torch.cat([nothing, *labels]),
            "ends": torch.tensor([0, *lengths]).cumsum(0),
            "reference": torch.zeros(2 * len(samples)),
            "counts": torch.tensor([len(samples), len(sequences)]),
        }


class Bigrams(nn.Module):
    """Predicts a token from the one before it, through dropout; counts its forwards."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.dropout, self.num_forwards = nn.Dropout(0.5), 0
        self.to(dtype)

    def sequence_log_probabilities(self, inputs, labels, label_sequence, ends, reference):
        self.num_forwards += 1
        hidden = self.dropout(self.embedding(inputs))
        logps = sequence_logps(hidden, self.head.weight, labels, label_sequence, len(ends) - 1)
        assert count_tokens(label_sequence, len(ends) - 1).sum() == len(labels)
        return logps


def main(folder: str) -> None:
    """Compute the numbers twice, and end the process. `folder` takes what each process has, in RANK.pt."""
    from samestep.contrib.reference import reference_logps  # a room: others take `Pairs` without it

    fresh_accelerator()
    accelerator, model = create_accelerator(), Bigrams()
    results = [
        reference_logps(accelerator, model, Pairs(), 0, BATCH_SIZE, Path(folder) / "reference.safetensors")
        for _ in range(2)
    ]
    torch.save((results, model.num_forwards), Path(folder) / f"{accelerator.process_index}.pt")
    accelerator.wait_for_everyone()
    PartialState().destroy_process_group()
    os._exit(0)
