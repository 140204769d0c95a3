"""transformers' Trainer with the exact step."""
