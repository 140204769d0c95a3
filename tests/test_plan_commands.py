"""The command that a plan prints is the training that was planned: recipe, fields that flags change, cut, launch file."""

import datetime
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import launch_command_parser
from common import python_path, tasks_of

from samestep import cli
from samestep.errors import UsageError, exit_code
from samestep.printing import round_number
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from stepplan.base_models import find_base_model
from stepplan.hardware import parse
from stepplan.placement import place
from stepplan.rows import count_rows
from stepplan.workload import from_recipe

ROOT = Path(__file__).parents[1]


def run(capsys, *words: str) -> str:
    code = exit_code(lambda: cli.main(words))
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def read_commands(printed: str) -> list[str]:
    """Read the commands below `Launch`, as a shell reads them."""
    block = re.search(r"^Launch\n(.*?)\n\n", printed, re.MULTILINE | re.DOTALL)[1]
    assert all(len(line) <= 100 for line in printed.splitlines() if " " in line.strip())
    return block.replace("\\\n", "").splitlines()


def read_launch(command: str):
    """Parse a launch by Accelerate's own parser and by the script's own."""
    words = [word for word in shlex.split(command) if not word.startswith("OMP_NUM_THREADS=")]
    assert words[:2] == ["accelerate", "launch"]
    launch = launch_command_parser().parse_args(words[2:])
    program = Path(launch.training_script)
    recipe, settings = run_settings.parse(launch.training_script_args, tasks_of(program.stem), "")
    return launch, recipe, settings


OVERRIDES = """--max_seq_length 512 --learning_rate 3e-4 --train_file 'a dir/*.txt' "it's.txt" --global_batch_size 64
--num_train_epochs 2 --warmup_ratio 0.1 --tokenizer_name none --do_lower_case false --text_column '$(text) "x"'"""


@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("bert_base --on 1x3090", OVERRIDES),
        ("gpt2_774m --on 4x3090 --attn_implementation eager", "--max_train_steps 7000 --lr_first_step=0"),
        ("gpt2_124m --on 8xa100-80 --num_train_tokens 1e9", ""),
        ("bert_base --on 4xt4 --mixed_precision no --gradient_checkpointing --gradient_accumulation_steps 3", ""),
        ("captcha_3xa100 --on 3xa100-40", "--conv_channels 8 16 --alphabet 0123"),
        ("bert_small_cpu --on 2xcpu", "--num_warmup_steps 3 --vocab_size 1000"),
    ],
)
def test_a_printed_command_is_the_planned_training(capsys, recipe, flags):
    words = ["plan", *shlex.split(recipe), *shlex.split(flags)]
    answer = json.loads(run(capsys, *words, "--json"))
    *_, command = read_commands(run(capsys, *words))
    launch, planned, settings = read_launch(command)
    assert shlex.split(command) == shlex.split(answer["command"])
    assert planned.fingerprint == answer["fingerprint"]
    b = settings.per_device_train_batch_size
    assert (b, planned.global_batch_size) == (answer["per_device_train_batch_size"], answer["global_batch_size"])
    assert getattr(settings, "gradient_checkpointing", False) == answer["gradient_checkpointing"]
    if "a dir" in flags:
        assert planned.train_file == ("a dir/*.txt", "it's.txt")
        assert (planned.tokenizer_name, planned.text_column) == (None, '$(text) "x"')
    if answer["write_command"] is None:
        file = yaml.safe_load(Path(launch.config_file).read_text())
        assert (launch.mixed_precision or file["mixed_precision"]) == answer["mixed_precision"]


