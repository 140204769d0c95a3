"""Asks a whole program what concerns no single window: schedules, loaders, Trainer's heads, reported means."""

import ast
import re
import sys
from collections.abc import Iterable, Iterator

from stepaudit.lint.losses import FUNCTION, find_module
from stepaudit.lint.syntax import LOOPS, Node, Source, dotted, keyword, last_name, names_in
from stepaudit.lint.windows import ACCUMULATE, WINDOW_NAME, Window, find_accelerator_k, find_guards, is_one

Found = Iterator[tuple[str, Node, str, str]]
"""Code, node, detail, and when it holds."""
SCHEDULE = re.compile(r"get_(\w+_)?(scheduler|schedule_with_warmup|with_warmup|schedule)|\w+LR")
LENGTHS = ("num_warmup_steps", "num_training_steps", "T_max", "total_steps", "step_size", "total_iters")
PLACES: dict[str, tuple[str, ...]] = {
    "get_scheduler": ("", "", "num_warmup_steps", "num_training_steps"),
    **{
        f"get_{kind}_schedule_with_warmup": ("", "num_warmup_steps", "num_training_steps")
        for kind in ("linear", "cosine", "polynomial_decay", "cosine_with_hard_restarts")
    },
    "CosineAnnealingLR": ("", "T_max"),
    "OneCycleLR": ("", "", "total_steps"),
    "StepLR": ("", "step_size"),
}
"""Maker of a schedule -> the names of its arguments by their places; those that are no length have none."""
LOADER = re.compile(r"loader|(^|[._])(dl|batches)$", re.IGNORECASE)
SHARED = re.compile(r"num_processes|world_size|n_gpus?\b|num_gpus")
HEADS = re.compile(
    r"\w*For(SequenceClassification|TokenClassification|MultipleChoice|NextSentencePrediction|PreTraining)"
)
"""Heads nearly all of which Trainer leaves k times too large, as measured: docs/state-of-the-step.md."""
TRAINERS = ("Trainer", "Seq2SeqTrainer")
KNOWN = sys.stdlib_module_names | set(
    """accelerate bitsandbytes datasets evaluate huggingface_hub matplotlib nltk numpy pandas peft PIL scipy sacrebleu seqeval
    sklearn tokenizers torch torchaudio torchvision tqdm transformers wandb""".split()
)
"""Packages that give AutoModel no heads of their own."""
MOST_DEPTH = 6
ALWAYS = "always"


def check_schedules(source: Source, windows: list[Window]) -> Found:
    """Ask how long the schedules of prepared schedulers are."""
    if source.has(r"step_scheduler_with_optimizer\s*=\s*False|split_batches\s*=\s*True"):
        return
    for call in source.calls:
        if last_name(call.func) not in ("prepare", "prepare_scheduler") or "accelerator" not in dotted(call.func):
            continue
        for argument in call.args:
            made = [value for value in source.values(dotted(argument), call) if isinstance(value, ast.Call)]
            for value in made[:1] if dotted(argument) else []:
                if SCHEDULE.fullmatch(last_name(value.func)) and _is_stepped(source, argument):
                    yield from _check_lengths(source, value, call, windows)


def _is_stepped(source: Source, scheduler: ast.expr) -> bool:
    return bool(source.calls_of(re.escape(dotted(scheduler)) + r"\.step"))


def _check_lengths(source: Source, made: ast.Call, prepare: ast.Call, windows: list[Window]) -> Found:
    k = find_accelerator_k(source)
    accumulates = any(window.kind == ACCUMULATE for window in windows) and k is not None and not is_one(source, k, made)
    where = "" if isinstance(k, ast.Constant) else f"where {ast.unparse(k)} is more than 1" if k is not None else ""
    lengths = _find_lengths(made)
    # One that counts batches of all processes counts samples, so to speak: a number beside it does, too.
    counts_samples = any(_counts_batches(source, list(_resolve(source, value)), prepare) for value in lengths.values())
    for name, value in lengths.items():
        if isinstance(value, ast.Constant) and (not value.value or counts_samples):
            continue
        parts = list(_resolve(source, value))
        text = " ".join(ast.unparse(part) for part in parts)
        detail = f"{name}={ast.unparse(value)}"
        counts_batches = _counts_batches(source, parts, prepare)
        if accumulates and (_is_multiplied_by_k(parts) or (counts_batches and not _is_divided_by_k(parts))):
            yield "SA402", value, detail, where
        elif not (SHARED.search(text) or counts_batches or _is_shared_elsewhere(source, value, lengths.values())):
            yield "SA401", value, detail, "on several processes"


