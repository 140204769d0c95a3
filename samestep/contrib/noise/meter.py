"""Measures how noisy a step's gradient is, from the gradients of its micro-batches, which accumulation computes anyway.

The gradient G of a step is a sum over samples drawn at random, so G = mu + noise: |mu|^2 is the signal, and V = E|G - mu|^2
the noise, which falls as 1/B with the global batch B. Their ratio gives the gradient noise scale, B V / |mu|^2 samples: the
batch at which noise and signal are equal (McCandlish et al. 2018, arXiv:1812.06162).

Let micro-batch q of K, on whichever process, hold a share w_q of the step's targets and contribute a_q to G = sum_q a_q.
Samples are independent, and E a_q = w_q mu, so products of two different micro-batches hold no noise:

    |mu|^2 = (|G|^2 - sum_q |a_q|^2) / (1 - sum_q w_q^2),      V = |G|^2 - |mu|^2

Both are unbiased whatever the shares are. They also are where the targets of a sample are correlated, and so the noise of a
micro-batch is not in proportion to its targets, on which dividing by shares (sum_q |a_q|^2 / w_q) would rely. With shares that
are all 1/K the two are the same. Of several loss terms w_q is the mean share: as samples are dealt at random, shares differ by
little, and the signal's relative error is below their squared coefficient of variation over B.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from samestep.step.accumulate import row_norms
from samestep.step.exact_sum import ExactSum


def find_group(name: str) -> str:
    """Find the layer that a parameter belongs to: its name up to the first number, or its module.

    >>> find_group("encoder.layer.11.attention.self.query.weight"), find_group("embeddings.word_embeddings.weight")
    ('encoder.layer.11', 'embeddings.word_embeddings')
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts[:-1]) or name


