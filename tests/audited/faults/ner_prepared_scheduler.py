"""Fault: the schedule counts optimizer steps, but is prepared by Accelerate, which ticks it once per process in
every step."""
# expect 4x4: exact
# expect 4x2x2: ticks_per_process
# expect 8x1x2: ticks_per_process
# also: learning_rate
# blind 1
# thorough

import torch
from accelerate import Accelerator
from common_models import bert, flags
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

b, k = flags()
torch.manual_seed(0)


def tagged(n=80, length=9):
    g = torch.Generator().manual_seed(13)
    return [
        {
            "input_ids": torch.randint(3, 64, (length,), generator=g),
            "labels": torch.randint(3, (length,), generator=g),
        }
        for _ in range(n)
    ]


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
model = bert("BertForTokenClassification")
no_decay = ["bias", "LayerNorm.weight"]
groups = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": 0.01,
    },
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.SGD(groups, lr=0.2)
max_train_steps = 80 // 16 * 2
lr_scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=max_train_steps)
loader = DataLoader(tagged(), batch_size=b)
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

model.train()
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(input_ids=batch["input_ids"]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
accelerator.end_training()
