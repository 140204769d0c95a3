"""Where two runs part: `samestep compare`."""
