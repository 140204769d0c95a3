"""Exact: sentence-transformers fits the cosine of two sentences to a score (CosineSimilarityLoss, a mean over pairs).
Mean pooling takes only real tokens, so padding is harmless; all micro-batches and windows are full (80 pairs)."""
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
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CosineSimilarityLoss
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed

TOPICS = ["sun rain snow wind cloud storm".split(), "bread milk salt sugar butter flour".split()]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS[0], *TOPICS[1]]


def save_encoder(folder):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=32, **special).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    BertModel(config).save_pretrained(folder)


def sentence(draw, weather):
    """Words of both topics; each is about the weather with the probability given."""
    return " ".join(draw.choice(TOPICS[draw.random() > weather]) for _ in range(draw.randint(2, 9)))


def pairs(n):
    draw = random.Random(14)
    rows = []
    for _ in range(n):
        first, second = draw.random(), draw.random()
        score = 1 - abs(first - second)
        rows.append({"text": sentence(draw, first), "other": sentence(draw, second), "score": score})
    return Dataset.from_list(rows)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    flags = parser.parse_args()
    set_seed(11)
    folder = tempfile.mkdtemp(prefix="topics-")
    save_encoder(folder)
    encoder = Transformer(folder)
    model = SentenceTransformer(modules=[encoder, Pooling(24, pooling_mode="mean"), Normalize()], device="cpu")
    args = SentenceTransformerTrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=flags.per_device_train_batch_size,
        gradient_accumulation_steps=flags.gradient_accumulation_steps,
        num_train_epochs=1,
        optim="sgd",
        learning_rate=0.1,
        warmup_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = SentenceTransformerTrainer(
        model=model, args=args, train_dataset=pairs(80), loss=CosineSimilarityLoss(model)
    )
    trainer.train()


if __name__ == "__main__":
    main()
