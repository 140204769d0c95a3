"""sentence-transformers' trainer with tiny models, plain and exact, also on the processes that forked.Server starts."""

import contextlib
import io
import os
import tempfile
import warnings
from pathlib import Path

import torch
from common import fresh_accelerator
from datasets import Dataset
from run_own_trainer import Gradients
from safetensors.torch import save_model
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from samestep import exact

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] red green blue one two three four big small cat dog bird runs sleeps".split()
NUM_SAMPLES = 11
LABELS = {"score": lambda number: number % 5 / 4, "class": lambda number: number % 3, "same": lambda number: number % 2}


def make_model(dropout: float = 0.0, seed: int = 0) -> SentenceTransformer:
    """Make an encoder of random weights, with a tokenizer of a few words."""
    torch.manual_seed(seed)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    noise = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with tempfile.TemporaryDirectory() as folder:
        model = BertModel(BertConfig(vocab_size=len(WORDS), **sizes, **noise))
        model.config.architectures = ["BertModel"]
        model.config.save_pretrained(folder)  # the model's own writes on the first process alone
        save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
        PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **names).save_pretrained(folder)
        return SentenceTransformer(modules=[Transformer(folder), Pooling(16)], device="cpu")


def write_texts(seed: int, num_samples: int = NUM_SAMPLES) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (num_samples,), generator=generator).tolist()
    return [
        " ".join(WORDS[5 + int(word)] for word in torch.randint(0, len(WORDS) - 5, (length,), generator=generator))
        for length in lengths
    ]


def _guide(model: SentenceTransformer) -> SentenceTransformer:
    return make_model(seed=1).to(model.dtype)


CASES = {
    "negatives": (losses.MultipleNegativesRankingLoss, 3, None),
    "cached": (lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=2), 2, None),
    "guided": (lambda model: losses.GISTEmbedLoss(model, _guide(model), temperature=0.1), 2, None),
    "matryoshka": (
        lambda model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]),
        2,
        None,
    ),
    "cosent": (losses.CoSENTLoss, 2, "score"),
    "hard": (losses.BatchHardTripletLoss, 1, "class"),
    "cosine": (losses.CosineSimilarityLoss, 2, "score"),
}
"""Name -> loss, texts of a sample, labels."""

MORE_CASES = {
    "symmetric": (losses.MultipleNegativesSymmetricRankingLoss, 2, None),
    "cached guided": (
        lambda model: losses.CachedGISTEmbedLoss(model, _guide(model), temperature=0.1, mini_batch_size=2),
        2,
        None,
    ),
    "cached symmetric": (
        lambda model: losses.CachedMultipleNegativesSymmetricRankingLoss(model, mini_batch_size=2),
        2,
        None,
    ),
    "angle": (losses.AnglELoss, 2, "score"),
    "triplet": (losses.TripletLoss, 3, None),
    "contrastive": (losses.ContrastiveLoss, 2, "same"),
    "online contrastive": (losses.OnlineContrastiveLoss, 2, "same"),
    "margins": (losses.MarginMSELoss, 3, "score"),
    "all triplets": (losses.BatchAllTripletLoss, 1, "class"),
    "half hard": (losses.BatchSemiHardTripletLoss, 1, "class"),
    "soft margin": (losses.BatchHardSoftMarginTripletLoss, 1, "class"),
    "classes": (lambda model: losses.SoftmaxLoss(model, 16, 3), 2, "class"),
    "mega batch": (lambda model: losses.MegaBatchMarginLoss(model, mini_batch_size=3), 2, None),
    "orthogonal": (losses.GlobalOrthogonalRegularizationLoss, 2, None),
}
"""Cases of `make bench NAME=exact_trainers` alone."""


def train(
    name: str,
    b: int,
    k: int,
    is_exact: bool = True,
    dropout: float = 0.0,
    num_samples: int = NUM_SAMPLES,
    dtype: torch.dtype = torch.float32,
    is_resumed: bool = False,
    **options,
) -> tuple[list, object]:
    """Take an epoch's steps without learning; return their gradients, and the trainer."""
    fresh_accelerator()
    make_loss, num_texts, labels = (CASES | MORE_CASES)[name]
    model, gradients = make_model(dropout).to(dtype), Gradients()
    data = {f"text{number}": write_texts(number, num_samples) for number in range(num_texts)}
    data |= {"label": [LABELS[labels](number) for number in range(num_samples)]} if labels else {}
    data = options.pop("train_dataset", Dataset.from_dict(data))
    quiet = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(quiet),
        contextlib.redirect_stderr(quiet),
    ):
        warnings.simplefilter("ignore")
        arguments = SentenceTransformerTrainingArguments(
            output_dir=options.pop("output_dir", folder),
            num_train_epochs=1,
            learning_rate=0.0,
            max_grad_norm=0.0,
            optim="sgd",
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy=options.pop("save_strategy", "no"),
            logging_strategy="steps",
            logging_steps=1,
            disable_tqdm=True,
            per_device_train_batch_size=b,
            gradient_accumulation_steps=k,
            **options,
        )
        kind = exact(SentenceTransformerTrainer) if is_exact else SentenceTransformerTrainer
        trainer = kind(model=model, args=arguments, train_dataset=data, loss=make_loss(model), callbacks=[gradients])
        trainer.train(resume_from_checkpoint=is_resumed or None)
    return gradients.all, trainer


def main(folder: str) -> None:
    """Train in micro-batches of 2, on 2 processes 8 samples a step."""
    torch.set_num_threads(1)
    found = {name: train(name, 2, 2)[0] for name in CASES}
    torch.save(found, Path(folder) / f"{os.environ['RANK']}.pt")
    os._exit(0)
