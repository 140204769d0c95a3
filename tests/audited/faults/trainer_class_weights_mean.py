"""Fault: CrossEntropyLoss(weight=...) divides by the weights of the labels of its micro-batch, and these means
are averaged."""
# expect 4x4: mean_of_means
# expect 2x8: mean_of_means
# expect 4x2x2: mean_of_means
# also: not_summed, mixed_loss
# blind 1
# thorough

import tempfile

import torch
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from transformers import Trainer, TrainingArguments

b, k = flags()
torch.manual_seed(0)


class IntentClassifier(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.score = nn.Linear(16, 1)
        self.out = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, classes))

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids)
        weights = self.score(x).squeeze(-1).masked_fill(attention_mask == 0, float("-inf")).softmax(-1)
        return {"logits": self.out((weights.unsqueeze(-1) * x).sum(1))}


class WeightedTrainer(Trainer):
    def __init__(self, *args, class_weights, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_fct = nn.CrossEntropyLoss(weight=class_weights)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.loss_fct(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss


args = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=b,
    gradient_accumulation_steps=k,
    num_train_epochs=1,
    learning_rate=0.3,
    optim="sgd",
    lr_scheduler_type="constant",
    use_cpu=True,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    remove_unused_columns=False,
    train_sampling_strategy="sequential",
    dataloader_pin_memory=False,
)
trainer = WeightedTrainer(
    model=IntentClassifier().double(),
    args=args,
    train_dataset=sentences(80, kind="cls"),
    data_collator=collate,
    class_weights=torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64),
)
trainer.train()
