"""Trains runs in processes that are forked one after the other, each with its fault, without what comes after the training."""

import contextlib
import json
import math
import os
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from doctored.cases import BASES, COMMON, DRAWN, Case

FACTS = ("max_grad_norm", "global_batch_size", "learning_rate", "optimizer", "lr_scheduler_type", "num_warmup_steps")
"""Fields of a recipe that are kept."""
DIGITS = 5


def train(case: Case, script: Any, work: Path) -> dict[str, Any] | None:
    """Train a run in a process of its own.

    Returns:
        What is kept of it: columns of its lines, and its recipe's facts; None: it failed.
    """
    out = work / case.name
    log = work / f"{case.name}.log"
    shutil.rmtree(out, ignore_errors=True)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(file, 1), os.dup2(file, 2)
            code = _train_here(case, script, work, out)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not (out / "metrics.jsonl").exists():
        print(f"{case.name} failed:\n{log.read_text()[-1500:]}", flush=True)
        return None
    return {"name": case.name, "code": code} | keep(out)


def _train_here(case: Case, script: Any, work: Path, out: Path) -> int:
    from samestep.errors import exit_code
    from samestep.training.run import Run

    Run.publish = lambda *arguments, **keywords: None
    common = COMMON.replace("--validation_fraction 0.1 ", "") if case.script in DRAWN else COMMON
    flags = f"{BASES[case.program]} {common} {case.flags}".replace("WORK", str(work)).replace("OUT", str(out))
    kind, _, rest = case.fault.partition(":")
    if kind == "from":
        flags += f" --model_name_or_path {work / rest}"
    elif kind and kind != "resumed":
        FAULTS[kind](*rest.split(":"))
    words = _drop_earlier(shlex.split(flags))
    if kind == "resumed":
        exit_code(lambda: script.main([*words, "--stop_after_step", rest]))
        words += ["--resume_from_checkpoint", "latest"]
    return exit_code(lambda: script.main(words))


def _drop_earlier(words: list[str]) -> list[str]:
    """Leave out flags that come again."""
    pairs: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            pairs.pop(name, None)
            pairs[name] = []
        else:
            pairs[name].append(word)
    return [word for flag, values in pairs.items() for word in (flag, *values)]


def _change_model(change: Any) -> None:
    """Let parameters be changed before the optimizer is made of them."""
    from samestep.step import optim

    make = optim.from_recipe

    def changed(model: Any, recipe: Any) -> Any:
        names = [name for name, parameter in model.named_parameters() if change(name, parameter)]
        assert names, f"no parameter is changed: {[name for name, _ in model.named_parameters()]}"
        return make(model, recipe)

    optim.from_recipe = changed


def _kill(part: str) -> None:
    _change_model(lambda name, p: part in name and p.requires_grad and p.register_hook(torch.zeros_like))


def _close_relu(part: str) -> None:
    _change_model(lambda name, p: part in name and p.data.fill_(-100.0) is not None)


def _boost(part: str, factor: str) -> None:
    _change_model(lambda name, p: part in name and p.register_hook(lambda gradient: gradient * float(factor)))


def _order(is_sorted: bool) -> Any:
    from samestep.cut import order

    permute, compute = order.permute, order._compute_group

    def fixed(index: Any, num_samples: int, seed: int, epoch: Any) -> Any:
        return index.copy() if is_sorted else permute(index, num_samples, seed, 0)

    def repeated(*arguments: Any) -> Any:
        epoch, ids, ends = compute(*arguments)
        return epoch * 0, ids, ends  # what is drawn by epoch (masks, where a ring of tokens is cut) comes again, too

    order.permute, order._compute_group = fixed, repeated


def _change_rate(compute: Any) -> None:
    """Set the rate of each step: of its number, the peak, and how many there are."""
    from samestep.training.run_step import RunStep

    make = RunStep.__init__

    def changed(step: Any, run: Any, attempt: Any) -> None:
        make(step, run, attempt)
        peak = run.recipe.scaled_hyperparameters().learning_rate
        step.learning_rate = compute(step.index, peak, run.recipe.max_train_steps)

    RunStep.__init__ = changed


def _restart(steps: str) -> None:
    every = int(steps)
    _change_rate(lambda t, peak, _: peak * min(1, (t + 1) / 10) * 0.5 * (1 + math.cos(math.pi * (t % every) / every)))


def _ramp(factor: str) -> None:
    _change_rate(lambda t, peak, num_steps: peak * float(factor) ** (t / num_steps))


def _pass_end(steps: str) -> None:
    _change_rate(lambda t, peak, _: peak * (1 - t / int(steps)))


def _at_step(step: int, act: Any) -> None:
    """Act once on a run, before a step of it."""
    from samestep.training.run_step import RunStep

    make = RunStep.__init__

    def changed(taken: Any, run: Any, attempt: Any) -> None:
        make(taken, run, attempt)
        act(run, taken.index == step)

    RunStep.__init__ = changed


def _kick(step: str, factor: str) -> None:
    factors = [1.0]
    _change_model(lambda name, p: p.requires_grad and p.register_hook(lambda gradient: gradient * factors[0]))
    _at_step(int(step), lambda run, is_now: factors.__setitem__(0, float(factor) if is_now else 1.0))


def _upset(step: str, part: str, factor: str) -> None:
    chosen: list[Any] = []
    _change_model(lambda name, p: part in name and (chosen.append(p) or True))

    def act(run: Any, is_now: bool) -> None:
        with torch.no_grad():
            for parameter in chosen if is_now else ():
                parameter.mul_(float(factor))

    _at_step(int(step), act)


FAULTS = {
    "dead": _kill,
    "relu": _close_relu,
    "boost": _boost,
    "same_order": lambda *_: _order(is_sorted=False),
    "sorted": lambda *_: _order(is_sorted=True),
    "restarts": _restart,
    "ramp": _ramp,
    "past_end": _pass_end,
    "kick": _kick,
    "upset": _upset,
}


def keep(out: Path) -> dict[str, Any]:
    """Keep what a run left, in columns, rounded."""
    import yaml

    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    fields = ("step", "epoch", "loss", "learning_rate", "grad_norm", "samples")
    columns = {name: [_round(line[name]) for line in steps] for name in fields}
    evaluations = [
        {"step": line["step"], "eval_loss": _round(line["eval_loss"])} for line in lines if "eval_loss" in line
    ]
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    path, layers = out / "layers.jsonl", []
    if path.exists():
        for text in path.read_text().splitlines():
            line = json.loads(text)
            line["layers"] = {n: {k: _round(v, 3) for k, v in row.items()} for n, row in line["layers"].items()}
            layers.append(line)
    facts = {name: recipe.get(name) for name in FACTS}
    return {"recipe": facts, "steps": columns, "evaluations": evaluations, "layers": layers}


def _round(value: Any, digits: int = DIGITS) -> Any:
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
