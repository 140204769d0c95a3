"""Pretrain GPT-2, or another causal language model, on text: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/pretrain_gpt2.py --recipe gpt2_small_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASKS = ("gpt2_pretraining", "causal_lm_pretraining")
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASKS, __doc__)  # help and mistakes in flags, before torch is imported

from samestep.data import token_blocks
from samestep.errors import exit_code
from samestep.models.pretrained import continue_text
from samestep.training.run import Run

USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("OUTPUT_DIR")
tokenizer = AutoTokenizer.from_pretrained("OUTPUT_DIR")
beginning = tokenizer("The beginning of a text", return_tensors="pt").input_ids
tokenizer.decode(model.generate(beginning, max_new_tokens=50)[0])"""


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASKS, description=__doc__)
    recipe, settings, accelerator = run.recipe, run.settings, run.accelerator

    # The recipe's model returns the summed loss: means of micro-batches must not be added up
    train, held_out = run.load_data(token_blocks.build, run.settings.on_bad_row)
    model, optimizer = run.prepare(recipe.parts.find("model"), train)
    whole_step = run.whole_step()  # losses that need the whole step, if the recipe asks for one

    # The loss of a step, n being the predicted tokens of the whole global batch (all processes, all micro-batches):
    #     L = (sum over all samples of s) / n
    for step in run.steps(train):
        if run.evaluates_before(step):
            run.evaluate(model, held_out)
        # `step` has its learning rate, noise and n; when memory runs out, it comes again in smaller micro-batches
        with step:
            step.find_statistics(whole_step)
            for batch in step.micro_batches:
                with accelerator.accumulate(model):
                    sums, _ = model(**batch)
                    loss = (run.loss_weights * sums / step.num_targets).sum() + whole_step.correction()
                    # Accelerate divides by the number of micro-batches, DDP by the number of processes: undo both
                    accelerator.backward(loss * step.loss_scale)
                    step.add_to_log(sums)
                    if accelerator.sync_gradients:
                        step.clip_grad_norm_(recipe.max_grad_norm)
                    optimizer.step()
                    optimizer.zero_grad()
            whole_step.finish()

    # The last checkpoint and evaluation; when the training is finished, what `from_pretrained` reads, loss.png, the model card
    trained_model = run.finish(lambda: run.evaluate(model, held_out))
    if trained_model is not None:
        trained_model.causal_lm.save_pretrained(run.output_dir)
        train.tokenizer.save_pretrained(run.output_dir)
        run.publish(USAGE)
        if settings.sample_prompt is not None:
            prompt, length = settings.sample_prompt, settings.sample_length
            with trained_model.own_attention() as language_model:
                text = continue_text(language_model, train.tokenizer, prompt, length, recipe.seed)
            (run.output_dir / "sample.txt").write_text(text + "\n", encoding="utf-8")
            print(f"Sample (sample.txt):\n{text}")
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
