"""REINFORCE on contextual bandits, with a learned baseline and whitened advantages."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.actions, self.value = nn.Linear(3, 16), nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, states):
        hidden = torch.tanh(self.body(states))
        return self.actions(hidden).log_softmax(-1), self.value(hidden).squeeze(-1)


def collate(samples):
    return {"states": torch.stack(samples), "uniform": torch.rand(len(samples))}


def play(policy, batch):
    log_probs, values = policy(batch["states"])
    actions = (log_probs.exp().cumsum(-1) < batch["uniform"][:, None]).sum(-1).clamp(max=3)
    rewards = torch.sin(3 * batch["states"].sum(-1) + actions)
    return log_probs.gather(-1, actions[:, None]).squeeze(-1), values, rewards


def policy_loss(log_probs, values, rewards):
    advantages = rewards - values.detach()
    advantages = (advantages - advantages.mean()) / (advantages.std(unbiased=False) + 1e-8)
    return F.mse_loss(values, rewards) / 2 - (advantages * log_probs).mean()


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=4)
parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
args = parser.parse_args()
b, k = args.per_device_train_batch_size, args.gradient_accumulation_steps
states = [torch.tensor([number % 7, number % 5, number % 3]) / 4 - 0.5 for number in range(77)]

accelerator = Accelerator(gradient_accumulation_steps=k)
torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
loader = DataLoader(states, batch_size=b, collate_fn=collate, shuffle=True)
policy, optimizer, loader = accelerator.prepare(policy, optimizer, loader)
for epoch in range(2):
    for batch in loader:
        with accelerator.accumulate(policy):
            loss = policy_loss(*play(policy, batch))
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
accelerator.end_training()
