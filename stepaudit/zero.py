"""Reads DeepSpeed's ZeRO, which trains a flat part of all parameters on each process, in steps of an optimizer of its own.

What the program's parameters and gradients are in full is asked of DeepSpeed by its documented accessors (its page "Accessing
Parameters, Gradients, and States"): `safe_get_full_grad` before a step, where DeepSpeed clips, and `safe_get_full_fp32_param`,
by which `FlatKeeping` also reads what torch's optimizer is given inside of ZeRO's step. DeepSpeed 0.15 to 0.19.
"""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import deepspeed
import numpy as np
import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stepaudit._internals import find_objects
from stepaudit.keeping import FlatKeeping, Keeping
from stepaudit.libraries import Library
from stepaudit.micro_batch import WRAPPERS
from stepaudit.record import replace

if TYPE_CHECKING:
    from stepaudit.record import Recorder

GROUPS = ("bit16_groups", "fp16_groups", "bf16_groups")
"""Attributes of ZeRO's optimizers, one in each, that list the program's parameters by groups."""
INNER = ("optimizer", "backup_optimizer")
"""Attributes with torch's optimizers, which ZeRO's optimizers step."""


class ZeroKeeping(FlatKeeping):
    """Reads the parameters that one of ZeRO's optimizers trains.

    Args:
        parameters: of the program; with ZeRO-3 they are empty while nothing computes.
        zero: ZeRO's optimizer of them.
        title: see `Keeping`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], zero: Any, title: str):
        super().__init__(
            parameters, [getattr(p, "ds_shape", p.shape) for p in parameters], safe_get_full_fp32_param, title
        )
        self.zero = zero

    def sketch_unclipped(self) -> np.ndarray | None:
        if not getattr(self.zero, "clip_grad", 0.0):
            return None
        scale = float(getattr(self.zero, "loss_scale", 1.0))
        return self.sketch(map(safe_get_full_grad, self.parameters)) / scale


class Zero(Library):
    """Reports each step of ZeRO's optimizers to a recorder.

    Args:
        recorder: whom the steps are reported to.
    """

    def __init__(self, recorder: "Recorder"):
        self.recorder = recorder
        self.keepings: list[ZeroKeeping] = []
        self.titles: dict[int, str] = {}  # of ZeRO's optimizers, by id
        self.inner_ids: dict[int, bool] = {}  # whether torch's optimizers are inside of ZeRO's
        self.loss: float | None = None  # of the present backward

    def is_inner(self, optimizer: torch.optim.Optimizer) -> bool:
        # Also while ZeRO's optimizer is made, which steps torch's once, with a gradient of 0
        if id(optimizer) not in self.inner_ids:
            zeros = find_objects(ZeROOptimizer)
            self.inner_ids[id(optimizer)] = any(self._has_inner(zero, optimizer) for zero in zeros)
        return self.inner_ids[id(optimizer)]

    def _has_inner(self, zero: Any, optimizer: Any) -> bool:
        return any(vars(zero).get(name) is optimizer for name in INNER)

    def find_optimizers(self) -> list[Any]:
        return [zero for zero in find_objects(ZeROOptimizer) if _list_parameters(zero)]

    def list_parameters(self, optimizer: Any) -> list[nn.Parameter] | None:
        if isinstance(optimizer, ZeROOptimizer):
            return _list_parameters(optimizer)
        if not self.is_inner(optimizer):
            return None
        zero = next(zero for zero in find_objects(ZeROOptimizer) if self._has_inner(zero, optimizer))
        return _list_parameters(zero)

    def make_keeping(self, parameters: Sequence[nn.Parameter]) -> Keeping | None:
        ids = {id(p) for p in parameters}
        for zero in self.find_optimizers():
            if ids <= {id(p) for p in _list_parameters(zero)}:
                self.keepings.append(ZeroKeeping(parameters, zero, self.titles.get(id(zero), "")))
                return self.keepings[-1]
        return None

    def find_refusal(self, module: nn.Module) -> str:
        if not isinstance(module, DeepSpeedEngine):
            return ""
        offload = module.zero_offload_optimizer()
        device = getattr(offload, "device", None)
        parts = [f"DeepSpeed {deepspeed.__version__}", f"ZeRO stage {module.zero_optimization_stage()}"]
        parts += ["optimizer offloaded"] * (getattr(device, "value", device) not in (None, "none"))
        self.titles[id(module.optimizer)] = ", ".join(parts)
        return "DeepSpeed computes it, and counts its backwards"

    def scale_loss(self, loss: float | None) -> float | None:
        return loss if self.loss is None else self.loss

    def backward(self, backward: Any, engine: DeepSpeedEngine, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Note the loss that the gradient is of. Versions divide by k and scale in other places: the loss, or its gradient."""
        factor = 1 / engine.gradient_accumulation_steps() if kwargs.get("scale_wrt_gas", True) else 1.0
        self.loss = float(loss.detach()) * factor if loss.numel() == 1 else None
        try:
            return backward(engine, loss, *args, **kwargs)
        finally:
            self.loss = None

    def step(self, step: Any, zero: Any, *args: Any, **kwargs: Any) -> Any:
        """Report a step of ZeRO's optimizer as one of a `torch.optim.Optimizer`."""
        self.recorder.begin_step(zero, (zero,), {})
        value = step(zero, *args, **kwargs)
        self.recorder.end_step(zero, (zero,), {})
        return value

    def begin_part(self, inner: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        for keeping in self.keepings:
            if keeping.is_open and self._has_inner(keeping.zero, inner):
                keeping.begin_part(_list_flat_parts(inner))

    def end_part(self, inner: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        for keeping in self.keepings:
            if keeping.is_open and self._has_inner(keeping.zero, inner):
                keeping.end_part(_list_flat_parts(inner), self.recorder.puts_back)


def watch(recorder: "Recorder") -> Zero:
    """Watch DeepSpeed, which the program has imported, until the recorder ends."""
    zero, stack = Zero(recorder), recorder.stack
    for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3, BF16_Optimizer):
        stack.enter_context(replace(kind, "step", zero.step))
    stack.enter_context(replace(DeepSpeedEngine, "backward", zero.backward))
    for register, hook in (
        (register_optimizer_step_pre_hook, zero.begin_part),
        (register_optimizer_step_post_hook, zero.end_part),
    ):
        stack.callback(register(hook).remove)
    WRAPPERS.append(DeepSpeedEngine)
    stack.callback(functools.partial(WRAPPERS.remove, DeepSpeedEngine))
    return zero


def _list_parameters(zero: Any) -> list[nn.Parameter]:
    """List the program's parameters of one of ZeRO's optimizers; empty while it is made."""
    groups = next((vars(zero)[name] for name in GROUPS if name in vars(zero)), [])
    return [parameter for group in groups for parameter in group]


def _list_flat_parts(inner: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [part for group in inner.param_groups for part in group["params"]]
