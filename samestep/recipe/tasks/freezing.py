"""The parts of a model that a recipe freezes, by name."""

from collections.abc import Collection

from samestep.errors import UsageError

ROLES: dict[str, tuple[str, ...]] = {
    "vision_tower": ("vision_tower", "visual", "vision_model"),
    "projector": ("multi_modal_projector", "connector", "merger", "deepstack_merger_list"),
    "language_model": ("language_model", "text_model", "lm_head"),
}
"""Part of a model of images and text -> names of its modules, of which each kind of model has some."""
FREEZE = "names of modules whose weights are not trained, which cost no gradient; with adapters none is put there; null: none"
"""Help of the field."""


def find_frozen(freeze: Collection[str], names: Collection[str], model: str, linked: Collection[str] = ()) -> set[str]:
    """Find the modules that a recipe freezes.

    A part of `ROLES` is meant in every kind of model; a tower's own projector is no part of the tower.

    Args:
        freeze: names, as a recipe has them; of a module the end of its name.
        names: of all modules of the model, with dots.
        model: its name, for the message.
        linked: parts of `ROLES` that the model may have.

    Returns:
        names of modules; of modules inside each other all.

    Raises:
        UsageError: a name that no module has.

    >>> sorted(find_frozen(["vision_tower"], ["visual", "visual.blocks", "visual.merger"], "it", ROLES))
    ['visual', 'visual.blocks']
    """
    frozen: set[str] = set()
    for wanted in freeze:
        ends = ROLES[wanted] if wanted in linked else (wanted,)
        tops = [name for name in names if any(f".{name}".endswith(f".{end}") for end in ends)]
        if not tops:
            parts = sorted({name.rpartition(".")[2] for name in names if name.count(".") < 2} - {"model", ""})
            known = [*linked, *(part for part in parts if part not in linked)]
            raise UsageError(
                f"freeze names {wanted}, but {model} has no such module: give some of {', '.join(known[:12])}"
            )
        inside = {name for name in names if any(f"{name}.".startswith(f"{top}.") for top in tops)}
        if wanted == "vision_tower" and wanted in linked:
            inside = {name for name in inside if not set(name.split(".")) & set(ROLES["projector"])}
        frozen |= inside
    return frozen
