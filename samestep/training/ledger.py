"""The ledger of samples (--record_samples): a line of samples.jsonl for each micro-batch, with its samples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object

from samestep.training.parts import Part

if TYPE_CHECKING:
    from samestep.training.run import Run
    from samestep.training.run_step import RunStep


class Ledger(Part):
    """Writes which samples each process had in each micro-batch of each step."""

    def __init__(self, run: "Run"):
        self.run = run
        self.pending: dict[int, list[dict[str, Any]]] = {}

    def end_step(self, step: "RunStep") -> None:
        self.pending[step.index + 1] = [
            {"step": step.index + 1, "process": process, "micro_step": micro_step}
            | {"epochs": [epoch for epoch, _ in samples], "samples": [sample for _, sample in samples]}
            for (process, micro_step), samples in zip(*self.run.log.list_parts(step.data), strict=True)
        ]

    def lines_written(self, lines: Sequence[dict[str, Any]]) -> None:
        records = gather_object([record for line in lines for record in self.pending.pop(line["step"])])
        records.sort(key=lambda record: (record["step"], record["process"], record["micro_step"]))
        self.run.log.append("samples.jsonl", records)
