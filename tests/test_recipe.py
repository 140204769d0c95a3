"""Strict recipes: the catalog's numbers, and every mistake named at once."""

import dataclasses
import re

import pytest
import rooms
import yaml
from common import ROOT, fresh_accelerator, metrics

from samestep import cli
from samestep.cut.layout import solve_layout
from samestep.errors import UsageError
from samestep.recipe import catalog as recipes
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import catalog_names, load
from samestep.recipe.settings import Parser
from samestep.recipe.tasks.bert_pretraining import BertPretraining
from samestep.recipe.tasks.gpt2_pretraining import Gpt2Pretraining


def parse(flags: str):
    return run.parse(flags.split(), "bert_pretraining", "")


def problems(call, *arguments, **keywords) -> list[str]:
    with pytest.raises(UsageError) as error:
        call(*arguments, **keywords)
    return error.value.problems


def test_a_recipe_of_the_catalog_claims_no_measurement_of_the_one_that_it_extends():
    inheriting = []
    for name in catalog_names():
        values = yaml.safe_load((recipes.CATALOG / f"{name}.yaml").read_text())
        if values["extends"] not in catalog_names():
            continue
        child, parent = load(name), load(values["extends"])
        inheriting += [field for field in ("source", "expect") if field not in values]
        if "source" not in values:
            assert child.source == f"extends {parent.name} ({parent.source})"
        if "expect" not in values and child.decisive_fields() != parent.decisive_fields():
            assert child.expect == "not measured with these values"
    assert {*inheriting} == {"source", "expect"}, "no recipe of the catalog shows the rule"


@pytest.mark.parametrize("name", catalog_names())
def test_every_catalog_recipe_loads_and_says_where_it_comes_from(name):
    recipe = load(name)
    assert recipe.name == name
    assert len(recipe.source) > 10
    assert len(recipe.expect) > 10
    assert "TODO" not in recipe.to_yaml()
    header = (recipes.CATALOG / f"{name}.yaml").read_text().split("task:")[0].split("extends:")[0]
    assert f"--recipe {name}" in header, "the lines above `extends` must hold the command that trains it"
    if recipe.task == "gpt2_pretraining":
        tokens = recipe.global_batch_size * recipe.block_size
        assert f"{tokens:,} tokens per step" in " ".join(header.replace("#", " ").split())


def test_a_recipe_of_the_catalog_says_what_is_particular():
    """At most 30 lines beside what a benchmark writes into `expect`; what most recipes of a task share is its base's."""
    written = re.compile(r"^expect:.*\n(?:  .*\n)*", re.MULTILINE)
    lengths = {path.name: written.sub("", path.read_text()).count("\n") for path in recipes.CATALOG.glob("*.yaml")}
    assert {name: length for name, length in lengths.items() if length > 30} == {}
    assert {path.stem for path in recipes.BASES.glob("*.yaml")} == {*recipes.TASKS, "common"}


def test_a_base_is_extended_and_is_no_recipe(tmp_path):
    assert "unknown recipe 'bert_pretraining'" in problems(load, "bert_pretraining")[0]
    file = tmp_path / "mine.yaml"
    file.write_text("extends: bert_pretraining\n")
    missing = {problem.split(": ")[1].split()[0] for problem in problems(load, str(file))}
    assert missing >= {"global_batch_size", "learning_rate", "hidden_size", "vocab_size"}


