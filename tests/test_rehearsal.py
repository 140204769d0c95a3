"""--rehearse: a whole run in small, in a folder of its own; and runs on CPUs that their memory does not hold."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from accelerate import PartialState
from chat_bases import EXPERTS, save_base, write_chats
from common import PLANNED, ROOT, fresh_accelerator, python_path
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from samestep.contrib import small_model
from samestep.errors import UsageError
from samestep.recipe import rehearsal
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, CausalLmFineTuning

REHEARSED = [name for name in catalog_names() if not getattr(load(name), "images", False) or "cpu" in name]
"""All recipes but those that start from a named model of images and text, of which no small one is made."""


@pytest.mark.parametrize("name", REHEARSED)
def test_a_rehearsal_changes_the_model_only(name):
    """Its step is the recipe's: same order, optimizer, schedule, lengths, and batch but where sequences are long."""
    recipe, settings = load(name), f"--recipe {name} --rehearse"
    small, _ = run.parse(settings.split(), recipe.task, "")
    shape = {*getattr(recipe, "shape", recipe.architecture), "architecture", "normalization", "freeze_embeddings"}
    shape |= {"model_name_or_path", "tokenizer_name"}
    shape -= {"vocab_size", "num_labels", "image_height", "image_width"}
    changed = {field for field, value in vars(small).items() if value != getattr(recipe, field)}
    lengths = {getattr(recipe, field, 0) for field in ("block_size", "max_seq_length")}
    if recipe.global_batch_size * max(lengths) > 2**15:
        assert small.global_batch_size * max(lengths) <= 2**16
        changed.discard("global_batch_size")
    assert changed <= shape
    if name in PLANNED:
        assert small.parts.find("shape")(small).num_parameters < 20e6
    assert rehearsal.describe_changes(recipe, small).count("(not ") >= len(changed)