def test_a_launch_file_is_written_by_the_command_before_it(monkeypatch, capsys, tmp_path):
    """And a recipe of one's own keeps its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my own.yaml").write_text("extends: gpt2_774m\nmax_train_steps: 9000\n")
    words = ["plan", "my own.yaml", "--on", "5x3090", "--n_layer", "2"]
    write, command = read_commands(run(capsys, *words))
    written = shlex.split(write)
    written = written[written.index("plan") :]  # in front of it stands what this process was started by
    for _ in range(2):  # the second time nothing is in its way
        again = run(capsys, *written)
    assert read_commands(again) == [command]
    launch, planned, _ = read_launch(command)
    assert planned == load("my own.yaml", {"n_layer": 2})
    file = Path(launch.config_file)
    assert yaml.safe_load(file.read_text())["num_processes"] == 5
    comment = next(line for line in file.read_text().splitlines() if "accelerate launch" in line)
    assert shlex.split(comment.removeprefix("# ")) == shlex.split(command)
    file.write_text("num_processes: 6\n")
    assert exit_code(lambda: cli.main(written)) == 2


@pytest.mark.distributed
def test_a_printed_command_trains(monkeypatch, capsys, tmp_path):
    """As it is printed, pasted into a shell, in any folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my texts"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text("\n\n".join(f"One word {n}. Two words {n * number}." for n in range(40)))
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    small |= {"max_seq_length": 32, "vocab_size": 64, "lr_scheduler_type": "linear"}
    Path("tiny one.yaml").write_text("extends: bert_small_cpu\n" + yaml.safe_dump(small))
    words = ["plan", "tiny one.yaml", "--on", "1xcpu", "--train_file", "my texts/*.txt", "--max_train_steps", "2"]
    words += ["--global_batch_size", "6", "--per_device_train_batch_size", "4"]
    answer = json.loads(run(capsys, *words, "--json"))
    (command,) = read_commands(run(capsys, *words))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command],
        env=os.environ | {"PATH": path, "PYTHONPATH": python_path(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (file,) = Path("runs").glob("*/recipe.yaml")
    trained = load(str(file))
    assert (trained.fingerprint, trained.max_train_steps) == (answer["fingerprint"], 2)


def read_remedies(capsys, words: list[str]) -> list[tuple[list[str], str]]:
    """Read what a refusal proposes: the words of each command, and what is said of it."""
    assert exit_code(lambda: cli.main(words)) == 2
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    texts = [re.fullmatch(r"(.*) \((.*)\)", part).groups() for part in line.split("this fits: ")[1].split(", or ")]
    first = shlex.split(texts[0][0])
    first = first[first.index("plan") :]
    return [(first, texts[0][1]), *(([*words, *shlex.split(flags)], said) for flags, said in texts[1:])]


@pytest.mark.parametrize(
    "line",
    [
        "plan gpt2_xl_8xa100 --on 1x3090 --n_layer 40 --json",
        "plan gpt2_774m --on 1xrtx3090 --block_size 1024 --n_layer 60",
        "plan bert_large_phase1 --on 1x4070ti --num_hidden_layers 90",
    ],
)
def test_a_refusal_says_what_to_change(capsys, line):
    """On the same hardware the fastest recipe first, then other hardware: all of it fits, as it is printed."""
    words = [word for word in line.split() if word != "--json"]
    remedies = read_remedies(capsys, line.split())
    own = load(words[1], dict(zip((f[2:] for f in words[4::2]), map(int, words[5::2]), strict=True)))
    speeds = []
    for command, said in remedies:
        answer = json.loads(run(capsys, *(word for word in command if word != "--json"), "--json"))
        assert answer["memory_needed"] <= answer["memory_of_device"]
        keeps = "the same steps" in said
        assert (answer["fingerprint"] == own.fingerprint) == keeps
        assert said.startswith(f"{round_number(answer['tokens_per_second'])} tokens/s, ")
        assert keeps or answer["hardware"].split("x")[1:] == str(parse(words[3])).split("x")[1:]
        speeds.append((keeps, answer["tokens_per_second"]))
    here = [speed for keeps, speed in speeds if not keeps]
    assert here == sorted(here, reverse=True)
    assert [keeps for keeps, _ in speeds] == sorted(keeps for keeps, _ in speeds)
    assert speeds[-1][0]


def test_what_fits_nowhere_says_so(capsys):
    line = "plan gpt2_xl_8xa100 --on 1x3090 --n_embd 102400"
    assert exit_code(lambda: cli.main(line.split())) == 2
    assert "no known device holds it" in capsys.readouterr().err


def test_money_and_tokens(capsys):
    words = ["plan", "gpt2_124m", "--on", "8xa100-80", "--num_train_tokens", "10e9", "--price_per_hour", "1.5"]
    answer = json.loads(run(capsys, *words, "--json"))
    recipe = load("gpt2_124m")
    tokens = recipe.global_batch_size * recipe.block_size
    assert (answer["num_steps"] - 1) * tokens < 10e9 <= answer["num_steps"] * tokens == answer["num_tokens"]
    assert f"--max_train_steps {answer['num_steps']}" in answer["command"]
    hours = answer["seconds_to_end"] / 3600
    assert answer["cost"] == pytest.approx(8 * 1.5 * hours)
    assert answer["cost_range"] == pytest.approx([answer["cost"] / 1.25, 1.25 * answer["cost"]])
    assert answer["checkpoint_bytes"] == 12 * answer["num_parameters"]
    first = run(capsys, *words).split("\n\n")[0]
    for needle in ("fits", " hours (", "8 devices", f"${answer['cost']:.0f}"):
        assert needle in " ".join(first.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("gpt2_124m --num_train_tokens 1e9 --max_train_steps 9", "max_train_steps: leave out one"),
        ("resnet50_1xv100 --num_train_tokens 1e9", "reads images"),
        ("gpt2_124m --num_train_tokens 0", "num_train_tokens is 0"),
        ("gpt2_124m --num_train_tokens=-1e9", "num_train_tokens is -1e9"),
        ("gpt2_124m --num_train_tokens many", "num_train_tokens is many"),
        ("bert_base --price_per_hour 1", "--price_per_hour needs hardware"),
        ("bert_base --on 4xt4 --price_per_hour 0", "price_per_hour is 0"),
    ],
)
def test_mistakes(capsys, line, message):
    assert exit_code(lambda: cli.main(["plan", *line.split()])) == 2
    assert message in capsys.readouterr().err


def test_the_day_it_ends(capsys):
    """From a start, or from now: then the date is in the text only, so that answers and pages stay the same."""
    words = ["plan", "gpt2_124m", "--on", "8xa100-80", "--max_train_steps", "600000"]
    answer = json.loads(run(capsys, *words, "--json"))
    assert (answer["start"], answer["end"]) == (None, None)
    assert re.search(r"ends on \w+day \d+ \w+ if it starts now \(", " ".join(run(capsys, *words).split()))
    words += ["--start", "2026-11-25T17:00"]
    answer = json.loads(run(capsys, *words, "--json"))
    end = datetime.datetime(2026, 11, 25, 17) + datetime.timedelta(seconds=answer["seconds_to_end"])
    assert answer["end"] == end.isoformat(timespec="minutes")
    text = " ".join(run(capsys, *words).split())
    assert f"ends on {end:%A} {end.day} November (" in text


def test_the_day_is_said_once(capsys):
    words = "gpt2_124m --on 8xa100-80 --max_train_steps 60000 --start".split()
    text = " ".join(run(capsys, "plan", *words, "2026-11-25T10:00").split())
    assert re.search(r"ends on Wednesday 25 November \d\d:\d\d \(\d\d:\d\d to \d\d:\d\d\)", text)
    text = " ".join(run(capsys, "plan", *words, "2026-11-25T16:00").split())
    assert re.search(r"\(Wednesday 25 November \d\d:\d\d to Thursday 26 November \d\d:\d\d\)", text)


def test_a_plan_of_several_nodes_has_the_command_of_a_job(capsys, tmp_path):
    """The command works as printed, and its job trains what was planned; one node needs none."""
    subject = "plan --model_name_or_path meta-llama/Llama-2-7b --seq_len 2048 --num_train_samples 5000".split()
    answer = json.loads(run(capsys, *subject, "--on", "2x8xa100-80", "--json"))
    words = shlex.split(answer["job_command"])
    words = words[words.index("launch") :]
    words[words.index("job.sbatch")] = str(tmp_path / "job.sbatch")
    assert exit_code(lambda: cli.main(words)) == 0
    job = (tmp_path / "job.sbatch").read_text()
    assert "no --time" not in capsys.readouterr().err
    for flag in ("--train_file chats.jsonl", "--learning_rate 2e-05", "--output_dir /shared/runs/NAME"):
        assert flag in job
    assert "#SBATCH --time=" in job
    assert json.loads(run(capsys, *subject, "--on", "8xa100-80", "--json"))["job_command"] is None


def test_a_written_recipe_is_the_planned_training(monkeypatch, capsys, tmp_path):
    """Of a recipe with changes, of a file of one's own in another folder, and of a model of the hub without a recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "base.yaml").write_text("extends: gpt2_124m\nmax_train_steps: 9000\n")
    for name in ("gpt2_124m", "own/base.yaml"):
        words = ["plan", name, "--on", "1x3090", "--block_size", "512", "--train_file", "a b.txt", "c.txt"]
        planned = json.loads(run(capsys, *words, "--json"))
        words += ["--write_recipe", f"{Path(name).stem}-short.yaml"]
        *_, command = read_commands(run(capsys, *words))
        launch, recipe, _ = read_launch(command)
        assert launch.training_script_args[:2] == ["--recipe", words[-1]]
        assert "--block_size" not in command
        assert (recipe.fingerprint, recipe.block_size) == (planned["fingerprint"], 512)
        assert recipe.train_file == ("a b.txt", "c.txt")
    config = {"architectures": ["Qwen3ForCausalLM"], **find_base_model("Qwen/Qwen3-0.6B")}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    words = [
        "plan",
        "model",
        "--from_scratch",
        "false",
        "--seq_len",
        "1024",
        "--global_batch_size",
        "64",
        "--on",
        "4xl4",
    ]
    *_, command = read_commands(run(capsys, *words, "--write_config", "launch.yaml"))
    _, without_file, _ = read_launch(command)
    words += ["--write_recipe", "mine.yaml", "--write_config", "launch.yaml"]
    *_, command = read_commands(run(capsys, *words))
    launch, recipe, settings = read_launch(command)
    assert recipe.fingerprint == without_file.fingerprint
    assert (recipe.task, recipe.model_name_or_path) == ("causal_lm_finetuning", "model")
    assert (recipe.max_seq_length, recipe.global_batch_size, recipe.train_file) == (1024, 64, ("chats.jsonl",))
    assert recipe.learning_rate == recipe.scaled_hyperparameters().learning_rate == 2e-5
    assert yaml.safe_load(Path(launch.config_file).read_text())["num_processes"] == 4
    assert settings.per_device_train_batch_size


def test_a_model_of_the_hub_is_planned_as_its_recipe(monkeypatch, capsys):
    """The numbers are the recipe's, and what is proposed where it does not fit works as typed."""
    name, lengths = "Qwen/Qwen3-0.6B", {"--model_name_or_path": "--seq_len", "sft_small_cpu": "--max_seq_length"}
    flags = ["--global_batch_size", "256", "--on", "4xl4", "--json"]
    own, recipe = (
        json.loads(run(capsys, "plan", *first, lengths[first[0]], "2048", *flags))
        for first in (["--model_name_or_path", name], ["sft_small_cpu", "--model_name_or_path", name])
    )
    for key in ("memory", "time", "states", "num_parameters", "per_device_train_batch_size", "download_bytes"):
        assert own[key] == recipe[key]
    assert (own["recipe"], recipe["recipe"]) == ("Qwen3-0.6B", "sft_small_cpu")
    words = ["plan", "--model_name_or_path", "Qwen/Qwen3-8B", "--seq_len", "2048", "--global_batch_size", "64"]
    assert exit_code(lambda: cli.main([*words, "--on", "1xl4"])) == 2
    proposed = re.search(r"this fits: .*?(plan .*?) \(", capsys.readouterr().err)[1]
    assert "  fits       yes: " in run(capsys, *shlex.split(proposed))
    curve = run(capsys, "scale", "--model_name_or_path", name, "--seq_len", "512", *flags[:2], "--on", "l4")
    assert curve.startswith("Qwen3-0.6B on l4")


@pytest.mark.parametrize(
    ("words", "num_steps"),
    [
        (["bert_base", "--on", "4xt4", "--num_train_epochs", "3", "--warmup_ratio", "0.1"], 12),
        (["llama3_8b_lora_3090", "--on", "1x3090", "--num_warmup_steps", "6"], 63),
    ],
)
def test_what_is_missing_for_the_hours_is_asked_for(words, num_steps, capsys):
    words = ["plan", *words]
    answer = json.loads(run(capsys, *words, "--json"))
    assert (answer["missing"], answer["seconds_to_end"]) == ("num_train_samples", None)
    assert "--num_train_samples" in run(capsys, *words)
    answer = json.loads(run(capsys, *words, "--num_train_samples", "1000", "--json"))
    assert (answer["missing"], answer["num_steps"]) == (None, num_steps)
    assert "--num_train_samples" not in answer["command"]


def test_a_configuration_without_a_class_says_what_to_add(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "hidden_size": 64}')
    words = ["plan", "--model_name_or_path", str(tmp_path), "--seq_len", "64", "--on", "1xt4"]
    with pytest.raises(UsageError, match=r'its config.json names no class: add its name, .*"architectures": \["Mamba'):
        cli.main(words)


def test_hosts_that_are_not_known_are_no_yes(capsys):
    """Whole weights of 671 billion parameters for each of 8 processes of a machine, whose memory nobody knows."""
    text = " ".join(
        run(capsys, *"plan --model_name_or_path deepseek-ai/DeepSeek-V3 --on 16x8xb300 --seq_len 4096".split()).split()
    )
    assert "fits the devices; of the hosts it is not known, which need 21" in text


def test_the_job_of_a_plan_is_cut_as_the_plan(capsys):
    """What was chosen for the plan stands in the command that makes the job, and in the job."""
    words = "gpt2_124m --on 2x8xh100 --sharded --gradient_checkpointing --per_device_train_batch_size 10".split()
    answer = json.loads(run(capsys, "plan", *words, "--interruptions_per_day", "3", "--json"))
    minutes = f"--checkpointing_minutes {answer['checkpointing_seconds'] / 60:.3g}"
    assert answer["command"].endswith(minutes)
    job = shlex.split(answer["job_command"])
    assert job[-2:] == minutes.split()
    place = job.index("--write")
    text = run(capsys, *job[job.index("launch") : place], *job[place + 2 :])
    for part in ("distributed_type: FSDP", "--per_device_train_batch_size 10", "--gradient_checkpointing", minutes):
        assert part in text, part
    plain = json.loads(run(capsys, "plan", "gpt2_124m", "--on", "2x8xh100", "--json"))
    assert "checkpointing_minutes" not in plain["command"] + plain["job_command"]
    assert "sharded" not in plain["job_command"]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder"])
def test_rows_of_ones_own_files_are_counted(kind, capsys, tmp_path):
    """By plan and by launch, less those held out; a row that cannot be read is none."""
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pa.table({"prompt": ["a"] * 200, "completion": ["b"] * 200}), file)
    elif kind == "csv":
        file.write_text("prompt,completion\n" + 'a,"b\nc"\n' * 200)
    else:
        file = tmp_path / "rows.jsonl"
        file.write_text('{"prompt": "a", "completion": "b cd ef"}\n' * 200 + '\n{"prompt": \n')
    words = ["llama3_8b_lora_3090", "--train_file", str(tmp_path if kind == "folder" else file)]
    answer = json.loads(run(capsys, "plan", *words, "--on", "1x3090", "--json"))
    assert (answer["train_rows"]["num_rows"], answer["train_rows"]["num_held_out"]) == (200, 10)
    assert (answer["missing"], answer["num_steps"]) == (None, 12)  # 190 samples in steps of 16
    text = " ".join(run(capsys, "plan", *words, "--on", "1x3090").split())
    assert "rows 200 in the files, of which 10 are held out; " in text
    is_measured = kind in ("jsonl", "folder")  # 8 characters
    assert ("about 2 tokens each, and at most 2,048 (max_seq_length) " in text) == is_measured
    assert ("each is counted with the most tokens that it may have, 2,048" in text) == (kind == "parquet")
    assert ("with rows as long as yours; at most " in text) == is_measured, "a sample has two tokens or more"
    assert "are longer" not in text
    if is_measured:
        short = json.loads(run(capsys, "plan", *words, "--on", "1x3090", "--json", "--max_seq_length", "2"))
        mean = answer["of_mean_rows"]
        assert short["seconds_to_end"] <= mean["seconds_to_end"] < 0.5 * answer["seconds_to_end"]
    *job, out = [*words, "--on", "slurm:1x3090", "--", "--output_dir", "/runs/x"]
    assert "#SBATCH --time=" in run(capsys, "launch", *job, out)


