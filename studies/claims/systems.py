"""Claims about memory, communication and time: torch's steps traced on fake tensors, real processes, and the planner's "
"formulas."""

import inspect
import itertools
import statistics
import sys
import tempfile
import time
from typing import Any
from unittest import mock

import accelerate
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForPreTraining, GPT2Config, PreTrainedModel
from transformers.utils import logging
from verdicts import Claim, Experiment, column, near, rounds, so, within

from samestep.contrib.optim import accumulating
from samestep.cut import layout as plan
from samestep.recipe.catalog import load
from samestep.step.optim import AccumulatingSGD
from stepplan import hardware, memory, placement, timing, trace
from stepplan.workload import from_recipe

HERE = (sys.modules[__name__],)
Result = dict[str, Any]
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}

# ---------------------------------------------------------------------------------------------------------------------
# What accumulation adds


class Emptying(torch.optim.AdamW):
    """AdamW that frees the gradients after its step, as `zero_grad` does: a step of one micro-batch begins without any."""

    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def states(settings: Result, seed: int) -> Result:
    """Most bytes at once in a step of BERT-Large, with gradients kept from a micro-step before, and without."""
    config = BertConfig(**load("bert_large_phase1").architecture)
    found: Result = {}
    for b in settings["b"]:
        for name, kind in (("accumulated", torch.optim.AdamW), ("alone", Emptying)):
            of = _trace_bert(config, kind, b, settings["length"])
            found[f"b {b}, {name}"] = of.peak
            if name == "accumulated":
                found |= {"num_parameters": of.num_parameters, "states": of.parameters + of.gradients + of.moments}
    found["gradient_bytes"] = {way: _gradients_alive(way) for way in ("in .grad", "folded and freed")}
    return found


def _trace_bert(config: BertConfig, kind: type, b: int, length: int) -> trace.Trace:
    def build() -> nn.Module:
        with mock.patch.object(PreTrainedModel, "initialize_weights"):
            return BertForPreTraining(config)

    def loss(model: nn.Module, num_samples: int) -> torch.Tensor:
        ids = torch.zeros(num_samples, length, dtype=torch.int64)
        return model(ids, labels=ids, next_sentence_label=ids[:, 0]).loss

    with trace.imitate_cuda():
        return trace.trace_step(
            build,
            loss,
            b,
            mixed_precision="no",
            gradient_checkpointing=False,
            make_optimizer=lambda model: kind(model.parameters(), fused=True),
        )


def _gradients_alive(way: str, layers: int = 8, width: int = 64) -> float:
    """Most bytes of gradients per parameter that are alive at once while a micro-step's backward goes on."""
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    parameters = list(model.parameters())
    optimizer = AccumulatingSGD(parameters, lr=0.1, gradient_accumulation_steps=2) if way != "in .grad" else None
    most = 0

    def count(_: nn.Parameter) -> None:  # runs after the optimizer's own hook
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in parameters if p.grad is not None))

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(count)
    for _ in range(2):
        model(torch.randn(4, width)).square().sum().backward()
    if optimizer is not None:
        optimizer.step()
    return most / sum(p.numel() for p in parameters)


