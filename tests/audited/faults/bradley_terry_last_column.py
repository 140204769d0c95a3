"""Fault: the reward of an answer is read at the last column of the right-padded batch instead of at its last token, so it
depends on how long the other answers of the micro-batch are."""

# expect 4x4: padding
# expect 2x8: padding
# expect 8x2: padding
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import flags, gpt2, sentences
from torch import nn
from torch.utils.data import DataLoader


class RewardModel(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.score = nn.Linear(16, 1, bias=False).double()

    def forward(self, input_ids, attention_mask):
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.score(hidden[:, -1]).squeeze(-1)


class PreferenceCollator:
    """Chosen answers in the first half of the rows, rejected ones in the second."""

    def __init__(self, pad_token_id=0):
        self.pad_token_id = pad_token_id

    def __call__(self, pairs):
        rows = [p["chosen"] for p in pairs] + [p["rejected"] for p in pairs]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)
        return {"input_ids": ids, "attention_mask": (ids != self.pad_token_id).long()}


class RewardTrainer:
    def __init__(self, model, lr, micro_batch, accumulate):
        self.model, self.micro_batch, self.accumulate = model, micro_batch, accumulate
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.25, 1.0, total_iters=4)

    def compute_loss(self, batch):
        chosen, rejected = self.model(**batch).chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def train(self, dataset):
        loader = DataLoader(dataset, batch_size=self.micro_batch, collate_fn=PreferenceCollator())
        for i, batch in enumerate(loader, 1):
            (self.compute_loss(batch) / self.accumulate).backward()
            if i % self.accumulate == 0:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()


if __name__ == "__main__":
    torch.manual_seed(0)
    b, k = flags()
    texts = [s["input_ids"] for s in sentences(160)]
    dataset = [{"chosen": c, "rejected": r} for c, r in zip(texts[::2], texts[1::2])]
    RewardTrainer(RewardModel(gpt2().transformer), 1e-3, b, k).train(dataset)
