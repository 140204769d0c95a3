"""Streaming: samples from shards that are read as the training goes, in an order that knows no ranks."""
