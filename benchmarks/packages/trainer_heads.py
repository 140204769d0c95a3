"""transformers' Trainer as its examples use it, beside trainer.py: one task of each kind, which heads.py makes."""

import sys

from heads import build
from setup import arguments
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

mode = sys.argv.pop(1)  # a key of heads.TASKS
model, data, collator = build(mode)
is_seq2seq = mode in ("t5", "bart", "whisper")
config, kind = (Seq2SeqTrainingArguments, Seq2SeqTrainer) if is_seq2seq else (TrainingArguments, Trainer)
trainer = kind(
    model=model,
    args=config(**arguments(), remove_unused_columns=False),
    train_dataset=data,
    data_collator=collator,
)
trainer.train()
