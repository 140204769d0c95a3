"""Pretrain BERT (masked tokens and next sentences) or ModernBERT (masked tokens): one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/pretrain_bert.py --recipe bert_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASKS = ("bert_pretraining", "modernbert_pretraining")
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASKS, __doc__)  # help and mistakes in flags, before torch is imported

from samestep.data import sentence_pairs
from samestep.errors import exit_code
from samestep.training.run import Run

USAGE = """\
from transformers import AutoTokenizer, MODEL
model = MODEL.from_pretrained("OUTPUT_DIR")
tokenizer = AutoTokenizer.from_pretrained("OUTPUT_DIR")"""


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASKS, description=__doc__)
    recipe, accelerator = run.recipe, run.accelerator

    # The recipe's model returns summed losses, one per term: means of micro-batches must not be added up
    train, held_out = run.load_data(sentence_pairs.build, run.settings.on_bad_row)
    model, optimizer = run.prepare(recipe.parts.find("model"), train)

    # The loss of a step, n_j being the targets of term j in the whole global batch (all processes, all micro-batches):
    #     L = sum_j w_j * (sum over all samples of s_j) / n_j
    for step in run.steps(train):
        if run.evaluates_before(step):
            run.evaluate(model, held_out)
        # `step` has its learning rate, noise and n_j; when memory runs out, it comes again in smaller micro-batches
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
    trained_model = run.finish(lambda: run.evaluate(model, held_out))
    if trained_model is not None:
        trained_model.bert.save_pretrained(run.output_dir)
        train.tokenizer.save_pretrained(run.output_dir)
        run.publish(USAGE.replace("MODEL", type(trained_model.bert).__name__))
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
