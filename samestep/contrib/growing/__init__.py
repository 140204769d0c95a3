"""A batch that grows while it trains: a recipe's `batch_schedule`. Needs no torch, as plans have such recipes, too."""
