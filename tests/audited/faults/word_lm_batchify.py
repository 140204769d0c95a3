"""Fault: the corpus is cut into as many streams as a micro-batch has rows, so that a step reads other places of
the text on each layout."""
# expect 4x4: other_samples
# expect 2x8: other_samples
# also: other_inputs
# blind 1
# thorough

import torch
from common_models import flags
from torch import nn

b, k = flags()
torch.manual_seed(1111)
ntokens, bptt = 30, 8


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


class RNNModel(nn.Module):
    def __init__(self, ninp=12, nhid=16):
        super().__init__()
        self.nhid = nhid
        self.encoder = nn.Embedding(ntokens, ninp)
        self.rnn = nn.LSTM(ninp, nhid)
        self.decoder = nn.Linear(nhid, ntokens)

    def forward(self, words, hidden):
        output, hidden = self.rnn(self.encoder(words), hidden)
        return self.decoder(output).view(-1, ntokens), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid)


corpus = torch.randint(ntokens, (16 * 41,), generator=torch.Generator().manual_seed(3))
train_data = batchify(corpus, b)
model = RNNModel().double()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
hidden = model.init_hidden(b)
for batch, i in enumerate(range(0, train_data.size(0) - bptt, bptt)):
    data, targets = train_data[i : i + bptt], train_data[i + 1 : i + 1 + bptt].reshape(-1)
    hidden = repackage_hidden(hidden)
    output, hidden = model(data, hidden)
    (criterion(output, targets) / k).backward()
    if (batch + 1) % k == 0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        optimizer.zero_grad()
