"""transformers' Trainer, without evaluation, checkpoints and progress bar.

Samplings: random; group_by_length, which brings texts of like length together; batch_rebalance, which sorts the samples of a
random step by length into micro-batches of like cost: it needs several, here four.
"""

import torch
import transformers
from clock import Clock
from workloads import Workload, run


class Stamping(transformers.Trainer):
    """Keeps the loss of the step, which Trainer itself only adds up.

    The heads of BERT ignore the number of targets that Trainer gives them, so that it sums the means of k micro-batches: its
    gradient and its log are k times what they should be. Here the mean is kept.
    """

    step_loss = 0.0

    def training_step(self, *arguments, **others) -> torch.Tensor:
        loss = super().training_step(*arguments, **others)
        self.step_loss += loss.item() / self.args.gradient_accumulation_steps
        return loss


class StepEnd(transformers.TrainerCallback):
    def __init__(self, clock: Clock):
        self.clock, self.trainer = clock, None

    def on_step_end(self, arguments, *_, **__):
        self.clock.step(self.trainer.step_loss, arguments.gradient_accumulation_steps)
        self.trainer.step_loss = 0.0


def train(work: Workload, precision: str, clock: Clock, num_steps: int, sampling: str = "random") -> None:
    recipe, k = work.recipe, 4 if sampling == "batch_rebalance" else 1
    arguments = transformers.TrainingArguments(
        output_dir="trainer",
        max_steps=num_steps,
        per_device_train_batch_size=recipe.global_batch_size // k,
        gradient_accumulation_steps=k,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm or 0,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=recipe.num_warmup_steps,
        bf16=precision == "bf16",
        use_cpu=True,
        train_sampling_strategy=sampling,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    end = StepEnd(clock)
    end.trainer = Stamping(
        work.model,
        arguments,
        data_collator=work.collate,
        train_dataset=work.dataset,
        optimizer_cls_and_kwargs=work.optimizer,
        callbacks=[end],
    )
    end.trainer.train()


if __name__ == "__main__":
    run(train)
