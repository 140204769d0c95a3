"""Exact: TRL's SFTTrainer learns all tokens of plain conversations of one or more turns, whose lengths differ.
The loss is a sum over the tokens of the whole step, of all processes; 96 conversations make full windows."""
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

ANIMALS = "cow horse duck hen goat owl frog bee".split()
SOUNDS = "moo neigh quack cluck bleat hoot croak buzz".split()
WORDS = "<pad> <end> <unk> <asks> <says> what does the say and it says".split() + ANIMALS + SOUNDS
TEMPLATE = (
    "{% for m in messages %}{{ '<asks> ' if m['role'] == 'user' else '<says> ' }}"
    "{{ m['content'] + (' ' if m['role'] == 'user' else ' <end> ') }}{% endfor %}"
)


def make_tokenizer():
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", chat_template=TEMPLATE
    )


def make_conversations(n):
    draw = random.Random(5)
    for _ in range(n):
        messages = []
        for _turn in range(draw.randint(1, 4)):
            asked = draw.sample(range(len(ANIMALS)), draw.randint(1, 3))
            question = "what does the " + " and the ".join(ANIMALS[i] for i in asked) + " say"
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": "it says " + " and ".join(SOUNDS[i] for i in asked)})
        yield {"messages": messages}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    flags = parser.parse_args()
    set_seed(17)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    args = SFTConfig(
        output_dir=tempfile.mkdtemp(prefix="farm-"),
        per_device_train_batch_size=flags.per_device_train_batch_size,
        gradient_accumulation_steps=flags.gradient_accumulation_steps,
        num_train_epochs=1,
        learning_rate=2e-3,
        warmup_steps=2,
        max_length=96,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Dataset.from_list(list(make_conversations(96))),
        processing_class=make_tokenizer(),
    )
    trainer.train()


if __name__ == "__main__":
    main()