def test_a_rehearsal_goes_through_a_whole_run(tmp_path, corpus):
    """Two steps, a checkpoint, the third step after resuming, the results; the last line's command is the real run."""
    flags = f"--recipe bert_small_cpu --train_file {corpus} --vocab_size 600 --max_seq_length 32 --output_dir {tmp_path}/mine"
    command = [sys.executable, str(ROOT / "scripts/pretrain_bert.py"), *flags.split(), "--rehearse"]
    env = os.environ | {"PYTHONPATH": python_path(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("rehearsed: ")
    assert f" in {tmp_path}/mine-rehearsal, " in last
    words = shlex.split(last.split("The real run is: ")[1])
    assert words[-len(flags.split()) :] == flags.split()
    assert "from_pretrained" not in done.stdout
    folder = tmp_path / "mine-rehearsal"
    assert not (tmp_path / "mine").exists()
    assert {"checkpoint-2", "checkpoint-3", "all_results.json", "model.safetensors"} <= {
        p.name for p in folder.iterdir()
    }
    assert re.findall(r"steps (\d) to (\d) of (\d)", done.stdout) == [("0", "2", "3"), ("2", "3", "3")]


def test_a_named_model_of_images_is_not_rehearsed():
    with pytest.raises(UsageError, match="no small model is made of Qwen/Qwen3-VL-2B-Instruct: set rehearse to false"):
        run.parse(["--recipe", "qwen3vl_2b_lora_3090", "--rehearse"], "causal_lm_finetuning", "")


def test_a_failed_session_ends_the_rehearsal(tmp_path, monkeypatch):
    (tmp_path / "program.py").write_text("import sys; print('said'); sys.exit(7 if 'true' in sys.argv else 0)")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py")])
    recipe = load("bert_small_cpu")
    assert rehearsal.rehearse(["--rehearse"], recipe, recipe.rehearsed(), str(tmp_path / "mine")) == 7


class _Cpu:
    """As much of an Accelerator as the check of memory looks at."""

    num_processes, mixed_precision, distributed_type = 1, "bf16", "NO"
    device, torch_device_mesh = type("Device", (), {"type": "cpu"}), None

    def print(self, text: str) -> None:
        print(text)


@pytest.fixture
def free(monkeypatch):
    """Give the machine so many free bytes."""
    from samestep.contrib import host_memory

    fresh_accelerator()
    PartialState(cpu=True)
    return lambda size: monkeypatch.setattr(host_memory, "read_free_bytes", lambda: size)


@pytest.mark.rooms
def test_what_memory_does_not_hold_is_refused_on_a_cpu(free):
    from samestep.contrib import host_memory

    recipe = load("bert_large_phase1")

    def choose(flags: str = "") -> int | None:
        settings = run.parse(["--recipe", recipe.name, *flags.split()], recipe.task, "")[1]
        return host_memory.choose_batch_size(_Cpu(), recipe, settings)

    states = 16 * 336_226_108
    free(100 * states)
    assert (choose(), choose("--per_device_train_batch_size 7")) == (None, 7)
    free(None)
    assert choose() is None
    free(2 * states)
    chosen = choose()
    assert 1 <= chosen < recipe.global_batch_size
    free(round(1.3 * states))
    assert 1 <= choose() < chosen
    with pytest.raises(UsageError, match=r"needs .* GB .* Give a smaller --per_device_train_batch_size, --rehearse"):
        choose("--per_device_train_batch_size 200")
    free(states // 2)
    with pytest.raises(UsageError, match=r"one sample, by its plan, .* free. Give --rehearse"):
        choose()


def test_free_memory_is_read():
    from samestep.contrib import host_memory

    size = host_memory.read_free_bytes()
    assert size is None or 2**20 < size < 2**50


NO_SHAPE = " ".join(f"--{name} none" for name in ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE))
NO_DRAWN = " ".join(f"--{name} none" for name in ("dataset_name", "dataset_config_name", *DRAWN_SIZES))
LORA = "--lora_rank 4 --lora_alpha 8"


@pytest.fixture
def rehearse(train, tmp_path, monkeypatch):
    """rehearse(base, "--flag value"): the two sessions of a rehearsal -> its folder."""

    def run(base, flags: str):
        chats = write_chats(tmp_path / "chats.jsonl")
        more = f"{NO_SHAPE} {NO_DRAWN} --num_warmup_steps 0 --global_batch_size 8 --max_seq_length 128 --rehearse"
        more = f"{more} --model_name_or_path {base} --train_file {chats} --validation_fraction 0.2 {flags}"
        folder = tmp_path / "run-rehearsal"
        for number, session in enumerate(rehearsal.SESSIONS):
            monkeypatch.setenv(rehearsal.SESSION, str(number))
            train("", f"{more} {rehearsal.EVERY_SESSION} {session}", program="finetune_causal_lm", output_dir=folder)
        return folder

    return run


WIDE = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32}


@pytest.mark.rooms
def test_a_rehearsal_trains_the_kind_of_model_that_the_run_trains(rehearse, tmp_path):
    """Two layers of a Qwen3 with the tokenizer, the template, the adapters and the merge of the run; no weights are read."""
    base = save_base(tmp_path / "base", "qwen3", **WIDE, dtype=torch.bfloat16)
    (base / "model.safetensors").unlink()
    folder = rehearse(base, f"{LORA} --lora_targets q_proj gate_proj --merge_adapter --max_merge_loss 1")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"], config["dtype"]) == ("qwen3", 2, "bfloat16")
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (6, 2)
    assert {"adapter", "checkpoint-2", "checkpoint-3", "all_results.json"} <= {path.name for path in folder.iterdir()}
    tokens = [AutoTokenizer.from_pretrained(place)("<|im_start|>user a")["input_ids"] for place in (base, folder)]
    assert tokens[0] == tokens[1]
    recipe = load("sft_small_cpu", {"model_name_or_path": str(base)})
    text = rehearsal.describe_model(folder, recipe, recipe)
    assert text == f"a small qwen3 of random weights in place of {base}: the same kinds of layers, few and narrow"


@pytest.mark.rooms
def test_what_the_run_refuses_the_rehearsal_refuses(rehearse, tmp_path):
    """Experts of a mixture are no module with that name."""
    base = save_base(tmp_path / "base", "qwen3_moe", **WIDE, **EXPERTS)
    with pytest.raises(UsageError, match="lora_targets names gate_proj, but Qwen3MoeForCausalLM has no such module"):
        rehearse(base, f"{LORA} --lora_targets q_proj gate_proj")


@pytest.mark.rooms
def test_a_rehearsal_of_an_unknown_model_says_that_it_trains_another_one(rehearse, tmp_path, capsys):
    base = save_base(tmp_path / "base")
    (base / "config.json").write_text('{"model_type": "no such model"}')
    folder = rehearse(base, "")
    assert "no small model of the kind of" in (out := capsys.readouterr().out)
    assert "this rehearsal trains a small Llama instead" in out
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"


KINDS = [
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2", "gemma3_text",
    "phi", "phi3", "gpt2", "gpt_neox", "gpt_neo", "gptj", "opt", "bloom", "falcon", "olmo2", "olmoe", "granite", "granitemoe",
    "smollm3", "deepseek_v2", "deepseek_v3", "glm4", "gpt_oss", "cohere2", "starcoder2", "mamba2", "jamba", "lfm2", "ernie4_5",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_model_has_the_layers_of_its_kind(kind):
    """On fake tensors: the names of modules are those of the whole model, in fewer layers, and it computes."""
    whole = AutoConfig.for_model(kind)
    config = small_model.shrink(whole, 300)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        large = AutoModelForCausalLM.from_config(whole)
        assert {re.sub(r"\.\d+", "", name) for name, _ in model.named_parameters()} == {
            re.sub(r"\.\d+", "", name) for name, _ in large.named_parameters()
        }
    sizes = [parameter.numel() for parameter in model.parameters() if max(parameter.shape) < 1000]
    assert sum(sizes) < 3e6
