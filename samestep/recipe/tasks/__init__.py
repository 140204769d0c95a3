"""A file for each task: the class of its recipes, and what trains them."""

import importlib

TASK_MODULES = (
    "bert_pretraining",
    "modernbert_pretraining",
    "gpt2_pretraining",
    "causal_lm_pretraining",
    "text_classification",
    "causal_lm_finetuning",
    "seq2seq_finetuning",
    "embedding_training",
    "image_classification",
    "captcha_recognition",
)
"""Files of this folder that register a task, in the order in which tasks are listed."""
for _module in TASK_MODULES:
    importlib.import_module(f"samestep.recipe.tasks.{_module}")
