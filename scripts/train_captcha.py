"""Train a network that reads captchas: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_captcha.py --recipe captcha_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASK = "captcha_recognition"
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASK, __doc__)  # help and mistakes in flags, before torch is imported

from samestep.data import captchas
from samestep.errors import exit_code
from samestep.models.captcha_recognition import ReadingSums
from samestep.training.evaluation import predict
from samestep.training.plots import describe_counts, draw_predictions
from samestep.training.run import Run

USAGE = """\
from samestep.models.networks import CaptchaReader
reader = CaptchaReader.from_pretrained("OUTPUT_DIR").eval()
reader.read(images)  # uint8 [images, height, width, 3]"""


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASK, description=__doc__)
    recipe, accelerator = run.recipe, run.accelerator

    # The model returns summed losses, one per term: means of micro-batches must not be added up
    train, held_out = run.load_data(captchas.build)
    model, optimizer = run.prepare(ReadingSums, train)
    whole_step = run.whole_step()  # batch normalisation of whole steps, if the recipe asks for it

    # The loss of a step, n_j being the targets of term j in the whole global batch (all processes, all micro-batches):
    #     L = sum_j w_j * (sum over all samples of s_j) / n_j
    for step in run.steps(train):
        if run.evaluates_before(step):
            run.evaluate(model, held_out)
        # `step` has its learning rate, noise and n_j; when memory runs out, it comes again in smaller micro-batches
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
        reader = trained_model.reader.eval()
        reader.save_pretrained(run.output_dir)
        micro_batch, places = predict(reader, held_out, 256)
        true, read = reader.texts(micro_batch["labels"]), reader.texts(places)
        title = describe_counts(sum(map(str.__ne__, true, read)), len(read), len(held_out))
        picture = draw_predictions(held_out.pictures(micro_batch["pixel_values"]), true, read, title)
        picture.savefig(run.output_dir / "predictions.png")
        run.publish(USAGE)
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
