"""Sound: the samples of a step are drawn first, then sorted by length and dealt out to processes and micro-batches, so that little
is padded; the set of a step is the same in every layout, and the loss is over the tokens of all."""

# expect 4x4: exact
# expect 1x16: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# blind 7
# thorough
import os

import torch
import torch.distributed as dist
from common_models import collate, flags, llama, next_token_sum, sentences, targets
from torch import nn
from torch.utils.data import DataLoader, Sampler


class SortedWindowBatchSampler(Sampler):
    def __init__(self, lengths, micro_batch, accumulate, rank, world, seed=0):
        self.lengths, self.micro_batch, self.rank, self.world, self.seed = lengths, micro_batch, rank, world, seed
        self.window = micro_batch * accumulate * world

    def __len__(self):
        return len(self.lengths) // self.window * self.window // (self.micro_batch * self.world)

    def __iter__(self):
        order = torch.randperm(len(self.lengths), generator=torch.Generator().manual_seed(self.seed)).tolist()
        for start in range(0, len(order) - self.window + 1, self.window):
            window = sorted(order[start : start + self.window], key=self.lengths.__getitem__)
            chunks = [window[i : i + self.micro_batch] for i in range(0, self.window, self.micro_batch)]
            for turn, i in enumerate(range(0, len(chunks), self.world)):
                group = chunks[i : i + self.world]  # neighbours in length: the processes wait little for each other
                yield group[self.rank if turn % 2 == 0 else self.world - 1 - self.rank]


def main():
    b, k = flags()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = llama()
    data = sentences(85)
    sampler = SortedWindowBatchSampler([len(s["input_ids"]) for s in data], b, k, rank, world)
    loader = iter(DataLoader(data, batch_sampler=sampler, collate_fn=collate))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    for _ in range(len(sampler) // k):
        window = [next(loader) for _ in range(k)]
        tokens = torch.tensor(sum(targets(batch) for batch in window))
        if world > 1:
            dist.all_reduce(tokens)
        for batch in window:
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            (next_token_sum(out.logits, batch) / tokens).backward()
        if world > 1:
            handles = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for handle in handles:
                handle.wait()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