def test_a_newcomers_recipe_trains_by_its_path(scripts, corpus, tmp_path, monkeypatch):
    """The one of docs/your-own-data.md: a file of at most 30 lines in a folder of one's own, which extends a task's base."""
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "your-own-data.md").read_text(), re.DOTALL)[1]
    grows = "samestep.contrib" not in rooms.MISSING
    text += "lr_scaling_rule: none\n" + "batch_schedule: {kind: stages, sizes: [4, 8], boundaries: [0.5]}\n" * grows
    assert len(text.splitlines()) <= 30
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.yaml").write_text(text)
    (tmp_path / "notes.jsonl").write_bytes(corpus.read_bytes())
    fresh_accelerator()
    flags = "--output_dir run --speed safe --max_train_steps 3 --num_warmup_steps 1"
    scripts["pretrain_gpt2"].main(["--recipe", "mine/notes.yaml", *flags.split()])
    assert [line["samples"] for line in metrics(tmp_path / "run")] == ([4, 4, 8] if grows else [8, 8, 8])
    kept, whole = load("run/recipe.yaml"), load("mine/notes.yaml")
    assert kept.batch_schedule == whole.batch_schedule
    assert (kept.n_layer, kept.tokenizer, whole.source) == (
        2,
        "byte_level_bpe",
        "our own; the smallest numbers that train",
    )


def test_a_warm_up_longer_than_the_training_is_said_with_the_flags():
    """Before torch is imported; where samples have to be counted first, later."""
    with pytest.raises(
        UsageError, match=r"the warm-up takes 160 steps, but the training has 6: .*tried by --stop_after_step"
    ):
        run.parse(["--recipe", "gpt2_small_cpu", "--max_train_steps", "6"], "gpt2_pretraining", "")
    run.parse(["--recipe", "gpt2_small_cpu", "--stop_after_step", "6"], "gpt2_pretraining", "")
    recipe, _ = run.parse(["--recipe", "captcha_cpu", "--max_train_steps", "6"], "captcha_recognition", "")
    assert recipe.counts_warmup_in_epochs


