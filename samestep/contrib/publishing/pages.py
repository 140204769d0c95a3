"""Writes loss.png and README.md (the model card) of a finished run, and uploads the results to the hub."""

import datetime
from collections.abc import Sequence
from typing import Any

from samestep.contrib.publishing import card, charts
from samestep.recipe.run_files import read_lines
from samestep.training.output_folder import read_metrics
from samestep.training.parts import Part
from samestep.training.run import Run

PICTURES = ("loss.png", "predictions.png", "confusion.png")
"""Pictures that the model card shows, if they were drawn."""


class Pages(Part):
    """Writes the pages of a run's results, and uploads them where --push_to_hub asks for it."""

    def __init__(self, run: Run):
        self.run = run
        if run.settings.push_to_hub:
            card.check_login()

    def publish(self, results: dict[str, Any], evaluations: Sequence[dict[str, Any]], usage: str) -> None:
        run, terms = self.run, list(self.run.recipe.loss_weights)
        training, data = card.Training(run), run.recipe.data_name
        title = f"{training.title}, {run.recipe.name}{f' on {data}' if data else ''} ({datetime.date.today()})"
        noises = list(read_lines(run.output_dir / "noise.jsonl"))
        chart = charts.draw_training(*read_metrics(run.output_dir), terms, title, noises)
        chart.savefig(run.output_dir / "loss.png")
        pictures = [name for name in PICTURES if (run.output_dir / name).exists()]

        def write_card(repo_id: str | None = None) -> None:
            text = card.write(training, results, evaluations, usage, pictures, repo_id)
            (run.output_dir / "README.md").write_text(text, encoding="utf-8")

        write_card()
        self.write_card = write_card

    def upload(self) -> None:
        if self.run.settings.push_to_hub:
            url = card.push_to_hub(self.run.output_dir, self.run.settings.hub_model_id, self.write_card)
            print(f"Uploaded to {url}")