def _find_lengths(made: ast.Call) -> dict[str, ast.expr]:
    """Find the lengths that a schedule is made with, by their names or their places."""
    found = {name: value for name in LENGTHS if (value := keyword(made, name)) is not None}
    named = zip(PLACES.get(last_name(made.func), ()), made.args, strict=False)
    return found | {name: value for name, value in named if name}


def check_own_schedules(source: Source, windows: list[Window]) -> Found:
    """Ask whether a schedule that ticks with the optimizer, in a window of the program's own, counts micro-batches."""
    for window in windows:
        if window.guard is None or window.kind == ACCUMULATE:
            continue
        for tick in source.calls:
            owner = tick.func.value if isinstance(tick.func, ast.Attribute) and last_name(tick.func) == "step" else None
            if owner is None or window.guard not in find_guards(source, tick, window.loop):
                continue
            made = [value for value in source.values(dotted(owner), tick) if isinstance(value, ast.Call)]
            for value in made[:1] if dotted(owner) else []:
                if SCHEDULE.fullmatch(last_name(value.func)):
                    yield from _check_own_lengths(source, value, window)


def _check_own_lengths(source: Source, made: ast.Call, window: Window) -> Found:
    where = "" if isinstance(window.k, ast.Constant) else f"where {window.k_text} is more than 1"
    for name, value in _find_lengths(made).items():
        parts = list(_resolve(source, value))
        nodes = [node for part in parts for node in ast.walk(part)]
        is_divided = any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv) for node in nodes)
        counts_batches = any(
            isinstance(node, ast.Call)
            and dotted(node.func) == "len"
            and node.args
            and LOADER.search(dotted(node.args[0]))
            for node in nodes
        )
        if counts_batches and not is_divided:
            yield "SA402", value, f"{name}={ast.unparse(value)}", where


def _resolve(source: Source, value: ast.expr, depth: int = 0) -> Iterator[ast.expr]:
    """Yield an expression, and what its names were assigned, and so on."""
    yield value
    if depth < MOST_DEPTH:
        for name in names_in(value):
            for found in source.values(name, value):
                if found is not value and found.lineno <= value.lineno:
                    yield from _resolve(source, found, depth + 1)


def _is_shared_elsewhere(source: Source, value: ast.expr, lengths: Iterable[ast.expr]) -> bool:
    """Tell whether the program multiplies a length by N somewhere, or divides one of them: then they count ticks."""
    own, all_names = _full_names(value), {name for length in lengths for name in _full_names(length)}
    for node in source.nodes:
        match node:
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                names = own
            case ast.BinOp(left=left, op=ast.Div() | ast.FloorDiv(), right=right):
                names = all_names
            case _:
                continue
        if dotted(left) in names and SHARED.search(dotted(right)):
            return True
    return False


def _full_names(node: ast.expr) -> set[str]:
    """Collect the dotted names of an expression without their beginnings: `args.steps`, not `args`."""
    names = names_in(node)
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def counts_micro_batches(source: Source, scheduler: ast.expr) -> bool:
    """Tell whether a scheduler's length is, or may be, that of all micro-batches, so that it ticks at each of them rightly."""
    made = [value for value in source.values(dotted(scheduler), scheduler) if isinstance(value, ast.Call)]
    for call in made:
        lengths = [*call.args[1:], *(word.value for word in call.keywords)]
        parts = [part for length in lengths for part in _resolve(source, length)]
        is_len = any(
            isinstance(node, ast.Call) and dotted(node.func) == "len" for part in parts for node in ast.walk(part)
        )
        if (is_len and not _is_divided_by_k(parts)) or any(_is_multiplied_by_k([length]) for length in lengths):
            return True
    return not made


def _is_multiplied_by_k(parts: list[ast.expr]) -> bool:
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(WINDOW_NAME.search(last_name(side)) for side in (node.left, node.right))
        for node in ast.walk(parts[0])
    )


def _is_divided_by_k(parts: list[ast.expr]) -> bool:
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Div | ast.FloorDiv)
        and any(WINDOW_NAME.search(name) for name in names_in(node.right))
        for part in parts
        for node in ast.walk(part)
    )


