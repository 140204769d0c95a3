"""Checks what is said at the head of each program, without the audit: the weights after every step, compared by layout.

    python tests/audited/check.py [PROGRAM ...]

Each program runs as it is under every layout that its head names. Where it says `exact`, all weights that an optimizer
trains must be those of the reference layout after every step; where it names a cause, they must not be. A mistake that does not
reach the weights, or that the reference makes as well, says so at the head: `# weights: equal`, or `# weights: equal 4x4`.
"""

import os
import re
import sys
import tempfile
import traceback
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

TOLERANCE = {torch.complex128: 1e-9, torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-3}
"""Of the largest weight."""


def main(folder: str, program: str, *argv: str) -> None:
    """Run a program, and write its weights after every step: those of each optimizer, in the order of their creation."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    after: dict[int, list[torch.Tensor]] = {}

    def note(optimizer: torch.optim.Optimizer, *_) -> None:
        weights = [_whole(p) for group in optimizer.param_groups for p in group["params"] if p.numel()]
        after.setdefault(id(optimizer), []).append(torch.cat([w.detach().flatten() for w in weights]).clone())

    register_optimizer_step_post_hook(note)
    # It can wait for ever while DistributedDataParallel is alive, as accelerator.end_training() calls it.
    torch.distributed.destroy_process_group = lambda *_, **__: None
    sys.argv, sys.path[0] = [program, *argv], str(Path(program).resolve().parent)
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = program
    code = 0
    try:
        exec(compile(Path(program).read_bytes(), program, "exec"), module.__dict__)
        if not after:  # it steps by hand: the weights at the end
            modules = [value for value in vars(module).values() if isinstance(value, torch.nn.Module)]
            after[0] = [torch.cat([p.detach().flatten() for m in modules for p in m.parameters()])]
        torch.save(
            [torch.stack(steps) for steps in after.values()], Path(folder) / f"weights-{os.environ.get('RANK', 0)}"
        )
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # what the program would do after its end (threads, process groups) does not concern us


def _whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def differs(path: Path, layouts: list[tuple[int, ...]], reference: tuple[int, ...], server) -> list[float]:
    """Largest difference of a weight after any step, of the largest tolerated one, for each layout; infinite where numbers of
    steps differ."""
    import corpus

    results = []
    for layout in (reference, *layouts):
        with tempfile.TemporaryDirectory() as folder:
            server.run([folder, str(path), *corpus.variation(layout).argv], layout[2])
            results.append([torch.load(file) for file in sorted(Path(folder).glob("weights-*"))])
    (truth,), *others = results
    return [_compare(truth, processes) for processes in others]


def _compare(truth: list[torch.Tensor], processes: list[list[torch.Tensor]]) -> float:
    """Compare what processes have with the truth: number by number, or as sets, where each has a part of the model."""
    if all([t.shape for t in own] == [t.shape for t in truth] for own in processes):
        return max(_difference(truth, own) for own in processes)
    if any(len(own) != len(truth) or len(own[0]) != len(truth[0]) for own in processes):
        return float("inf")
    return max(
        _distance(weights, torch.cat([own[0][step] for own in processes])) for step, weights in enumerate(truth[0])
    )


def _distance(truth: torch.Tensor, own: torch.Tensor) -> float:
    """Find the number of one set that is farthest from all of the other: parts may have any place, and may be there twice."""
    farthest = 0.0
    for these, those in ((truth, own), (own, truth)):
        ordered = those.sort().values
        places = torch.searchsorted(ordered, these)
        below, above = ordered[(places - 1).clamp(min=0)], ordered[places.clamp(max=len(ordered) - 1)]
        farthest = max(farthest, float(torch.minimum((these - below).abs(), (above - these).abs()).max()))
    return farthest / float(truth.abs().max()) / TOLERANCE[truth.dtype]


def _difference(truth: list[torch.Tensor], own: list[torch.Tensor]) -> float:
    if [t.shape for t in truth] != [t.shape for t in own]:
        return float("inf")
    return max(float((a - b).abs().max() / a.abs().max()) / TOLERANCE[a.dtype] for a, b in zip(truth, own, strict=True))


def check(path: Path, server) -> list[str]:
    """A line for each layout; it begins with WRONG where the head of the program is not true."""
    import corpus

    text = path.read_text(encoding="utf-8")
    expected = {
        corpus.layout(where): cause for where, cause in re.findall(r"^# expect (\S+): (.+)$", text, re.MULTILINE)
    }
    equal = re.findall(r"^# weights: equal *(\S*)$", text, re.MULTILINE)
    equal = expected if "" in equal else [corpus.layout(where) for where in equal]
    (reference,) = re.findall(r"^# reference: (\S+)$", text, re.MULTILINE) or ["16x1"]
    lines, differences = [], differs(path, list(expected), corpus.layout(reference), server)
    for (layout, cause), times in zip(expected.items(), differences, strict=True):
        is_equal = cause == corpus.EXACT or layout in equal
        mark = "ok   " if is_equal == (times <= 1) else "WRONG"
        where = "x".join(map(str, layout))
        lines.append(f"{mark} {path.stem} {where}: {cause}; weights differ by {times:.2g} of what is tolerated")
    return lines


if __name__ == "__main__":
    import corpus
    from forked import Server

    problems = 0
    with Server("check") as forked:
        for path in map(Path, sys.argv[1:]) if sys.argv[1:] else (program.path for program in corpus.programs()):
            try:
                lines = check(path.resolve(), forked)
            except RuntimeError as error:
                lines = [f"WRONG {path.stem}: {error}"]
            problems += sum(line.startswith("WRONG") for line in lines)
            print("\n".join(lines), flush=True)
    sys.exit(f"{problems} wrong" if problems else 0)
