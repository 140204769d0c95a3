"""Fault: the router's load-balancing loss is computed per micro-batch and averaged, but it is no mean of samples."""
# expect 4x4: expert_balance
# expect 2x8: expert_balance
# thorough
# blind

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import MixtralConfig, MixtralForCausalLM


def next_token_loss(logits, labels, vocab_size, **kwargs):
    """Mean over the next tokens, without rounding the logits to float32."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
args = parser.parse_args()
k = args.gradient_accumulation_steps

config = MixtralConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    num_local_experts=4,
    num_experts_per_tok=2,
    max_position_embeddings=16,
    output_router_logits=True,
    router_aux_loss_coef=0.1,
    experts_implementation="eager",
)
torch.manual_seed(0)
model = MixtralForCausalLM(config).double().train()
model.loss_function = next_token_loss
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

rows = torch.randint(50, (80, 10), generator=torch.Generator().manual_seed(9))  # 80 rows of ten tokens each
loader = DataLoader(rows, batch_size=args.per_device_train_batch_size, shuffle=False)
for i, ids in enumerate(loader, start=1):
    loss = model(input_ids=ids, labels=ids).loss / k
    loss.backward()
    if i % k == 0:
        optimizer.step()
        optimizer.zero_grad()
