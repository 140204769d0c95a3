"""`batch_schedule` and `communication`: mappings in files, sentences on command lines, and in files of earlier versions."""

import hashlib
import json
import warnings

import pytest
import yaml

from samestep.errors import UsageError
from samestep.recipe import run_settings
from samestep.recipe.catalog import load
from samestep.recipe.recipe import VARIANTS
from samestep.training import checkpoint
from stepplan.cli.plan import write_recipe

# Field, sentence, mapping
PAIRS = [
    ("communication", "local_sgd of 4 workers every 8 steps", {"kind": "local_sgd", "num_workers": 4, "num_steps": 8}),
    ("communication", "diloco of 4 workers every 50 steps", {"kind": "diloco", "num_workers": 4, "num_steps": 50}),
    (
        "communication",
        "diloco of 4 workers every 50 steps, outer rate 0.4, outer momentum 0",
        {"kind": "diloco", "num_workers": 4, "num_steps": 50, "outer_learning_rate": 0.4, "outer_momentum": 0},
    ),
    ("communication", "power_sgd of rank 4 from step 100", {"kind": "power_sgd", "rank": 4, "first_step": 100}),
    ("communication", "top_k 0.00001 of 4 workers", {"kind": "top_k", "share": 1e-5, "num_workers": 4}),
    (
        "batch_schedule",
        "4, 8 at 0.25, 16 at 0.5",
        {"kind": "stages", "sizes": [4, 8, 16], "boundaries": [0.25, 0.5], "unit": None},
    ),
    (
        "batch_schedule",
        "4, 16 at 8000 samples, rate by sqrt",
        {"kind": "stages", "sizes": [4, 16], "boundaries": [8000], "unit": "samples", "rate": "sqrt"},
    ),
    (
        "batch_schedule",
        "power 0.5 from 4, rate by linear",
        {"kind": "power", "first_size": 4, "power": 0.5, "rate": "linear"},
    ),
    ("batch_schedule", "seesaw from 4", {"kind": "seesaw", "first_size": 4}),
]


def small(field: str, value):
    changes = {field: value} | ({"lr_scaling_rule": "none"} if field == "batch_schedule" else {})
    return load("gpt2_small_cpu", changes)


@pytest.mark.parametrize(("field", "sentence", "mapping"), PAIRS, ids=[sentence for _, sentence, _ in PAIRS])
def test_a_mapping_is_its_sentence(field, sentence, mapping, tmp_path):
    """Equal recipes, of the fingerprint that the sentence always had; what is written is a mapping that is read back."""
    recipe = small(field, mapping)
    assert recipe == small(field, sentence)
    rule = {} if field == "communication" else {"lr_scaling_rule": "none"}
    fields = load("gpt2_small_cpu").decisive_fields() | rule | {field: sentence}
    assert recipe.fingerprint == hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]
    assert VARIANTS[field].read(str(getattr(recipe, field))) == getattr(recipe, field)
    written = yaml.safe_load(recipe.to_yaml())[field]
    assert {name: value for name, value in mapping.items() if value is not None}.items() <= written.items()
    file = tmp_path / f"{recipe.name}.yaml"
    file.write_text(recipe.to_yaml())
    with warnings.catch_warnings(action="error", category=FutureWarning):
        assert load(str(file)) == recipe


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("communication", {"kind": "dilico"}, "kind is 'dilico', must be one of local_sgd, diloco"),
        ("communication", {"num_workers": 4}, "kind is missing, must be one of"),
        ("communication", {"kind": "diloco", "num_workers": 4}, "but diloco needs num_steps: correct it"),
        ("communication", {"kind": "top_k", "share": 0.1, "num_workers": 4, "rank": 2}, "top_k has no 'rank'"),
        (
            "communication",
            {"kind": "power_sgd", "rank": "two", "first_step": 2},
            "rank is 'two', must be a whole number",
        ),
        (
            "communication",
            {"kind": "diloco", "num_workers": "4", "num_steps": 5},
            "is '4', must be a whole number: correct it",
        ),
        ("communication", {"kind": "top_k", "share": 0.1, "num_worker": 4}, "did you mean num_workers? Correct it"),
        ("batch_schedule", {"kind": "power", "first_size": 4, "power": 1, "rate": 2}, "is 2, must be text or null: "),
        ("communication", 5, "communication is 5, must be a mapping {kind: local_sgd | diloco"),
        ("batch_schedule", {"kind": "seesaw", "first_size": 0}, "first_size is 0, must be from 1"),
        ("batch_schedule", {"kind": "stages", "sizes": [4, 16], "boundaries": [0.2, 0.5]}, "2 sizes have 1 boundaries"),
        ("batch_schedule", {"kind": "stages", "sizes": [16], "boundaries": []}, "2 to 64 numbers"),
        ("batch_schedule", ["seesaw"], "must be a mapping {kind: stages |"),
    ],
)
def test_a_mapping_that_breaks_a_rule_is_refused_in_a_line(field, value, words):
    with pytest.raises(UsageError) as error:
        small(field, value)
    (problem,) = error.value.problems
    assert problem.startswith(f"recipe gpt2_small_cpu: {field} is ")
    assert words in problem


