"""Every command that is printed works as it is printed: see `printed` for where they are.

All are read: by the program's own parser, the launch file by Accelerate's own loader, and the recipe is planned. Plans and
audits are run. Of the trainings one for each script and each launch file is run, and all that read files, on shrunken models
and a CPU.
A command of an unknown kind fails: it gets a check here, or its block a language that holds no commands.
"""

import contextlib
import csv
import http.server
import io
import itertools
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution, entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from chat_bases import save_base
from common import ROOT, all_metrics, launch_environment, load_docs_program, task_of, tasks_of
from PIL import Image
from printed import Printed, all_commands, documents, in_markdown, split
from run_benchmarks import list_benchmarks

from samestep import cli
from samestep.cut.layout import solve_layout
from samestep.errors import exit_code
from samestep.recipe import catalog as recipes
from samestep.recipe import run_settings
from samestep.recipe.settings import program_name
from stepaudit import script as audit

COMMANDS = all_commands()
sources, trees = load_docs_program("sources"), load_docs_program("trees")
SHOWN_TO_WORK = {
    tuple(shlex.split(command))
    for command in [
        *sources.read()["commands"].values(),
        *(leaf["command"] for tree in trees.TREES.values() for leaf in trees.list_leaves(tree)),
    ]
}
"""Words of the commands of docs/sources.md and docs/which-cut.md: each is run, trainings as well."""
AUDITED: set[tuple[str, ...]] = set()
"""Flags of audits that are done: documents and help print the same one."""
LINKED = (
    "accelerate_configs",
    "scripts",
    "recipes",
    "tests",
    "benchmarks",
    "requirements.txt",
    "pyproject.toml",
    "Makefile",
)
VARIABLES = {"$SLURM_NODEID": "1", "$MAIN": "10.0.0.1"}
"""What documents leave to the shell, and a value of it."""
PROGRAM = """
import argparse, os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--per_device_train_batch_size", "--batch", "-b", dest="b", type=int)
parser.add_argument("--gradient_accumulation_steps", "--accum", dest="k", type=int)
parser.add_argument("--output_dir")
parser.add_argument("--resume_from_checkpoint")
flags, words = parser.parse_known_args()
b, k = flags.b, flags.k or int(words[0].removeprefix("optim.accum="))
rank, n = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
samples, model = torch.randn(128, 4, dtype=torch.float64), torch.nn.Linear(4, 1).double()
first_step, plain = 0, model
if flags.resume_from_checkpoint:
    first_step, weights = torch.load(flags.resume_from_checkpoint)
    plain.load_state_dict(weights)
if n > 1:
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(first_step, 128 // (b * k * n)):
    for micro in range(k):
        first = ((step * k + micro) * n + rank) * b
        (model(samples[first : first + b]).square().mean() / k).backward()
    optimizer.step()
    optimizer.zero_grad()
    if flags.output_dir and rank == 0:
        torch.save([step + 1, plain.state_dict()], os.path.join(flags.output_dir, "last"))
"""
# Fields of recipes: what makes a training take moments. Tiny data is laid where a command names files.
SHRUNKEN = {
    "max_train_steps": 2,
    "num_warmup_steps": 0,
    "lr_scaling_rule": "none",
    "lr_num_steps": "none",
    "lr_first_step": 0,
    "tokenizer_name": "none",
    "model_name_or_path": "none",
    "validation_fraction": 0.1,
    "vocab_size": 600,
    "max_seq_length": 48,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "block_size": 48,
    "n_positions": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "conv_channels": "2 4",
    "layer_type": "basic",
    "embedding_size": 4,
    "hidden_sizes": "4 8",
    "depths": "1 1",
}
DATA = {
    "pretrain_bert": "--train_file corpus/*.txt",
    "pretrain_gpt2": "--train_file corpus/*.txt",
    "finetune_classifier": "--train_file labelled.csv",
    **dict.fromkeys(("finetune_causal_lm", "finetune_seq2seq"), "--num_train_samples 60 --num_validation_samples 20"),
    "train_image_classifier": "--dataset_name builtin/digits --num_train_samples 1438 --num_labels 10 --num_channels 1 "
    "--image_mean 0.3 --image_std 0.3 --image_height 16 --image_width 16",
    "train_captcha": "--num_train_samples 60 --num_validation_samples 20 --image_height 40 --image_width 96",
}
MODEL = {
    "finetune_causal_lm": "--max_seq_length 256 --num_generations 2 --architecture llama --max_position_embeddings 256 "
    "--tie_word_embeddings true --initializer_range 0.1",
    "finetune_seq2seq": "--num_generations 2",
}
DRAWN = {"sft_small_cpu", "speech_small_cpu", "vlm_small_cpu"}
"""Recipes that draw thousands of conversations, images or sounds; `show-data` draws some."""
MAX_PROCESSES, MAX_MICRO_BATCHES = 3, 4


