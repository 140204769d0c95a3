"""Gives the programs of this folder flags, a tiny Llama or BERT, a tokenizer made here, 77 seeded samples."""

import argparse
import os
import random
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUM_SAMPLES, RATE = 77, 0.01
SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "<user>", "<assistant>"]
WORDS = "red green blue one two three four big small cat dog bird runs sleeps sings fast slow here there now".split()
CHAT = (
    "{% for m in messages %}{% if m.role == 'user' %}<user> {{ m.content }} {% else %}<assistant> "
    "{% generation %}{{ m.content }} </s>{% endgeneration %} {% endif %}{% endfor %}"
)
# Of transformers' TrainingArguments and all that descend from them.
ARGUMENTS = {
    "num_train_epochs": 1,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "weight_decay": 0.0,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}

torch.manual_seed(0)


def arguments() -> dict:
    """Return the arguments of a trainer: those of the command line, and `ARGUMENTS`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--optim", default="sgd")
    parser.add_argument("--output_dir", help="gets a checkpoint after every step; default: none is written")
    parser.add_argument("--resume_from_checkpoint", choices=["last"])
    flags = vars(parser.parse_args())
    if flags["output_dir"]:
        return ARGUMENTS | flags | {"save_strategy": "steps", "save_steps": 1}
    return ARGUMENTS | flags | {"output_dir": tempfile.mkdtemp(prefix="packages-")}


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(SPECIAL_TOKENS + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special_tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    special_tokens |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=64, chat_template=CHAT, **special_tokens)


SIZES = {
    "vocab_size": len(SPECIAL_TOKENS + WORDS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def llama(kind: type = LlamaForCausalLM, **more) -> LlamaForCausalLM:
    config = LlamaConfig(**SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)
    return kind(config)


def folder(model: torch.nn.Module) -> str:
    """Save a model with the tokenizer, and return the folder: some trainers load the model by name."""
    path = tempfile.mkdtemp(prefix="packages-model-")
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def bert(kind: type = BertModel, **more) -> BertModel:
    return kind(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0, **more))


def blocks(length: int = 16) -> list[dict]:
    """Join texts, and cut them into blocks of one length, as run_clm and run_mlm do."""
    tokens = [token for text in texts(1, 8, 28) for token in tokenizer()(text)["input_ids"]]
    starts = range(0, NUM_SAMPLES * length, length)
    assert len(tokens) >= NUM_SAMPLES * length
    return [{"input_ids": tokens[start : start + length], "attention_mask": [1] * length} for start in starts]


def texts(seed: int, low: int = 2, high: int = 12) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(low, high))) for _ in range(NUM_SAMPLES)]