def test_one_command_shows_every_field_of_a_recipe(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: gpt2_124m\nsource: ours\nexpect: nothing yet\nn_layer: 3\n")
    for name in ("bert_small_cpu", str(file)):
        cli.main(["show", name])
        shown, recipe = yaml.safe_load(capsys.readouterr().out), load(name)
        assert shown == yaml.safe_load(recipe.to_yaml())
        assert [*shown] == [field.name for field in dataclasses.fields(recipe)]
    for words in ([], ["bert_base", "bert_small_cpu"]):
        assert "needs one recipe" in problems(lambda words=words: cli.main(["show", *words]))[0]


def test_the_resolved_yaml_is_the_same_recipe(tmp_path):
    for name in catalog_names():
        (tmp_path / "copy.yaml").write_text(load(name).to_yaml())
        assert load(str(tmp_path / "copy.yaml")) == load(name)


def test_a_recipe_with_other_values_says_so_and_describes_its_data(tmp_path):
    file, base = tmp_path / "mine.yaml", load("bert_small_cpu")
    file.write_text(f"extends: bert_small_cpu\ntrain_file: [a.txt]\nlearning_rate: {base.learning_rate}\nseed: 7\n")
    recipe = load(str(file))
    assert (recipe.description, recipe.source) == (
        "BERT pretraining on a.txt.",
        "bert_small_cpu, but for train_file, seed",
    )
    assert recipe.expect != base.expect
    file.write_text("extends: bert_small_cpu\nseed: 7\nexpect: a loss of 5\n")
    recipe = load(str(file))
    assert (recipe.description, recipe.expect) == (base.description, "a loss of 5")
    assert (
        load("bert_small_cpu", {"max_train_steps": base.max_train_steps, "learning_rate": str(base.learning_rate)})
        == base
    )
    many = [f"/x/{number}.txt" for number in range(9)]
    assert load("bert_small_cpu", {"train_file": many}).data_name == "0.txt, 1.txt, 2.txt, 6 more files"


def test_published_bert_numbers():
    base = load("bert_base")
    assert (base.global_batch_size, base.learning_rate, base.max_train_steps, base.num_warmup_steps) == (
        256,
        1e-4,
        10**6,
        10**4,
    )
    assert (base.adam_beta1, base.adam_beta2, base.weight_decay, base.hidden_dropout_prob) == (0.9, 0.999, 0.01, 0.1)
    phase1, phase2 = load("bert_large_phase1"), load("bert_large_phase2")
    assert (phase1.max_seq_length, phase2.max_seq_length) == (128, 512)
    assert phase1.max_train_steps + phase2.max_train_steps == phase1.lr_num_steps == 10**6
    first, second = (r.schedule(r.max_train_steps, 1e4) for r in (phase1, phase2))
    assert second(0) == first(900_000) == pytest.approx(1e-4 * 100_000 / 990_000)
    assert second(99_999) == pytest.approx(1e-4 / 990_000)
    assert (load("bert_large_3090").global_batch_size, load("bert_large_2080ti").global_batch_size) == (32, 128)
    assert load("bert_large_3090").scaled_hyperparameters().learning_rate == pytest.approx(1e-4 / 8**0.5)
    assert load("bert_large_3090").scaled_hyperparameters().adam_beta1 == pytest.approx(1 - 0.1 / 8)


def test_published_gpt2_numbers():
    small, xl = load("gpt2_124m"), load("gpt2_xl_8xa100")
    assert (small.global_batch_size * small.block_size, small.learning_rate, small.num_warmup_steps) == (
        491_520,
        6e-4,
        2000,
    )
    assert (small.adam_beta1, small.adam_beta2, small.weight_decay, small.min_lr_ratio) == (0.9, 0.95, 0.1, 0.1)
    schedule = small.schedule(small.max_train_steps, 1e4)
    assert (schedule(1999), schedule(599_999)) == (6e-4, pytest.approx(6e-5, rel=1e-4))
    layout = solve_layout(num_processes=8, global_batch_size=xl.global_batch_size, per_device_train_batch_size=4)
    assert (xl.block_size, layout.gradient_accumulation_steps) == (1024, 16)
    assert xl.scaled_hyperparameters().learning_rate == pytest.approx(6e-4 / 2**0.5)
    assert xl.scaled_hyperparameters().adam_beta1 == pytest.approx(1 - 0.1 / 2)
    char = load("gpt2_shakespeare_char_cpu")
    assert (char.global_batch_size, char.block_size, char.max_train_steps, char.num_warmup_steps) == (12, 64, 2000, 100)
    assert (char.learning_rate, char.adam_beta2, char.n_layer, char.n_head, char.n_embd) == (1e-3, 0.99, 4, 4, 128)
    assert (char.validation_split, char.validation_fraction, char.resid_pdrop) == ("tail", 0.1, 0)
    gpu = load("gpt2_shakespeare_char")
    assert (gpu.global_batch_size, gpu.block_size, gpu.max_train_steps, gpu.resid_pdrop) == (64, 256, 5000, 0.2)


def test_a_warm_up_fits_data_of_any_size():
    """Of recipes whose length follows the data that people bring: texts and chats. On their own it is that of their source."""
    for name in catalog_names():
        recipe = load(name)
        if recipe.num_train_epochs is not None and hasattr(recipe, "train_file"):
            for num_steps in (1, 3, 18, 99):
                assert recipe.schedule(num_steps, num_steps / recipe.num_train_epochs).num_warmup_steps < num_steps, (
                    name
                )
    for name, num_steps in (("llama3_8b_lora_3090", 3074), ("llama3_8b_qlora_2080ti", 1537)):
        assert load(name).schedule(num_steps, num_steps).num_warmup_steps == 100


def test_every_recipe_of_chats_trains_all_answers():
    """A preference's answers are the chosen and the rejected one."""
    recipes = [recipe for name in catalog_names() if (recipe := load(name)).task == "causal_lm_finetuning"]
    assert {(recipe.objective, recipe.train_on) for recipe in recipes} == {("sft", "assistant"), ("dpo", "completions")}


@pytest.mark.parametrize("name", catalog_names())
@pytest.mark.parametrize("num_steps", [1, 6])
def test_a_short_run_fits_its_warm_up_or_is_told_how(name, num_steps):
    """Each remedy that the message gives works as it is typed."""

    def schedule(*flags: str):
        parser = Parser("a script")
        parser.add_settings(type(load(name)))
        changes = parser.parse(["--max_train_steps", str(num_steps), *flags])
        return load(name, changes).schedule(num_steps, 100.0)

    message = ""
    try:
        schedule()
    except UsageError as error:
        message = str(error)
    remedies = re.findall(r"--\w+ [\w.]+", message)
    assert len(remedies) == 2 * bool(message), message
    for remedy in remedies:
        schedule(*remedy.split())


def test_a_warm_up_that_its_rule_asks_for_is_given_another_rule():
    flags = {"lr_scaling_rule": "conservative", "global_batch_size": 24, "max_train_steps": 6}
    with pytest.raises(
        UsageError, match="conservative asks for it: give --lr_scaling_rule none --num_warmup_steps 1, or"
    ):
        load("gpt2_shakespeare_char_cpu", flags).schedule(6, 100.0)
    with_remedy = load("gpt2_shakespeare_char_cpu", flags | {"lr_scaling_rule": "none", "num_warmup_steps": 1})
    assert with_remedy.schedule(6, 100.0).num_warmup_steps == 1


def test_bert_large_has_the_published_size():
    """336,226,108 parameters, without allocating them."""
    import torch
    from transformers import BertConfig, BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(**load("bert_large_phase1").architecture))
    assert sum(p.numel() for p in model.parameters()) == 336_226_108