@pytest.fixture(scope="module")
def files(corpus, tmp_path_factory) -> Path:
    """Make a folder that looks like a checkout and holds every file that a command names."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    (folder / "train.py").write_text(PROGRAM)
    documents = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    for name in ("corpus", "data", "Qwen/Qwen3-0.6B"):
        (folder / name).mkdir(parents=True)
    for number, text in enumerate(documents):
        (folder / "corpus" / f"{number}.txt").write_text(text, encoding="utf-8")
    (folder / "data" / "corpus.jsonl").write_bytes(corpus.read_bytes())
    (folder / "tinyshakespeare.txt").write_text("\n\n".join(documents), encoding="utf-8")
    sentences = [" ".join(text.split()[:20]) for text in documents]
    for name, half in (("neg", sentences[::2]), ("pos", sentences[1::2])):
        (folder / f"rt-polarity.{name}").write_text("\n".join(half), encoding="latin-1", errors="replace")
    for name, header in (("labelled", ["text", "label"]), ("reviews", ["text", "label"]), ("new", ["text"])):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            rows = zip(sentences, ("negative", "positive") * len(sentences), strict=False)
            csv.writer(file).writerows([header, *(row[: len(header)] for row in rows)])
    chats = [
        [{"role": "user", "content": text[:40]}, {"role": "assistant", "content": text[40:80]}] for text in sentences
    ]
    pairs = [
        {"query": f"{kind} {row}", "positive": f"{kind}ly {row} things"} for row in range(9) for kind in ("good", "bad")
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    for number in range(30):
        image = folder / "photos" / "abc"[number % 3] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20), (9 * number % 256, 40, 40)).save(image)
    (folder / "cifar-10-batches-bin").mkdir()
    for name in ("data_batch_1.bin", "test_batch.bin"):  # of CIFAR-10: 30 images, a label and pixels
        rows = [bytes([number % 10, *([8 * number] * 3072)]) for number in range(30)]
        (folder / "cifar-10-batches-bin" / name).write_bytes(b"".join(rows))
    page = (ROOT / "docs" / "your-own-data.md").read_text(encoding="utf-8")
    (folder / "mine").mkdir()
    (folder / "mine" / "notes.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1])
    for name in ("first", "second", "mine"):  # of runs
        (folder / "runs" / name).mkdir(parents=True)
        line = {"loss": 1.0, "grad_norm": 1.0, "samples": 16, "seconds": 0.1}
        noisy = [line | {"step": n, "grad_signal": 1.0, "grad_noise": 9.0 + n % 2} for n in range(1, 21)]
        (folder / "runs" / name / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in noisy))
        (folder / "runs" / name / "recipe.yaml").write_text(recipes.load("bert_small_cpu").to_yaml())
    qwen = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 64}
    qwen |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    qwen |= {"intermediate_size": 96, "max_position_embeddings": 4096, "tie_word_embeddings": True}
    (folder / "Qwen/Qwen3-0.6B/config.json").write_text(json.dumps(qwen))
    (folder / "Qwen/Qwen3-0.6B/model.safetensors").touch()
    plan = ["plan", "bert_large_phase1", "--on", "2x8xa100-80", "--write_config", "nodes.yaml"]
    for name in ("support/adapter", "support-more"):
        (folder / "runs" / name).mkdir(parents=True)
        adapter = {"base_model_name_or_path": "Qwen/Qwen3-0.6B"}
        (folder / "runs" / name / "adapter_config.json").write_text(json.dumps(adapter))
    with contextlib.chdir(folder), contextlib.redirect_stdout(None):
        cli.main(plan)
    return folder


@pytest.fixture
def checkout(files, tmp_path, monkeypatch) -> Path:
    """Work in a folder with the files, and without what commands left before."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for path in files.iterdir():
        (folder / path.name).symlink_to(path)
    monkeypatch.chdir(folder)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# Kinds of commands


