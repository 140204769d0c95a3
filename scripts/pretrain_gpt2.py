"""Pretrain GPT-2 (causal language modelling): one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/pretrain_gpt2.py --recipe gpt2_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys
from functools import partial
from pathlib import Path

gc.disable()  # while modules are imported: 1 s of 4 less; `launch.create_accelerator` turns it on

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from samestep.cut import layout as plan
from samestep.cut.order import Order
from samestep.data import token_blocks
from samestep.data.steps import Cell, Steps, to_device
from samestep.errors import exit_code
from samestep.models import pretrained as models
from samestep.recipe import run_settings as run
from samestep.recipe.recipe import Gpt2Pretraining
from samestep.step import accumulate, losses, optim
from samestep.training import checkpoint, kernels, launch, rehearsal, report
from samestep.training.evaluation import evaluate
from samestep.training.recovery import Recovery

# ---------------------------------------------------------------------------------------------------------------------
# The model: GPT2LMHeadModel that returns the sum over a cell, and never holds the logits of all its tokens


class PretrainingSums(nn.Module):
    _no_split_modules = ("GPT2Block",)  # where FSDP shards

    def __init__(self, gpt2: GPT2LMHeadModel):
        super().__init__()
        self.gpt2 = gpt2

    def forward(self, input_ids, position_ids, labels, label_index) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss and, when evaluating, correct predictions, both [1]. See TokenBlocks.collate."""
        hidden = models.gpt2_hidden(self.gpt2.transformer, input_ids, position_ids).flatten(0, 1)
        hidden = hidden if label_index is None else hidden[label_index]
        loss_sum, num_correct = losses.linear_cross_entropy(hidden, self.gpt2.lm_head.weight, labels)
        return loss_sum[None], num_correct[None]


def build_model(recipe: Gpt2Pretraining, end_of_text: int) -> GPT2LMHeadModel:
    """The recipe's architecture, with random weights or those of model_name_or_path."""
    config = GPT2Config(**recipe.architecture, bos_token_id=end_of_text, eos_token_id=end_of_text)
    return models.initial_model(GPT2LMHeadModel, config, recipe.model_name_or_path)


USAGE = """\
from transformers import AutoTokenizer, GPT2LMHeadModel
model = GPT2LMHeadModel.from_pretrained("OUTPUT_DIR")
tokenizer = AutoTokenizer.from_pretrained("OUTPUT_DIR")"""


