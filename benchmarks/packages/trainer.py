"""transformers' Trainer as documented: a causal model, with evaluation every two steps or without, or a BERT classifier."""

import sys

from setup import arguments, bert, llama, texts, tokenizer
from transformers import (
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

mode = sys.argv.pop(1)  # plain, evaluated or classifier
words = tokenizer()
data = [dict(words(text)) for text in texts(1)]
if mode == "classifier":
    data = [sample | {"labels": number % 3} for number, sample in enumerate(data)]
    model, collator = bert(BertForSequenceClassification, num_labels=3), DataCollatorWithPadding(words)
else:
    model, collator = llama(), DataCollatorForLanguageModeling(words, mlm=False)
evaluated = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 5} if mode == "evaluated" else {}
trainer = Trainer(
    model=model,
    args=TrainingArguments(**arguments(), **evaluated),
    train_dataset=data,
    eval_dataset=data[:20] if evaluated else None,
    data_collator=collator,
)
trainer.train()
