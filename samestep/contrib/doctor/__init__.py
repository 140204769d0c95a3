"""What went wrong in a run: norms of its layers as it goes, rules of what is found in its numbers, `samestep doctor`."""
