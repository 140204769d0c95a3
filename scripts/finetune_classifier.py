"""Fine-tune BERT as a classifier of texts or pairs of texts: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/finetune_classifier.py --recipe finetune_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys
from pathlib import Path

gc.disable()  # while modules are imported: 1 s of 4 less; `launch.create_accelerator` turns it on

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from samestep.cut import layout as plan
from samestep.cut.order import Order
from samestep.data import labelled_texts
from samestep.data.steps import Cell, Steps, to_device
from samestep.errors import exit_code
from samestep.models import pretrained as models
from samestep.models.attention import bert_wanted, unpad, ways
from samestep.recipe import run_settings as run
from samestep.recipe.recipe import TextClassification
from samestep.step import accumulate, losses, optim
from samestep.training import checkpoint, kernels, launch, plots, rehearsal, report
from samestep.training.evaluation import best_of, check_metrics, classify, confusion, judge, outputs
from samestep.training.recovery import Recovery

# ---------------------------------------------------------------------------------------------------------------------
# The model: BertForSequenceClassification that returns the sum over a cell


class ClassificationSums(nn.Module):
    def __init__(self, bert: BertForSequenceClassification):
        super().__init__()
        self.bert = unpad(bert)

    def forward(self, labels, **tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Summed loss [1] and, when evaluating, logits [samples, classes]. See LabelledTexts.collate."""
        first = bert_wanted(self.bert.bert, **tokens)[: len(labels)]
        logits = self.bert.classifier(self.bert.dropout(self.bert.bert.pooler(first[:, None])))
        of = losses.squared_error_sum if labels.is_floating_point() else losses.cross_entropy_sum
        return of(logits, labels)[None], None if self.training else logits


def build_model(recipe: TextClassification, classes: list[str] | None) -> BertForSequenceClassification:
    """The recipe's architecture with one output per class, or a single one; random weights or those of model_name_or_path."""
    of_labels = {"num_labels": 1, "problem_type": "regression"}
    if classes is not None:
        of_labels = {"id2label": dict(enumerate(classes)), "label2id": {name: n for n, name in enumerate(classes)}}
    config = BertConfig(**recipe.architecture, **of_labels)
    heads = ("classifier.", "cls.", "bert.pooler.")  # ours; what pretraining leaves; what not all of it has
    model = models.initial_model(BertForSequenceClassification, config, recipe.model_name_or_path, heads)
    model.bert.embeddings.requires_grad_(not recipe.freeze_embeddings)
    return model


USAGE = """\
from transformers import pipeline
classifier = pipeline("text-classification", model="OUTPUT_DIR")
classifier("a text")"""


def main(argv: list[str]) -> int:
    # -----------------------------------------------------------------------------------------------------------------
    # What: the recipe. How here: the layout

    recipe, settings = run.parse(argv, "text_classification", __doc__)
    output_dir, judged_by = Path(settings.output_dir), settings.metric_for_best_model or recipe.metrics[0]
    check_metrics(recipe.metrics, judged_by, settings.trust_metric_code)
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
        train, held_out = labelled_texts.build(recipe, settings.preprocessing_num_workers)
        unlabelled = labelled_texts.of_files(settings.predict_file, recipe, train) if settings.predict_file else None
    order = Order(len(train), recipe.global_batch_size, recipe.seed, recipe.epoch_end)
    num_steps = recipe.max_train_steps or order.num_steps(recipe.num_train_epochs)
    schedule = recipe.schedule(num_steps, float(order.steps_per_epoch))
    steps = Steps(
        train,
        order,
        layout,
        process_index=accelerator.process_index,
        max_tokens=settings.per_device_train_tokens,
    )

    torch.manual_seed(recipe.seed)
    bert = build_model(recipe, train.classes)
    if settings.gradient_checkpointing:
        bert.gradient_checkpointing_enable()
    bare = model = ClassificationSums(bert).to(getattr(torch, settings.dtype))
    of_bert = ways(bert, accelerator.device, accelerator.mixed_precision, settings)
    kernels.choose(accelerator, recipe, settings, model, train, of_bert)
    if settings.torch_compile:
        for layer in model.bert.bert.encoder.layer:
            layer.compile(dynamic=True)  # once for cells of all sizes
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

    def evaluate_at(step: int) -> bool:
        """Whether training has stopped to make the model better."""
        if held_out is None:
            return False
        if step not in log.evaluated:
            sums, logits = outputs(accelerator, model, held_out, recipe.seed, settings.per_device_eval_batch_size)
            log.evaluation(step, sums, judge(accelerator, recipe.metrics, logits, held_out, settings.trust_metric_code))
            if settings.eval_steps and best_of(log.evaluations, judged_by)[0] == step:
                report.save_best(accelerator, output_dir, bert, train.tokenizer)
        num_worse = best_of(log.evaluations, judged_by)[1]
        return settings.early_stopping_patience is not None and num_worse >= settings.early_stopping_patience

    rehearsal.fit(recovery, forward_backward)
    accelerator.print(
        f"{train}; {'random weights' if recipe.model_name_or_path is None else f'from {recipe.model_name_or_path}'}; "
        f"{steps.layout}; on {accelerator.device}, mixed precision {accelerator.mixed_precision}; steps {start.step} to "
        f"{last_step} of {num_steps}"
    )

    # -----------------------------------------------------------------------------------------------------------------
    # Go

    model.train()
    step, is_over = start.step, False
    for data in steps.stream(step, last_step, settings.dataloader_num_workers, accelerator.device):
        if step == 0 or (settings.eval_steps and step % settings.eval_steps == 0):
            is_over = evaluate_at(step)
        if is_over:
            break
        learning_rate = schedule(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * group["lr_scale"]
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
    is_done, best_step = is_over or step == num_steps, None
    if is_done and accelerator.is_main_process:
        if settings.load_best_model_at_end and held_out is not None:
            best_step = best_of(log.evaluations, judged_by)[0]
            bert.load_state_dict(load_file(output_dir / "best" / "model.safetensors"))
        bert.save_pretrained(output_dir)
        train.tokenizer.save_pretrained(output_dir)
        if held_out is not None and train.classes is not None:
            counts = confusion(held_out, classify(bare, held_out, settings.per_device_eval_batch_size))
            (output_dir / "confusion.png").write_bytes(plots.plot_confusion(counts, train.classes))
        if unlabelled is not None:
            logits = classify(bare, unlabelled, settings.per_device_eval_batch_size)
            unlabelled.write(output_dir / "predictions.csv", logits)
        report.finish(log, USAGE, best_step)
    status = recovery.exit_code(is_done)
    model, optimizer = accelerator.free_memory(model, optimizer)  # before the process group: see `Recovery.exit_code`
    accelerator.end_training()
    return status


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
