"""`python -m recipes`: answers and mistakes."""

import contextlib
import dataclasses
import io
import json
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, DeiTConfig, Qwen3Config

from samestep import cli as program
from samestep.cli.commands import COMMANDS
from samestep.errors import UsageError, exit_code
from samestep.recipe import run_settings, task_settings
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.settings import program_name
from samestep.recipe.tasks.gpt2_pretraining import Gpt2Pretraining

MODEL = "plan --model_name_or_path CONFIG --seq_len 128 --global_batch_size 16"


def run(capsys, line: str) -> tuple[int, str, str]:
    """Answer a command line; in what is printed, this program is called recipes."""
    code = exit_code(lambda: program.main(line.split()))
    return code, *(text.replace(f"{program_name()} ", "recipes ") for text in capsys.readouterr())


def test_list(capsys):
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == catalog_names()
    code, out, _ = run(capsys, "list bert Wikipedia")
    names = [line.split()[0] for line in out.splitlines()]
    assert (code, "bert_base" in names, "bert_small_cpu" in names) == (0, True, False)
    assert run(capsys, "list nothing like it")[0] == 2


@pytest.mark.rooms
def test_plan(capsys):
    line = "plan bert_base --num_processes 3 --per_device_train_batch_size 43 --global_batch_size 512 --json"
    code, out, _ = run(capsys, line)
    answer = json.loads(out)
    assert (code, answer["shares"], answer["gradient_accumulation_steps"]) == (0, [171, 171, 170], 4)
    assert answer["learning_rate"] == pytest.approx(1e-4 * 2**0.5)
    code, out, _ = run(capsys, "plan bert_large_3090 --per_device_train_batch_size 8")
    assert (code, "4 micro-batches of at most 8" in out) == (0, True)
    assert "336,226,108 parameters; with gradients and moments 5.380 GB (5.010 GiB)" in in_one_line(out)


@pytest.mark.rooms
def test_plan_of_memory(capsys):
    line = "plan gpt2_xl_8xa100 --num_processes 8 --per_device_train_batch_size 4"
    code, out, _ = run(capsys, line)
    assert code == 0
    assert "1,557,611,200 parameters" in out
    assert "10.28 GFLOP per token" in out
    assert "at most 524,288 tokens per step" in in_one_line(out)
    assert "40.4 GB (1e9 bytes) per process, planned: parameters 6.2, gradients 6.2, moments 12.5" in in_one_line(out)
    *_, memory, hint = out.splitlines()
    assert memory.endswith("(mixed_precision bf16)")
    assert hint.startswith("With --on HARDWARE")
    totals = []
    for flags in ("", " --mixed_precision no", " --gradient_checkpointing", " --sharded"):
        answer = json.loads(run(capsys, f"{line} --json{flags}")[1])
        items = answer["memory"]
        totals.append(items.pop("total"))
        assert totals[-1] == sum(items.values())
    assert answer["tokens_per_step"] * answer["flops_per_token"] == 512 * answer["flops_per_sample"]
    assert (answer["num_parameters"], answer["mixed_precision"], answer["sharded"]) == (1_557_611_200, "bf16", True)
    assert [round(total / 1e9, 1) for total in totals] == [40.4, 46.0, 30.4, 15.7]
    _, out, _ = run(capsys, f"{line} --sharded --gradient_checkpointing true --mixed_precision no")
    assert "(mixed_precision no, gradient_checkpointing, sharded)" in in_one_line(out)
    code, _, err = run(capsys, f"{line} --sharded --mixed_precision fp16")
    assert code == 2
    assert "loss scale is not supported with FSDP: set it to bf16 or no" in err
    assert "MB (1e6 bytes) per process" in run(capsys, "plan bert_small_cpu")[1]


@pytest.mark.rooms
def test_plan_of_a_model_without_a_recipe(monkeypatch, capsys, tmp_path):
    """BERT-Base fine-tuned on MNLI with batches of 16 in 4 micro-batches, at 3e-4."""
    config = tmp_path / "mnli"
    BertConfig(num_labels=3, architectures=["BertForSequenceClassification"]).save_pretrained(config)
    line = (
        MODEL.replace("CONFIG", str(config)) + " --learning_rate 3e-4 --num_train_samples 392702 --num_train_epochs 10"
    )
    code, out, _ = run(capsys, f"{line} --on 1x3090 --per_device_train_batch_size 4 --json")
    answer = json.loads(out)
    assert code == 0
    assert (answer["global_batch_size"], answer["gradient_accumulation_steps"], answer["learning_rate"]) == (
        16,
        4,
        3e-4,
    )
    assert (answer["num_parameters"], answer["num_steps"], answer["command"]) == (109_484_547, 245_439, None)
    steps = line.replace("--num_train_epochs 10", "--max_train_steps 7")
    assert json.loads(run(capsys, f"{steps} --json")[1])["num_steps"] == 7
    code, out, _ = run(capsys, f"{line} --optimizer sgd --learning_rate_batch_size 8 --lr_scaling_rule linear")
    assert code == 0
    assert in_one_line(out).startswith(f"mnli: a model of type bert, {config}, all weights trained")
    assert "optimizer  learning_rate 0.0006\n" in out
    assert f"{12 * 109_484_547 / 1e9:.3f} GB" in out
    page = tmp_path / "page.html"
    assert run(capsys, f"{line} --on 2xt4 --html {page}")[0] == 0
    assert "mnli" in page.read_text()
    line = MODEL.replace("plan", "scale").replace("CONFIG", str(config))
    assert run(capsys, f"{line} --on t4 --up_to 4")[1].startswith("mnli on t4")