def test_rows_that_a_run_leaves_out_are_said(capsys, tmp_path):
    """Half of the rows have about 25 tokens, half 2,500: these are left out, and the time is of the others."""
    rows = [json.dumps({"prompt": "a" * size, "completion": ""}) for size in (100, 10_000)] * 100
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    words = ["plan", "llama3_8b_lora_3090", "--train_file", str(tmp_path / "rows.jsonl"), "--on", "1x3090"]
    text = read_plan(capsys, *words)
    assert "about 25 tokens each, and at most 2,048 (max_seq_length). About 100 are longer, and are left out: " in text
    assert "--max_seq_length 2500 keeps all, --truncation cut cuts them" in text
    answer, cut = (json.loads(run(capsys, *words, "--json", *more)) for more in ((), ("--truncation", "cut")))
    assert (answer["train_rows"]["num_long"], answer["train_rows"]["mean_tokens"]) == (100, 25)
    assert (cut["train_rows"]["num_long"], cut["train_rows"]["mean_tokens"]) == (0, 1262)
    assert answer["of_mean_rows"]["seconds_to_end"] < 0.6 * cut["of_mean_rows"]["seconds_to_end"]
    assert "are longer" not in read_plan(capsys, *words, "--truncation", "cut")


def test_what_is_not_counted_is_planned_all_the_same(capsys, tmp_path):
    """Files that are on another machine, that are no data, or that take long to read."""
    words = ["plan", "llama3_8b_lora_3090", "--on", "1x3090", "--train_file"]
    assert "samples that are not counted: data file gone.jsonl: no such file" in read_plan(capsys, *words, "gone.jsonl")
    (tmp_path / "one.jsonl").write_text('{"text": "a"}\n' * 2)
    assert "not counted: it holds 2 rows, of which 2 are held out" in read_plan(
        capsys, *words, str(tmp_path / "one.jsonl")
    )
    recipe = load("llama3_8b_lora_3090", {"train_file": [str(tmp_path / "one.jsonl")]})
    assert (
        count_rows(recipe, max_bytes=10).why == "its files have 2.8e-08 GB, and plan reads up to 1e-08 GB to count them"
    )
    (tmp_path / "bad.parquet").write_text("no table")
    assert "cannot be read" in read_plan(capsys, *words, str(tmp_path / "bad.parquet"))


