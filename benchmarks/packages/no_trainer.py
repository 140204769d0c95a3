"""The loops of transformers' examples run_clm_no_trainer, run_mlm_no_trainer and run_glue_no_trainer, on Accelerate.

Left out: groups for weight decay, evaluation, tracking, the limit on steps. With --output_dir the first two save a checkpoint
after every step (checkpointing_steps=1), and resume as the examples do. seeded: the first with use_seedable_sampler=True.
"""

import math
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from setup import RATE, arguments, bert, blocks, llama, texts, tokenizer
from torch.utils.data import DataLoader
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    default_data_collator,
    get_scheduler,
)

mode = sys.argv.pop(1)  # clm, seeded, mlm or glue
flags, words = arguments(), tokenizer()
b, k = flags["per_device_train_batch_size"], flags["gradient_accumulation_steps"]
data = blocks()
if mode in ("clm", "seeded"):
    data = [sample | {"labels": sample["input_ids"]} for sample in data]
    model, collator = llama(), default_data_collator
elif mode == "mlm":
    model, collator = bert(BertForMaskedLM), DataCollatorForLanguageModeling(words, mlm_probability=0.15)
else:
    data = [dict(words(text)) | {"labels": number % 3} for number, text in enumerate(texts(1))]
    model, collator = bert(BertForSequenceClassification, num_labels=3), DataCollatorWithPadding(words)

# run_glue_no_trainer divides by k itself, and leaves the Accelerator at k = 1.
config = DataLoaderConfiguration(use_seedable_sampler=mode == "seeded")
accelerator = Accelerator(cpu=True, dataloader_config=config, gradient_accumulation_steps=1 if mode == "glue" else k)
loader = DataLoader(data, shuffle=True, collate_fn=collator, batch_size=b)
optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
num_steps = math.ceil(len(loader) / k)
scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_steps)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

num_taken, output_dir = 0, Path(flags["output_dir"])
if flags["resume_from_checkpoint"]:
    num_taken = max(int(path.name.removeprefix("step_")) for path in output_dir.glob("step_*"))
    accelerator.load_state(output_dir / f"step_{num_taken}")
    loader = accelerator.skip_first_batches(loader, num_taken * k)

model.train()
for step, batch in enumerate(loader):
    if mode == "glue":
        accelerator.backward(model(**batch).loss / k)
        if step % k == 0 or step == len(loader) - 1:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        continue
    with accelerator.accumulate(model):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        num_taken += 1
        if flags["save_strategy"] == "steps":
            accelerator.save_state(output_dir / f"step_{num_taken}")