class NoiseMeter:
    """Observes the gradient of each micro-batch in the steps that are measured.

    In such a step: `begin`, a backward for each micro-batch of this process, and, when the parameters have the whole step's
    gradient, `finish`. In all other steps nothing is done, and no hook is there. With more than one micro-batch on this
    process, a copy of the gradients so far is kept, 4 bytes per parameter, until the step's end.

    Args:
        parameters: names and parameters; those that are not trained are left out.
        exact_sum: takes the gradients away; None: they accumulate in the parameters.

    Attributes:
        groups: names of the layers that the noise is measured of.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], exact_sum: ExactSum | None = None):
        self.places = {p: place for place, p in enumerate(p for p in parameters.values() if p.requires_grad)}
        names = [find_group(name) for name, parameter in parameters.items() if parameter.requires_grad]
        self.groups = list(dict.fromkeys(names))
        self.device = next(iter(self.places)).device
        self.group_places = torch.tensor([self.groups.index(name) for name in names], device=self.device)
        self.exact_sum = exact_sum
        self.hooks: list = []

    def begin(self, counts: torch.Tensor, totals: torch.Tensor) -> None:
        """Begin a step, or begin it again.

        Args:
            counts: int64 [micro-batches, terms], targets of this process's micro-batches.
            totals: int64 [terms], targets of the whole step, all processes; on the device.
        """
        self.close()
        shares = counts.to(self.device) / totals.clamp(min=1)
        # [micro-batches]: means over the terms that have targets
        shares = shares.sum(1) / (totals > 0).sum().clamp(min=1)
        self.share_squares = shares.double().square().sum()
        self.squares = torch.zeros(len(self.places), dtype=torch.float64, device=self.device)
        self.num_left = dict.fromkeys(self.places, len(counts))  # micro-batches to come
        self.sums: dict[nn.Parameter, torch.Tensor] = {}  # gradients so far
        if self.exact_sum is not None:
            self.exact_sum.listener = self._add
        else:
            self.hooks = [parameter.register_post_accumulate_grad_hook(self._observe) for parameter in self.places]

    @torch.no_grad()
    def _observe(self, parameter: nn.Parameter) -> None:
        """Find what a micro-batch added to a gradient. DistributedDataParallel reduces the gradient after this."""
        gradient, self.num_left[parameter] = parameter.grad, self.num_left[parameter] - 1
        is_last, total = self.num_left[parameter] == 0, self.sums.get(parameter)
        if total is None:
            self._add(parameter, gradient)
            if not is_last:
                self.sums[parameter] = gradient.clone()
        else:
            self._add(parameter, torch.sub(gradient, total, out=total))
            if is_last:
                del self.sums[parameter]
            else:
                total.copy_(gradient)

    def _add(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        self.squares[self.places[parameter]] += row_norms(gradient).double().square().sum()

    @torch.no_grad()
    def finish(self, local_scale: float, scale: float = 1.0) -> torch.Tensor:
        """Compute signal and noise of the step. Called by all processes; one all-reduce of a number per parameter.

        Args:
            local_scale: factor of the gradients that were observed: N, where DistributedDataParallel then takes the mean.
            scale: factor of all gradients: of fp16's loss.

        Returns:
            float64 [2, layers] on the device: |mu|^2 and V of each layer's parameters, of which the sums are those of all.
        """
        parameters = list(self.places)
        self.close()
        totals = torch.cat([self.squares / local_scale**2, self.share_squares[None]])
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(totals)
        zero = totals.new_zeros(())
        whole = [zero if p.grad is None else row_norms(p.grad).double().square().sum() for p in parameters]
        whole = torch.stack(whole)  # [parameters]: |G|^2
        signal = (whole - totals[:-1]) / (1 - totals[-1])
        rows = torch.stack([signal, whole - signal]) / scale**2
        return rows.new_zeros(2, len(self.groups)).index_add_(1, self.group_places, rows)

    def close(self) -> None:
        """Let go of the parameters until the next step that is measured."""
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.sums = [], {}
        if self.exact_sum is not None:
            self.exact_sum.listener = None


class TermMeter:
    """Measures the noise of each loss term's gradient by itself, in a forward and backward for each term and micro-batch.

    A backward of the step's loss adds the terms' gradients up, and cannot be told apart. Shares are those of the term's own
    targets here. In a measured step: `measure`, which leaves the gradients of the parameters alone, and `finish`.

    Args:
        parameters: those that are trained.
        num_terms: number of loss terms.
        dtype: of sums of gradients; None: that of the parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_terms: int, dtype: torch.dtype | None = None):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.num_terms, self.dtype = num_terms, dtype or self.parameters[0].dtype

    def measure(
        self, counts: torch.Tensor, totals: torch.Tensor, compute_losses: Callable[[int], torch.Tensor]
    ) -> None:
        """Compute the gradients of the terms in this process's micro-batches.

        Args:
            counts: int64 [micro-batches, terms], targets of this process's micro-batches.
            totals: int64 [terms], targets of the whole step, all processes; on the device.
            compute_losses: makes the terms' parts of the step's loss, [terms], in micro-batch `number`; each call is a forward.
        """
        device = self.parameters[0].device
        shares = counts.to(device).double() / totals.clamp(min=1)  # [micro-batches, terms]
        size = sum(parameter.numel() for parameter in self.parameters)
        self.gradients = torch.zeros(self.num_terms, size, dtype=self.dtype, device=device)
        # [2, terms]
        self.squares = torch.stack([torch.zeros_like(totals, dtype=torch.float64), shares.square().sum(0)])
        for number, targets in enumerate(counts.tolist()):
            for term in (term for term, count in enumerate(targets) if count):
                loss = compute_losses(number)[term]
                parts = torch.autograd.grad(loss, self.parameters, allow_unused=True)
                first = 0
                for parameter, part in zip(self.parameters, parts, strict=True):
                    last = first + parameter.numel()
                    if part is not None:
                        self.squares[0, term] += row_norms(part).double().square().sum()
                        self.gradients[term, first:last] += part.reshape(-1)
                    first = last

    def finish(self, scale: float = 1.0) -> torch.Tensor:
        """Compute signal and noise of the terms. Called by all processes; an all-reduce of a gradient for each term.

        Args:
            scale: factor of the losses that were computed: of fp16's loss.

        Returns:
            float64 [2, terms] on the device: |mu|^2 and V of each term. A term with all its targets in one micro-batch has NaN.
        """
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(self.gradients)
            dist.all_reduce(self.squares)
        whole = row_norms(self.gradients).double().square()
        squares, share_squares = self.squares
        signal = (whole - squares) / (1 - share_squares)
        signal[share_squares > 1 - 1e-9] = torch.nan
        del self.gradients, self.squares
        return torch.stack([signal, whole - signal]) / scale**2
