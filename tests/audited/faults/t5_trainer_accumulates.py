"""Fault: Seq2SeqTrainer fine-tunes T5 with accumulation; the head takes num_items_in_batch and drops it."""
# expect 4x4: ignores_num_items
# expect 2x8: ignores_num_items
# also: mean_of_means, factor, logged_loss
# blind 8
# thorough

import tempfile

import torch
from common_models import flags
from media_models import t5, translations
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

b, k = flags()
torch.manual_seed(0)
EOS = 1


model = t5()


def collate(rows):
    source = pad_sequence([s for s, _ in rows], batch_first=True, padding_value=0)
    labels = pad_sequence([torch.cat([t, torch.tensor([EOS])]) for _, t in rows], batch_first=True, padding_value=-100)
    return {"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels}


arguments = Seq2SeqTrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=b,
    gradient_accumulation_steps=k,
    num_train_epochs=1,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
    dataloader_pin_memory=False,
    train_sampling_strategy="sequential",
)
Seq2SeqTrainer(model=model, args=arguments, train_dataset=translations(15), data_collator=collate).train()
