"""Losses that are no sum over samples, exact for every cut: contrastive ones, balance of experts, Dice."""
