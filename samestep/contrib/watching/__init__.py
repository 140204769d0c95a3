"""A live page about runs: `samestep watch`."""
