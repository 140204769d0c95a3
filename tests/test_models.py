"""Weights to start from: what is refused, in one clear line, and what is lost by it: nothing. Kernels of attention."""

import os

import pytest
import torch
from transformers import BertConfig, BertForPreTraining, GPT2Config, GPT2LMHeadModel

from samestep.errors import UsageError
from samestep.models.pretrained import BY_SAMPLE, initial_model

SHAPE = {"vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
CONFIG = BertConfig(**SHAPE, max_position_embeddings=16)
DAMAGES = {
    "cut off": lambda whole: whole[: len(whole) // 2],
    "cut off in its header": lambda whole: whole[:100],
    "zeros": lambda whole: bytes(len(whole)),
    "empty": lambda whole: b"",
    "a header without end": lambda whole: (2**60).to_bytes(8, "little") + whole[8:],
    "text": lambda whole: b"version https://git-lfs.github.com/spec/v1\n",
}


@pytest.fixture
def model(tmp_path):
    BertForPreTraining(CONFIG).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(model) -> str:
    with pytest.raises(UsageError) as raised:
        initial_model(BertForPreTraining, CONFIG, str(model))
    (message,) = raised.value.problems
    assert "\n" not in message
    assert "\x1b" not in message
    assert len(message) < 600
    return message


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights(model, damage, kind):
    weights = model / "model.safetensors"
    if kind == "bin":
        torch.save(BertForPreTraining(CONFIG).state_dict(), model / "pytorch_model.bin")
        weights.unlink()
        weights = model / "pytorch_model.bin"
    assert initial_model(BertForPreTraining, CONFIG, str(model)).config is not None
    weights.write_bytes(DAMAGES[damage](weights.read_bytes()))
    assert refused(model).startswith(f"model_name_or_path {model} cannot be loaded: ")


def test_no_weights(model):
    (model / "model.safetensors").unlink()
    assert "no file named" in refused(model)
    (model / "model.safetensors.index.json").write_text("[" * 10**5)
    assert "cannot be loaded: maximum recursion depth" in refused(model)


def test_a_name_that_is_not_utf8(model):
    folder = model.rename(model.with_name(os.fsdecode(b"mod\xe9l")))
    assert "is not valid UTF-8" in refused(folder)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model_name_or_path EMPTY --tokenizer_name none", "EMPTY cannot be loaded"),
        ("--tokenizer_name EMPTY", "tokenizer EMPTY cannot be loaded"),
        ("--train_file EMPTY/none.txt", "EMPTY/none.txt: no such file"),
        ("--train_file EMPTY.txt", "EMPTY.txt is a device"),
        ("--vocab_size 1", "vocab_size is 1"),
    ],
)
def test_an_earlier_run_stays_when_a_new_one_cannot_begin(train, tmp_path, flags, message):
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "EMPTY.txt").symlink_to("/dev/zero")
    earlier = tmp_path / "earlier"
    (earlier / "checkpoint-3").mkdir(parents=True)
    (earlier / "metrics.jsonl").write_text("{}\n")
    (earlier / "model.safetensors").write_text("weights")
    flags = flags.replace("EMPTY", str(tmp_path / "EMPTY"))
    with pytest.raises(UsageError, match=message.replace("EMPTY", str(tmp_path / "EMPTY"))):
        train("earlier", f"--overwrite_output_dir --max_train_steps 1 {flags}", output_dir=earlier)
    assert {path.name for path in earlier.iterdir()} == {".lock", "checkpoint-3", "metrics.jsonl", "model.safetensors"}
    assert (earlier / "model.safetensors").read_text() == "weights"


def test_an_output_folder_that_weights_cannot_be_written_to(train, tmp_path):
    """safetensors takes names in UTF-8 only: this would be found after the training."""
    with pytest.raises(UsageError, match=r"^flags: output_dir is .*, must be text in UTF-8 "):
        train("out", "--max_train_steps 1", output_dir=tmp_path / os.fsdecode(b"out\xff"))


def test_transformers_own_forward_is_causal_with_the_kernel_by_sample():
    """As `generate` calls it, at the end of a training."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=2, n_head=2)).eval()
    ids = torch.randint(50, (2, 12))
    logits = []
    for kernel in ("eager", BY_SAMPLE):
        model.set_attn_implementation(kernel)
        logits.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits)
    torch.testing.assert_close(logits[1], logits[0])
