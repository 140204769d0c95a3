"""What a fine-tuning leaves works where people use it: it stops, it loads in transformers and peft, wherever it is saved."""

import json
import math
import re
import shlex
from pathlib import Path

import peft
import pytest
import torch
from cases import thorough
from chat_bases import CHATML, EXPERTS, GROUPED, make_tokenizer, save_base, write_chats
from common import evaluations, fresh_accelerator, metrics
from compare import untimed_metrics
from rooms import read_card
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline

from samestep.errors import UsageError
from samestep.models import adapters, stop_tokens
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, CausalLmFineTuning
from samestep.training import checkpoint

PROGRAM = "finetune_causal_lm"
NO_SHAPE = " ".join(f"--{name} none" for name in ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE))
NO_DRAWN = " ".join(f"--{name} none" for name in ("dataset_name", "dataset_config_name", *DRAWN_SIZES))
SHORT = "--num_warmup_steps 0 --max_train_steps 2 --global_batch_size 4 --max_seq_length 128 --num_generations 2"
LORA = " --lora_rank 4 --lora_alpha 8"


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("bases") / "base")


@pytest.fixture
def finetune(train, chats):
    """finetune("name", base, "--flag value ..."): trains a base on the chats, and returns the output folder."""

    def run(name: str, base: Path, flags: str = "", **options) -> Path:
        data = f"{NO_DRAWN} --train_file {chats} --validation_fraction 0.2"
        short = SHORT.replace("--max_train_steps 2", "--max_train_steps none") if "num_train_epochs" in flags else SHORT
        flags = f"{short} {NO_SHAPE} --model_name_or_path {base} {data} {flags}"
        return train(name, flags, program=PROGRAM, **options)

    return run


def read_ends(folder: Path) -> list[int]:
    return stop_tokens.list_ends(GenerationConfig.from_pretrained(folder))


def answer(folder: Path, **options) -> str:
    chat = pipeline("text-generation", model=str(folder), **options)
    question = [{"role": "user", "content": "Say 2."}]
    more = {"do_sample": False, "max_new_tokens": 12, "return_full_text": False, "skip_special_tokens": False}
    return chat(question, **more)[0]["generated_text"]


# ---------------------------------------------------------------------------------------------------------------------
# Stop tokens


@pytest.mark.parametrize(
    "way", ["", LORA, f"{LORA} --merge_adapter --max_merge_loss 1"], ids=["whole", "lora", "merged"]
)
def test_the_trained_stop_token_is_saved_beside_the_bases(finetune, base, way):
    """In the result, the best model and every checkpoint."""
    flags = f"{way} --eval_steps 1 --checkpointing_steps 1 --load_best_model_at_end"
    folder = finetune("run", base, flags)
    places = [folder, folder / "best", folder / "checkpoint-1", folder / "checkpoint-2"]
    places += [folder / adapters.APART] if "merge" in way else []
    assert [read_ends(place) for place in places] == [[0, 2]] * len(places)
    assert read_ends(base) == [0], "the base is as it was"


@pytest.mark.rooms
@pytest.mark.parametrize("way", ["", LORA], ids=["whole", "lora"])
def test_a_trained_model_stops_where_it_was_trained_to_stop(finetune, base, way, capsys):
    """By the lines that the card prints, and in evaluations."""
    # A rate at which every seed learns it, and that falls: at a large, constant one the last steps' rounding decides
    flags = "--max_train_steps 120 --num_generations 8 --global_batch_size 8 --lr_scheduler_type linear --learning_rate 1e-2"
    flags += " --lora_rank 16 --lora_alpha 32" if way else ""
    folder = finetune("run", base, flags)
    lines = read_card(folder).split("```python\n")[1].split("```")[0]
    assert ("generation_config" in lines) == bool(way)
    options = {"generation_config": GenerationConfig.from_pretrained(folder)} if way else {}
    assert answer(folder, **options) == "cc<|im_end|>"
    assert evaluations(folder)[-1]["eval_exact_match"] == 1


