"""The step that Trainer takes with a head of transformers: `samestep check-model`."""