@pytest.mark.rooms
def test_plan_with_a_trace(monkeypatch, capsys, tmp_path):
    code, out, _ = run(capsys, "plan captcha_3xa100 --on 3xa100-40 --per_device_train_batch_size 8 --trace --json")
    trace = json.loads(out)["trace"]
    assert code == 0
    assert trace["num_parameters"] == 17_535_800
    assert trace["flops"] == 8 * json.loads(out)["flops_per_sample"]
    assert abs(trace["error"]) == pytest.approx(abs(trace["planned"] / trace["peak"] - 1))
    assert abs(trace["error"]) < 0.05
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    DeiTConfig(**shape, image_size=224, patch_size=32, architectures=["DeiTForImageClassification"]).save_pretrained(
        tmp_path
    )
    line = f"plan --model_name_or_path {tmp_path} --on 2xt4"
    assert "there is no formula" in run(capsys, line)[2]
    code, out, _ = run(capsys, f"{line} --trace --optimizer sgd")
    assert code == 0
    assert "GFLOP per image" in out
    assert "global batch 64" in in_one_line(out)
    assert "GB on fake tensors, with whole weights" in in_one_line(out)
    assert (
        "formula" not in in_one_line(out).split("fake tensors")[1]
    )  # the plan is of a trace: there is nothing to compare


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan", "it needs a recipe"),
        ("plan nothing", "unknown recipe"),
        ("plan --on 1xt4", "plan --from_scratch --parameters 400M"),
        ("plan bert_base --parameters 3B", "--parameters without --from_scratch: plan --from_scratch"),
        ("plan --model_name_or_path llama-7b --seq_len 8", "did you mean meta-llama/Llama-2-7b?"),
        ("scale bert_base --on 8xh100", "'8xh100' is a number of devices: one is named here, as h100"),
        (
            "launch --model_name_or_path a/b --on slurm:1xt4",
            "its first word (recipes list shows them); behind one, --model_",
        ),
        (
            "launch bert_base --on slurm:1xt4 --output_dir a",
            "--output_dir is a flag of the script: such flags come last",
        ),
        ("launch bert_base --on slurm:1xt4 --nosuch a", "unknown flag --nosuch: see"),
        ("plan bert_base --on 1xt4 --price_per_hour $2", "price_per_hour is $2, must be a number greater than 0"),
        (
            "plan qwen3_8b",
            "did you mean qwen3_0.6b_sft_3090 or qwen3_embeddings_lora_3090? Another model of its kind trains with "
            "--model_name_or_path",
        ),
        ("plan bert_base --num_processes 0", "num_processes is 0"),
        ("plan bert_base --num_procs 2", "did you mean --num_processes"),
        ("plan bert_base --mixed_precision fp8", "must be one of no, bf16, fp16"),
        ("lits", "did you mean list"),
        (
            "plan --model_name_or_path ./nothing --global_batch_size 8",
            "is no folder here and not in the planner's table",
        ),
        ("plan --model_name_or_path nothing.json --global_batch_size 8", "cannot be read: No such file or directory"),
        (
            "plan --model_name_or_path bert_large --global_batch_size 8",
            "is no folder here and not in the planner's table",
        ),
        (
            "plan --model_name_or_path Qwen/Qwen3-8B --global_batch_size 8",
            "Qwen3-8B reads tokens: --seq_len is missing",
        ),
        (
            "plan --model_name_or_path Qwen/Qwen3-8B --global_batch_size 8 --seq_len 50000",
            "has 40960 positions: use 40960",
        ),
        (
            "plan --model_name_or_path Qwen/Qwen3-8B --global_batch_size 8 --seq_len 8 --optimizer sgd",
            "with AdamW: leave it",
        ),
        ("plan --model_name_or_path CONFIG --global_batch_size 8", "reads tokens: --seq_len is missing"),
        (f"{MODEL} --num_train_epochs 2", "num_train_epochs needs num_train_samples"),
        (f"{MODEL} --max_train_steps 1 --num_train_epochs 2 --num_train_samples 9", "are both given: leave one out"),
        (f"{MODEL} --optimizer sgd --learning_rate 0.1 --lr_scaling_rule sqrt", "changes Adam's numbers"),
        ("plan captcha_3xa100 --gradient_checkpointing", "gradient_checkpointing works layer by layer"),
        ("plan resnet50_1xv100 --on 4xt4 --sharded", "only programs of language models do: leave --sharded out"),
        (
            "plan resnet50_1xv100 --on 4xt4 --attn_implementation eager",
            "resnet50_1xv100 has no attention: leave it out",
        ),
        ("plan resnet50_1xv100 --lr_scaling_rule sqrt", "scaling rule sqrt changes Adam's numbers"),
        (
            "plan resnet50_1xv100 --sgd_momentum none",
            "sgd_momentum is null, but with optimizer sgd it must be a number",
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
def test_mistakes(capsys, tmp_path, line, message):
    BertConfig(num_labels=3, architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    code, _, err = run(capsys, line.replace("CONFIG", str(tmp_path)))
    assert code == 2
    assert message in err


# ---------------------------------------------------------------------------------------------------------------------
# Help


def read_help(capsys, line: str) -> str:
    code, out, err = run(capsys, f"{line} --help")
    assert code == 0, err
    assert err == ""
    return out


def in_one_line(text: str) -> str:
    return " ".join(text.split())


PLANNING = {name for name, command in COMMANDS.items() if command.answered_by.startswith("stepplan")}


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.rooms] * (name in PLANNING)) for name in COMMANDS]
)
def test_help_of_a_command(capsys, command):
    out = read_help(capsys, command)
    assert out.startswith(f"usage: recipes {command}")
    assert "\nexamples:\n" in out
    examples = [line for line in out.split("\nexamples:\n")[1].splitlines() if line.startswith("  recipes ")]
    assert examples
    assert all(line.startswith(f"  recipes {command}") for line in examples)
    overview = read_help(capsys, "")
    assert re.search(rf"^    {command}\b", overview, re.MULTILINE)
    assert f"  recipes {COMMANDS[command].examples.splitlines()[0]}" in overview


