"""What tests and the programs that they launch share."""

import gc
import importlib.util
import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.launch import prepare_multi_gpu_env

from samestep.recipe.catalog import TASKS, catalog_names, load

ROOT = Path(__file__).parents[2]
TRANSFORMERS = tuple(int(number) for number in version("transformers").split(".")[:2])
"""Release of transformers, without its patch: a fault that it has mended is not expected of it."""
PLANNED = [name for name in catalog_names() if load(name).is_planned]
"""Recipes of the catalog that the planner has a formula for."""
# Models that train in moments; what a flag does not set is the recipe's.
TINY = (
    "--recipe bert_small_cpu --vocab_size 600 --max_seq_length 48 --hidden_size 32 --num_hidden_layers 2 "
    "--num_attention_heads 2 --intermediate_size 64 --initializer_range 0.1 --learning_rate 5e-3 --max_grad_norm 0.2 "
    "--max_train_steps 10 --validation_fraction 0.1 --short_seq_probability 0.5"
).split()
TINY_GPT2 = (
    "--recipe gpt2_small_cpu --vocab_size 400 --block_size 48 --n_positions 48 --n_embd 32 --n_layer 2 --n_head 2 "
    "--initializer_range 0.1 --learning_rate 5e-3 --max_grad_norm 0.2 --max_train_steps 10 --warmup_ratio 0.1"
).split()
TINY_CLASSIFIER = (
    "--recipe finetune_small_cpu --vocab_size 600 --max_seq_length 48 --hidden_size 32 --num_hidden_layers 2 "
    "--num_attention_heads 2 --intermediate_size 64 --initializer_range 0.1 --learning_rate 1e-3 --max_grad_norm 0.2 "
    "--max_train_steps 10"
).split()
TINY_RESNET = (
    "--recipe resnet_digits_cpu --image_height 16 --image_width 16 --embedding_size 4 --hidden_sizes 4 8 --depths 1 1 "
    "--label_smoothing 0 --learning_rate 0.1 --weight_decay 1e-4 --max_train_steps 10 --num_warmup_steps 1 --max_grad_norm 0.2"
).split()
TINY_READER = (
    "--recipe captcha_cpu --num_train_samples 61 --num_validation_samples 20 --image_height 40 --image_width 96 "
    "--conv_channels 2 4 4 4 --hidden_size 16 --optimizer adamw --sgd_momentum none --adam_beta1 0.9 --adam_beta2 0.999 "
    "--adam_epsilon 1e-6 --learning_rate 2e-3 --lr_scaling_rule sqrt --min_lr_ratio 0.01 --weight_decay 0.05 "
    "--max_train_steps 10 --num_warmup_steps 1 --max_grad_norm 0.2"
).split()
TINY_CHAT = (
    "--recipe sft_small_cpu --num_train_samples 61 --num_validation_samples 12 --hidden_size 32 --num_hidden_layers 2 "
    "--num_attention_heads 4 --num_key_value_heads 2 --intermediate_size 64 --initializer_range 0.1 --learning_rate 5e-3 "
    "--max_grad_norm 0.2 --max_train_steps 10 --num_generations 4 --generation_length 8"
).split()
TINIES = {
    "pretrain_bert": TINY,
    "pretrain_gpt2": TINY_GPT2,
    "finetune_classifier": TINY_CLASSIFIER,
    "finetune_causal_lm": TINY_CHAT,
    "train_image_classifier": TINY_RESNET,
    "train_captcha": TINY_READER,
}
TINY_EMBEDDINGS = (
    "--recipe embeddings_small_cpu --vocab_size 300 --max_seq_length 24 --hidden_size 32 --num_hidden_layers 2 "
    "--num_attention_heads 2 --intermediate_size 64 --max_position_embeddings 32 --initializer_range 0.1 "
    "--learning_rate 5e-3 --max_grad_norm 0.2 --num_train_epochs none --max_train_steps 10 --global_batch_size 10"
).split()
TINY_SEQ2SEQ = (
    "--recipe seq2seq_small_cpu --num_train_samples 40 --num_validation_samples 12 --hidden_size 16 --num_hidden_layers 2 "
    "--tokenizer characters --vocab_size 96 --max_source_length 96 --num_attention_heads 2 --intermediate_size 32 "
    "--learning_rate 5e-3 --max_grad_norm 0.2 --num_train_epochs none "
    "--max_train_steps 10 --global_batch_size 10 --num_generations 4 --generation_length 8"
).split()
SEQ2SEQ_FROM_FOLDER = (
    " --architecture none --hidden_size none --num_hidden_layers none --num_attention_heads none --intermediate_size none "
    "--vocab_size none --num_train_samples none --num_validation_samples none"
)
"""Flags that take back what `TINY_SEQ2SEQ` says of weights and drawn data."""
ROOM_TINIES = {"train_embeddings": TINY_EMBEDDINGS, "finetune_seq2seq": TINY_SEQ2SEQ}
"""Tiny models of programs whose steps their own tests look at."""
DROPOUT = " --hidden_dropout_prob 0.1 --attention_probs_dropout_prob 0.1"


