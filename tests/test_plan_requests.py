"""Plans of requests that were made of the planner: what they are called, what they are refused for, and with which words."""

import functools
import json
import random
import re
import shlex

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from samestep import cli
from samestep.errors import UsageError, exit_code
from samestep.recipe import run_settings
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.exclusions import find_refusal
from samestep.recipe.tasks.decoder import check_module_names
from stepplan import base_models, pretraining


def run(capsys, *words):
    cli.main(list(words))
    return capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("words", "title", "wrong"),
    [
        (
            "llama3_8b_sft_8xa100 --model_name_or_path meta-llama/Meta-Llama-3-70B",
            "Meta-Llama-3-70B on allenai/tulu-3-sft-mixture (llama3_8b_sft_8xa100)",
            "Llama 3.1 8B, all",
        ),
        ("gpt2_124m --train_file mine.txt", "gpt2_124m on mine.txt", "OpenWebText"),
        (
            "gpt_modern_730m_8xh100 --hidden_size 2048 --num_attention_heads 16 --num_train_tokens 30e9",
            "gpt_modern_730m_8xh100 of another shape",
            "757M",
        ),
        ("gpt_modern_730m_8xh100 --num_train_tokens 30e9", "gpt_modern_730m_8xh100", "6 billion tokens"),
    ],
)
def test_a_plan_is_named_after_what_it_plans(capsys, words, title, wrong):
    text = " ".join(run(capsys, "plan", *words.split(), "--on", "64xh100").split())
    assert text.startswith(f"{title} on 64xh100: ")
    assert f"Details {title}: " in text
    assert wrong not in text


def test_a_job_is_named_after_what_it_trains(capsys):
    words = "llama3_8b_sft_8xa100 --model_name_or_path meta-llama/Meta-Llama-3-70B --on slurm:8x8xh100"
    job = run(capsys, "launch", *words.split(), "--", "--output_dir", "/s")
    assert "--job-name=meta-llama-3-70b-on-" in job
    assert len(re.search("--job-name=(.*)", job)[1]) <= 50


# ------------------------------------------------------------------------------------- what is planned is what runs

MODELS = [
    *(
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-0.6B",
        "google/gemma-2-2b",
        "microsoft/Phi-3-mini-4k",
        "meta-llama/Llama-3.2-1B",
    ),
    *("mistralai/Mixtral-8x7B-v0.1", "deepseek-ai/DeepSeek-V3"),
]
HARDWARE = ["1xt4", "8xv100-16", "1x3090", "4xl4", "8xa100-80", "2x8xh100", "16x8xh100", "2xcpu", "1xm4-max"]
TARGETS = [
    "all-linear",
    "q_proj v_proj",
    "gate_proj up_proj down_proj",
    "qkv_proj",
    "q_proj o_proj lm_head",
    "self_attn.q_proj",
]
ADAPTERS = [
    *(f"--lora_rank 8 --lora_alpha 16 --lora_targets {names}" for names in TARGETS),
    *(
        "--base_quantization nf4",
        "--use_dora true",
        "--modules_to_save embed_tokens",
        "--modules_to_save lm_head norms",
    ),
]
FLAGS = [
    *("--accumulation optimizer --second_moment unbiased", "--optimizer adamw_8bit", "--optimizer muon", "--sharded"),
    *(
        "--mixed_precision fp16",
        "--gradient_checkpointing",
        "--global_batch_size 7",
        "--objective dpo",
        "--train_file a.txt",
    ),
    "--communication 'local_sgd of 8 workers every 4 steps'",
    *("--compiled", "--router_loss global --router_loss_weight 0.01", "--compiled --router_z_loss_weight 0.001"),
]


@functools.cache
def list_modules(name):
    """List the modules of a base model as transformers builds it: few layers, the first and the last of each kind."""
    config = base_models.find_base_model(name)
    dense = config.get("first_k_dense_replace", 0)
    layers = {"num_hidden_layers": dense + 2, "pad_token_id": None}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | layers))
    return [name for name, _ in model.named_modules()]


def ask_the_program(answer):
    """Raise UsageError where the program would: for its flags, its launch, its adapters."""
    words = shlex.split(answer["command"])
    script = next(number for number, word in enumerate(words) if word.endswith(".py"))
    task = load(answer["recipe"]).task
    recipe, run = run_settings.parse(words[script + 1 :], task, "", trains_here=False)
    launch = {"mixed_precision": answer["mixed_precision"], "is_sharded": answer["sharded"]}
    if refusal := find_refusal(recipe, run, **launch, num_processes=answer["num_processes"]):
        raise UsageError(str(refusal))
    model = getattr(recipe, "model_name_or_path", None)
    if task == "causal_lm_finetuning" and model in MODELS:
        check_module_names(recipe, list_modules(model), model)


