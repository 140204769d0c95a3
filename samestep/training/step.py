"""One optimizer step, as loops see it: the scripts' (`Run.steps`) and people's own (`exact_steps`, `exact_windows`).

`Step` has the arithmetic and the words. What gives it its micro-batches and their counts differs: a run knows its model, its
optimizer and what to do when memory runs out (`training.run_step`); `exact_steps` is given nothing but data. One class for both
would have to ask in each method which of them it is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from samestep.errors import UsageError
from samestep.step import accumulate
from samestep.step.losses import weighted_loss


class Step:
    """One optimizer step: its micro-batches, each for one forward and backward, and what their losses are divided by.

        for batch in step.micro_batches:  # or: in step
            with accelerator.accumulate(model):
                sums = ...  # s_j of this micro-batch
                accelerator.backward(step.loss(sums, weights))

    The last line is, written out:

        loss = (weights * sums / step.num_targets).sum()
        accelerator.backward(loss * step.loss_scale)
        step.add_to_log(sums)

    Args:
        accelerator: divides the loss by k.
        index: see below.
        epoch: see below.

    Attributes:
        index: number of the step; 0 is the first of the training.
        epoch: epochs done when the step is done, a fraction where it is known.
    """

    def __init__(self, accelerator: Accelerator, index: int, epoch: float):
        self.accelerator, self.index, self.epoch = accelerator, index, epoch

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of this process in this step, k."""
        raise NotImplementedError

    @property
    def num_targets(self) -> torch.Tensor:
        """n_j: targets of each loss term in the whole step, all processes and micro-batches; [terms], on the device."""
        raise NotImplementedError

    @property
    def loss_scale(self) -> int:
        """Factor of a micro-batch's loss, which undoes what gradients are divided by: k in `accelerator.backward`, and N, the
        number of processes, in DistributedDataParallel."""
        return accumulate.loss_scale(self.accelerator)

    @property
    def micro_batches(self) -> Iterator[Any]:
        """Tensors of each micro-batch on the device; `accelerator.accumulate` synchronises at the last one."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.micro_batches

    def loss(self, sums: Any, weights: Sequence[float] | torch.Tensor | None = None) -> torch.Tensor:
        """Compute a micro-batch's part of the step's loss, for `accelerator.backward`, and note its sums.

        It is multiplied by k and N, by which Accelerate and DDP divide:  k N sum_j w_j s_j / n_j.

        Args:
            sums: s_j, summed losses of the micro-batch, scalar or [terms], in any floating dtype; or (sums, number of targets),
                as the contract of a loss returns them.
            weights: w_j, [terms]; None: the recipe's, or where there is none, 1.

        Returns:
            scalar in float32 or wider.

        Raises:
            UsageError: the sums have another shape than the targets; outside the loop over micro-batches; in the first step of
                `exact_steps` and `exact_windows`, a mean.
        """
        sums, returned_counts = sums if isinstance(sums, tuple) else (sums, None)
        num_targets = self.num_targets
        if not isinstance(sums, torch.Tensor) or sums.shape != num_targets.shape:
            description = list(sums.shape) if isinstance(sums, torch.Tensor) else type(sums).__name__
            raise UsageError(
                f"step.loss was given {description}, but targets returns {list(num_targets.shape)}: one sum for each number of "
                "targets"
            )
        sums = self._take_sums(sums, returned_counts)
        self.add_to_log(sums)
        weights = self._default_weights(sums) if weights is None else torch.as_tensor(weights).to(sums)
        return weighted_loss(sums, num_targets, weights) * self.loss_scale

    def add_to_log(self, sums: torch.Tensor) -> None:
        """Note the summed losses of a micro-batch, scalar or [terms]."""
        raise NotImplementedError

    def _take_sums(self, sums: torch.Tensor, returned_counts: Any) -> torch.Tensor:
        """Widen sums; `returned_counts` is what the loss says that they are over, None: nothing."""
        return sums.float() if sums.dtype in (torch.float16, torch.bfloat16) else sums

    def _default_weights(self, sums: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(sums)
