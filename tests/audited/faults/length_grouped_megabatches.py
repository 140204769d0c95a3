"""Fault: the sampler that groups samples of like length shuffles, and sorts inside of mega-batches whose size comes from the
micro-batch size: other samples meet in a step when the batch is cut another way."""

# expect 4x4: other_samples
# expect 2x8: other_samples
# blind 7
# thorough
import torch
from common_models import collate, flags, llama, next_token_sum, sentences, targets
from torch import nn
from torch.utils.data import DataLoader, Sampler


class LengthGroupedSampler(Sampler):
    def __init__(self, lengths, batch_size, seed=42):
        self.lengths, self.batch_size, self.seed, self.epoch = lengths, batch_size, seed, 0
        self.mega_batch_mult = min(max(len(lengths) // (batch_size * 4), 1), 50)

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = torch.randperm(len(self.lengths), generator=g).tolist()
        size = self.mega_batch_mult * self.batch_size
        mega = [indices[i : i + size] for i in range(0, len(indices), size)]
        mega = [sorted(m, key=lambda i: self.lengths[i], reverse=True) for m in mega]
        longest = max(range(len(mega)), key=lambda i: self.lengths[mega[i][0]])
        mega[0][0], mega[longest][0] = mega[longest][0], mega[0][0]  # out of memory at once, if at all
        return iter([i for m in mega for i in m])


class SFTTrainer:
    def __init__(self, model, data, micro_batch, accumulate):
        self.model, self.accumulate = model, accumulate
        self.sampler = LengthGroupedSampler([len(s["input_ids"]) for s in data], micro_batch)
        self.loader = DataLoader(data, batch_size=micro_batch, sampler=self.sampler, collate_fn=collate)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def step(self, window):
        total = sum(targets(batch) for batch in window)
        for batch in window:
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            (next_token_sum(logits, batch) / total).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            window = []
            for batch in self.loader:
                window.append(batch)
                if len(window) == self.accumulate:
                    self.step(window)
                    window = []


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    SFTTrainer(llama(), sentences(96), b, k).train(epochs=1)