@pytest.mark.parametrize(
    ("name", "template", "train_on", "expected"),
    [
        ("middle and last turns end otherwise", CHATML.replace("{{ m.content }}<|im_end|>\n", "{% if m.role == 'assistant' %}"
         "{% generation %}{{ m.content }}{{ '<|im_end|>' if loop.last else '<|eom|>' }}{% endgeneration %}{% else %}"
         "{{ m.content }}{% endif %}"), "assistant", ["<|im_end|>", "<|eom|>"]),
        ("the end is trained with white space behind it", CHATML.replace("{{ m.content }}<|im_end|>\n", "{% if m.role == "
         "'assistant' %}{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ m.content }}<|im_end|>\n"
         "{% endif %}"), "assistant", ["<|im_end|>"]),
        ("its own eos_token", CHATML.replace("<|im_end|>", "{{ eos_token }}"), "assistant", []),
        ("the last answers only", CHATML, "completions", ["<|im_end|>"]),
        ("everything", CHATML, "all", ["<|im_end|>"]),
    ],
)  # fmt: skip
def test_all_tokens_that_end_trained_turns_are_found(finetune, tmp_path, name, template, train_on, expected):
    tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eom|>")
    tokenizer = make_tokenizer(template, tokens)
    folder = finetune("run", save_base(tmp_path / "base", tokenizer=tokenizer), f"--train_on {train_on}")
    assert read_ends(folder) == [0, *map(tokens.index, expected)], name


def test_an_added_token_that_is_not_special_ends_turns_too(finetune, tmp_path):
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>", "[END]"))
    tokenizer.add_tokens(["[END]", "[WORD]"])
    folder = finetune("run", save_base(tmp_path / "base", tokenizer=tokenizer))
    assert read_ends(folder) == [0, tokenizer.convert_tokens_to_ids("[END]")]


def test_a_generation_config_with_questionable_values_is_saved(finetune, tmp_path):
    """As some published models have: a temperature, without sampling."""
    base = save_base(tmp_path / "base")
    values = {"eos_token_id": [0, 1], "temperature": 0.6, "do_sample": False, "max_length": 77}
    (base / "generation_config.json").write_text(json.dumps(values))
    saved = GenerationConfig.from_pretrained(finetune("run", base))
    assert (saved.eos_token_id, saved.temperature, saved.max_length) == ([0, 1, 2], 0.6, 77)


def test_texts_end_by_the_tokens_that_they_were_trained_with(train, tmp_path):
    """Pretraining GPT-2 from weights that end texts by another token."""
    start = train("start", "--max_train_steps 1", program="pretrain_gpt2")
    (start / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    flags = f"--max_train_steps 1 --model_name_or_path {start} --sample_prompt a --sample_length 4"
    assert read_ends(train("again", flags, program="pretrain_gpt2")) == [5, 0]


@pytest.mark.parametrize("way", ["", "--objective dpo"])
def test_the_lines_of_a_card_run_where_the_data_are_texts(train, tmp_path, way):
    """A model of texts has no turns, and is asked to go on with a text."""
    row = {"prompt": "Say a.", "chosen": " a", "rejected": " b"} if way else {"prompt": "Say a.", "completion": " a"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    flags = f"{way} --train_file {tmp_path / 'rows.jsonl'} {NO_DRAWN} --max_train_steps 1 --num_generations 0"
    folder = train("run", flags, program="finetune_causal_lm")
    (lines,) = re.findall(r"```python\n(.*?)```", read_card(folder), re.DOTALL)
    assert '"the beginning of a text"' in lines
    answer = eval(lines.splitlines()[-1], {"chat": pipeline("text-generation", model=str(folder))})
    assert answer[0]["generated_text"].startswith("the beginning of a text")


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


@pytest.mark.parametrize(
    ("kind", "fields", "flags"),
    [
        thorough("llama", GROUPED, LORA),
        ("llama", GROUPED, f"{LORA} --use_dora"),
        ("llama", GROUPED, f"{LORA} --modules_to_save lm_head"),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}, f"{LORA} --lora_targets c_attn"),
        ("qwen3_moe", GROUPED | EXPERTS | {"head_dim": 8}, LORA),
    ],
)
def test_a_checkpoint_of_an_adapter_loads_in_peft(finetune, tmp_path, kind, fields, flags):
    """It gives the logits of the adapter that is saved at the end."""
    base = save_base(tmp_path / "base", kind, **fields)
    folder = finetune("run", base, flags)
    token_ids = torch.arange(3, 20)[None]
    logits = []
    for place in (folder, folder / "checkpoint-2"):
        assert (place / "adapter_model.safetensors").exists()
        models = [peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), place)]
        if "dora" not in flags:  # whose lengths transformers 5.24 does not load, from any folder
            models.append(AutoModelForCausalLM.from_pretrained(place))
        with torch.no_grad():
            logits += [model.eval()(token_ids).logits for model in models]
        assert AutoTokenizer.from_pretrained(place).chat_template
    assert not torch.equal(logits[0], AutoModelForCausalLM.from_pretrained(base)(token_ids).logits)
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0])
    assert ("PeftModel" in read_card(folder)) == ("dora" in flags)


