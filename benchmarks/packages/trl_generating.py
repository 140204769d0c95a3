"""TRL's trainers that generate: GRPO with each of its losses, RLOO, distillation. The reward is how many words differ.

All completions of a step are generated at once, so that they are the same in every cut of it on one process. GKD (experimental)
is trained on given answers alone (lmbda=0.0).
"""

import sys
import warnings

from datasets import Dataset
from setup import arguments, folder, llama, texts, tokenizer
from transformers import AutoModelForCausalLM

warnings.simplefilter("ignore")
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

mode = sys.argv.pop(1)  # grpo, dapo, bnpo, rloo, distillation or gkd


def reward(completions, **_):
    return [float(len(set(text.split()))) for text in completions]


model, teacher = (AutoModelForCausalLM.from_pretrained(folder(llama())) for _ in range(2))
common = {"train_dataset": Dataset.from_dict({"prompt": texts(1)}), "processing_class": tokenizer()}
if mode == "distillation":
    args = DistillationConfig(**arguments(), max_completion_length=8)
    trainer = DistillationTrainer(model=model, teacher_model=teacher, args=args, **common)
elif mode == "gkd":
    rows = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(texts(1), texts(2), strict=True)
    ]
    common["train_dataset"] = Dataset.from_dict({"messages": rows})
    args = GKDConfig(**arguments(), lmbda=0.0, max_new_tokens=8)
    trainer = GKDTrainer(model=model, teacher_model=teacher, args=args, **common)
else:
    config, kind = (RLOOConfig, RLOOTrainer) if mode == "rloo" else (GRPOConfig, GRPOTrainer)
    more = {} if mode == "rloo" else {"loss_type": mode}
    args = config(**arguments(), **more, max_completion_length=8, num_generations=4)
    trainer = kind(model=model, reward_funcs=reward, args=args, **common)
trainer.train()
