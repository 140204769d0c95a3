"""No code of a recipe, a data file, a model folder or a checkpoint runs.

Each payload makes a file, its mark. It is first loaded the naive way, and seen to make it; then by the program, which must not.
"""

import contextlib
import functools
import itertools
import json
import os
import pickle
import runpy
import shutil
from pathlib import Path

import evaluate
import jinja2
import pytest
import torch
import yaml
from common import fresh_accelerator, tiny_argv
from PIL import EpsImagePlugin, Image
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining, AutoTokenizer, GPT2LMHeadModel

from samestep import cli
from samestep.errors import exit_code
from samestep.training import checkpoint, metrics

SMALL = "--max_train_steps 1 --global_batch_size 4"


class Payload:
    """Makes the mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def pickled(mark) -> bytes:
    return pickle.dumps(Payload(mark))


@pytest.fixture
def plant(mark):
    """Write Python that makes the mark. An imported module is not run again, so no text is written twice."""
    number = itertools.count()

    def write(*files: Path, more: str = "") -> None:
        for file in files:
            file.write_text(f"number = {next(number)}\nopen({str(mark)!r}, 'w').close()\n{more}")

    return write


@pytest.fixture
def leaves_mark(mark):
    """Check that the naive way makes the mark, whatever else comes of it; then remove the mark."""

    def check_mark(naive_function, *arguments, **options):
        with contextlib.suppress(Exception):
            naive_function(*arguments, **options)
        assert mark.exists(), "the payload is none"
        mark.unlink()

    return check_mark


@pytest.fixture
def ask(scripts, corpus, tmp_path, mark, capsys):
    """Call a program, and return its exit code, 0 or 2, and the one line of its error. Check that there is no mark after it."""

    def call(program: str, *flags: str) -> tuple[int, str]:
        fresh_accelerator()
        if program == "recipes":
            main = functools.partial(cli.main, flags)
        else:
            argv = tiny_argv(program, corpus, tmp_path / "run", f"{SMALL} --overwrite_output_dir")
            if "--dataset_name" in flags and "--train_file" in argv:
                place = argv.index("--train_file")
                del argv[place : place + 2]
            main = functools.partial(scripts[program].main, [*argv, *flags])
        capsys.readouterr()
        code = exit_code(main)
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ERROR: ")]
        assert not mark.exists(), "code ran"
        assert (code, len(errors)) in ((0, 0), (2, 1))
        return code, "".join(errors)

    return call


@pytest.fixture(scope="module")
def models(scripts, corpus, tmp_path_factory) -> dict[str, Path]:
    """Train a small model of each kind, with its tokenizer and a checkpoint."""
    folders = {}
    for program in ("pretrain_bert", "pretrain_gpt2"):
        fresh_accelerator()
        folders[program] = tmp_path_factory.mktemp(program) / "model"
        scripts[program].main(tiny_argv(program, corpus, folders[program], SMALL))
    return folders


@pytest.fixture
def model(models, tmp_path) -> Path:
    """Copy the small BERT, so that a test may change it."""
    return shutil.copytree(models["pretrain_bert"], tmp_path / "model", ignore=shutil.ignore_patterns("checkpoint-*"))


# ---------------------------------------------------------------------------------------------------------------------
# Recipes and what is written like them


@pytest.mark.parametrize(
    "place", [pytest.param("file", marks=pytest.mark.rooms), pytest.param("folder", marks=pytest.mark.rooms), "beside"]
)
def test_metrics(place, plant, leaves_mark, ask, tmp_path, monkeypatch):
    """A path in a recipe from somebody else; and a folder here that is called as a local metric is."""
    folder = tmp_path / "accuracy"
    folder.mkdir()
    plant(folder / "accuracy.py")
    monkeypatch.chdir(tmp_path)
    name = {"file": "accuracy/accuracy.py", "folder": str(folder), "beside": "accuracy"}[place]
    leaves_mark(evaluate.load, name)
    plant(folder / "accuracy.py")
    (tmp_path / "theirs.yaml").write_text(f"extends: finetune_small_cpu\nmetrics: ['{name}']\n")
    code, error = ask("finetune_classifier", "--recipe", "theirs.yaml", "--num_hidden_layers", "1")
    assert code == (0 if place == "beside" else 2)
    assert ("set --trust_metric_code" in error) == (place != "beside")
    if place != "beside":
        leaves_mark(metrics.load, [name], trust_code=True)


def test_metrics_of_the_hub_and_the_flag_in_a_recipe(ask, tmp_path):
    code, error = ask("finetune_classifier", "--metrics", "glue")
    assert (code, "'glue', which is not local" in error) == (2, True)
    (tmp_path / "theirs.yaml").write_text("extends: finetune_small_cpu\ntrust_metric_code: true\n")
    code, error = ask("finetune_classifier", "--recipe", str(tmp_path / "theirs.yaml"))
    assert (code, "unknown key 'trust_metric_code'" in error) == (2, True)


@pytest.mark.parametrize("kind", ["recipe", "extended", pytest.param("device", marks=pytest.mark.rooms)])
def test_yaml(kind, mark, leaves_mark, ask, tmp_path):
    text = f"seed: !!python/object/apply:builtins.open ['{mark}', 'w']\n"
    leaves_mark(yaml.unsafe_load, text)
    (tmp_path / "theirs.yaml").write_text(text)
    (tmp_path / "ours.yaml").write_text("extends: theirs.yaml\n")
    if kind == "device":
        code, error = ask("recipes", "plan", "bert_base", "--on", f"1x{tmp_path}/theirs.yaml")
    else:
        name = {"recipe": "theirs", "extended": "ours"}[kind]
        code, error = ask("pretrain_bert", "--recipe", str(tmp_path / f"{name}.yaml"))
    assert (code, "theirs.yaml is not valid YAML" in error) == (2, True)


# ---------------------------------------------------------------------------------------------------------------------
# Data


@pytest.mark.parametrize("program", ["pretrain_bert", "finetune_classifier"])
@pytest.mark.parametrize("suffix", ["pkl", "pt", "txt", "csv", "tsv", "jsonl", "json", "parquet"])
def test_data_files(program, suffix, pickled, leaves_mark, ask, tmp_path):
    file = tmp_path / f"data.{suffix}"
    file.write_bytes(pickled)
    leaves_mark(lambda: pickle.loads(file.read_bytes()))
    code, error = ask(program, "--train_file", str(file))
    assert (code, str(file) in error) == (2, True)


@pytest.mark.parametrize("program", ["pretrain_bert", "finetune_classifier", "train_image_classifier"])
@pytest.mark.parametrize("kind", ["script", "script itself", "pickle", "pandas"])
def test_datasets(program, kind, plant, pickled, leaves_mark, ask, tmp_path, monkeypatch):
    """A folder with a loading script, or pickles; and the loader of `datasets` that reads pickles, in their folder."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if kind.startswith("script"):
        plant(folder / "data.py")
        leaves_mark(runpy.run_path, str(folder / "data.py"))
    else:
        (folder / "train.pkl").write_bytes(pickled)
        leaves_mark(lambda: pickle.loads((folder / "train.pkl").read_bytes()))
    name = {"script itself": str(folder / "data.py"), "pandas": "pandas"}.get(kind, str(folder))
    code, error = ask(program, "--dataset_name", name)
    assert (code, f"dataset_name {name!r}" in error) == (2, True)