def test_no_command_of_a_plan_is_refused_by_its_program(capsys):
    """Recipes, flags and hardware drawn at random; the program's own checks are asked."""
    draw, planned = random.Random(57), 0
    tunable = [name for name in catalog_names() if load(name).task == "causal_lm_finetuning" and not load(name).images]
    for _ in range(60):
        name = draw.choice([*tunable, draw.choice(catalog_names())])
        words = [name, "--on", draw.choice(HARDWARE)]
        if name in tunable:
            words += ["--model_name_or_path", draw.choice(MODELS), "--max_seq_length", "512"]
            words += " ".join(draw.sample(ADAPTERS, draw.choice([0, 1, 1, 2]))).split()
        words += shlex.split(" ".join(draw.sample(FLAGS, draw.choice([0, 1, 1]))))
        if exit_code(lambda words=words: cli.main(["plan", *words, "--json"])):
            assert "Traceback" not in capsys.readouterr().err
            continue
        answer = json.loads(capsys.readouterr().out)
        try:
            ask_the_program(answer)
        except UsageError as error:
            pytest.fail(f"plan {shlex.join(words)}: {error}")
        planned += 1

    assert planned > 12


@pytest.mark.parametrize("field", ["router_loss global --router_loss_weight 0.01", "router_z_loss_weight 0.001"])
def test_layers_are_planned_compiled_where_the_script_compiles_them(capsys, field):
    words = f"plan llama3_8b_sft_8xa100 --model_name_or_path Qwen/Qwen3-30B-A3B --on 32xh100 --{field}".split()
    run(capsys, *words)
    assert exit_code(lambda: cli.main([*words, "--compiled"])) == 2
    problem = capsys.readouterr().err
    assert "compiled is given: router_" in problem
    assert problem.count("\n") == 1


def test_experts_are_no_module_that_an_adapter_is_named_for(capsys):
    words = "plan llama3_8b_lora_3090 --model_name_or_path Qwen/Qwen3-30B-A3B --on 8xh100"
    assert exit_code(lambda: cli.main(words.split())) == 2
    problem = capsys.readouterr().err
    assert "lora_targets names gate_proj, but Qwen/Qwen3-30B-A3B has no such module: give all-linear" in problem
    assert exit_code(lambda: cli.main([*words.split(), "--lora_targets", "all-linear"])) == 0


# ------------------------------------------------------------------------------------------------------------ many nodes


@pytest.mark.parametrize("engine", ["slurm", "kubeflow --image x", "ray", "torchrun", "skypilot"])
def test_a_job_names_files_of_the_checkout_wherever_it_is_written(capsys, tmp_path, monkeypatch, engine):
    engine, *more = engine.split()
    monkeypatch.chdir(tmp_path)
    words = ["launch", "bert_base", "--on", f"{engine}:2x4xa100-80", *more, "--", "--output_dir", "/s/r"]
    job = run(capsys, *words)
    assert "scripts/pretrain_bert.py" in job
    assert not re.search(r"/\S*/scripts/pretrain_bert.py", job)


def test_the_network_is_named_beside_the_hardware_that_waits_for_it(capsys):
    text = " ".join(run(capsys, "plan", "bert_base", "--on", "4x3090,2x4x3090").split())
    share = int(
        re.search(r"2x4x3090: 1.25 GB/s between nodes, for which ([0-9]+)% of a step waits; --network", text)[1]
    )
    assert share > 50


@pytest.mark.parametrize(
    ("words", "is_said"), [("2x4x3090", True), ("2x4x3090 --network 200GB/s", False), ("1x4x3090", False)]
)
def test_a_job_on_two_machines_says_that_one_is_faster(capsys, words, is_said):
    cli.main(["launch", "bert_base", "--on", *f"slurm:{words}".split(), "--", "--output_dir", "/s/r"])
    job, problem = capsys.readouterr()
    assert ("# one machine is faster: 4x3090 takes" in job) == ("one machine is faster" in problem) == is_said


@pytest.mark.parametrize("samples", [None, 900_000])
def test_a_job_asks_for_its_hours_or_says_why_not(capsys, samples):
    more = [] if samples is None else ["--num_train_samples", str(samples)]
    job = run(capsys, "launch", "llama3_8b_sft_8xa100", *more, "--on", "slurm:8xh100", "--", "--output_dir", "/s/r")
    assert ("#SBATCH --time=" in job) == (samples is not None)
    assert ("no --time is asked for" in job) == (samples is None)


# ------------------------------------------------------------------------------------------------------------ from scratch

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048}
LLAMA |= {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 5632}
LLAMA |= {"max_position_embeddings": 4096, "tie_word_embeddings": True}


