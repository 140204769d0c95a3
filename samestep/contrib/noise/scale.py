"""Measures the gradient noise scale while a run trains (--noise_scale_steps), and writes noise.jsonl."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from samestep.contrib.noise.meter import NoiseMeter, TermMeter
from samestep.data.steps import to_device
from samestep.recipe import batch_size
from samestep.training.output_folder import read_metrics
from samestep.training.parts import Part
from samestep.training.report import round_to_6
from samestep.training.run import Run
from samestep.training.run_step import RunStep

RECENT = 20
"""Measurements that the progress line speaks of."""


class StepNoise(NamedTuple):
    """The measurements of a step.

    Attributes:
        step: its number; 0 is the first of the training.
        layers: signal and noise of each layer's gradient, float64 [2, layers] on the device.
        terms: the same of each loss term, float64 [2, terms]; None where there is only one.
    """

    step: int
    layers: torch.Tensor
    terms: torch.Tensor | None


class NoiseScale(Part):
    """Measures the noise of the steps whose data say so; `last` is the last measurement."""

    def __init__(self, run: Run):
        self.run = run
        self.meter = NoiseMeter(run.network.parameters, run.reduction.exact_sum)
        self.term_meter: TermMeter | None = None
        weights = run.recipe.loss_weights
        if sum(weight > 0 for weight in weights.values()) > 1:
            dtype = torch.float64 if run.reduction.is_exact else None
            self.term_meter = TermMeter(list(run.network.parameters.values()), len(weights), dtype)
        self.last: StepNoise | None = None
        self.scale = 1.0
        self.pending: dict[int, tuple[StepNoise, dict[str, Any]]] = {}
        self.records: list[dict[str, Any]] = []
        self.measurements: list[batch_size.Measurement] = []

    def start(self) -> None:
        """Read what earlier sessions have measured."""
        lines = read_metrics(self.run.output_dir)[0] if self.run.accelerator.is_main_process else []
        self.measurements = batch_size.read_measurements(lines)

    def begin_step(self, step: RunStep) -> None:
        if step.data.is_cut_at_random:
            self.meter.begin(step.data.micro_batch_counts, step.attempt.counts)

    def gradient_computed(self, step: RunStep) -> None:
        if not step.data.is_cut_at_random:
            return
        scaler = self.run.accelerator.scaler
        self.scale = 1.0 if scaler is None else scaler.get_scale()
        if self.term_meter is not None:
            self._measure_terms(step, self.term_meter)

    def _measure_terms(self, step: RunStep, meter: TermMeter) -> None:
        """Compute the gradients of the terms in the micro-batches of a step."""
        run, data, num_targets = self.run, step.data, step.num_targets

        def compute_losses(number: int) -> torch.Tensor:
            run.network.noise.set_samples(data.samples[number], run.accelerator.device)
            sums, _ = run.bare_model(**to_device(data.micro_batches[number], run.accelerator.device))
            return run.loss_weights * sums / num_targets * self.scale

        meter.measure(data.micro_batch_counts, step.attempt.counts, compute_losses)

    def gradient_reduced(self, step: RunStep) -> None:
        if step.data.is_cut_at_random:
            layers = self.meter.finish(self.run.reduction.num_averaged, self.scale)
            terms = None if self.term_meter is None else self.term_meter.finish(self.scale)
            self.last = StepNoise(step.index, layers, terms)

    def end_step(self, step: RunStep) -> None:
        noise = self.find_noise(step)
        if noise is not None:
            steps = self.run.recovery.steps
            caps = {  # how steps are cut that are not measured
                "per_device_train_batch_size": steps.layout.per_device_train_batch_size,
                "per_device_train_tokens": steps.max_tokens,
            }
            self.pending[step.index + 1] = noise, {"micro_batches": step.data.num_micro_batches} | caps

    def find_noise(self, step: RunStep) -> StepNoise | None:
        """Find the noise of a step that is done; None: it was not measured."""
        return self.last if self.last is not None and self.last.step == step.index else None

    def add_to_line(self, line: dict[str, Any], counts: torch.Tensor, values: Sequence[Any]) -> None:
        """Add a step's signal and noise to its line, if it was measured and is finite."""
        if line["step"] not in self.pending:
            return
        noise, description = self.pending.pop(line["step"])
        rows = noise.layers.tolist()
        totals = [round_to_6(sum(row)) for row in rows]
        if not all(map(math.isfinite, totals)):
            return
        weights = self.run.recipe.loss_weights
        line |= dict(zip(("grad_signal", "grad_noise"), totals, strict=True))
        if noise.terms is not None:
            for name, signal, own in zip(weights, *noise.terms.tolist(), strict=True):
                if weights[name] and math.isfinite(signal):
                    line |= {f"{name}_grad_signal": round_to_6(signal), f"{name}_grad_noise": round_to_6(own)}
        targets = dict(zip(weights, counts.tolist(), strict=True))
        parts = {
            name: dict(zip(("grad_signal", "grad_noise"), map(round_to_6, pair), strict=True))
            for name, pair in zip(self.meter.groups, zip(*rows, strict=True), strict=True)
        }
        head = {"step": line["step"], "samples": line["samples"], "targets": targets}
        self.records.append(head | description | {"layers": parts})

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        written, records, self.records = {line["step"] for line in lines}, self.records, []
        self.measurements += batch_size.read_measurements([line for line in lines if "grad_signal" in line])
        if records := [record for record in records if record["step"] in written]:
            self.run.log.append("noise.jsonl", records)

    def describe(self) -> str:
        if not self.measurements:
            return ""
        return f"noise scale {batch_size.estimate(self.measurements[-RECENT:])}"
