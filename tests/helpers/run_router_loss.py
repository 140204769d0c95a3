"""Mixtures of experts, a step of sequences, its cuts, and the router losses of one large batch by plain PyTorch."""

import itertools
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.nn.parallel import DistributedDataParallel

from samestep.contrib.whole_batch.router_loss import RouterLoss
from samestep.contrib.whole_batch.routers import BIAS
from samestep.models.causal_lm import CausalLmSums
from samestep.step.noise import noise_by_sample

VOCAB, WEIGHT = 60, 0.3
BASE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
BASE |= {"num_key_value_heads": 2, "intermediate_size": 48, "initializer_range": 0.2, "max_position_embeddings": 64}
BASE |= {"bos_token_id": 1, "eos_token_id": 2}
LOCAL = BASE | {"num_local_experts": 4, "num_experts_per_tok": 2}
OWN = BASE | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPS = BASE | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1}
GROUPS |= {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
CONFIGS = {
    "Mixtral": LOCAL,
    "DeepseekV3": GROUPS | LATENT | {"num_key_value_heads": 4},
    "Qwen2Moe": OWN | {"shared_expert_intermediate_size": 24},
    "Qwen3Moe": OWN | {"head_dim": 8},
    "Olmoe": OWN,
    "GptOss": LOCAL | {"head_dim": 8},
    "Glm4Moe": GROUPS | {"head_dim": 8},
    "GraniteMoe": LOCAL,
    "Qwen3Next": OWN
    | LINEAR
    | {"head_dim": 8, "shared_expert_intermediate_size": 24, "layer_types": ["linear_attention", "full_attention"]},
}
"""Architecture -> its configuration, the second one with biases that choose experts."""
SIGMOIDS = ("DeepseekV3", "Glm4Moe")
"""Architectures whose routers weight experts by sigmoids; they have biases to choose by."""
FAST = ("Mixtral", "DeepseekV3")
KINDS = ("global", "sequence", "z")
CUTS = {1: [[[7]], [[3, 4]], [[1] * 7]], 2: [[[2, 2], [3]], [[4], [3]]], 3: [[[3, 1], [3], [0]]]}
"""Processes -> cuts: of each process the sequences of its micro-batches."""
LENGTHS = (5, 13, 7, 9, 6, 4, 11)


def build(name: str, dtype: torch.dtype = torch.float32, dropout: float = 0.0) -> transformers.PreTrainedModel:
    """Build an architecture with random weights, and biases that are not 0."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name], attention_dropout=dropout)
    model = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="eager").to(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(BIAS):
            buffer.copy_(torch.randn(buffer.shape) / 20)
    return model.train()


def make_sequences() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make sequences, and which of their tokens are trained; of the third one none is."""
    sequences, generator = [], torch.Generator().manual_seed(0)
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        is_trained = torch.arange(length) >= (length if number == 2 else 1 + number % 3)
        sequences.append((ids, is_trained))
    return sequences


def make_micro_batch(sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict:
    """Lay sequences end to end, as `samestep.data.conversations` does; none are one token without a target."""
    ends = list(itertools.accumulate((len(ids) for ids, _ in sequences), initial=0))
    places = [start + torch.where(mask)[0] for start, (_, mask) in zip(ends, sequences, strict=False)]
    tokens = torch.cat([ids for ids, _ in sequences] or [torch.tensor([1])])
    index = torch.cat([*places, torch.zeros(0, dtype=torch.int64)])
    return {
        "input_ids": tokens[None],
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in sequences] or [torch.tensor([0])])[None],
        "ends": torch.tensor(ends, dtype=torch.int32),
        "labels": tokens[index],
        "label_index": index - 1,
        "label_sequence": torch.cat([torch.full_like(place, number) for number, place in enumerate(places)] or [index]),
    }


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def compute_truth(name: str, kind: str, dtype: torch.dtype = torch.float32) -> dict:
    """Compute the gradient of the step in one padded batch, and the loads, with formulas and hooks of its own."""
    model, seen, sequences = build(name, dtype), [], make_sequences()
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_hook(lambda module, inputs, output: seen.append(output))
    size = max(LENGTHS)
    ids = torch.stack([F.pad(ids, (0, size - len(ids))) for ids, _ in sequences])
    mask = torch.stack([F.pad(torch.ones(length), (0, size - length)) for length in LENGTHS]).long()
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    rows, labels, owners = [], [], []  # in the flattened batch: the token before each trained one
    for number, (tokens, is_trained) in enumerate(sequences):
        for place in torch.where(is_trained)[0].tolist():
            rows.append(number * size + place - 1), labels.append(tokens[place]), owners.append(number)
    rows, owners, n = torch.tensor(rows), torch.tensor(owners), len(rows)
    loss = F.cross_entropy(logits.flatten(0, 1)[rows], torch.stack(labels), reduction="sum") / n
    terms, loads = [], []
    for router_logits, _, indices in seen:
        z = router_logits[rows]
        scores = z.sigmoid() / z.sigmoid().sum(1, keepdim=True) if name in SIGMOIDS else z.softmax(1)
        chosen = F.one_hot(indices[rows], z.shape[1]).sum(1)
        loads.append(chosen.sum(0))
        chosen = chosen.to(z)
        if kind == "global":
            terms.append(z.shape[1] * (chosen.mean(0) * scores.mean(0)).sum())
        elif kind == "sequence":
            parts = []
            for owner in owners.unique():
                own = owners == owner
                f = chosen[own].sum(0) * z.shape[1] / (indices.shape[1] * own.sum())
                parts.append((f * scores[own].mean(0)).sum())
            terms.append(torch.stack(parts).mean())
        elif kind == "z":
            terms.append(z.exp().sum(1).log().square().mean())
    if terms:
        loss = loss + WEIGHT * torch.stack(terms).mean()
    loss.backward()
    value = torch.stack(terms).mean().item() if terms else 0.0
    return {"gradient": gradient(model), "loads": loads, "value": value}


