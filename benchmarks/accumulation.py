"""Accumulation in the optimizer beside gradient accumulation: memory on real tensors, and time.

    make bench NAME=accumulation

- memory: BERT-Base's encoder (12 layers x 768) on one short sample per micro-batch, so that parameters, gradients and moments
  are nearly all there is; float32, AdamW, each case in processes of its own. Bytes of tensors, as `stepplan.trace` counts
  them, and the resident set that the system counts, at their highest, less what was there before the model. With two processes
  gradient accumulation is DistributedDataParallel's, gradients as views of its buckets, with no_sync.
- time: the steps of bert_small_cpu (micro-batches of b sequences of 128), both optimizers by turns on the same micro-batches,
  clipping included; ratios are gradient's seconds / optimizer's, the median over the steps of a round.
"""

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

import harness
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertModel

from samestep._internals.libc import stop_malloc_returning_memory
from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data import sentence_pairs
from samestep.data.steps import StepData, Steps
from samestep.models.bert_pretraining import PretrainingSums
from samestep.recipe import run_settings as run
from samestep.step import losses, optim
from samestep.step.optim import Accumulating, AccumulatingAdamW
from stepplan.trace import Tracer

WARM_UP = 1  # steps that are not counted
KS = (2, 4, 16)
WAYS = ("gradient", "unbiased")
CASES = (("no", 16, 1), ("no", 16, 4), ("no", 16, 16), ("no", 32, 4), ("bf16", 32, 4))  # precision, b, k


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def measure_peak(way: str, k: int, rank: int, num_processes: int, folder: str) -> dict[str, int]:
    """Measure the peak memory of one process in three steps, in bytes."""
    if num_processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_processes)
    torch.set_num_threads(1)
    resident_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with Tracer() as tracer:
        model: nn.Module = BertModel(BertConfig(vocab_size=1000, hidden_dropout_prob=0.0), add_pooling_layer=False)
        parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
        if way == "gradient":
            if num_processes > 1:
                model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        else:
            optimizer = AccumulatingAdamW(model.parameters(), 1e-4, second_moment=way, gradient_accumulation_steps=k)
            if num_processes > 1:
                optimizer.distribute(model)
        tokens = torch.arange(16)[None]
        for step in range(3):
            for micro_step in range(k):
                waits = way == "gradient" and num_processes > 1 and micro_step < k - 1
                with model.no_sync() if waits else contextlib.nullcontext():
                    (model(tokens).last_hidden_state.square().mean() / k).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                tracer.peak()  # moments exist from now on
        peak = tracer.peak()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident_start
    return {"parameters": parameter_bytes, "tensors": peak, "resident": resident}


