"""transformers' Trainer as documented, and as its examples use it.

A causal model of ragged texts; of blocks of one length (run_clm); a masked model of
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

mode = sys.argv.pop(1)  # plain, blocks, masked or classifier
words = tokenizer()
data = blocks() if mode in ("blocks", "masked") else [dict(words(text)) for text in texts(1)]
if mode == "classifier":
    data = [sample | {"labels": number % 3} for number, sample in enumerate(data)]
    model, collator = bert(BertForSequenceClassification, num_labels=3), DataCollatorWithPadding(words)
elif mode == "masked":
    model, collator = bert(BertForMaskedLM), DataCollatorForLanguageModeling(words, mlm_probability=0.15)
else:
    model, collator = llama(), DataCollatorForLanguageModeling(words, mlm=False)
trainer = Trainer(
    model=model,
    args=TrainingArguments(**arguments()),
    train_dataset=data,
    data_collator=collator,
)
trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint is not None)
