"""Fine-tune a model of images and text on conversations: the losses of `causal_lm`, with images among the tokens.

Sequences lie end to end in a row, as those of texts, if samples of the data are the same there as each alone: some are
computed both ways before the training (`packing.compare`). Positions are those that the model gives to a sequence's tokens.
Otherwise, as where tokens of an image see each other, sequences are padded, each in a row of its own, and the model does all
else itself. Pixels are those of all images of the micro-batch, one after the other: a model puts them at the places of its
tokens of images in the order of the rows.

A micro-batch without an image computes one of a single colour beside its sequences, of which nothing is trained: so every
parameter has a gradient in every micro-batch, 0 where it has no part in the loss, and processes that divide a model all compute
all of it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlavaConfig, PreTrainedModel

from samestep._internals.torch_autograd import find_leaves
from samestep._internals.torch_tracing import is_fake
from samestep.cut.layout import round_up
from samestep.data.image_conversations import OWN_MARK, TYPES
from samestep.errors import UsageError, reason
from samestep.models import causal_lm, packing, sequences, towers
from samestep.models.causal_lm import CausalLmSums
from samestep.models.freezing import describe_trained
from samestep.models.sequences import Sequences

PIXELS = "pixel_values"
ROWS_DIFFER = "samples in a row are not the same as each alone"
NOT_OF_IMAGES = ("labels", "label_index", "label_sequence", "counts")
"""Names in a micro-batch of what `hidden` does not take."""
TEXT = "llama"
"""Architecture of the language model of those with random weights."""


class ImageTextSums(CausalLmSums):
    """Sums the losses of a model of images and text, see `CausalLmSums`.

    Args:
        model: of transformers, or peft's model of it.
        arguments: further ones of `CausalLmSums`.
        blank: inputs of the model for one image: input_ids [1, t], which are of tokens of the image, pixel_values and what else
            the processor returns.
        samples: micro-batches of one sample each, and of all of them, on which the rows are tried.
    """

    def __init__(
        self,
        model: nn.Module,
        *arguments: Any,
        blank: Mapping[str, torch.Tensor],
        samples: tuple[Sequence[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    ):
        self.blank, self.samples = dict(blank), samples
        ids = set(self.blank["input_ids"].flatten().tolist())
        self.spare_id = next(number for number in range(len(ids) + 1) if number not in ids)
        super().__init__(model, *arguments)
        del self.samples
        self._refuse_noise()
        if not is_fake(next(model.parameters())):
            self._freeze_unreached()
            self.notes = [*self.notes, describe_trained(self.model)]

    def _refuse_noise(self) -> None:
        """Refuse dropout outside of the language model, whose places in a sample are not known."""
        inside = {id(module) for module in self.causal_lm.get_decoder().modules()}
        for name, module in self.causal_lm.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0 and id(module) not in inside:
                raise UsageError(
                    f"{name} drops numbers of images with probability {module.p:g}, which is not drawn by sample. Set "
                    "lora_dropout to 0, or lora_targets to names of the language model's layers"
                )

    def compute_in_rows(self) -> str | None:
        """See `CausalLmSums`. Towers are computed in fewer products, where that is the same, too."""
        undo = towers.use_large_products(self.causal_lm)
        try:
            problem = packing.stay_apart(self.causal_lm, partial(self._find_leak, undo), ROWS_DIFFER)
        except Exception as error:  # of any kind: each model has its own positions
            problem = f"its samples cannot be computed in a row ({reason(error)})"
        name, number = type(self.causal_lm).__name__, len(self.samples[0])
        if problem is not None:
            undo()
        else:
            same = f"{number} of them were the same there as each alone"
            self.notes = [*self.notes, f"{name}: samples lie end to end without padding, as {same}"]
        return problem

    def _find_leak(self, undo: Callable[[], None], model: PreTrainedModel) -> packing.Leak | None:
        """Compare samples of the data in a row with each alone, which the model computes by its own code."""
        alone, together = self.samples
        pixels = [sample[PIXELS] for sample in (together, *alone) if PIXELS in sample]
        dim = 1 + (pixels[0].ndim == 5)
        has_gradient = len(pixels) > 1 and len({value.shape[dim:] for value in pixels}) == 1

        def prepare(sample: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...]]:
            inputs = {name: value.to(model.device) for name, value in sample.items() if name not in NOT_OF_IMAGES}
            if not has_gradient or PIXELS not in inputs:
                return inputs, ()
            inputs[PIXELS] = inputs[PIXELS].clone().requires_grad_()
            return inputs, (inputs[PIXELS],)

        def compute_alone(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
            own = {name: inputs[name] for name in inputs if name not in ("position_ids", "ends")}
            undo()
            try:
                return model.base_model(**own, use_cache=False, return_dict=True).last_hidden_state[0]
            finally:
                towers.use_large_products(model)

        parts = []
        for sample in alone:
            inputs, leaves = prepare(sample)
            parts.append(packing.Sequence(inputs["input_ids"][0], partial(compute_alone, inputs), leaves))
        inputs, leaves = prepare(together)
        return packing.compare(model, partial(self.hidden, **inputs), parts, leaves)

    def _freeze_unreached(self) -> None:
        """Freeze the parameters that the loss does not reach, such as the last layers of a tower whose earlier one is used."""
        reached = {id(leaf) for leaf in find_leaves(self._hidden_of_blank())}
        head = self.causal_lm.get_output_embeddings()
        reached |= {id(parameter) for parameter in head.parameters()}
        names = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in reached:
                parameter.requires_grad_(False)
                names.append(name)
        if names:
            self.notes = [
                *self.notes,
                f"{len(names)} tensors that no loss reaches are not trained: {names[0]} and so on",
            ]

    def _hidden_of_blank(self) -> torch.Tensor:
        device = self.causal_lm.device
        tokens = self.blank["input_ids"].to(device)
        ends = torch.tensor([0, tokens.shape[1]], dtype=torch.int32, device=device)
        images = {
            name: value.to(device) for name, value in self.blank.items() if name not in ("input_ids", "attention_mask")
        }
        return self.hidden(tokens, torch.arange(tokens.shape[1], device=device)[None], ends, **images)

    @torch.no_grad()
    def _check_head(self) -> None:
        model, was_training = self.causal_lm, self.causal_lm.training
        model.eval()
        tokens = self.blank["input_ids"].to(model.device)
        log_p, _ = self._head(self._hidden_of_blank(), tokens[0])
        inputs = {name: value.to(model.device) for name, value in self.blank.items()}
        with self.own_attention():
            logits = model(**inputs, use_cache=False).logits[0]
        own = logits.log_softmax(-1).gather(1, tokens[0][:, None]).squeeze(1)
        model.train(was_training)
        if not torch.allclose(log_p, own, rtol=1e-3, atol=1e-4):
            raise UsageError(
                f"{type(model).__name__} computes its logits in a way that is not known here, so that its loss would be "
                "another one: choose another model"
            )

    def hidden(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, ends: torch.Tensor, **images: torch.Tensor
    ) -> torch.Tensor:
        """Compute the last hidden states of sequences that lie end to end, [n, width]; see `CausalLmSums`.

        Args:
            images: pixel_values and what else belongs to them, of all images; which tokens are of images, int64 [1, n], under
                one of `TYPES`, if the model takes it.
        """
        num_tokens = input_ids.shape[1]
        types = next((name for name in TYPES if name in images), None)
        row = {"input_ids": input_ids} | ({} if types is None else {types: images.pop(types)})
        all_ends = ends
        if PIXELS not in images:
            blank = {name: value.to(input_ids.device, non_blocking=True) for name, value in self.blank.items()}
            row = {name: torch.cat([value, blank[name]], 1) for name, value in row.items()}
            lengths = [num_tokens] * (len(ends) == 1) + [
                num_tokens + blank["input_ids"].shape[1]
            ]  # of no sample: a token
            all_ends = torch.cat([ends, torch.tensor(lengths, dtype=ends.dtype, device=ends.device)])
            images = {name: value for name, value in blank.items() if name not in (*row, "attention_mask", *TYPES)}
        length = row["input_ids"].shape[1]
        num_spare = round_up(length + 1, 6) - length
        fill = {"input_ids": self.spare_id}
        row = {name: F.pad(value, (0, num_spare), value=fill.get(name, 0)) for name, value in row.items()}
        all_sequences = Sequences(all_ends, length + num_spare, length)
        self._name_rows(all_sequences, ends, position_ids)
        rows = all_sequences.rows()
        padded = {name: value[0, rows.source] for name, value in row.items()}  # [Q', T]
        if rows.is_token is not None:
            padded["attention_mask"] = rows.is_token[:, 0, 0].long()
        pixels = {name: to_dtype(value, self.causal_lm.dtype) for name, value in images.items()}
        base = self.causal_lm.base_model
        if self.is_padded:
            hidden = base(**padded, **pixels, use_cache=False, return_dict=True).last_hidden_state
            return hidden.flatten(0, 1)[rows.place][:num_tokens]
        position_ids = find_positions(base, padded, images)  # [..., Q', T]
        if position_ids is None:
            position_ids = torch.arange(rows.source.shape[1], device=input_ids.device).expand_as(rows.source)
        in_row = position_ids.flatten(-2)[..., rows.place]  # [..., n]
        row["position_ids"] = F.pad(in_row, (0, num_spare))[..., None, :]
        with sequences.within(all_sequences):
            hidden = base(**row, **pixels, use_cache=False, return_dict=True).last_hidden_state
        return hidden[0, :num_tokens]


def find_positions(
    base: PreTrainedModel, padded: Mapping[str, torch.Tensor], images: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """Find the positions of tokens in several dimensions, where a model has them: int64 [3, Q', T].

    Args:
        base: the model without its head. Those of transformers with such positions have a method for them, `get_rope_index`.
        padded: sequences in rows of their own: input_ids [Q', T], with them one of `TYPES`, and attention_mask.
        images: the model's inputs of images; one of them may be their grids.

    Returns:
        None: positions are places in the sequence.
    """
    find = getattr(base, "get_rope_index", None)
    if find is None:
        return None
    known, device = inspect.signature(find).parameters, padded["input_ids"].device
    inputs = {name: value for name, value in {**images, **padded}.items() if name in known}
    position_ids, _ = find(**{name: value.cpu() for name, value in inputs.items()})  # it reads number by number
    return position_ids.to(device, non_blocking=True)


def choose_config(recipe: Any, tokenizer: Any) -> tuple[type[LlavaConfig], dict[str, Any]]:
    """Return the class and the values of the config of a LLaVA of the recipe's shape: a Llama, and a tower as wide as it."""
    kind, text = causal_lm.choose_config(recipe, tokenizer, TEXT)
    tower: dict[str, Any] = {
        name: getattr(recipe, name) for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    }
    tower |= {"num_hidden_layers": recipe.num_image_layers, "model_type": "siglip_vision_model"}
    tower |= {"image_size": recipe.image_size, "patch_size": recipe.image_patch_size}
    values: dict[str, Any] = {"vision_config": tower, "text_config": text | {"model_type": kind.model_type}}
    values |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    mark = tokenizer.convert_tokens_to_ids(OWN_MARK)
    return LlavaConfig, {**values, "image_token_id": mark, "tie_word_embeddings": bool(recipe.tie_word_embeddings)}


def with_blank(source: Any) -> Callable[..., ImageTextSums]:
    """Return what makes the sums of a model, given its data.

    Raises:
        UsageError: there are no data.
    """
    if source is None:
        raise UsageError("images is true: its model cannot be made without its data, so nothing is known of it here")
    samples = [source.draw(0, sample_id) for sample_id in source.choose_short()]
    micro_batches = [source.collate([sample]) for sample in samples], source.collate(samples)
    return partial(ImageTextSums, blank=source.renderer.blank, samples=micro_batches)


def to_dtype(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert pixels to float64 for a model of this type; narrower ones convert them themselves."""
    return value.double() if value.is_floating_point() and dtype == torch.float64 else value
