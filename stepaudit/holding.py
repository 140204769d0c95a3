"""Records what a process of a parallel program holds: its place in the mesh, its parts of the weights, the norms that it sees.

`together.py` is the other end. Neither is needed where each process has the whole model.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from stepaudit import reads
from stepaudit._internals import TENSOR_FILES, find_objects, find_reader
from stepaudit.lines import find_place
from stepaudit.mesh import DATA, VARIABLE, find_places, find_role, read_mesh
from stepaudit.recording import MicroStep
from stepaudit.track import Track

MAX_NUMBERS = 64  # that are kept of a step
READS = ("item", "__float__", "tolist")
# Files through which a read goes, and folders of those who read for themselves: the audit, and the optimizers of torch.
OWN_FILES = {__file__, reads.__file__, *TENSOR_FILES}
NO_READERS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class Holding:
    """Follows what a process holds and what numbers it sees.

    Attributes:
        axes: name -> size, of the mesh's dimensions.
        places: name -> this process's coordinate.
        numbers: single numbers that the program has read or reduced since the first backward of a step; `lines`: where.
        returned: norms that functions which clip have returned.
    """

    def __init__(self) -> None:
        self.axes: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self.numbers: list[float] = []
        self.lines: list[str] = []
        self.returned: list[float] = []
        self.reduced: list[tuple[torch.Tensor, str]] = []  # whose numbers are there once the collective has ended
        self.has_stepped = False
        self.is_wanted = int(os.environ.get("WORLD_SIZE", "1")) > 1

    @property
    def is_divided(self) -> bool:
        """Whether a model or its sequences are divided: one process alone cannot be asked then."""
        return any(find_role(name) != DATA for name, size in self.axes.items() if size > 1)

    def watch(self, stack: contextlib.ExitStack, replace: Callable) -> None:
        """Note the numbers that are read out of tensors, as a norm that is printed, until the stack ends."""
        for name in READS if self.is_wanted else ():
            if name in vars(torch.Tensor):
                stack.enter_context(replace(torch.Tensor, name, self._read))
            else:  # of the class above, which cannot be changed
                setattr(torch.Tensor, name, _make_method(self._read, getattr(torch.Tensor, name)))
                stack.callback(delattr, torch.Tensor, name)

    def _read(self, read: Callable, tensor: torch.Tensor, *args: object) -> object:
        value = read(tensor, *args)
        if isinstance(value, float) and not find_reader(OWN_FILES).startswith(NO_READERS):
            self.note(value)
        return value

    def note(self, number: float, line: str = "") -> None:
        if len(self.numbers) < MAX_NUMBERS:
            self.numbers.append(number)
            self.lines.append(line or find_place())

    def communicate(self, name: str, args: tuple) -> None:
        """Note the single numbers that a collective adds up, which changes them in place; `args` as of `ProcessGroup`."""
        self.settle()
        tensors = args[1] if self.is_wanted and name == "allreduce" and len(args) > 1 else []
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                self.reduced.append((tensor, find_place()))

    def note_norm(self, value: object) -> None:
        """Note what a function that clips returns."""
        if self.is_wanted and isinstance(value, torch.Tensor) and value.numel() == 1:
            self.returned.append(float(value.full_tensor() if hasattr(value, "full_tensor") else value))

    def settle(self) -> None:
        """Read the numbers that collectives have reduced, before the program changes them."""
        for tensor, line in self.reduced:
            self.note(float(tensor.detach()), line)
        self.reduced.clear()

    def begin_backward(self) -> None:
        """Begin anew where this is the first backward of a step."""
        self.settle()
        if self.has_stepped:
            self.numbers, self.lines, self.returned, self.has_stepped = [], [], [], False

    def end_step(self, track: Track) -> None:
        """Hand the numbers to a step; those that are read behind it, for a log, go there, too."""
        self.settle()
        step = track.recording.steps[-1]
        step.numbers, step.lines, step.returned, self.has_stepped = self.numbers, self.lines, self.returned, True

    def look(self, track: Track) -> None:
        """Find this process's place in the mesh, and note what it holds of the parameters of a new track."""
        if not self.is_wanted:
            return
        self.axes, self.places = find_axes()
        track.recording.axes, track.recording.places = self.axes, self.places
        track.recording.cuts = [_find_cuts(parameter, self.axes) for parameter in track.parameters]

    def describe(self, track: Track, micro_step: MicroStep) -> None:
        """Note the length of the gradient that this process holds, parts of DTensors as parts, and the line of the backward."""
        if self.is_wanted:
            held = [_own(p.grad) for p in track.parameters if p.grad is not None and p.grad.layout == torch.strided]
            with torch.no_grad():
                squares = [float(gradient.double().pow(2).sum()) for gradient in held]
            micro_step.length, micro_step.line = sum(squares) ** 0.5, find_place()


def _make_method(read: Callable, original: Callable) -> Callable:
    def method(tensor: torch.Tensor, *args: object) -> object:
        return read(original, tensor, *args)

    return method


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _find_cuts(parameter: torch.Tensor, axes: dict[str, int]) -> list[str]:
    """Find the dimensions of its mesh along which a DTensor is cut: their names; a plain tensor has none.

    A dimension without a name is taken for the first of the same size.
    """
    if not hasattr(parameter, "device_mesh"):
        return []
    mesh = parameter.device_mesh
    sizes = [mesh.size(number) for number in range(mesh.ndim)]
    names = mesh.mesh_dim_names or [next((n for n, s in axes.items() if s == size), "") for size in sizes]
    return [name for name, placement in zip(names, parameter.placements, strict=True) if placement.is_shard()]


def find_axes() -> tuple[dict[str, int], dict[str, int]]:
    """Find the dimensions of the mesh that a program has made, and this process's place in each; else those of `--mesh`.

    Returns:
        Name -> size, and name -> coordinate from 0; empty where nothing is known.
    """
    axes: dict[str, int] = {}
    places: dict[str, int] = {}
    for mesh in _list_meshes():
        coordinate, names = mesh.get_coordinate(), mesh.mesh_dim_names or ()
        roles = {find_role(name) for name in axes}
        if coordinate is None or any(find_role(name) in roles for name in names):  # flattened, or a part of a known one
            continue
        for number, name in enumerate(names):
            if find_role(name):
                axes[name], places[name] = mesh.size(number), coordinate[number]
    if any(find_role(name) != DATA for name in axes) or not os.environ.get(VARIABLE):
        return axes, places
    axes = read_mesh(os.environ[VARIABLE])
    return axes, find_places(axes, int(os.environ.get("RANK", "0")))


def _list_meshes() -> list:
    """List the meshes of a program that have names, the largest first."""
    module = sys.modules.get("torch.distributed.device_mesh")  # the program has imported it, if it makes one
    if module is None or not torch.distributed.is_initialized():
        return []
    meshes = [mesh for mesh in find_objects(module.DeviceMesh) if mesh.mesh_dim_names]
    return sorted(meshes, key=lambda mesh: (-mesh.size(), -mesh.ndim))