def read_plan(capsys, *words):
    return " ".join(run(capsys, *words).split())


def test_what_widens_a_range_is_said_in_one_line(capsys):
    usual, other = (json.loads(run(capsys, "plan", "gpt2_124m", "--on", on, "--json")) for on in ("4xa100-80", "4xl4"))
    assert (usual["never_compared"], other["never_compared"]) == ([], ["of l4"])
    assert other["speed_band"] == pytest.approx(1.5 * usual["speed_band"])
    seconds, band = other["seconds_to_end"], other["speed_band"]
    assert other["seconds_to_end_range"] == pytest.approx([seconds / (1 + band), seconds * (1 + band)])
    text = " ".join(run(capsys, "plan", "gpt2_124m", "--on", "4xl4").split())
    assert "the range is 38%, wider than held 9 of 10 published speeds, as none of them is of l4" in text
    table = " ".join(run(capsys, "plan", "gpt2_124m", "--on", "4xa100-80,4xl4").split())
    assert "Ranges: 9 of 10 held-out published speeds lay within 25% to 38%; none of them is of l4." in table


def test_compiled_layers_and_other_kernels_are_planned(capsys):
    words = ("plan", "gpt2_124m", "--on", "8xh100", "--json")
    eager = json.loads(run(capsys, *words))
    compiled = json.loads(run(capsys, *words, "--compiled"))
    assert compiled["samples_per_second"] > 1.1 * eager["samples_per_second"]
    assert ["--torch_compile" in each["command"] for each in (eager, compiled)] == [False, True]
    old = json.loads(run(capsys, *words, "--attention_kernel", "flash_1"))
    assert old["time"]["attention"] > 2 * eager["time"]["attention"]
    refused = ("plan", "resnet50_1xv100", "--on", "1xv100-32", "--compiled")
    assert exit_code(lambda: cli.main(refused)) == 2
    assert "compiled is given, but the time of resnet50_1xv100 is planned without it" in capsys.readouterr().err


