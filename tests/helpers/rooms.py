"""Which tests belong to rooms that can be deleted, `stepplan` and `samestep.contrib`: the list of them.

Where a room is not there, its own files are not collected. Of the files that it shares with others, a test is skipped that has
the mark `rooms`, or fails because a module of the room is missing. In all other files that is a failure.
"""

from importlib.util import find_spec
from pathlib import Path

OWN = {
    "stepplan": """
        advice convnet costs device_benchmark engines growth hardware memory methods page placement plan plan_commands
        pretrained_shape proof_gpu timing trace worked_examples workload
        """.split(),
    "samestep.contrib": "accumulation checkpoint_store communication peer_copies replicas stragglers".split(),
}
"""Room -> names of files of its tests, test_NAME.py."""
SHARED = {
    "stepplan": """
        batch_schedule boundaries bounds chat configs conversations docs errors harness internals launch main modern muon
        no_code noise_scale other_names packaging printed_commands products readme reading rehearsal scaling sharding
        """.split(),
    "samestep.contrib": """
        accumulating boundaries bounds equivalence exact_sum fault_tolerance golden launch optim packaging printed_commands
        reduction reliability reproducible restarts saved_models sharding
        """.split(),
}
"""Room -> names of files, some tests of which need it."""
MISSING = [room for room in OWN if find_spec(room) is None]


def list_ignored() -> list[str]:
    """List the files of tests that are not collected, as their room is missing."""
    files = [f"test_{name}.py" for room in MISSING for name in OWN[room]]
    return files + ["helpers/odd_inputs.py", "helpers/odd_runs.py"] * ("stepplan" in MISSING)


def list_excused(path: Path) -> list[str]:
    """List the missing rooms that tests of a file may need."""
    return [room for room in MISSING if path.stem.removeprefix("test_") in SHARED[room]]
