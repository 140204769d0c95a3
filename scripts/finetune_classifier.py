"""Fine-tune BERT as a classifier of texts or pairs of texts: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/finetune_classifier.py --recipe finetune_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASK = "text_classification"
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASK, __doc__)  # help and mistakes in flags, before torch is imported

from safetensors.torch import load_file

from samestep.data import labelled_texts
from samestep.errors import exit_code
from samestep.models.text_classification import ClassificationSums
from samestep.training import evaluation, plots
from samestep.training.run import Run, report_more

USAGE = """\
from transformers import pipeline
classifier = pipeline("text-classification", model="OUTPUT_DIR")
classifier("a text", truncation=True)"""


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASK, description=__doc__)
    recipe, settings, accelerator = run.recipe, run.settings, run.accelerator
    metric, batch_size = settings.metric_for_best_model or recipe.metrics[0], settings.per_device_eval_batch_size
    evaluation.check_metrics(recipe.metrics, metric, settings.trust_metric_code)
    # The model returns the summed loss: means of micro-batches must not be added up
    train, held_out = run.load_data(labelled_texts.build, settings.on_bad_row)
    new_texts = None
    if settings.predict_file:
        new_texts = labelled_texts.from_files(settings.predict_file, recipe, train, settings.on_bad_row)
        report_more(run, new_texts)
    model, optimizer = run.prepare(ClassificationSums, train)

    def evaluate() -> bool:
        """Evaluate the model, and tell whether training no longer improves it."""
        if held_out is None:
            return False
        if run.completed_steps not in run.log.evaluated_steps:
            sums, logits = evaluation.evaluate_logits(accelerator, model, held_out, recipe.seed, batch_size)
            scores = evaluation.judge(accelerator, recipe.metrics, logits, held_out, settings.trust_metric_code)
            run.log.add_evaluation(run.completed_steps, sums, scores)
            if settings.eval_steps and evaluation.find_best(run.log.evaluations, metric)[0] == run.completed_steps:
                run.save_best(run.bare_model.bert)
        num_worse = evaluation.find_best(run.log.evaluations, metric)[1]
        return settings.early_stopping_patience is not None and num_worse >= settings.early_stopping_patience

    # The loss of a step, n being the samples of the whole global batch (all processes, all micro-batches):
    #     L = (sum over all samples of s) / n
    for step in run.steps(train):
        if run.evaluates_before(step) and evaluate():
            run.has_stopped_early = True
            break
        # `step` has its learning rate, noise and n; when memory runs out, it comes again in smaller micro-batches
        with step:
            for batch in step.micro_batches:
                with accelerator.accumulate(model):
                    sums, _ = model(**batch)
                    loss = (run.loss_weights * sums / step.num_targets).sum()
                    # Accelerate divides by the number of micro-batches, DDP by the number of processes: undo both
                    accelerator.backward(loss * step.loss_scale)
                    step.add_to_log(sums)
                    if accelerator.sync_gradients:
                        step.clip_grad_norm_(recipe.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()

    # The last checkpoint and evaluation; when the training is finished, the model, its predictions of new texts, the model card
    trained_model, best_step = run.finish(evaluate), None
    if trained_model is not None:
        if settings.load_best_model_at_end and held_out is not None:
            best_step = evaluation.find_best(run.log.evaluations, metric)[0]
            trained_model.bert.load_state_dict(load_file(run.output_dir / "best" / "model.safetensors"))
        trained_model.bert.save_pretrained(run.output_dir)
        train.tokenizer.save_pretrained(run.output_dir)
        if held_out is not None:
            logits = evaluation.classify(trained_model, held_out, batch_size)
            held_out.write(run.output_dir / "held_out.csv", logits, is_judged=True)
            if train.classes is not None:
                counts = evaluation.count_confusions(held_out, logits)
                plots.draw_confusion(counts, train.classes).savefig(run.output_dir / "confusion.png")
        if new_texts is not None:
            logits = evaluation.classify(trained_model, new_texts, batch_size)
            new_texts.write(run.output_dir / "predictions.csv", logits)
        run.publish(USAGE.replace('"a text"', train.example), best_step)
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
