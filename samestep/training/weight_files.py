"""The files of weights that a training starts from, read by shards: a process reads its own rows, and no host has all of them.

A model is made without weights (on the device `meta`), divided by FSDP2, and filled by torch's checkpoints from safetensors.
The numbers are those of a model that was loaded whole. What the files do not hold one by one is loaded whole as before: tables
of experts that are joined from several tensors, heads that begin with random weights, bases in 4 bits.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoConfig, AutoModelForCausalLM

from samestep._internals.torch_distributed import allocate
from samestep.errors import UsageError
from samestep.models import adapters
from samestep.models.causal_lm import CausalLmSums
from samestep.recipe.extras import is_there, load_way
from samestep.recipe.reading import read_json

FILES = ("model*.safetensors", "model.safetensors.index.json")
SHRINK = "samestep.contrib.small_model:shrink"
"""MODULE:NAME of what makes a small model of a kind, on which is tried what needs numbers."""
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def find(recipe: Any, build: Callable[[], nn.Module]) -> "WeightFiles | None":
    """Find the files of a recipe's first weights, and make its model without them; None: each process loads all of them.

    torch's seed is then as it was.

    Args:
        recipe: the recipe.
        build: makes its model, without weights.
    """
    folder, state = _find_folder(recipe), torch.get_rng_state()
    files = None if folder is None else match(folder, build())
    if files is None:
        torch.set_rng_state(state)
    return files


def _find_folder(recipe: Any) -> Path | None:
    """Find the folder with the files of the weights that a recipe's processes can read by rows; None: they load all of them.

    What depends on numbers, the head and the borders of sequences, is tried on a small model of the same kind.
    """
    if not getattr(recipe, "reads_shards", False) or not is_there(SHRINK):
        return None
    name, adapter = adapters.find_start(recipe)
    if name is None or adapter is not None:
        return None
    try:
        folder = Path(name).expanduser()
        folder = folder if folder.is_dir() else Path(snapshot_download(name, allow_patterns=list(FILES)))
        config = load_way(SHRINK, "weights that are read by shards")(AutoConfig.from_pretrained(name))
        with torch.random.fork_rng(devices=[]):
            small = CausalLmSums(AutoModelForCausalLM.from_config(config, dtype=torch.float32), recipe.objective)
    except Exception:  # of any kind: loading all of them says why, if it fails, too
        return None
    return None if small.is_padded else folder


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The files of a model's weights.

    Attributes:
        model: is without weights.
        folder: with the files.
        files: name of a tensor there -> its file.
        names: name of a parameter of the model, as its state has it -> the name of the tensor there.
    """

    model: Any
    folder: Path
    files: dict[str, Path]
    names: dict[str, str]

    def read(self, name: str) -> torch.Tensor:
        """Read the whole tensor of a parameter."""
        key = self.names[name]
        with safe_open(self.files[key], "pt") as file:
            return file.get_tensor(key)

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Give each divided parameter that is on no device memory on `device`, and read its rows of this process."""
        empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        with keep_tied(model):
            allocate(model, device)
        tensors = {self.names[name]: p.detach() for name, p in model.named_parameters() if name in empty}
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(self.folder)), no_dist=True)


@contextlib.contextmanager
def keep_tied(model: nn.Module) -> Iterator[None]:
    """Let parameters that have several places be one again, where each place is given another one within this context."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((module, name))
    yield
    for (module, name), *others in places.values():
        for other, other_name in others:
            setattr(other, other_name, getattr(module, name))


def match(folder: Path, model: nn.Module) -> WeightFiles | None:
    """Find each parameter of a model without weights in the files of a folder; None: not all are there as it has them."""
    try:
        there = {key: (file, *header) for file, key, header in _read_headers(folder)}
    except (OSError, SafetensorError, UsageError, ValueError):
        return None
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.is_meta:
            continue  # an adapter's
        key = next((key for key in _list_keys(name) if key in there), None)
        if key is None:
            if any(other is parameter for other in map(model.get_parameter, names)):
                continue  # a tied one, which is there by its other name
            return None
        _, shape, dtype = there[key]
        is_held = parameter.dtype == DTYPES.get(dtype) or parameter.dtype in (torch.float32, torch.float64)
        if tuple(shape) != tuple(parameter.shape) or not is_held or dtype not in DTYPES:
            return None
        names[name] = key
    return WeightFiles(model, folder, {key: file for key, (file, *_) in there.items()}, names)


def _read_headers(folder: Path) -> Iterator[tuple[Path, str, tuple[list[int], str]]]:
    """Read which tensors a folder's files have: file, name, and shape and type.

    Raises:
        ValueError: two files have a tensor of one name, or the index names another file.
    """
    seen: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                if key in seen:
                    raise ValueError(f"{key} is in {seen[key].name} and {path.name}")
                seen[key] = path
                part = file.get_slice(key)
                yield path, key, (part.get_shape(), part.get_dtype())
    index = folder / "model.safetensors.index.json"
    if index.exists():
        wanted = read_json(index, str(index)).get("weight_map", {})
        if any(seen.get(key) != folder / name for key, name in wanted.items()):
            raise ValueError("the index names files that are not there")


def _list_keys(name: str) -> Iterator[str]:
    """List the names that files may have for a parameter: without what `SummedLosses` and peft put around the model."""
    name = name.removeprefix("model.").removeprefix("base_model.model.").replace(".base_layer.", ".")
    yield name
    yield name.partition(".")[2]  # GPT-2's have no `transformer.`