class Replay(list):
    """Micro-batches, each with the noise of its samples."""

    def __init__(self, parts, noise):
        super().__init__(make_micro_batch([sequences for _, sequences in part]) for part in parts)
        self.samples, self.noise = [[(0, number) for number, _ in part] for part in parts], noise

    def __iter__(self):
        for micro_batch, samples in zip(super().__iter__(), self.samples, strict=True):
            self.noise.set_samples(samples)
            yield micro_batch


def take_step(
    name: str,
    kind: str,
    cut: list[list[int]],
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    dropout: float = 0.0,
    recomputes: bool = False,
    loss_of=RouterLoss,
) -> dict:
    """Compute the step's gradient in micro-batches, on all processes together; bias moves after it."""
    sums_model = CausalLmSums(build(name, dtype, dropout)).train()
    noise = noise_by_sample(sums_model, 0)
    if recomputes:
        sums_model.recompute_activations()
    numbered = list(enumerate(make_sequences()))
    ends = list(itertools.accumulate(itertools.chain(*cut), initial=0))
    first = sum(map(len, cut[:rank]))
    parts = [numbered[ends[first + part] : ends[first + part + 1]] for part in range(len(cut[rank]))]
    micro_batches, n = Replay(parts, noise), sum(int(mask.sum()) for _, (_, mask) in numbered)
    router_kind, z_weight = (None, WEIGHT) if kind == "z" else (kind, 0.0)
    router_loss = loss_of(sums_model, router_kind, None if kind == "z" else WEIGHT, z_weight)
    model = DistributedDataParallel(sums_model, broadcast_buffers=False) if len(cut) > 1 else sums_model
    router_loss.prepare(micro_batches, None)
    for place, micro_batch in enumerate(micro_batches):
        if len(cut) > 1:
            model.require_backward_grad_sync = place + 1 == len(parts)
        sums, _ = model(**micro_batch)
        ((sums.sum() / n + router_loss.correction()) * len(cut)).backward()
    router_loss.finish()
    router_loss.move_biases(torch.tensor(True))
    biases = [buffer.clone() for name, buffer in sums_model.named_buffers() if name.endswith(BIAS)]
    return {"gradient": gradient(sums_model), "noted": router_loss.noted, "biases": biases, "model": sums_model}


def run_out(rank: int, size: int, failure: type[Exception]) -> str:
    """Let the last process fail while loads are counted; name the error that this process raises."""

    def fail(module, inputs):
        raise failure("CUDA out of memory.")

    model = CausalLmSums(build("Mixtral")).train()
    loss = RouterLoss(model, "global", WEIGHT)
    micro_batches = [make_micro_batch(make_sequences()[:2])]
    loss.prepare(micro_batches, None)  # which looks at the routers, too
    if rank == size - 1:
        next(iter(loss.routers.modules)).register_forward_pre_hook(fail)
    try:
        loss.prepare(micro_batches, None)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def list_cases(names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, kind) for name in names for kind in (*KINDS, *(["bias"] if name in SIGMOIDS else []))]


def main(folder: str, names: str = ",".join(FAST)) -> None:
    dist.init_process_group("gloo")
    rank, size, results = dist.get_rank(), dist.get_world_size(), {}
    for name, kind in list_cases(tuple(names.split(","))):
        for number, cut in enumerate(CUTS[size]):
            step = take_step(name, kind, cut, rank)
            loads, values = step["noted"].loads, step["noted"].values
            results[name, kind, number] = {"loads": loads, "values": values} | {
                key: step[key] for key in ("gradient", "biases")
            }
    results["failures"] = [run_out(rank, size, failure) for failure in (torch.OutOfMemoryError, KeyError)]
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    os._exit(0)
