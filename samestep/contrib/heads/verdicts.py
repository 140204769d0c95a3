"""Names of the steps that Trainer takes."""

EXACT, TIMES_K, MEAN_OF_MEANS, OTHER = "exact", "k times too large", "mean of means", "another step"
TIMES_ONE_KTH = "k times too small"
FIRST_LABELS = "divided by too many targets: the first label of a row, which nothing predicts, is counted"
SHARED = "divided rightly, but samples of a micro-batch see each other's padding or statistics"
VERDICTS = (EXACT, TIMES_K, TIMES_ONE_KTH, MEAN_OF_MEANS, FIRST_LABELS, SHARED, OTHER)
"""All that a comparison finds, as a page lists them."""


def agrees(read: str, run: str) -> bool:
    """Tell whether what was read is what was run: how a loss is divided; what samples share is not in its source."""
    return read == run or (read, run) == (EXACT, SHARED)
