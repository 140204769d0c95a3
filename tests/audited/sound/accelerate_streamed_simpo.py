"""Sound: SimPO on pairs of a stream that accelerate splits between the processes; every pair has its own length-normalised margin, so
the mean over pairs is exact; clipping only on complete gradients, a schedule that is not prepared and ticks once per update."""

# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from accelerate import Accelerator, DataLoaderConfiguration
from common_models import collate, flags, gpt2, sentences
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class PairStream(IterableDataset):
    def __init__(self, samples, buffer=24, seed=0):
        self.samples, self.buffer, self.seed = samples, buffer, seed

    def __iter__(self):
        g, held = torch.Generator().manual_seed(self.seed), []
        for pair in zip(self.samples[::2], self.samples[1::2]):
            held.append(pair)
            if len(held) == self.buffer:
                yield held.pop(int(torch.randint(self.buffer, (), generator=g)))
        yield from held


def collate_pairs(pairs):
    return collate([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs])


class SimPO(nn.Module):
    def __init__(self, policy, beta=2.0, gamma=0.5):
        super().__init__()
        self.policy, self.beta, self.gamma = policy, beta, gamma

    def forward(self, input_ids, attention_mask, labels):
        logits = self.policy(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1]
        labels = labels[:, 1:]
        token = -F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
        reward = self.beta * token.sum(1) / (labels != -100).sum(1)
        chosen, rejected = reward.chunk(2)
        return -F.logsigmoid(chosen - rejected - self.gamma).mean()


def main():
    b, k = flags()
    config = DataLoaderConfiguration(dispatch_batches=False)
    accelerator = Accelerator(gradient_accumulation_steps=k, dataloader_config=config)
    torch.manual_seed(0)
    model = SimPO(gpt2())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + 0.3 * t))
    loader = DataLoader(PairStream(sentences(160)), batch_size=b, collate_fn=collate_pairs)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            schedule.step()


if __name__ == "__main__":
    main()
