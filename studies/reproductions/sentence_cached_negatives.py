"""Sentence-transformers' CachedMultipleNegativesRankingLoss: the negatives are a micro-batch's, not the step's."""

import sys
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from torch.nn.functional import cross_entropy, normalize
from torch.nn.utils import parameters_to_vector as flatten
from transformers import BertConfig, BertModel, BertTokenizer

b, k, folder, _ = 2, 2, tempfile.mkdtemp(), torch.manual_seed(0)
sizes = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
BertModel(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).save_pretrained(folder)
words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]
BertTokenizer({word: number for number, word in enumerate(words)}).save_pretrained(folder)
model = SentenceTransformer(folder, device="cpu")
texts = ["a b", "b c", "c d", "d a"], ["a a c", "b d a", "c b c", "d d a"]
left, right = (normalize(model(model.preprocess(side))["sentence_embedding"], dim=-1) for side in texts)
loss, parameters = cross_entropy(20 * left @ right.T, torch.arange(4)), list(model.parameters())
truth = flatten(torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True))
before, data = flatten(parameters).detach(), Dataset.from_dict({"left": texts[0], "right": texts[1]})
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1, "gradient_accumulation_steps": k}
args = SentenceTransformerTrainingArguments(folder, **options, per_device_train_batch_size=b, use_cpu=True)
SentenceTransformerTrainer(model, args, train_dataset=data, loss=CachedMultipleNegativesRankingLoss(model)).train()
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-4 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-4)
