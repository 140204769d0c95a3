"""Exact: TRL's DPOTrainer takes a mean over pairs, and all windows and micro-batches are full (64 pairs).
Answers differ in length, which the sum of log probabilities bears; the reference model is the start of the trained one."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

THINGS = "tea bread soup rice cheese apples".split()
WORDS = "<pad> <bos> <eos> <unk> how is the it tastes good bad warm cold very really rather not and ok".split() + THINGS


def make_tokenizer():
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=model, **special)


def make_pairs(n):
    """Polite answers are preferred to rude ones."""
    draw = random.Random(23)
    for _ in range(n):
        more = ["very"] * draw.randint(0, 4)
        less = ["not"] * draw.randint(0, 2) + ["really"] * draw.randint(0, 3)
        yield {
            "prompt": f"how is the {draw.choice(THINGS)}",
            "chosen": " ".join([" it tastes", *more, draw.choice(["good", "warm and good", "rather good and warm"])]),
            "rejected": " ".join([" it tastes", *less, draw.choice(["bad", "cold", "cold and bad"])]),
        }


def start_model():
    """Save a fresh model, and load it by its folder, as it would be after supervised training."""
    folder = tempfile.mkdtemp(prefix="tastes-")
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=48,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder, AutoModelForCausalLM.from_pretrained(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    flags = parser.parse_args()
    set_seed(2)
    folder, model = start_model()
    args = DPOConfig(
        output_dir=folder,
        per_device_train_batch_size=flags.per_device_train_batch_size,
        gradient_accumulation_steps=flags.gradient_accumulation_steps,
        num_train_epochs=1,
        beta=0.3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    pairs = Dataset.from_list(list(make_pairs(64)))
    DPOTrainer(model=model, args=args, train_dataset=pairs, processing_class=make_tokenizer()).train()


if __name__ == "__main__":
    main()
