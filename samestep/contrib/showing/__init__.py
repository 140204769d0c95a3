"""Samples of a recipe's data, in the terminal or on a page: `samestep show-data`."""
