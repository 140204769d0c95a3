"""Writes the lines of metrics.jsonl: of steps, whose losses are read from the device now and then, evaluations, events."""

import dataclasses
import itertools
import json
import math
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm

from samestep.data.steps import StepData
from samestep.printing import fold, write_number
from samestep.step.exact_sum import add_exactly
from samestep.training import digest
from samestep.training.evaluation import Evaluation
from samestep.training.not_finite import NotFinite
from samestep.training.output_folder import begin_lines, is_earlier, read_metrics
from samestep.training.parts import Part
from samestep.training.progress import Progress

if TYPE_CHECKING:
    from samestep.training.run import Run
    from samestep.training.run_step import RunStep

Places = tuple[list[tuple[int, int]], list[list[tuple[int, int]]]]
"""(process, micro-step) of some micro-batches, and the (epoch, sample id) of the samples of each."""


class Noted(NamedTuple):
    """A step whose numbers are on the device still.

    Attributes:
        line: of metrics.jsonl, as far as it is known.
        places, samples: see `Places`.
        sums: summed losses of these micro-batches, float64 [micro-batches, terms].
        counts: targets of the whole step, int64 [terms]; of workers that take steps of their own, those of this process.
        norm: of the whole gradient before clipping, scalar; of such workers, the root of the sum of their squares.
    """

    line: dict[str, Any]
    places: list[tuple[int, int]]
    samples: list[list[tuple[int, int]]]
    sums: torch.Tensor
    counts: torch.Tensor
    norm: torch.Tensor


