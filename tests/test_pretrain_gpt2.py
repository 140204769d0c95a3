"""GPT-2's program as a user meets it: what it leaves behind, what it refuses, and the memory of its step."""

import json
import math
from functools import partial

import pytest
import torch
from common import TINY_GPT2, evaluations, fresh_accelerator, metrics
from compare import same_weights, untimed_metrics
from rooms import PAGES, read_card
from transformers import AutoTokenizer, GPT2LMHeadModel, pipeline

from samestep.errors import UsageError, exit_code
from samestep.models.gpt2_pretraining import build_model

SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


@pytest.fixture
def train(train):
    return partial(train, program="pretrain_gpt2")


def test_what_a_run_leaves_behind(train, capsys, real_figures):
    output_dir = train("run", SMALL + " --eval_steps 5 --sample_prompt The --sample_length 90")
    printed = capsys.readouterr().out
    assert {path.name for path in output_dir.iterdir()} == {
        *PAGES,
        *(
            ".lock",
            "all_results.json",
            "checkpoint-10",
            "config.json",
            "generation_config.json",
        ),
        *(
            "metrics.jsonl",
            "model.safetensors",
            "recipe.yaml",
            "sample.txt",
            "settings.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    }
    first = ["step", "epoch", "loss", "learning_rate", "grad_norm", "samples", "tokens", "seconds"]
    assert list(metrics(output_dir)[0]) == first
    assert metrics(output_dir)[0]["tokens"] == 8 * 48
    for line in evaluations(output_dir):
        assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
        assert 0 <= line["eval_accuracy"] <= 1
    results = json.loads((output_dir / "all_results.json").read_text())
    assert results["eval_perplexity"] == evaluations(output_dir)[-1]["eval_perplexity"]
    sample = (output_dir / "sample.txt").read_text()
    assert sample.startswith("The")
    assert sample in printed
    assert "AutoModelForCausalLM.from_pretrained" in read_card(output_dir)


def test_the_saved_model_generates_and_is_the_trained_one(train):
    output_dir = train("run", SMALL)
    generate = pipeline("text-generation", model=str(output_dir))
    text = generate("The value", max_new_tokens=20, do_sample=False)[0]["generated_text"]
    assert text.startswith("The value")
    assert len(text) > len("The value")
    model, tokenizer = GPT2LMHeadModel.from_pretrained(output_dir), AutoTokenizer.from_pretrained(output_dir)
    assert model(**tokenizer("The value", return_tensors="pt")).logits.shape[2] == 400
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    again = train("again", f"{SMALL} --model_name_or_path {output_dir} --max_train_steps 1 --learning_rate 1e-12")
    assert evaluations(again)[0]["eval_loss"] == pytest.approx(evaluations(output_dir)[-1]["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("more", ["", " --packing false --train_file CORPUS/short.jsonl", " --document_mask true"])
def test_the_evaluation_counts_every_token_once(train, more):
    values = []
    for size in (1, 3, 32):
        flags = f"{SMALL} --dtype float64 --per_device_eval_batch_size {size} --max_train_steps 1{more}"
        values.append(evaluations(train(f"eval{size}", flags))[0])
    for value in values[1:]:
        assert value == pytest.approx(values[0], rel=1e-12)


def test_characters_and_the_end_of_the_text_held_out(train, corpus, tmp_path):
    """A file as one document, its last tenth held out: as many characters as the text has, no more."""
    text = "".join(json.loads(line)["text"] + "\n\n" for line in corpus.read_text().splitlines())
    (tmp_path / "text.txt").write_text(text)
    flags = f"--train_file {tmp_path}/text.txt --txt_documents files --validation_split tail --tokenizer characters"
    output_dir = train("run", f"{SMALL} {flags} --sample_prompt A --sample_length 100")
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    part = text[: int(len(text) * 0.9)]
    assert set(tokenizer.get_vocab()) - {"<|endoftext|>", "<|unknown|>"} == set(part)
    epoch = metrics(output_dir)[0]["epoch"]
    assert 8 / epoch == pytest.approx(math.ceil((len(part) + 1) / 48))


def test_it_learns(train):
    flags = "--global_batch_size 16 --max_train_steps 120 --lr_scaling_rule none"
    first, last = evaluations(train("longer", flags))
    assert last["eval_loss"] < first["eval_loss"] - 1


def test_bf16_stays_near_fp32(train, monkeypatch):
    exact = metrics(train("fp32", SMALL))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    rounded = metrics(train("bf16", SMALL))
    assert [line["loss"] for line in rounded] == pytest.approx([line["loss"] for line in exact], rel=5e-3)
    assert rounded[0]["loss"] != exact[0]["loss"]


def test_eager_attention_takes_the_same_steps(train):
    for more in ("", " --document_mask true"):
        losses = [line["loss"] for line in metrics(train("sdpa" + more[2:5], SMALL + more))]
        eager = metrics(train("eager" + more[2:5], SMALL + more + " --attn_implementation eager"))
        assert [line["loss"] for line in eager] == pytest.approx(losses, rel=1e-5)


def test_resumed_with_dropout_is_bit_identical(train):
    flags = SMALL + " --resid_pdrop 0.1 --embd_pdrop 0.1 --attn_pdrop 0.1 --record_samples --eval_steps 4"
    whole = train("whole", flags)
    parts = train("parts", flags + " --stop_after_step 7")
    train("parts", flags + " --resume_from_checkpoint latest")
    assert untimed_metrics(parts) == untimed_metrics(whole)
    assert same_weights(parts, whole)


def test_another_tokenizer_is_refused_when_resuming(train, tmp_path):
    stopped = train("stopped", SMALL + " --stop_after_step 2")
    other = train("other", SMALL + " --max_train_steps 1 --vocab_size 399")
    flags = f"{SMALL} --resume_from_checkpoint latest --tokenizer_name {other}"
    times = {path: path.stat().st_mtime_ns for path in stopped.rglob("[!.]*")}
    with pytest.raises(UsageError, match=r"so does the tokenizer.* and the same tokenizer; .* \(fingerprints: "):
        train("stopped", flags)
    assert {path: path.stat().st_mtime_ns for path in stopped.rglob("[!.]*")} == times


def bad(tmp_path):
    """Map bad flags to a part of the one line that they must give."""
    (tmp_path / "words.txt").write_text("a few words\n\nand a few more\n\nand more")
    (tmp_path / "space.txt").write_text("word " * 300 + "\n" * 300)
    words = f"--train_file {tmp_path}/words.txt"
    tail = "--txt_documents files --validation_split tail"
    return {
        f"{words} --validation_fraction 0": "block_size is 48, but training documents have",
        f"{words} --validation_fraction 0.5": "leaves fewer than 2 to train on",
        f"--train_file {tmp_path}/space.txt {tail}": "leaves no text to hold out: raise it, or set it to 0",
        f"--validation_file {tmp_path}/none.txt": "none.txt",
        "--block_size 50": "block_size 50 exceeds n_positions 48",
        "--n_head 3": "n_embd 32 is not a multiple of n_head 3",
        "--vocab_size 200": "vocab_size is 200, but byte_level_bpe has all 256 bytes",
        "--tokenizer words": "tokenizer is 'words', must be one of byte_level_bpe, characters",
        "--packing false --document_mask true": "document_mask is true, but without packing",
        "--tokenizer_name nowhere": "tokenizer nowhere cannot be loaded",
        "--model_name_or_path nowhere": "nowhere cannot be loaded",
        "--recipe bert_small_cpu": "is for the task bert_pretraining, this script trains gpt2_pretraining",
        "--mlm_probability 0.1": "unknown flag --mlm_probability",
        "--activation_function gelo": "must be one of gelu_pytorch_tanh",
        "--sample_length 0": "sample_length is 0, must be from 1 to",
        "--per_device_train_tokens 20": "per_device_train_tokens is 20, but a sample can have 48",
    }


def test_a_mistake_is_one_clear_line_and_exit_code_2(scripts, corpus, tmp_path, capfd):
    for number, (flags, message) in enumerate(bad(tmp_path).items()):
        fresh_accelerator()
        argv = [*TINY_GPT2, "--train_file", str(corpus), "--output_dir", str(tmp_path / f"run{number}"), *flags.split()]
        code = exit_code(partial(scripts["pretrain_gpt2"].main, argv))
        lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("ERROR")]
        assert code == 2, flags
        assert len(lines) == 1, (flags, lines)
        assert message in lines[0], (flags, lines[0])


def test_no_compiler_is_said_at_once(train, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"torch_compile is true, but there is no C\+\+ compiler"):
        train("run", SMALL + " --torch_compile")


def test_a_kernel_with_its_own_noise_is_named(train, capsys):
    train("run", SMALL + " --attn_pdrop 0.1 --attn_implementation sdpa --max_train_steps 1")
    assert "attention dropout with attn_implementation sdpa" in capsys.readouterr().out
    train("without", SMALL + " --attn_pdrop 0.1 --resid_pdrop 0.1 --max_train_steps 1")
    assert "noise" not in capsys.readouterr().out


def test_the_published_sizes_on_the_meta_device(scripts):
    from samestep.recipe.catalog import load

    sizes = {
        "gpt2_124m": 124_439_808,
        "gpt2_350m": 354_823_168,
        "gpt2_774m": 774_030_080,
        "gpt2_xl_8xa100": 1_557_611_200,
    }
    for name, size in sizes.items():
        with torch.device("meta"):
            model = build_model(load(name), 50256)
        assert sum(parameter.numel() for parameter in model.parameters()) == size
