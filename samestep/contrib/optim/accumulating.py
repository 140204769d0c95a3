"""Provide SGD and AdamW that accumulate in their moments (see `folding`)."""

import math

import torch

from samestep._internals.torch_operators import (
    foreach_add_,
    foreach_addcdiv_,
    foreach_addcmul_,
    foreach_mul_,
    foreach_sqrt,
)
from samestep.contrib.optim.folding import Accumulating
from samestep.errors import UsageError

SECOND_MOMENTS = ("unbiased", "mean_of_squares", "sum_of_squares")


class AccumulatingSGD(Accumulating):
    """Implements SGD that accumulates in its momentum: exactly torch.optim.SGD on the step's gradient G,

        buf_t = momentum buf_{t-1} + G + weight_decay p,     p = p - lr buf_t

    Args:
        params: parameters or groups of them, as for any optimizer of torch; frozen ones are left alone.
        lr, momentum, weight_decay: as of torch.optim.SGD; there is no dampening and no nesterov.
        gradient_accumulation_steps, coefficients: see `Accumulating`.

    Raises:
        UsageError: a value out of its range.

    >>> weight = torch.nn.Parameter(torch.tensor([1.0]))
    >>> optimizer = AccumulatingSGD([weight], lr=0.1, gradient_accumulation_steps=2)
    >>> for share in (3.0, 1.0):
    ...     (share * weight).sum().backward()
    >>> weight.grad is None, optimizer.step(), weight.data
    (True, None, tensor([0.6000]))
    """

    moments = ("momentum_buffer",)

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        gradient_accumulation_steps: int = 1,
        coefficients: str = "exact",
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, defaults, gradient_accumulation_steps, coefficients)

    def _rates(self, group, number, t):
        decay, share = self._decays(group["momentum"], number)
        yield decay, share * self._expected / self.num_processes

    def _update(self, group, parameters, *pieces_and_buffers):
        pieces, buffers = pieces_and_buffers
        if group["weight_decay"]:
            foreach_add_(buffers, pieces, alpha=group["weight_decay"])
        foreach_add_(pieces, buffers, alpha=-group["lr"])

    def _step_rates(self, group):
        return group["momentum"], 1.0, None


class AccumulatingAdamW(Accumulating):
    """Implements AdamW (Loshchilov and Hutter 2019, 1711.05101) that accumulates in its moments.

    The first moment is exactly Adam's. For the second, G^2 of the step's gradient G = sum_q a_q is replaced by

        mean_of_squares    K sum_q a_q^2: the mean of the micro-batches' squared gradients g_q = K a_q (Su 2021)
        sum_of_squares     sum_q a_q^2 (AdamA, 2305.19982)
        unbiased           ((1 - r) sum_q a_q^2 + (1 - 1/K) mhat_t^2) / (1 - r/K),   r = (1-b1)/(1+b1) (1+b1^t)/(1-b1^t)

    Let micro-batches have independent gradients g_q of mean mu and variance s, rho = s / mu^2. Then E G^2 = mu^2 (1 + rho/K),
    the first is too large by (1 + rho) / (1 + rho/K), the second too small by (1 + rho)/K / (1 + rho/K). The third has the
    right expectation for every rho, as long as mu and s stay the same: E sum a_q^2 = mu^2 (1 + rho)/K and
    E mhat^2 = mu^2 (1 + r rho/K), where r is the sum of the squared weights of mhat's gradients, are two equations for mu^2
    and s. It is exact where K = 1 or t = 1, and no better than the second where the mean changes its sign within 1 / (1 - b1)
    steps.

    Args:
        params: parameters or groups of them, as for any optimizer of torch; frozen ones are left alone.
        lr, betas, eps, weight_decay: as of torch.optim.AdamW.
        second_moment: unbiased, mean_of_squares or sum_of_squares.
        gradient_accumulation_steps, coefficients: see `Accumulating`.

    Raises:
        UsageError: a value out of its range, or unbiased with coefficients that are not exact.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        second_moment: str = "unbiased",
        gradient_accumulation_steps: int = 1,
        coefficients: str = "exact",
    ):
        if second_moment not in SECOND_MOMENTS:
            raise UsageError(f"second_moment is {second_moment!r}, must be one of {', '.join(SECOND_MOMENTS)}")
        if second_moment == "unbiased" and coefficients != "exact":
            raise UsageError(
                f"coefficients is {coefficients}, but second_moment unbiased is derived for exact ones: use mean_of_squares or "
                "sum_of_squares"
            )
        self.second_moment = second_moment
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, gradient_accumulation_steps, coefficients)

    def _initial_state(self, moments):
        return {"step": torch.tensor(0.0)} | super()._initial_state(moments)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._steps = {parameter: int(state["step"].item()) for parameter, state in self.state.items()}

    def _micro_batches(self) -> int:
        return self.num_micro_batches or self.gradient_accumulation_steps * self.num_processes

    def _rates(self, group, number, t):
        beta1, beta2 = group["betas"]
        expected = self._expected / self.num_processes
        decay, share = self._decays(beta1, number)
        yield decay, (1 - beta1) * share * expected
        decay, share = self._decays(beta2, number)
        if self.second_moment == "mean_of_squares":
            share *= self._micro_batches()
        elif self.second_moment == "unbiased" and self._micro_batches() > 1:
            r = _noise(beta1, t)
            share *= (1 - r) / (1 - r / self._micro_batches())
        yield decay, (1 - beta2) * share * expected**2

    def _square_share(self, parameter):
        if self.second_moment != "unbiased" or self._micro_batches() == 1:
            return 0.0
        (beta1, beta2), t = (
            self.param_groups[self._bucket_by_parameter[parameter].group]["betas"],
            self._steps[parameter],
        )
        share = (1 - 1 / self._micro_batches()) / (1 - _noise(beta1, t) / self._micro_batches())
        return (1 - beta2) * share / (1 - beta1**t) ** 2

    def _finish(self, group, parameters, *moments):
        means, squares = moments
        shares = [self._square_share(parameter) for parameter in parameters]
        if any(shares):
            foreach_addcmul_(squares, means, means, shares)

    def _update(self, group, parameters, *pieces_and_moments):
        pieces, means, squares = pieces_and_moments
        steps = [self._steps[parameter] for parameter in parameters]
        for parameter, t in zip(parameters, steps, strict=True):
            self.state[parameter]["step"].fill_(t)
        decays, rate = [self._decay(beta) for beta in group["betas"]], group["lr"]
        corrections = [math.sqrt(1 - decays[1] ** t) for t in steps]
        # The bias correction c moves from sqrt(v) to eps and the numerator: m / (sqrt(v) / c + eps) = c m / (sqrt(v) + c eps)
        roots = foreach_sqrt(squares)
        foreach_add_(roots, [group["eps"] * c for c in corrections])
        if group["weight_decay"]:
            foreach_mul_(pieces, 1 - rate * group["weight_decay"])
        factors = [-rate * c / (1 - decays[0] ** t) for c, t in zip(corrections, steps, strict=True)]
        foreach_addcdiv_(pieces, means, roots, factors)

    def _step_rates(self, group):
        return group["betas"][0], 1 - group["betas"][0], group["betas"][1]


def _noise(beta: float, t: int) -> float:
    """Return r of `AccumulatingAdamW`: the sum of the squared weights of t gradients in the bias-corrected first moment."""
    return (1 - beta) / (1 + beta) * (1 + beta**t) / (1 - beta**t)
