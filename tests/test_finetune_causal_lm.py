"""Fine-tuning of causal language models as a user meets it: the same step in any cut, what a run leaves, what it refuses."""

import datetime
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from cases import keep, thorough
from common import evaluations, load_benchmark, metrics, samples_of_steps
from compare import check, parameters, relative, same_weights, untimed_metrics
from rooms import PAGES, read_card
from transformers import AutoModelForCausalLM, AutoTokenizer

from samestep.data import conversations
from samestep.data.chat_templates import TEMPLATES
from samestep.errors import UsageError
from samestep.models.causal_lm import CausalLmSums
from samestep.recipe import pretrained_shape
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import load
from samestep.recipe.tasks.causal_lm_finetuning import DRAWN_SIZES, CausalLmFineTuning
from samestep.training import starting
from samestep.training.checkpoint import read

PROGRAM = "finetune_causal_lm"
PAIRS = " --dataset_name builtin/drawn_pairs --train_on completions --objective "
WORKLOADS = {
    "llama": "",
    "by_sample": " --loss_weighting sample",
    "gpt2": " --architecture gpt2 --num_key_value_heads none",
    "lora": " --lora_rank 4 --lora_alpha 8 --train_on all",
    "dpo": f"{PAIRS}dpo --sft_loss_weight 0.2",
    "orpo": f"{PAIRS}orpo",
    "simpo": f"{PAIRS}simpo --preference_beta 2",
    "reward": f"{PAIRS}reward",
}
WEIGHTS = (
    " ".join(f"--{name} none" for name in ("architecture", "vocab_size", *CausalLmFineTuning.SHAPE))
    + " --model_name_or_path "
)
SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


def flags(batch: int, cap: int, dtype: str) -> str:
    """Seven steps take a batch of 10 into the second epoch."""
    return f"--global_batch_size {batch} --per_device_train_batch_size {cap} --dtype {dtype} --max_train_steps 7"


@pytest.fixture
def finetune(train):
    return partial(train, program=PROGRAM)


@pytest.fixture(scope="module")
def references():
    """Of this file's tests: (workload, dtype) -> output folder."""
    return {}


@pytest.fixture
def reference(finetune, references, tmp_path_factory):
    """reference("llama", "float64"): a workload's training on whole batches of 10, once for all tests."""

    def train_whole(workload: str, dtype: str):
        if (workload, dtype) not in references:
            folder = tmp_path_factory.mktemp("reference") / workload
            references[workload, dtype] = finetune("", flags(10, 10, dtype) + WORKLOADS[workload], output_dir=folder)
        return references[workload, dtype]

    return train_whole


@pytest.mark.parametrize("workload", keep(WORKLOADS, ["llama", "lora", "dpo"]))
def test_every_cut_in_time_is_the_same_step(finetune, reference, workload):
    whole = reference(workload, "float64")
    assert all(line["grad_norm"] > 0 for line in metrics(whole))
    check(finetune("cut", flags(10, 3, "float64") + WORKLOADS[workload]), whole, "float64")
    if workload == "llama":
        by_tokens = finetune("tokens", f"{flags(10, 10, 'float64')} --per_device_train_tokens 600")
        check(by_tokens, whole, "float64")
        check(finetune("single", flags(10, 3, "float32")), reference(workload, "float32"), "float32")


@pytest.mark.distributed
def test_every_cut_in_space_is_the_same_step(reference, train_on):
    """On two processes, all workloads in one launch; single precision for one."""
    cases = [(workload, "float64") for workload in ("llama", "gpt2", "lora", "dpo", "orpo")] + [("llama", "float32")]
    runs = {f"{PROGRAM}/{name}-{dtype}": flags(10, 3, dtype) + WORKLOADS[name] for name, dtype in cases}
    folder = train_on(2, runs)
    for name, dtype in cases:
        check(folder / PROGRAM / f"{name}-{dtype}", reference(name, dtype), dtype)