def test_a_checkpoint_of_an_earlier_format_is_gone_on_from(finetune, base):
    """Its adapters are in model.safetensors, by their names in peft's model."""
    whole = finetune("whole", base, LORA)
    parts = finetune("parts", base, f"{LORA} --stop_after_step 1")
    folder = parts / "checkpoint-1"
    tensors = load_file(folder / "adapter_model.safetensors")
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder, is_trainable=True)
    own = adapters.name_in_model(model)
    assert own.keys() == tensors.keys()
    (folder / "adapter_model.safetensors").unlink()
    save_file({own[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    names = ("model.safetensors", "optimizer.safetensors", "recipe.yaml", "state.json")
    files = {name: checkpoint._flush_and_hash(folder / name) for name in names}
    (folder / "manifest.json").write_text(checkpoint._manifest({"format": 3, "step": 1, "files": files}))
    finetune("parts", base, f"{LORA} --resume_from_checkpoint latest", output_dir=parts)
    assert untimed_metrics(parts) == untimed_metrics(whole)


def test_a_merge_keeps_its_adapter_beside_it(finetune, base, tmp_path):
    """In a folder of its own: the two are not loaded one over the other."""
    flags = f"{LORA} --learning_rate 1e-2"
    alone = finetune("alone", base, flags)
    merged = finetune("merged", base, f"{flags} --merge_adapter")
    kept = merged / adapters.APART
    ours, theirs = (load_file(place / "adapter_model.safetensors") for place in (kept, alone))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not list(merged.glob("adapter_*"))
    token_ids = torch.arange(3, 20)[None]
    models = [AutoModelForCausalLM.from_pretrained(place).eval() for place in (merged, kept)]
    logits = [model(token_ids).logits for model in models]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
    # The same folder with the adapter alone: no merged weights below it, which transformers would load, too
    again = finetune("merged", base, f"{flags} --resume_from_checkpoint latest", output_dir=merged)
    assert not (again / "config.json").exists()
    assert not kept.exists()
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(again).eval()(token_ids).logits, logits[1])


def test_a_merge_of_random_weights_keeps_adapter_and_base(train):
    folder = train("run", f"{SHORT}{LORA} --merge_adapter --max_merge_loss 1", program=PROGRAM)
    kept = folder / adapters.APART
    base = AutoModelForCausalLM.from_pretrained(kept / adapters.BASE)
    model = peft.PeftModel.from_pretrained(base, kept).merge_and_unload()
    token_ids = torch.arange(3, 20)[None]
    whole = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(model.eval()(token_ids).logits, whole.eval()(token_ids).logits, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# The card


@pytest.mark.parametrize(
    ("way", "files"),
    [("", "float32"), (LORA, "float32"), (f"{LORA} --merge_adapter --max_merge_loss 1", "bfloat16")],
    ids=["whole", "lora", "merged"],
)
def test_the_card_says_what_the_files_hold_and_nothing_of_this_machine(finetune, tmp_path, way, files, capsys):
    base = save_base(tmp_path / "base-0.1B", dtype=torch.bfloat16)
    folder = finetune("run", base, way)
    text, method = read_card(folder), " by LoRA" if way else ""
    assert f"\nFine-tuning a causal language model, from base-0.1B,{method} on chats.jsonl.\n" in text
    assert f"- **Precision**: files in {files}; trained in float32\n" in text
    assert str(tmp_path) not in text
    assert [path.parent for path in folder.rglob("README.md")] == [folder]
    assert f'"{folder.name}"' not in text, "who is given the files has no such folder"
    assert 'pipeline("text-generation", model="."' in text
    is_alone = way == LORA
    assert ("needs its base, `base-0.1B`, a folder that is not on the hub" in text) == is_alone
    out = capsys.readouterr().out
    assert str(folder) in out, "the lines that are printed are for this machine"
    assert ("adapter needs" in out and "who is given" in out.lower()) == is_alone


def test_the_card_has_the_epochs_that_were_asked_for(finetune, base):
    """32 samples, 5 of a step: 13 steps hold 65 samples."""
    folder = finetune("run", base, "--num_train_epochs 2 --global_batch_size 5 --epoch_end carry")
    assert json.loads((folder / "all_results.json").read_text())["epoch"] == 2
    text = read_card(folder)
    assert "65 samples" in text
    assert "optimizer steps; the last step was filled up with samples beyond 2 epochs" in text


# ---------------------------------------------------------------------------------------------------------------------
# Training on


@pytest.mark.parametrize(
    "way", ["", LORA, f"{LORA} --merge_adapter --max_merge_loss 1"], ids=["whole", "lora", "merged"]
)
def test_a_finished_run_names_the_command_that_trains_on(finetune, base, scripts, way):
    """The weights at its start are those that were left, and so the evaluation."""
    flags = f"{way} --lr_scheduler_type cosine --learning_rate 1e-2 --eval_steps 100"
    folder = finetune("run", base, f"{flags} --num_train_epochs 1")
    with pytest.raises(
        UsageError, match="is the end of a training of 8 steps, whose learning rate has fallen"
    ) as error:
        finetune("run", base, f"{flags} --num_train_epochs 2.5 --resume_from_checkpoint latest", output_dir=folder)
    words = shlex.split(str(error.value).split("of its own: ")[1])
    argv = words[next(place for place, word in enumerate(words) if word.startswith("--")) :]
    fresh_accelerator()
    scripts[PROGRAM].main(argv)
    more = folder.with_name("run-more")
    assert f"--model_name_or_path {folder} --output_dir {more} --num_train_epochs 1.5" in shlex.join(argv)
    ends = evaluations(folder)[-1]["eval_loss"], evaluations(more)[0]["eval_loss"]
    assert ends[1] == pytest.approx(ends[0], rel=1e-5)
    assert len(metrics(more)) == 12
    AutoModelForCausalLM.from_pretrained(more)


def test_a_training_at_a_constant_rate_goes_on(finetune, base, capsys):
    flags = f"{LORA} --lr_scheduler_type constant"
    folder = finetune("run", base, f"{flags} --num_train_epochs 1")
    finetune("run", base, f"{flags} --num_train_epochs 2 --resume_from_checkpoint latest", output_dir=folder)
    assert "going on from step 8 of a training of 8" in capsys.readouterr().out
    assert len(metrics(folder)) == 16


def test_preferences_are_learned_from_an_adapter(finetune, base, tmp_path):
    """The reference is the model with it, so that the loss begins at ln 2."""
    start = finetune("start", base, f"{LORA} --learning_rate 3e-2 --max_train_steps 20")
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"Say {n % 4}.", "chosen": "yes" * (1 + n % 3), "rejected": "no"} for n in range(20)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"{LORA} --objective dpo --preference_beta 0.1 --train_on completions --train_file {pairs}"
    folder = finetune("dpo", start, flags)
    assert evaluations(folder)[0]["eval_loss"] == pytest.approx(math.log(2), rel=1e-5)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    tensors = [load_file(place / "adapter_model.safetensors") for place in (start, folder)]
    name = next(name for name in tensors[0] if "lora_B" in name)
    distance, size = (tensors[0][name] - tensors[1][name]).norm(), tensors[0][name].norm()
    assert 0 < distance < 0.2 * size


def test_an_adapter_whose_base_stayed_on_another_machine_is_one_clear_line(finetune, base):
    """The plan of a training that goes on with it, and the training."""
    start = finetune("start", base, LORA)
    file = start / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": "/data/elsewhere/tiny"}))
    message = (
        f"was trained on /data/elsewhere/tiny, which is not here: put that folder, or a link to it, at {start}/base"
    )
    with pytest.raises(UsageError, match=message) as error:
        finetune("more", start, LORA)
    assert "\n" not in error.value.problems[0]
    (start / "base").symlink_to(base)
    finetune("more", start, LORA)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "is an adapter, .*lora_rank .* to train it further"),
        ("--lora_rank 8 --lora_alpha 8", "is an adapter of another recipe: lora_rank 4 there, 8 here"),
        (f"{LORA} --lora_targets q_proj", r"lora_targets \[.*\] there, \['q_proj'\] here"),
        (f"{LORA} --use_rslora", "use_rslora None there, True here"),
    ],
)
def test_an_adapter_of_another_recipe_is_one_clear_line(finetune, base, flags, message):
    start = finetune("start", base, LORA)
    with pytest.raises(UsageError, match=message) as error:
        finetune("more", start, flags)
    assert "\n" not in error.value.problems[0]


def test_experts_in_float64_are_one_clear_line(finetune, tmp_path):
    base = save_base(tmp_path / "base", "qwen3_moe", **GROUPED | EXPERTS | {"head_dim": 8})
    with pytest.raises(UsageError, match="dtype is float64, but Qwen3MoeForCausalLM has experts"):
        finetune("run", base, "--dtype float64")
