"""transformers' Trainer on BERT's two terms: masked words, and whether the second sentence follows the first."""

import argparse
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForPreTraining, Trainer, TrainingArguments


def draw(number):
    n = 4 + 7 * number % 11
    ids = torch.arange(n) * n % 48 + 2
    is_masked = torch.arange(n) % (2 + number % 3) == 1
    labels = ids.where(is_masked, -100)
    return {"input_ids": ids.where(~is_masked, 1), "labels": labels, "next_sentence_label": torch.tensor(number % 2)}


def collate(samples):
    padding = {"input_ids": 0, "labels": -100}
    batch = {
        name: pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)
        for name, value in padding.items()
    }
    batch["next_sentence_label"] = torch.stack([sample["next_sentence_label"] for sample in samples])
    return batch | {"attention_mask": (batch["input_ids"] != 0).long()}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
parser.add_argument("--max_steps", type=int, default=-1)
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    num_train_epochs=1,
    learning_rate=0.01,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
    use_cpu=True,
    train_sampling_strategy="sequential",
    **vars(parser.parse_args()),
)
torch.manual_seed(0)
sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
model = BertForPreTraining(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
pairs = [draw(number) for number in range(77)]
trainer = Trainer(model, arguments, data_collator=collate, train_dataset=pairs)
trainer.train()
