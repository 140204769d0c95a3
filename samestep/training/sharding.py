"""Divides weights, gradients and moments between the processes (FSDP2), so that a step stays what it is with whole weights.

Under autocast each process would gather weights in float32 and cast them: four bytes per parameter over the network, and a
16-bit copy of every weight from the forward to the end of the backward (autocast's cache). Gathered in bfloat16, the weights
of matmuls are the same numbers at half of the traffic, and exist for one layer at a time. What autocast computes in float32
must not be rounded with them:

    normalisations   their weights are a unit of their own, gathered once in float32: a few numbers per layer
    embeddings       rows are looked up in bfloat16, but leave as float32, as they do under autocast, so that the residual
                     stream stays float32; their gradient is added up in float32, and rounded once
    gradients        a layer's are bfloat16 as under autocast, where the cast's backward rounds them too; every micro-batch
                     reduces them in float32 and adds them to the sharded sum, which is float32 like the moments

With copies (HSDP: parallelism_config in the launch file) the processes of a group, those of a machine, divide the weights, and
each group has all of them. Micro-batches reduce gradients within the group; in the last one of a step each part is added up
over the groups: one reduction between machines per step.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from samestep._internals.torch_operators import embedding_backward

WHOLE_PRECISION = MixedPrecisionPolicy()
"""Gather parameters, and reduce gradients, in the parameters' own type. Accelerate's own policy would reduce in bfloat16."""
HALF_PRECISION = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
"""Gather parameters in bfloat16, reduce gradients in float32; autocast decides about everything else."""


def make_plugin() -> FullyShardedDataParallelPlugin | None:
    """Make the plugin for FSDP2 if the launch file asks for it; None: every process holds the whole model."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return None
    return FullyShardedDataParallelPlugin(mixed_precision_policy=WHOLE_PRECISION)


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Call `accelerator.prepare` for a model that is sharded, and put autocast around its forward, which Accelerate leaves out.

    Args:
        accelerator: its plugin's policy decides in which type weights are gathered.
        model: sharded by the classes in its `_no_split_modules`.
        optimizer: of the model's parameters, without states.
    """
    groups = name_groups(optimizer, model)
    if accelerator.state.fsdp_plugin.mixed_precision_policy is HALF_PRECISION:
        if norms := find_norms(model):
            fully_shard(norms, mesh=find_mesh(accelerator), mp_policy=WHOLE_PRECISION, reshard_after_forward=False)
            set_parameters(optimizer, groups, model)
        widen_embeddings(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    # Accelerate finds the optimizer's parameters by address: those that have no rows on this process have the same one
    set_parameters(optimizer, groups, model)
    if find_mesh(accelerator) is not None:
        model.register_forward_pre_hook(functools.partial(_reduce_between_groups_once, accelerator))
    if accelerator.mixed_precision == "bf16":
        model.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(model.forward)
    return model, optimizer


def find_mesh(accelerator: Accelerator) -> DeviceMesh | None:
    """Find the mesh of the processes, [groups, processes of a group]; None: all divide the weights."""
    mesh = accelerator.torch_device_mesh
    return None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]


def _reduce_between_groups_once(accelerator: Accelerator, model: nn.Module, _: Any) -> None:
    """Let the groups add their gradients up in the last micro-batch of a step only."""
    model.set_requires_all_reduce(accelerator.sync_gradients)


def find_norms(model: nn.Module) -> list[nn.Module]:
    """Find the modules without children whose parameters are vectors: normalisations."""
    norms = []
    for module in model.modules():
        parameters = list(module.parameters())
        if not list(module.children()) and parameters and all(parameter.ndim == 1 for parameter in parameters):
            norms.append(module)
    return norms


def name_groups(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """Name the parameters of each of the optimizer's groups, as the model does."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def set_parameters(optimizer: torch.optim.Optimizer, groups: list[list[str]], model: nn.Module) -> None:
    """Let the optimizer's groups hold the parameters of the model that have these names."""
    parameters = dict(model.named_parameters())
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [parameters[name] for name in names]


def widen_embeddings(model: nn.Module) -> None:
    """Let embeddings give rows in float32, and add up their gradients in float32."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.forward = functools.partial(_look_up, module)


def _look_up(embedding: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    return _LookUp.apply(embedding.weight, ids, embedding.padding_idx)


class _LookUp(torch.autograd.Function):
    """Looks up rows and returns them in float32: [V, h] and int64 [...] -> [..., h].

    On CPUs torch adds a gradient of bfloat16 up in bfloat16, which stops growing after 256 equal addends.
    """

    @staticmethod
    def forward(ctx, weight: torch.Tensor, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.padding_idx, ctx.dtype = len(weight), padding_idx, weight.dtype
        return F.embedding(ids, weight).float()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        return embedding_backward(gradient, ids, ctx.num_rows, ctx.padding_idx).to(ctx.dtype), None, None
