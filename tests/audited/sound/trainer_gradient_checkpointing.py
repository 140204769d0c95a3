"""Exact: Trainer recomputes the layers of a Qwen2 in the backward (gradient_checkpointing); ragged prompts and answers.
Only answers are learned, so that the number of targets of a micro-batch varies much; full windows, fixed order."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import tempfile

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Trainer,
    TrainingArguments,
)


def words():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<end>", "=", "+", *map(str, range(40))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")


def sums(tokenizer, n=80):
    """ "3 + 9 + 4 =" and then the partial sums, down to the last."""
    generator = torch.Generator().manual_seed(31)
    for terms in torch.randint(2, 8, (n,), generator=generator).tolist():
        numbers = torch.randint(0, 6, (terms,), generator=generator)
        prompt = tokenizer(" + ".join(map(str, numbers.tolist())) + " =")["input_ids"]
        answer = tokenizer(" ".join(map(str, numbers.cumsum(0).tolist())) + " <end>")["input_ids"]
        yield {
            "input_ids": prompt + answer,
            "attention_mask": [1] * len(prompt + answer),
            "labels": [-100] * len(prompt) + answer,
        }


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
flags = parser.parse_args()
torch.manual_seed(3)
tokenizer = words()
model = Qwen2ForCausalLM(
    Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(prefix="sums-"),
    per_device_train_batch_size=flags.per_device_train_batch_size,
    gradient_accumulation_steps=flags.gradient_accumulation_steps,
    num_train_epochs=1,
    optim="sgd",
    optim_args="momentum=0.9",
    learning_rate=0.05,
    lr_scheduler_type="cosine",
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    train_sampling_strategy="sequential",
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
collator = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100)
Trainer(model=model, args=args, train_dataset=list(sums(tokenizer)), data_collator=collator).train()
