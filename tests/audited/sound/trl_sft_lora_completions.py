"""Exact: TRL's SFTTrainer trains a LoRA adapter on prompts and completions; only tokens of completions are counted.
The base model is frozen, and the adapter's dropout is 0; 80 pairs of different lengths make full windows."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

COLOURS = "red blue green black white grey pink brown gold".split()


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "->", *COLOURS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def reversals(n):
    """A row of colours, and the same row backwards."""
    generator = torch.Generator().manual_seed(19)
    for length in torch.randint(1, 10, (n,), generator=generator).tolist():
        row = [COLOURS[i] for i in torch.randint(len(COLOURS), (length,), generator=generator)]
        yield {"prompt": " ".join(row) + " ->", "completion": " " + " ".join(reversed(row))}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
flags = parser.parse_args()

torch.manual_seed(0)
words = tokenizer()
base = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
)
adapter = LoraConfig(
    r=4,
    lora_alpha=16,
    lora_dropout=0.0,
    target_modules=["q_proj", "v_proj", "down_proj"],
    task_type="CAUSAL_LM",
)
args = SFTConfig(
    output_dir=tempfile.mkdtemp(prefix="reversals-"),
    num_train_epochs=1,
    learning_rate=0.01,
    adam_epsilon=1e-4,
    lr_scheduler_type="constant",
    max_length=None,
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
    **vars(flags),
)
trainer = SFTTrainer(
    model=base,
    args=args,
    train_dataset=Dataset.from_list(list(reversals(80))),
    processing_class=words,
    peft_config=adapter,
)
trainer.train()
