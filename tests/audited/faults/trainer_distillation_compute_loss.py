"""Fault: a Trainer whose compute_loss returns the mean distillation loss of a micro-batch and ignores num_items_in_batch: as the model accepts it, Trainer does not divide by the accumulation steps either."""
# expect 4x4: ignores_num_items
# expect 2x8: ignores_num_items
# also: factor, not_summed
# blind 5
# thorough

import copy
import tempfile

import torch
import torch.nn.functional as F
from common_models import collate, flags, gpt2, sentences
from transformers import Trainer, TrainingArguments


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher_model, temperature=2.0, alpha=0.5, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher_model.eval()
        self.temperature, self.alpha = temperature, alpha

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        with torch.no_grad():
            teacher_logits = self.teacher(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        t = self.temperature
        soft = F.kl_div(
            F.log_softmax(outputs.logits / t, -1).flatten(0, 1),
            F.softmax(teacher_logits / t, -1).flatten(0, 1),
            reduction="batchmean",
        )
        loss = self.alpha * outputs.loss + (1 - self.alpha) * t**2 * soft
        return (loss, outputs) if return_outputs else loss


b, k = flags()
torch.manual_seed(0)
teacher = gpt2()
student = copy.deepcopy(teacher)
for p in student.parameters():
    p.data.add_(0.1 * torch.randn_like(p))
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=b,
    gradient_accumulation_steps=k,
    num_train_epochs=1,
    learning_rate=0.02,
    optim="sgd",
    lr_scheduler_type="linear",
    max_grad_norm=0.0,
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
    train_sampling_strategy="sequential",
    dataloader_pin_memory=False,
)
data = sentences(80, low=12, high=12)
DistillationTrainer(model=student, args=args, train_dataset=data, data_collator=collate, teacher_model=teacher).train()