def test_images(pickled, mark, leaves_mark, ask, tmp_path, monkeypatch):
    """A pickle, and a program in PostScript: Pillow looks what a file is, whatever it is called, and calls Ghostscript."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "images" / name / "good.png")
    (tmp_path / "images" / "a" / "pickle.png").write_bytes(pickled)
    leaves_mark(lambda: pickle.loads((tmp_path / "images" / "a" / "pickle.png").read_bytes()))
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # found once
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    postscript = tmp_path / "images" / "b" / "postscript.png"
    postscript.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n")
    leaves_mark(lambda: Image.open(postscript).load())
    code, error = ask("train_image_classifier", "--train_dir", str(tmp_path / "images"), "--num_labels", "2")
    assert (code, "a/pickle.png (not an image), b/postscript.png (not an image)" in error) == (2, True)


# ---------------------------------------------------------------------------------------------------------------------
# Model folders


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_weights_that_are_pickles(name, model, mark, leaves_mark, ask):
    (model / "model.safetensors").unlink()
    torch.save({"bert": Payload(mark)}, model / name)
    with (model / name).open("rb") as file:
        leaves_mark(torch.load, file, weights_only=False)
    for program in ("pretrain_bert", "finetune_classifier"):
        code, error = ask(program, "--model_name_or_path", str(model))
        assert (code, f"model_name_or_path {model} cannot be loaded: " in error) == (2, True)


def test_weights_that_are_a_pickle_of_tensors_are_read(model, ask):
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert ask("pretrain_bert", "--model_name_or_path", str(model)) == (0, "")


def test_pickles_beside_weights_are_not_read(model, pickled, leaves_mark, ask):
    for name in (
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "vocab.pkl",
        "tf_model.h5",
        "adapter_model.bin",
    ):
        (model / name).write_bytes(pickled)
    leaves_mark(torch.load, model / "pytorch_model.bin", weights_only=False)
    assert ask("pretrain_bert", "--model_name_or_path", str(model)) == (0, "")


@pytest.mark.rooms
def test_classes_of_a_folder(model, plant, leaves_mark, ask, monkeypatch):
    """auto_map names a model, a configuration and a tokenizer in a module of the folder. Nobody is asked either."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    modules = [model / f"{name}.py" for name in ("theirs", "tokens")]
    plant(*modules)
    config, settings = (json.loads((model / f"{name}.json").read_text()) for name in ("config", "tokenizer_config"))
    settings["auto_map"] = {"AutoTokenizer": ["tokens.Tokenizer", "tokens.Tokenizer"]}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    leaves_mark(AutoTokenizer.from_pretrained, model, trust_remote_code=True)
    config["auto_map"] = {"AutoConfig": "theirs.Config", "AutoModelForPreTraining": "theirs.Model"}
    (model / "config.json").write_text(json.dumps(config))
    leaves_mark(AutoModelForPreTraining.from_pretrained, model, trust_remote_code=True)
    plant(*modules)
    assert ask("pretrain_bert", "--model_name_or_path", str(model)) == (0, "")
    plan = ("plan", "--model_name_or_path", str(model), "--seq_len", "32", "--global_batch_size", "8")
    assert ask("recipes", *plan) == (0, "")
    # Of classes that transformers does not have: what it would ask about.
    settings |= {"tokenizer_class": "TheirTokenizer", "auto_map": {"AutoTokenizer": [None, "tokens.Tokenizer"]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    config |= {"model_type": "theirs", "architectures": ["Theirs"], "auto_map": {"AutoConfig": "theirs.Config"}}
    (model / "config.json").write_text(json.dumps(config))
    leaves_mark(AutoTokenizer.from_pretrained, model)
    plant(*modules)
    code, error = ask("pretrain_bert", "--tokenizer_name", str(model))
    assert (code, f"tokenizer {model} cannot be loaded" in error) == (2, True)
    code, error = ask("recipes", *plan, "--trace")
    assert (code, "is not one of transformers" in error) == (2, True)


def test_a_kernel_that_a_configuration_names(model, monkeypatch):
    """Of attention, on the hub: code that transformers would load."""
    from stepplan import trace

    kernel_names = []
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda name, **_: kernel_names.append(name)
    )
    config = json.loads((model / "config.json").read_text()) | {"attn_implementation": "their/kernel"}
    (model / "config.json").write_text(json.dumps(config))
    AutoModelForPreTraining.from_pretrained(model)
    assert set(kernel_names) == {"their/kernel"}
    kernel_names.clear()
    trace.trace_config(str(model), 1, 32, mixed_precision="no")
    assert not kernel_names


def test_generation(models, plant, leaves_mark, ask, tmp_path):
    model = shutil.copytree(models["pretrain_gpt2"], tmp_path / "model")
    (model / "custom_generate").mkdir()
    plant(model / "custom_generate" / "generate.py", more="def generate(*_, **__): ...\n")
    leaves_mark(GPT2LMHeadModel.from_pretrained, model, trust_remote_code=True)
    plant(model / "custom_generate" / "generate.py", more="def generate(*_, **__): ...\n")
    flags = (
        "--model_name_or_path",
        str(model),
        "--tokenizer_name",
        str(model),
        "--sample_prompt",
        "a",
        "--sample_length",
        "4",
    )
    assert ask("pretrain_gpt2", *flags) == (0, "")


def test_chat_templates(model, mark, leaves_mark, ask):
    template = f"{{{{ cycler.__init__.__globals__.os.system('touch {mark}') }}}}"
    leaves_mark(jinja2.Template(template).render)
    (model / "chat_template.jinja").write_text(template)
    assert ask("pretrain_bert", "--tokenizer_name", str(model)) == (0, "")
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.chat_template == template
    with pytest.raises(jinja2.exceptions.SecurityError):  # whoever uses what the run leaves
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json", "vocab.txt"])
def test_files_of_a_tokenizer_that_are_pickles(name, model, pickled, leaves_mark, ask):
    if name == "vocab.txt":
        (model / "tokenizer.json").unlink()
    (model / name).write_bytes(pickled)
    leaves_mark(lambda: pickle.loads((model / name).read_bytes()))
    code, error = ask("pretrain_bert", "--tokenizer_name", str(model))
    assert (code, f"tokenizer {model} " in error) == (2, True)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

ACCELERATES = ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "scaler.pt", "custom_checkpoint_0.pkl")


