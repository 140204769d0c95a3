"""What Trainer's step is with a head of transformers: `samestep check-model`."""
