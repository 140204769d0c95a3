"""Fields and rules of conversations with images."""

from samestep.recipe.rules import Rule, each

IMAGE_SHAPE = ("image_size", "image_patch_size", "num_image_layers")
"""Fields that give a tower of images with random weights its shape."""
IMAGE_RULES = (
    Rule(
        lambda f: f.images and f.objective != "sft",
        "images is true, but objective is {f.objective}, whose pairs are texts",
        "set objective to sft, or images to false",
    ),
    Rule(
        lambda f: f.images and f.model_name_or_path is None and f.architecture != "llava",
        "images is true, but architecture is {f.architecture}: with random weights only llava is made",
        "set architecture to llava, or name a model of images and text, model_name_or_path",
    ),
    *each(
        IMAGE_SHAPE,
        lambda name: Rule(
            lambda f: (f[name] is None) == bool(f.images and f.model_name_or_path is None),
            f"{name} is {{f[{name}]}}, but it is of images with random weights, and of nothing else",
            "give a number where images is true and no model_name_or_path is set, and null elsewhere",
        ),
    ),
    Rule(
        lambda f: f.image_size and f.image_patch_size and f.image_size % f.image_patch_size != 0,
        "image_size is {f.image_size}, but image_patch_size {f.image_patch_size} does not divide it",
        "set it to a multiple",
    ),
    Rule(
        lambda f: f.images and f.model_name_or_path is not None and f.rehearse,
        "rehearse is true, but images is true, and no small model is made of {f.model_name_or_path}",
        "set rehearse to false, and max_train_steps to 3",
    ),
    Rule(
        lambda f: f.freeze is not None and not f.images,
        "freeze is {f.freeze}, but images is false, and of models of texts adapters freeze the rest",
        "set freeze to null",
    ),
    Rule(
        lambda f: f.images and f.balances_experts,
        "images is true, but router_loss is {f.router_loss}, which knows rows of texts only",
        "set router_loss to null, or images to false",
    ),
)
"""Rules of what a recipe with images excludes."""