def test_a_plan_that_shards_over_pcie_says_what_it_carries(capsys):
    text = " ".join(run(capsys, "plan", "gpt2_xl_8xa100", "--on", "2x3090").split())
    assert "over PCIe 4.0 x16, of which 13.8 GB/s are taken to be reached. At half of that" in text
    assert "exchange over" not in run(capsys, "plan", "gpt2_xl_8xa100", "--on", "8xa100-80")


def test_a_short_training_is_in_plain_numbers(capsys):
    words = ["plan", "bert_small_cpu", "--on", "1xh100", "--max_train_steps", "60"]
    text = run(capsys, *words)
    assert not re.search(r"\de-\d", text.split("Details")[0])


HARDWARE = {"3xa100": "3xa100-40", "8xa100": "8xa100-80", "fsdp2_8xa100": "8xa100-80", "cpu": None, "2xcpu": None}
"""Launch file -> the devices that it means, where its name does not say it; None: micro-batches that no memory limits."""
FILES = [ROOT / "docs" / "hardware.md", *(ROOT / "accelerate_configs").glob("*.yaml")]
LAUNCH = re.compile(
    r"accelerate launch --config_file accelerate_configs/(?!fsdp2_2x)(\w+)\.yaml scripts/\w+\.py \\\n#? +"
    r"--recipe (\w+)(?:.* --per_device_train_batch_size (\d+))?"
)
SMALLER = ("captcha_3xa100", 512)
"""The command of docs/hardware.md that shows another cut, in less memory."""


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_documented_micro_batches_are_the_plans(file):
    launches = LAUNCH.findall(file.read_text(encoding="utf-8"))
    assert launches or "2xcpu" in file.name
    for name, recipe, size in launches:
        hardware = HARDWARE.get(name, name)
        if hardware and size and (recipe, int(size)) != SMALLER:
            placement = place(from_recipe(load(recipe)), parse(hardware), sharded=name.startswith("fsdp2"))
            assert placement.layout.per_device_train_batch_size == int(size), (name, recipe)


