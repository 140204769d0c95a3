"""Checkpoints: a folder `checkpoint-STEP` that appears whole or not at all, is verified before use, and resumes on any layout.

    model.safetensors      parameters and buffers, by the names that the published model has
    adapter_model.safetensors  instead, of adapters and a frozen base: the adapters, by peft's names; a hash of the base is in
                           state.json
    config.json            the model's configuration, for `from_pretrained`, as are generation_config.json and the tokenizer's
                           files; of adapters adapter_config.json
    optimizer.safetensors  state of the optimizer, PARAMETER/KEY; learning rates and the like come from the recipe
    workers.safetensors    of a recipe with a `communication`: states of the workers' optimizers, or of the error feedback
    recipe.yaml            the recipe as resolved
    state.json             step, fingerprints, state of the gradient scaler, versions, whether newer ones replace it
    manifest.json          size and SHA-256 of each file above, and its own checksum

Nothing in these files can execute code. They hold all that decides the next steps: samples, masks and dropout noise are
functions of the seed, the step and the process, so no state of random number generators is needed. Process 0 writes the files;
sharded (FSDP2) weights and states are written by their owners, as model-00001-of-00008.safetensors and so on, each with its
rows of every tensor, and can be read by any number of processes, but not by `from_pretrained`: they have no config.json. All
processes must see the same output folder.
"""

import concurrent.futures
import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import accelerate
import safetensors.torch
import torch
import transformers
import xxhash
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from huggingface_hub import PyTorchModelHubMixin
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from tqdm import tqdm

from samestep._internals import torch_distributed
from samestep.errors import RunError, UsageError, reason
from samestep.models import adapters, pretrained
from samestep.recipe.reading import (
    MAX_JSON_BYTES,
    format_name,
    format_value,
    parse_json,
    read_json,
    read_text,
    read_yaml,
)
from samestep.recipe.recipe import VARIANTS, Recipe
from samestep.recipe.run_fields import STATE, find_problems
from samestep.recipe.run_settings import RunSettings
from samestep.recipe.settings import build
from samestep.training.copies import Copies, Peers, Store
from samestep.training.digest import digest_tensor
from samestep.training.launch import count_copies

if TYPE_CHECKING:
    from samestep.training.reduction import Reduction

ADAPTER = "adapter_model"
"""Part of a checkpoint that stands for `model`, where adapters alone are trained: the name that peft's files have."""
WORKERS = "workers"
"""Part of a checkpoint with the state of the recipe's `communication`."""
FROZEN = "frozen weights"
"""Name in messages of the weights that `fingerprint_frozen` is of."""
FOLLOWING = ("tokenizer", "template", "mask")
"""Fingerprints that may follow from the texts, as of a vocabulary that was trained on them."""
LATER_FIELDS = (
    "global_batch_size",
    "batch_schedule",
    "max_train_steps",
    "num_train_epochs",
    "lr_scheduler_type",
    "lr_num_steps",
    "min_lr_ratio",
    "lr_power",
    "lr_decay_ratio",
)
"""Fields of a recipe that may decide later steps only: a checkpoint whose recipe has other values is taken where all steps so
far are the same."""
LINES = ("metrics.jsonl", "samples.jsonl", "digests.jsonl", "noise.jsonl", "layers.jsonl")
"""Files of a line per step, evaluation, event or measurement; a resumed run writes those of later steps again."""
NUM_ROUTINE = 2
"""Newest checkpoints that remain where --checkpoints_total_limit is not given: older ones are deleted that the clock made."""
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
ON_HOST = StateDictOptions(cpu_offload=True)
FORMAT = 4
READABLE_FORMATS = (2, 3, FORMAT)
"""Formats that are read. In format 2, names in the files of the model begin with the name under which a `SummedLosses` has the
model. Before format 4, adapters are in model.safetensors, by their names in peft's model."""


@dataclasses.dataclass(frozen=True)
class State:
    """The point that a run had reached.

    Attributes:
        step: number of optimizer steps so far.
        recipe_fingerprint: hash of the recipe, which decided the steps (see `Recipe.fingerprint`).
        data_fingerprints: hashes of all that the samples were made of, for text the tokenizer's first (see a source's
            `fingerprints`).
        num_skipped: steps that were left out so far, by the fp16 scaler or because a gradient was not finite.
        run_id: identifies the run for trackers.
        scaler: state of the gradient scaler, plain numbers; None: there is none.
        exact_sum: what the next step's bits depend on beside all this, under --reproducible: the settings that decide them,
            and the exponent of the last gradients; None: the run is not reproducible.
        growth: of a batch that follows the measured noise, stages and measurements as plain numbers; None: it does not.
        streams: of streamed samples, the place of each virtual stream, integers by its number; None: they are not streamed.
    """

    step: int = 0
    recipe_fingerprint: str = ""
    data_fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    num_skipped: int = 0
    run_id: str = ""
    scaler: dict[str, Any] | None = None
    exact_sum: dict[str, Any] | None = None
    growth: dict[str, Any] | None = None
    streams: dict[str, Any] | None = None


class DamagedCheckpoint(Exception):
    """Raised for a checkpoint that must not be used; says why."""


