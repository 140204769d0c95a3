"""Remembers from run to run how many samples of a recipe fit on a device at once, and what is fastest there."""

import contextlib
import dataclasses
import hashlib
import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from accelerate.utils.memory import should_reduce_batch_size
from huggingface_hub.constants import HF_HOME
from torch import nn

from samestep.errors import UsageError
from samestep.recipe.reading import read_json
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_fields import COUNT, NAME, POSITIVE, find_problems
from samestep.recipe.run_settings import RunSettings

FILE = Path(HF_HOME) / "samestep" / "capacity.json"


@dataclasses.dataclass
class Capacity:
    """The numbers that are known of one recipe on one device; the file has them under these names.

    Attributes:
        key: names the recipe, the device, and all else that the numbers depend on.
        fits: most samples of the greatest length that were seen to fit at once; 0: unknown.
        fails: fewest samples of the greatest length that were seen not to fit; None: unknown.
        way: name of the kernels that were measured to be the fastest; None: unknown.
        at_once: size of the micro-batch that was measured to be the fastest, as a number of samples of the greatest length, or
            of shorter ones with as many tokens; None: unknown.
    """

    key: str
    fits: int = 0
    fails: int | None = None
    way: str | None = None
    at_once: int | None = None

    def note(self, num_samples: int, has_fit: bool) -> None:
        """Learn from a try. Memory that held a micro-batch once may not hold it later: the last try counts."""
        if has_fit:
            self.fits = max(self.fits, num_samples)
        else:
            self.fails = num_samples if self.fails is None else min(self.fails, num_samples)
            self.fits = 0 if self.fits >= self.fails else self.fits

    def write(self, accelerator: Accelerator) -> None:
        """Let process 0 write the numbers to the file, for later runs. If it cannot be written, the run goes on without it."""
        if not accelerator.is_main_process:
            return
        values = {name: value for name, value in dataclasses.asdict(self).items() if name != "key"}
        try:
            FILE.parent.mkdir(parents=True, exist_ok=True)
            temporary = FILE.with_suffix(f".{self.key}")
            temporary.write_text(json.dumps(_read_all() | {self.key: values}), encoding="utf-8")
            temporary.replace(FILE)
        except OSError:
            pass


def _read_all() -> dict[str, dict[str, Any]]:
    try:
        entries = read_json(FILE, str(FILE))
    except UsageError:  # a file that is missing or damaged costs measuring again
        return {}
    return {key: values for key, values in entries.items() if _is_valid(values)}


def _is_valid(values: object) -> bool:
    """Check that a `Capacity` can have these values."""
    rules = {"fits": COUNT, "fails": POSITIVE.or_null(), "way": NAME.or_null(), "at_once": POSITIVE.or_null()}
    return isinstance(values, dict) and values.keys() == rules.keys() and not find_problems(values, rules)


def recall(accelerator: Accelerator, recipe: Recipe, settings: RunSettings) -> Capacity:
    """Read the numbers of this recipe on this device from process 0's machine. Called by all processes."""
    device = accelerator.device
    hardware = torch.cuda.get_device_properties(device) if device.type == "cuda" else device.type
    names = ("per_device_train_tokens", "attn_implementation", "gradient_checkpointing", "dtype", "torch_compile")
    parts = [
        recipe.fingerprint,
        accelerator.mixed_precision,
        accelerator.num_processes,
        str(hardware),
        torch.__version__,
    ]
    parts += [getattr(settings, name, None) for name in names]
    key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    return Capacity(key, **broadcast_object_list([_read_all().get(key, {})])[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether memory ran out: the device's or, where the allocator says so, the host's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or should_reduce_batch_size(error)


def has_memory(compute: Callable[[], object]) -> bool:
    """Compute something, and tell whether memory held it; another error is raised."""
    try:
        compute()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)  # which hold tensors
        return False
    return True


@contextlib.contextmanager
def preserved_model(model: nn.Module) -> Iterator[None]:
    """Leave no gradient, and running statistics as they were, of what is computed within this context."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    model.zero_grad(set_to_none=True)
    for buffer, value in buffers:
        buffer.copy_(value)
