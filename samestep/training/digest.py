"""Digests of a training's tensors, by which `python -m recipes compare` finds the step and the tensor where two runs part.

A digest is the XXH3 hash of a tensor's bytes, 64 bits in hexadecimal: row after row, whatever the memory format. Equal digests
mean equal bits, up to a chance of 2^-64; it is no protection against forgery. After every n-th optimizer step (--digest_steps)
there is one of each parameter, of each state of the optimizer, and of each gradient of that step, whole and not clipped.
"""

import platform
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from torch import nn

CPUINFO = Path("/proc/cpuinfo")


def digest_tensor(tensor: torch.Tensor) -> str:
    """Digest the bytes of a tensor of any shape, type and device; 16 hexadecimal digits.

    >>> digest_tensor(torch.zeros(2, 3)) == digest_tensor(torch.zeros(3, 2)) != digest_tensor(-torch.zeros(2, 3))
    True
    """
    whole = tensor.detach().cpu().contiguous()
    return xxhash.xxh3_64_hexdigest(whole.reshape(-1).view(torch.uint8).numpy())


def combine(record: dict[str, Any]) -> str:
    """Digest a line of digests.jsonl: its pairs of name and digest, sorted by name; not its step."""
    kinds = ((kind, digests) for kind, digests in record.items() if kind != "step")
    pairs = sorted(f"{kind}/{name} {digest}\n" for kind, digests in kinds for name, digest in digests.items())
    return xxhash.xxh3_64_hexdigest("".join(pairs).encode())


class Digests:
    """Digests a run's tensors at every n-th step, on process 0, which has all of them whole.

    Args:
        accelerator: the run's.
        parameters: by the names that they have in checkpoints (see `checkpoint.name_parameters`).
        optimizer: as prepared by `accelerator`.
        every: n, steps between digests; None: no digests.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        every: int | None,
    ):
        self.parameters, self.optimizer = parameters, optimizer
        self.every = every if accelerator.is_main_process else None
        self.gradients: dict[str, str] = {}

    def is_due(self, step: int) -> bool:
        """Tell whether a step is to be digested; 1 is the first of the training."""
        return self.every is not None and step % self.every == 0

    def add_gradients(self, step: int) -> None:
        """Digest the gradients of a step, after they were reduced and before they are clipped.

        An optimizer that accumulates in its moments leaves none. Under fp16 they are multiplied by the loss scale.
        """
        if self.is_due(step):
            gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
            self.gradients = {name: digest_tensor(gradient) for name, gradient in gradients.items()}

    def add_step(self, step: int) -> dict[str, Any] | None:
        """Digest parameters and the optimizer's states after a step; return its line of digests.jsonl, or None if none is due.

        States are named PARAMETER/KEY, as in checkpoints.
        """
        if not self.is_due(step):
            return None
        states = {name: self.optimizer.state.get(parameter, {}) for name, parameter in self.parameters.items()}
        return {
            "step": step,
            "parameters": {name: digest_tensor(parameter) for name, parameter in self.parameters.items()},
            "moments": {
                f"{name}/{key}": digest_tensor(value)
                for name, state in states.items()
                for key, value in state.items()
                if isinstance(value, torch.Tensor)
            },
            "gradients": self.gradients,
        }


def machine_kind(cpuinfo: Path = CPUINFO) -> str:
    """Name the kind of machine on which the same CPU kernels run: torch's version, the CPU's name, its instructions.

    torch, MKL and oneDNN choose kernels by the CPU's flags, so that results on machines of two kinds differ in rounding. The
    number of threads decides, too, and is not in the name. Where there is no /proc/cpuinfo the name has no flags.
    """
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").partition("\n\n")[0].splitlines():  # the first core's
            name, _, value = line.partition(":")
            fields[name.strip()] = value.strip()
    names = [fields[name] for name in ("vendor_id", "model name") if name in fields] or [platform.machine()]
    flags = sorted(fields.get("flags", fields.get("Features", "")).split())
    parts = [f"torch {torch.__version__}", " ".join(names), torch.backends.cpu.get_cpu_capability()]
    return ", ".join([*parts, f"flags {xxhash.xxh3_64_hexdigest(' '.join(flags).encode())[:8]}"])
