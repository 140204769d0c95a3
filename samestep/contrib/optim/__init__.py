"""Other optimizers: those that accumulate in their moments, and AdamW whose moments have 8 bits."""
