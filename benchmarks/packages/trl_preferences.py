"""TRL's trainers of preferences, beside their usual losses: DPO's other losses, APO in KTOTrainer, TPO (experimental).

AOT and BCO compare the pairs of a micro-batch, which does not show while the model is its own reference: they get another one.
"""

import sys
import warnings

from datasets import Dataset
from setup import NUM_SAMPLES, arguments, folder, llama, texts, tokenizer
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.tpo import TPOConfig, TPOTrainer

DPO, KTO, TPO = (DPOTrainer, DPOConfig), (KTOTrainer, KTOConfig), (TPOTrainer, TPOConfig)
CASES = {
    "ipo": (*DPO, {"loss_type": "ipo"}),
    "sft": (*DPO, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}),
    "aot": (*DPO, {"loss_type": "aot"}),
    "bco": (*DPO, {"loss_type": "bco_pair"}),
    "apo": (*KTO, {"loss_type": "apo_zero_unpaired"}),
    "tpo": (*TPO, {}),
}
mode = sys.argv.pop(1)
kind, config, more = CASES[mode]
data = {"prompt": texts(1), "chosen": texts(2), "rejected": texts(3)}
if kind is KTOTrainer:
    data = {"prompt": texts(1), "completion": texts(2), "label": [number % 2 == 0 for number in range(NUM_SAMPLES)]}
elif kind is TPOTrainer:
    data["reference"] = texts(4)
model, reference = (AutoModelForCausalLM.from_pretrained(folder(llama())) for _ in range(2))
trainer = kind(
    model=model,
    **({"ref_model": reference} if mode in ("aot", "bco") else {}),
    args=config(**arguments(), **more),
    train_dataset=Dataset.from_dict(data),
    processing_class=tokenizer(),
)
trainer.train()
