"""Says what the dimensions of a mesh of processes do, by their names: those of a DeviceMesh, or of `--mesh dp=2,tp=2`."""

import itertools
import math

from stepaudit.errors import UsageError

VARIABLE = "STEPAUDIT_MESH"  # of the environment of a program that is run: what --mesh says; empty for the reference
DATA, TENSOR, SEQUENCE, EXPERT, PIPELINE = "data", "tensor", "sequence", "expert", "pipeline"
WORDS = {
    DATA: ("dp", "data", "ddp", "fsdp", "hsdp", "shard", "replicate", "edp", "efsdp"),
    TENSOR: ("tp", "tensor", "mp", "model"),
    SEQUENCE: ("cp", "sp", "context", "sequence", "seq", "ulysses", "ring"),
    EXPERT: ("ep", "expert", "experts"),
    PIPELINE: ("pp", "pipe", "pipeline", "stage", "stages"),
}
"""Words of the names of dimensions, by what the processes do."""


def find_role(name: str) -> str:
    """Find what a dimension of a mesh does, by the first of its words that is known; empty if none is.

    >>> find_role("tp"), find_role("dp_shard"), find_role("ulysses"), find_role("x")
    ('tensor', 'data', 'sequence', '')
    """
    for word in name.lower().split("_"):
        for role, words in WORDS.items():
            if word in words:
                return role
    return ""


def read_mesh(text: str) -> dict[str, int]:
    """Read what `--mesh` says: name -> size, the last one of neighbours.

    Raises:
        UsageError: it is not NAME=SIZE,NAME=SIZE, or a name is of no known kind.

    >>> read_mesh("dp=2,tp=2")
    {'dp': 2, 'tp': 2}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    rule = "not NAME=SIZE,NAME=SIZE with each name once: for example dp=2,tp=2"
    if not all(size.isdecimal() and int(size[:9]) > 0 for _, _, size in pairs) or len({p[0] for p in pairs}) < len(
        pairs
    ):
        raise UsageError(f"--mesh is {text[:60]!r}, {rule}")
    if unknown := [name for name, _, _ in pairs if not find_role(name)]:
        known = ", ".join(words[0] for words in WORDS.values())
        raise UsageError(f"--mesh {text[:60]}: {unknown[0]!r} is no kind of parallelism: {known}")
    return {name: int(size) for name, _, size in pairs}


def count_processes(axes: dict[str, int]) -> int:
    return math.prod(axes.values())


def count_data_parts(axes: dict[str, int]) -> int:
    """Count the processes of a mesh that divide the global batch: those of data and experts.

    >>> count_data_parts({"dp": 2, "tp": 2, "ep": 3})
    6
    """
    return math.prod(size for name, size in axes.items() if find_role(name) in (DATA, EXPERT))


def find_places(axes: dict[str, int], rank: int) -> dict[str, int]:
    """Find the coordinates of a process, of which the last one changes first.

    >>> find_places({"dp": 2, "tp": 3}, 4)
    {'dp': 1, 'tp': 1}
    """
    coordinates = list(itertools.product(*(range(size) for size in axes.values())))
    return dict(zip(axes, coordinates[rank] if rank < len(coordinates) else [0] * len(axes), strict=True))