def main(argv: list[str]) -> int:
    # -----------------------------------------------------------------------------------------------------------------
    # What: the recipe. How here: the layout

    recipe, settings = run.parse(argv, "gpt2_pretraining", __doc__)
    output_dir = Path(settings.output_dir)
    accelerator = launch.create_accelerator(**settings.for_accelerator)
    layout = plan.solve_layout(
        num_processes=accelerator.num_processes,
        global_batch_size=recipe.global_batch_size,
        per_device_train_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
    )
    report.open_output_dir(accelerator, settings)
    found, start = checkpoint.find(accelerator, settings.resume_from_checkpoint, output_dir, recipe)

    # -----------------------------------------------------------------------------------------------------------------
    # Things: data, model, optimizer, learning rate

    with accelerator.local_main_process_first():
        train, held_out = token_blocks.build(recipe, settings.preprocessing_num_workers)
    order = Order(len(train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
    num_steps = recipe.max_train_steps or order.num_steps(recipe.num_train_epochs)
    schedule = recipe.schedule(num_steps, float(order.steps_per_epoch))
    steps = Steps(
        train,
        order,
        layout,
        process_index=accelerator.process_index,
        max_tokens=settings.per_device_train_tokens,
        same_num_cells=launch.is_sharded(accelerator),
    )

    torch.manual_seed(recipe.seed)
    build = partial(build_model, recipe, train.end_of_text)
    model = PretrainingSums(build()).to(getattr(torch, settings.dtype))
    on = accelerator.device, accelerator.mixed_precision
    of_gpt2 = models.causal_ways(model.gpt2, *on, recipe.block_size, settings.attn_implementation)
    kernels.choose(accelerator, recipe, settings, model, train, of_gpt2)
    if settings.gradient_checkpointing:
        model.gpt2.gradient_checkpointing_enable()
    if settings.torch_compile:
        for block in model.gpt2.transformer.h:
            block.compile()
    optimizer = optim.of_recipe(model, recipe)
    model, optimizer = launch.prepare(accelerator, model, optimizer)
    parameters = list(model.parameters())
    weights = torch.tensor(list(recipe.loss_weights.values()), dtype=parameters[0].dtype, device=accelerator.device)

    # -----------------------------------------------------------------------------------------------------------------
    # Where we were, and where to stop

    if found is not None:
        checkpoint.load(accelerator, found, start, model, optimizer, train.fingerprints)
    last_step = min(num_steps, settings.stop_after_step or num_steps)
    saver = checkpoint.Saver(accelerator, recipe, model, optimizer, train.fingerprints, settings, start)
    log = report.RunLog(accelerator, recipe, settings, start, num_steps, saver)
    recovery = Recovery(accelerator, steps, model, optimizer, log)

    def forward_backward(cell: Cell, counts: torch.Tensor) -> torch.Tensor:
        """A micro-step: adds its part of the step's gradient, and returns its summed losses [terms]."""
        sums, _ = model(**to_device(cell, accelerator.device))
        loss = losses.weighted_loss(sums, counts, weights)
        accelerator.backward(loss * accumulate.loss_scale(accelerator))
        return sums.detach()

    def evaluate_at(step: int) -> None:
        if held_out is not None and step not in log.evaluated:
            batch_size = settings.per_device_eval_batch_size
            log.evaluation(step, evaluate(accelerator, model, held_out, recipe.seed, batch_size))

    rehearsal.fit(recovery, forward_backward)
    accelerator.print(
        f"{len(train)} samples of {train.num_documents} documents ({train.num_tokens} tokens); {steps.layout}; on "
        f"{accelerator.device}, mixed precision {accelerator.mixed_precision}; steps {start.step} to {last_step} of {num_steps}"
    )

    # -----------------------------------------------------------------------------------------------------------------
    # Go

    model.train()
    step = start.step
    for data in steps.stream(step, last_step, settings.dataloader_num_workers, accelerator.device):
        if step == 0 or (settings.eval_steps and step % settings.eval_steps == 0):
            evaluate_at(step)
        learning_rate = schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        for attempt in recovery.attempts(data):  # a second one, in smaller cells, if memory runs out
            with attempt:
                accumulate.seed_noise(accelerator, recipe.seed, step)
                for cell in accumulate.micro_steps(accelerator, attempt.data.cells):
                    with accelerator.accumulate(model):
                        attempt.sums.append(forward_backward(cell, attempt.counts))
                        if accelerator.sync_gradients:
                            attempt.gradient_is_complete()
                            grad_norm = accumulate.clip(accelerator, optimizer, parameters, recipe.max_grad_norm)
                            recovery.hold_back(grad_norm)
                        optimizer.step()
                        optimizer.zero_grad()
        log.step(attempt.data, attempt.sums, attempt.counts, grad_norm, learning_rate)
        step += 1
        if recovery.stopping:
            break
        if settings.checkpointing_steps and step % settings.checkpointing_steps == 0 and step < last_step:
            log.save(step)

    # -----------------------------------------------------------------------------------------------------------------
    # Done

    if step > start.step:
        log.save(step)
    if step == num_steps:
        evaluate_at(num_steps)
    log.close()
    trained = checkpoint.whole_model(accelerator, model, lambda: PretrainingSums(build()))
    if step == num_steps and accelerator.is_main_process:
        gpt2 = trained.gpt2
        gpt2.save_pretrained(output_dir)
        train.tokenizer.save_pretrained(output_dir)
        report.finish(log, USAGE)
        if settings.sample_prompt is not None:
            text = models.continue_text(
                gpt2, train.tokenizer, settings.sample_prompt, settings.sample_length, recipe.seed
            )
            (output_dir / "sample.txt").write_text(text + "\n", encoding="utf-8")
            print(f"Sample (sample.txt):\n{text}")
    status = recovery.exit_code(step == num_steps)
    model, optimizer = accelerator.free_memory(model, optimizer)  # before the process group: see `Recovery.exit_code`
    accelerator.end_training()
    return status


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
