"""Lightning as documented: a LightningModule with automatic optimization, accumulate_grad_batches=k."""

import lightning
import torch
from tasks import collate, flags, task
from torch.utils.data import DataLoader

name, b, k = flags()
model, samples = task(name)


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = lightning.Trainer(
    max_epochs=1,
    accumulate_grad_batches=k,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Module(), DataLoader(samples, batch_size=b, collate_fn=collate))
