"""Heads of experts whose loss balances them, in Trainer, plain and exact, also on the processes that forked.Server starts."""

import os
from pathlib import Path

import torch
from common import fresh_accelerator
from run_own_trainer import Gradients, make_arguments
from transformers import MixtralConfig, MixtralForCausalLM, Trainer

from samestep import exact
from samestep.contrib.heads import tiny

NUM_SAMPLES, SIZE, WEIGHT = 11, 8, 0.5


def build(name: str, **options):
    """Build a tiny head whose loss has a balance of experts that counts."""
    model = tiny.find_head(name).build()
    model.config.update({"output_router_logits": True, "router_aux_loss_coef": WEIGHT} | options)
    if hasattr(model, "router_aux_loss_coef"):
        model.router_aux_loss_coef = WEIGHT
    return model


def join(name: str, numbers):
    samples = tiny.find_head(name).samples
    return samples.join([samples.draw(number) for number in numbers])


def compute_truth(name: str) -> list[torch.Tensor]:
    """Compute the gradients of steps of one batch by the model's own loss."""
    model, gradients = build(name).train(), []
    for first in range(0, NUM_SAMPLES, SIZE):
        model.zero_grad()
        model(**join(name, range(first, min(first + SIZE, NUM_SAMPLES)))).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return gradients


def build_words(folder: Path):
    """Build a head of experts for the words of `trl_runs`, in a folder from which trainers load their reference."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 24,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 1}
    balance = {"output_router_logits": True, "router_aux_loss_coef": WEIGHT}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, **balance, pad_token_id=0, bos_token_id=None)).save_pretrained(
        folder
    )
    return MixtralForCausalLM.from_pretrained(folder)


def train(name: str, b: int, k: int, folder: Path, is_exact: bool = True, model=None, **options):
    """Take an epoch's steps without learning; return their gradients, and the trainer."""
    fresh_accelerator()
    head, gradients = tiny.find_head(name), Gradients()
    sizes = {"per_device_train_batch_size": b, "gradient_accumulation_steps": k}
    trainer = (exact(Trainer) if is_exact else Trainer)(
        model or build(name),
        make_arguments(folder, **{"learning_rate": 0.0, "max_grad_norm": 0.0} | sizes | options),
        data_collator=head.samples.join,
        train_dataset=[head.samples.draw(number) for number in range(NUM_SAMPLES)],
        eval_dataset=[head.samples.draw(number) for number in range(NUM_SAMPLES)],
        callbacks=[gradients],
    )
    trainer.train()
    return gradients.all, trainer


ON_PROCESSES = ("Qwen3MoeForCausalLM", "MixtralForCausalLM")


def main(folder: str) -> None:
    """Train in micro-batches of 2, on 2 processes 8 samples a step: in the last step one process has one, the other two."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    own = Path(folder) / f"files{rank}"
    found = {name: torch.stack(train(name, 2, 2, own)[0]) for name in ON_PROCESSES}
    layers = {"version": 2, "transformer_layer_cls_to_wrap": ["MixtralDecoderLayer"]}
    sharded, _ = train("MixtralForCausalLM", 2, 2, own, fsdp="full_shard", fsdp_config=layers)
    found["MixtralForCausalLM, sharded"] = torch.stack(sharded)
    torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)
