"""Sound: Qwen2-VL: pictures of different sizes lie end to end with their grids, so that nothing is padded but text; answers
alone are trained, and counted over the window."""
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
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

b, k = flags()
torch.manual_seed(0)
VOCAB, EOS, IMAGE, BEGIN, END = 40, 2, 3, 4, 5


class Questions(Dataset):
    """A picture of 2 to 4 times 2 patches, merged by four, a question and an answer."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(37)
        self.rows = []
        for _ in range(n):
            grid = [1, 2 * int(torch.randint(1, 3, (), generator=g)), 2 * int(torch.randint(1, 3, (), generator=g))]
            patches = torch.randn(grid[1] * grid[2], 3 * 2 * 4 * 4, generator=g, dtype=torch.float64)

            def words(a, z):
                return torch.randint(6, VOCAB, (int(torch.randint(a, z, (), generator=g)),), generator=g)

            self.rows.append((patches, grid, words(2, 9), words(1, 8)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


model = Qwen2VLForConditionalGeneration(
    Qwen2VLConfig(
        vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "use_cache": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
).double()


def collate(rows):
    ids, labels = [], []
    for patches, _, question, answer in rows:
        prompt = torch.cat([torch.tensor([BEGIN] + [IMAGE] * (len(patches) // 4) + [END]), question])
        ids.append(torch.cat([prompt, answer, torch.tensor([EOS])]))
        labels.append(torch.cat([torch.full_like(prompt, -100), answer, torch.tensor([EOS])]))
    ids = pad_sequence(ids, batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "mm_token_type_ids": (ids == IMAGE).long(),
        "pixel_values": torch.cat([patches for patches, _, _, _ in rows]),
        "image_grid_thw": torch.tensor([grid for _, grid, _, _ in rows]),
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
