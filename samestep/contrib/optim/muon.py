"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for hidden matrices, AdamW for all other parameters.

Muon replaces the momentum of a matrix by the nearest matrix with orthogonal rows or columns, found by five steps of a
Newton-Schulz iteration. Usual programs iterate in bfloat16. There the rounding of a gradient, 1e-7 from one cut of a step to
another, becomes 1e-2 of the update, so that every cut takes another step (docs/optimizers.md). Here the iteration is in
float32, or wider where weights are, once per step, on the whole gradient.

Its products cost more than the rest of an update, so processes share them: a matrix is computed whole by one process and then
broadcast. Which process computes it decides nothing about the result.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from samestep.errors import UsageError
from samestep.recipe.scaling import Hyperparameters
from samestep.step.optim import group_parameters

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b, c of a step X -> a X + (b A + c A^2) X, A = X X^T (Jordan et al. 2024), which take singular values to 0.7 to 1.2."""
NUM_ITERATIONS = 5
SMALLEST_NORM = 1e-7
"""A gradient of zeros is divided by this, as in torch.optim.Muon."""
RMS = 0.2
"""Root mean square of an update, about AdamW's: the matrix is multiplied by 0.2 sqrt(max(rows, columns)), so that learning rate
and weight decay are of AdamW's size for all shapes (Liu et al. 2025, 2502.16982; match_rms_adamw of torch.optim.Muon)."""


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Take the singular values of a matrix [rows, columns] to about 1, in float32 or wider; 0 stays 0.

    >>> u, v = torch.linalg.qr(torch.randn(4, 4))[0], torch.linalg.qr(torch.randn(6, 4))[0]
    >>> values = torch.linalg.svdvals(orthogonalize(u @ torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.1])) @ v.T))
    >>> bool(values.min() > 0.6), bool(values.max() < 1.3)
    (True, True)
    """
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / torch.linalg.vector_norm(x).clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    with _full_precision():
        for _ in range(NUM_ITERATIONS):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).contiguous()


class Muon(torch.optim.Optimizer):
    """Implements Muon for the groups that have a `momentum`, and AdamW for the others.

    With the step's gradient G, momentum u and a matrix W of n rows and m columns

        B = B + (1 - u) (G - B);     U = G + u (B - G) (Nesterov's);     W = W (1 - lr decay) - lr 0.2 sqrt(max(n, m)) NS(U)

    Args:
        params: groups of parameters; those with a `momentum` hold matrices.
        lr, betas, eps, weight_decay: as of torch.optim.AdamW; lr and weight_decay are Muon's, too.
        momentum: u; None: the group is AdamW's.

    >>> weight, gain = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.ones(2))
    >>> optimizer = Muon([{"params": [weight], "momentum": 0.95}, {"params": [gain]}], lr=0.1)
    >>> (weight.sum() + gain.sum()).backward()
    >>> optimizer.step()
    >>> sorted(optimizer.state[weight]), sorted(optimizer.state[gain])
    (['momentum_buffer'], ['exp_avg', 'exp_avg_sq', 'step'])
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float | None = None,
    ):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum}
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take a step, unless `found_inf` says that the gradient is not finite, for which the host waits.

        Called by all processes.
        """
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        matrices = []
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["momentum"] is None:
                self._step_adamw(group, parameters)
            else:
                matrices += [(group, parameter) for parameter in parameters]
        # From the largest to the smallest, so that the processes have about the same to do in every round
        matrices.sort(key=lambda pair: -pair[1].numel() * min(pair[1].shape))
        rank, num_processes = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        sent: Round | None = None
        for first in range(0, len(matrices), num_processes):
            updates = self._orthogonalize(matrices[first : first + num_processes], rank, num_processes)
            if sent is not None:  # while the next matrices were computed
                _apply(sent)
            sent = updates
        if sent is not None:
            _apply(sent)

    def _orthogonalize(
        self, matrices: list[tuple[dict[str, Any], torch.Tensor]], rank: int, num_processes: int
    ) -> "Round":
        """Orthogonalize as many matrices as there are processes, or fewer, each by one process, which begins to send it."""
        updates = []
        for owner, (group, parameter) in enumerate(matrices):
            update = self._add_momentum(group, parameter)
            whole = update.full_tensor() if isinstance(update, DTensor) else update
            updates.append(orthogonalize(whole) if owner == rank else _make_room(whole))
        is_shared = num_processes > 1
        works = [dist.broadcast(x, owner, async_op=True) for owner, x in enumerate(updates)] if is_shared else []
        return Round(matrices, updates, works)

    def _add_momentum(self, group: dict[str, Any], parameter: torch.Tensor) -> torch.Tensor:
        """Add a gradient to the momentum, and return what is orthogonalized."""
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum_buffer"], momentum)

    def _step_adamw(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        if not parameters:
            return
        for parameter in parameters:
            if not self.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.state[parameter] |= {"step": step} | moments
        lists = [[self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq", "step")]
        (beta1, beta2), options = group["betas"], {name: group[name] for name in ("lr", "eps", "weight_decay")}
        means, squares, steps = lists
        options |= {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False, "fused": True}
        adamw(parameters, [p.grad for p in parameters], means, squares, [], steps, **options)


class Round(NamedTuple):
    """Holds matrices that are updated at the same time.

    Attributes:
        matrices: groups and parameters.
        updates: orthogonalized, whole; those of other processes are on their way.
        works: their transfers.
    """

    matrices: list[tuple[dict[str, Any], torch.Tensor]]
    updates: list[torch.Tensor]
    works: list[dist.Work]


def muon(
    model: nn.Module,
    hyperparameters: Hyperparameters,
    weight_decay: float,
    matrix_learning_rate: float,
    matrix_momentum: float,
    matrix_weight_decay: float,
) -> Muon:
    """Make Muon of the matrices in a model's layers, and AdamW of its other parameters.

    Args:
        model: its layers are the modules of the classes in `_no_split_modules`; embeddings in them are no such matrices.
        hyperparameters, weight_decay: of AdamW.
        matrix_learning_rate, matrix_momentum, matrix_weight_decay: of Muon.

    Raises:
        UsageError: the layers have no matrices.
    """
    ids = {id(parameter) for parameter in find_matrices(model)}
    if not ids:
        raise UsageError(
            f"optimizer is muon, but {type(model).__name__} has no layers with matrices: set optimizer to adamw"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hidden = {"params": [p for p in trained if id(p) in ids], "weight_decay": matrix_weight_decay}
    hidden |= {"momentum": matrix_momentum, "lr_scale": matrix_learning_rate / hyperparameters.learning_rate}
    others = group_parameters(nn.ParameterList(p for p in trained if id(p) not in ids), weight_decay)
    betas = (hyperparameters.adam_beta1, hyperparameters.adam_beta2)
    return Muon([hidden, *others], hyperparameters.learning_rate, betas, hyperparameters.adam_epsilon)


def find_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Find the matrices that need gradients in a model's layers, without those of embeddings."""
    layers = [module for module in model.modules() if type(module).__name__ in model._no_split_modules]
    modules = (module for layer in layers for module in layer.modules() if not isinstance(module, nn.Embedding))
    parameters = (parameter for module in modules for parameter in module.parameters(recurse=False))
    return [parameter for parameter in parameters if parameter.ndim == 2 and parameter.requires_grad]


def _apply(updates: Round) -> None:
    """Update the matrices of a round when all of it is there."""
    for work in updates.works:
        work.wait()
    for (group, parameter), update in zip(updates.matrices, updates.updates, strict=True):
        if isinstance(parameter, DTensor):
            update = distribute_tensor(update, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * RMS * math.sqrt(max(parameter.shape)))


def _make_room(like: torch.Tensor) -> torch.Tensor:
    """Make room for an orthogonalized matrix that another process sends."""
    return torch.empty(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    """Let products of float32 be float32, not TF32 or bfloat16, within this context."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
