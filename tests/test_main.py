"""`python -m recipes`: answers and mistakes."""

import contextlib
import io
import json
import sys
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, ViTConfig

from samestep import cli as program
from samestep.errors import exit_code
from samestep.recipe.recipe import catalog_names

MODEL = "plan --model_name_or_path CONFIG --seq_len 128 --global_batch_size 16"


def run(monkeypatch, capsys, line: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["recipes", *line.split()])
    code = exit_code(program.main)
    return code, *capsys.readouterr()


def test_list(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == catalog_names()


def test_plan(monkeypatch, capsys):
    line = "plan bert_base --num_processes 3 --per_device_train_batch_size 43 --global_batch_size 512 --json"
    code, out, _ = run(monkeypatch, capsys, line)
    answer = json.loads(out)
    assert (code, answer["shares"], answer["gradient_accumulation_steps"]) == (0, [171, 171, 170], 4)
    assert answer["learning_rate"] == pytest.approx(1e-4 * 2**0.5)
    code, out, _ = run(monkeypatch, capsys, "plan bert_large_3090 --per_device_train_batch_size 8")
    assert (code, "4 micro-step(s) of at most 8" in out) == (0, True)
    assert "336,226,108 parameters; with gradients and moments 5.380 GB (5.010 GiB) in float32" in out


def test_plan_of_memory(monkeypatch, capsys):
    line = "plan gpt2_xl_8xa100 --num_processes 8 --per_device_train_batch_size 4"
    code, out, _ = run(monkeypatch, capsys, line)
    assert code == 0
    assert "1,557,611,200 parameters" in out
    assert "10.28 GFLOP per token" in out
    assert "at most 524,288 tokens per step" in out
    assert "40.4 GB (1e9 bytes) per process, planned: parameters 6.2, gradients 6.2, moments 12.5" in out
    assert out.endswith("(mixed_precision bf16)\n")
    totals = []
    for flags in ("", " --mixed_precision no", " --gradient_checkpointing", " --sharded"):
        answer = json.loads(run(monkeypatch, capsys, f"{line} --json{flags}")[1])
        items = answer["memory"]
        totals.append(items.pop("total"))
        assert totals[-1] == sum(items.values())
    assert answer["tokens_per_step"] * answer["flops_per_token"] == 512 * answer["flops_per_sample"]
    assert (answer["num_parameters"], answer["mixed_precision"], answer["sharded"]) == (1_557_611_200, "bf16", True)
    assert [round(total / 1e9, 1) for total in totals] == [40.4, 46.0, 30.4, 19.1]
    _, out, _ = run(monkeypatch, capsys, f"{line} --sharded --gradient_checkpointing true --mixed_precision fp16")
    assert out.endswith("(mixed_precision fp16, gradient_checkpointing, sharded)\n")
    assert "MB (1e6 bytes) per process" in run(monkeypatch, capsys, "plan bert_small_cpu")[1]


def test_plan_of_a_model_without_a_recipe(monkeypatch, capsys, tmp_path):
    """BERT-Base fine-tuned on MNLI with batches of 16 in 4 micro-steps, at 3e-4."""
    config = tmp_path / "mnli"
    BertConfig(num_labels=3, architectures=["BertForSequenceClassification"]).save_pretrained(config)
    line = (
        MODEL.replace("CONFIG", str(config)) + " --learning_rate 3e-4 --num_train_samples 392702 --num_train_epochs 10"
    )
    code, out, _ = run(monkeypatch, capsys, f"{line} --on 1x3090 --per_device_train_batch_size 4 --json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["global_batch_size"], answer["gradient_accumulation_steps"], answer["learning_rate"]) == (
        16,
        4,
        3e-4,
    )
    assert (answer["num_parameters"], answer["num_steps"], answer["command"]) == (109_484_547, 245_439, None)
    steps = line.replace("--num_train_epochs 10", "--max_train_steps 7")
    assert json.loads(run(monkeypatch, capsys, f"{steps} --json")[1])["num_steps"] == 7
    code, out, _ = run(
        monkeypatch, capsys, f"{line} --optimizer sgd --learning_rate_batch_size 8 --lr_scaling_rule linear"
    )
    assert code == 0
    assert out.startswith(f"mnli: {config}\n")
    assert "optimizer  learning_rate 0.0006\n" in out
    assert f"{12 * 109_484_547 / 1e9:.3f} GB" in out
    page = tmp_path / "page.html"
    assert run(monkeypatch, capsys, f"{line} --on 2xt4 --html {page}")[0] == 0
    assert "mnli" in page.read_text()
    line = MODEL.replace("plan", "scale").replace("CONFIG", str(config))
    assert run(monkeypatch, capsys, f"{line} --on t4 --up_to 4")[1].startswith("mnli on t4")


def test_plan_with_a_trace(monkeypatch, capsys, tmp_path):
    code, out, _ = run(
        monkeypatch, capsys, "plan captcha_3xa100 --on 3xa100-40 --per_device_train_batch_size 8 --trace --json"
    )
    trace = json.loads(out)["trace"]
    assert code == 0
    assert trace["num_parameters"] == 17_535_800
    assert trace["flops"] == 8 * json.loads(out)["flops_per_sample"]
    assert abs(trace["error"]) == pytest.approx(abs(trace["planned"] / trace["peak"] - 1))
    assert abs(trace["error"]) < 0.05
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ViTConfig(**shape, image_size=224, patch_size=32, architectures=["ViTForImageClassification"]).save_pretrained(
        tmp_path
    )
    line = f"plan --model_name_or_path {tmp_path} --global_batch_size 64 --on 2xt4"
    assert "there is no formula" in run(monkeypatch, capsys, line)[2]
    code, out, _ = run(monkeypatch, capsys, f"{line} --trace --optimizer sgd")
    assert code == 0
    assert "GFLOP per image" in out
    assert "GB on fake tensors, with whole weights" in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "it needs a recipe"),
        ("plan nothing", "unknown recipe"),
        ("plan bert_base --num_processes 0", "num_processes is 0"),
        ("plan bert_base --num_procs 2", "did you mean --num_processes"),
        ("plan bert_base --mixed_precision fp8", "must be one of no, bf16, fp16"),
        ("lits", "did you mean list"),
        ("plan --model_name_or_path ./nothing --global_batch_size 8", "cannot be read: No such file or directory"),
        (
            "plan --model_name_or_path bert_large --global_batch_size 8",
            "no file here, and the hub does not give its config",
        ),
        ("plan --model_name_or_path CONFIG --seq_len 8", "global_batch_size is missing"),
        ("plan --model_name_or_path CONFIG --global_batch_size 8", "reads tokens: --seq_len is missing"),
        (f"{MODEL} --num_train_epochs 2", "num_train_epochs needs num_train_samples"),
        (f"{MODEL} --max_train_steps 1 --num_train_epochs 2 --num_train_samples 9", "are both given: leave one out"),
        (f"{MODEL} --optimizer sgd --learning_rate 0.1 --lr_scaling_rule sqrt", "changes Adam's numbers"),
        ("plan captcha_3xa100 --gradient_checkpointing", "gradient_checkpointing works layer by layer"),
        ("plan resnet50_1xv100 --on 4xt4 --sharded", "sharded works layer by layer"),
        (
            "plan resnet50_1xv100 --on 4xt4 --attn_implementation eager",
            "resnet50_1xv100 has no attention: leave it out",
        ),
        ("plan resnet50_1xv100 --lr_scaling_rule sqrt", "scaling rule sqrt changes Adam's numbers"),
        (
            "plan resnet50_1xv100 --sgd_momentum none",
            "sgd_momentum is None, but with optimizer sgd it must be a number",
        ),
        ("plan resnet50_1xv100 --optimizer adamw", "sgd_momentum is 0.9, but with optimizer adamw it must be null"),
        (
            "plan resnet50_1xv100 --depths 1 2",
            "and depths [1, 2] must be positive, one each",
        ),
        ("plan resnet50_1xv100 --hidden_sizes 6 8 8 8", "must be multiples of 4 with layer_type bottleneck"),
        (
            "plan captcha_3xa100 --conv_channels 1 1 1 1 1 1",
            "image_width 160 cannot be halved by each of 6",
        ),
        ("plan captcha_3xa100 --conv_channels 0", "conv_channels [0] must be positive numbers, at least one"),
        ("plan captcha_3xa100 --alphabet aab", "must hold each character once"),
        ("plan captcha_3xa100 --num_channels 1", "num_channels is 1, but captchas are drawn in red, green and blue"),
        (f"{MODEL} --on 1xt4 --seq_length 9", "did you mean --seq_len"),
    ],
)
def test_mistakes(monkeypatch, capsys, tmp_path, line, message):
    BertConfig(num_labels=3, architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    code, _, err = run(monkeypatch, capsys, line.replace("CONFIG", str(tmp_path)))
    assert code == 2
    assert message in err


NONSENSE = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12
) | st.sampled_from(
    [
        "-1",
        "0",
        "1e400",
        "nan",
        "None",
        "9" * 30,
        "1x",
        "x",
        "0x4xt4",
        "4x",
        "./",
        "/",
        "..",
        "4xt4.yaml",
        "1x/etc/passwd",
    ]
)


@given(
    flag=st.sampled_from(["on", "per_device_train_batch_size", "global_batch_size", "critical_batch_size"]),
    value=NONSENSE,
)
@settings(max_examples=80, deadline=None)
def test_nonsense_gets_one_clear_message(flag, value):
    err, out = io.StringIO(), io.StringIO()
    argv = ["recipes", "plan", "bert_base", "--on", "1xt4", f"--{flag}={value}"]
    with mock.patch.object(sys, "argv", argv), contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = exit_code(program.main)
    if code:
        assert (code, out.getvalue()) == (2, "")
        assert err.getvalue().startswith("ERROR: ")
        assert flag in err.getvalue() or flag == "on"
        assert "Traceback" not in err.getvalue()
