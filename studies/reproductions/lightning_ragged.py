"""Lightning's automatic accumulation on texts of different lengths: micro-batches weigh alike, whatever tokens they hold."""

import sys

import lightning
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector as flatten
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def training_step(self, batch, _):
        return cross_entropy(self.net(batch[:, :-1].clamp(0)).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


torch.manual_seed(0)
b, k, model, texts = 2, 2, Module(), [torch.randint(50, (length,)) for length in (2, 3, 12, 11)]
model.net = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50)).double()
logits, labels = torch.cat([model.net(text[:-1]) for text in texts]), torch.cat([text[1:] for text in texts])
truth = flatten(torch.autograd.grad(cross_entropy(logits, labels), model.parameters()))
before = flatten(model.parameters()).detach()
trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=k, accelerator="cpu", barebones=True)
trainer.fit(model, DataLoader(texts, b, collate_fn=lambda texts: torch.nn.utils.rnn.pad_sequence(texts, True, -100)))
error = ((before - flatten(model.parameters()).detach() - truth).norm() / truth.norm()).item()  # SGD with rate 1
print("wrong:" if error > 1e-5 else "right:", f"gradient with an error of {error:.2g}")
sys.exit(error > 1e-5)