class Launch:
    """Reads a training command: `accelerate launch ... scripts/NAME.py ...`, or `python scripts/NAME.py ...`.

    Attributes:
        program: name of the script.
        argv: the script's flags.
        config: the launch file; None: none is named.
        flags: of the launcher, those with a file left out.
        recipe, settings: as the script reads them.
        num_processes: N.
        mixed_precision: no, bf16 or fp16.
        layout: how the global batch is cut.
    """

    def __init__(self, words: list[str]):
        from stepplan.workload import from_recipe

        self.config, self.num_processes, self.mixed_precision, is_sharded = None, 1, "no", False
        if words[0] == "accelerate":
            arguments = launch_command_parser().parse_args(words[2:])
            script, self.argv, self.config = (
                arguments.training_script,
                arguments.training_script_args,
                arguments.config_file,
            )
            arguments, *_ = _validate_launch_command(arguments)
            self.num_processes, self.mixed_precision = int(arguments.num_processes or 1), arguments.mixed_precision
            is_sharded = arguments.use_fsdp
        else:
            script, *self.argv = words[1:]
        path = Path(script)
        assert path.parent == Path("scripts"), f"{script}: only programs in scripts/ are launched"
        assert path.is_file(), script
        self.program = path.stem
        self.recipe, self.settings = run_settings.parse(self.argv, tasks_of(self.program), "")
        self.layout = solve_layout(
            num_processes=self.num_processes,
            global_batch_size=self.recipe.global_batch_size,
            per_device_train_batch_size=self.settings.per_device_train_batch_size,
            gradient_accumulation_steps=self.settings.gradient_accumulation_steps,
        )
        if self.recipe.is_planned:  # else the planner has no formula
            options = {"mixed_precision": self.mixed_precision, "sharded": is_sharded}
            options |= {"gradient_checkpointing": getattr(self.settings, "gradient_checkpointing", False)}
            assert from_recipe(self.recipe).memory(self.layout, **options).total > 0


