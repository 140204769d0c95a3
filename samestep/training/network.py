"""The model of a run and its optimizer, ready for `accelerator.accumulate`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from samestep.data.steps import MicroBatch, to_device
from samestep.models import pretrained
from samestep.models.summed_losses import SummedLosses
from samestep.step import accumulate, batch_norm, losses, optim
from samestep.step.noise import Noise, noise_by_sample
from samestep.training import checkpoint, kernels, launch, sharding, weight_files
from samestep.training.checkpoint import Trained

if TYPE_CHECKING:
    from samestep.training.run import Run


@dataclasses.dataclass
class Network:
    """A model, its optimizer, and what was made for both.

    Attributes:
        accelerator: the run's.
        build: makes the model anew, without its weights.
        bare_model: the model without wrapping.
        noise: its dropout as a function of the sample.
        parameters: by the names that they have in files.
        trained: model and optimizer as the reduction prepared them.
        loss_weights: w_j, floating [terms] on the device.
    """

    accelerator: Accelerator
    build: Callable[[], nn.Module]
    bare_model: SummedLosses
    noise: Noise
    parameters: dict[str, nn.Parameter]
    trained: Trained
    loss_weights: torch.Tensor

    @property
    def model(self) -> Any:
        """The prepared model."""
        return self.trained.model

    @property
    def optimizer(self) -> Any:
        """The prepared optimizer."""
        return self.trained.optimizer

    @functools.cached_property
    def clipped_parameters(self) -> list[nn.Parameter]:
        """Parameters of the prepared model."""
        return list(self.model.parameters())

    def compute_loss(
        self, batch: MicroBatch, num_targets: torch.Tensor, model: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a micro-batch's part of the step's loss, and its summed losses.

        Args:
            batch: a micro-batch; it may be on the host.
            num_targets: targets of the whole step, int64 [terms].
            model: prepared or not.

        Returns:
            The loss, sum_j w_j s_j / n_j, scalar; the summed losses s_j, [terms], detached.
        """
        sums, _ = model(**to_device(batch, self.accelerator.device))
        return losses.weighted_loss(sums, num_targets, self.loss_weights), sums.detach()

    def make_whole_model(self) -> Any:
        """Remove the model's wrapping; if it is sharded, make a whole copy instead, on process 0 only (elsewhere None).

        Called by all processes.
        """
        if not isinstance(self.model, FSDPModule):
            return self.accelerator.unwrap_model(self.model)
        tensors = get_model_state_dict(self.model, options=checkpoint.WHOLE)  # on process 0; {} elsewhere
        if not self.accelerator.is_main_process:
            return None
        copy = self.build()
        with weight_files.keep_tied(copy):
            copy.load_state_dict(tensors, assign=True)  # they take the place of weights that it may be without
        return copy

    def forward_backward(self, batch: MicroBatch, num_targets: torch.Tensor) -> None:
        """Compute a micro-batch as a script does, to try sizes of micro-batches."""
        loss, _ = self.compute_loss(batch, num_targets, self.model)
        self.accelerator.backward(loss * accumulate.loss_scale(self.accelerator))


def make_network(run: "Run", model_class: type[SummedLosses], train: Any) -> Network:
    """Make the model and the optimizer of a run, as its checkpoint has them if there is one.

    With --speed auto the model takes the fastest of its kernels. Called by all processes.

    Args:
        run: whose recipe and settings they are made by.
        model_class: class of a module of `samestep.models`.
        train: the training data.
    """
    recipe, settings, accelerator, start = run.recipe, run.settings, run.accelerator, run.start
    dtype = getattr(torch, settings.dtype)

    def build() -> SummedLosses:
        return model_class.from_recipe(recipe, train).to(dtype)

    def build_empty() -> SummedLosses:
        with pretrained.leave_out_weights():
            return build()

    torch.manual_seed(recipe.seed)
    files = weight_files.find(recipe, build_empty) if launch.is_sharded(accelerator) else None
    model = build() if files is None else files.model
    noise = noise_by_sample(model, recipe.seed)
    run.say(*model.notes, *noise.notes, *optim.find_notes(recipe))
    candidates: Any = model.kernel_candidates(accelerator.device, accelerator.mixed_precision, settings)
    kernels.choose_kernel(accelerator, recipe, settings, model, train, candidates)
    kernel = pretrained.find_noisy_kernel(model)
    if kernel and settings.reproducible is None:
        run.say(
            f"attention dropout with attn_implementation {kernel}. The kernel draws its own noise, per process and "
            "micro-batch, so that another layout's losses differ by it, unlike with --attn_implementation eager. Samples, "
            "batch, learning rate, masks and all other dropout do not"
        )
    if getattr(settings, "gradient_checkpointing", False):
        model.recompute_activations()
    if getattr(settings, "torch_compile", False):
        model.compile_layers()
    (batch_norm.freeze if getattr(recipe, "normalization", None) == "frozen" else batch_norm.synchronize)(model)
    read = None if files is None else files.read
    fingerprints = train.fingerprints | checkpoint.fingerprint_frozen(model, read)
    optimizer = optim.from_recipe(model, recipe)
    names = checkpoint.name_parameters(model)
    groups = sharding.name_groups(optimizer, model)
    prepared = run.reduction.prepare(model, optimizer, start.state)
    if files is not None:
        files.fill(prepared[0], accelerator.device)
        sharding.set_parameters(prepared[1], groups, prepared[0])
    trained = Trained(*prepared, fingerprints, getattr(train, "processor", None) or getattr(train, "tokenizer", None))
    if start.checkpoint is not None:
        checkpoint.load(accelerator, start.checkpoint, start.state, *prepared, fingerprints)
        run.reduction.load(start.checkpoint)
    weights = torch.tensor(list(recipe.loss_weights.values()), dtype=dtype, device=accelerator.device)
    return Network(accelerator, build if files is None else build_empty, model, noise, names, trained, weights)