@pytest.mark.rooms
def test_its_examples_work(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen").mkdir()
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    Qwen3Config(**config, num_hidden_layers=2).save_pretrained(tmp_path / "Qwen" / "Qwen3-0.6B")
    (tmp_path / "Qwen" / "Qwen3-0.6B" / "model.safetensors").touch()
    for command in ("list", "plan", "scale"):
        for line in COMMANDS[command].examples.splitlines():
            assert run(capsys, line)[::2] == (0, ""), line
    assert {"mine.yaml", "plan.html", "scaling.png"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("name", ["bert_base", "captcha_3xa100"])
def test_help_shows_every_flag_with_choices_and_values(capsys, name):
    from stepplan.cli.model import ModelSettings
    from stepplan.cli.plan import PlanSettings
    from stepplan.cli.scale import ScaleSettings

    recipe = load(name)
    for line, kind in (("plan", PlanSettings), ("scale", ScaleSettings)):
        bare = read_help(capsys, line)
        out = read_help(capsys, f"{line} {name}")
        fields = [(field, bare) for cls in (kind, ModelSettings) for field in dataclasses.fields(cls)]
        fields += [(field, out) for cls in (kind, type(recipe)) for field in dataclasses.fields(cls)]
        for field, text in fields:
            assert (f"--{field.name} " in text) == field.metadata["flag"]
            if field.metadata["flag"]:
                assert field.metadata["help"].split()[0] in text
        assert f"(recipe: {recipe.global_batch_size})" in out
        assert "(recipe: none)" in out
        assert f"(recipe: {recipe.lr_scheduler_type})" in in_one_line(out)
    assert "--lr_scheduler_type {constant,linear,cosine," in out
    assert "(default: 4096)" in out


def test_help_of_a_script(capsys):
    for argv in (["--help"], ["--recipe", "gpt2_124m", "-h"], ["--recipe=gpt2_124m", "--help"]):
        assert (
            exit_code(lambda argv=argv: run_settings.parse(argv, "gpt2_pretraining", "What it does.\n\n    a line"))
            == 0
        )
        out = capsys.readouterr().out
        assert out.startswith(
            f"usage: {program_name()} --recipe RECIPE [--FLAG VALUE ...]\n\nWhat it does.\n\n    a line\n"
        )
        assert "default: 1800.0" in in_one_line(out)
        assert "--on_nonfinite {stop,skip}" in out
        titles = [line for line in out.splitlines() if re.match(r"\w.*:$", line)]
        for cls in (run_settings.RunSettings, task_settings.CausalLmSettings, Gpt2Pretraining):
            assert f"{cls.__doc__.splitlines()[0].rstrip('.')}:" in titles
        assert ("(recipe: 1024)" in out) == (len(argv) > 1 or "=" in argv[0])
    with pytest.raises(UsageError, match="is for the task bert_pretraining, this script trains gpt2_pretraining"):
        run_settings.parse(["--recipe", "bert_base", "--help"], "gpt2_pretraining", "")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/anywhere/recipes/__main__.py", "python -m recipes"),
        ("/usr/bin/accelerate-recipes", "accelerate-recipes"),
        ("scripts/pretrain_bert.py", "pretrain_bert.py"),
    ],
)
def test_the_program_is_named_as_it_was_called(monkeypatch, capsys, path, name):
    def read_output(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", [path, *words])
        exit_code(program.main)
        return "".join(capsys.readouterr())

    assert read_output("--help").startswith(f"usage: {name} COMMAND")
    assert f"  {name} list\n" in read_output()
    assert read_output("plan", "--help").startswith(f"usage: {name} plan RECIPE ")
    assert read_output("audit-script", "--help").startswith(f"usage: {name} audit-script ")
    assert read_output("lits") == f"ERROR: {name} lits: did you mean list or lint?\n"
    assert f"see {name} plan --help" in read_output("plan", "bert_base", "--on")
    assert read_output("audit-script").startswith(f"ERROR: {name} audit-script: the program is missing")


# ---------------------------------------------------------------------------------------------------------------------
# Strictness


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan bert_base 4xt4", "unexpected argument '4xt4'"),
        ("plan bert_base --num_process 2", "unknown flag --num_process: did you mean --num_processes"),
        ("plan bert_base --global_batch_siz=2", "unknown flag --global_batch_siz: did you mean --global_batch_size"),
        ("plan bert_base --zzzzzz", "unknown flag --zzzzzz: see recipes plan --help"),
        ("plan bert_base --lr 1e-3", "unknown flag --lr: did you mean --learning_rate?"),
        ("plan bert_base --bf16", "unknown flag --bf16: did you mean --mixed_precision?"),
        ("plan bert_base --on", "argument --on: expected one argument; see recipes plan --help"),
        ("plan bert_base --learning_rate -1", "learning_rate is -1.0, must be greater than 0"),
        ("plan bert_base --learning_rate=-1e-3", "learning_rate is -0.001, must be greater than 0"),
        ("plan --on 4xt4 bert_base", "it needs a recipe as its first word"),
        (
            "--on 4xt4",
            "recipes --on: valid names: advise, audit-script, chat, check-model, compare, doctor, launch, lint, list, plan, "
            "scale, show, show-data, watch",
        ),
        ("audit-script --step 3 -- a.py", "unexpected '--step': did you mean --steps or --stop?; the program"),
        ("audit-script --steps x -- a.py", "argument --steps: invalid int value: 'x'; see recipes audit-script --help"),
        ("audit-script a.py", "unexpected 'a.py': the program and its flags come after --"),
    ],
)
def test_strict(capsys, line, message):
    code, out, err = run(capsys, line)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


