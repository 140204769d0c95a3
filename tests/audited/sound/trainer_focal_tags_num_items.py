"""Sound: a Trainer whose compute_loss sums a weighted focal loss over the tags of a micro-batch and divides by num_items_in_batch, the number of tags of the whole step."""
# expect 4x4: exact
# expect 2x8: exact
# blind 5
# thorough

import tempfile

import torch
import torch.nn.functional as F
from common_models import bert, collate, flags, sentences
from transformers import Trainer, TrainingArguments


class FocalTrainer(Trainer):
    def __init__(self, *args, gamma=2.0, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.gamma, self.class_weights = gamma, class_weights

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels").flatten()
        outputs = model(**inputs)
        logits = outputs.logits.flatten(0, 1)[labels != -100]
        labels = labels[labels != -100]
        ce = F.cross_entropy(logits, labels, reduction="none")
        weights = self.class_weights.to(logits)[labels]
        loss = (weights * (1 - torch.exp(-ce)) ** self.gamma * ce).sum()
        loss = loss / (len(labels) if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def tagged():
    data = sentences(77, low=4, high=15)
    for sample in data:
        sample["labels"] = sample["input_ids"] % 3
        sample["labels"][0] = -100  # [CLS]
    return data


b, k = flags()
torch.manual_seed(0)
model = bert("BertForTokenClassification")
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=b,
    gradient_accumulation_steps=k,
    num_train_epochs=1,
    learning_rate=2e-3,
    optim="adamw_torch",
    adam_epsilon=1e-5,
    warmup_steps=2,
    lr_scheduler_type="cosine",
    max_grad_norm=1.0,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
    train_sampling_strategy="sequential",
    dataloader_pin_memory=False,
)
weights = torch.tensor([0.3, 1.0, 1.5])
FocalTrainer(model=model, args=args, train_dataset=tagged(), data_collator=collate, class_weights=weights).train()
