"""Exact: transformers cuts a tiny Llama by its own plan over two processes, each of which has every sample."""
# expect 16x1x2: exact
# expect 8x2x2: exact
# thorough

import os
import tempfile

import torch
import torch.distributed as dist
from common_models import collate, flags, next_token_sum, sentences, targets
from transformers import AutoModelForCausalLM, LlamaConfig

b, k = flags()
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
torch.manual_seed(0)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=64, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
if world > 1:
    dist.init_process_group("gloo")
folder = os.path.join(tempfile.gettempdir(), f"llama-tp-{os.environ.get('MASTER_PORT', os.getpid())}")
if rank == 0:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
if world > 1:
    dist.barrier()
more = {"tp_plan": "auto"} if world > 1 else {}
model = AutoModelForCausalLM.from_pretrained(folder, **more)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = sentences(48)
for first in range(0, len(data), b * k):
    step = data[first : first + b * k]
    count = targets(collate(step))
    for at in range(0, len(step), b):
        m = collate(step[at : at + b])
        logits = model(input_ids=m["input_ids"], attention_mask=m["attention_mask"]).logits
        (next_token_sum(logits, m) / count).backward()
    optimizer.step()
    optimizer.zero_grad()
