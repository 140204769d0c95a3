"""The steps of scripts and of `exact_steps` are of one class, with one vocabulary; see tests/helpers/run_own_loop.py, too."""

import json

import pytest
import torch
from common import ROOT, fresh_accelerator, metrics, tiny_argv
from safetensors.torch import load_file

from samestep.errors import UsageError
from samestep.training import own_loop, run
from samestep.training.step import Step

FLAGS = "--global_batch_size 8 --per_device_train_batch_size 3 --max_train_steps 3"
WRITTEN_OUT = """\
                    loss = (run.loss_weights * sums / step.num_targets).sum()
                    # Accelerate divides by the number of micro-batches, DDP by the number of processes: undo both
                    accelerator.backward(loss * step.loss_scale)
                    step.add_to_log(sums)
"""


def test_there_is_one_class():
    assert run.Step is own_loop.Step is Step
    assert issubclass(run.RunStep, Step)
    assert issubclass(own_loop.LoopStep, Step)


def test_a_script_in_the_words_of_exact_steps_takes_the_same_steps(train, corpus, tmp_path):
    usual = train("usual", FLAGS)
    program = (ROOT / "scripts" / "pretrain_bert.py").read_text(encoding="utf-8")
    assert program.count(WRITTEN_OUT) == program.count("in step.micro_batches") == 1
    program = program.replace(WRITTEN_OUT, " " * 20 + "accelerator.backward(step.loss(sums))\n")
    names = {"__name__": "script"}
    exec(compile(program.replace("in step.micro_batches", "in step"), "script.py", "exec"), names)
    fresh_accelerator()
    names["main"](tiny_argv("pretrain_bert", corpus, tmp_path / "other", FLAGS))
    tensors, others = (load_file(folder / "model.safetensors") for folder in (usual, tmp_path / "other"))
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
    lines, other_lines = (
        [{key: value for key, value in line.items() if "seconds" not in key} for line in metrics(folder)]
        for folder in (usual, tmp_path / "other")
    )
    assert json.dumps(lines) == json.dumps(other_lines)


def test_sums_of_another_shape_are_refused():
    class Fixed(Step):
        num_targets = torch.tensor([3, 4])

    with pytest.raises(UsageError, match=r"was given \[3\], but targets returns \[2\]"):
        Fixed(None, 0, 0.0).loss(torch.ones(3))