def check(command: Printed, monkeypatch, capsys, recorder) -> None:
    """Check a command, and run it if that is cheap. Fails for a kind that it does not know."""
    words = [VARIABLES.get(word, word) for word in command.words]
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    words[:1] = [word.removeprefix(".venv/bin/") for word in words[:1]]
    match words:
        case []:
            pass
        case ["srun", *rest] | ["salloc", *rest]:
            rest = rest[next(index for index, word in enumerate(rest) if not word.startswith("-")) :]
            check(command._replace(words=tuple(rest)), monkeypatch, capsys, recorder)
        case ["bash", "-c", text]:
            for inner in split(text, command.origin):
                check(inner, monkeypatch, capsys, recorder)
        case ["make", *targets]:
            known = set(re.findall(r"^([a-z0-9-]+):", Path("Makefile").read_text(), re.MULTILINE))
            assert {target for target in targets if "=" not in target} <= known
            names = [target.removeprefix("NAME=") for target in targets if target.startswith("NAME=")]
            assert set(" ".join(names).split()) <= {*list_benchmarks(), "..."}
        case ["pip", "install", *options]:
            check_pip(options)
        case ["python", "-m", "recipes", *argv] | ["samestep" | "accelerate-recipes", *argv]:
            check_own_command(command, argv, monkeypatch, capsys, recorder)
        case ["python", "-m", "stepaudit", *argv]:
            words = argv if argv[:1] in ([], ["lint"]) else ["audit-script", *argv]
            check_own_command(command, words, monkeypatch, capsys, recorder)
        case ["ruff", "format" | "check", "."]:
            pass
        case ["python", "-m", "pytest", *files]:
            assert all(Path(file).is_file() for file in files)
        case ["python", "-c", *_]:
            shell = command.text.replace("python", shlex.quote(sys.executable), 1)
            subprocess.run(shell, shell=True, check=True)
        case ["python", name, *_] if not command.is_whole and not name.startswith("scripts/"):
            assert Path(name).is_file()
        case ["python", "tests/toy_task/train_curve.py", "--recipe", recipe, *_]:  # tests/test_toy_task.py trains it
            assert Path(recipe).is_file()
        case ["python", name] if name.startswith("tests/own_loops/"):  # tests/test_own_loops.py runs them
            assert Path(name).is_file()
        case ["python", name] if name.endswith("..."):
            assert Path(name).parent.is_dir()
        case ["accelerate", "launch", *options] if not command.is_whole and "scripts/" not in command.text:
            launch_command_parser().parse_args([*options, "train.py"])
        case ["accelerate", "launch", *_] | ["python", *_]:
            Launch(words)
        case [name, *argv] if name.startswith("scripts/"):
            task = task_of(Path(name).stem)
            first = next(name for name in recipes.catalog_names() if recipes.load(name).task == task)
            run_settings.parse([*([] if "--recipe" in argv else ["--recipe", first]), *argv], task, "")
        case ["curl", "-o", file, address]:
            assert file == address.rpartition("/")[2].replace("input.txt", "tinyshakespeare.txt")
            assert address.startswith("https://")
        case ["git", "clone", *_] | ["cd", _] | [".", _] | ["sbatch", _] | ["export", *_] | ["bash", "job.sh", *_]:
            pass
        case ["tensorboard", "--logdir", _]:
            assert find_spec("tensorboard")
        case ["torchft_lighthouse", *options]:
            check_lighthouse(options)
        case ["hf", "auth", "login"]:
            assert find_spec("huggingface_hub.cli.hf")
        case _:
            raise AssertionError(f"{command.origin}: no test knows this command, or its block is none: {command.text}")


def check_pip(options: list[str]) -> None:
    extras = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for option in options:
        if match := re.fullmatch(r"\.\[([\w,]+)\]", option):
            assert set(match[1].split(",")) <= extras.keys()
        elif option not in ("-r", "-e", "--quiet", "--no-deps", "."):  # samestep itself is on no index
            assert Path(option).is_file() or (option != "samestep" and distribution(option)), option


def check_lighthouse(options: list[str]) -> None:
    """Start a lighthouse as a command does, on a free port of this machine."""
    from torchft.coordination import LighthouseServer

    assert "torchft_lighthouse" in entry_points(group="console_scripts").names
    flags = {name.removeprefix("--"): value for name, value in zip(options[::2], options[1::2], strict=True)}
    assert re.fullmatch(r"[0-9.]+:[0-9]+", flags.pop("bind"))
    LighthouseServer(bind="127.0.0.1:0", **{name: int(value) for name, value in flags.items()}).shutdown()


