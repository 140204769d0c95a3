"""Causes of what went wrong in a run: norms of its layers as it goes, rules for its numbers, `samestep doctor`."""