class RunLog(Part):
    """Reads metrics of the steps from the device once per `logging_steps`, and writes one JSON line per step.

    The losses in the lines are the means over the whole global batch, whatever the layout:  loss = sum_j w_j s_j / n_j.

    Args:
        run: lines of later steps than the one at which it begins are removed.

    Attributes:
        evaluations: lines of the evaluations of this session and earlier ones.
        run_id: identifies the run for trackers.
        first_step: steps before the first one of this session.
    """

    def __init__(self, run: "Run"):
        self.accelerator, self.recipe, self.settings = run.accelerator, run.recipe, run.settings
        self.plan, self.reduction, self.folder, self.parts = run.plan, run.reduction, run.folder, run.parts
        self.output_dir, state = run.output_dir, run.start.state
        self.run_id, self.first_step = state.run_id or uuid.uuid4().hex[:8], state.step
        self.pending: list[Noted] = []
        if self.accelerator.is_main_process:
            self.folder.begin(lambda: self.open_files(self.first_step))
        # Where nobody has opened the files, they may be of others, or of replicas that are further
        lines = read_metrics(self.output_dir)[1] if self.accelerator.is_main_process else []
        earlier = [line for line in lines if is_earlier(line, self.first_step, self.plan.num_steps)]
        evaluations = earlier if self.settings.resume_from_checkpoint else []
        self.evaluations: list[dict[str, Any]] = broadcast_object_list([evaluations])[0]
        self.not_finite = NotFinite(self.accelerator, self.settings, self.reduction, run.saver, state.num_skipped)
        for note in self.reduction.list_notes():
            self.accelerator.print(fold(note))
        self.progress = Progress(self.recipe, self.plan, self.accelerator.device)

    def open_files(self, first_step: int) -> None:
        """Make the files ready for the lines of a session, and describe it; see `output_folder.begin_lines`."""
        begin_lines(self.output_dir, self.recipe, self.settings, first_step, self.plan.num_steps)
        self.write_session()

    def write_session(self) -> None:
        """Describe how this session is run, for people and `python -m recipes compare`: nothing else reads it."""
        launch = {"num_processes": self.accelerator.num_processes, "mixed_precision": self.accelerator.mixed_precision}
        machine = {"device": self.accelerator.device.type, "machine": digest.machine_kind()}
        length: dict[str, Any] = {"num_steps": self.plan.num_steps}
        if self.plan.spans is not None:
            length["batch_sizes"] = self.plan.spans.list_sizes(self.plan.num_steps)
        session = json.dumps(dataclasses.asdict(self.settings) | launch | machine | length, indent=2) + "\n"
        (self.output_dir / "settings.json").write_text(session, encoding="utf-8")

    def share(self) -> dict[str, Any]:
        """Return what another launch that joins this run has to know of the steps so far: plain values."""
        num_skipped = self.not_finite.num_skipped
        return {"run_id": self.run_id, "num_skipped": num_skipped, "evaluations": self.evaluations}

    def join(self, state: Mapping[str, Any], step: int) -> None:
        """Go on as the launch does that gave its state after `step` steps."""
        self.run_id, self.not_finite.num_skipped = state["run_id"], state["num_skipped"]
        self.evaluations, self.pending = state["evaluations"], []
        self.progress.jump(step)

    def start(self) -> None:
        self.progress.start(self.first_step, is_shown=self.accelerator.process_index == 0)

    # -------------------------------------------------------------------------------------------------------- of steps

    def list_parts(self, data: StepData) -> Places:
        """List the micro-batches of a step whose losses this process has: its own, or those of all."""
        listed = self.reduction.list_parts(data)
        if listed is None:
            listed = [(self.accelerator.process_index, number) for number in range(len(data.samples))], data.samples
        return listed

    def end_step(self, step: "RunStep") -> None:
        data, sums, counts = step.data, step.attempt.sums, step.attempt.counts
        line: dict[str, Any] = {"step": data.step + 1, "epoch": data.epoch, "learning_rate": step.learning_rate}
        line["samples"] = data.num_samples
        if self.recipe.unit != "image":  # images are samples
            line[f"{self.recipe.unit}s"] = data.num_tokens
        line |= {f"{source}/samples": count for source, count in data.num_samples_by_source.items()}
        line["seconds"] = self.progress.take_seconds()
        table = torch.stack(sums) if sums else counts.new_zeros(0, len(counts))
        self.pending.append(Noted(line, *self.list_parts(data), table.double(), counts, step.grad_norm))
        self.progress.advance(data.num_samples)
        if line["step"] % self.folder.count_unread(self.settings.logging_steps) == 0:
            self.flush()
        if line["step"] % self.settings.logging_steps == 0:
            self.folder.write(self.accelerator.is_main_process)

    def flush(self) -> None:
        """Read the noted steps' sums from the device, add them up over the processes, write their lines.

        Raises:
            RunError: a loss or gradient is not finite, and on_nonfinite is stop.
        """
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        # Of each step the summed losses of each micro-batch, [micro-batches][terms]; of all processes, one after the other
        sums = [noted.sums.tolist() for noted in pending]  # waits for the device
        all_counts = torch.stack([noted.counts for noted in pending]).cpu()
        norms = torch.stack([noted.norm for noted in pending]).double().cpu()
        counts_here = self.reduction.list_counts(all_counts, norms)
        values = [[part.read(noted.line["step"]) for part in self.parts] for noted in pending]
        all_sums, all_values, counts_of_processes = zip(*gather_object([(sums, values, counts_here)]), strict=True)
        if counts_here is not None:
            all_counts, norms = self.reduction.join_counts(counts_of_processes)
        totals = [
            [add_exactly(terms) for terms in zip(*itertools.chain(*parts), strict=True)]
            for parts in zip(*all_sums, strict=True)
        ]
        values_by_step = zip(*all_values, strict=True)  # of each process, of each part
        rows = zip(pending, torch.tensor(totals, dtype=torch.float64), all_counts, norms, values_by_step, strict=True)
        lines, broken = [], None
        for noted, total, counts, norm, values_of_processes in rows:
            line = noted.line
            for part, part_values in zip(self.parts, zip(*values_of_processes, strict=True), strict=True):
                part.add_to_line(line, counts, part_values)
            line |= self.compute_losses(total, counts) | {"grad_norm": norm.item()}
            if self.not_finite.must_stop(line):
                broken = noted
                break
            lines.append(_sort_keys(line))
            self.append("metrics.jsonl", lines[-1:])
        self.progress.show(lines, [text for part in self.parts if (text := part.describe())])
        for part in self.parts:
            part.lines_written(lines)
        if broken is not None:
            self.folder.write(self.accelerator.is_main_process)
            self.not_finite.stop(broken, self.run_id)

    def compute_losses(self, sums: torch.Tensor, counts: torch.Tensor, prefix: str = "") -> dict[str, float]:
        """Compute the loss, and each of its terms if there are several, from total sums and counts, [terms] on the host."""
        weights = self.recipe.loss_weights
        means = [s / max(n, 1) for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]
        terms = {f"{prefix}{name}_loss": mean for name, mean in zip(weights, means, strict=True) if len(weights) > 1}
        return {f"{prefix}loss": sum(w * mean for w, mean in zip(weights.values(), means, strict=True))} | terms

    # ---------------------------------------------------------------------------------------- of events and evaluations

    def add_event(self, step: int, message: str, **values: Any) -> None:
        """Write and print something that happened in `step`; `values` are the numbers of its line in metrics.jsonl."""
        self.flush()
        if self.accelerator.is_main_process:  # other launches of the same run may have seen something else
            self.append("metrics.jsonl", [{"step": step, "event": message} | values])
            self.folder.write(is_writer=True)
        if self.accelerator.process_index == 0:
            details = ", ".join(f"{name} {value}" for name, value in values.items())
            tqdm.write(f"step {step}: {message} ({details})", file=sys.stderr)

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps after which the model was evaluated, now or in an earlier session."""
        return {line["step"] for line in self.evaluations}

    def add_evaluation(
        self,
        step: int,
        totals: torch.Tensor,
        scores: Mapping[str, float] | None = None,
        sources: Mapping[str, Evaluation] | None = None,
    ) -> None:
        """Write an evaluation after `step`: its losses and other metrics.

        Args:
            totals: float64 [3, terms], see `evaluation.evaluate`.
            scores: other metrics by name; None: accuracies, and of a language model the perplexity.
            sources: of each source of the data, its own totals and scores.
        """
        self.flush()
        metrics = self._compute_metrics(totals, scores, "eval_")
        more = {f"eval_{name}": value for part in self.parts for name, value in part.score().items()}
        metrics |= {name: value for name, value in more.items() if "/" not in name}
        for source, evaluation in (sources or {}).items():
            prefix = f"eval_{source}/"
            metrics |= self._compute_metrics(evaluation.totals, evaluation.scores, prefix)
            metrics |= {name: value for name, value in more.items() if name.startswith(prefix)}
        line = {"step": step} | metrics
        self.evaluations.append(line)
        self.append("metrics.jsonl", [line])
        for observer in self.parts:
            observer.evaluated(line)
        self.folder.write(self.accelerator.is_main_process)
        if self.accelerator.is_main_process:
            starts = {f"step {step}: ": ""} | {f"  {source}: ": f"eval_{source}/" for source in sources or {}}
            lines = [
                head
                + ", ".join(
                    f"{n.removeprefix(start)} {write_number(v)}" for n, v in metrics.items() if _is_of(n, start)
                )
                for head, start in starts.items()
            ]
            tqdm.write(fold("\n".join(lines)))
        self.progress.restart_clock()

    def _compute_metrics(
        self, totals: torch.Tensor, scores: Mapping[str, float] | None, prefix: str
    ) -> dict[str, float]:
        """Compute losses, and `scores` or accuracies, of an evaluation or of a source's part of it."""
        sums, correct, counts = totals
        metrics, terms = self.compute_losses(sums, counts, prefix), list(self.recipe.loss_weights)
        if scores is not None:
            return metrics | {f"{prefix}{name}": value for name, value in scores.items()}
        if terms in (["lm"], ["seq2seq"]):
            metrics[f"{prefix}perplexity"] = math.exp(min(metrics[f"{prefix}loss"], 700.0))
        names = [f"{prefix}{term}_accuracy" for term in terms] if len(terms) > 1 else [f"{prefix}accuracy"]
        return metrics | dict(zip(names, (correct / counts.clamp(min=1)).tolist(), strict=True))

    # ------------------------------------------------------------------------------------------------------- the files

    def append(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        """Append lines to one of the files of lines."""
        self.folder.append(name, list(map(_replace_nonfinite, records)), self.accelerator.is_main_process)

    def write(self) -> None:
        """Write all lines of the steps so far."""
        self.flush()
        self.folder.write(self.accelerator.is_main_process)

    def close(self) -> None:
        """Write all lines that are not written yet, as far as possible, and end the progress bar."""
        self.write()
        for name in self.folder.list_unwritten(self.accelerator.is_main_process):
            self.append(name, [])
        self.progress.close()


def _replace_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinity and NaN, which JSON lacks, by null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _is_of(name: str, start: str) -> bool:
    """Tell whether a metric is of the source whose metrics begin so; empty: of all held-out data."""
    return name.startswith(start) if start else "/" not in name


def round_to_6(value: float) -> float:
    """Round to 6 digits, which do not depend on the order of the processes in a sum."""
    return float(f"{value:.6g}")


def _sort_keys(line: dict[str, Any]) -> dict[str, Any]:
    """Sort a line's keys: `step, epoch, loss, terms ...` come first, in the order in which people read them."""
    first = ["step", "epoch", *(name for name in line if name.endswith("loss")), "learning_rate", "grad_norm"]
    return {name: line[name] for name in first} | line