def test_a_sentence_in_a_file_is_read_for_one_version(tmp_path):
    """With a warning that has the mapping; a flag is a sentence, and warns of nothing."""
    file = tmp_path / "old.yaml"
    file.write_text("extends: gpt2_small_cpu\ncommunication: diloco of 4 workers every 50 steps\n")
    with pytest.warns(
        FutureWarning, match="communication as a sentence is read until 0.2: write {kind: diloco, "
    ) as said:
        old = load(str(file))
    assert (said[0].filename, said[0].lineno) == (str(file), 2), "whose line is shown"
    mapping = str(said[0].message).split("write ")[1]
    file.write_text(f"extends: gpt2_small_cpu\ncommunication: {mapping}\n")
    flags = ["--recipe", "gpt2_small_cpu", "--communication", "diloco of 4 workers every 50 steps"]
    with warnings.catch_warnings(action="error", category=FutureWarning):
        assert load(str(file)) == old
        recipe, _ = run_settings.parse(flags, "gpt2_pretraining", "")
    assert recipe.communication == old.communication


def test_help_shows_the_sentence(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(
        "extends: gpt2_small_cpu\ncommunication: {kind: top_k, share: 0.1, num_workers: 4}\n"
    )
    with pytest.raises(SystemExit):
        run_settings.parse(["--recipe", str(tmp_path / "mine.yaml"), "--help"], "gpt2_pretraining", "")
    assert "(recipe: top_k 0.1 of 4 workers)" in " ".join(capsys.readouterr().out.split())


def test_a_written_recipe_has_mappings(tmp_path):
    file = tmp_path / "mine.yaml"
    write_recipe(str(file), "gpt2_small_cpu", {"batch_schedule": "seesaw from 4", "lr_scaling_rule": "none", "seed": 7})
    assert yaml.safe_load(file.read_text())["batch_schedule"] == {"kind": "seesaw", "first_size": 4}
    assert load(str(file)).batch_schedule == VARIANTS["batch_schedule"].read("seesaw from 4")


def test_a_checkpoint_of_an_earlier_version_is_of_the_same_recipe(tmp_path):
    """Its recipe.yaml has a sentence, maybe in words that make another fingerprint."""
    recipe = small("communication", {"kind": "diloco", "num_workers": 4, "num_steps": 50})
    state = checkpoint.State(step=2, recipe_fingerprint="of other words")
    for words, is_same in (
        ("diloco of 4 workers every 50 steps", True),
        ("diloco of 4 workers every 50 steps, outer rate .7, outer momentum 0.90", True),
        ("diloco of 4 workers every 60 steps", False),
    ):
        values = yaml.safe_load(recipe.to_yaml()) | {"communication": words}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        if is_same:
            assert checkpoint._check_recipe(tmp_path, state, recipe) == (tmp_path, state)
            assert checkpoint.read_earlier_recipe(tmp_path, state, recipe) is None
        else:
            with pytest.raises(UsageError, match="communication diloco of 4 workers every 60 steps there, diloco of 4"):
                checkpoint._check_recipe(tmp_path, state, recipe)
    growing = small("batch_schedule", {"kind": "seesaw", "first_size": 4})
    values = yaml.safe_load(growing.to_yaml()) | {"batch_schedule": "seesaw from 8"}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    earlier = checkpoint.read_earlier_recipe(tmp_path, state, growing)
    assert (earlier.batch_schedule.first_size, earlier.communication) == (8, None)
