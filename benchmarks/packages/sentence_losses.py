"""sentence-transformers' trainers as documented, with losses beside those of sentence_pairs.py, and a cross-encoder."""

import sys

from datasets import Dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
from sentence_transformers.models import Pooling, Transformer
from setup import NUM_SAMPLES, arguments, bert, folder, texts
from transformers import BertForSequenceClassification

mode = sys.argv.pop(1)
if mode == "cross_encoder":
    model = CrossEncoder(folder(bert(BertForSequenceClassification, num_labels=1)), device="cpu")
else:
    model = SentenceTransformer(modules=[Transformer(folder(bert())), Pooling(32)], device="cpu")
# Name -> loss, names of the columns of texts, labels.
LOSSES = {
    "cosent": (losses.CoSENTLoss, 2, [number % 5 / 4 for number in range(NUM_SAMPLES)]),
    "triplet": (losses.TripletLoss, 3, None),
    "contrastive": (losses.ContrastiveLoss, 2, [number % 2 for number in range(NUM_SAMPLES)]),
    "online_contrastive": (losses.OnlineContrastiveLoss, 2, [number % 2 for number in range(NUM_SAMPLES)]),
    "margin_mse": (losses.MarginMSELoss, 3, [number % 5 / 4 for number in range(NUM_SAMPLES)]),
    "batch_hard": (losses.BatchHardTripletLoss, 1, [number % 3 for number in range(NUM_SAMPLES)]),
    "matryoshka": (
        lambda model: losses.MatryoshkaLoss(model, losses.CosineSimilarityLoss(model), [32, 16, 8]),
        2,
        [number % 5 / 4 for number in range(NUM_SAMPLES)],
    ),
    "cross_encoder": (BinaryCrossEntropyLoss, 2, [float(number % 2) for number in range(NUM_SAMPLES)]),
}
kind, num_texts, labels = LOSSES[mode]
data = {f"sentence{number}": texts(number) for number in range(1, num_texts + 1)}
if labels:
    data["label"] = labels
trainer_kind, config = (
    (CrossEncoderTrainer, CrossEncoderTrainingArguments)
    if mode == "cross_encoder"
    else (SentenceTransformerTrainer, SentenceTransformerTrainingArguments)
)
trainer = trainer_kind(model=model, args=config(**arguments()), train_dataset=Dataset.from_dict(data), loss=kind(model))
trainer.train()