def memory_case(way: str, k: int, num_processes: int) -> dict:
    """Measure the peak memory of the process that needs most; each is started anew."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--case", way, str(k)]
        places = [[str(rank), str(num_processes), folder] for rank in range(num_processes)]
        running = [subprocess.Popen([*command, *place], stdout=subprocess.PIPE, text=True) for place in places]
        results = [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in running]
    peaks = {name: max(result[name] for result in results) for name in results[0]}
    print(way, k, num_processes, peaks, file=sys.stderr)
    return {"way": way, "k": k, "num_processes": num_processes} | peaks


# ---------------------------------------------------------------------------------------------------------------------
# Time


class Loop:
    """A plain loop over steps, whose gradients accumulate one way or the other."""

    def __init__(self, way: str, precision: str):
        flags = ["--recipe", "bert_small_cpu"]
        if way != "gradient":
            flags += ["--accumulation", "optimizer", "--second_moment", way]
        recipe, _ = run.parse(flags, "bert_pretraining", "")
        torch.manual_seed(recipe.seed)
        self.model, self.limit = PretrainingSums.from_recipe(recipe).train(), recipe.max_grad_norm
        self.optimizer, self.bf16 = optim.from_recipe(self.model, recipe), precision == "bf16"
        self.weights, self.parameters = torch.ones(2), list(self.model.parameters())

    def step(self, data: StepData) -> float:
        """Take a step; its seconds."""
        start = harness.clock()
        accumulates = isinstance(self.optimizer, Accumulating)
        if accumulates:
            self.optimizer.gradient_accumulation_steps = len(data.micro_batches)
        for micro_batch in data.micro_batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                sums, _ = self.model(**micro_batch)
            losses.weighted_loss(sums, data.counts, self.weights).backward()
        if accumulates:
            self.optimizer.clip_grad_norm_(self.limit)
        else:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.limit)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return harness.clock() - start


def time_cases(num_rounds: int, num_steps: int) -> Iterator[dict]:
    stop_malloc_returning_memory()  # as programs do
    recipe, _ = run.parse(["--recipe", "bert_small_cpu"], "bert_pretraining", "")
    source, _ = sentence_pairs.build(recipe)
    for precision, b, k in CASES:
        batch = b * k
        layout = solve_layout(num_processes=1, global_batch_size=batch, per_device_train_batch_size=b)
        steps = Steps(source, Order(len(source), batch, recipe.seed), layout, process_index=0)
        data = [steps[number] for number in range(WARM_UP + max(1, num_steps // k))]
        ratios = []
        for _ in range(num_rounds):
            loops = [Loop(way, precision) for way in WAYS]
            seconds = [[loop.step(batches) for loop in loops] for batches in data][WARM_UP:]
            ratios.append(statistics.median(theirs / ours for theirs, ours in seconds))
        print(precision, b, k, ratios, file=sys.stderr)
        yield {"precision": precision, "b": b, "k": k, "ratios": ratios}


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = harness.flags("accumulation", __doc__, rounds=5)
    parser.add_argument("--micro_steps", type=harness.positive, default=16, help="per round and case")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        way, k, rank, num_processes, folder = arguments.case
        print(json.dumps(measure_peak(way, int(k), int(rank), int(num_processes), folder)))
        return
    memory = [memory_case(way, k, 1) for way in WAYS for k in KS]
    memory += [memory_case(way, 4, 2) for way in WAYS]
    times = list(time_cases(arguments.rounds, arguments.micro_steps))
    more = {"rounds": arguments.rounds, "micro_steps": arguments.micro_steps}
    about = harness.about("make bench NAME=accumulation", ("torch", "transformers"), **more)
    results = {"about": about, "memory": memory, "time": times}
    harness.write(arguments.output, results, markdown(results))


def markdown(results: dict) -> str:
    rows = {(row["num_processes"], row["k"], row["way"]): row for row in results["memory"]}
    memory = []
    for num_processes, k in sorted({key[:2] for key in rows}):
        pair = [rows[num_processes, k, way] for way in WAYS]
        cells = [num_processes, k]
        for name in ("tensors", "resident"):
            saved = 4 * (pair[0][name] - pair[1][name]) / pair[0]["parameters"]
            cells += [f"{row[name] / 1e6:,.0f}" for row in pair] + [f"{saved:.2f}"]
        memory.append(cells)
    columns = "processes | k | tensors, gradient | optimizer | saved | resident set, gradient | optimizer | saved"
    times = [[row["precision"], row["b"], row["k"], harness.spread(row["ratios"], ".3f")] for row in results["time"]]
    about, size = results["about"], results["memory"][0]["parameters"]
    return harness.page(
        "Accumulation in the optimizer",
        "accumulation.py",
        about,
        "## Memory\n\nMost bytes at once, in MB, and what the optimizer's way saves, in bytes per parameter.\n\n"
        f"{harness.table(columns, memory)}\n"
        "## Time\n\nSteps per second over gradient accumulation's: median (smallest to largest).\n\n"
        f"{harness.table('precision | b | k | ratio', times)}\n"
        f"Memory: {size / 4e6:,.1f} M parameters, so {size / 1e6:,.0f} MB of them. Time: {about['rounds']} rounds of "
        f"{about['micro_steps']} micro-batches (one step at least).\n",
    )


if __name__ == "__main__":
    main()
