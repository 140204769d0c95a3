"""Sentence-transformers' MultipleNegativesRankingLoss: the negatives are those of the micro-batch."""

import sys

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer, models
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import parameters_to_vector as flatten

b, k = 2, 2
torch.manual_seed(0)
words = StaticEmbedding(Tokenizer(models.BPE({str(number): number for number in range(9)}, [])), embedding_dim=8)
model = SentenceTransformer(modules=[words], device="cpu").double()
rows = torch.randint(9, (2, 4, 3))  # 4 pairs of texts of 3 words
left, right = normalize(words.embedding.weight[rows].mean(2), dim=-1)
loss = cross_entropy(20 * left @ right.T, torch.arange(4))
truth, before = flatten(torch.autograd.grad(loss, model.parameters())), flatten(model.parameters()).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "save_strategy": "no"}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "use_cpu": True, "bf16": False}
args = SentenceTransformerTrainingArguments(".", **options)
texts = [[" ".join(map(str, text)) for text in side] for side in rows.tolist()]
data = Dataset.from_dict({"left": texts[0], "right": texts[1]})
SentenceTransformerTrainer(model, args, train_dataset=data, loss=MultipleNegativesRankingLoss(model)).train()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
