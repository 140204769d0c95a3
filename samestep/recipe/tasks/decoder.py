"""The fields and rules that recipes of models of transformers share, whatever their architecture is called."""

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from samestep.errors import UsageError, nearest
from samestep.recipe.reading import format_value
from samestep.recipe.recipe import Recipe
from samestep.recipe.rules import Rule, each, is_at_most, is_multiple, rows
from samestep.recipe.settings import NOT_NEGATIVE, POSITIVE, choice, setting

SHAPE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "initializer_range",
)
"""Fields that weights to start from decide."""

WITHOUT_ADAPTERS = {
    "base_quantization": None,
    "lora_alpha": None,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
}
"""Field of adapters -> its value where all weights are trained."""


ALL_LINEAR = "all-linear"


def check_module_names(recipe: Any, names: Collection[str], model: str) -> None:
    """Check that the names of adapted and of saved modules are those of modules: for programs, and for plans of them.

    Args:
        recipe: has lora_rank, lora_targets and modules_to_save.
        names: of all modules of the model.
        model: its name, for the message.

    Raises:
        UsageError: a name that no module has: peft trains nothing for it where another name is found.
    """
    for field in ("lora_targets", "modules_to_save") if recipe.lora_rank is not None else ():
        for wanted in getattr(recipe, field) or ():
            if wanted != ALL_LINEAR and not any(f".{name}".endswith(f".{wanted}") for name in names):
                hint = nearest(wanted, {name.rpartition(".")[2] for name in names})
                remedy = f"give {ALL_LINEAR}, or names of linear layers; " * (field == "lora_targets")
                raise UsageError(f"{field} names {wanted}, but {model} has no such module: {remedy}{hint}")


def list_decoder_rules(length: str) -> list[Rule]:
    """List the rules for the shape of a decoder; `length` names the field of the longest sample."""
    return [
        is_multiple("hidden_size", "num_attention_heads"),
        is_multiple("num_attention_heads", "num_key_value_heads"),
        is_at_most(length, "max_position_embeddings"),
    ]


def list_shape_rules(shape: Sequence[str], may_be_null: Collection[str]) -> list[Rule]:
    """List the rules by which a recipe gives a shape, or weights to start from, which decide it."""
    return [
        *each(
            ("architecture", *shape, "vocab_size"),
            lambda name: Rule(
                lambda f: f[name] is not None and f.model_name_or_path is not None,
                f"{name} is {{f[{name}]}}, but model_name_or_path is set, whose weights decide it",
                f"set {name} to null",
            ),
        ),
        *each(
            ("architecture", *(name for name in shape if name not in may_be_null)),
            lambda name: Rule(
                lambda f: f[name] is None and f.model_name_or_path is None,
                f"{name} is null, but model_name_or_path is not set",
                "set one of them",
            ),
        ),
        Rule(
            lambda f: f.vocab_size is None and f.tokenizer_name is None and f.model_name_or_path is None,
            "vocab_size is null, but neither tokenizer_name nor model_name_or_path is set",
            "set one of them",
        ),
    ]


def list_adapter_rules(names: Iterable[str]) -> list[Rule]:
    """List the rules of adapters; `names` are fields that need some."""
    return [
        Rule(
            lambda f: f.lora_rank is not None and f.lora_alpha is None and 2 * f.lora_rank,
            "lora_alpha is null, but lora_rank is {f.lora_rank}",
            "set it, for example to {found}",
        ),
        Rule(
            lambda f: (
                f.lora_rank is not None
                and (not f.lora_targets or ("all-linear" in f.lora_targets and len(f.lora_targets) > 1))
            ),
            "lora_targets is {f.lora_targets}",
            "give all-linear alone, or names of layers",
        ),
        *each(
            ((name, WITHOUT_ADAPTERS[name]) for name in names),
            lambda name, value: Rule(
                lambda f: f.lora_rank is None and f[name] != value,
                f"{name} is {{f[{name}]}}, but lora_rank is null, so that all weights are trained",
                f"set {name} to {format_value(value)}, or lora_rank to a number",
            ),
        ),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsRecipe(Recipe):
    """The fields of recipes whose model may be a mixture of experts: how its routers are balanced."""

    router_loss: str | None = setting(
        "of a mixture of experts, over all tokens that are trained in the step. global (2101.03961, 2501.11873), sequence "
        "(DeepSeek-V3's of each sequence, 2412.19437) or bias (no loss: biases that choose experts follow their load, "
        "2408.15664). null: none",
        choice("global", "sequence", "bias"),
    )
    router_loss_weight: float | None = setting(
        "weight of the router loss; of bias how far a step moves it; null without router_loss", POSITIVE
    )
    router_z_loss_weight: float = setting(
        "weight of the mean of logsumexp(router's logits)^2 (2202.08906); 0: none", NOT_NEGATIVE
    )

    rules = rows(
        Rule(
            lambda f: (
                f.router_loss is not None
                and f.router_loss_weight is None
                and ({"global": 0.01, "sequence": 0.0001, "bias": 0.001}[f.router_loss])
            ),
            "router_loss is {f.router_loss}, but router_loss_weight is null",
            "set it, for example to {found}",
        ),
        Rule(
            lambda f: f.router_loss is None and f.router_loss_weight is not None,
            "router_loss_weight is {f.router_loss_weight}, but router_loss is null",
            "set it to null, or router_loss to global, sequence or bias",
        ),
    )

    @property
    def balances_experts(self) -> bool:
        """Whether the recipe asks for anything of the routers."""
        return self.router_loss is not None or self.router_z_loss_weight > 0

    def decisive_fields(self) -> dict[str, Any]:
        fields = super().decisive_fields()
        if not self.balances_experts:  # fingerprints of earlier versions, which had none of these
            for name in ("router_loss", "router_loss_weight", "router_z_loss_weight"):
                del fields[name]
        return fields
