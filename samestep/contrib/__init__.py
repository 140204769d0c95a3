"""Ways that are not the exact step, or that few need: each enters by a line of `samestep.training.ways`, and goes with it.

A way is a class of `samestep.training.reduction`: how gradients become the step's. A command enters by `samestep.cli.commands`,
kinds of a recipe's field by `samestep.recipe.variants`, rows of rules by `samestep.recipe.exclusions`.
"""
