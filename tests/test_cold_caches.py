"""What is computed anew and what comes from a cache is one training: its data, its tokenizer, its files."""

from pathlib import Path

import pytest
from cases import thorough

from samestep.errors import UsageError
from samestep.training import checkpoint

PROGRAMS = ["train_embeddings", "finetune_seq2seq"]
PROGRAMS += map(thorough, ["pretrain_bert", "pretrain_gpt2", "finetune_classifier", "finetune_causal_lm"])


@pytest.mark.rooms
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_that_tokenized_goes_on_where_tokens_are_cached(train, use_cache, tmp_path, program):
    """A call of a tokenizer that cuts texts off leaves its length behind in the tokenizer, and a cache does not."""
    use_cache(tmp_path / "cache")
    flags = "--max_train_steps 2 --num_warmup_steps 0 --warmup_ratio none"
    cold = train("run", f"{flags} --stop_after_step 1", program=program)
    warm = train("other", flags, program=program)
    train("run", f"{flags} --resume_from_checkpoint latest", program=program)
    files = [(folder / "tokenizer.json").read_bytes() for folder in (cold / "checkpoint-1", cold, warm)]
    assert files[0] == files[1] == files[2]


def test_another_tokenizer_is_refused_with_the_flag_that_gives_the_first():
    state = checkpoint.State(data_fingerprints={"tokenizer": "a", "texts": "b"})
    with pytest.raises(
        UsageError, match=r"another tokenizer\. Give the ones .*, --tokenizer_name runs/x \(fingerprints"
    ):
        checkpoint._check_data(Path("runs/x"), state, {"tokenizer": "c", "texts": "b"})
