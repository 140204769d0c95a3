"""Copies of checkpoints: in a bucket (--checkpoint_store), on every machine (--replicate_checkpoints)."""