def test_several_hardware_are_a_table(capsys):
    names = ["1x3090", "4xt4", "8xh100"]
    words = ["plan", "gpt2_xl_8xa100", "--on", ",".join(names), "--price_per_hour", "0.25,0.3,2.5"]
    rows = json.loads(run(capsys, *words, "--json"))["rows"]
    assert [row["hardware"] for row in rows] == ["8xh100", "4xt4", "1x3090"]
    assert ["problem" in row for row in rows] == [False, False, True]
    alone = ["plan", "gpt2_xl_8xa100", "--on", "8xh100", "--price_per_hour", "2.5", "--json"]
    answer = json.loads(run(capsys, *alone))
    assert all(answer[name] == value for name, value in rows[0].items() if name != "write_command")
    lines = run(capsys, *words).splitlines()
    assert [line.split()[0] for line in lines if line.split()[0] in names] == ["8xh100", "4xt4"]
    assert any(line.startswith("1x3090: ") for line in lines)


def test_the_table_is_sorted_as_asked(capsys, tmp_path):
    """By cost or time; without prices, and without a length, by time; prices may stand in a file, in any spelling."""
    words = ["plan", "gpt2_124m", "--on", "1x3090,8xh100,8x4090,1xt4"]
    prices = {"RTX 3090": 0.25, "H100 SXM": 2.5, "4090": 0.4, "t4": 0.05}
    (tmp_path / "prices.yaml").write_text(yaml.safe_dump(prices))
    orders = {}
    for sort in ("cost", "time", None):
        flags = ["--price_per_hour", str(tmp_path / "prices.yaml"), *(["--sort", sort] if sort else [])]
        rows = json.loads(run(capsys, *words, *flags, "--json"))["rows"]
        orders[sort] = [row["hardware"] for row in rows]
        key = "seconds_to_end" if sort == "time" else "cost"
        assert [row[key] for row in rows] == sorted(row[key] for row in rows)
    assert orders["cost"] == orders[None] != orders["time"]
    rows = json.loads(run(capsys, *words, "--json"))["rows"]
    assert [row["hardware"] for row in rows] == orders["time"]
    assert "dollars" not in run(capsys, *words)
    (tmp_path / "prices.yaml").write_text("t4: 0.05\n")
    assert exit_code(lambda: cli.main([*words, "--price_per_hour", str(tmp_path / "prices.yaml")])) == 2
    assert one_line(capsys.readouterr().err, "has no price of 3090, 4090, h100")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--price_per_hour 1,2,3", "price_per_hour has 3 prices for 2"),
        ("--price_per_hour 1,x", "price_per_hour is x in 1,x"),
        ("--price_per_hour=-1", "price_per_hour is -1"),
        ("--price_per_hour nowhere.yaml", "nowhere.yaml"),
        ("--trace", "--trace with several"),
        ("--write_config a.yaml", "--write_config with several"),
        ("--sort cost", "needs prices"),
        ("--sort price", "sort is 'price', must be one of cost, time"),
        ("--disk 5", "disk is '5', must be a bandwidth"),
        ("--start tomorrow", "start is tomorrow, must be a date"),
        ("--interruptions_per_day 0", "interruptions_per_day is 0"),
        ("--interruptions_per_day 1e9", "interruptions_per_day is 1"),
    ],
)
def test_mistakes_with_several_hardware(capsys, flags, message):
    assert exit_code(lambda: cli.main(["plan", "bert_base", "--on", "1x3090,4xt4", *flags.split()])) == 2
    assert one_line(capsys.readouterr().err, message)


