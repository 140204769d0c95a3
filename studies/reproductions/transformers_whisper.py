"""WhisperForConditionalGeneration in transformers' Trainer: k micro-batches give k times the gradient of one batch."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from transformers import Trainer, TrainingArguments, WhisperConfig, WhisperForConditionalGeneration

b, k = 2, 4
torch.manual_seed(0)
sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "max_source_positions": 10}
ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
config = WhisperConfig(**sizes, **ids, vocab_size=50, max_target_positions=10)
model = WhisperForConditionalGeneration(config).double()
parameters = [p for p in model.parameters() if p.requires_grad]
data = [{"input_features": torch.randn(8, 20).double(), "labels": torch.randint(4, 50, (5,))} for _ in range(8)]
batch = torch.utils.data.default_collate(data)
loss = cross_entropy(model(**batch).logits.flatten(0, 1), batch["labels"].flatten())
truth = flatten(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
before = flatten(parameters).detach()
options = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "use_cpu": True}
options |= {"per_device_train_batch_size": b, "gradient_accumulation_steps": k, "max_steps": 1, "save_strategy": "no"}
Trainer(model, TrainingArguments(".", **options), train_dataset=data).train()
taken = before - flatten(parameters).detach()  # SGD with rate 1 took off the gradient
error = ((taken - truth).norm() / truth.norm()).item()
print("wrong:" if error > 1e-5 else "right:", f"gradient {taken.norm() / truth.norm():.2f} times, error {error:.2g}")
sys.exit(error > 1e-5)
