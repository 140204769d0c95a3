"""Trains a small classifier with DeepSpeed, as its documentation has it: initialize, engine.backward, engine.step.

With --weights FILE the weights at the end are saved there, in full.
"""

import argparse
import os
import sys

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

NUM_SAMPLES, NUM_INPUTS, NUM_CLASSES = 64, 12, 5
# One process needs no launcher; a port of 0 is any that is free.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--overlap_comm", action="store_true", help="as is ZeRO-3's default")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--weights")
    return parser.parse_args()


def train(arguments: argparse.Namespace) -> None:
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, for minutes
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    b, k = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_SAMPLES, NUM_INPUTS, generator=generator)
    targets = torch.randint(NUM_CLASSES, (NUM_SAMPLES,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(NUM_INPUTS, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES))
    zero = {"stage": arguments.stage, "overlap_comm": arguments.overlap_comm}
    if arguments.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": b,
        "gradient_accumulation_steps": k,
        "gradient_clipping": arguments.clip,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**6,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    num_processes, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for number in range(rank, NUM_SAMPLES // b, num_processes):
        rows = slice(number * b, (number + 1) * b)
        loss = F.cross_entropy(engine(inputs[rows]), targets[rows])
        engine.backward(loss)
        engine.step()
    if arguments.weights:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            weights = torch.cat([p.detach().flatten().clone() for p in engine.module.parameters()])
        torch.save(weights, f"{arguments.weights}-{rank}")


def main(folder: str, *words: str) -> None:
    """Train without any audit, and end the process: what `forked.Server` calls."""
    sys.argv = ["deepspeed_zero.py", *words]
    train(parse())
    sys.stdout.flush()
    os._exit(0)  # process groups are not destroyed


if __name__ == "__main__":
    train(parse())
