"""Every Python block of the documents runs as it stands, with what its page says is there."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from common import ROOT, fresh_accelerator
from printed import documents
from small_models import tiny_tokenizer
from torch import nn
from transformers import DataCollatorForLanguageModeling

import samestep

BLOCK = re.compile(r"^ *```python\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
IN_TEST_DOCS = {"docs/audit.md": 3, "docs/accumulation.md": 1, "docs/upstream.md": 4}
"""Documents whose blocks test_docs.py runs, or test_reproductions.py, and how many they are."""
BLOCKS = [
    (str(path.relative_to(ROOT)), number, code)
    for path in documents()
    for number, code in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
]


class Words(nn.Module):
    """Scores the words of a row."""

    def __init__(self):
        super().__init__()
        self.words, self.drop, self.head = nn.Embedding(25, 8), nn.Dropout(0.1), nn.Linear(8, 25)

    def forward(self, input_ids, attention_mask=None):
        return self.head(self.drop(self.words(input_ids)))


def loss_sum(model, batch):
    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def pictures() -> dict:
    """Make what a reader has who tells the classes of pixels apart: some are unknown, 255."""
    model = torch.nn.Conv2d(3, 3, 1)
    labels = torch.randint(3, (8, 6, 6)).masked_fill(torch.rand(8, 6, 6) < 0.1, 255)
    samples = [{"images": image, "labels": label} for image, label in zip(torch.rand(8, 3, 6, 6), labels, strict=True)]
    loader = torch.utils.data.DataLoader(samples, batch_size=2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": loader}


@pytest.fixture
def names(monkeypatch):
    """Make what a reader has: a model, samples of several lengths, a tokenizer, an optimizer; all that samestep exports."""
    fresh_accelerator()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    names = {name: getattr(samestep, name) for name in samestep.__all__} | {"F": F, "Accelerator": Accelerator}
    names |= {"DataCollatorForLanguageModeling": DataCollatorForLanguageModeling, "tokenizer": tokenizer}
    names |= {"model": model, "optimizer": optimizer, "accelerator": Accelerator(), "loss_sum": loss_sum}
    names |= {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)}
    names |= {"dataset": [{"input_ids": list(range(5, 8 + n % 9))} for n in range(70)], "collate": mask}
    names |= {"count": lambda batch: (batch["labels"] != -100).sum()}
    names |= {"sizes": {"global_batch_size": 32, "per_device_batch_size": 8}, "torch": torch, "nn": torch.nn, "k": 2}
    yield names
    fresh_accelerator()


@pytest.mark.parametrize(("document", "number", "code"), BLOCKS, ids=[f"{name}-{number}" for name, number, _ in BLOCKS])
def test_a_block_runs(document, number, code, names):
    if document in IN_TEST_DOCS:
        assert sum(name == document for name, *_ in BLOCKS) == IN_TEST_DOCS[document]
        return
    if 'batch["images"]' in code:
        names |= pictures()
    if "noise.set_samples" in code:
        names["noise"] = samestep.noise_by_sample(names["model"], seed=0)
    before = [weight.clone() for weight in names["model"].parameters()]
    exec(compile(code, f"{document}, block {number}", "exec"), names)
    if "(Recipe):" in code:
        rule = next(field for field in dataclasses.fields(names["Sounds"]) if field.name == "num_classes").metadata[
            "check"
        ]
        assert [rule.holds(number) for number in (1, 2, 1000, 1001)] == [False, True, True, False]
    elif "def loss(" in code:
        batch = names["collate"]([names["dataset"][0]]) | {"attention_mask": None, "ids": torch.tensor([0])}
        total, num_targets = names["loss"](names["model"], batch)
        assert total.ndim == num_targets.ndim == 0
    else:
        assert any(not torch.equal(*pair) for pair in zip(before, names["model"].parameters(), strict=True)), (
            "nothing was trained"
        )


def test_no_block_is_missed():
    found = {name for name, *_ in BLOCKS}
    assert {"README.md", "docs/audit.md", "docs/your-own-loop.md", "docs/accumulation.md"} <= found
