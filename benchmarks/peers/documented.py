"""Accelerate's documented loop on the rows of `chat_trainers.prepare`: FOLDER OUTPUT B K, launched on any number of processes.

The guide's "finished code" (benchmarks/loops/accelerate_documented.py) with clipping and a prepared scheduler, as Accelerate's
examples have them. Nothing is changed but that it writes, for each micro-batch, its loss and of how many tokens that is the
mean.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import chat_trainers
import datasets
import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from samestep.models import causal_lm
from samestep.recipe.catalog import load
from samestep.step.losses import IGNORED


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pad token ids with 0 and labels with -100."""
    ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(each) for each in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    }


def main(folder: str, output: str, b: str, k: str) -> None:
    recipe, rows = load(f"{folder}/recipe.yaml"), datasets.load_from_disk(f"{folder}/{chat_trainers.ROWS}")
    optimizer_class, settings = chat_trainers.make_optimizer(recipe)
    accelerator = Accelerator(gradient_accumulation_steps=int(k), cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/{chat_trainers.TOKENIZER}")
    torch.manual_seed(recipe.seed)
    model = causal_lm.build_model(recipe, SimpleNamespace(tokenizer=tokenizer)).train()  # the weights of the script
    optimizer = optimizer_class(model.parameters(), **settings | {"lr": 1.0})  # which the schedule multiplies
    schedule = recipe.schedule(recipe.max_train_steps, len(rows) / recipe.global_batch_size)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
    loader = DataLoader(rows, batch_size=int(b), collate_fn=collate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append([loss.item(), int((batch["labels"][:, 1:] != IGNORED).sum())])
    Path(f"{output}-{accelerator.process_index}.json").write_text(json.dumps(losses))
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
