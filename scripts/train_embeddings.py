"""Train embeddings of texts by comparing all samples of a step: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_embeddings.py --recipe embeddings_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASK = "embedding_training"
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASK, __doc__)  # help and mistakes in flags, before torch is imported

from samestep.data import text_pairs
from samestep.errors import exit_code
from samestep.models.text_embeddings import EmbeddingSums
from samestep.training import evaluation
from samestep.training.run import Run


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASK, description=__doc__)
    recipe, settings, accelerator = run.recipe, run.settings, run.accelerator
    metric = settings.metric_for_best_model or "ndcg_at_10"

    # The model returns rows, the embeddings of a micro-batch: a loss that compares samples needs those of the whole step
    train, held_out = run.load_data(text_pairs.build, settings.on_bad_row)
    model, optimizer = run.prepare(EmbeddingSums, train)
    whole_batch = run.whole_batch()

    def evaluate() -> bool:
        """Evaluate the model, and tell whether training no longer improves it."""
        if held_out is None:
            return False
        if run.completed_steps not in run.log.evaluated_steps:
            run.log.add_evaluation(run.completed_steps, *whole_batch.evaluate(held_out))
            if settings.eval_steps and evaluation.find_best(run.log.evaluations, metric)[0] == run.completed_steps:
                run.save_best(run.bare_model.model)
        num_worse = evaluation.find_best(run.log.evaluations, metric)[1]
        return settings.early_stopping_patience is not None and num_worse >= settings.early_stopping_patience

    # The loss of a step, z being the rows of the whole global batch (all processes, all micro-batches): L(z), and by the chain
    # rule its gradient is a sum over micro-batches,
    #     dL/dtheta = sum_q <dL/dz_q, dz_q/dtheta>
    for step in run.steps(train):
        if run.evaluates_before(step) and evaluate():
            run.has_stopped_early = True
            break
        # `step` has its learning rate and noise; when memory runs out, it comes again in smaller micro-batches
        with step:
            whole_batch.look(step)  # all z_q without gradient, one exchange; from here on L and dL/dz are known
            for batch in step.micro_batches:
                with accelerator.accumulate(model):
                    _, rows = model(**batch)
                    # <dL/dz_q, z_q>, times k N: Accelerate divides by the number of micro-batches, DDP by that of processes
                    accelerator.backward(whole_batch.loss(step, rows))
                    if accelerator.sync_gradients:
                        step.clip_grad_norm_(recipe.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()

    # The last checkpoint and evaluation; when the training is finished, what sentence-transformers loads, the model card
    trained_model, best, best_step = run.finish(evaluate), None, None
    if trained_model is not None:
        if settings.load_best_model_at_end and held_out is not None:
            best, best_step = run.output_dir / "best", evaluation.find_best(run.log.evaluations, metric)[0]
        run.publish(trained_model.save(run.output_dir, recipe, train, best), best_step)
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
