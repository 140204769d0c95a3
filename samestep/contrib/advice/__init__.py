"""The global batch that the measured noise of a run allows, and the recipe for it: `samestep advise`."""
