"""Says who makes the claims whose authors are known, for the table of README.md."""

TRANSFORMERS = "[transformers' guide](https://huggingface.co/docs/transformers/en/grad_accumulation)"
ACCELERATE = "[Accelerate's guide](https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation)"
SYNCHRONIZATION = "[Accelerate's guide on synchronization](https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization)"
SU = "Su 2021, *Gradient accumulation hidden in momentum* (kexue.fm)"
ADAMA = "[AdamA](https://arxiv.org/abs/2305.19982), Zhang et al. 2023"
GOYAL = "[Goyal et al. 2017](https://arxiv.org/abs/1706.02677)"

SOURCES = {
    "Losses divided by k, accumulated, give exactly the gradient of the whole batch; so do averages over processes.": (
        f'{TRANSFORMERS} ("same update"), {ACCELERATE}, most tutorials; '
        "[withdrawn in part](https://huggingface.co/blog/gradient_accumulation) in 2024"
    ),
    "Without the division the gradient is k times too large.": f"{ACCELERATE}, most tutorials",
    "Linear rule: 0.1 at 256 becomes 0.4 at 1024; 0.1 at 64 becomes 0.8 at 512; 2e-4 at 64 becomes 0.0032 at 1024.": GOYAL,
    "An update at every 4th micro-batch communicates 75 % less.": SYNCHRONIZATION,
    "Averaging k gradients divides the variance of a step by k.": "textbooks",
    "Momentum that decays once per window and takes (1 - beta) / k of every gradient is that of accumulation.": SU,
    "One decay at every micro-step, 1 - (1 - beta) / k, gives the same momentum but for what can be neglected "
    "(here: 1 % of it).": SU,
    "Sparse updates and accumulation almost coincide (here: to 5 % of the distance from the minimum).": SU,
    "Squares of micro-batch gradients, accumulated, give Adam's second moment, up to what can be neglected "
    "(here: 5 % at every noise).": SU,
    "Sums of squares of g / k give Adam's second moment (5 % at every noise).": ADAMA,
    "Accumulation inside momentum keeps no gradient beside it (here: at most half a byte per parameter).": ADAMA,
    "AdamW that accumulates in its moments trains as AdamW on accumulated gradients: the same loss (2 %).": ADAMA,
}
"""Text of a claim: who makes it."""