def _counts_batches(source: Source, parts: list[ast.expr], prepare: ast.Call) -> bool:
    """Tell whether a length is that of a loader of all processes: as long as it was before it was prepared."""
    return any(
        isinstance(node, ast.Call) and dotted(node.func) == "len" and node.lineno < prepare.lineno
        for part in parts
        for node in ast.walk(part)
    )


def check_loaders(source: Source) -> Found:
    """Ask whether samplers are told the epoch, and loaders sharded once."""
    samplers = [call for call in source.calls if last_name(call.func) == "DistributedSampler"]
    names = {name for call in samplers for name in _names_of(source, call)}
    for call in source.calls:
        if last_name(call.func) == "prepare" and "accelerator" in dotted(call.func):
            for argument in call.args:
                for made in source.values(dotted(argument), call)[-1:]:
                    if isinstance(made, ast.Call) and last_name(made.func) == "DataLoader":
                        sampler = keyword(made, "sampler")
                        if sampler is not None and (sampler in samplers or dotted(sampler) in names):
                            yield "SA503", argument, f"{dotted(argument)}, made in line {made.lineno}", ""
    if source.has(r"set_epoch|Accelerator\(|[Ll]ightning|Trainer\("):
        return
    for call in samplers:
        shuffle = keyword(call, "shuffle")
        if (isinstance(shuffle, ast.Constant) and shuffle.value is False) or "lambda" in ast.unparse(call):
            continue
        if re.search(r"val|test|eval|dev", " ".join(_names_of(source, call)) + ast.unparse(call), re.IGNORECASE):
            continue
        if _trains_for_epochs(source):
            yield "SA502", call, "", ""


def _names_of(source: Source, call: ast.Call) -> list[str]:
    """List the names that a call's value is assigned to."""
    return [name for name, nodes in source.assigned.items() for node in nodes if _is_value(source, call, node)]


def _is_value(source: Source, call: ast.Call, node: Node) -> bool:
    value = getattr(node, "value", None)
    return value is call or (isinstance(value, ast.IfExp) and call in (value.body, value.orelse))


def _trains_for_epochs(source: Source) -> bool:
    """Tell whether the program has a backward, and a loop over epochs."""
    has_backward = any(last_name(call.func) == "backward" for call in source.calls)
    loops = [node for node in source.nodes if isinstance(node, ast.For)]
    return has_backward and any(
        "epoch" in dotted(loop.target).lower() and "range" in ast.unparse(loop.iter) for loop in loops
    )


def check_trainers(source: Source) -> Found:
    """Ask whether Trainer gets a head that it does not divide for."""
    if not all(name.partition(".")[0] in KNOWN for name in source.imported):
        return
    made = [call for call in source.calls if last_name(call.func) in TRAINERS]
    if not made or source.has(r"compute_loss|num_items_in_batch") or not source.has(r"\btransformers\b"):
        return
    heads = [
        call
        for call in source.calls
        if (parts := dotted(call.func).split(".")) and HEADS.fullmatch(parts[max(-2, -len(parts))])
    ]
    trusted = (keyword(call, "trust_remote_code") for call in heads)
    if any(isinstance(value, ast.Constant) and value.value is True for value in trusted):
        return  # the head is a checkpoint's own, which nobody here has read
    if not heads or not (condition := _find_accumulation(source)):
        return
    name = next(part for part in dotted(heads[0].func).split(".") if HEADS.fullmatch(part))
    yield "SA601", made[0], name, condition.removeprefix(ALWAYS)


def check_losses(source: Source) -> Found:
    """Ask whether a Trainer of the program's own uses the count of targets that its loss is given."""
    if source.has(r"model_accepts_loss_kwargs|\bexact\(") or not (condition := _find_accumulation(source)):
        return
    for trainer in source.nodes:
        if not isinstance(trainer, ast.ClassDef) or not any(
            last_name(base).endswith("Trainer") for base in trainer.bases
        ):
            continue
        for method in trainer.body:
            if isinstance(method, ast.FunctionDef) and method.name == "compute_loss" and not _uses_count(method):
                yield "SA602", method, trainer.name, condition.removeprefix(ALWAYS)


