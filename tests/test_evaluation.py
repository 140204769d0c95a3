"""Evaluations: the same to the bit for any number of processes."""

import pytest
from common import evaluations

# There are many micro-batches, and the last one is smaller.
EVALUATE = " --max_train_steps 1 --per_device_eval_batch_size 4"
# Program's name and the run's -> flags beside its tiny model's; by the number of processes.
RUNS = {
    2: {"pretrain_bert/pairs": "", "finetune_classifier/texts": "", "train_captcha/captchas": ""},
    3: {
        "pretrain_gpt2/documents": " --packing false --train_file CORPUS/short.jsonl",
        "finetune_classifier/texts": "",
        "train_image_classifier/batch": " --normalization batch --per_device_eval_batch_size 30",
    },
}


@pytest.mark.distributed
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("num_processes", "precision"), [(2, "no"), (3, "bf16")])
def test_the_same_to_the_bit_on_any_number_of_processes(train, train_on, monkeypatch, num_processes, precision):
    runs = {name: EVALUATE + flags for name, flags in RUNS[num_processes].items()}
    folder = train_on(num_processes, {f"{name}-shared": flags for name, flags in runs.items()}, precision=precision)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    for name, flags in runs.items():
        alone = train(name, flags, program=name.split("/")[0])
        assert evaluations(folder / f"{name}-shared")[0] == evaluations(alone)[0], name
