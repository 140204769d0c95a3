"""sentence-transformers' trainer as documented: cosine similarity, or in-batch negatives, cached or not."""

import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    CosineSimilarityLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.models import Pooling, Transformer
from setup import NUM_SAMPLES, arguments, bert, folder, texts

mode = sys.argv.pop(1)  # cosine, negatives or cached
encoder = Transformer(folder(bert()))
model = SentenceTransformer(modules=[encoder, Pooling(32)], device="cpu")
data = {"sentence1": texts(1), "sentence2": texts(2)}
if mode == "cosine":
    data["score"] = [number % 5 / 4 for number in range(NUM_SAMPLES)]
loss = {
    "cosine": CosineSimilarityLoss,
    "negatives": MultipleNegativesRankingLoss,
    "cached": lambda model: CachedMultipleNegativesRankingLoss(model, mini_batch_size=4),
}[mode](model)
trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(**arguments()),
    train_dataset=Dataset.from_dict(data),
    loss=loss,
)
trainer.train()