def check_own_command(command: Printed, argv: list[str], monkeypatch, capsys, recorder) -> None:
    """Run a command of ours as it is printed, and check the commands that it prints."""
    if tuple(argv) in AUDITED:
        return
    for flag, name in itertools.pairwise(argv):
        if flag == "--write_config":  # a file that later commands read
            Path(name).unlink(missing_ok=True)
    if argv[:1] == ["chat"]:  # with a model that has learned nothing
        save_base(Path(argv[1]))
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("What is 12 plus 30?\n"))
    if argv[:1] == ["show-data"] and argv[1] in DRAWN:
        argv = [*argv, "--num_train_samples", "40", "--num_validation_samples", "8"]
    monkeypatch.setattr(
        audit,
        "record",
        lambda program, variation, num_steps, timeout, mode="", announce=None: recorder.record(
            program, variation, num_steps, mode=mode
        ),
    )
    if argv[:1] == ["watch"]:  # on a port that no other test has
        argv = [*argv, "--port", "0"]
    # and not until Ctrl+C
    monkeypatch.setattr(http.server.ThreadingHTTPServer, "serve_forever", lambda *_: None)
    try:
        code = exit_code(lambda: cli.main(argv))
    except SystemExit as end:  # after --help
        code = end.code or 0
    output = capsys.readouterr()
    is_audit = argv[:1] == ["audit-script"] and "--help" not in argv
    said = [line for line in output.err.splitlines() if not line.startswith(("> ", "checking "))]
    assert (code, is_audit or said) == (0, is_audit or []), output
    if is_audit:
        assert "\nexact" in output.out or json.loads(output.out)["is_exact"]
        AUDITED.add(tuple(argv))
    own = r"samestep plan .* --write_config .*"  # the launch file of the next line
    printed = re.sub(r"\\\n\s*", "", output.out).replace(f"{program_name()} ", "samestep ")
    for line in re.findall(rf"{own}|(?:\w+=\S+ )?accelerate launch .*scripts/.*", printed):
        check(command._replace(words=tuple(shlex.split(line)), text=line), monkeypatch, capsys, recorder)


# ---------------------------------------------------------------------------------------------------------------------
# All commands


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_works(command, checkout, monkeypatch, capsys, request):
    is_audit = {"audit-script", "stepaudit"} & set(command.words)
    check(command, monkeypatch, capsys, request.getfixturevalue("server") if is_audit else None)


def test_nothing_escapes(tmp_path, checkout, monkeypatch, capsys):
    """An unknown program, a block of an unknown language, a flag, a launch file or a recipe that is none."""
    found = {command.origin.partition(":")[0] for command in COMMANDS}
    assert {"README.md", "CONTRIBUTING.md", "docs/finetuning.md", "accelerate_configs/8xa100.yaml"} <= found
    assert {"recipes/catalog/gpt2_124m.yaml", "Makefile", "make help", "help"} <= found
    launch = (
        "accelerate launch --config_file accelerate_configs/cpu.yaml scripts/pretrain_bert.py --recipe bert_small_cpu"
    )
    refused = {
        "deepspeed train.py": "no test knows this command",
        "make nosuch": "nosuch",
        'pip install ".[nosuch]"': "nosuch",
        "samestep plan nosuch": "unknown recipe 'nosuch'",
        f"{launch} --nosuch 1": "unknown flag --nosuch",
        launch.replace("cpu.yaml", "nosuch.yaml"): "nosuch.yaml",
        launch.replace("bert_small_cpu", "gpt2_small_cpu"): "for the task gpt2_pretraining",
        launch.replace("pretrain_bert", "nosuch"): "nosuch.py",
        f"srun bash -c '{launch}x'": "unknown recipe 'bert_small_cpux'",
    }
    for text, message in refused.items():
        (command,) = split(text, "a")
        with pytest.raises(Exception, match=message):
            check(command, monkeypatch, capsys, None)
    (command,) = split(launch, "a")
    check(command, monkeypatch, capsys, None)

    class Document(type(ROOT)):
        def read_text(self, **_) -> str:
            return "```zsh\nls\n```\n"

    with pytest.raises(ValueError, match=r"docs/nosuch\.md:1: a block of zsh"):
        list(in_markdown(Document(ROOT / "docs" / "nosuch.md")))
    assert ROOT / "README.md" in documents()


# ---------------------------------------------------------------------------------------------------------------------
# Trainings


def representatives() -> Iterator[Printed]:
    """Choose trainings until every script and launch file is among them, all that read files, and those that pages rest on."""
    seen: set[str] = set()
    for command in COMMANDS:
        if not command.is_whole or "--torch_compile" in command.words or "runs/support" in command.text:
            continue  # those of test_chats_to_a_model.py are run there
        names = {word for word in command.words if re.match(r"(scripts|accelerate_configs)/", word)}
        if any(word.startswith("scripts/") for word in names) and (
            not names <= seen or {"--train_file", "--train_dir"} & set(command.words) or command.words in SHOWN_TO_WORK
        ):
            seen |= names
            yield command


