"""Checkpoints: a folder `checkpoint-STEP` that appears whole or not at all, is verified before use, and resumes on any layout.

    model.safetensors      parameters and buffers
    optimizer.safetensors  state of the optimizer, PARAMETER/KEY; learning rates and the like come from the recipe
    recipe.yaml            the recipe as resolved
    state.json             step, fingerprints, state of the gradient scaler, versions
    manifest.json          size and SHA-256 of each file above, and its own checksum

Nothing in them can execute code. Nothing else decides what comes next: samples, masks and dropout noise are functions of the
seed, the step and the process, so there is no state of random number generators. Process 0 writes them; sharded (FSDP2) weights
and states are written by their owners, as model-00001-of-00008.safetensors and so on, each with its rows of every tensor, and
can be read by any number of processes. All must see the same output folder.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import safetensors.torch
import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
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

from samestep._internals import torch_distributed
from samestep.errors import RunError, UsageError
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
ON_HOST = StateDictOptions(cpu_offload=True)
FORMAT = 2


@dataclasses.dataclass(frozen=True)
class State:
    """Where a run was.

    Attributes:
        step: optimizer steps taken.
        recipe_fingerprint: what decided the steps (see `Recipe.fingerprint`).
        data_fingerprints: what the samples were made of, of text the tokenizer first (see a source's `fingerprints`).
        num_skipped: steps that were left out so far, by the fp16 scaler or because a gradient was not finite.
        run_id: of the run, for trackers.
        scaler: state of the gradient scaler, plain numbers; None: there is none.
    """

    step: int = 0
    recipe_fingerprint: str = ""
    data_fingerprints: dict[str, str] = dataclasses.field(default_factory=dict)
    num_skipped: int = 0
    run_id: str = ""
    scaler: dict[str, Any] | None = None


class Damaged(Exception):
    """A checkpoint that must not be used; says why."""


def checkpoints(output_dir: Path) -> list[Path]:
    """Checkpoint folders in `output_dir`, oldest first."""
    return sorted((path for path in output_dir.glob("checkpoint-*") if _step_of(path) is not None), key=_step_of)


def _step_of(folder: Path) -> int | None:
    """checkpoint-STEP -> STEP, as it is written here: checkpoint-007 is somebody else's."""
    match = re.fullmatch(r"checkpoint-(0|[1-9][0-9]*)", folder.name)
    return int(match[1]) if match else None


def _hidden(folder: Path, kind: str) -> Path:
    """`partial`: being written or deleted, worth nothing. `old`: moved aside while its successor takes its place."""
    return folder.with_name(f".{folder.name}.{kind}")


def _put_back(output_dir: Path) -> None:
    """Give its name back to a checkpoint that was moved aside, if no successor took it."""
    for old in _left(output_dir, "old"):
        folder = old.with_name(old.name[1 : -len(".old")])
        if not folder.exists():
            old.rename(folder)


def _left(output_dir: Path, kind: str) -> list[Path]:
    """What `_hidden` named so, and nothing with a similar name."""
    return [
        path
        for path in output_dir.glob(f".checkpoint-*.{kind}")
        if _step_of(Path(path.name[1 : -len(kind) - 1])) is not None
    ]


def _is_ours(folder: Path) -> bool:
    """Whether it was written here: a checkpoint of another program may have such a name, and is never deleted."""
    return (folder / "manifest.json").exists()


def _discard(path: Path) -> None:
    """Delete a hidden folder, or what is in its place, as far as possible."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


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


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions) -> dict[str, Any]:
    """{"state": {parameter: {key: tensor}}, "param_groups": ...}. Called by all processes."""
    return get_optimizer_state_dict(model, _unwrapped(optimizer), options=options)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Without Accelerate's wrapping: torch takes a step of it to make the states, which an unused scaler would refuse."""
    return getattr(optimizer, "optimizer", optimizer)


def _flat(moments: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": tensor for name, of in moments.items() for key, tensor in of.items()}


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


# ---------------------------------------------------------------------------------------------------------------------
# Writing


class Saver:
    """Writes a run's checkpoints. Called by all processes.

    A failure to write (disk full, folder gone) does not end the run: it is said at once, the earlier checkpoints stay, and
    `close` raises if the last one is missing.

    Args:
        accelerator, recipe: of this run.
        model, optimizer: as prepared by `accelerator`.
        data_fingerprints: see `State`.
        settings: `output_dir`, where the folders go. `checkpoints_total_limit`: folders to keep, the newest; None keeps all.
            `async_checkpointing`: copy the state to the host and write it in a thread while training goes on; the next save
            waits for it.
        start: what was resumed. Later steps' checkpoints in the folder are removed after the first new one.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_fingerprints: dict[str, str],
        settings: RunSettings,
        start: State,
    ):
        self.accelerator, self.recipe, self.output_dir = accelerator, recipe, Path(settings.output_dir)
        self.model, self.optimizer, self.data_fingerprints, self.settings = (
            model,
            optimizer,
            data_fingerprints,
            settings,
        )
        self.step = start.step
        self.abandoned = [path for path in checkpoints(self.output_dir) if _step_of(path) > start.step]
        self.failure: str | None = None
        self.thread = concurrent.futures.ThreadPoolExecutor(1) if settings.async_checkpointing else None
        self.writing: concurrent.futures.Future | None = None

    def save(self, step: int, num_skipped: int, run_id: str) -> None:
        """Write `checkpoint-STEP`, unless it is where the run was resumed or what was saved last."""
        if step == self.step:
            return
        self.step = step
        self._wait()  # before copying: there is one copy at a time
        tensors = get_model_state_dict(self.model, options=ON_HOST)
        for _, *others in _tied(self.accelerator.unwrap_model(self.model)):
            for name in others:
                tensors.pop(name, None)
        moments = _flat(_moments(self.model, self.optimizer, ON_HOST)["state"])
        parts = {"model": _own_rows(self.accelerator, tensors), "optimizer": _own_rows(self.accelerator, moments)}
        scaler = self.accelerator.scaler.state_dict() if self.accelerator.scaler else None
        state = State(step, self.recipe.fingerprint, self.data_fingerprints, num_skipped, run_id, scaler)
        writes = isinstance(self.model, FSDPModule)
        if self.accelerator.is_main_process:
            writes = False
            with self._forgiving(step):
                self._tidy()
                self._partial(step).mkdir(parents=True)
                writes = True
        if isinstance(self.model, FSDPModule):
            self.accelerator.wait_for_everyone()
        if writes:
            with self._forgiving(step):
                if self.thread is None:
                    self._write(state, parts)
                else:
                    if self.accelerator.device.type == "cpu":  # where they are the parameters themselves, not copies
                        parts = {part: {name: t.clone() for name, t in of.items()} for part, of in parts.items()}
                    self.writing = self.thread.submit(self._write_in_background, state, parts)
        if self.thread is None:
            self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Wait for what is being written, and let go of the model, which must not outlive the process group.

        Raises:
            RunError: the last checkpoint could not be written.
        """
        self._wait()
        if self.thread is not None:
            self.thread.shutdown()
        if self.accelerator.is_main_process:  # a finished run that was killed at its end, and resumed, saves nothing
            with contextlib.suppress(OSError):
                self._tidy()
                self._keep_to_limit()
        self.model = self.optimizer = None
        (failure,) = broadcast_object_list([self.failure])
        if failure is not None:
            raise RunError(failure)

    def _wait(self) -> None:
        if self.writing is not None:
            self.writing.result()
            self.writing = None

    def _partial(self, step: int) -> Path:
        return _hidden(self.output_dir / f"checkpoint-{step}", "partial")

    def _tidy(self) -> None:
        """Delete what runs that were killed left half-written or half-deleted."""
        _put_back(self.output_dir)
        for kind in ("partial", "old"):
            for left in _left(self.output_dir, kind):
                _discard(left)

    def _delete(self, folders: list[Path]) -> None:
        for folder in folders:
            with contextlib.suppress(OSError):  # renamed first: a deletion cut short leaves nothing damaged
                _discard(folder.rename(_hidden(folder, "partial")))

    def _keep_to_limit(self) -> None:
        """Delete the oldest checkpoints, among them those that a session left which was killed before it did so."""
        if self.settings.checkpoints_total_limit is not None:
            ours = [path for path in checkpoints(self.output_dir) if path not in self.abandoned and _is_ours(path)]
            self._delete(ours[: -self.settings.checkpoints_total_limit])

    @contextlib.contextmanager
    def _forgiving(self, step: int):
        """What storage or memory refuses is a warning, and leaves the folder as it was."""
        try:
            yield
        except (OSError, SafetensorError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's lack of memory
            reason = " ".join(str(error).split()) or repr(error)
            if not self.accelerator.is_main_process:
                self._tell(step, f"process {self.accelerator.process_index}: {reason}")
                return
            with contextlib.suppress(OSError):
                _put_back(self.output_dir)
            _discard(self._partial(step))
            whole = [path.name for path in checkpoints(self.output_dir) if path not in self.abandoned]
            self.failure = f"checkpoint-{step} could not be written to {self.output_dir} ({reason}); "
            self.failure += f"the newest is {whole[-1]}" if whole else "there is none"
            print(f"\nWARNING: {self.failure}. Training goes on", file=sys.stderr, flush=True)

    def _write_in_background(self, state: State, parts: dict[str, dict[str, torch.Tensor]]) -> None:
        with self._forgiving(state.step):
            self._write(state, parts)

    def _write(self, state: State, parts: dict[str, dict[str, torch.Tensor]]) -> None:
        """Write this process's parts; process 0 waits for the others', and makes a checkpoint of them."""
        folder, partial = self.output_dir / f"checkpoint-{state.step}", self._partial(state.step)
        files = self._write_parts(partial, parts)
        if not self.accelerator.is_main_process:
            self._tell(state.step, files)
            return
        files |= self._others(state.step)
        (partial / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
        versions = {module.__name__: module.__version__ for module in (torch, accelerate, transformers)}
        record = dataclasses.asdict(state) | {"versions": versions}
        (partial / "state.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        files |= {name: _flushed(partial / name) for name in ("recipe.yaml", "state.json")}
        manifest = _manifest({"format": FORMAT, "step": state.step, "files": files})
        (partial / "manifest.json").write_text(manifest, encoding="utf-8")
        _flush(partial / "manifest.json")
        _flush(partial)
        old = _hidden(folder, "old")
        if folder.exists():  # of an abandoned future of this run
            if not _is_ours(folder):
                raise OSError(f"{folder} is there, and no checkpoint of this program: move it away")
            folder.rename(old)
        partial.rename(folder)
        _flush(self.output_dir)
        self.failure = None
        _discard(old)
        self._delete([path for path in self.abandoned if path != folder and _is_ours(path)])
        self.abandoned = []
        self._keep_to_limit()

    def _write_parts(self, partial: Path, parts: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict]:
        is_sharded = isinstance(self.model, FSDPModule)
        index, num_owners = self.accelerator.process_index, self.accelerator.num_processes if is_sharded else None
        names = {part: _files(part, num_owners)[index] for part in parts}
        for part, tensors in parts.items():
            safetensors.torch.save_file(tensors, str(partial / names[part]))
        return {name: _flushed(partial / name) for name in names.values()}

    # What the writers say goes through the store that connects the processes: collectives are training's.

    def _tell(self, step: int, files: dict[str, dict] | str) -> None:
        store = torch_distributed.default_store()
        store.set(f"recipes/saved/{step}/{self.accelerator.process_index}", json.dumps(files))

    def _others(self, step: int) -> dict[str, dict]:
        """Sizes and hashes of what the other processes wrote."""
        files: dict[str, dict] = {}
        if not isinstance(self.model, FSDPModule):
            return files
        store, deadline = torch_distributed.default_store(), time.monotonic() + self.settings.ddp_timeout
        for rank in range(1, self.accelerator.num_processes):
            key = f"recipes/saved/{step}/{rank}"
            while not store.check([key]):
                if time.monotonic() > deadline:
                    raise OSError(f"process {rank} has not written its part for {self.settings.ddp_timeout:.0f} s")
                time.sleep(0.01)
            theirs = json.loads(store.get(key))
            store.delete_key(key)
            if isinstance(theirs, str):
                raise OSError(theirs)
            files |= theirs
        return files


def _own_rows(accelerator: Accelerator, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this process writes of `tensors`: its rows of the sharded ones, and on process 0 those that all have."""
    sharded = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DTensor)}
    assert all(tensor.placements == (Shard(0),) for tensor in sharded.values()), "FSDP2 shards rows"
    rows = {name: tensor.to_local().contiguous() for name, tensor in sharded.items()}
    if accelerator.is_main_process:
        rows |= {name: tensor.contiguous() for name, tensor in tensors.items() if name not in sharded}
    return rows


def _files(part: str, num_owners: int | None) -> list[str]:
    """The files of a part by their owners; None: it is not sharded."""
    if num_owners is None:
        return [f"{part}.safetensors"]
    return [f"{part}-{number:05}-of-{num_owners:05}.safetensors" for number in range(1, num_owners + 1)]


def read(folder: Path, part: str) -> dict[str, torch.Tensor]:
    """Whole tensors: rows of all files that the manifest lists, in the order of the processes that wrote them."""
    rows: dict[str, list[torch.Tensor]] = {}
    listed = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
    for file in sorted(name for name in listed if name.startswith(part)):
        for name, tensor in safetensors.torch.load_file(str(folder / file)).items():
            rows.setdefault(name, []).append(tensor)
    return {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()}


def _flushed(path: Path) -> dict[str, int | str]:
    """Size and hash of a file that is on the disk now."""
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
    """The one text that a manifest of this content can be: any other is damaged."""
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"checksum": checksum}, indent=2, sort_keys=True) + "\n"


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def verify(folder: Path) -> State:
    """The state in a checkpoint of which every byte is as it was written.

    Raises:
        Damaged: it is not, or cannot be read.
    """
    try:
        return _verify(folder)
    except OSError as error:
        name = Path(error.filename).name if isinstance(error.filename, str) else "it"
        raise Damaged(f"{name} cannot be read ({error.strerror or error})") from None


def _verify(folder: Path) -> State:
    manifest = folder / "manifest.json"
    if not manifest.exists():
        is_old = (folder / "state.json").exists()
        raise Damaged("manifest.json is missing" + (": damaged, or written by an earlier version" if is_old else ""))
    _check_is_file(manifest)
    try:
        text = manifest.read_bytes().decode()
        content = {key: value for key, value in json.loads(text).items() if key != "checksum"}
        is_whole = text == _manifest(content)
    except (ValueError, TypeError, AttributeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise Damaged("manifest.json is damaged")
    if content.get("format") != FORMAT:
        raise Damaged(f"it has format {content.get('format')}, this version reads {FORMAT}")
    step, files = content.get("step"), content.get("files")
    if type(step) is not int or not isinstance(files, dict) or not _is_complete(files):
        raise Damaged("manifest.json lacks entries")
    for name, as_written in files.items():  # sizes first: hashing takes its time
        _check_is_file(folder / name)
        size = (folder / name).stat().st_size
        expected = as_written.get("size") if isinstance(as_written, dict) else None
        if size != expected:
            raise Damaged(f"{name} has {size} bytes, not {expected}")
    for name, as_written in files.items():
        if _sha256(folder / name) != as_written.get("sha256"):
            raise Damaged(f"{name} is not as it was written (SHA-256)")
    try:
        for name in (name for name in files if name.endswith(".safetensors")):
            with safe_open(folder / name, "pt") as file:
                file.keys()
        record = json.loads((folder / "state.json").read_bytes())
        state = State(**{field.name: record[field.name] for field in dataclasses.fields(State)})
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged(f"it was written wrongly ({error!r})") from None
    named = _step_of(folder)
    if not state.step == step == (step if named is None else named):
        raise Damaged(f"it is of step {state.step}")
    if any(type(getattr(state, name)) is not type(value) for name, value in _TYPES.items()):
        raise Damaged("state.json has values of wrong types")
    return state


_TYPES = {name: value for name, value in dataclasses.asdict(State()).items() if name != "scaler"}


def _is_complete(files: dict[str, Any]) -> bool:
    """Whether a checkpoint of `files` has all parts of all owners, and nothing else."""
    num_owners = None if "model.safetensors" in files else max(1, len(files) // 2 - 1)
    return files.keys() == {"recipe.yaml", "state.json", *_files("model", num_owners), *_files("optimizer", num_owners)}


def _check_is_file(path: Path) -> None:
    if not path.is_file():
        raise Damaged(f"{path.name} is {'not a file' if path.exists() else 'missing'}")


def find(
    accelerator: Accelerator, resume_from_checkpoint: str | None, output_dir: Path, recipe: Recipe
) -> tuple[Path | None, State]:
    """The checkpoint that a path or `latest` names, verified, and of `recipe`. Called by all processes; process 0 looks.

    `latest` is the newest that is whole; it says which ones it passed over, and why. Where there is no checkpoint at all, or
    None is given: (None, the state before the first step).

    Raises:
        UsageError: it is damaged (of `latest`: all are), or of another recipe (names the fields that differ).
    """
    if resume_from_checkpoint is None:
        return None, State()
    answer: list[Any] = [None]
    if accelerator.is_main_process:
        try:
            answer = [_find(resume_from_checkpoint, output_dir, recipe)]
        except UsageError as error:
            answer = [error.problems]
        except OSError as error:  # the others wait for an answer
            answer = [[f"resume_from_checkpoint is {resume_from_checkpoint}, which cannot be read: {error}"]]
    (found,) = broadcast_object_list(answer)
    if isinstance(found, list):
        raise UsageError(found)
    return found


def _find(resume_from_checkpoint: str, output_dir: Path, recipe: Recipe) -> tuple[Path | None, State]:
    if resume_from_checkpoint != "latest":
        folder = Path(resume_from_checkpoint)
        with contextlib.suppress(OSError):
            _put_back(folder.parent)
        if _step_of(folder) is None and not (folder / "manifest.json").exists():
            inside = ", ".join(path.name for path in checkpoints(folder)) if folder.is_dir() else ""
            hint = f"it holds {inside}: name one of them" if inside else "give latest, or a folder checkpoint-STEP"
            raise UsageError(f"resume_from_checkpoint is {folder}, which is not a checkpoint: {hint}")
        try:
            return _of_recipe(folder, verify(folder), recipe)
        except Damaged as reason:
            raise UsageError(f"checkpoint {folder} is damaged: {reason}. Resume from an older one") from None
    with contextlib.suppress(OSError):
        _put_back(output_dir)
    passed_over = []
    for folder in reversed(checkpoints(output_dir)):
        try:
            state = verify(folder)
        except Damaged as reason:
            passed_over.append(f"{folder.name} is damaged: {reason}")
            continue
        for line in passed_over:
            print(f"WARNING: {line}; passed over", file=sys.stderr, flush=True)
        return _of_recipe(folder, state, recipe)
    if passed_over:
        raise UsageError(
            f"resume_from_checkpoint is latest, but no checkpoint in {output_dir} is whole ({'; '.join(passed_over)}): start "
            "anew with --overwrite_output_dir instead"
        )
    print(f"No checkpoint in {output_dir} yet: from the start", flush=True)
    return None, State()


def _of_recipe(folder: Path, state: State, recipe: Recipe) -> tuple[Path, State]:
    if state.recipe_fingerprint != recipe.fingerprint:
        try:
            theirs = yaml.safe_load((folder / "recipe.yaml").read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError):
            theirs = None
        if not isinstance(theirs, dict):
            raise UsageError(f"checkpoint {folder} is damaged: recipe.yaml holds no recipe. Resume from an older one")
        pairs = [(name, theirs.get(name), value) for name, value in recipe.decisive_fields().items()]
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
        UsageError: the data are not those it was trained on, the tensors not those of the model, or this process does not
            see the folder.
    """
    for name, ours in data_fingerprints.items():
        if (theirs := state.data_fingerprints.get(name)) != ours:
            raise UsageError(
                f"checkpoint {folder} was trained on other data: fingerprint of the {name} {theirs} there, {ours} here. Give "
                "the same ones, in the same order, and for text the same tokenizer"
            )
    try:
        tensors, moments = (read(folder, part) for part in ("model", "optimizer"))
    except (OSError, SafetensorError) as error:
        raise UsageError(
            f"checkpoint {folder} cannot be read ({error}): put it where every process sees it under this name"
        ) from None
    tied = _tied(accelerator.unwrap_model(model))
    tensors |= {name: tensors[first] for first, *others in tied if first in tensors for name in others}
    live = _moments(model, optimizer, StateDictOptions())
    _check_shapes(folder, tensors, get_model_state_dict(model))
    _check_shapes(folder, moments, _flat(live["state"]))
    set_model_state_dict(model, tensors, options=WHOLE)
    states = {name: {key: moments[f"{name}/{key}"] for key in of} for name, of in live["state"].items()}
    saved = {"state": states, "param_groups": live["param_groups"]}
    set_optimizer_state_dict(model, _unwrapped(optimizer), saved, options=WHOLE)
    _lay_out_as_parameters(optimizer)
    if accelerator.scaler is not None and state.scaler is not None:
        accelerator.scaler.load_state_dict(state.scaler)


def _lay_out_as_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Give moments the strides of their parameters: torch's fused optimizers are silently wrong where they differ."""
    for parameter, moments in optimizer.state.items():
        for name, moment in moments.items():
            is_whole = not isinstance(parameter, DTensor) and moment.shape == parameter.shape
            if is_whole and moment.stride() != parameter.stride():
                moments[name] = torch.empty_like(parameter, requires_grad=False).copy_(moment)


def _check_shapes(folder: Path, theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    there, here = ({name: list(tensor.shape) for name, tensor in tensors.items()} for tensors in (theirs, ours))
    differ = [
        f"{name} {there.get(name, 'is not')} there, {here.get(name, 'is not')} here"
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name)
    ]
    if differ:
        more = f"; and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UsageError(
            f"checkpoint {folder} is of another model: {'; '.join(differ[:3])}{more}. Resume with the code and the versions of "
            "libraries that wrote it (they are in its state.json)"
        )
