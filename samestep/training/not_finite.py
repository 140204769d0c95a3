"""The remedies for a loss or a gradient that is not finite: the run stops before it, or goes on without that step."""

import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from samestep.errors import RunError
from samestep.recipe.run_settings import RunSettings
from samestep.training.checkpoint import Saver
from samestep.training.reduction import Reduction

if TYPE_CHECKING:
    from samestep.training.report import Noted


class NotFinite:
    """Guards a run's parameters against numbers that are not finite (--on_nonfinite).

    `stop`: from a gradient that is not finite on, parameters stay as they are, until the run learns of it and ends. `skip`:
    that step is left out.

    Args:
        accelerator, settings: the run's.
        reduction: how gradients become the step's.
        saver: writes checkpoints.
        num_skipped: steps that earlier sessions left out.

    Attributes:
        num_skipped: steps that were left out so far.
    """

    def __init__(
        self, accelerator: Accelerator, settings: RunSettings, reduction: Reduction, saver: Saver, num_skipped: int
    ):
        self.accelerator, self.settings, self.reduction = accelerator, settings, reduction
        self.saver, self.num_skipped = saver, num_skipped
        self.has_come = torch.zeros((), device=accelerator.device)

    def skip_update(self, optimizer: Any, grad_norm: torch.Tensor) -> None:
        """Let the optimizer leave out this step's update if the gradient is not finite, without waiting for the device.

        torch's fused optimizers read `found_inf`, and keep parameters and state as they are where it is 1. When a gradient
        scaler is used, it does the same by itself.

        Args:
            optimizer: as Accelerate has wrapped it.
            grad_norm: scalar on the device, norm of the whole gradient: the same on all processes.
        """
        if self.accelerator.scaler is None and self.reduction.can_skip_update:
            now = (~grad_norm.isfinite()).float()
            self.has_come = torch.maximum(self.has_come, now) if self.settings.on_nonfinite == "stop" else now
            optimizer.optimizer.found_inf = self.has_come

    def must_stop(self, line: dict[str, Any]) -> bool:
        """Tell whether the run must stop at a step; if not, note in its line that it was left out, where it was.

        Args:
            line: of the step, with `loss` and `grad_norm`.
        """
        # Accelerate's optimizer_step_was_skipped is always False for fused optimizers, which skip by themselves.
        is_scaled, has_skipped = self.accelerator.scaler is not None, not math.isfinite(line["grad_norm"])
        is_broken = not math.isfinite(line["loss"]) or (has_skipped and not is_scaled)
        if is_broken and self.settings.on_nonfinite == "stop":
            return True
        if has_skipped:
            self.num_skipped += 1
            line["skipped"] = True
        return False

    def stop(self, noted: "Noted", run_id: str) -> NoReturn:
        """Save the run as it was before a step, if parameters are, and end it. Called by all processes.

        Args:
            noted: the step, whose line has `loss` and `grad_norm`.
            run_id: see `checkpoint.State`.

        Raises:
            RunError: always.
        """
        message = self._describe(noted)
        has_skipped = self.accelerator.scaler is None and not math.isfinite(noted.line["grad_norm"])
        if not (has_skipped and self.reduction.holds_back):
            raise RunError(f"{message}. Resume from a checkpoint before it")
        done = noted.line["step"] - 1
        self.saver.save(done, self.num_skipped, run_id)
        self.saver.close()
        raise RunError(
            f"{message}. Parameters and optimizer are those after step {done}, and saved: resume with --on_nonfinite skip to "
            "leave such steps out"
        )

    def _describe(self, noted: "Noted") -> str:
        """Say whether the loss or the gradient of a step is not finite, and in which samples."""
        rows = zip(noted.sums.isfinite().all(1).tolist(), noted.places, noted.samples, strict=True)
        local_texts = [
            f"process {rank}, micro-batch {micro_batch}, samples "
            + ", ".join(f"{sample} (epoch {epoch})" for epoch, sample in samples)
            for is_finite, (rank, micro_batch), samples in rows
            if not is_finite
        ]
        texts = gather_object(local_texts)
        subject = "the loss is" if texts else "the losses are finite, but their gradient is"
        return f"step {noted.line['step']}: {subject} not finite" + (f" ({'; '.join(texts)})" if texts else "")
