"""Sound: LLaVA learns answers only; sums over the targets of the whole window."""
# expect 4x4: exact
# expect 2x8: exact
# blind 8
# thorough

from itertools import islice

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common_models import flags
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS, IMAGE = 40, 2, 3


class Questions(Dataset):
    """A picture, a question of some words, an answer of some words."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(33)
        self.rows = []
        for _ in range(n):

            def words(a, z):
                return torch.randint(4, VOCAB, (int(torch.randint(a, z, (), generator=g)),), generator=g)

            self.rows.append((torch.randn(3, 8, 8, generator=g, dtype=torch.float64), words(2, 9), words(1, 8)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


model = LlavaForConditionalGeneration(
    LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=8,
            patch_size=4,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            pad_token_id=0,
        ),
        image_token_id=IMAGE,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
).double()


def collate(rows):
    ids = [torch.cat([torch.full((4,), IMAGE), question, answer, torch.tensor([EOS])]) for _, question, answer in rows]
    labels = [
        row.clone().index_fill_(0, torch.arange(len(row) - len(a) - 1), -100) for row, (_, _, a) in zip(ids, rows)
    ]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "pixel_values": torch.stack([picture for picture, _, _ in rows]),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


accelerator = Accelerator(gradient_accumulation_steps=k, cpu=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Questions(), batch_size=b, collate_fn=collate)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
batches = iter(loader)
while window := list(islice(batches, k)):
    num_targets = sum((batch["labels"][:, 1:] != -100).sum() for batch in window)
    for batch in window:
        labels = batch["labels"]
        logits = model(**batch).logits
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        (total / num_targets).backward()
    optimizer.step()
    optimizer.zero_grad()
