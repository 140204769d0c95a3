"""Sound: a Trainer with its own compute_loss: known labels are summed and divided by num_items_in_batch, which it counts over the window and all processes."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 4
# thorough

import tempfile

import torch
import torch.nn.functional as F
from common_models import flags
from torch import nn
from transformers import Trainer, TrainingArguments

UNKNOWN = -100


class Assays(nn.Module):
    """Twelve toxicity assays of a molecule, of which some have not been made."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(30, 32), nn.SELU(), nn.Linear(32, 32), nn.SELU())
        self.assays = nn.Linear(32, 12)

    def forward(self, fingerprint):
        return {"logits": self.assays(self.body(fingerprint))}


class MultilabelTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = True

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        known = labels != UNKNOWN
        loss = F.binary_cross_entropy_with_logits(outputs["logits"][known], labels[known].double(), reduction="sum")
        if num_items_in_batch is None:  # evaluation
            num_items_in_batch = known.sum()
        else:
            loss = loss * self.accelerator.num_processes
        loss = loss / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def molecules(n=80):
    g = torch.Generator().manual_seed(80)
    fingerprints = (torch.rand(n, 30, generator=g) < 0.4).double()
    labels = (torch.rand(n, 12, generator=g) < 0.3).long()
    labels[torch.rand(n, 12, generator=g) < torch.rand(n, 1, generator=g)] = UNKNOWN
    return [{"fingerprint": f, "labels": y} for f, y in zip(fingerprints, labels)]


torch.manual_seed(0)
b, k = flags()
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(), per_device_train_batch_size=b, gradient_accumulation_steps=k, num_train_epochs=2,
    learning_rate=0.02, optim="adamw_torch", adam_epsilon=1e-4, lr_scheduler_type="linear", warmup_steps=2, max_grad_norm=1.0,
    use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    train_sampling_strategy="sequential", dataloader_pin_memory=False,
)  # fmt: skip
MultilabelTrainer(model=Assays().double(), args=args, train_dataset=molecules()).train()