def one_line(error: str, message: str) -> bool:
    assert message in error
    assert error.count("\n") == 1
    return True


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("plan bert_base --on 0x3090", "counts 0 devices"),
        ("plan bert_base --on 1000000x3090", "counts 1,000,000 devices"),
        ("plan bert_base --on 1xnosuch", "unknown device 'nosuch'"),
        ("plan bert_base --on 1x3090,", "hardware '' is not"),
        ("plan bert_base --on ,", "hardware '' is not"),
        ("plan bert_base --on 2xm4-max", "torch trains on one m4-max only"),
        (f"plan bert_base --on {','.join(['1xt4'] * 200)}", "names 200 hardware, must be 64 or fewer"),
        ("plan bert_base --on 1x3090 --sort time", "with one hardware"),
        ("plan bert_base --sort time", "--sort needs hardware"),
        ("plan bert_base --start 2026-01-01", "--start needs hardware"),
        ("plan bert_base --write_recipe a.yaml", "no field of the recipe is changed"),
        ("plan bert_base --max_seq_length 64 --write_recipe a", "ends in .yaml"),
        ("plan --what_fits 0xt4", "counts 0 devices"),
        ("plan --what_fits nosuch", "unknown device 'nosuch'"),
        ("plan --what_fits 1xt4,1x3090", "name one hardware"),
        ("plan --what_fits 8xt4 --global_batch_size 4", "must be 8 or more"),
        ("plan --what_fits 1xt4 --seq_len 0", "seq_len is 0"),
        ("plan --what_fits 1xt4 --price_per_hour 0", "price_per_hour is 0"),
        ("plan --what-fits 1xt4 --nosuch 1", "unknown flag --nosuch"),
        ("plan --what_fits", "expected one argument"),
    ],
)
def test_absurd_requests_end_in_one_line(capsys, line, message):
    assert exit_code(lambda: cli.main(line.split())) == 2
    assert one_line(capsys.readouterr().err, message)


def test_numbers_of_a_plan_are_written_for_people(capsys, tmp_path):
    """1 interruption, gigabytes of gradients, and a name with what is done."""
    config = find_base_model("Qwen/Qwen3-0.6B") | {"architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "m15").mkdir()
    (tmp_path / "m15" / "config.json").write_text(json.dumps(config))
    model = f"{tmp_path / 'm15'} --from_scratch false --seq_len 512 --global_batch_size 64"
    words = f"{model} --max_train_steps 90000 --on 4x3090 --interruptions_per_day 1".split()
    text = " ".join(run(capsys, "plan", *words).split())
    assert "With 1 interruption a day" in text
    assert re.search(r"all-reduce [0-9.]+ GB of gradients", text)
    assert "m15: Fine-tuning a causal language model, from m15, on" in text
