"""transformers' Trainer as documented, and as its examples use it.

A causal model of ragged texts, with evaluation every two steps or without; of blocks of one length (run_clm); a masked model of
such blocks, whose masks the collator draws (run_mlm); a BERT classifier (run_glue).
"""

import sys

from setup import arguments, bert, blocks, llama, texts, tokenizer
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

mode = sys.argv.pop(1)  # plain, evaluated, blocks, masked or classifier
words = tokenizer()
data = blocks() if mode in ("blocks", "masked") else [dict(words(text)) for text in texts(1)]
if mode == "classifier":
    data = [sample | {"labels": number % 3} for number, sample in enumerate(data)]
    model, collator = bert(BertForSequenceClassification, num_labels=3), DataCollatorWithPadding(words)
elif mode == "masked":
    model, collator = bert(BertForMaskedLM), DataCollatorForLanguageModeling(words, mlm_probability=0.15)
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
trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint is not None)
