"""Writes a run's results: lines of steps, settings.json, trackers, loss.png, all_results.json, the model card."""

import contextlib
import dataclasses
import datetime
import fcntl
import itertools
import json
import math
import os
import resource
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm

from samestep.cut.spans import Spans
from samestep.data.steps import StepData, Steps
from samestep.errors import LostProcessError, RunError, UsageError, will_be_restarted
from samestep.models import pretrained
from samestep.printing import fold
from samestep.recipe import batch_size, run_files
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.step.exact_sum import add_exactly
from samestep.training import card, checkpoint, digest, plots, stragglers
from samestep.training.checkpoint import LINES
from samestep.training.evaluation import Evaluation
from samestep.training.reduction import Reduction
from samestep.training.shared_folder import SharedFolder

SECONDS_TO_UNLOCK = 10.0
"""For workers of an earlier generation to end, which hold the lock of the output folder."""
PICTURES = ("loss.png", "predictions.png", "confusion.png")
"""Pictures that the model card shows, if they were drawn."""


def open_output_dir(accelerator: Accelerator, settings: RunSettings) -> SharedFolder | None:
    """Make the output folder and lock it.

    An earlier run in it is resumed or overwritten, when asked for, never mixed with a new one. Called by all processes, before
    anything costly. Nothing is deleted before `RunLog` starts the new run.

    Returns:
        The folder as replicas share it (fault_tolerance step); else None.

    Raises:
        UsageError: the folder holds a run, another process is running one in it, or it cannot be made.
    """
    output_dir, folder = Path(settings.output_dir), None

    def check_alone() -> None:
        if _find_earlier_run(output_dir) and not settings.resume_from_checkpoint and not settings.overwrite_output_dir:
            raise UsageError(
                f"output_dir {output_dir} holds an earlier run: continue it with --resume_from_checkpoint latest, delete it "
                "with --overwrite_output_dir, or choose another folder"
            )

    is_shared = settings.fault_tolerance == "step"
    is_copied = settings.replicate_checkpoints and accelerator.is_local_main_process
    if accelerator.is_main_process or is_copied or is_shared:
        try:
            if is_shared:
                output_dir.mkdir(parents=True, exist_ok=True)
                folder = SharedFolder(output_dir, LINES)
                folder.join(settings.lighthouse, check_alone)
            else:
                check_alone()
                output_dir.mkdir(parents=True, exist_ok=True)
                _lock(output_dir)
        except OSError as error:
            raise UsageError(
                f"output_dir {output_dir} cannot be made ({error.strerror}): choose another folder"
            ) from None
    accelerator.wait_for_everyone()
    return folder


_locks: dict[Path, TextIO] = {}  # kept open: the system unlocks them when this process ends, however it ends


def _lock(output_dir: Path) -> None:
    """Lock the output folder; take it from a dead generation of the same launch, which may be frozen with the lock in hand."""
    path, deadline = output_dir / ".lock", time.monotonic() + SECONDS_TO_UNLOCK
    launch = f", launch {os.environ['TORCHELASTIC_RUN_ID']}" if will_be_restarted() else ""
    file = path.open("a+", encoding="utf-8")
    while not _try_lock(file, output_dir):
        file.seek(0)
        owner = file.read().strip()
        if not launch or not owner.endswith(launch):
            raise UsageError(
                f"output_dir {output_dir} is in use by another run ({owner}): wait for it, end it, or choose another folder"
            ) from None
        if time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        print(f"WARNING: {output_dir} is taken from {owner}, which does not end", file=sys.stderr)
        path.unlink(missing_ok=True)  # who has lost the file may write no more: `check_lock`
        file = path.open("a+", encoding="utf-8")
    file.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}{launch}", file=file, flush=True)
    _locks[output_dir.resolve()] = file


def _try_lock(file: TextIO, output_dir: Path) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        print(f"WARNING: {output_dir} cannot be locked ({error.strerror}): start no second run in it", file=sys.stderr)
    return True


def check_lock(output_dir: Path) -> None:
    """Raise RunError if a newer generation of this launch, which took this process for dead, has taken the output folder."""
    if file := _locks.get(output_dir.resolve()):
        path = output_dir / ".lock"
        if not path.exists() or not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise LostProcessError(f"{output_dir} was taken by another process, which took this one for dead")


def _find_earlier_run(output_dir: Path) -> list[Path]:
    files = [path for name in LINES if (path := output_dir / name).exists()]
    return files + checkpoint.checkpoints(output_dir)


