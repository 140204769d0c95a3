"""Fault: 72 preference pairs: the last window has half as many micro-batches as the others, but is divided by k
as well."""
# expect 4x4: tail
# expect 2x8: tail
# blind 1
# thorough

import copy

import torch
import torch.nn.functional as F
from common_models import VOCAB, flags, gpt2
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

b, k = flags()
torch.manual_seed(0)
beta = 0.5


def preferences(n):
    g = torch.Generator().manual_seed(11)
    pairs = []
    for _ in range(n):
        prompt = torch.randint(3, VOCAB, (4,), generator=g)
        answers = [torch.randint(3, VOCAB, (int(torch.randint(2, 9, (), generator=g)),), generator=g) for _ in range(2)]
        pairs.append([(torch.cat([prompt, a]), torch.cat([torch.zeros(4), torch.ones(len(a))])) for a in answers])
    return pairs


def collate(pairs):
    rows = [chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs]
    ids = pad_sequence([r[0] for r in rows], batch_first=True)
    return ids, pad_sequence([r[1] for r in rows], batch_first=True).double()


def sequence_logps(model, ids, completion):
    logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
    return (logp.gather(-1, ids[:, 1:, None]).squeeze(-1) * completion[:, 1:]).sum(-1)


policy = gpt2()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
loader = DataLoader(preferences(72), batch_size=b, collate_fn=collate)
for i, (ids, completion) in enumerate(loader):
    with torch.no_grad():
        ref_chosen, ref_rejected = sequence_logps(reference, ids, completion).chunk(2)
    chosen, rejected = sequence_logps(policy, ids, completion).chunk(2)
    loss = -F.logsigmoid(beta * ((chosen - rejected) - (ref_chosen - ref_rejected))).mean()
    (loss / k).backward()
    if (i + 1) % k == 0 or i == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
