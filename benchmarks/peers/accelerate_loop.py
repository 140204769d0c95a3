"""The loop of Accelerate's documentation, one batch per step."""

from accelerate import Accelerator
from clock import Clock
from torch.utils.data import DataLoader
from transformers import get_constant_schedule_with_warmup
from workloads import Workload, run


def train(work: Workload, precision: str, clock: Clock, num_steps: int) -> None:
    recipe, (optimizer_class, settings) = work.recipe, work.optimizer
    accelerator = Accelerator(mixed_precision=precision, cpu=True)
    optimizer = optimizer_class(work.model.parameters(), **settings)
    scheduler = get_constant_schedule_with_warmup(optimizer, recipe.num_warmup_steps)
    loader = DataLoader(work.dataset, recipe.global_batch_size, shuffle=True, drop_last=True, collate_fn=work.collate)
    model, optimizer, loader, scheduler = accelerator.prepare(work.model, optimizer, loader, scheduler)
    step = 0
    while step < num_steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if recipe.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            clock.step(loss.item())
            step += 1
            if step == num_steps:
                break


if __name__ == "__main__":
    run(train)
