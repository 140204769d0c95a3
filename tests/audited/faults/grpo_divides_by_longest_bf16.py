"""Fault: the policy loss is divided by the number of completions times the longest completion of the micro-batch, padding counted, instead of a constant length."""
# expect 4x4: counts
# expect 2x8: counts
# also: padding, factor, mean_of_means
# blind 5
# thorough

import os

import torch
from common_models import flags
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

FULL = os.environ.get("FULL") == "1"
dtype = torch.float64 if FULL else torch.float32
GENERATIONS = 4


def rollouts(prompts=20):
    """What the sampler returned: groups of completions, advantages within the group."""
    g = torch.Generator().manual_seed(58)
    for _ in range(prompts):
        prompt = torch.randint(4, 40, (6,), generator=g)
        rewards = torch.rand(GENERATIONS, generator=g)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for advantage in advantages:
            length = int(torch.randint(21, 25, (), generator=g))
            yield {"prompt": prompt, "completion": torch.randint(4, 40, (length,), generator=g), "advantage": advantage}


def data_collator(features):
    completions = [f["completion"] for f in features]
    return {
        "prompt_ids": torch.stack([f["prompt"] for f in features]),
        "completion_ids": pad_sequence(completions, batch_first=True),
        "completion_mask": pad_sequence([torch.ones(len(c)) for c in completions], batch_first=True).to(dtype),
        "advantages": torch.stack([f["advantage"] for f in features]).to(dtype),
    }


class Policy(nn.Module):
    def __init__(self, vocab=40, d=32):
        super().__init__()
        self.wte, self.rnn, self.lm_head = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True), nn.Linear(d, vocab)

    def forward(self, input_ids):
        return self.lm_head(self.rnn(self.wte(input_ids))[0])


class GRPOTrainer:
    def __init__(self, model, optimizer, epsilon=0.2):
        self.model, self.optimizer, self.epsilon = model, optimizer, epsilon

    def compute_loss(self, inputs):
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=not FULL):
            logits = self.model(ids)[:, inputs["prompt_ids"].shape[1] - 1 : -1]
        logps = logits.to(dtype).log_softmax(-1).gather(-1, inputs["completion_ids"][..., None]).squeeze(-1)
        ratio = torch.exp(logps - logps.detach())  # on policy
        advantages, mask = inputs["advantages"][:, None], inputs["completion_mask"]
        per_token = -torch.min(ratio * advantages, ratio.clamp(1 - self.epsilon, 1 + self.epsilon) * advantages)
        return (per_token * mask).sum() / mask.numel()

    def train(self, loader, accumulation):
        for step, inputs in enumerate(loader, 1):
            (self.compute_loss(inputs) / accumulation).backward()
            if step % accumulation == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()


b, k = flags()
torch.manual_seed(0)
model = Policy().to(dtype)
loader = DataLoader(list(rollouts()), batch_size=b, collate_fn=data_collator)
GRPOTrainer(model, torch.optim.SGD(model.parameters(), lr=0.2)).train(loader, k)
