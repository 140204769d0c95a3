"""sentence-transformers' trainer with the exact step, also of losses that compare the samples of a batch.

Such a loss asks a model for one embedding of each text, and compares them. Here the embeddings of the whole step are computed
first (`quantities`); then the trainer's own loss is computed once, of all of them: in place of texts it gets numbers of rows,
and in place of the model's forward one that looks them up. So no loss is copied, and a new one works, if it asks its model for
nothing but embeddings.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from samestep.contrib.whole_batch.quantities import Quantities, WholeBatch
from samestep.errors import UsageError
from samestep.training.measured_loss import NUM_ASKED, Divisor, NoMeanError, Terms
from samestep.training.trainer import ExactStep, Placeholder

IDS, EMBEDDING = "input_ids", "sentence_embedding"
TOLERANCE = 1e-4
"""Relative difference of a loss of texts and of their embeddings that is rounding."""


class EmbeddingStep(ExactStep):
    __doc__ = (
        (ExactStep.__doc__ or "")
        + """
    A loss that compares samples is computed of all samples of a step; in evaluation it is that of each batch, as before.
    """
    )

    MAY_HAVE = ("get_train_dataloader",)  # which draws samples, and cuts them into batches, as Trainer does
    TAKES_LOSS = True

    _whole: WholeBatch | None = None
    _guides: Sequence[nn.Module] = ()
    _prefixes: Sequence[str] = ()

    def __init__(self, *args: Any, **kwargs: Any):
        for given in (*args, *kwargs.values()):
            if isinstance(given, TrainingArguments) and given.world_size > 1:
                # sentence-transformers sets it on several processes, to leave out samples that would make batches uneven
                given.dataloader_drop_last = False
        super().__init__(*args, **kwargs)

    def get_train_dataloader(self) -> Any:
        kind = getattr(self.args.batch_sampler, "value", self.args.batch_sampler)
        problems = []
        if kind != "batch_sampler":
            problems.append(
                f"batch_sampler is {kind}, must be batch_sampler: others choose samples by the size of a micro-batch, so that "
                "they depend on how a step is cut"
            )
        if isinstance(self.train_dataset, dict):
            problems.append(
                "train_dataset is several datasets: which of them a step has depends on how it is cut: join them"
            )
        if any(getattr(part, "gather_across_devices", False) for part in self._list_loss_modules()):
            problems.append(
                "gather_across_devices is True, must be False: the exact step gathers all embeddings itself"
            )
        if problems:
            raise UsageError(problems)
        return super().get_train_dataloader()

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        batches, total = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._whole is not None:
            model = self.accelerator.unwrap_model(self.model_wrapped)
            prepared = ((self._prepare_inputs(batch), isinstance(batch, Placeholder)) for batch in batches)
            with self.compute_loss_context_manager():
                self._whole.look_at(model.train(), prepared)
            self._num_rows = total
        return batches, total

    def _find_divisor(self, loader: Any, is_short: bool) -> Divisor | Terms | None:
        """Find what the loss divides by; where it compares samples, see that it can be computed from their embeddings."""
        try:
            return super()._find_divisor(loader, is_short)
        except NoMeanError:
            batch = loader.collate_fn([loader.dataset[number] for number in range(min(len(loader.dataset), NUM_ASKED))])
            if not self._is_computed_from_rows(self._prepare_inputs(batch)):
                raise
            self._targets = functools.partial(_count_samples, prefix=self._prefixes[0])
            own = [p for p in self._list_loss_parameters() if p.requires_grad]
            if own and self.accelerator.num_processes > 1:
                raise UsageError(
                    "the loss has parameters of its own, which are not in the model, so that processes do not share their "
                    "gradients: train on one process"
                ) from None
            self._whole = WholeBatch(self.model_wrapped, self._embed, self._ask_about_rows, parameters=own)
            return None

    def _is_computed_from_rows(self, batch: Mapping[str, Any]) -> bool:
        """Tell whether the loss of a batch's embeddings is the loss of the batch."""
        # Tuples: lists are what a trainer notes for its log, which a measurement leaves as it was
        self._prefixes = tuple(name.removesuffix(IDS) for name in batch if name.endswith(f"_{IDS}"))
        models = [part for part in self._list_loss_modules() if type(part) is type(self._bare_model())]
        self._guides = tuple(part for part in models if part is not self._bare_model())
        if not self._prefixes or any(getattr(part, "must_retokenize", False) for part in self._list_loss_modules()):
            return False
        with torch.no_grad():
            own = self._ask_own_loss(self.model_wrapped, batch)
            try:
                ours = self._ask_about_rows(*self._embed(self.model_wrapped, batch))
            except (LookupError, TypeError, ValueError, RuntimeError):  # it asks for more than embeddings
                return False
        return bool((own - ours).abs() <= TOLERANCE * own.abs().clamp(min=1e-6))

    def _bare_model(self) -> nn.Module:
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        return model

    def _list_loss_modules(self) -> list[nn.Module]:
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        return [part for loss in losses if isinstance(loss, nn.Module) for part in loss.modules()]

    def _list_loss_parameters(self) -> list[nn.Parameter]:
        models = (self._bare_model(), *self._guides)
        inner = {id(parameter) for model in models for parameter in model.parameters()}
        found = {id(p): p for part in self._list_loss_modules() for p in part.parameters(recurse=False)}
        return [parameter for key, parameter in found.items() if key not in inner]

    def _embed(self, model: nn.Module, batch: Mapping[str, Any]) -> Quantities:
        """Compute the embeddings of all texts of each sample, by the model and by guides, and the labels, if there are any."""
        features, labels = self.collect_features(batch)
        rows = [model(dict(texts))[EMBEDDING] for texts in features]
        with torch.no_grad():
            rows += [guide(dict(texts))[EMBEDDING] for guide in self._guides for texts in features]
        return (*rows, *([] if labels is None else [labels]))

    def _ask_about_rows(self, *rows: torch.Tensor) -> torch.Tensor:
        """Ask the trainer's own loss about embeddings [samples, d] of each text, and the labels.

        Cached losses compute their backward in a hook, and ask the model again there; so it is done here, and what is returned
        has the loss's value and its gradients for the embeddings and the loss's own parameters.
        """
        leaves = [row.detach().requires_grad_(row.requires_grad) for row in rows]
        own = [p for p in self._list_loss_parameters() if p.requires_grad]
        kept, batch = [p.grad for p in own], self._make_batch(leaves)
        for parameter in own:
            parameter.grad = None
        try:
            with self._looking_up(leaves):
                loss: torch.Tensor = self._ask_own_loss(self.model_wrapped, batch)
                if loss.requires_grad and torch.is_grad_enabled():
                    loss.sum().backward()
            pairs = [(x.grad, y) for x, y in zip([*leaves, *own], [*rows, *own], strict=True) if x.grad is not None]
        finally:
            for parameter, gradient in zip(own, kept, strict=True):
                parameter.grad = gradient
        slope = sum(((gradient * value).sum() for gradient, value in pairs), torch.zeros_like(loss.detach()))
        return slope + (loss - slope).detach()

    def _make_batch(self, rows: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make a batch whose texts are numbers of rows."""
        size, batch = len(rows[0]), {}
        for number, prefix in enumerate(self._prefixes):
            numbers = torch.arange(number * size, (number + 1) * size, device=rows[0].device)[:, None]
            batch |= {f"{prefix}{IDS}": numbers, f"{prefix}attention_mask": torch.ones_like(numbers)}
        has_labels = len(rows) > (1 + len(self._guides)) * len(self._prefixes)
        return batch | ({"label": rows[-1]} if has_labels else {})

    @contextlib.contextmanager
    def _looking_up(self, rows: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the model and the guides return these rows for a while."""
        num_texts, models = len(self._prefixes), [self._bare_model(), *self._guides]
        tables = [torch.cat(list(rows[n * num_texts : (n + 1) * num_texts])) for n in range(len(models))]
        with contextlib.ExitStack() as stack:
            for model, table in zip([*models, self.model_wrapped], [*tables, tables[0]], strict=True):
                stack.enter_context(_looks_up(model, table))
            yield

    def _compute_sums(
        self, model: nn.Module, batch: Any, wants_outputs: bool
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        if self._whole is None:
            return super()._compute_sums(model, batch, wants_outputs)
        counts = torch.as_tensor(self._count(batch)).view(1)
        if not model.training:
            loss, outputs = self._ask_own_loss(model, batch, return_outputs=True)
            return loss.view(-1) * counts.to(loss.device), counts, outputs
        with self._whole.same_noise():
            rows = self._embed(model, batch)
        part = self._whole.take_part(rows)
        return part.view(-1) * self._num_rows, counts, {}


@contextlib.contextmanager
def _looks_up(model: nn.Module, table: torch.Tensor) -> Iterator[None]:
    """Let a model return rows of a table for numbers of rows, for a while."""
    kept = vars(model).get("forward")

    def forward(features: Mapping[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
        if features[IDS].shape[-1] != 1:
            raise ValueError("the loss asks about other texts than those of the batch")
        return {**features, EMBEDDING: table[features[IDS][:, 0]]}

    vars(model)["forward"] = forward
    try:
        yield
    finally:
        vars(model).pop("forward")
        if kept is not None:
            vars(model)["forward"] = kept


def _count_samples(batch: Mapping[str, Any], prefix: str) -> int:
    return len(batch[f"{prefix}{IDS}"])
