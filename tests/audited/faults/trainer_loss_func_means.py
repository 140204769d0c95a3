"""Fault: the compute_loss_func given to Trainer takes the mean of each micro-batch's words and leaves out the number of
items of the step that it is told."""
# expect 4x4: ignores_num_items
# expect 2x8: ignores_num_items
# thorough
# also: mean_of_means, logged_loss
# blind

import argparse
import tempfile

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import DistilBertConfig, DistilBertForTokenClassification, Trainer, TrainingArguments

WORDS, ENTITIES = 45, 4

parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
flags = parser.parse_args()


def entity_loss(outputs, labels, num_items_in_batch=None):
    loss = F.cross_entropy(outputs.logits.transpose(1, 2), labels, ignore_index=-100)
    return loss / flags.gradient_accumulation_steps  # Trainer does not divide what this function returns


def collate(sentences):
    ids, labels = [s["ids"] for s in sentences], [s["entities"] for s in sentences]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


gen = torch.Generator().manual_seed(23)
data = []
for length in torch.randint(3, 12, (80,), generator=gen).tolist():
    ids = torch.randint(1, WORDS, (length,), generator=gen)
    data.append({"ids": ids, "entities": torch.randint(ENTITIES, (length,), generator=gen)})

torch.manual_seed(0)
config = DistilBertConfig(
    vocab_size=WORDS,
    max_position_embeddings=16,
    n_layers=2,
    n_heads=2,
    dim=16,
    hidden_dim=32,
    dropout=0.0,
    attention_dropout=0.0,
    num_labels=ENTITIES,
    attn_implementation="eager",
)
training = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=flags.per_device_train_batch_size,
    gradient_accumulation_steps=flags.gradient_accumulation_steps,
    num_train_epochs=1,
    learning_rate=0.05,
    optim="sgd",
    lr_scheduler_type="constant",
    max_grad_norm=0.0,
    train_sampling_strategy="sequential",
    remove_unused_columns=False,
    dataloader_pin_memory=False,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    disable_tqdm=True,
)
model = DistilBertForTokenClassification(config).double()
Trainer(model, training, train_dataset=data, data_collator=collate, compute_loss_func=entity_loss).train()
