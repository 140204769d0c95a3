"""What excludes what is rows of one list: a new one is enough to refuse a launch, here, in the planner and in the documents."""

import ast
import dataclasses
import string
from pathlib import Path

import pytest
from common import ROOT, fresh_accelerator, load_docs_program

from samestep.errors import UsageError
from samestep.recipe.catalog import TASKS, load
from samestep.recipe.exclusions import RULES, find_problems, find_refusal
from samestep.recipe.rules import Facts, Rule, is_at_most
from samestep.recipe.run_settings import RunSettings
from samestep.training import launch
from stepplan.workload import from_recipe

CLASSES = {base for cls in TASKS.values() for base in (*cls.__mro__, *cls.parts.find("settings").__mro__)}
LAUNCH = {"mixed_precision", "is_sharded", "num_processes", "num_copies"}


@pytest.fixture
def row():
    """A new rule, which no example of the documents breaks otherwise."""
    rule = Rule(
        lambda f: f.optimizer_name == "adamw" and f.mixed_precision == "bf16",
        "optimizer is {f.optimizer_name}, but mixed_precision is {f.mixed_precision!r}",
        "set it to no",
    )
    RULES.append(rule)
    yield rule
    RULES.remove(rule)


MESSAGE = "optimizer is adamw, but mixed_precision is 'bf16': set it to no"


def test_a_new_rule_is_one_row(row):
    recipe = load("gpt2_small_cpu")
    settings = recipe.parts.find("settings")(recipe="")
    fresh_accelerator()
    with pytest.raises(UsageError) as error:
        launch.create_accelerator("bf16", recipe=recipe, settings=settings)
    assert error.value.problems == [MESSAGE]
    assert str(from_recipe(recipe).find_refusal("bf16", False)) == MESSAGE
    assert from_recipe(recipe).find_refusal("no", False) is None
    support = load_docs_program("support")
    assert support.describe_launch(recipe, settings, True, "bf16", False) == ("refused", MESSAGE.partition(":")[0])
    assert support.describe_launch(recipe, settings, True, "no", False) == ("exact, bits", None)
    assert "\n| optimizer is ..., but mixed_precision is ... | set it to no |\n" in f"{support.rules()}\n"


def test_a_rule_is_tested_once_as_soon_as_all_is_known():
    recipe, settings = load("gpt2_small_cpu"), RunSettings(recipe="", digest_steps=5, min_replicas=2)
    rules = {
        "recipe": Rule(lambda f: f.global_batch_size, "recipe"),
        "settings": Rule(lambda f: f.min_replicas > 1, "settings"),
        "both": Rule(lambda f: f.digest_steps and f.global_batch_size, "both"),
        "launch": Rule(lambda f: f.global_batch_size and f.num_processes > 1, "launch"),
        "other task": Rule(lambda f: f.image_height, "other task"),
    }

    def find(*known, **launch):
        return [refusal.reason for refusal in Facts(*known, **launch).find_refusals(rules.values())]

    assert (find(recipe), find(None, settings)) == (["recipe"], ["settings"])
    assert find(recipe, settings) == ["both"]
    assert find(recipe, settings, num_processes=2) == ["launch"]
    assert find(recipe, settings, num_processes=1) == find(None, None, num_processes=2) == []


def test_messages_have_values_as_files_have_them():
    source = type("Source", (), {"sizes": (1, 2), "name": "a" * 99, "number": 2.50})()
    rule = Rule(lambda f: f.sizes[1], "{f.sizes} {f[number]:g} {f.name!r} {found}")
    (refusal,) = Facts(source).find_refusals([rule])
    assert str(refusal) == f"[1, 2] 2.5 '{'a' * 56}... 2"
    (refusal,) = Facts(type("Source", (), {"a": 2, "b": 1})()).find_refusals([is_at_most("a", "b")])
    assert str(refusal) == "a 2 exceeds b 1: lower the first or raise the second"


def test_all_that_is_wrong_is_said_at_once():
    recipe = dataclasses.replace(load("gpt2_small_cpu"), accumulation="optimizer", second_moment="unbiased")
    settings = recipe.parts.find("settings")(recipe="", on_nonfinite="skip", noise_scale_steps=5, reduce_dtype="bf16")
    starts = sorted(problem.split(" is ")[0] for problem in find_problems(recipe, settings))
    assert starts == ["noise_scale_steps", "on_nonfinite", "reduce_dtype"]
    assert "noise_scale_steps is 5, but" in find_refusal(recipe, settings, is_sharded=True).reason, "the first one"
    copies = recipe.parts.find("settings")(recipe="", replicate_checkpoints=True)
    assert "no machine has a whole checkpoint" in find_refusal(None, copies, is_sharded=True).reason


def list_rules():
    return [*RULES, *(rule for cls in CLASSES for rule in vars(cls).get("rules", ()))]


def test_rows_ask_for_facts_that_exist():
    """A name that nothing has would be a fact that is never known, and the row would hold for nothing."""
    known = LAUNCH | {name for cls in (Facts, *CLASSES) for name in dir(cls)}
    known |= {name for cls in CLASSES for name in getattr(cls, "__dataclass_fields__", ())}
    folder = ROOT / "samestep" / "recipe"
    files = [folder / "rules.py", *(folder / "tasks").glob("*.py"), *(ROOT / "samestep").rglob("exclusions.py")]
    asked = {
        node.attr
        for file in files
        for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "f"
    }
    for rule in list_rules():
        fields = [part[1] for text in (rule.reason, rule.remedy) for part in string.Formatter().parse(text) if part[1]]
        asked |= {field.replace("f[", "f.").rstrip("]").split(".")[1] for field in fields if field != "found"}
    assert len(asked) > 80
    assert asked - known == set()