def checkpoints(output_dir: Path) -> list[Path]:
    """List the checkpoint folders in `output_dir`, oldest first."""
    return sorted((path for path in output_dir.glob("checkpoint-*") if _parse_step(path) is not None), key=_parse_step)


def _parse_step(folder: Path) -> int | None:
    """Read STEP from the name checkpoint-STEP; None for other names, like checkpoint-007, which this program never writes."""
    match = re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", folder.name)
    return int(match[1]) if match else None


def _hidden_path(folder: Path, kind: str) -> Path:
    """Return the hidden name of a checkpoint folder.

    Args:
        kind: `partial`: it is being written or deleted, and worth nothing. `old`: it is moved aside while its successor takes
            its place.
    """
    return folder.with_name(f".{folder.name}.{kind}")


def _restore_old(output_dir: Path) -> None:
    """Give its name back to a checkpoint that was moved aside, if no successor took it."""
    for old in _list_hidden(output_dir, "old"):
        folder = old.with_name(old.name[1 : -len(".old")])
        if not folder.exists():
            old.rename(folder)


def _list_hidden(output_dir: Path, kind: str) -> list[Path]:
    """List the folders with hidden names of a kind (see `_hidden_path`), and none with similar names."""
    return [
        path
        for path in output_dir.glob(f".checkpoint-*.{kind}")
        if _parse_step(Path(path.name[1 : -len(kind) - 1])) is not None
    ]


def _has_manifest(folder: Path) -> bool:
    """Tell whether this program wrote a folder: another program's checkpoint may have such a name, and is never deleted."""
    return (folder / "manifest.json").exists()


def _is_routine(folder: Path) -> bool:
    """Tell whether the clock asked for a checkpoint, and nobody else. What cannot be read is kept."""
    try:
        return read_json(folder / "state.json", "state.json").get("is_routine") is True
    except UsageError:
        return False


def _discard(path: Path) -> None:
    """Delete a hidden folder, or a file of that name, as far as possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _find_aliases(model: nn.Module) -> list[list[str]]:
    """Find the names of each (tied) parameter that has several, sorted; files hold the parameter under the first name."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(group) for group in names.values() if len(group) > 1]


def _find_adapted(model: nn.Module) -> Any:
    """Find peft's model in one; None: it has no adapters."""
    return next((module for module in model.modules() if hasattr(module, "peft_config")), None)


def find_frozen(model: nn.Module) -> set[str]:
    """Name the frozen parameters of a model with adapters (peft's), which files leave out; of another model none."""
    if _find_adapted(model) is None:
        return set()
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named_parameters if not parameter.requires_grad}


def fingerprint_frozen(model: nn.Module, read: Callable[[str], torch.Tensor] | None = None) -> dict[str, str]:
    """Hash what `find_frozen` names: {FROZEN: 16 hexadecimal digits}, or {} where nothing is left out.

    Args:
        model: not sharded.
        read: reads the numbers of a parameter that the model is without.
    """
    state, names = model.state_dict(), sorted(find_frozen(model))
    lines = []
    for name in names:
        tensor = state[name] if read is None else read(name).to(state[name].dtype)
        lines.append(f"{name} {digest_tensor(tensor)}")
    return {FROZEN: xxhash.xxh3_64_hexdigest("\n".join(lines).encode())} if names else {}


def _find_prefix(names: Iterable[str]) -> str:
    """Find what all names of tensors begin with, because a module around the model that is published adds it; may be empty.

    >>> _find_prefix(["bert.pooler.weight", "bert.pooler.bias"]), _find_prefix(["body.weight", "head.weight"])
    ('bert.', '')
    """
    first_parts = {name.partition(".")[0] for name in names if "." in name} | {"" for name in names if "." not in name}
    return f"{first_parts.pop()}." if len(first_parts) == 1 and "" not in first_parts else ""


def name_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name the parameters of a model without wrapping as files name them: tied ones once, without what all names begin with."""
    aliases = {name for _, *names in _find_aliases(model) for name in names}
    prefix = _find_prefix(model.state_dict())
    named_parameters = model.named_parameters(remove_duplicate=False)
    return {name.removeprefix(prefix): parameter for name, parameter in named_parameters if name not in aliases}


def _unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Remove Accelerate's wrapping: torch lets the optimizer step to make its states, which an unused scaler would refuse."""
    return getattr(optimizer, "optimizer", optimizer)