class RunLog:
    """Reads metrics of the steps from the device once per `logging_steps`, and writes one JSON line per step.

    The losses in the lines are the means over the whole global batch, whatever the layout:  loss = sum_j w_j s_j / n_j.

    Args:
        accelerator, recipe, settings: the run's.
        start: state at the end of an earlier session; its lines of later steps are removed, trackers go on with its run.
        num_steps: steps at the end of training.
        saver: writes checkpoints.
        reduction: how gradients become the step's.
        spans: parts of the stream of samples that the steps hold, where the batch grows; None: it stays.
        folder: the output folder, where replicas share it: `open_files` is called by the replica that begins the run, lines are
            written by the first replica, and every step is read from the device; None: it is this run's alone.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        settings: RunSettings,
        start: checkpoint.State,
        num_steps: int,
        saver: checkpoint.Saver,
        reduction: Reduction,
        spans: Spans | None = None,
        folder: SharedFolder | None = None,
    ):
        self.accelerator, self.recipe, self.settings = accelerator, recipe, settings
        self.output_dir = Path(settings.output_dir)
        self.num_steps, self.num_skipped, self.spans = num_steps, start.num_skipped, spans
        self.run_id, first_step = start.run_id or uuid.uuid4().hex[:8], start.step
        self.first_step = first_step
        self.num_units, self.seconds = 0, 0.0
        self.pending: list[tuple[dict[str, Any], list, list, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.pending_times: list[tuple[Any, Any, float]] = []
        self.straggler_watch = stragglers.StragglerWatch()
        self.pending_digests: dict[int, dict[str, Any]] = {}
        self.pending_noise: dict[int, tuple[torch.Tensor, dict[str, Any], list[str], torch.Tensor | None]] = {}
        self.unwritten_lines = dict.fromkeys(LINES, "")
        self.saver, self.folder = saver, folder
        if accelerator.is_main_process and folder is None:
            self.open_files(first_step)
        steps, evaluations = read_metrics(self.output_dir) if accelerator.is_main_process else ([], [])
        if folder is not None:  # nobody has opened the files, or replicas that are further
            evaluations = [line for line in evaluations if _is_earlier(line, first_step, num_steps)]
            evaluations = evaluations if settings.resume_from_checkpoint else []
        self.reduction = reduction
        self.measurements = batch_size.read_measurements(steps)
        # Evaluations of this session and earlier ones.
        self.evaluations: list[dict[str, Any]] = broadcast_object_list([evaluations])[0]
        self._start_tracker()
        for note in reduction.list_notes():
            accelerator.print(fold(note))
        self.bar: tqdm | None = None
        self.clock = time.perf_counter()

    def change_length(self, num_steps: int, spans: Spans) -> None:
        """Note that the batch grew, so that the training has fewer steps: the same samples."""
        self.num_steps, self.spans = num_steps, spans
        if self.accelerator.is_main_process:
            self._write_session()

    def _write_session(self) -> None:
        session = json.dumps(self._describe_session(), indent=2) + "\n"
        (self.output_dir / "settings.json").write_text(session, encoding="utf-8")

    def open_files(self, first_step: int) -> None:
        """Delete an earlier run where that was asked for, and lines of steps that are done again; describe the new session.

        Args:
            first_step: steps before the first one of the session.
        """
        if self.settings.overwrite_output_dir:
            for path in _find_earlier_run(self.output_dir):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        prepare_lines(self.output_dir, first_step, self.num_steps)
        (self.output_dir / "recipe.yaml").write_text(self.recipe.to_yaml(), encoding="utf-8")
        self._write_session()

    def get_state(self) -> dict[str, Any]:
        """Return what a replica that joins has to know of the steps so far: plain values."""
        lines = {name: list(map(json.loads, lines.values())) for name, lines in self.folder.lines.items()}
        return {"run_id": self.run_id, "num_skipped": self.num_skipped, "evaluations": self.evaluations, "lines": lines}

    def set_state(self, state: Mapping[str, Any], step: int) -> None:
        """Go on as the replica does that gave its state after `step` steps."""
        self.run_id, self.num_skipped, self.evaluations = state["run_id"], state["num_skipped"], state["evaluations"]
        self.pending, self.pending_times, self.pending_digests = [], [], {}
        for name, records in state["lines"].items():
            self.folder.lines[name].clear()
            for record in records:
                self.folder.add(name, record)
        self.saver.abandoned_folders = []  # those in the folder are of the run that is joined
        if self.bar is not None:
            self.bar.update((step if self.spans is None else self.spans.find(step)[0]) - self.bar.n)

    def _describe_session(self) -> dict[str, Any]:
        """Describe how this session is run, for people and `python -m recipes compare`: nothing else reads it."""
        launch = {"num_processes": self.accelerator.num_processes, "mixed_precision": self.accelerator.mixed_precision}
        machine = {"device": self.accelerator.device.type, "machine": digest.machine_kind()}
        length: dict[str, Any] = {"num_steps": self.num_steps}
        if self.spans is not None:
            length["batch_sizes"] = self.spans.list_sizes(self.num_steps)
        return dataclasses.asdict(self.settings) | launch | machine | length

    def _start_tracker(self) -> None:
        """Start the tracker, or go on with its run; the recipe is its configuration."""
        accelerator, recipe, tracker = self.accelerator, self.recipe, self.settings.report_to
        if tracker == "none":
            return
        name = self.output_dir.resolve().name
        init_kwargs = {
            "wandb": {"id": self.run_id, "name": name, "resume": "allow"},
            "trackio": {"name": f"{name}-{self.run_id}", "resume": "allow"},
            "tensorboard": {"purge_step": self.first_step + 1},
        }
        if tracker == "tensorboard":  # its hyperparameters would be a second run, in a folder of their own
            accelerator.init_trackers("tensorboard", init_kwargs=init_kwargs)
            if accelerator.is_main_process:
                writer = accelerator.get_tracker("tensorboard", unwrap=True)
                writer.add_text("recipe", f"```yaml\n{recipe.to_yaml()}```", self.first_step)
        else:
            config = {name: value if value is not None else "null" for name, value in recipe.decisive_fields().items()}
            accelerator.init_trackers(recipe.name, config=config, init_kwargs=init_kwargs)

    def start(self) -> None:
        """Start the clock and the progress bar: all that a run says before its first step is said.

        The bar counts steps or, where the batch grows, samples, so that it knows the time that is left.
        """
        total, initial, unit = self.num_steps, self.first_step, "steps"
        if self.spans is not None:
            total, initial, unit = self.spans.find(total - 1)[1], self.spans.find(initial)[0], "samples"
        self.bar = tqdm(
            total=total,
            initial=initial,
            desc="Training",
            unit=unit,
            disable=not self._speaks,
        )
        self.clock = time.perf_counter()

    def step(
        self,
        data: StepData,
        sums: Sequence[torch.Tensor],
        counts: torch.Tensor,
        grad_norm: torch.Tensor,
        learning_rate: float,
        digests: dict[str, Any] | None = None,
        parts: tuple[list[tuple[int, int]], list[list[tuple[int, int]]]] | None = None,
        times: tuple[Any, Any, float] = (None, None, 0.0),
    ) -> None:
        """Note a step.

        Args:
            data: this process's part of the step.
            sums: summed losses of each of this process's micro-batches, floating [terms] on the device; where `parts` is given,
                of all micro-batches on process 0, and of none on others.
            counts: targets of the whole step, int64 [terms] on the device; of workers that take steps of their own, those of
                this process.
            grad_norm: norm of the whole gradient before clipping, scalar on the device; of such workers, the root of the sum
                of their squares.
            learning_rate: the step's.
            digests: the step's line of digests.jsonl; None: it has none.
            parts: of replicas, whose micro-batches each of them knows: (process, micro-step) and samples of each; None: this
                process knows its own.
            times: of this process in it, as of `stragglers.StepClock.take`.
        """
        now = time.perf_counter()
        line: dict[str, Any] = {
            "step": data.step + 1,
            "epoch": data.epoch,
            "learning_rate": learning_rate,
            "samples": data.num_samples,
        }
        if self.recipe.unit != "image":  # images are samples
            line[f"{self.recipe.unit}s"] = data.num_tokens
        line |= {f"{source}/samples": count for source, count in data.num_samples_by_source.items()}
        line["seconds"] = now - self.clock
        if digests is not None:
            line["digest"] = digest.combine(digests)
            self.pending_digests[line["step"]] = digests
        self.clock = now
        self.pending_times.append(times)
        if parts is None:
            parts = [(self.accelerator.process_index, number) for number in range(len(data.samples))], data.samples
        table = torch.stack(list(sums)) if sums else counts.new_zeros(0, len(counts))
        self.pending.append((line, *parts, table.double(), counts, grad_norm))
        self.bar.update(1 if self.spans is None else data.num_samples)
        is_due = line["step"] % self.settings.logging_steps == 0
        if is_due or self.folder is not None:  # a replica may die, and the others have to know the step's line
            self.flush()
        if is_due:
            self._write_lines()

    def add_noise(
        self,
        data: StepData,
        noise: torch.Tensor,
        layers: list[str],
        steps: Steps,
        noise_of_terms: torch.Tensor | None = None,
    ) -> None:
        """Note the noise of a step's gradient, before the step itself.

        Args:
            data: this process's part of the step.
            noise: float64 [2, layers] on the device: signal and noise of each layer's gradient.
            layers: their names.
            steps: its caps say how steps are cut that are not measured.
            noise_of_terms: float64 [2, terms] on the device, the same of each loss term; None: there is one term.
        """
        caps = {
            "per_device_train_batch_size": steps.layout.per_device_train_batch_size,
            "per_device_train_tokens": steps.max_tokens,
        }
        description = {"micro_batches": data.num_micro_batches} | caps
        self.pending_noise[data.step + 1] = noise, description, layers, noise_of_terms

    def _take_noise(self, line: dict[str, Any], counts: torch.Tensor) -> list[dict[str, Any]]:
        """Add a step's signal and noise to its line; return its line of noise.jsonl, if it was measured and is finite."""
        if line["step"] not in self.pending_noise:
            return []
        noise, description, layers, noise_of_terms = self.pending_noise.pop(line["step"])
        rows = noise.tolist()
        totals = [_round(sum(row)) for row in rows]
        if not all(map(math.isfinite, totals)):
            return []
        line |= dict(zip(("grad_signal", "grad_noise"), totals, strict=True))
        self.measurements += batch_size.read_measurements([line])
        if noise_of_terms is not None:
            for name, signal, own in zip(self.recipe.loss_weights, *noise_of_terms.tolist(), strict=True):
                if self.recipe.loss_weights[name] and math.isfinite(signal):
                    line |= {f"{name}_grad_signal": _round(signal), f"{name}_grad_noise": _round(own)}
        targets = dict(zip(self.recipe.loss_weights, counts.tolist(), strict=True))
        parts = {
            name: dict(zip(("grad_signal", "grad_noise"), map(_round, pair), strict=True))
            for name, pair in zip(layers, zip(*rows, strict=True), strict=True)
        }
        return [
            {"step": line["step"], "samples": line["samples"], "targets": targets} | description | {"layers": parts}
        ]

    def flush(self) -> None:
        """Read the noted steps' sums from the device, add them up over the processes, write their lines.

        Raises:
            RunError: a loss or gradient is not finite, and on_nonfinite is stop.
        """
        if not self.pending:
            return
        pending, self.pending = self.pending, []
        pending_times, self.pending_times = self.pending_times, []
        # Of each step the summed losses of each micro-batch, [micro-batches][terms]; of all processes, one after the other
        sums = [sums.tolist() for _, _, _, sums, _, _ in pending]  # waits for the device
        all_counts = torch.stack([counts for *_, counts, _ in pending]).cpu()
        norms = torch.stack([norm for *_, norm in pending]).double().cpu()
        parts_here = self.reduction.list_counts(all_counts, norms)
        gathered = gather_object([(sums, [stragglers.read(*times) for times in pending_times], parts_here)])
        all_sums, all_times, parts_of_processes = zip(*gathered, strict=True)
        if parts_here is not None:
            all_counts, norms = self.reduction.join_counts(parts_of_processes)
        totals = [
            [add_exactly(values) for values in zip(*itertools.chain(*parts), strict=True)]
            for parts in zip(*all_sums, strict=True)
        ]
        times = list(map(list, zip(*all_times, strict=True)))  # of each step, of each process
        rows = zip(
            pending,
            torch.tensor(totals, dtype=torch.float64),
            all_counts,
            norms,
            times,
            strict=True,
        )
        ledger, digests, noises, failure, num_units, seconds = [], [], [], None, 0, 0.0
        for (line, places, micro_batches, micro_batch_sums, *_), total, counts, norm, seconds_of_processes in rows:
            if len(seconds_of_processes) > 1:
                line |= {name: _round(value) for name, value in stragglers.summarize(seconds_of_processes).items()}
            line |= self.compute_losses(total, counts) | {"grad_norm": norm.item()}
            # Accelerate's optimizer_step_was_skipped is always False for fused optimizers, which skip by themselves.
            is_scaled, has_skipped = self.accelerator.scaler is not None, not norm.isfinite()
            is_broken = not math.isfinite(line["loss"]) or (has_skipped and not is_scaled)
            if is_broken and self.settings.on_nonfinite == "stop":
                is_held_back = has_skipped and not is_scaled and self.reduction.holds_back
                failure = self._describe_nonfinite(line, places, micro_batches, micro_batch_sums), is_held_back
                break
            if has_skipped:
                self.num_skipped += 1
                line["skipped"] = True
            noises += self._take_noise(line, counts)
            self._write(_sort_keys(line))
            digests += [self.pending_digests.pop(line["step"])] if "digest" in line else []
            num_units += line.get(f"{self.recipe.unit}s", line["samples"])
            seconds += line["seconds"]
            for (process, micro_step), samples in zip(places, micro_batches, strict=True):
                place = {"step": line["step"], "process": process, "micro_step": micro_step}
                ledger.append(place | {"epochs": [s[0] for s in samples], "samples": [s[1] for s in samples]})
        self.num_units, self.seconds = self.num_units + num_units, self.seconds + seconds
        if seconds and self.bar is not None:
            self.bar.set_postfix_str(", ".join(self._progress(line, num_units / seconds)), refresh=False)
        if digests:
            self._append("digests.jsonl", digests)
        if noises:
            self._append("noise.jsonl", noises)
        if self.settings.record_samples:
            ledger = gather_object(ledger)
            ledger.sort(key=lambda record: (record["step"], record["process"], record["micro_step"]))
            self._append("samples.jsonl", ledger)
        if failure is not None:
            self._write_lines()
            message, is_held_back = failure
            if not is_held_back:
                raise RunError(f"{message}. Resume from a checkpoint before it")
            self.saver.save(line["step"] - 1, self.num_skipped, self.run_id)
            self.saver.close()
            raise RunError(
                f"{message}. Parameters and optimizer are those after step {line['step'] - 1}, and saved: resume with "
                "--on_nonfinite skip to leave such steps out"
            )
        if straggler := self.straggler_watch.add(times):
            process, own, median = straggler
            values = {"seconds_per_step": _round(own), "median_of_all": _round(median)}
            self.add_event(line["step"], f"process {process} is slower than the others, which wait for it", **values)

    def _progress(self, line: dict[str, Any], rate: float) -> list[str]:
        """Return what the progress bar says of the last step that was read, beside the time left; the last need most room."""
        numbers = [f"loss {line['loss']:.3f}", f"{rate:,.0f} {self.recipe.unit}s/s", f"lr {line['learning_rate']:.1e}"]
        if self.spans is not None:
            numbers = [f"batch {line['samples']}", *numbers]
        if self.measurements:
            numbers.append(f"noise scale {batch_size.estimate(self.measurements[-batch_size.RECENT :])}")
        return [*numbers, f"{peak_memory(self.accelerator.device) / 1e9:.2f} GB"]

    def _describe_nonfinite(
        self,
        line: dict[str, Any],
        places: list[tuple[int, int]],
        micro_batches: list[list[tuple[int, int]]],
        sums: torch.Tensor,
    ) -> str:
        """Say whether the loss or the gradient of a step is not finite, and in which samples. Called by all processes.

        Args:
            sums: summed losses of this process's micro-batches, [micro-batches, terms].
        """
        local_texts = [
            f"process {rank}, micro-batch {micro_batch}, samples "
            + ", ".join(f"{sample} (epoch {epoch})" for epoch, sample in samples)
            for is_finite, (rank, micro_batch), samples in zip(
                sums.isfinite().all(1).tolist(), places, micro_batches, strict=True
            )
            if not is_finite
        ]
        texts = gather_object(local_texts)
        subject = "the loss is" if texts else "the losses are finite, but their gradient is"
        return f"step {line['step']}: {subject} not finite" + (f" ({'; '.join(texts)})" if texts else "")

    def add_event(self, step: int, message: str, **values: Any) -> None:
        """Write and print something that happened in `step`; `values` are the numbers of its line in metrics.jsonl."""
        self.flush()
        if self.accelerator.is_main_process:  # other replicas may have seen something else
            self._append("metrics.jsonl", [{"step": step, "event": message} | values])
            self._write_lines()
        if self._speaks:
            details = ", ".join(f"{name} {value}" for name, value in values.items())
            tqdm.write(f"step {step}: {message} ({details})", file=sys.stderr)

    @property
    def _speaks(self) -> bool:
        """Whether this process prints what a run prints: process 0, of each replica."""
        return self.accelerator.is_main_process or (self.folder is not None and self.accelerator.process_index == 0)

    def compute_losses(self, sums: torch.Tensor, counts: torch.Tensor, prefix: str = "") -> dict[str, float]:
        """Compute the loss, and each of its terms if there are several, from total sums and counts, [terms] on the host."""
        weights = self.recipe.loss_weights
        means = [s / max(n, 1) for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]
        terms = {f"{prefix}{name}_loss": mean for name, mean in zip(weights, means, strict=True) if len(weights) > 1}
        return {f"{prefix}loss": sum(w * mean for w, mean in zip(weights.values(), means, strict=True))} | terms

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps after which the model was evaluated, now or in an earlier session."""
        return {line["step"] for line in self.evaluations}

    def add_evaluation(
        self,
        step: int,
        totals: torch.Tensor,
        scores: Mapping[str, float] | None = None,
        more_scores: Mapping[str, float] | None = None,
        sources: Mapping[str, Evaluation] | None = None,
    ) -> None:
        """Write an evaluation after `step`: its losses and other metrics.

        Args:
            totals: float64 [3, terms], see `evaluation.evaluate`.
            scores: other metrics by name; None: accuracies, and of a language model the perplexity.
            more_scores: metrics beside these; those of a source have its name before a slash.
            sources: of each source of the data, its own totals and scores.
        """
        self.flush()
        metrics = self._compute_metrics(totals, scores, "eval_")
        more = {f"eval_{name}": value for name, value in (more_scores or {}).items()}
        metrics |= {name: value for name, value in more.items() if "/" not in name}
        for source, part in (sources or {}).items():
            prefix = f"eval_{source}/"
            metrics |= self._compute_metrics(part.totals, part.scores, prefix)
            metrics |= {name: value for name, value in more.items() if name.startswith(prefix)}
        self.evaluations.append({"step": step} | metrics)
        self._write({"step": step} | metrics)
        self._write_lines()
        if self.accelerator.is_main_process:
            starts = {f"step {step}: ": ""} | {f"  {source}: ": f"eval_{source}/" for source in sources or {}}
            lines = [
                head
                + ", ".join(
                    f"{n.removeprefix(start)} {card.format_number(v)}" for n, v in metrics.items() if _is_of(n, start)
                )
                for head, start in starts.items()
            ]
            tqdm.write(fold("\n".join(lines)))
        self.restart_clock()

    def _compute_metrics(
        self, totals: torch.Tensor, scores: Mapping[str, float] | None, prefix: str
    ) -> dict[str, float]:
        """Compute losses, and `scores` or accuracies, of an evaluation or of a source's part of it."""
        sums, correct, counts = totals
        metrics, terms = self.compute_losses(sums, counts, prefix), list(self.recipe.loss_weights)
        if scores is not None:
            return metrics | {f"{prefix}{name}": value for name, value in scores.items()}
        if terms == ["lm"]:
            metrics[f"{prefix}perplexity"] = math.exp(min(metrics[f"{prefix}loss"], 700.0))
        names = [f"{prefix}{term}_accuracy" for term in terms] if len(terms) > 1 else [f"{prefix}accuracy"]
        return metrics | dict(zip(names, (correct / counts.clamp(min=1)).tolist(), strict=True))

    def restart_clock(self) -> None:
        """Leave the time since the last step (a checkpoint, an evaluation) out of the next one's, and out of the bar's rate."""
        now = time.perf_counter()
        if self.bar is not None and not self.bar.disable:
            self.bar.start_t += now - self.clock
            self.bar.last_print_t += now - self.clock
        self.clock = now

    def save(self, step: int, *, is_routine: bool = False) -> None:
        """Write a checkpoint of the run as it is after `step`; a routine one gives way to newer ones."""
        self.flush()
        self._write_lines()
        self.saver.save(step, self.num_skipped, self.run_id, is_routine=is_routine)
        self.restart_clock()

    def close(self) -> None:
        """Write all lines that are not written yet, and wait for the last checkpoint.

        Raises:
            RunError: the last checkpoint, or lines, could not be written.
        """
        self.flush()
        self._write_lines()
        for name, lines in self.unwritten_lines.items():
            if lines:
                self._append(name, [])
        if self.bar is not None:
            self.bar.close()
        try:
            self.saver.close()
        finally:
            if lock := _locks.pop(self.output_dir.resolve(), None):
                lock.close()
        lost_files = [name for name, lines in self.unwritten_lines.items() if lines]
        if self.folder is not None:
            lost_files = [
                name for name, lines in self.folder.lines.items() if lines and self.accelerator.is_main_process
            ]
        if lost_files:
            raise RunError(f"{', '.join(lost_files)} in {self.output_dir} could not be written to the end")

    def _write(self, line: dict[str, Any]) -> None:
        self._append("metrics.jsonl", [line])
        if self.settings.report_to != "none":
            prefix = "eval" if "eval_loss" in line else "train"
            values = {f"{prefix}/{k.removeprefix('eval_')}": v for k, v in line.items() if k not in ("step", "digest")}
            self.accelerator.log(values, step=line["step"])

    def _append(self, name: str, records: Sequence[dict[str, Any]]) -> None:
        """Append lines to a file of process 0; lines that cannot be written (the disk is full) are tried again next time.

        Where replicas share the folder, `_write_lines` writes them.
        """
        if self.folder is not None:
            for record in records:
                self.folder.add(name, _replace_nonfinite(record))
            return
        if not self.accelerator.is_main_process:
            return
        self.unwritten_lines[name] += "".join(
            json.dumps(_replace_nonfinite(record), allow_nan=False) + "\n" for record in records
        )
        check_lock(self.output_dir)
        path = self.output_dir / name
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(self.unwritten_lines[name])
            self.unwritten_lines[name] = ""
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            tqdm.write(f"WARNING: {path} cannot be written ({error.strerror}); trying again later", file=sys.stderr)

    def _write_lines(self) -> None:
        """Write what the replicas of a shared folder know, and what is not in its files yet."""
        if self.folder is not None and (problem := self.folder.write(self.accelerator.is_main_process)):
            tqdm.write(f"WARNING: {self.output_dir / problem}; trying again later", file=sys.stderr)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this process, bytes: of tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _replace_nonfinite(record: Mapping[str, Any]) -> dict[str, Any]:
    """Replace infinity and NaN, which JSON lacks, by null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def _is_of(name: str, start: str) -> bool:
    """Tell whether a metric is of the source whose metrics begin so; empty: of all held-out data."""
    return name.startswith(start) if start else "/" not in name


def _round(value: float) -> float:
    """Round to 6 digits, which do not depend on the order of the processes in a sum."""
    return float(f"{value:.6g}")


def _sort_keys(line: dict[str, Any]) -> dict[str, Any]:
    """Sort a line's keys: `step, epoch, loss, terms ...` come first, in the order in which people read them."""
    first = ["step", "epoch", *(name for name in line if name.endswith("loss")), "learning_rate", "grad_norm"]
    return {name: line[name] for name in first} | line


