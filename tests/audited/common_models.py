"""Flags, seeded data and tiny models (built from configs, nothing is downloaded) shared by the scripts of this folder."""

import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 64


def flags(*parents):
    p = argparse.ArgumentParser(parents=parents)
    p.add_argument("--per_device_train_batch_size", type=int, default=8)
    p.add_argument("--gradient_accumulation_steps", type=int, default=1)
    a = p.parse_args()
    return a.per_device_train_batch_size, a.gradient_accumulation_steps


# ---- data ----------------------------------------------------------------------------------------
def vectors(n=80, dim=12, classes=5):
    """n samples (x, y): equal counts in every micro-batch of one size."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, dim, generator=g, dtype=torch.float64)
    return [(x[i], torch.randint(classes, (), generator=g)) for i in range(n)]


def images(n=77, classes=5):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 6, 6, generator=g, dtype=torch.float64)
    return [(x[i], torch.randint(classes, (), generator=g)) for i in range(n)]


def sentences(n=77, low=4, high=20, kind="clm"):
    """n samples of low..high tokens. kind: clm (labels = the tokens), mlm (labels at some positions, one at least, and
    a next_sentence_label), cls (one label per sample). low == high: one length."""
    g = torch.Generator().manual_seed(1)
    out = []
    for _ in range(n):
        length = int(torch.randint(low, high + 1, (), generator=g))
        ids = torch.randint(3, VOCAB, (length,), generator=g)
        sample = {"input_ids": ids, "labels": ids.clone()}
        if kind == "mlm":
            chosen = torch.rand(length, generator=g) < 0.3
            chosen[1] = True
            sample["labels"][~chosen] = -100
            sample["input_ids"] = torch.where(chosen, torch.tensor(2), ids)
            sample["next_sentence_label"] = torch.randint(2, (), generator=g)
        if kind == "cls":
            sample["labels"] = torch.randint(3, (), generator=g)
        out.append(sample)
    return out


def collate(samples):
    """Pads on the right: input_ids with 0, labels with -100, and an attention_mask."""
    pad = nn.utils.rnn.pad_sequence
    ids = [s["input_ids"] for s in samples]
    batch = {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(i) for i in ids], batch_first=True),
    }
    labels = [s["labels"] for s in samples]
    batch["labels"] = pad(labels, batch_first=True, padding_value=-100) if labels[0].dim() else torch.stack(labels)
    if "next_sentence_label" in samples[0]:
        batch["next_sentence_label"] = torch.stack([s["next_sentence_label"] for s in samples])
    return batch


# ---- losses --------------------------------------------------------------------------------------
def shifted(batch):
    return batch["labels"][:, 1:]


def targets(batch):
    """Number of next-token targets of a batch."""
    return int((shifted(batch) != -100).sum())


def next_token_sum(logits, batch):
    """Sum of the next-token losses, in the dtype of the logits."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), shifted(batch).flatten(), ignore_index=-100, reduction="sum")


def causal_loss_in_float64(logits, labels, vocab_size, num_items_in_batch=None, **kwargs):
    """transformers' ForCausalLMLoss without its logits.float(), which would round float64 logits to float32."""
    total = next_token_sum(logits, {"labels": labels})
    return total / ((labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch)


# ---- models --------------------------------------------------------------------------------------
def mlp(p=None, norm=None):
    """12 -> 32 -> 32 -> 5; p: dropout after both hidden layers; norm: batch norm after the first."""
    layers = [
        nn.Linear(12, 32),
        nn.BatchNorm1d(32) if norm else nn.Identity(),
        nn.Tanh(),
        nn.Dropout(p) if p else nn.Identity(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Dropout(p) if p else nn.Identity(),
        nn.Linear(32, 5),
    ]
    return nn.Sequential(*layers).double()


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=1,
            eos_token_id=1,
            attn_implementation="eager",
        )
    ).double()
    model.loss_function = causal_loss_in_float64
    return model


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            attention_dropout=0.0,
            use_cache=False,
            attn_implementation="eager",
        )
    ).double()
    model.loss_function = causal_loss_in_float64
    return model


def bert(kind):
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
        attn_implementation="eager",
    )
    return getattr(transformers, kind)(config).double()


def train_with_trainer(model, data, b, k, **more):
    """Trainer as documented; samples in order; neither clipping nor a schedule."""
    import tempfile

    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=b,
        gradient_accumulation_steps=k,
        num_train_epochs=1,
        learning_rate=0.01,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
        dataloader_pin_memory=False,
        **more,
    )
    Trainer(model=model, args=args, train_dataset=data, data_collator=collate).train()