def test_every_field_is_documented_and_has_a_flag():
    for field in {*dataclasses.fields(BertPretraining), *dataclasses.fields(Gpt2Pretraining)}:
        assert len(field.metadata["help"]) > 4
        assert field.default is dataclasses.MISSING, "a recipe writes everything out"
    recipe, settings = parse(
        "--recipe bert_small_cpu --learning_rate 1e-4 --train_file a.txt b.txt --do_lower_case false --max_grad_norm none"
    )
    assert (recipe.learning_rate, recipe.train_file, recipe.dataset_name) == (1e-4, ("a.txt", "b.txt"), None)
    assert (recipe.do_lower_case, recipe.max_grad_norm) == (False, None)
    assert settings.output_dir == "runs/bert_small_cpu"


def test_a_flag_replaces_its_alternatives():
    recipe, _ = parse("--recipe bert_small_cpu --num_train_epochs 2 --num_warmup_steps 5")
    assert (recipe.max_train_steps, recipe.num_train_epochs) == (None, 2.0)
    assert (recipe.num_warmup_steps, recipe.warmup_ratio) == (5, None)


def test_all_mistakes_of_a_file_are_reported_at_once(tmp_path):
    values = yaml.safe_load(load("bert_small_cpu").to_yaml())
    values |= {"learning_rte": 1, "seed": "x", "global_batch_size": 0, "hidden_act": 3, "adam_beta1": 1.0}
    del values["weight_decay"], values["learning_rate"]
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    text = "\n".join(problems(load, str(tmp_path / "bad.yaml")))
    for part in (
        "unknown key 'learning_rte': did you mean learning_rate",
        "seed is 'x', must be a whole number",
        "global_batch_size is 0, must be from 1 to 16,777,216 (samples per optimizer step",
        "hidden_act is 3, must be text",
        "adam_beta1 is 1.0, must lie in [0, 1)",
        "weight_decay is missing (decoupled weight decay",
        "learning_rate is missing",
    ):
        assert part in text
    assert len(text.splitlines()) == 7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--recipe bert_smal_cpu", "unknown recipe 'bert_smal_cpu': did you mean bert_small_cpu"),
        ("--recipe nowhere.yaml", "recipe nowhere.yaml cannot be read: No such file"),
        ("", "--recipe is missing"),
        ("--recipe bert_small_cpu --lerning_rate 1", "unknown flag --lerning_rate: did you mean --learning_rate"),
        ("--recipe bert_small_cpu --learning_rate -1", "learning_rate is -1.0, must be greater than 0"),
        ("--recipe bert_small_cpu --learning_rate nan", "learning_rate is nan, must be greater than 0"),
        (
            "--recipe bert_small_cpu --learning_rate inf",
            "learning_rate is inf, must not be larger than 1,000,000,000,000",
        ),
        ("--recipe bert_small_cpu --global_batch_size 0", "global_batch_size is 0, must be from 1 to 16,777,216"),
        ("--recipe bert_small_cpu --global_batch_size 8.5", "global_batch_size is '8.5', must be a whole number"),
        (
            "--recipe bert_small_cpu --max_train_steps 9" + "9" * 30,
            "is 9999999999999999999999999999999, must not be larger",
        ),
        ("--recipe bert_small_cpu --seed 4294967296", "seed is 4294967296, must be from 0 to 4,294,967,295"),
        ("--recipe bert_small_cpu --seed", "expected one argument"),
        ("--recipe bert_small_cpu stray", "unexpected argument 'stray'"),
        (
            "--recipe bert_small_cpu --num_attention_heads 3",
            "hidden_size 256 is not a multiple of num_attention_heads 3",
        ),
        ("--recipe bert_small_cpu --max_seq_length 999", "max_seq_length 999 exceeds max_position_embeddings"),
        ("--recipe bert_small_cpu --report_to nowhere", "report_to is 'nowhere', must be one of none, tensorboard"),
        ("--recipe bert_small_cpu --lr_scheduler_type cosin", "lr_scheduler_type is 'cosin', must be one of"),
        (
            "--recipe bert_small_cpu --lr_scaling_rule sqrt --learning_rate_batch_size 4 --global_batch_size 64",
            "adam_beta1",
        ),
        ("--recipe bert_small_cpu --max_train_steps none", "max_train_steps, num_train_epochs exactly one must be set"),
        ("--recipe bert_small_cpu --overwrite_output_dir --resume_from_checkpoint latest", "exclude each other"),
    ],
)
def test_a_mistake_is_one_clear_line(flags, message):
    def everything():
        recipe, _ = parse(flags)
        recipe.scaled_hyperparameters()

    (text,) = problems(everything)
    assert message in text
    assert "\n" not in text


