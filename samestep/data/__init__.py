"""Training data: documents and images, tokenizers, collators.

Each task's module has `build(recipe, num_workers, on_bad_row)`, which builds the recipe's training samples, a
`steps.SampleSource`, and the held-out ones: None where nothing is held out. `num_workers` processes or threads read, tokenize,
draw or decode; None: as is usual there. With `on_bad_row` refuse, rows that cannot be used end it, with skip they are left out,
and listed in `row_reports`. It raises UsageError for data, a tokenizer or a template that cannot be used.
"""
