"""Train a ResNet that tells images apart: one recipe, the same step on any hardware.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/train_image_classifier.py --recipe resnet_digits_cpu

The recipe decides the optimizer's steps; the launch file and --per_device_train_batch_size decide how each one is cut.
"""

import gc
import sys

gc.disable()  # while modules are imported: 1 s of 4 less; `Run` turns it on

from samestep.recipe.run_settings import answer_early

TASK = "image_classification"
if __name__ == "__main__":
    answer_early(sys.argv[1:], TASK, __doc__)  # help and mistakes in flags, before torch is imported

from samestep.data import images
from samestep.errors import exit_code
from samestep.models.image_classification import ClassificationSums
from samestep.training.evaluation import classify_images
from samestep.training.plots import draw_held_out
from samestep.training.run import Run

USAGE = """\
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
model = AutoModelForImageClassification.from_pretrained("OUTPUT_DIR", trust_remote_code=True)
image = AutoImageProcessor.from_pretrained("OUTPUT_DIR")(Image.open("it.png").convert("MODE"), return_tensors="pt")
model.config.id2label[model(**image).logits.argmax().item()]"""


def main(argv: list[str]) -> int:
    # The recipe and the settings from the flags, the Accelerator, the output folder, the checkpoint to go on from (if any)
    run = Run(argv, TASK, description=__doc__)
    recipe, accelerator = run.recipe, run.accelerator

    # The model returns the summed loss: means of micro-batches must not be added up
    train, held_out = run.load_data(images.build, run.settings.on_bad_row)
    model, optimizer = run.prepare(ClassificationSums, train)
    whole_step = run.whole_step()  # batch normalisation of whole steps, if the recipe asks for it

    # The loss of a step, n being the samples of the whole global batch (all processes, all micro-batches):
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
        resnet = trained_model.resnet.eval()
        resnet.save_pretrained(run.output_dir)
        images.make_processor(recipe).save_pretrained(run.output_dir)
        if held_out is not None:
            logits = classify_images(resnet, held_out, run.settings.per_device_eval_batch_size)
            held_out.write(run.output_dir / "held_out.csv", logits)
            draw_held_out(held_out, logits).savefig(run.output_dir / "predictions.png")
        run.publish(USAGE.replace("MODE", "RGB" if recipe.num_channels == 3 else "L"))
    return run.close()


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