def test_files_that_are_no_recipes(tmp_path):
    bad = tmp_path / "bad.yaml"
    for text, message in [
        ("a: [", "not valid YAML"),
        ("- a", "must hold `field: value` lines"),
        ("", "must hold `field: value` lines"),
        ("task: nothing", "task is 'nothing', must be one of bert_pretraining"),
        (f"extends: {bad}", "extends itself"),
        ("extends: bert_bas", "bad.yaml: extends: unknown recipe 'bert_bas': did you mean bert_base"),
        ("extends: gpt2_pretrainin", "A base is one of bert_pretraining, captcha_recognition"),
    ]:
        bad.write_text(text)
        assert message in problems(load, str(bad))[0]


def test_a_file_that_extends_another(tmp_path):
    (tmp_path / "mine.yaml").write_text("extends: bert_small_cpu\nglobal_batch_size: 128\nnum_train_epochs: 3\n")
    (tmp_path / "deeper.yaml").write_text("extends: mine.yaml\nseed: 1\n")
    deeper = load(str(tmp_path / "deeper.yaml"))
    assert (deeper.name, deeper.global_batch_size, deeper.seed) == ("deeper", 128, 1)
    assert (deeper.max_train_steps, deeper.num_train_epochs) == (None, 3.0)
    assert deeper.hidden_size == load("bert_small_cpu").hidden_size


