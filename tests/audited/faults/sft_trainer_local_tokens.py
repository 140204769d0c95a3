"""Fault: average_tokens_across_devices=False: each process divides by its own completion tokens, and these
means are averaged."""
# expect 4x4: exact
# expect 4x2x2: mean_of_means
# expect 8x1x2: mean_of_means
# blind 1
# thorough

import torch
from common_models import VOCAB, flags, gpt2, train_with_trainer

b, k = flags()
torch.manual_seed(0)


def conversations(n):
    """A prompt (its labels are masked), then an answer: some are a word, some go on and on."""
    g = torch.Generator().manual_seed(7)
    rows = []
    for _ in range(n):
        prompt = torch.randint(3, VOCAB, (int(torch.randint(2, 8, (), generator=g)),), generator=g)
        answer = torch.randint(3, VOCAB, (int(torch.randint(1, 20, (), generator=g)),), generator=g)
        answer[-1] = 1  # <eos>
        rows.append(
            {
                "input_ids": torch.cat([prompt, answer]),
                "labels": torch.cat([torch.full_like(prompt, -100), answer]),
            }
        )
    return rows


train_with_trainer(gpt2(), conversations(80), b, k, average_tokens_across_devices=False)
