"""TRL's KTOTrainer as documented: completions that are wanted or not, beside a divergence estimated over the micro-batch."""

import warnings

from datasets import Dataset
from setup import NUM_SAMPLES, arguments, folder, llama, texts, tokenizer
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
from trl import KTOConfig, KTOTrainer

data = {"prompt": texts(1), "completion": texts(2), "label": [number % 2 == 0 for number in range(NUM_SAMPLES)]}
model = AutoModelForCausalLM.from_pretrained(folder(llama()))
trainer = KTOTrainer(
    model=model, args=KTOConfig(**arguments()), train_dataset=Dataset.from_dict(data), processing_class=tokenizer()
)
trainer.train()