def states_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    sizes = sorted({key.split(",")[0] for key in of if key.startswith("b ")}, key=lambda text: int(text[2:]))
    alive = of["gradient_bytes"]
    extra = ", ".join(
        f"{size}: {(of[f'{size}, accumulated'] - of[f'{size}, alone']) / of['num_parameters']:.2f}" for size in sizes
    )
    return [
        Claim(
            "Accumulation takes a third more memory: 4 N numbers for 3 N, because it needs a buffer of N for gradients.",
            tuple(
                near(
                    f"{size}: peak over that of a step of one micro-batch",
                    [of[f"{size}, accumulated"] / of[f"{size}, alone"]],
                    4 / 3,
                )
                for size in sizes
            ),
            "The optimizer's step needs all gradients in any case, and autograd adds into them: there is no other buffer. They "
            f"only stay alive through later forwards: bytes per parameter more at the peak, {extra}.",
        ),
        Claim(
            "BERT-Large has 340M parameters.",
            (rounds("in units of 10M", of["num_parameters"] / 1e7, "34"),),
        ),
        Claim(
            "Its states in float32 are 5.44 GB with the buffer, 4.08 without.",
            (
                rounds("parameters, gradients, Adam's moments", of["states"] / 1e9, "5.44", " GB"),
                rounds(
                    "the same in a step of one micro-batch, at the optimizer's step", of["states"] / 1e9, "4.08", " GB"
                ),
            ),
            f"{of['num_parameters']:,} parameters, {of['states'] / 1e9:.3f} GB ({of['states'] / 2**30:.3f} GiB), with or "
            "without accumulation.",
        ),
        Claim(
            "Accumulation inside momentum keeps no gradient beside it (here: at most half a byte per parameter).",
            tuple(
                within(f"gradients {way}", [number], 0, 0.5, " bytes per parameter") for way, number in alive.items()
            ),
            "It does only if every gradient is freed as soon as it is folded, while the backward goes on; an optimizer whose "
            "`step` "
            "reads .grad, as in the told code, has all of them at once.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# What fits


def fits(settings: Result, seed: int) -> Result:
    """Planned and traced bytes, and whether they fit beside what a process needs in any case."""
    found: Result = {"planned": {}, "traced": {}}
    for name, recipe, changes, device, sizes, precisions in settings["cases"]:
        room = hardware.parse(device).device.memory_bytes - placement.RESERVED
        of = load(recipe, changes)
        for precision in precisions:
            for attention in ("sdpa", "eager") if memory.model_from_recipe(of).has_equal_layers else ("sdpa",):
                work = from_recipe(of, attention=attention)
                for b in sizes:
                    layout = plan.solve_layout(num_processes=1, per_device_train_batch_size=b, global_batch_size=b)
                    planned = memory.planned_memory(
                        work.model, layout, mixed_precision=precision, moment_bytes=work.moment_bytes
                    ).total
                    how = f"{name}, {PRECISIONS[precision]}" + (f", {attention}" if work.model.has_equal_layers else "")
                    found["planned"].setdefault(how, {})[str(b)] = [planned, room]
    logging.set_verbosity_error()
    for name, device, length, sizes, precisions in settings["traced"]:
        room = hardware.parse(device).device.memory_bytes - placement.RESERVED
        with tempfile.TemporaryDirectory() as folder:
            _library_config(name).save_pretrained(folder)
            for precision in precisions:
                for attention in ("sdpa", "eager"):
                    how = f"{name}, length {length}, {PRECISIONS[precision]}, {attention}"
                    found["traced"][how] = {
                        str(b): [
                            trace.trace_config(
                                folder, b, length, mixed_precision=precision, attn_implementation=attention
                            ).peak,
                            room,
                        ]
                        for b in sizes
                    }
    return found


def _library_config(name: str) -> BertConfig | GPT2Config:
    if name == "BERT-Large":
        shape = load("bert_large_phase1").architecture | {"max_position_embeddings": 512}
        return BertConfig(**shape, architectures=["BertForPreTraining"])
    return GPT2Config(**load("gpt2_xl_8xa100").architecture, architectures=["GPT2LMHeadModel"])


def fits_claims(results: list[Result]) -> list[Claim]:
    (of,) = results

    def cases(prefix: str, small: int, large: int | None) -> list:
        found = []
        for where, program in (("planned", "this repository"), ("traced", "transformers' own model and loss")):
            for how, sizes in of[where].items():
                if how.startswith(prefix):
                    fit = {b: num_bytes <= room for b, (num_bytes, room) in sizes.items()}
                    shown = ", ".join(f"b {b} {num_bytes / 1e9:.1f} GB" for b, (num_bytes, _) in sizes.items())
                    shown += f" of {next(iter(sizes.values()))[1] / 1e9:.1f}"
                    holds = fit[str(small)] and (large is None or not fit[str(large)])
                    found.append(so(f"{how.removeprefix(prefix).strip(', ')}, {program}", shown, holds))
        return found

    return [
        Claim(
            "BERT-Large: 8 samples fit a card of 24 GB, 32 do not.",
            tuple(cases("BERT-Large, length", 8, 32)),
            "It depends on the length and on attention.",
        ),
        Claim(
            "BERT-Large: 4 samples fit a card of 11 GB.",
            tuple(cases("BERT-Large on 11 GB", 4, None)),
        ),
        Claim(
            "GPT-2 of 1.5B parameters, length 1,024: a card of 80 GB takes 4 samples and not 8.",
            tuple(cases("GPT-2 1.5B", 4, 8)),
        ),
        Claim("ResNet-50: 64 images fit a T4 of 16 GB.", tuple(cases("ResNet-50 on a T4", 64, None))),
        Claim("ResNet-50: 256 images fit a V100 of 16 GB.", tuple(cases("ResNet-50 on a V100", 256, None))),
    ]


def activations(settings: Result, seed: int) -> Result:
    """Bytes per image of ResNet-50 at 224 x 224, traced: the slope between two micro-batches, and whole steps."""
    recipe, found = load("resnet50_1xv100"), {}
    few, many = settings["b"]
    for precision in ("no", "bf16"):
        of = {b: trace.trace_recipe(recipe, b, mixed_precision=precision) for b in (few, many)}
        found[PRECISIONS[precision]] = {
            "per_image": (of[many].peak - of[few].peak) / (many - few),
            "peak": {str(b): of[b].peak for b in of},
        }
        found |= {name: getattr(of[few], name) for name in ("parameters", "gradients", "moments")}
    return found


def activation_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    kinds = [kind for kind in of if isinstance(of[kind], dict)]
    sizes = list(of[kinds[0]]["peak"])
    totals = {sizes[0]: ("940", 0.94), sizes[1]: ("2,900", 2.9)}
    return [
        Claim(
            "ResNet-50 keeps 20 MB of activations per image.",
            tuple(near(kind, [of[kind]["per_image"] / 1e6], 20.0, unit=" MB") for kind in kinds),
            "At 224 x 224 pixels, and the input is counted.",
        ),
        Claim(
            "It takes 940 MB for 32 images and 2,900 MB for 128.",
            tuple(
                near(f"{size} images, {kind}", [of[kind]["peak"][size] / 1e9], totals[size][1], unit=" GB")
                for kind in kinds
                for size in sizes
            ),
            "The told activations are too small.",
        ),
        Claim(
            "Parameters, gradients and SGD's momentum are 100 MB each.",
            tuple(near(name, [of[name] / 1e6], 100.0, unit=" MB") for name in ("parameters", "gradients", "moments")),
        ),
        Claim(
            "Accumulating 4 x 32 takes a quarter of the activations of 128.",
            tuple(
                near(
                    f"{kind}: beyond the states",
                    [
                        (of[kind]["peak"][sizes[0]] - _states(of)) / (of[kind]["peak"][sizes[1]] - _states(of)),
                    ],
                    0.25,
                )
                for kind in kinds
            ),
            "Under autocast the copies of the weights do not shrink with the micro-batch.",
        ),
    ]


def _states(of: Result) -> int:
    return of["parameters"] + of["gradients"] + of["moments"]


# ---------------------------------------------------------------------------------------------------------------------
# Communication


def broadcast_seconds(p: int, seconds: float, along_a_tree: bool) -> float:
    """Until all of p processes have a message that takes `seconds` to send, one at a time; simulated.

    >>> broadcast_seconds(8, 5.0, along_a_tree=False), broadcast_seconds(8, 5.0, along_a_tree=True)
    (35.0, 15.0)
    """
    free_at, have = {0: 0.0}, 1
    while have < p:
        sender = min(free_at, key=free_at.__getitem__) if along_a_tree else 0
        free_at[sender] += seconds
        free_at[have] = free_at[sender]
        have += 1
    return max(free_at.values())


def collectives(settings: Result, seed: int) -> Result:
    """Seconds of broadcasts and all-reduces of 8 nodes, and of rings and trees for small messages."""
    p, num_bytes, bandwidth = settings["p"], settings["bytes"], settings["bandwidth"]
    small = {
        f"{nodes} nodes, {size} bytes": {
            way: timing.ALL_REDUCE[way](nodes, size, settings["fast"], settings["latency"]) for way in ("ring", "tree")
        }
        for nodes in (8, 64)
        for size in (1_000, 100_000_000)
    }
    return {
        "broadcast": {
            name: broadcast_seconds(p, num_bytes / bandwidth, tree)
            for name, tree in (("serial", False), ("tree", True))
        },
        "all_reduce": {name: way(p, num_bytes, bandwidth, 0.0) for name, way in timing.ALL_REDUCE.items()},
        "rounds": {str(nodes): broadcast_seconds(nodes, 1.0, True) for nodes in (8, 16, 32, 64)},
        "small": small,
    }


def collectives_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    reduced = ", ".join(f"{name.replace('_', ' ')} {seconds:g} s" for name, seconds in of["all_reduce"].items())
    counts = list(of["rounds"].items())
    return [
        Claim(
            "8 nodes, 5 MB at 1 MB/s: 35 s one after the other, 15 s along a tree, also for the gradients' all-reduce.",
            (
                rounds("broadcast, one after the other", of["broadcast"]["serial"], "35", " s"),
                rounds("broadcast along a tree", of["broadcast"]["tree"], "15", " s"),
                rounds("all-reduce, one after the other", of["all_reduce"]["naive"], "35", " s"),
                rounds("all-reduce along a tree", of["all_reduce"]["tree"], "15", " s"),
            ),
            f"These are times of a broadcast. All-reduce: {reduced}.",
        ),
        Claim(
            "Twice as many nodes take one more round of a tree.",
            tuple(
                near(f"{a} to {b} nodes", [after - before], 1.0)
                for (a, before), (b, after) in itertools.pairwise(counts)
            ),
        ),
        Claim(
            "An all-reduce such as the ring takes less than a reduction and a broadcast one after the other.",
            tuple(
                so(
                    name,
                    f"ring {each['ring'] * 1e3:.3g} ms, reduce and broadcast {each['tree'] * 1e3:.3g} ms",
                    each["ring"] < each["tree"],
                )
                for name, each in of["small"].items()
            ),
            "A ring of many nodes has more rounds, which counts where messages are small (latency 20 microseconds, 10 GB/s).",
        ),
    ]


def communication(settings: Result, seed: int) -> Result:
    """Bytes that DDP hands to its reduction in a step, counted by a hook; and predicted hours of a long run."""
    counted: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            for name, synchronised in (("one micro-batch", None), ("every micro-step", True), ("no_sync", False)):
                counted[name] = _reduced_bytes(settings["k"], synchronised)
        finally:
            dist.destroy_process_group()
    model, hours = memory.model_from_recipe(load("bert_base")), {}
    for cluster in settings["clusters"]:
        hw = hardware.parse(cluster)
        for length in settings["lengths"]:
            recipe = load("bert_base", {"max_seq_length": length, "max_position_embeddings": 512})
            model = memory.model_from_recipe(recipe)
            for precision in settings["precisions"]:
                work, software = timing.count_work(model, precision), timing.default_software(precision)
                k, b = settings["k"], settings["b"]
                layout = plan.solve_layout(
                    num_processes=hw.num_processes, per_device_train_batch_size=b, gradient_accumulation_steps=k
                )
                alone = plan.solve_layout(
                    num_processes=hw.num_processes, per_device_train_batch_size=b, gradient_accumulation_steps=1
                )
                micro_steps = settings["micro_steps"]
                hours[f"{cluster}, length {length}, {PRECISIONS[precision]}"] = {
                    "every update": timing.step_time(work, alone, hw, precision, software).total * micro_steps / 3600,
                    "every k-th": timing.step_time(work, layout, hw, precision, software).total
                    * (micro_steps // k)
                    / 3600,
                    "every micro-step": timing.step_time(
                        work, layout, hw, precision, software, reduce_every_micro_batch=True
                    ).total
                    * (micro_steps // k)
                    / 3600,
                }
    return {"bytes": counted, "hours": hours}


def _reduced_bytes(k: int, synchronised: bool | None) -> int:
    """Of a step of k micro-steps, each reduced or only the last; None: of one micro-batch."""
    total = 0

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal total
        total += bucket.buffer().nbytes
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model = DistributedDataParallel(nn.Linear(32, 32))
    model.register_comm_hook(None, hook)
    for micro_step in range(k if synchronised is not None else 1):
        model.require_backward_grad_sync = synchronised is not False or micro_step == k - 1  # what no_sync() sets
        model(torch.randn(2, 32)).sum().backward()
    return total


def communication_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    counted, hours = of["bytes"], of["hours"]
    k = SETTINGS["communication"]["k"]

    def saved(name: str, by: str, beside: str) -> float:
        return 100 * (1 - hours[name][by] / hours[name][beside])

    return [
        Claim(
            "An update at every 4th micro-batch communicates 75 % less.",
            (
                near(
                    "bytes reduced by DDP for the same samples, beside an update per micro-batch",
                    [100 * (1 - counted["no_sync"] / (k * counted["one micro-batch"]))],
                    75.0,
                    unit=" %",
                ),
                near(
                    "beside accumulation that reduces in every micro-step",
                    [100 * (1 - counted["no_sync"] / counted["every micro-step"])],
                    75.0,
                    unit=" %",
                ),
                near(
                    "one reduction per step, beside accumulation under no_sync, as is usual",
                    [100 * (1 - counted["one micro-batch"] / counted["no_sync"])],
                    75.0,
                    unit=" %",
                ),
                near(
                    "the told optimizer, whose every micro-step reads a reduced gradient, beside an update per micro-batch",
                    [100 * (1 - counted["every micro-step"] / (k * counted["one micro-batch"]))],
                    75.0,
                    unit=" %",
                ),
            ),
            "Against accumulation that reduces once per step, as Accelerate does, nothing is saved: the number of updates "
            "decides, "
            "not where gradients accumulate.",
        ),
        Claim(
            "That turns 72 hours of BERT-Base on 8 V100 into 67, 7 % less (predicted here, 64 samples per GPU; a third of it "
            "or "
            "three times as much still counts).",
            tuple(
                so(
                    f"{name}, beside an update per micro-batch",
                    f"{saved(name, 'every k-th', 'every update'):.1f} % ({hours[name]['every update']:.0f} to "
                    f"{hours[name]['every k-th']:.0f} hours for 1M micro-batches)",
                    7 / 3 <= saved(name, "every k-th", "every update") <= 21,
                )
                for name in hours
            ),
            "Reductions hide behind the backward; what is saved is the exposed part and updates. Not measured on a GPU.",
        ),
        Claim(
            "A million micro-batches of 64 per GPU take 72 hours there (predicted here, 20 %).",
            tuple(near(name, [each["every update"]], 72.0, 0.2, " hours") for name, each in hours.items()),
            "Not measured on a GPU.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Time


def slower(settings: Result, seed: int) -> Result:
    """Seconds of a step of the same samples in one piece and in k, on this machine, and as predicted for GPUs."""
    torch.manual_seed(seed)
    width, batch, k = settings["width"], settings["batch"], settings["k"]
    model = nn.Sequential(
        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, 4 * width), nn.GELU(), nn.Linear(4 * width, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x, y = torch.randn(batch, width), torch.randint(10, (batch,))

    def seconds(parts: int) -> float:
        start = time.perf_counter()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            (nn.functional.cross_entropy(model(a), b) / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    for parts in (1, k):
        seconds(parts)
    pairs = [(seconds(1), seconds(k)) for _ in range(settings["pairs"])]
    measured = statistics.median(b for _, b in pairs) / statistics.median(a for a, _ in pairs)
    recipe, predicted = load("resnet50_1xv100"), {}
    model_of = memory.model_from_recipe(recipe)
    for device in ("v100-16", "t4", "a100-40"):
        work, software = timing.count_work(model_of, "fp16"), timing.default_software("fp16", kernels="channels_last")
        times = {}
        for name, processes, b in (("whole", 1, 128), ("cut", 1, 32), ("parallel", 4, 32)):
            layout = plan.solve_layout(num_processes=processes, global_batch_size=128, per_device_train_batch_size=b)
            hw = hardware.parse(f"{processes}x{device}")
            times[name] = timing.step_time(work, layout, hw, "fp16", software).total
        predicted[device] = {name: times[name] / times["whole"] for name in ("cut", "parallel")}
    return {"measured": measured, "predicted": predicted}


def slower_claims(results: list[Result]) -> list[Claim]:
    devices = results[0]["predicted"]
    return [
        Claim(
            "Accumulation in 4 micro-steps takes 4 times as long as one batch of the same samples.",
            (
                near("measured, an MLP on this CPU", column(results, "measured"), 4.0),
                *(near(f"ResNet-50 on 1x {device}, predicted", [of["cut"]], 4.0) for device, of in devices.items()),
            ),
            "As many samples are as much work; micro-steps cost their kernels' launches and smaller products. 4 times as "
            "long as "
            "*one micro-batch* is true.",
        ),
        Claim(
            "4 GPUs take as long as one for the same batch.",
            tuple(
                near(f"ResNet-50, 128 images on 4x {device}, predicted", [of["parallel"]], 1.0)
                for device, of in devices.items()
            ),
            "A quarter of the work each, and the reduction.",
        ),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Where the argument exists


def frameworks(settings: Result, seed: int) -> Result:
    """Which libraries' interfaces have an argument gradient_accumulation_steps."""
    torch_names = [name for name in _signatures(torch.optim) if "gradient_accumulation_steps" in name]
    return {
        "torch": torch.__version__,
        "torch.optim": len(torch_names),
        "DDP": int("gradient_accumulation_steps" in inspect.signature(DistributedDataParallel).parameters),
        "backward": int("gradient_accumulation_steps" in inspect.signature(torch.Tensor.backward).parameters),
        "accelerate": int("gradient_accumulation_steps" in inspect.signature(accelerate.Accelerator).parameters),
        "transformers": int(
            "gradient_accumulation_steps" in inspect.signature(transformers.TrainingArguments).parameters
        ),
    }


def _signatures(module: Any) -> list[str]:
    found = []
    for name, each in vars(module).items():
        if inspect.isclass(each):
            found += [f"{name}.{parameter}" for parameter in inspect.signature(each).parameters]
    return found


def frameworks_claims(results: list[Result]) -> list[Claim]:
    (of,) = results
    version = tuple(int(part) for part in of["torch"].split("+")[0].split(".")[:2])
    return [
        Claim(
            "PyTorch 2.0 has an argument gradient_accumulation_steps.",
            tuple(
                so(
                    f"{name}, torch {of['torch']}",
                    f"{of[name]} arguments of that name",
                    of[name] > 0 and version >= (2, 0),
                )
                for name in ("torch.optim", "DDP", "backward")
            ),
            f"Accelerate ({of['accelerate']}) and transformers' Trainer ({of['transformers']}) have it, and DeepSpeed's "
            "configuration; torch has none, so it never was introduced by it.",
        )
    ]


def larger(settings: Result, seed: int) -> Result:
    """What the told experiments would take at their size, predicted: hours of one run on one device."""
    bert = memory.model_from_recipe(load("bert_base", {"max_seq_length": 128}))
    classifier = memory.model_from_recipe(load("finetune_glue_bert_base", {"max_seq_length": 128}))
    found = {}
    for name, model, batch, steps in (
        ("BERT-Base pretraining, 1M steps of 64 x 8 pairs of length 128", bert, 512, 1_000_000),
        ("BERT-Base on MNLI, 10 epochs of 392,702 pairs in batches of 16", classifier, 16, 10 * 24_544),
    ):
        hw = hardware.parse("1xa100-80")
        work, software = timing.count_work(model, "bf16"), timing.default_software("bf16")
        layout = plan.solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=min(batch, 64))
        found[name] = timing.step_time(work, layout, hw, "bf16", software).total * steps / 3600
    return found


def larger_table(results: list[Result]) -> str:
    (of,) = results
    rows = "".join(f"| {name} | {hours:,.0f} | {20 * hours:,.0f} |\n" for name, hours in of.items())
    return (
        "| told experiment | hours of one run | of 4 variants, 5 seeds |\n|---|---|---|\n"
        f"{rows}\nOn one A100-80 in bf16, predicted by stepplan.timing at one learning rate per variant; a choice of rates "
        "multiplies "
        "it. ResNet-18 on CIFAR-10 for 20 epochs is minutes on a GPU, but its data need a network.\n\n"
        "Told with numbers, and not checked here: accuracies on MNLI (+0.4, +0.9, +1.1 points) and of next sentences (98.1 "
        "to 98.9 %) "
        "at that size; k for adversarial networks (8 to 16) and policy gradients (16 to 32); epochs of 60 and 40 seconds on "
        "three "
        "A100; and who used accumulation inside momentum first.\n"
    )


def larger_claims(results: list[Result]) -> list[Claim]:
    return []


SETTINGS: dict[str, Result] = {
    "states": {"b": [1, 8], "length": 128},
    "communication": {
        "k": 4,
        "b": 64,
        "micro_steps": 1_000_000,
        "clusters": ["8xv100-32"],
        "lengths": [128, 512],
        "precisions": ["no", "fp16"],
    },
    "fits": {
        "cases": [
            ["BERT-Large, length 128", "bert_large_phase1", {}, "3090", [8, 32], ["no", "bf16"]],
            ["BERT-Large, length 512", "bert_large_phase2", {}, "3090", [8, 32], ["no", "bf16"]],
            ["BERT-Large on 11 GB, length 128", "bert_large_phase1", {}, "2080ti", [4], ["no", "fp16"]],
            ["BERT-Large on 11 GB, length 512", "bert_large_phase2", {}, "2080ti", [4], ["no", "fp16"]],
            ["GPT-2 1.5B", "gpt2_xl_8xa100", {}, "a100-80", [4, 8], ["no", "bf16"]],
            ["ResNet-50 on a T4", "resnet50_imagenet_4xt4", {}, "t4", [64], ["no", "fp16"]],
            ["ResNet-50 on a V100", "resnet50_1xv100", {}, "v100-16", [256], ["no", "fp16"]],
        ],
        "traced": [
            ["BERT-Large", "3090", 128, [8, 32], ["no", "bf16"]],
            ["BERT-Large", "3090", 512, [8, 32], ["no", "bf16"]],
            ["GPT-2 1.5B", "a100-80", 1024, [4, 8], ["bf16"]],
        ],
    },
    "slower": {"width": 256, "batch": 128, "k": 4, "pairs": 15},
    "collectives": {"p": 8, "bytes": 5e6, "bandwidth": 1e6, "fast": 1e10, "latency": 2e-5},
}
EXPERIMENTS = [
    Experiment(
        "frameworks",
        "Where the argument exists",
        "Signatures of the installed libraries.",
        {},
        frameworks,
        frameworks_claims,
        HERE,
        seeded=False,
    ),
    Experiment(
        "states",
        "What accumulation adds to memory",
        "BERT-Large at length 128, float32, fused AdamW, transformers' own loss: a step traced on fake tensors, with "
        "gradients of an "
        "earlier micro-step alive, and without. Gradients alive: 8 linear layers on this machine.",
        SETTINGS["states"],
        states,
        states_claims,
        (*HERE, accumulating),
        seeded=False,
        minutes=0.3,
        quick={"b": [1]},
    ),
    Experiment(
        "fits",
        "What fits",
        "Bytes at the fullest moment of a step: by stepplan.memory's formula for the programs of this repository, and traced "
        "on fake "
        f"tensors for transformers' own model and loss. Of the card {placement.RESERVED / 1e9:g} GB are left for the CUDA "
        "context.",
        SETTINGS["fits"],
        fits,
        fits_claims,
        HERE,
        seeded=False,
        minutes=1.5,
        quick={"traced": []},
    ),
    Experiment(
        "activations",
        "Activations of ResNet-50",
        "Steps of 32 and 128 images of 224 x 224 traced on fake tensors, SGD with momentum, batch normalisation.",
        {"b": [32, 128]},
        activations,
        activation_claims,
        HERE,
        seeded=False,
        minutes=0.3,
    ),
    Experiment(
        "collectives",
        "Broadcasts and all-reduces",
        "A simulation in which a node sends one message at a time, and stepplan.timing's formulas.",
        SETTINGS["collectives"],
        collectives,
        collectives_claims,
        HERE,
        seeded=False,
    ),
    Experiment(
        "communication",
        "Communication that is saved",
        "Bytes: DistributedDataParallel on one gloo process, counted by a communication hook. Hours: stepplan.timing.",
        SETTINGS["communication"],
        communication,
        communication_claims,
        HERE,
        seeded=False,
    ),
    Experiment(
        "slower",
        "Time of accumulation",
        "128 samples in one piece and in 4, an MLP of 1.3M parameters with AdamW, medians of 15 steps each in turns; "
        "ResNet-50 in fp16 "
        "by stepplan.timing.",
        SETTINGS["slower"],
        slower,
        slower_claims,
        HERE,
        quick={"pairs": 3},
    ),
    Experiment(
        "larger",
        "What a larger run would take",
        "Arithmetic of stepplan.timing.",
        {},
        larger,
        larger_claims,
        HERE,
        seeded=False,
        table=larger_table,
    ),
]
