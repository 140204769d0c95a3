"""Names of the steps that Trainer takes."""

EXACT, TIMES_K, MEAN_OF_MEANS, OTHER = "exact", "k times too large", "mean of means", "another step"
TIMES_ONE_KTH = "k times too small"
FIRST_LABELS = "divided by too many targets: the first label of a row, which nothing predicts, is counted"
VERDICTS = (EXACT, TIMES_K, TIMES_ONE_KTH, MEAN_OF_MEANS, FIRST_LABELS, OTHER)
"""All that a comparison finds, as a page lists them."""
