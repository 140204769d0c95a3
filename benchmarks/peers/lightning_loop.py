"""Lightning's Trainer with its defaults, without logger, checkpoints and progress bar."""

import lightning
import torch
from clock import Clock
from torch.utils.data import DataLoader
from transformers import get_constant_schedule_with_warmup
from workloads import Workload, run


class Module(lightning.LightningModule):
    def __init__(self, work: Workload, precision: str):
        super().__init__()
        self.model, self.work, self.precision = work.model, work, precision

    def training_step(self, batch: dict[str, torch.Tensor], _) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self):
        recipe, (optimizer_class, settings) = self.work.recipe, self.work.optimizer
        # In mixed precision Lightning refuses to clip the gradients of a fused optimizer.
        settings["fused"] = self.precision == "no" or not recipe.max_grad_norm
        optimizer = optimizer_class(self.parameters(), **settings)
        scheduler = get_constant_schedule_with_warmup(optimizer, recipe.num_warmup_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StepEnd(lightning.Callback):
    def __init__(self, clock: Clock):
        self.clock = clock

    def on_train_batch_end(self, trainer, module, outputs, *_):
        self.clock.step(outputs["loss"].item())


def train(work: Workload, precision: str, clock: Clock, num_steps: int) -> None:
    loader = DataLoader(
        work.dataset, work.recipe.global_batch_size, shuffle=True, drop_last=True, collate_fn=work.collate
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if precision == "bf16" else "32-true",
        max_steps=num_steps,
        max_epochs=-1,
        gradient_clip_val=work.recipe.max_grad_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[StepEnd(clock)],
    )
    trainer.fit(Module(work, precision), loader)


if __name__ == "__main__":
    run(train)
