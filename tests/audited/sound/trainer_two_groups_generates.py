"""Exact: a Trainer has two parameter groups, a cosine schedule and max_steps, which end within the second epoch.
A callback generates greedily after every third step; Mistral's loss divides by the number of items of the step."""
# expect 4x4: exact
# expect 2x8: exact
# expect 8x1x2: exact
# expect 4x2x2: exact
# thorough
# blind

import argparse
import tempfile

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

BASE, END, PAD = 8, 8, 9


class TwoRates(Trainer):
    """Embeddings and head learn faster, and neither they nor norms are decayed."""

    def create_optimizer(self, *args, **kwargs):
        if self.optimizer is None:
            body, rest = [], []
            for name, parameter in self.model.named_parameters():
                is_body = "layers" in name and parameter.dim() == 2
                (body if is_body else rest).append(parameter)
            groups = [
                {"params": body, "lr": self.args.learning_rate, "weight_decay": self.args.weight_decay},
                {"params": rest, "lr": 3 * self.args.learning_rate, "weight_decay": 0.0},
            ]
            self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        return self.optimizer


class Samples(TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        if state.global_step % 3 == 0:
            model.eval()
            start = torch.tensor([[1, 2], [7, 0]])
            written = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=8, do_sample=False)
            print(state.global_step, written.tolist())
            model.train()


def octal(n):
    """Counts upwards in octal digits, from a random number on."""
    generator = torch.Generator().manual_seed(15)
    for _ in range(n):
        start, terms = (int(torch.randint(1, high, (), generator=generator)) for high in (60, 8))
        digits = "".join(f"{number:o}" for number in range(start, start + terms))
        yield torch.tensor([*map(int, digits), END])


def collate(rows):
    ids = pad_sequence(rows, batch_first=True, padding_value=PAD)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": ids.masked_fill(ids == PAD, -100)}


parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=16)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
flags = parser.parse_args()
set_seed(6)
config = MistralConfig(
    vocab_size=BASE + 2,
    hidden_size=24,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    max_position_embeddings=40,
    sliding_window=6,
    pad_token_id=PAD,
    bos_token_id=None,
    eos_token_id=END,
)
args = TrainingArguments(
    output_dir=tempfile.mkdtemp(prefix="octal-"),
    max_steps=8,
    learning_rate=1e-3,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    warmup_steps=2,
    max_grad_norm=0.5,
    remove_unused_columns=False,
    save_strategy="no",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    **vars(flags),
)
TwoRates(
    MistralForCausalLM(config), args, train_dataset=list(octal(80)), data_collator=collate, callbacks=[Samples()]
).train()