def task_of(program: str) -> str:
    """Find the first task that a program trains: pretrain_bert -> bert_pretraining."""
    return tasks_of(program)[0]


def tasks_of(program: str) -> list[str]:
    """Find all tasks that a program trains: pretrain_bert -> bert_pretraining, modernbert_pretraining."""
    return [task for task, recipe in TASKS.items() if recipe.parts.script == f"{program}.py"]


def model_of(program: str) -> type:
    """Find the class that a program's tiny model is of."""
    return TASKS[task_of(program)].parts.find("model")


def tiny_argv(program: str, corpus: Path, output_dir: Path | str, flags: str) -> list[str]:
    """Make the arguments that train the program's tiny model; CORPUS in `flags` is the corpus' folder."""
    argv = [
        *(TINIES | ROOM_TINIES)[program],
        *data_flags(program, corpus),
        "--output_dir",
        str(output_dir),
        "--speed",
        "safe",
    ]
    return argv + flags.replace("CORPUS", str(corpus.parent)).split()


def data_flags(program: str, corpus: Path) -> list[str]:
    """Make the arguments that let a program train on the corpus, if it trains on text."""
    files = {"pretrain_bert": corpus, "pretrain_gpt2": corpus, "finetune_classifier": corpus.with_name("labelled.csv")}
    return ["--train_file", str(files[program])] if program in files else []


def write_corpus(folder: Path) -> Path:
    """Write 61 real documents of very different lengths as a .jsonl file; short.jsonl beside it has their beginnings,
    labelled.csv pairs of words from them and labels."""
    from samestep.data.documents import load_rows  # here: `datasets` reads HF_HOME when it is imported

    documents = load_rows(train_file=None, dataset_name="builtin/python_docs").rows
    for name, first, more in (("short", 10, 3), ("corpus", 200, 41)):
        lines = [
            json.dumps({"text": documents[8 * row % len(documents)]["text"][: first + more * row]}) + "\n"
            for row in range(61)
        ]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    words = [re.findall(r"[A-Za-z]+", documents[8 * row % len(documents)]["text"]) for row in range(61)]
    lines = [
        f"{' '.join(text[: 2 + row % 17])},{' '.join(text[3 : 5 + row % 5])},{'abc'[row % 3]}"
        for row, text in enumerate(words)
    ]
    (folder / "labelled.csv").write_text("\n".join(["text,other,label", *lines]) + "\n", encoding="utf-8")
    return folder / "corpus.jsonl"


def python_path(*folders: Path | str) -> str:
    """Make PYTHONPATH of a program that tests launch: some folders, and behind them startup/, which makes imports cheaper."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def load_script(name: str):
    """Load a script as a module, so that tests call its own `main`."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    collects = gc.isenabled()
    spec.loader.exec_module(module)
    gc.enable() if collects else gc.disable()
    return module


def load_benchmark(name: str):
    """Load a program of benchmarks/ as a module; put back what it changes in the environment."""
    folder = str(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", f"{folder}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ), mock.patch.object(sys, "path", [folder, *sys.path]):
        spec.loader.exec_module(module)
    return module


def load_docs_program(name: str):
    """Load a program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch_environment(config: Path, *flags: str) -> dict[str, str]:
    """Make the environment variables that `accelerate launch` with a launch file and flags gives its processes."""
    arguments = launch_command_parser().parse_args(["--config_file", str(config), *flags, "script.py"])
    arguments, *_ = _validate_launch_command(arguments)
    env = prepare_multi_gpu_env(arguments)
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "CUDA_", "OMP_")
    return {name: value for name, value in env.items() if name.startswith(prefixes)}


def count_samples(micro_batch: dict) -> int:
    """Count the samples of a micro-batch of a language model, end to end or one in a row."""
    return len(micro_batch["ends"]) - 1 if "ends" in micro_batch else len(micro_batch["input_ids"])


def fresh_accelerator() -> None:
    """Let the next `Accelerator` of this process be the first one; a process group stays as it is."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    if not os.environ.get("WORLD_SIZE"):
        PartialState._reset_state()


def all_metrics(output_dir: Path) -> list[dict]:
    """Read the lines of metrics.jsonl."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def metrics(output_dir: Path) -> list[dict]:
    """Read the step lines of metrics.jsonl."""
    return [line for line in all_metrics(output_dir) if "loss" in line]


def evaluations(output_dir: Path) -> list[dict]:
    """Read the evaluation lines of metrics.jsonl."""
    return [line for line in all_metrics(output_dir) if "eval_loss" in line]


def samples_of_steps(output_dir: Path) -> dict[int, list[tuple[int, int]]]:
    """Read step -> sorted (epoch, sample id) from samples.jsonl, over all processes and micro-batches."""
    steps: dict[int, list[tuple[int, int]]] = {}
    for line in map(json.loads, (output_dir / "samples.jsonl").read_text().splitlines()):
        steps.setdefault(line["step"], []).extend(zip(line["epochs"], line["samples"], strict=True))
    return {step: sorted(samples) for step, samples in steps.items()}