def _flatten(moments: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": tensor for name, states in moments.items() for key, tensor in states.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Writing


@dataclasses.dataclass
class Trained:
    """The objects that a run trains, and a checkpoint holds.

    Attributes:
        model, optimizer: as prepared by Accelerate.
        data_fingerprints: see `State`.
        tokenizer: of transformers, saved with the model; None: there is none.
    """

    model: Any
    optimizer: Any
    data_fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    tokenizer: transformers.PreTrainedTokenizerBase | None = None


class Saver:
    """Writes a run's checkpoints. Called by all processes.

    A failure to write (disk full, folder gone) does not end the run: a warning says so at once, the earlier checkpoints stay,
    and `close` raises if the last one is missing.

    Args:
        accelerator, recipe: the run's.
        settings: `output_dir`, where the folders go. `checkpoints_total_limit`: folders to keep, the newest; None keeps
            all but routine ones, which go when `NUM_ROUTINE` are newer.
            `async_checkpointing`: copy the state to the host and write it in a thread while training goes on; the next save
            waits for it.
        trained: what is saved.
        step: of the state that was resumed. Later steps' checkpoints in the folder are removed after the first new one.
        reduction: how gradients become the step's: what it lacks beside model and optimizer goes into a file of its own.
        describe: returns further fields of `State`, of what watches the run.
        copies: where else checkpoints are kept.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        settings: RunSettings,
        trained: Trained,
        step: int,
        reduction: "Reduction",
        describe: Callable[[], dict[str, Any]] = dict,
        copies: Copies | None = None,
    ):
        self.accelerator, self.recipe, self.settings, self.reduction = accelerator, recipe, settings, reduction
        self.output_dir, self.trained, self.describe = Path(settings.output_dir), trained, describe
        self.step = step
        self.abandoned_folders = [path for path in checkpoints(self.output_dir) if _parse_step(path) > step]
        self.failure: str | None = None
        self.thread = concurrent.futures.ThreadPoolExecutor(1) if settings.async_checkpointing else None
        self.writing: concurrent.futures.Future | None = None
        self.store, self.peers = copies or Copies()
        self._copy_to_store(step)  # unless that was done: the session before may have been killed

    def save(self, step: int, num_skipped: int, run_id: str, *, is_routine: bool = False) -> None:
        """Write `checkpoint-STEP`, unless the run was resumed at this step or has saved it already.

        Args:
            step, num_skipped, run_id: see `State`.
            is_routine: whether the checkpoint is deleted when `NUM_ROUTINE` are newer, as the clock asked for it.
        """
        if step == self.step:
            return
        self.step = step
        self._wait()  # before copying: there is one copy at a time
        bare_model = self.accelerator.unwrap_model(self.trained.model)
        frozen = find_frozen(bare_model)
        options = dataclasses.replace(ON_HOST, ignore_frozen_params=bool(frozen))
        tensors = get_model_state_dict(self.trained.model, options=options)
        for name in frozen.union(*(aliases for _, *aliases in _find_aliases(bare_model))):
            tensors.pop(name, None)
        prefix = _find_prefix(tensors)
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        part = "model"
        if frozen and not isinstance(self.trained.model, FSDPModule):
            part, names = ADAPTER, adapters.name_in_files(_find_adapted(bare_model), tensors)
            # Buffers of the base, which steps may change (biases that choose experts), are in peft's files under no other name
            tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
        optimizer = _unwrap(self.trained.optimizer)
        moments = _flatten(get_optimizer_state_dict(self.trained.model, optimizer, options=ON_HOST)["state"])
        parts = {part: _select_rows(self.accelerator, tensors), "optimizer": _select_rows(self.accelerator, moments)}
        if (more := self.reduction.get_tensors()) is not None:
            parts[WORKERS] = more
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler else None
        exact_sum = self.reduction.describe_state()
        fingerprints = self.recipe.fingerprint, self.trained.data_fingerprints
        state = State(step, *fingerprints, num_skipped, run_id, scaler, exact_sum, **self.describe())
        writes = self.accelerator.process_index < (self._num_owners or 0)
        if self.accelerator.is_main_process:
            writes = False
            with self._warn_on_failure(step):
                self._tidy()
                self._partial_path(step).mkdir(parents=True)
                writes = True
        if isinstance(self.trained.model, FSDPModule):
            self.accelerator.wait_for_everyone()
        if writes and self.thread is not None and self.accelerator.device.type == "cpu":
            with self._warn_on_failure(step):  # rows are the parameters themselves, not copies
                writes = False
                parts = {part: {name: t.clone() for name, t in rows.items()} for part, rows in parts.items()}
                writes = True
        if writes or self.peers.is_member:
            arguments = (state, parts, is_routine) if writes else (None, {}, is_routine)
            if self.thread is None:
                self._write_and_send(*arguments)
            else:
                self.writing = self.thread.submit(self._write_and_send, *arguments)
        if self.thread is None:
            self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and let go of the model, which must not outlive the process group.

        Raises:
            RunError: the last checkpoint could not be written.
        """
        self._wait()
        if self.thread is not None:
            self.thread.shutdown()
        try:
            self.store.close()
        except RunError as error:
            self.failure = self.failure or str(error)
        if self.accelerator.is_main_process or self.peers.is_member:
            # A finished run that was killed at its end, and resumed, saves nothing
            with contextlib.suppress(OSError):
                self._tidy()
                self._keep_to_limit()
                self.store.delete_doomed()
        self.trained = Trained(None, None)
        (failure,) = broadcast_object_list([self.failure])
        if failure is not None:
            raise RunError(failure)

    def finish_writing(self) -> None:
        """Finish the checkpoint that is being written, where this process does so alone: other processes may have ended."""
        if not isinstance(self.trained.model, FSDPModule):
            with contextlib.suppress(RuntimeError):  # of a copy to a machine that has gone
                self._wait()

    @property
    def _num_owners(self) -> int | None:
        """Number of processes that each write their part of the weights, the first ones; None: process 0 writes whole ones."""
        if not isinstance(self.trained.model, FSDPModule):
            return None
        return self.accelerator.num_processes // count_copies(self.accelerator)

    def _wait(self) -> None:
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def _partial_path(self, step: int) -> Path:
        return _hidden_path(self.output_dir / f"checkpoint-{step}", "partial")

    def _tidy(self) -> None:
        """Delete the folders that killed runs left half-written or half-deleted."""
        _restore_old(self.output_dir)
        for kind in ("partial", "old"):
            for folder in _list_hidden(self.output_dir, kind):
                _discard(folder)

    def _delete(self, folders: list[Path]) -> None:
        held_names = self.store.held_names
        folders = [folder for folder in folders if folder.name not in held_names]
        self.store.delete(folder.name for folder in folders)
        for folder in folders:
            with contextlib.suppress(OSError):  # renamed first: a deletion cut short leaves nothing damaged
                _discard(folder.rename(_hidden_path(folder, "partial")))

    def _keep_to_limit(self) -> None:
        """Delete the oldest checkpoints, also those that a session left which was killed before it deleted them."""
        limit = self.settings.checkpoints_total_limit
        folders = [
            path for path in checkpoints(self.output_dir) if path not in self.abandoned_folders and _has_manifest(path)
        ]
        if limit is not None:
            self._delete(folders[:-limit])
        else:
            self._delete([path for path in folders[:-NUM_ROUTINE] if _is_routine(path)])

    @contextlib.contextmanager
    def _warn_on_failure(self, step: int):
        """Turn a refusal of storage or memory into a warning, and leave the folder as it was."""
        try:
            yield
        except (OSError, SafetensorError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's lack of memory
            reason = " ".join(str(error).split()) or repr(error)
            if not self.accelerator.is_main_process:
                self._tell(step, f"process {self.accelerator.process_index}: {reason}")
                return
            with contextlib.suppress(OSError):
                _restore_old(self.output_dir)
            _discard(self._partial_path(step))
            names = [path.name for path in checkpoints(self.output_dir) if path not in self.abandoned_folders]
            self.failure = f"checkpoint-{step} could not be written to {self.output_dir} ({reason}); "
            self.failure += f"the newest is {names[-1]}" if names else "there is none"
            tqdm.write(f"WARNING: {self.failure}. Training goes on", file=sys.stderr)

    def _write_and_send(self, state: State | None, parts: dict[str, dict[str, torch.Tensor]], is_routine: bool) -> None:
        """Write what is this process's (state None: nothing), and send or receive the copies of other machines."""
        folder = None
        if state is not None:
            with self._warn_on_failure(state.step):
                self._write(state, parts, is_routine)
                folder = self.output_dir / f"checkpoint-{state.step}"
        if self.accelerator.is_main_process:
            self.peers.send(folder)
        elif self.peers.receive(_verify) is not None:
            self._delete_abandoned()
            self._keep_to_limit()

    def _delete_abandoned(self, but: Path | None = None) -> None:
        self._delete([path for path in self.abandoned_folders if path != but and _has_manifest(path)])
        self.abandoned_folders = []

    def _write(self, state: State, parts: dict[str, dict[str, torch.Tensor]], is_routine: bool) -> None:
        """Write this process's parts; process 0 waits for the other processes, and makes a checkpoint of all parts."""
        folder, partial = self.output_dir / f"checkpoint-{state.step}", self._partial_path(state.step)
        files = self._write_parts(partial, parts)
        if not self.accelerator.is_main_process:
            self._tell(state.step, files)
            return
        files |= self._collect_files(state.step)
        files |= self._write_description(partial)
        (partial / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
        versions = {module.__name__: module.__version__ for module in (torch, accelerate, transformers)}
        record = dataclasses.asdict(state) | {"versions": versions, "is_routine": is_routine}
        (partial / "state.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        files |= {name: _flush_and_hash(partial / name) for name in ("recipe.yaml", "state.json")}
        manifest = _manifest({"format": FORMAT, "step": state.step, "files": files})
        (partial / "manifest.json").write_text(manifest, encoding="utf-8")
        _flush(partial / "manifest.json")
        _flush(partial)
        old = _hidden_path(folder, "old")
        if folder.exists():  # of an abandoned future of this run
            if not _has_manifest(folder):
                raise OSError(f"{folder} is there, and no checkpoint of this program: move it away")
            folder.rename(old)
        partial.rename(folder)
        _flush(self.output_dir)
        self.failure = None
        _discard(old)
        self._delete_abandoned(but=folder)
        self._copy_to_store(state.step)
        self._keep_to_limit()

    def _copy_to_store(self, step: int) -> None:
        folder = self.output_dir / f"checkpoint-{step}"
        if _has_manifest(folder):
            self.store.add(folder, [self.output_dir / name for name in LINES])

    def _write_parts(self, partial: Path, parts: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict]:
        index = self.accelerator.process_index if self._num_owners else 0
        names = {part: _name_files(part, self._num_owners)[index] for part in parts}
        for part, tensors in parts.items():
            safetensors.torch.save_file(tensors, str(partial / names[part]))
        return {name: _flush_and_hash(partial / name) for name in names.values()}

    def _write_description(self, partial: Path) -> dict[str, dict]:
        """Write what `from_pretrained` needs beside the weights, unless these are sharded: configuration and tokenizer."""
        if isinstance(self.trained.model, FSDPModule):
            return {}
        recipe: Any = self.recipe  # one that has an architecture
        before = set(partial.iterdir())
        model = next(self.accelerator.unwrap_model(self.trained.model).children(), None)
        if isinstance(model, transformers.PreTrainedModel):
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.to_json_file(partial / "config.json")
        elif hasattr(model, "peft_config"):
            model.active_peft_config.save_pretrained(partial)
            model = model.get_base_model()
        elif isinstance(model, PyTorchModelHubMixin):
            (partial / "config.json").write_text(json.dumps(recipe.architecture, indent=2) + "\n", encoding="utf-8")
        pretrained.save_generation_config(model, partial)
        if self.trained.tokenizer is not None:
            self.trained.tokenizer.save_pretrained(partial)
        return {path.name: _flush_and_hash(path) for path in sorted(set(partial.iterdir()) - before)}

    # Messages of the writers go through the store that connects the processes: collectives belong to training.

    def _tell(self, step: int, files: dict[str, dict] | str) -> None:
        store = torch_distributed.default_store()
        store.set(f"samestep/saved/{step}/{self.accelerator.process_index}", json.dumps(files))

    def _collect_files(self, step: int) -> dict[str, dict]:
        """Collect sizes and hashes of the files that the other processes wrote."""
        files: dict[str, dict] = {}
        if not isinstance(self.trained.model, FSDPModule):
            return files
        store, deadline = torch_distributed.default_store(), time.monotonic() + self.settings.ddp_timeout
        for rank in range(1, self._num_owners):
            key = f"samestep/saved/{step}/{rank}"
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise OSError(f"process {rank} has not written its part for {self.settings.ddp_timeout:.0f} s")
                time.sleep(0.01)
            answer = json.loads(store.get(key))
            store.delete_key(key)
            if isinstance(answer, str):
                raise OSError(answer)
            files |= answer
        return files


def _select_rows(accelerator: Accelerator, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Select the part of `tensors` that this process writes: its rows of sharded ones; process 0 also all other tensors."""
    shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    assert all(tensor.placements[-1] == Shard(0) for tensor in shards.values()), "FSDP2 shards rows"
    rows = {name: tensor.to_local().contiguous() for name, tensor in shards.items()}
    if accelerator.is_main_process:
        rows |= {name: tensor.contiguous() for name, tensor in tensors.items() if name not in shards}
    return rows


def _name_files(part: str, num_owners: int | None) -> list[str]:
    """Name the files of a part by their owners; None: the part is not sharded."""
    if num_owners is None:
        return [f"{part}.safetensors"]
    return [f"{part}-{number:05}-of-{num_owners:05}.safetensors" for number in range(1, num_owners + 1)]


def read(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """Read whole tensors: rows of all files that the manifest lists, in the order of the processes that wrote them."""
    rows: dict[str, list[torch.Tensor]] = {}
    entries = read_json(folder / "manifest.json", f"checkpoint {folder}: manifest.json")["files"]
    if part == "model" and f"{ADAPTER}.safetensors" in entries:
        part = ADAPTER
    for file in sorted(name for name in entries if name.startswith(part) and name.endswith(".safetensors")):
        for name, tensor in safetensors.torch.load_file(str(folder / file)).items():
            rows.setdefault(name, []).append(tensor)
    # Parts go as soon as they are joined, so that there is little more than one copy of all
    return {name: parts[0] if len(parts := rows.pop(name)) == 1 else torch.cat(parts) for name in list(rows)}


def _flush_and_hash(path: Path) -> dict[str, int | str]:
    """Flush a file to the disk, and return its size and hash."""
    _flush(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(content: dict[str, Any]) -> str:
    """Write the text of a manifest, the only one for its content: any other text is damaged."""
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"checksum": checksum}, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def verify(folder: Path) -> State:
    """Return the state in a checkpoint, after checking that every byte is as it was written.

    Raises:
        DamagedCheckpoint: bytes have changed, or a file cannot be read.
    """
    try:
        return _verify(folder)
    except OSError as error:
        name = Path(error.filename).name if isinstance(error.filename, str) else "it"
        raise DamagedCheckpoint(f"{name} cannot be read ({error.strerror or error})") from None


def _verify(folder: Path) -> State:
    manifest = folder / "manifest.json"
    if not manifest.exists():
        is_old = (folder / "state.json").exists()
        raise DamagedCheckpoint(
            "manifest.json is missing" + (": damaged, or written by an earlier version" if is_old else "")
        )
    _check_is_file(manifest)
    try:
        text = read_text(manifest, "manifest.json", MAX_JSON_BYTES)
        content = {key: value for key, value in parse_json(text, "manifest.json").items() if key != "checksum"}
        is_whole = text == _manifest(content)
    except (ValueError, TypeError):  # UsageError is a ValueError
        is_whole = False
    if not is_whole:
        raise DamagedCheckpoint("manifest.json is damaged")
    if content.get("format") not in READABLE_FORMATS:
        raise DamagedCheckpoint(
            f"it has format {format_value(content.get('format'))}, this version reads "
            f"{' and '.join(map(str, READABLE_FORMATS))}"
        )
    step, files = content.get("step"), content.get("files")
    if type(step) is not int or not isinstance(files, dict) or not _is_complete(files):
        raise DamagedCheckpoint("manifest.json lacks entries")
    for name, entry in files.items():  # sizes first: hashing takes its time
        _check_is_file(folder / name)
        size = (folder / name).stat().st_size
        expected_size = entry.get("size") if isinstance(entry, dict) else None
        if size != expected_size:
            raise DamagedCheckpoint(f"{name} has {size} bytes, not {format_value(expected_size)}")
    for name, entry in files.items():
        if _sha256(folder / name) != entry.get("sha256"):
            raise DamagedCheckpoint(f"{name} is not as it was written (SHA-256)")
    try:
        for name in (name for name in files if name.endswith(".safetensors")):
            with safe_open(folder / name, "pt") as file:
                file.keys()
        record = read_json(folder / "state.json", "state.json")
        record = {"exact_sum": None, "growth": None, "streams": None} | record  # earlier versions had none
        if problems := find_problems(record, STATE):
            raise ValueError("; ".join(problems.values()))
        state = State(**{field.name: record[field.name] for field in dataclasses.fields(State)})
    except KeyError as error:
        raise DamagedCheckpoint(f"state.json lacks {error}") from None
    except (SafetensorError, ValueError) as error:
        raise DamagedCheckpoint(f"it was written wrongly: {reason(error)}") from None
    folder_step = _parse_step(folder)
    if not state.step == step == (step if folder_step is None else folder_step):
        raise DamagedCheckpoint(f"it is of step {state.step}")
    return state


def _is_complete(files: dict[str, Any]) -> bool:
    """Tell whether a checkpoint of `files` has all parts of all owners, and nothing else but descriptions of the model."""
    whole = next((part for part in ("model", ADAPTER) if f"{part}.safetensors" in files), None)
    num_owners = None if whole else max(1, sum(name.startswith("model-") for name in files))
    names = [*_name_files(whole or "model", num_owners), *_name_files("optimizer", num_owners)]
    parts = {"recipe.yaml", "state.json", *names}
    others = files.keys() - parts - {f"{WORKERS}.safetensors"}
    return parts <= files.keys() and all(
        Path(name).name == name and not name.endswith(".safetensors") for name in others
    )


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        raise DamagedCheckpoint(f"{path.name} is {'not a file' if path.exists() else 'missing'}")


def share_newest(peers: Peers, output_dir: Path) -> None:
    """Give all machines the newest whole checkpoint that one of them holds. Called by all processes."""

    def find_newest() -> int:
        with contextlib.suppress(OSError):
            _restore_old(output_dir)
        return find_newest_step(output_dir) or -1

    peers.share_newest(find_newest, _verify)


def find_newest_step(output_dir: Path) -> int:
    """Find the step of the newest checkpoint that is whole; 0: there is none."""
    for folder in reversed(checkpoints(output_dir)):
        with contextlib.suppress(DamagedCheckpoint):
            return verify(folder).step
    return 0


def find(
    accelerator: Accelerator,
    resume_from_checkpoint: str | None,
    output_dir: Path,
    recipe: Recipe,
    store: Store | None = None,
) -> tuple[Path | None, State]:
    """Find the checkpoint that a path or `latest` names, verify it, and check its recipe.

    Called by all processes; process 0 reads the files. `latest` is the newest checkpoint that is whole; a warning names each
    newer one that is damaged, and why. A newer one in the store is brought from there.

    Returns:
        Folder and state; (None, the state before the first step) if there is no checkpoint at all, or None was given.

    Raises:
        UsageError: the checkpoint is damaged (for `latest`: all are), or of another recipe (names the fields that differ).
    """
    if resume_from_checkpoint is None:
        return None, State()
    answer: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            answer = [_find(resume_from_checkpoint, output_dir, recipe, store or Store())]
        except UsageError as error:
            answer = [error.problems]
        except OSError as error:  # the other processes wait for an answer
            answer = [[f"resume_from_checkpoint is {resume_from_checkpoint}, which cannot be read: {error}"]]
    (result,) = broadcast_object_list(answer)
    if isinstance(result, list):
        raise UsageError(result)
    return result


def _find(resume_from_checkpoint: str, output_dir: Path, recipe: Recipe, store: Store) -> tuple[Path | None, State]:
    if resume_from_checkpoint != "latest":
        folder = Path(resume_from_checkpoint)
        with contextlib.suppress(OSError):
            _restore_old(folder.parent)
        if _parse_step(folder) is None and not (folder / "manifest.json").exists():
            names = ", ".join(path.name for path in checkpoints(folder)) if folder.is_dir() else ""
            hint = f"it holds {names}: name one of them" if names else "give latest, or a folder checkpoint-STEP"
            raise UsageError(f"resume_from_checkpoint is {folder}, which is not a checkpoint: {hint}")
        try:
            return _check_recipe(folder, verify(folder), recipe)
        except DamagedCheckpoint as reason:
            raise UsageError(f"checkpoint {folder} is damaged: {reason}. Resume from an older one") from None
    with contextlib.suppress(OSError):
        _restore_old(output_dir)
    problems = []
    copies = [output_dir / name for name in store.list_checkpoints()]
    for folder in sorted({*checkpoints(output_dir), *copies}, key=_parse_step, reverse=True):
        try:
            state = verify(folder)
        except DamagedCheckpoint as reason:
            if folder.exists():
                problems.append(f"{folder.name} is damaged: {reason}")
            state = _bring(store, folder) if folder in copies else None
            if state is None:
                continue
        for line in problems:
            print(f"WARNING: {line}; passed over", file=sys.stderr, flush=True)
        return _check_recipe(folder, state, recipe)
    if problems:
        raise UsageError(
            f"resume_from_checkpoint is latest, but no checkpoint in {output_dir} is whole ({'; '.join(problems)}): start "
            "anew with --overwrite_output_dir instead"
        )
    print(f"No checkpoint in {output_dir} yet: from the start", flush=True)
    return None, State()


def _bring(store: Store, folder: Path) -> State | None:
    """Bring a checkpoint from the store, in place of what is there; None, with a warning, if it is not whole there, either."""
    partial = _hidden_path(folder, "partial")
    try:
        store.bring(folder.name, partial)
        state = _verify(partial)
        if f"checkpoint-{state.step}" != folder.name:
            raise DamagedCheckpoint(f"it is of step {state.step}")
        for name in LINES:
            store.bring_lines(folder.with_name(name))
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except (OSError, DamagedCheckpoint) as error:
        _discard(partial)
        print(f"WARNING: {folder.name} in {store.url} cannot be used: {error}", file=sys.stderr, flush=True)
        return None
    print(f"{folder.name} comes from {store.url}", flush=True)
    return state


def _check_recipe(folder: Path, state: State, recipe: Recipe) -> tuple[Path, State]:
    if state.recipe_fingerprint != recipe.fingerprint:
        saved_recipe = _read_recipe(folder)
        pairs = [(name, saved_recipe.get(name), value) for name, value in recipe.decisive_fields().items()]
        differences = {name: (saved, value) for name, saved, value in pairs if saved != value}
        if not differences.keys() <= set(LATER_FIELDS):
            text = "; ".join(f"{name} {saved} there, {value} here" for name, (saved, value) in differences.items())
            raise UsageError(
                f"checkpoint {folder} is of another recipe: {text}. Its recipe is {folder / 'recipe.yaml'}"
            )
    return folder, state


def _read_recipe(folder: Path) -> dict[str, Any]:
    """Read the values of a checkpoint's recipe.yaml, as `Recipe.decisive_fields` has them."""
    try:
        values = read_yaml(folder / "recipe.yaml", "recipe.yaml")
        sentences = {name: kind.read(values[name]).sentence for name, kind in VARIANTS.items() if values.get(name)}
        return values | sentences
    except (UsageError, TypeError) as error:
        raise UsageError(f"checkpoint {format_name(folder)} is damaged: {error}. Resume from an older one") from None


def read_earlier_recipe(folder: Path, state: State, recipe: Recipe) -> Recipe | None:
    """Read the recipe of a checkpoint that `find` returned, if it is another one: it differs in `LATER_FIELDS` alone.

    Returns:
        `recipe` with the checkpoint's values; None: they are the same.
    """
    if state.recipe_fingerprint == recipe.fingerprint:
        return None
    saved = _read_recipe(folder)
    values, ours = {name: saved.get(name) for name in LATER_FIELDS}, recipe.decisive_fields()
    if all(ours[name] == value for name, value in values.items()):
        return None  # an earlier version's, without fields that are null here
    return build(type(recipe), vars(recipe) | values, f"recipe {folder / 'recipe.yaml'}")


def _check_data(folder: Path, state: State, data_fingerprints: Mapping[str, str]) -> None:
    """Refuse other data than those of a checkpoint, naming first what people change, and hashes last.

    Raises:
        UsageError: a fingerprint differs.
    """
    saved = state.data_fingerprints
    names = [name for name, fingerprint in data_fingerprints.items() if saved.get(name) != fingerprint]
    if not names:
        return
    hashes = ", ".join(f"{name} {saved.get(name)} there, {data_fingerprints[name]} here" for name in names)
    own = [name for name in names if name not in FOLLOWING]
    if own == [FROZEN]:
        problem, remedy = "another base", "Give the base of its adapter"
    elif not own:
        problem, remedy = (
            f"the same data with another {' and another '.join(names)}",
            "Give the ones it was trained with" + f", --tokenizer_name {folder}" * ("tokenizer" in names),
        )
    else:
        following = " and the ".join(name for name in names if name in FOLLOWING)
        named = ", ".join(f"{field} {value}" for field, value in _name_data(folder).items())
        problem = f"other data: {' and '.join(own)} differ" + (f", and so does the {following}" if following else "")
        place = f" ({named})" if named else ""
        remedy = f"Give the data that it was trained on{place}, unchanged and in the same order"
        remedy += f", and the same {following}" if following else ""
        if "model_name_or_path" in _read_recipe(folder):
            remedy += f"; on other data begin anew from its weights, --model_name_or_path {folder}"
    raise UsageError(f"checkpoint {folder} was trained on {problem}. {remedy} (fingerprints: {hashes})")


def _name_data(folder: Path) -> dict[str, str]:
    """Name the data of a checkpoint's recipe as they were given: field -> value, of those that are given."""
    values = _read_recipe(folder)
    named = {key: values.get(key) for key in ("train_file", "train_dir", "dataset_name") if values.get(key)}
    return {key: " ".join(value) if isinstance(value, list | tuple) else str(value) for key, value in named.items()}


def load(
    accelerator: Accelerator,
    folder: Path,
    state: State,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_fingerprints: dict[str, str],
) -> None:
    """Load model, optimizer and scaler (as prepared by `accelerator`) from the checkpoint that `find` returned.

    Raises:
        UsageError: the checkpoint was trained on other data, its tensors do not fit the model, or this process does not see the
            folder.
    """
    _check_data(folder, state, data_fingerprints)
    bare_model = accelerator.unwrap_model(model)
    current = get_optimizer_state_dict(model, _unwrap(optimizer))
    own_tensors, frozen = get_model_state_dict(model), find_frozen(bare_model)
    # Divided weights are read by process 0, and sent from there: hosts need not have them once for each process
    is_divided, problems = isinstance(model, FSDPModule), [""]
    tensors: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    if accelerator.is_main_process or not is_divided:
        try:
            tensors, moments = _read_for(folder, bare_model, own_tensors)
            _check_shapes(folder, tensors, {name: own for name, own in own_tensors.items() if name not in frozen})
            _check_shapes(folder, moments, _flatten(current["state"]))
        except UsageError as error:
            problems = [str(error)]
        else:
            state_of = {
                name: {key: moments[f"{name}/{key}"] for key in keys} for name, keys in current["state"].items()
            }
            states = {"state": state_of, "param_groups": current["param_groups"]}
    if is_divided:
        problems = broadcast_object_list(problems)
    if problems != [""]:
        raise UsageError(problems[0])
    options = dataclasses.replace(WHOLE, broadcast_from_rank0=is_divided)
    set_model_state_dict(model, tensors, options=dataclasses.replace(options, strict=not frozen))
    set_optimizer_state_dict(model, _unwrap(optimizer), states, options=options)
    lay_out_as_parameters(optimizer)
    if accelerator.scaler is not None and state.scaler:  # {}: of a scaler that was off
        accelerator.scaler.load_state_dict(state.scaler)


def _read_for(
    folder: Path, model: nn.Module, own_tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Read the tensors of a model, by the names that its state has, `own_tensors`, and the moments, from a checkpoint.

    Raises:
        UsageError: they cannot be read.
    """
    try:
        tensors, moments = (read(folder, part) for part in ("model", "optimizer"))
    except (OSError, SafetensorError, UsageError) as error:
        raise UsageError(
            f"checkpoint {folder} cannot be read ({error}): put it where every process sees it under this name"
        ) from None
    manifest = read_json(folder / "manifest.json", f"checkpoint {folder}: manifest.json")
    if f"{ADAPTER}.safetensors" in manifest["files"]:
        own = adapters.name_in_model(_find_adapted(model))
        tensors = {own.get(name, name): tensor for name, tensor in tensors.items()}
    if manifest["format"] > 2:
        prefix = _find_prefix(own_tensors)
        tensors = {prefix + name: tensor for name, tensor in tensors.items()}
    groups = _find_aliases(model)
    return tensors | {
        name: tensors[first] for first, *aliases in groups if first in tensors for name in aliases
    }, moments


def lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the strides of their parameters: torch's fused optimizers are silently wrong where they differ."""
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            is_whole = not isinstance(parameter, DTensor) and moment.shape == parameter.shape
            if is_whole and moment.stride() != parameter.stride():
                moments[name] = torch.empty_like(parameter, requires_grad=False).copy_(moment)


def _check_shapes(folder: Path, saved_tensors: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    saved_shapes, shapes = (
        {name: list(tensor.shape) for name, tensor in group.items()} for group in (saved_tensors, tensors)
    )
    differences = [
        f"{name} {saved_shapes.get(name, 'is not')} there, {shapes.get(name, 'is not')} here"
        for name in sorted(saved_shapes.keys() | shapes.keys())
        if saved_shapes.get(name) != shapes.get(name)
    ]
    if differences:
        more = f"; and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise UsageError(
            f"checkpoint {folder} is of another model: {'; '.join(differences[:3])}{more}. Resume with the code and the "
            "versions of libraries that wrote it (they are in its state.json)"
        )
