"""Train a model with an encoder and a decoder to write targets of sources: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/finetune_seq2seq.py --recipe seq2seq_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASK = "seq2seq_finetuning"
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASK, __doc__)  # help and mistakes in flags, before torch is imported

from samestep.data import seq2seq
from samestep.errors import exit_code
from samestep.models.seq2seq import Seq2SeqSums
from samestep.training import evaluation
from samestep.training.run import Run


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASK, description=__doc__)
    recipe, settings, accelerator = run.recipe, run.settings, run.accelerator
    metric, batch_size = settings.metric_for_best_model or "loss", settings.per_device_eval_batch_size

    # The model returns summed losses: means of micro-batches must not be added up
    train, held_out = run.load_data(seq2seq.build, settings.on_bad_row)
    model, optimizer = run.prepare(Seq2SeqSums, train)

    def evaluate() -> bool:
        """Evaluate the model, and tell whether training no longer improves it."""
        if held_out is None:
            return False
        if run.completed_steps not in run.log.evaluated_steps:
            whole, sources = evaluation.evaluate_by_source(accelerator, model, held_out, recipe, batch_size)
            run.log.add_evaluation(run.completed_steps, whole.totals, whole.scores, sources)
            if settings.eval_steps and evaluation.find_best(run.log.evaluations, metric)[0] == run.completed_steps:
                run.save_best(run.bare_model.model)
        num_worse = evaluation.find_best(run.log.evaluations, metric)[1]
        return settings.early_stopping_patience is not None and num_worse >= settings.early_stopping_patience

    # The loss of a step, n being the target tokens of the whole global batch (all processes, all micro-batches):
    #     L = (sum over all samples of their targets' cross-entropies) / n
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

    # The last checkpoint and evaluation; when the training is finished, what `from_pretrained` reads, loss.png, the model card
    trained_model, best, best_step = run.finish(evaluate), None, None
    if trained_model is not None:
        if settings.load_best_model_at_end and held_out is not None:
            best, best_step = run.output_dir / "best", evaluation.find_best(run.log.evaluations, metric)[0]
        run.publish(trained_model.save(run.output_dir, recipe, train, best), best_step)
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
