"""Sound: Trainer with a compute_loss_func: class weights multiply each sample, and the sum is divided by
num_items_in_batch, not by the weights."""
# expect 4x4: exact
# expect 2x8: exact
# expect 4x2x2: exact
# expect 8x1x2: exact
# blind 1
# thorough

import tempfile

import torch
import torch.nn.functional as F
from common_models import bert, collate, flags, sentences
from transformers import Trainer, TrainerCallback, TrainingArguments

b, k = flags()
torch.manual_seed(0)
data = sentences(80, kind="cls")
frequency = torch.bincount(torch.stack([s["labels"] for s in data]), minlength=3).double()
class_weights = frequency.sum() / (3 * frequency) * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)


def weighted_loss(outputs, labels, num_items_in_batch=None):
    total = F.cross_entropy(outputs.logits, labels, weight=class_weights, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


class MaxNorm(TrainerCallback):
    """Keeps the rows of the classifier short, after each step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            weight = getattr(model, "module", model).classifier.weight
            weight.copy_(torch.renorm(weight, p=2, dim=0, maxnorm=0.08))


args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=b,
    gradient_accumulation_steps=k,
    num_train_epochs=1,
    learning_rate=0.1,
    optim="sgd",
    lr_scheduler_type="linear",
    warmup_steps=2,
    max_grad_norm=0.5,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
    train_sampling_strategy="sequential",
    dataloader_pin_memory=False,
)
Trainer(
    model=bert("BertForSequenceClassification"),
    args=args,
    train_dataset=data,
    data_collator=collate,
    compute_loss_func=weighted_loss,
    callbacks=[MaxNorm()],
).train()
