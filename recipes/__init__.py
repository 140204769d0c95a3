"""The catalog of recipes, and `python -m recipes` from the root of the repository. The engine is the package `samestep`."""
