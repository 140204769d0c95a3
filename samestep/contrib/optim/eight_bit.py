"""AdamW whose moments have 8 bits (Dettmers et al. 2022, 2110.02861), by the kernels of bitsandbytes.

Moments are cut into blocks of 256 numbers, and each block is rounded to 256 levels times its largest magnitude after every
step. So this is another optimizer than AdamW, within the rounding of the moments; the step's gradient is the exact one. The
rounding depends on nothing but the numbers: it is the same for any cut of a step, and again after a resumption.
"""

import torch
from torch.optim.adamw import adamw

from samestep.recipe import extras

BLOCK = 256
SMALLEST = 4096
"""Parameters with fewer numbers keep moments of 32 bits, as in bitsandbytes."""


class AdamW8bit(torch.optim.Optimizer):
    """Implements AdamW with moments in 8 bits, for parameters of float32; its arguments are those of torch.optim.AdamW.

    Raises:
        UsageError: bitsandbytes is not installed.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        extras.require("quantized", "optimizer adamw_8bit")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Take a step, unless `found_inf` says that the gradient is not finite, for which the host waits: the kernels do not
        look at it."""
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.item():
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(group, parameter, self.state[parameter] or self._initial_state(parameter))

    def _initial_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state, num, device = self.state[parameter], parameter.numel(), parameter.device
        state["step"] = torch.tensor(0.0)
        for name in ("exp_avg", "exp_avg_sq"):
            if num < SMALLEST:
                state[name] = torch.zeros_like(parameter)
            else:
                state[name] = torch.zeros(num, dtype=torch.uint8, device=device)
                state[f"{name}_scale"] = torch.zeros(-(-num // BLOCK), device=device)
        return state

    def _update(self, group: dict, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        (beta1, beta2), lr, eps, decay = group["betas"], group["lr"], group["eps"], group["weight_decay"]
        if parameter.numel() < SMALLEST:
            means, squares, steps = [state["exp_avg"]], [state["exp_avg_sq"]], [state["step"]]
            options = {"beta1": beta1, "beta2": beta2, "lr": lr, "weight_decay": decay, "eps": eps, "maximize": False}
            adamw([parameter], [parameter.grad], means, squares, [], steps, foreach=False, amsgrad=False, **options)
            return
        from bitsandbytes import functional

        state["step"] += 1
        signed, unsigned = (functional.create_dynamic_map(signed).to(parameter.device) for signed in (True, False))
        functional.optimizer_update_8bit_blockwise(
            "adam",  # which decays weights as AdamW does
            parameter.grad.flatten(),
            parameter.view(-1),
            state["exp_avg"],
            state["exp_avg_sq"],
            beta1,
            beta2,
            0.0,
            0.0,
            eps,
            int(state["step"].item()),
            lr,
            signed,
            unsigned,
            state["exp_avg_scale"],
            state["exp_avg_sq_scale"],
            weight_decay=decay,
        )

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state; torch gives all of it the parameters' type, which holds the levels of moments exactly."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if f"{name}_scale" in state:
                    state[name] = state[name].to(torch.uint8)
