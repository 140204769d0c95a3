"""transformers' Trainer as documented, with the samples in their order, neither clipping nor a schedule."""

import tempfile

from tasks import collate, flags, task
from transformers import Trainer, TrainingArguments

name, b, k = flags()
model, samples = task(name)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=b,
        gradient_accumulation_steps=k,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=0.01,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    Trainer(model=model, args=arguments, train_dataset=samples, data_collator=collate).train()