@pytest.mark.parametrize("case", [("qwen3", "lora", "sft by sample"), ("gemma3", "full", "dpo + sft")])
def test_a_corner_of_the_grid(case):
    """Three processes, a last step of two samples, dropout by sample; `make bench NAME=chat_grid` measures all of it."""
    grid = load_benchmark("chat_grid")
    row = grid.measure_cells(*case, "float64", [(3, 2, False)])
    assert max(row[name] for name in ("loss", "grad_norm", "parameters")) < 1e-12


@pytest.mark.thorough
@pytest.mark.distributed
def test_sharded_weights_take_the_same_steps(finetune, reference, train_on):
    """FSDP2 on two processes: DPO with its reference, adapters; from one process's checkpoint and to it."""
    cut, name = flags(10, 3, "float64"), f"{PROGRAM}/lora"
    lora = cut + WORKLOADS["lora"] + " --lora_dropout 0.1 --eval_steps 5 --max_train_steps 10"
    whole = finetune("whole", lora)
    finetune(name, f"{lora} --stop_after_step 4")
    runs = {
        f"{PROGRAM}/dpo": cut + WORKLOADS["dpo"],
        name: f"{lora} --stop_after_step 7 --resume_from_checkpoint latest",
    }
    folder = train_on(2, runs, "fsdp2_2xcpu") / PROGRAM
    check(folder / "dpo", reference("dpo", "float64"), "float64")
    saved = folder / "lora" / "checkpoint-7"
    assert (saved / "model-00002-of-00002.safetensors").exists()
    tensors = read(saved, "model")
    assert tensors
    assert all("lora" in name for name in tensors)
    check(finetune(name, f"{lora} --resume_from_checkpoint latest"), whole, "float64")
    answers = [(path / "generations.jsonl").read_text() for path in (folder / "lora", whole)]
    assert answers[0] == answers[1]


def test_the_mean_of_means_fails_the_same_check(finetune, reference, after_forward):
    """The control: tokens weighed by their own micro-batch, as loops of others do."""

    def mean(model, outputs, labels, **batch):
        sums, correct = outputs
        return sums / max(1, len(labels)) * (600 / 4 if model.training else 1), correct

    after_forward(CausalLmSums, mean)
    cut = finetune("cut", flags(10, 3, "float64"))
    assert relative(parameters(cut), parameters(reference("llama", "float64"))) > 1e-3


@pytest.mark.rooms
def test_what_a_run_leaves_behind(finetune, capsys, real_figures):
    output_dir = finetune("run", SMALL + " --eval_steps 5")
    printed = capsys.readouterr().out
    assert {path.name for path in output_dir.iterdir()} == {
        *PAGES,
        *(".lock", "all_results.json", "best", "chat_template.jinja", "checkpoint-10", "config.json"),
        *("generation_config.json", "generations.jsonl", "metrics.jsonl", "model.safetensors"),
        *("recipe.yaml", "settings.json", "tokenizer.json", "tokenizer_config.json"),
    }
    assert [line["step"] for line in evaluations(output_dir)] == [0, 5, 10]
    judged = ["step", "eval_loss", "eval_perplexity", "eval_accuracy", "eval_exact_match"]
    assert list(evaluations(output_dir)[0])[:5] == judged
    for line in evaluations(output_dir):
        assert line["eval_perplexity"] == pytest.approx(math.exp(line["eval_loss"]))
    answers = [json.loads(line) for line in (output_dir / "generations.jsonl").read_text().splitlines()]
    assert len(answers) == 4
    assert evaluations(output_dir)[-1]["eval_exact_match"] == sum(a["is_right"] for a in answers) / 4
    assert "random weights" in printed
    assert "tokens are trained" in printed or "trained: " in printed, "the report of the mask"
    assert 'pipeline("text-generation"' in read_card(output_dir)