def test_the_precision_of_a_script_is_the_launchers():
    for word in ("--bf16", "--mixed_precision"):
        with pytest.raises(
            UsageError, match="precision is the launch file's: accelerate launch --mixed_precision bf16"
        ):
            run_settings.parse([word], "bert_pretraining", "")


@pytest.mark.rooms
def test_both_ways_to_give_a_value(capsys):
    lines = ("--num_processes 3 --gradient_checkpointing true", "--num_processes=3 --gradient_checkpointing")
    first, second = (run(capsys, f"plan bert_base --json {flags}") for flags in lines)
    assert first == second
    assert json.loads(first[1])["num_processes"] == 3


WORDS = st.sampled_from(
    [
        "list",
        "plan",
        "scale",
        "bert_base",
        "--on",
        "4xt4",
        "--json",
        "--help",
        "-h",
        "--",
        "--on=",
        "-1",
        "--learning_rate",
        "\0.yaml",
        "\udcff.yaml",
    ]
) | st.text(st.characters(blacklist_categories=[]), max_size=8)


@given(argv=st.lists(WORDS, max_size=5))
@settings(max_examples=150, deadline=None)
def test_no_words_end_in_a_traceback(argv):
    err, out = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = exit_code(lambda: program.main(argv))
    lines = err.getvalue().splitlines()
    assert code == (2 if lines else 0)
    assert all(line.startswith("ERROR: ") and line.isprintable() and len(line) < 1000 for line in lines)


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
    argv = ["plan", "bert_base", "--on", "1xt4", f"--{flag}={value}"]
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        code = exit_code(lambda: program.main(argv))
    if code:
        assert (code, out.getvalue()) == (2, "")
        assert err.getvalue().startswith("ERROR: ")
        assert flag in err.getvalue() or flag == "on"
        assert "Traceback" not in err.getvalue()
