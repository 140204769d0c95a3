"""Sound: distillation with a fused head: an autograd function goes through the tokens in chunks, computes the loss and its gradients
in the forward, and scales them in the backward; losses are sums, divided by the targets of the window."""

# expect 4x4: exact
# expect 2x8: exact
# blind 7
# thorough
import torch
import torch.nn.functional as F
from common_models import VOCAB, collate, flags, sentences
from torch import nn
from torch.utils.data import DataLoader


class FusedLinearDistillation(torch.autograd.Function):
    """Sum over targets of (1 - a) * CE(student, label) + a * KL(teacher || student); no logits are kept."""

    @staticmethod
    def forward(ctx, hidden, weight, teacher_hidden, teacher_weight, labels, a, chunk=13):
        rows = (labels != -100).nonzero().squeeze(1)
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        total = hidden.new_zeros(())
        for part in rows.split(chunk):
            h, y = hidden[part], labels[part]
            logp = F.log_softmax(h @ weight.T, -1)
            teacher = F.log_softmax(teacher_hidden[part] @ teacher_weight.T, -1)
            total += (1 - a) * F.nll_loss(logp, y, reduction="sum")
            total += a * F.kl_div(logp, teacher, reduction="sum", log_target=True)
            grad = logp.exp() - (1 - a) * F.one_hot(y, len(weight)) - a * teacher.exp()
            grad_hidden[part] = grad @ weight
            grad_weight += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_output * grad_hidden, grad_output * grad_weight, None, None, None, None, None


class Backbone(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(VOCAB, dim), nn.GRU(dim, dim, batch_first=True)
        self.head = nn.Parameter(torch.randn(VOCAB, dim) / dim**0.5)

    def forward(self, ids):
        return self.rnn(self.embed(ids))[0]


def main():
    torch.manual_seed(0)
    b, k = flags()
    teacher, student = Backbone(24).double().requires_grad_(False), Backbone(12).double()
    optimizer = torch.optim.Adamax(student.parameters(), lr=1e-2)
    window = []
    for batch in DataLoader(sentences(80), batch_size=b, collate_fn=collate):
        window.append(batch)
        if len(window) < k:
            continue
        labels = [F.pad(m["labels"][:, 1:], (0, 1), value=-100) for m in window]
        count = sum(int((y != -100).sum()) for y in labels)
        for m, y in zip(window, labels):
            h, t = (net(m["input_ids"]).flatten(0, 1) for net in (student, teacher))
            loss = FusedLinearDistillation.apply(h, student.head, t, teacher.head, y.flatten(), 0.7)
            (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        window.clear()


if __name__ == "__main__":
    main()
