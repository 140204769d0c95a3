"""Which tests belong to rooms that can be deleted, `stepplan` and `samestep.contrib`: the list of them.

Where a room is not there, its own files are not collected. Of the files that it shares with others, a test is skipped that has
the mark `rooms`, or fails because a module of the room is missing. In all other files that is a failure.
"""

import importlib
from importlib.util import find_spec
from pathlib import Path

OWN = {
    "stepplan": """
        advice convnet costs device_benchmark engines growth hardware memory methods page placement plan plan_commands
        pretrained_shape proof_gpu readers timing trace worked_examples workload
        """.split(),
    "samestep.contrib": """
        accumulation chat chats_to_a_model check_model checkpoint_store communication compare_runs digest embedding_trainer
        expert_term noise_scale peer_copies preferences reference replicas router_loss stragglers streamed_programs streaming
        train_embeddings watch whole_batch
        """.split(),
}
"""Room -> names of files of its tests, test_NAME.py."""
SHARED = {
    "stepplan": """
        batch_schedule boundaries bounds configs conversations docs errors exclusions harness internals launch main
        modern muon no_code other_names packaging printed_commands products quantization readme reading rehearsal
        scaling sharding sources variants
        """.split(),
    "samestep.contrib": """
        accumulating advice batch_norm batch_schedule benchmarks boundaries bounds causal_lm checkpoint
        conversations docs equivalence errors evaluation exact_sum finetune_causal_lm
        finetune_classifier finetune_seq2seq golden harness image_text internals interrupt launch
        main metrics modern muon no_code optim packaging plots pretrain_bert pretrain_gpt2 printed_commands quantization
        reading readme recovery reduction rehearsal reliability reproducible restarts run_files saved_models
        sharding speech terminal
        train_images variants watching
        """.split(),
}
"""Room -> names of files, some tests of which need it."""
HELPERS = {
    "stepplan": ["odd_inputs", "odd_runs"],
    "samestep.contrib": """
        run_accumulating run_batch_norm run_embedding_trainer run_expert_term run_router_loss run_train_embeddings
        run_whole_batch
        """.split(),
}
"""Room -> names of helpers that need it, where pytest looks for doctests."""
MISSING = [room for room in OWN if find_spec(room) is None]

PAGES = set() if "samestep.contrib" in MISSING else {"README.md", "loss.png"}
"""Files that a room leaves of a finished run."""


def read_card(folder: Path) -> str:
    """Read the model card of a finished run.

    Raises:
        ModuleNotFoundError: the room that writes it is missing.
    """
    importlib.import_module("samestep.contrib.publishing")
    return (folder / "README.md").read_text(encoding="utf-8")


def list_ignored() -> list[str]:
    """List the files of tests that are not collected, as their room is missing."""
    files = [f"test_{name}.py" for room in MISSING for name in OWN[room]]
    return files + [f"helpers/{name}.py" for room in MISSING for name in HELPERS[room]]


def list_excused(path: Path) -> list[str]:
    """List the missing rooms that tests of a file may need."""
    return [room for room in MISSING if path.stem.removeprefix("test_") in SHARED[room]]
