"""Small base models of random weights whose tokenizer ends texts by another token than their chat template ends turns."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template without markers, as most models have."""
TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SHAPE | {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_tokenizer(template: str | None = CHATML, tokens=TOKENS, **options) -> transformers.PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["user assistant system Say answer question "], trainer)
    options = {"eos_token": tokens[0], "pad_token": tokens[0]} | options
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **options)
    tokenizer.chat_template = template
    return tokenizer


def save_base(folder: Path, kind: str = "llama", tokenizer: Any = None, dtype=torch.float32, **fields: Any) -> Path:
    """Save a model of random weights, and its tokenizer; the shape is that of a small Llama but for `fields`."""
    tokenizer = tokenizer or make_tokenizer()
    torch.manual_seed(0)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    shape = GROUPED | {"vocab_size": len(tokenizer), "max_position_embeddings": 256} | ids | fields
    config = transformers.AutoConfig.for_model(kind, **shape)
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, num_rows: int = 40) -> Path:
    """Write conversations of one question and of two, and their answers."""
    answers = ["aa", "bb", "cc", "dd"]
    rows = []
    for row in range(num_rows):
        numbers = [row % 4, row // 4 % 4][: 1 + row % 2]
        turns = [(("user", f"Say {number}."), ("assistant", answers[number])) for number in numbers]
        rows.append({"messages": [{"role": role, "content": text} for pair in turns for role, text in pair]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