@pytest.mark.parametrize("name", catalog_names())
def test_own_data_takes_the_place_of_the_recipes(name):
    """Nothing that names a part of the recipe's own data stays; what decides the steps does."""
    recipe = load(name)
    if recipe.task == "captcha_recognition":
        return  # draws its own images
    field, value = ("train_dir", "images") if hasattr(recipe, "train_dir") else ("train_file", ("a.txt", "b.txt"))
    mine = load(name, {field: value})
    names = ("dataset_name", "dataset_config_name", "validation_split_name", "validation_file", "validation_dir")
    assert {getattr(mine, name, None) for name in names} == {None}
    assert (getattr(mine, field), mine.fingerprint) == (value, recipe.fingerprint)
    if hasattr(recipe, "txt_documents"):
        assert mine.txt_documents == ("auto" if recipe.train_file is None else recipe.txt_documents)
    hub = load(name, {"dataset_name": "someone/else", "dataset_config_name": "part"})
    name = ("someone/else",) if hasattr(hub, "mixture_weights") else "someone/else"
    assert (hub.dataset_name, hub.dataset_config_name, getattr(hub, field)) == (name, "part", None)


def test_data_that_is_named_again_keeps_its_parts(tmp_path):
    glue = load("finetune_glue_bert_base", {"dataset_name": "nyu-mll/glue"})
    assert (glue.dataset_config_name, glue.validation_split_name) == ("sst2", "validation")
    assert load("bert_base", {"dataset_name": "someone/else"}).dataset_config_name is None
    (tmp_path / "mine.yaml").write_text("extends: bert_base\ntrain_file: a.txt\nvalidation_file: [b.txt, c.txt]\n")
    mine = load(str(tmp_path / "mine.yaml"))
    assert (mine.train_file, mine.validation_file) == (("a.txt",), ("b.txt", "c.txt"))
    assert load(str(tmp_path / "mine.yaml"), {"train_file": ["d.txt"]}).validation_file == mine.validation_file
    assert parse(f"--recipe {tmp_path / 'mine.yaml'} --validation_file none")[0].validation_file is None


def test_the_fingerprint_holds_what_decides_the_steps():
    small = load("bert_small_cpu")
    for changes in ({"seed": 1}, {"learning_rate": 2e-3}, {"max_seq_length": 40}, {"max_train_steps": 7}):
        assert load("bert_small_cpu", changes).fingerprint != small.fingerprint
    for changes in ({"expect": "else"}, {"train_file": ["elsewhere.txt"]}):
        assert load("bert_small_cpu", changes).fingerprint == small.fingerprint


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet_digits_cpu", {"exact_batch_norm": True}, "exact_batch_norm is true, but normalization is group"),
        ("resnet_digits_cpu", {"normalization": "frozen"}, "normalization is frozen, but model_name_or_path"),
        ("captcha_cpu", {"normalization": "frozen"}, "no trained statistics exist for captchas"),
        ("captcha_cpu", {"normalization": "layer"}, "normalization is 'layer', must be one of batch, group, frozen"),
        ("resnet_digits_cpu", {"adam_beta1": 0.9}, "adam_beta1 is 0.9, but with optimizer sgd it must be null"),
    ],
)
def test_mistakes_in_recipes_of_images(name, changes, message):
    (text,) = problems(lambda: load(name, changes))
    assert message in text


def test_a_recipe_of_what_another_one_leaves_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = load("dpo_small_cpu")
    message = r"runs/sft_small_cpu is not here: it is what the recipe sft_small_cpu leaves. .*_lm.py --recipe sft"
    with pytest.raises(UsageError, match=message):
        run.check_files(recipe)
    (tmp_path / "runs" / "sft_small_cpu").mkdir(parents=True)
    run.check_files(recipe)
    run.check_files(load("sft_small_cpu"))


def test_weights_to_start_from_clear_the_shape_of_images():
    changes = {"model_name_or_path": "runs/mine", "images": True, "max_train_steps": 3}
    recipe = load("vlm_small_cpu", changes)
    assert (recipe.image_size, recipe.image_patch_size, recipe.num_image_layers) == (None, None, None)
