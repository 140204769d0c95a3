"""Each machine keeps every checkpoint: one is lost with its disk, and the run goes on from the other's copy, bit by bit."""

import shutil

import pytest
from cases import thorough
from common import tiny_argv
from compare import same_weights, untimed_metrics
from faults import train_with_code

from samestep.recipe.run_fields import TIMES
from samestep.training.checkpoint import checkpoints

MACHINE = """
import os
place = os.path.join(folder, "machine-" + os.environ["RANK"])
os.makedirs(place, exist_ok=True)
os.chdir(place)
os.environ["LOCAL_RANK"] = "0"
"""
"""Makes two machines of two processes: each has a folder of its own."""


@pytest.mark.distributed
@pytest.mark.parametrize("more", [thorough(""), " --async_checkpointing"])
def test_a_machine_is_lost_with_its_disk(trainings, corpus, tmp_path, more):
    flags = "--global_batch_size 8 --checkpointing_steps 2 --checkpoints_total_limit 2 --record_samples"
    resuming = f"{flags} --replicate_checkpoints --resume_from_checkpoint latest{more}"

    def run(folder, flags: str) -> None:
        folder.mkdir(exist_ok=True)
        codes, said = train_with_code(trainings, MACHINE, tiny_argv("pretrain_bert", corpus, "run", flags), folder)
        assert codes == {0: 0, 1: 0}, said[-2000:]

    run(tmp_path / "whole", flags + " --replicate_checkpoints")
    whole, ours = tmp_path / "whole" / "machine-0" / "run", tmp_path / "ours"
    run(ours, f"{resuming} --stop_after_step 5")
    folders = [ours / f"machine-{rank}" / "run" for rank in (0, 1)]
    assert [[path.name for path in checkpoints(folder)] for folder in folders] == [["checkpoint-4", "checkpoint-5"]] * 2
    for path in (folders[0] / "checkpoint-5").iterdir():
        assert (folders[1] / "checkpoint-5" / path.name).read_bytes() == path.read_bytes()
    shutil.rmtree(ours / "machine-0")
    run(ours, resuming)
    assert untimed_metrics(folders[0]) == untimed_metrics(whole)
    assert (folders[0] / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert same_weights(folders[0], whole)
    (line, *_) = [line for line in (folders[0] / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    assert all(f'"{key}"' in line for key in TIMES), "two processes are timed"


@pytest.mark.distributed
def test_a_copy_that_is_not_whole_is_none(run_processes):
    """It came with other bytes, or did not fit on the disk. The earlier copy and its lines stay, and the next one is made."""
    sender, receiver = run_processes("run_peer_copies", 2)
    first = ("checkpoint-2", ["checkpoint-2", "metrics.jsonl"], "lines of 2\n")
    assert receiver[2] == first
    for step in (4, 6):
        assert receiver[step] == (None, *first[1:]), step
    assert receiver[8][0] == "checkpoint-8"
    assert receiver[8][2] == "lines of 8\n"
    assert "checkpoint-10" in sender["newest"], "which the other machine had"
    assert [name for name in receiver["newest"] if name.endswith(".partial")] == []