def test_every_command_that_pages_rest_on_is_run():
    """A command of samestep by test_a_command_works, a training by test_a_training_runs. Benchmarks are run in short by
    test_benchmarks; `make claims` takes an hour."""
    by_words = {command.words: command for command in COMMANDS}
    trained = {command.words for command in representatives()}
    assert len(SHOWN_TO_WORK) > 30
    for words in SHOWN_TO_WORK:
        assert words in by_words, words
        is_measured = words[:2] == ("make", "bench") or words == ("make", "claims")  # as check() says of their names
        assert words[0] == "samestep" or words in trained or is_measured, words


def test_every_script_and_launch_file_is_run():
    words = {word for command in representatives() for word in command.words}
    files = {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.py")}
    assert files | {f"accelerate_configs/{path.name}" for path in (ROOT / "accelerate_configs").iterdir()} <= words


def shrunken_flags(launch: Launch) -> tuple[str, int]:
    """Write the flags that shrink a training, and its number of processes; k stays, if it is small."""
    n, k = min(launch.num_processes, MAX_PROCESSES), min(launch.layout.gradient_accumulation_steps, MAX_MICRO_BATCHES)
    flags = [f"--{field} {value}" for field, value in SHRUNKEN.items() if field in vars(launch.recipe)]
    if not {"--train_file", "--train_dir"} & set(launch.argv):
        flags.append(DATA[launch.program])
        flags += ["--dataset_config_name none"] * hasattr(launch.recipe, "dataset_config_name")
    flags.append(MODEL.get(launch.program, ""))
    num_workers = getattr(launch.recipe.communication, "num_workers", 0)  # each has a sample
    flags.append(f"--global_batch_size {max(2 * n * k, num_workers)} --speed safe --output_dir out")
    has_size = launch.settings.gradient_accumulation_steps or launch.settings.reproducible
    flags += [] if has_size else ["--per_device_train_batch_size 2"]
    return " ".join(flags), n


def shrunken_environment(launch: Launch, num_processes: int, folder: Path) -> dict[str, str]:
    """Make the environment that the launch file gives its processes, on one machine's CPU, which has no fp16."""
    if launch.config is None:
        return {}
    values = yaml.safe_load(Path(launch.config).read_text())
    is_half = launch.mixed_precision == "fp16"
    values |= {"num_processes": num_processes, "use_cpu": True, "gpu_ids": ",".join(["-1"] * num_processes)}
    values |= {"mixed_precision": "no" if is_half else launch.mixed_precision, "num_machines": 1}
    for name in ("machine_rank", "main_process_ip"):
        values.pop(name, None)
    (folder / "shrunken.yaml").write_text(yaml.safe_dump(values))
    return launch_environment(folder / "shrunken.yaml")


@pytest.mark.distributed
@pytest.mark.parametrize("command", representatives(), ids=lambda command: " ".join(command.words[3:5]))
def test_a_training_runs(command, checkout, trainings):
    """Two steps of it: what it logs are finite numbers, and it ends with results."""
    words = [VARIABLES.get(word, word) for word in command.words]
    launch = Launch(words[words.index("accelerate") if "accelerate" in words else 0 :])
    flags, num_processes = shrunken_flags(launch)
    if "--num_train_epochs" in launch.argv:  # shrunken to two steps
        index = launch.argv.index("--num_train_epochs")
        del launch.argv[index : index + 2]
    call = [launch.program, *launch.argv, *flags.split()]
    environment = shrunken_environment(launch, num_processes, checkout)
    trainings.run([str(checkout), json.dumps([call])], num_processes, environment=environment, module="run_printed")
    steps = [line for line in all_metrics(checkout / "out") if "loss" in line]
    assert len(steps) == 2
    assert all(math.isfinite(line["loss"]) for line in steps)
    assert (checkout / "out" / "all_results.json").is_file()
    if launch.recipe.task == "text_classification" and launch.settings.predict_file:
        assert (checkout / "out" / "predictions.csv").is_file()