@pytest.fixture
def m15(tmp_path):
    """A folder with a configuration of 1.5 billion parameters, and no weights."""
    (tmp_path / "m15").mkdir()
    (tmp_path / "m15" / "config.json").write_text(json.dumps(LLAMA))
    return str(tmp_path / "m15")


def test_a_configuration_without_weights_is_not_fine_tuned_by_accident(capsys, m15):
    words = ["plan", m15, "--seq_len", "2048", "--num_train_tokens", "30e9", "--on", "8xh100"]
    assert exit_code(lambda: cli.main(words)) == 2
    problem = capsys.readouterr().err
    assert "m15 holds no weights: --from_scratch plans its pretraining, --from_scratch false" in problem
    assert "finetune_causal_lm.py" in run(capsys, *words, "--from_scratch", "false")


def test_a_model_from_scratch_is_pretrained(capsys, m15):
    answer = json.loads(
        run(capsys, "plan", m15, "--from_scratch", "--num_train_tokens", "30e9", "--on", "8xh100", "--json")
    )
    assert "scripts/pretrain_gpt2.py" in answer["command"]
    assert answer["num_tokens"] == pytest.approx(30e9, rel=1e-4)
    assert answer["title"] == "m15, from scratch"
    assert (answer["download_bytes"], answer["learning_rate"]) == (
        0,
        pytest.approx(1.5e-3 * 2 * (768 / 2048) ** 0.5, rel=0.01),
    )
    assert "--dataset_config_name sample-100BT" in answer["command"], "30e9 tokens are not those of sample-10BT"
    words = shlex.split(answer["command"])
    run_settings.parse(words[words.index("--recipe") :], "causal_lm_pretraining", "", trains_here=False)


@pytest.mark.parametrize("recipe", ["gpt_modern_1b_8xh100", "gpt_modern_3b_8xh100"])
def test_recipes_of_a_size_are_those_of_the_dial(recipe):
    known = load(recipe)
    shape = pretraining.shape_of_depth(known.num_hidden_layers) | {"max_position_embeddings": known.block_size}
    scaled = load(pretraining.BASE, pretraining.scale_recipe(shape, None, {}))
    assert scaled.decisive_fields() == known.decisive_fields()


def test_the_dial_scales_by_its_rules():
    """Twice the depth: eight times the layers' parameters and tokens, 8^0.383 = 2.2 times the batch, to a power of two."""
    small, large = (pretraining.scale_recipe(pretraining.shape_of_depth(depth), None, {}) for depth in (24, 48))
    assert large["global_batch_size"] == 2 * small["global_batch_size"]
    assert large["learning_rate"] == pytest.approx(small["learning_rate"], rel=0.01)  # sqrt(2) / sqrt(2)
    assert large["max_train_steps"] == pytest.approx(3.8 * small["max_train_steps"], rel=0.05)
    typed = pretraining.scale_recipe(pretraining.shape_of_depth(12), None, {"learning_rate": 1e-4})
    assert (typed["learning_rate"], typed["global_batch_size"]) == (1e-4, 256)
    assert [pretraining.find_depth(size) for size in ("1B", "3B", "124M")] == [26, 38, 12]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--from_scratch", "needs one of model_name_or_path, depth, parameters, has 0"),
        ("--from_scratch --depth 8 --parameters 1B", "has 2: give one"),
        ("--from_scratch --parameters 1X", "parameters is 1X, must be from"),
        ("Qwen/Qwen3-0.6B --from_scratch", "Its configuration says more than the fields of a recipe"),
    ],
)
def test_what_has_no_size_is_one_line(capsys, words, message):
    assert exit_code(lambda: cli.main(["plan", *words.split(), "--on", "1xh100"])) == 2
    assert message in capsys.readouterr().err


def test_a_command_for_tokens_can_be_typed_again(capsys):
    """Steps and tokens both would be refused."""
    words = "plan Qwen/Qwen3-0.6B --seq_len 2048 --num_train_tokens 1e9 --on 3xl4 --json"
    answer = json.loads(run(capsys, *words.split()))
    words = shlex.split(answer["write_command"])
    assert run(capsys, *words[words.index("plan") : -2])


def test_scale_takes_a_recipe_for_a_model_from_scratch(capsys, m15):
    words = ["scale", "--model_name_or_path", m15, "--seq_len", "512", "--from_scratch", "--on", "h100"]
    assert exit_code(lambda: cli.main(words)) == 2
    assert "plan m15 --from_scratch --write_recipe FILE.yaml writes a recipe to scale" in capsys.readouterr().err


def test_a_recipe_is_no_model_to_train_from_scratch(capsys):
    assert exit_code(lambda: cli.main("plan gpt2_124m --on 8xh100 --from_scratch".split())) == 2
    assert "gpt2_124m is a recipe" in capsys.readouterr().err
