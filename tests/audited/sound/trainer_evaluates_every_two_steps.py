"""Exact: Trainer trains a Llama, whose loss divides by num_items_in_batch, on ragged samples without a partial window.
Every two steps the held-out loss is computed, of the predictions only, with a batch size of its own."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import tempfile

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

PAD, EOS, VOCAB = 0, 1, 50


def counting(n, seed):
    """Arithmetic progressions of 3 to 19 terms, each ended by EOS."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(n):
        length, start, stride = (int(torch.randint(low, 20, (), generator=generator)) for low in (3, 0, 1))
        yield {"input_ids": [2 + (start + stride * i) % (VOCAB - 2) for i in range(length)] + [EOS]}


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [PAD] * (longest - len(sample["input_ids"])) for sample in samples]
    input_ids = torch.tensor(rows)
    mask = input_ids != PAD
    return {"input_ids": input_ids, "attention_mask": mask.long(), "labels": input_ids.masked_fill(~mask, -100)}


def main():
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(
        output_dir=tempfile.mkdtemp(prefix="counting-"),
        num_train_epochs=1,
        learning_rate=2e-3,
        warmup_steps=1,
        lr_scheduler_type="linear",
        weight_decay=0.01,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=6,
        prediction_loss_only=True,
        save_strategy="no",
        logging_steps=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=13,
    )
    (args,) = parser.parse_args_into_dataclasses()
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=PAD,
        eos_token_id=EOS,
        tie_word_embeddings=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=list(counting(96, seed=1)),
        eval_dataset=list(counting(21, seed=2)),
        data_collator=collate,
    )
    trainer.train()


if __name__ == "__main__":
    main()