def prepare_lines(output_dir: Path, first_step: int, num_steps: int) -> None:
    """Keep the lines of the first steps; the others are written again by a resumed run.

    A line that was cut off when the run was killed is removed, too.

    Args:
        output_dir: the run's.
        first_step: steps before the first one that is written anew.
        num_steps: of the whole training.

    Raises:
        UsageError: a line breaks a rule of `run_fields.FIELDS`; all files are as they were.
    """
    copies = {}
    for path in (path for name in LINES if (path := output_dir / name).exists()):
        copies[path] = path.with_suffix(".partial")
        with copies[path].open("wb") as kept:
            for text, line in run_files.read_texts(path):
                if _is_earlier(line, first_step, num_steps):
                    kept.write(text + b"\n")
    for path, copy in copies.items():
        copy.replace(path)


def _is_earlier(line: dict[str, Any], first_step: int, num_steps: int) -> bool:
    # The evaluation at the very end is made again when a finished run is resumed.
    return line["step"] <= first_step and ("eval_loss" not in line or line["step"] < num_steps)


def read_metrics(output_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the step lines and the evaluation lines of metrics.jsonl.

    Raises:
        UsageError: a line breaks a rule of `run_fields.FIELDS`.
    """
    lines = list(run_files.read_lines(output_dir / "metrics.jsonl"))
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]


def read_noise(output_dir: Path) -> list[dict[str, Any]]:
    """Read the lines of noise.jsonl; see `read_metrics`."""
    return list(run_files.read_lines(output_dir / "noise.jsonl"))


def save_best(accelerator: Accelerator, output_dir: Path, model: Any, tokenizer: Any) -> None:
    """Keep the model of the best evaluation so far in `best/`, whole at any moment. Called by all processes."""
    if accelerator.is_main_process:
        partial, best = output_dir / "best.partial", output_dir / "best"
        pretrained.save_pretrained(model, tokenizer, partial)
        shutil.rmtree(best, ignore_errors=True)
        partial.rename(best)
    accelerator.wait_for_everyone()


def finish(
    log: RunLog,
    usage: str,
    training: card.Training,
    best_step: int | None = None,
    facts: Mapping[str, float] | None = None,
) -> None:
    """Write all_results.json, loss.png and README.md (the model card), push to the hub if asked for, print a summary.

    Called by process 0 only, after the model and the tokenizer were saved in the output folder.

    Args:
        log: closed.
        usage: lines of Python that load the saved model; OUTPUT_DIR stands for the folder.
        training: what was trained on what.
        best_step: step of the saved model, whose evaluation is reported; None: the last one.
        facts: further results, name -> number; None: there are none.
    """
    recipe, settings, output_dir = log.recipe, log.settings, log.output_dir
    steps, evaluations = read_metrics(output_dir)
    results: dict[str, Any] = training.describe_data() | {"steps": steps[-1]["step"] if steps else log.num_steps}
    if best_step is not None:
        results["best_step"] = best_step
        evaluations = [line for line in evaluations if line["step"] <= best_step]
    if steps:  # none when a finished run is resumed into another folder
        results |= {name: steps[-1][name] for name in ("epoch", "loss") if name in steps[-1]}
        if steps[-1]["step"] == training.num_steps and training.ends_within_a_step:
            results["epoch"] = recipe.num_train_epochs  # as asked for
        units = [*card.UNITS, *(name for name in steps[-1] if name.endswith("/samples"))]
        results |= {f"{unit}_seen": sum(line.get(unit, 0) for line in steps) for unit in units if unit in steps[-1]}
    if evaluations:
        results |= {name: value for name, value in evaluations[-1].items() if name != "step"}
    if log.seconds:
        results |= {"train_seconds": log.seconds, f"{recipe.unit}s_per_second": log.num_units / log.seconds}
        results["peak_memory_gb"] = peak_memory(log.accelerator.device) / 1e9
    if log.num_skipped:
        results["skipped_steps"] = log.num_skipped
    results |= facts or {}
    (output_dir / "all_results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    noises, terms = read_noise(output_dir), list(recipe.loss_weights)
    picture = plots.plot_training(*read_metrics(output_dir), terms, _title(training), noises)
    (output_dir / "loss.png").write_bytes(picture)
    pictures = [name for name in PICTURES if (output_dir / name).exists()]

    def write_card(repo_id: str | None = None) -> None:
        text = card.write(training, results, evaluations, usage, pictures, repo_id)
        (output_dir / "README.md").write_text(text, encoding="utf-8")

    write_card()
    first = evaluations[0] if evaluations else {}
    shown = {name: value for name, value in results.items() if "/" not in name}  # those of sources were printed
    width = max(len(name) for name in shown)
    print(fold(f"\n{training.title}: {recipe.description}"))
    for name, value in shown.items():
        change = f"  (from {card.format_number(first[name])} at step {first['step']})" if name in first else ""
        print(f"  {name:{width}}  {card.format_number(value)}{change}")
    files = ", ".join(
        sorted(path.name for path in output_dir.iterdir() if not path.name.startswith((".", "checkpoint-")))
    )
    newest = [f", {path.name}" for path in checkpoint.checkpoints(output_dir)[-1:]]  # none, see above
    code = "".join(f"  {line}\n" for line in usage.replace("OUTPUT_DIR", str(output_dir)).split("\n"))
    print(fold(f"\nWrote {output_dir}/: {files}{''.join(newest)}"))
    command = _own_command()
    talks = getattr(recipe, "objective", "reward") != "reward" and training.train.tokenizer.chat_template is not None
    chat = f"{command} chat {output_dir}, " if talks else ""
    print(f"Load it:\n{code}\nNext: {chat}{command} watch {output_dir}")
    if settings.push_to_hub:
        print(f"Uploaded to {card.push_to_hub(output_dir, settings.hub_model_id, write_card)}")


def _own_command() -> str:
    """Return what starts `samestep` in this environment, whether it is activated or not."""
    if shutil.which("samestep"):
        return "samestep"
    beside, here = Path(sys.executable).with_name("samestep"), Path.cwd()
    if not beside.exists():
        return f"{sys.executable} -m samestep"
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def _title(training: card.Training) -> str:
    data = training.recipe.data_name
    return f"{training.title}, {training.recipe.name}{f' on {data}' if data else ''} ({datetime.date.today()})"