@pytest.mark.rooms
def test_the_saved_model_answers_in_its_chat_template(finetune):
    output_dir = finetune("run", SMALL)
    model, tokenizer = (kind.from_pretrained(output_dir) for kind in (AutoModelForCausalLM, AutoTokenizer))
    recipe, _ = run.parse(["--recipe", str(output_dir / "recipe.yaml")], "causal_lm_finetuning", "")
    _, held_out = conversations.build(recipe)
    answers = [json.loads(line) for line in (output_dir / "generations.jsonl").read_text().splitlines()]
    for place, answer in enumerate(answers):
        prompt, expected = (torch.from_numpy(tokens).long() for tokens in held_out.find_question(place))
        assert answer["expected"] == tokenizer.decode(expected, skip_special_tokens=True)
        tokens = model.generate(prompt[None], max_new_tokens=8, do_sample=False)[0, len(prompt) :]
        assert answer["answer"] == tokenizer.decode(tokens, skip_special_tokens=True).strip()
    again = finetune("again", f"{SMALL} {WEIGHTS}{output_dir} --max_train_steps 1 --learning_rate 1e-12")
    assert evaluations(again)[0]["eval_loss"] == pytest.approx(evaluations(output_dir)[-1]["eval_loss"], rel=1e-6)


@pytest.mark.rooms
@pytest.mark.parametrize("workload", [thorough("dpo"), "lora"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(finetune, workload):
    more = f"{SMALL} --eval_steps 4 --record_samples{WORKLOADS[workload]}"
    if workload == "lora":  # on a mixture, too
        more += " --dataset_name builtin/drawn_chats builtin/doctests --mixture_weights 1 0.05"
    whole = finetune("whole", more)
    parts = finetune("parts", f"{more} --stop_after_step 7")
    finetune("parts", f"{more} --resume_from_checkpoint latest", output_dir=parts)
    assert untimed_metrics(parts) == untimed_metrics(whole)
    if workload != "lora":
        assert same_weights(parts, whole)
        return
    uses = [json.loads(line) for line in (parts / "samples.jsonl").read_text().splitlines()]
    ids = np.array([sample for use in uses for sample in use["samples"]])
    assert len({pair for use in uses for pair in zip(use["epochs"], use["samples"], strict=True)}) == len(ids) == 80
    results = json.loads((parts / "all_results.json").read_text())
    seen = {name: results[f"{name}/samples_seen"] for name in ("drawn_chats", "doctests")}
    assert seen == {"drawn_chats": int(np.sum(ids < 61)), "doctests": int(np.sum(ids >= 61))}
    assert min(seen.values()) > 10
    evaluation = evaluations(parts)[-1]
    assert {"eval_doctests/loss", "eval_sort/perplexity"} <= evaluation.keys()
    assert sum(name.endswith("/exact_match") for name in evaluation) == 4, "prompts of four sources"
    assert "| doctests | " in read_card(parts)


def test_rows_that_cannot_be_used_are_refused_or_listed(finetune, tmp_path, capsys):
    rows = [{"prompt": f"{number}?", "completion": f" {number}", "label": number % 4 > 0} for number in range(20)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    no_data = " ".join(f"--{field} none" for field in ("dataset_name", "dataset_config_name", *DRAWN_SIZES))
    more = f"{SMALL} {no_data} --train_file {file} --max_train_steps 1"
    with pytest.raises(UsageError, match="label is False, which marks an answer that is not wanted") as error:
        finetune("refused", more)
    assert error.value.problems[1].startswith(f"{file}:21: not a JSON object")
    assert error.value.problems[1].endswith("; --on_bad_row skip leaves out these 6 rows of 21")
    skipped = finetune("skipped", f"{more} --on_bad_row skip")
    lines = [json.loads(line) for line in (skipped / "skipped_rows.jsonl").read_text().splitlines()]
    assert [line["place"] for line in lines] == [f"{file}:{number}" for number in (1, 5, 9, 13, 17, 21)]
    assert "train_file: 21 rows read, 15 used" in capsys.readouterr().out


@pytest.mark.distributed
def test_a_mixture_moves_between_numbers_of_processes(finetune, train_on, tmp_path):
    """From one process in the middle of an epoch to two, and to three: the same samples in the same steps, each as often as its
    weight says. GPT-2, which normalises in float64: Llama's float32 rounds what three processes multiply by 3."""
    for name, size, question in (("often", 12, "first"), ("seldom", 20, "other")):
        rows = [{"instruction": f"{question} {number}", "output": "ok " * (1 + number % 7)} for number in range(size)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    no_data = " ".join(f"--{field} none" for field in ("dataset_name", "dataset_config_name", *DRAWN_SIZES))
    files = f"--train_file {tmp_path}/often.jsonl {tmp_path}/seldom.jsonl --mixture_weights 2 0.5"
    more = f"{flags(7, 2, 'float64')}{WORKLOADS['gpt2']} {no_data} {files} --validation_fraction 0 --record_samples"
    more += " --max_train_steps 10"
    whole, name = finetune("whole", more), f"{PROGRAM}/moved"
    folder = finetune(name, f"{more} --stop_after_step 3")
    for num_processes, last in ((2, 6), (3, 10)):
        train_on(num_processes, {name: f"{more} --stop_after_step {last} --resume_from_checkpoint latest"})
    curves = [[(line["loss"], line["often/samples"]) for line in metrics(each)] for each in (folder, whole)]
    assert np.array(curves[0]) == pytest.approx(np.array(curves[1]), rel=1e-11)
    assert relative(parameters(folder), parameters(whole)) < 1e-12
    steps = samples_of_steps(folder)
    assert steps == samples_of_steps(whole)
    uses = [use for step in steps.values() for use in step]
    assert len(set(uses)) == len(uses) == 70
    # Two epochs of 2 x 12 and 0.5 x 20 samples, and two samples of the third
    often = [use for use in uses if use[1] < 12 and use[0] < 4]
    seldom = [use for use in uses if use[1] >= 12 and use[0] < 1]
    assert (len(often), len(seldom)) == (4 * 12, 20)


def test_it_learns(finetune):
    flags = "--global_batch_size 16 --num_train_samples 400 --max_train_steps 60 --lr_scaling_rule none"
    first, last = evaluations(finetune("longer", flags))
    assert last["eval_loss"] < first["eval_loss"] - 1


def test_preferences_are_learned_from_the_model_as_it_was(finetune):
    """Before the first step model and reference are one, so that the loss is ln 2."""
    start = finetune("start", f"{SMALL} --max_train_steps 1")
    flags = f"--global_batch_size 16 {WEIGHTS}{start} --max_train_steps 20 --learning_rate 1e-3{PAIRS}dpo"
    output_dir = finetune("dpo", flags)
    assert evaluations(output_dir)[0]["eval_loss"] == pytest.approx(math.log(2), rel=1e-5)
    losses = [line["loss"] for line in metrics(output_dir)]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-5)
    assert losses[-1] < losses[0] - 0.03


@pytest.mark.rooms
def test_the_best_model_is_left_when_asked_for(finetune):
    flags = f"{SMALL} --eval_steps 5 --learning_rate 1e-12 --metric_for_best_model exact_match --load_best_model_at_end"
    output_dir = finetune("run", flags)
    assert json.loads((output_dir / "all_results.json").read_text())["best_step"] == 0
    assert same_weights(output_dir, output_dir / "best")
    flags = f"{SMALL} --eval_steps 2 --learning_rate 1e-12 --early_stopping_patience 2"
    assert len(metrics(finetune("stopped", f"{flags} --metric_for_best_model exact_match"))) == 4


def test_answers_are_those_of_single_prompts():
    from samestep.contrib.generation import continue_greedily

    torch.manual_seed(0)
    recipe = load("sft_small_cpu", {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 300})
    lm = CausalLmSums.from_recipe(recipe, None).model
    lm.set_attn_implementation("sdpa")
    prompts = [row[:length] for row, length in zip(torch.randint(2, 300, (4, 9)).tolist(), (9, 9, 5, 2), strict=True)]
    together = continue_greedily(lm, prompts, 12, [1])
    assert together == [continue_greedily(lm, [prompt], 12, [1])[0] for prompt in prompts]
    end = together[0][5]
    stopped = continue_greedily(lm, prompts[:1], 12, [end])[0]
    assert stopped == together[0][: together[0].index(end)]


def test_a_merge_is_measured_and_refused_where_it_loses_the_adapter(finetune, capsys):
    """Into a base whose files are in bfloat16; in float32 it is written. The run is the same one, resumed at its end."""
    start = finetune("start", f"{SMALL} --max_train_steps 1")
    AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16).save_pretrained(start)
    flags = f"{SMALL} {WEIGHTS}{start} --lora_rank 4 --lora_alpha 8 --learning_rate 1e-5 --max_train_steps 2"
    with pytest.raises(
        UsageError, match=r"merged weights in bfloat16 lose \d+.*more than max_merge_loss 0.01, .*set merge_dtype"
    ):
        finetune("run", f"{flags} --merge_adapter")
    capsys.readouterr()
    output_dir = finetune("run", f"{flags} --merge_adapter --merge_dtype float32 --resume_from_checkpoint latest")
    printed, results = capsys.readouterr().out, json.loads((output_dir / "all_results.json").read_text())
    assert f"merged weights in float32 lose {results['merge_loss']:.2%} of what the adapter does" in printed
    assert results["merge_loss"] < 0.01
    assert "| merge_loss |" in read_card(output_dir)
    assert AutoModelForCausalLM.from_pretrained(output_dir).dtype == torch.float32
    bf16 = finetune("allowed", f"{flags.replace('1e-5', '0.1')} --merge_adapter --max_merge_loss 1")
    assert AutoModelForCausalLM.from_pretrained(bf16).dtype == torch.bfloat16


@pytest.mark.rooms
def test_an_adapter_of_random_weights_has_its_base_beside_it(finetune):
    peft = pytest.importorskip("peft")
    flags = f"{SMALL}{WORKLOADS['lora']} --eval_steps 5 --load_best_model_at_end"
    output_dir = finetune("run", flags)
    base = AutoModelForCausalLM.from_pretrained(output_dir / "base")
    assert 'from_pretrained("./base")' in read_card(output_dir)
    model, tokenizer = peft.PeftModel.from_pretrained(base, output_dir), AutoTokenizer.from_pretrained(output_dir)
    recipe, _ = run.parse(["--recipe", str(output_dir / "recipe.yaml")], "causal_lm_finetuning", "")
    _, held_out = conversations.build(recipe)
    for place, line in enumerate((output_dir / "generations.jsonl").read_text().splitlines()):
        prompt = torch.from_numpy(held_out.find_question(place)[0]).long()[None]
        tokens = model.generate(input_ids=prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :]
        assert tokenizer.decode(tokens, skip_special_tokens=True).strip() == json.loads(line)["answer"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--merge_adapter", "merge_adapter is true, but lora_rank is null"),
        (
            "--push_to_hub --lora_rank 8 --lora_alpha 8",
            "push_to_hub is true, but the adapter's base has random weights",
        ),
        pytest.param(
            "--optimizer adamw_8bit --dtype float64",
            "dtype is float64, but optimizer is adamw_8bit",
            marks=pytest.mark.rooms,
        ),
        (
            "--optimizer adamw_8bit --accumulation optimizer --second_moment none",
            "accumulation is optimizer, but optimizer is adamw_8bit",
        ),
        ("--base_quantization nf4", "base_quantization is nf4, but lora_rank is null"),
        (
            "--base_quantization nf4 --lora_rank 8 --lora_alpha 8 --use_dora",
            "use_dora is true, but base_quantization is nf4",
        ),
        ("--num_train_samples none", "num_train_samples is None, but with builtin/drawn_chats it must be a number"),
        ("--objective dpo", "objective is dpo, but dataset_name is builtin/drawn_chats, which has no such samples"),
        (f"{PAIRS}dpo --loss_weighting sample", "loss_weighting is sample, but objective is dpo"),
        (f"{PAIRS}simpo --sft_loss_weight 1", "sft_loss_weight is 1.0, but objective is simpo"),
        (f"{PAIRS}dpo --train_on all", "train_on is all, but objective is dpo"),
        ("--lora_alpha 8", "lora_alpha is 8.0, but lora_rank is null"),
        ("--lora_rank 8", "lora_alpha is null, but lora_rank is 8"),
        ("--lora_rank 8 --lora_alpha 8 --lora_targets all-linear q_proj", "give all-linear alone, or names"),
        ("--hidden_size none", "hidden_size is null, but model_name_or_path is not set"),
        ("--num_attention_heads 5", "hidden_size 32 is not a multiple of num_attention_heads 5"),
        ("--num_key_value_heads 3", "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ("--max_seq_length 300", "max_seq_length 300 exceeds max_position_embeddings 256"),
        ("--architecture llamma", "architecture llamma is no model_type that transformers knows"),
        ("--model_name_or_path nowhere --architecture none", "is 32, but model_name_or_path is set"),
        ("--early_stopping_patience 2", "early_stopping_patience compares evaluations"),
        ("--metric_for_best_model f2 --eval_steps 5", "metric_for_best_model is 'f2', must be one of loss"),
        (
            "--metric_for_best_model preference_accuracy --eval_steps 5",
            "metric_for_best_model is 'preference_accuracy'",
        ),
        ("--recipe bert_small_cpu", "is for the task bert_pretraining, this script trains causal_lm_finetuning"),
    ],
)
def test_a_mistake_is_one_clear_line(finetune, flags, message):
    with pytest.raises(UsageError, match=message) as error:
        finetune("run", f"{SMALL} {flags}")
    assert "\n" not in error.value.problems[0]


def test_weights_bring_their_shape_and_other_data_their_size(tmp_path):
    recipe = load("sft_small_cpu", {"model_name_or_path": "someone/model", "train_file": ["a.jsonl"]})
    assert set(recipe.shape.values()) | {recipe.architecture, recipe.vocab_size} == {None}
    assert (recipe.num_train_samples, recipe.num_validation_samples, recipe.dataset_config_name) == (None, None, None)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    changes = {"model_name_or_path": str(tmp_path)}
    with pytest.raises(UsageError, match=r"max_seq_length is 256, but model_name_or_path .* has 128 positions"):
        pretrained_shape.load("sft_small_cpu", changes)
    assert pretrained_shape.load("sft_small_cpu", changes | {"max_seq_length": 128}).max_seq_length == 128


def test_a_run_that_goes_on_the_next_day_reads_the_same_date(finetune, tmp_path, monkeypatch):
    class Day(datetime.date):
        @classmethod
        def today(cls):
            return cls(2026, 3, 1 + is_later)

    is_later = False
    monkeypatch.setattr(starting.datetime, "date", Day)
    rows = [{"instruction": f"first {number}", "output": "ok"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "clock.jinja").write_text("{{ strftime_now('%d %b') + '<|im_end|>' }}" + TEMPLATES["chatml"])
    no_data = " ".join(f"--{field} none" for field in ("dataset_name", "dataset_config_name", *DRAWN_SIZES))
    data = (
        f"{no_data} --train_file {tmp_path}/rows.jsonl --validation_fraction 0 --chat_template {tmp_path}/clock.jinja"
    )
    more = f"{flags(6, 6, 'float64')}{WORKLOADS['gpt2']} {data} --max_train_steps 10"
    whole = finetune("whole", f"{more} --max_train_steps 4")
    parts = finetune("parts", f"{more} --max_train_steps 4 --stop_after_step 2")
    is_later = True
    parts = finetune("parts", f"{more} --max_train_steps 4 --resume_from_checkpoint latest")
    assert [line["loss"] for line in metrics(parts)] == [line["loss"] for line in metrics(whole)]
    state = json.loads((parts / "checkpoint-4" / "state.json").read_text())
    assert state["data_fingerprints"]["date"] == "2026-03-01"
    other = finetune("other", f"{more} --max_train_steps 4")
    assert [line["loss"] for line in metrics(other)] != [line["loss"] for line in metrics(whole)]