def test_checkpoints_of_accelerate(pickled, leaves_mark, ask, tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    for name in ACCELERATES:
        (folder / name).write_bytes(pickled)
        leaves_mark(torch.load, folder / name, weights_only=False)
    code, error = ask("pretrain_bert", *resume(folder))
    assert (code, f"checkpoint {folder} is damaged" in error) == (2, True)


def resume(folder: Path) -> tuple[str, ...]:
    return "--overwrite_output_dir", "false", "--resume_from_checkpoint", str(folder)


@pytest.mark.parametrize("name", [None, "optimizer.safetensors", "model.safetensors", "state.json", "recipe.yaml"])
def test_checkpoints(name, models, pickled, mark, leaves_mark, ask, tmp_path):
    """Pickles beside its files are not read; one in their place, under a manifest that says so, is no checkpoint."""
    folder = shutil.copytree(models["pretrain_bert"] / "checkpoint-1", tmp_path / "checkpoint-1")
    for other in ACCELERATES:
        (folder / other).write_bytes(pickled)
    leaves_mark(torch.load, folder / "optimizer.bin", weights_only=False)
    if name is None:
        assert ask("pretrain_bert", *resume(folder)) == (0, "")
        return
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    (folder / name).write_bytes(pickled)
    if name == "recipe.yaml":  # is read of another recipe's checkpoint
        text = f"seed: !!python/object/apply:builtins.open ['{mark}', 'w']\n"
        leaves_mark(yaml.unsafe_load, text)
        (folder / name).write_text(text)
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"recipe_fingerprint": "0" * 16}))
    content["files"] = {file: checkpoint._flush_and_hash(folder / file) for file in content["files"]}
    (folder / "manifest.json").write_text(checkpoint._manifest(content))
    code, error = ask("pretrain_bert", *resume(folder))
    assert (code, f"checkpoint {folder} is damaged" in error) == (2, True)
