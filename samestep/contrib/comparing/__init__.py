"""The place where two runs part: `samestep compare`."""
