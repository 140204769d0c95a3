"""Checkpoints: a folder `checkpoint-STEP` that appears whole or not at all, and resumes on any layout.

    model.safetensors   parameters and buffers
    optimizer.pt        state of the optimizer, by parameter names, and of the gradient scaler, if any (read with weights_only)
    recipe.yaml         the recipe as resolved
    state.json          step, fingerprints, versions, size of each file above

Nothing else decides what comes next: samples, masks and dropout noise are functions of the seed and the step. Sharded (FSDP2)
weights and states are gathered on process 0, so that the files are the same whatever wrote them.
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import accelerate
import safetensors.torch
import torch
import transformers
import yaml
from accelerate import Accelerator
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from recipes.errors import UsageError
from recipes.recipe import Recipe

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclasses.dataclass(frozen=True)
class State:
    """Where a run was.

    Attributes:
        step: optimizer steps taken.
        recipe_fingerprint: what decided the steps (see `Recipe.fingerprint`).
        data_fingerprints: what the samples were made of, tokenizer first (see `SentencePairs.fingerprints`).
        num_skipped: steps that the fp16 scaler skipped so far.
    """

    step: int = 0
    recipe_fingerprint: str = ""
    data_fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    num_skipped: int = 0
    run_id: str = ""


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders in `output_dir`, oldest first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in output_dir.glob("checkpoint-*")]
    return [path for match, path in sorted(((m, p) for m, p in found if m), key=lambda pair: int(pair[0][1]))]


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several, sorted; files hold it under the first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def _whole_state(accelerator: Accelerator, model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers, tied ones once, on the host of process 0; {} elsewhere. Called by all processes."""
    tensors = get_model_state_dict(model, options=WHOLE)
    for _, *others in _tied(accelerator.unwrap_model(model)):
        for name in others:
            tensors.pop(name, None)
    return tensors


def whole_model(accelerator: Accelerator, model: nn.Module, build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model without its wrapping; of a sharded one a copy that `build` makes, on process 0 only.

    Called by all processes.
    """
    if not isinstance(model, FSDPModule):
        return accelerator.unwrap_model(model)
    tensors = _whole_state(accelerator, model)
    if not accelerator.is_main_process:
        return None
    whole = build()
    whole.load_state_dict(tensors | {name: tensors[first] for first, *others in _tied(whole) for name in others})
    return whole


def save(
    accelerator: Accelerator,
    output_dir: Path,
    state: State,
    recipe: Recipe,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    total_limit: int | None = None,
) -> Path:
    """Write `checkpoint-STEP` into a hidden sibling, flush it to disk, rename it; only then remove old ones.

    Called by all processes; process 0 gathers and writes, the others wait for it.

    Args:
        model, optimizer: as prepared by `accelerator`.
        total_limit: checkpoints to keep, the newest; None keeps all.
    """
    folder = output_dir / f"checkpoint-{state.step}"
    tensors = _whole_state(accelerator, model)  # first: it shards again what an evaluation left gathered
    moments = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    if accelerator.is_main_process:
        partial = output_dir / f".{folder.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        safetensors.torch.save_file(tensors, str(partial / "model.safetensors"))
        scaler = accelerator.scaler.state_dict() if accelerator.scaler else None
        torch.save({"optimizer": moments, "scaler": scaler}, partial / "optimizer.pt")
        (partial / "recipe.yaml").write_text(recipe.to_yaml(), encoding="utf-8")
        record = dataclasses.asdict(state) | {
            "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
            "versions": {module.__name__: module.__version__ for module in (torch, accelerate, transformers)},
        }
        (partial / "state.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for path in [*partial.iterdir(), partial]:
            _flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        _flush(output_dir)
        if total_limit is not None:
            for old in checkpoints(output_dir)[:-total_limit]:
                shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return folder


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def find(resume_from_checkpoint: str | None, output_dir: Path, recipe: Recipe) -> tuple[Path | None, State]:
    """The checkpoint that `latest` or a path names, after checking that it is whole and belongs to `recipe`.

    None names none: (None, the state before the first step).

    Raises:
        UsageError: there is none, it is damaged, or of another recipe (names the fields that differ).
    """
    if resume_from_checkpoint is None:
        return None, State()
    if resume_from_checkpoint == "latest":
        if not checkpoints(output_dir):
            raise UsageError(
                f"resume_from_checkpoint is latest, but {output_dir} holds no checkpoint: check --output_dir, or leave "
                "--resume_from_checkpoint out to start anew"
            )
        folder = checkpoints(output_dir)[-1]
    else:
        folder = Path(resume_from_checkpoint)
    if not (folder / "state.json").is_file():
        inside = ", ".join(path.name for path in checkpoints(folder)) if folder.is_dir() else ""
        hint = f"it holds {inside}: name one of them" if inside else "give latest, or a folder checkpoint-STEP"
        raise UsageError(f"resume_from_checkpoint is {folder}, which is not a checkpoint: {hint}")
    try:
        record = json.loads((folder / "state.json").read_text(encoding="utf-8"))
        sizes = record["files"]
        state = State(**{field.name: record[field.name] for field in dataclasses.fields(State)})
        wrong = [name for name in sizes if not (path := folder / name).is_file() or path.stat().st_size != sizes[name]]
        theirs = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UsageError(f"checkpoint {folder} is damaged ({error!r}): resume from an older one") from None
    if wrong:
        raise UsageError(
            f"checkpoint {folder} is damaged (missing or of another size: {', '.join(wrong)}): resume from an older one"
        )
    if state.recipe_fingerprint != recipe.fingerprint:
        pairs = [(name, theirs.get(name), value) for name, value in recipe.decisive().items()]
        differ = "; ".join(f"{name} {old} there, {new} here" for name, old, new in pairs if old != new)
        raise UsageError(f"checkpoint {folder} is of another recipe: {differ}. Its recipe is {folder / 'recipe.yaml'}")
    return folder, state


def load(
    accelerator: Accelerator,
    folder: Path,
    state: State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_fingerprints: dict[str, str],
) -> None:
    """Read model, optimizer and scaler (as prepared by `accelerator`) from what `find` found.

    Raises:
        UsageError: the data are not those it was trained on.
    """
    for name, ours in data_fingerprints.items():
        if (theirs := state.data_fingerprints.get(name)) != ours:
            raise UsageError(
                f"checkpoint {folder} was trained on other data: fingerprint of the {name} {theirs} there, {ours} here. Give "
                "the same documents, in the same order, and the same tokenizer"
            )
    tensors = safetensors.torch.load_file(str(folder / "model.safetensors"))
    tied = _tied(accelerator.unwrap_model(model))
    tensors |= {name: tensors[first] for first, *others in tied for name in others}
    set_model_state_dict(model, tensors, options=WHOLE)
    moments = torch.load(folder / "optimizer.pt", map_location="cpu", weights_only=True)
    set_optimizer_state_dict(model, optimizer, moments["optimizer"], options=WHOLE)
    if accelerator.scaler is not None and moments["scaler"] is not None:
        accelerator.scaler.load_state_dict(moments["scaler"])


class Saver:
    def __init__(
        self, accelerator, output_dir, recipe, model, optimizer, resumed_from=0, total_limit=None, asynchronous=False
    ):
        self.a = (accelerator, output_dir), (recipe, model, optimizer, total_limit)
        self.last = resumed_from

    def save(self, state):
        if state.step != self.last:
            save(*self.a[0], state, *self.a[1])
        self.last = state.step

    def close(self):
        pass
