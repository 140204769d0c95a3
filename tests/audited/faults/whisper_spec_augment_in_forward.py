"""Fault: Whisper masks spans of frames itself (apply_spec_augment): they are drawn at each forward, for the micro-batch."""
# expect 4x4: dropout
# expect 2x8: dropout
# also: other_inputs, state
# blind 8
# open
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import WhisperConfig, WhisperForConditionalGeneration

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS = 40, 2


class Utterances(Dataset):
    """Log-mel frames of an utterance, and its tokens."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(23)
        self.rows = []
        for _ in range(n):
            frames = int(torch.randint(20, 60, (), generator=g))
            words = int(torch.randint(2, 9, (), generator=g))
            mel = torch.randn(8, frames, generator=g, dtype=torch.float64)
            self.rows.append((mel, torch.randint(6, VOCAB, (words,), generator=g)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


model = WhisperForConditionalGeneration(
    WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=30,
        max_target_positions=20,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        apply_spec_augment=True,
        mask_time_prob=0.2,
        mask_time_length=3,
    )
).double()


def collate(rows):
    features = torch.stack([F.pad(mel, (0, 60 - mel.size(1)), value=-1.5) for mel, _ in rows])
    targets = [torch.cat([torch.tensor([3, 4]), words, torch.tensor([EOS])]) for _, words in rows]
    labels = pad_sequence(targets, batch_first=True, padding_value=-100)
    return {"input_features": features, "labels": labels}


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Utterances(), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(loader)
while window := list(islice(batches, k)):
    num_targets = sum((batch["labels"] != -100).sum() for batch in window)
    for batch in window:
        labels = batch["labels"]
        logits = model(**batch).logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (total / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