def _uses_count(method: ast.FunctionDef) -> bool:
    """Tell whether a method reads the count that Trainer gives it, by its name or in **kwargs, or divides by k itself."""
    names = [argument.arg for argument in (*method.args.args, *method.args.kwonlyargs)]
    rest = method.args.kwarg.arg if method.args.kwarg else None
    given = "num_items_in_batch" if "num_items_in_batch" in names else rest
    text = {name for statement in method.body for name in names_in(statement)}
    return given is None or given in text or any("gradient_accumulation_steps" in name for name in text)


def _find_accumulation(source: Source) -> str:
    """Find whether Trainer accumulates: empty: it does not; else when it does, behind `ALWAYS` where it surely does."""
    arguments = [call for call in source.calls if last_name(call.func).endswith("TrainingArguments")]
    ks = [k for call in arguments if (k := keyword(call, "gradient_accumulation_steps")) is not None]
    if (arguments and not ks) or any(is_one(source, k, k) for k in ks) or not (ks or source.has(r"HfArgumentParser")):
        return ""
    values = [source.values(dotted(k), k) for k in ks]
    is_known = bool(ks) and (isinstance(ks[0], ast.Constant) or (values[0] and isinstance(values[0][0], ast.Constant)))
    return ALWAYS if is_known else "where gradient_accumulation_steps is more than 1"


def check_step_losses(source: Source) -> Found:
    """Ask whether a loss that `exact_steps` or `exact_windows` divides is divided by k before, as the loop was without them."""
    if not source.has(r"\bexact_(steps|windows)\b"):
        return
    for call in source.calls:
        if dotted(call.func) != "step.loss" or not call.args:
            continue
        for node in ast.walk(call.args[0]):
            if (
                isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Div)
                and WINDOW_NAME.search(last_name(node.right))
            ):
                yield "SA102", node, "step.loss divides, too", f"where {ast.unparse(node.right)} is more than 1"


def check_reports(source: Source) -> Found:
    """Ask whether an evaluation divides a sum of means by the number of batches."""
    for loop in source.nodes:
        if not isinstance(loop, ast.For) or _has_call(loop, "backward"):
            continue
        for node in ast.walk(loop):
            if (
                isinstance(node, ast.AugAssign)
                and isinstance(node.op, ast.Add)
                and _is_mean_of_batch(source, node.value, loop)
            ):
                total = dotted(node.target)
                if (found := _find_division(source, total, loop)) is not None and not _is_inner(source, node, loop):
                    yield "SA701", found, f"{total}, added up in line {node.lineno}", ""


def _is_inner(source: Source, node: Node, loop: Node) -> bool:
    """Tell whether a node lies in a loop inside of a loop."""
    return any(isinstance(outer, LOOPS) for outer in source.ancestors(node, loop))


def _has_call(node: Node, name: str) -> bool:
    return any(isinstance(part, ast.Call) and last_name(part.func) == name for part in ast.walk(node))


def _is_mean_of_batch(source: Source, value: ast.expr, loop: Node) -> bool:
    """Tell whether an expression is `loss.item()` of a loss that is a mean."""
    if not (isinstance(value, ast.Call) and last_name(value.func) == "item" and isinstance(value.func, ast.Attribute)):
        return False
    loss = value.func.value
    made = [v for v in source.values(dotted(loss), value) if source.is_inside(v, loop)] if dotted(loss) else []
    loss = made[-1] if made else loss
    if not isinstance(loss, ast.Call):
        return False
    module = find_module(source, loss)
    function = loss if FUNCTION.fullmatch(last_name(loss.func)) else module
    return (
        function is not None
        and keyword(function, "reduction") is None
        and not any(w.arg is None for w in loss.keywords)
    )


def _find_division(source: Source, total: str, loop: ast.For) -> Node | None:
    """Find where a total is divided by the length of the loader behind a loop."""
    loaders = {f"len({name})" for name in names_in(loop.iter)}
    scope = source.scope(loop)
    for node in source.nodes:
        if getattr(node, "lineno", 0) <= loop.end_lineno or source.scope(node) is not scope:
            continue
        match node:
            case ast.BinOp(left=dividend, op=ast.Div(), right=divisor):
                pass
            case ast.AugAssign(target=dividend, op=ast.Div(), value=divisor):
                pass
            case _:
                continue
        if dotted(dividend) == total and ast.unparse(divisor) in loaders:
            return node
    return None
