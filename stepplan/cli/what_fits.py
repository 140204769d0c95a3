"""Lists what fits on a hardware: `samestep plan --what_fits`."""

import dataclasses
import json
from typing import Any

from samestep.cli.flags import make_subject_parser, retype, write_file
from samestep.errors import UsageError
from samestep.recipe.reading import format_name
from samestep.recipe.settings import BATCH, LENGTH, build, setting
from stepplan import answer, text
from stepplan.cli.model import CONVERSATION_FILE
from stepplan.cli.terms import read_prices
from stepplan.hardware import NETWORK, parse
from stepplan.methods import STARTING_RECIPE, find_models
from stepplan.page import fits_page
from stepplan.workload import format_flags


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitSettings:
    """Choose the hardware, and what is tried on it"""

    what_fits: str = setting("hardware, as [NODESx]COUNTxNAME: lists the models, methods and lengths that fit on it")
    seq_len: int | None = setting("only this many tokens of a sample; none: 512 to 131,072", LENGTH, default=None)
    global_batch_size: int | None = setting(
        "samples per optimizer step; none: 64, or one for each device", BATCH, default=None
    )
    html: str | None = setting("page to write about it", default=None)
    price_per_hour: str | None = setting("dollars for an hour of one device, or a .yaml file of prices", default=None)
    network: str | None = setting(NETWORK, default=None)
    json: bool = setting("print one JSON object", default=False)


def what_fits(argv: list[str]) -> None:
    """List the models, methods and lengths that fit on a hardware."""
    parser = make_subject_parser("plan", "--what_fits HARDWARE")
    parser.add_settings(FitSettings)
    settings = build(FitSettings, parser.parse(argv), "flags")
    if "," in settings.what_fits:
        raise UsageError(f"what_fits is {format_name(settings.what_fits)}: name one hardware")
    hardware = parse(settings.what_fits, settings.network)
    (price,) = read_prices(settings.price_per_hour, [hardware])
    if settings.global_batch_size is not None and settings.global_batch_size < hardware.num_processes:
        raise UsageError(
            f"global_batch_size is {settings.global_batch_size}, must be {hardware.num_processes:,} or more, a sample for each "
            f"device of {hardware}"
        )
    fits, others = find_models(hardware, length=settings.seq_len, global_batch_size=settings.global_batch_size)
    result = answer.describe_fits(hardware, fits, others, price)
    command = ""
    if fits:
        largest = max(fits, key=lambda fit: fit.typical.workload.model.num_parameters)
        workload = largest.typical.workload
        changes: dict[str, Any] = {"model_name_or_path": largest.model, "max_seq_length": workload.model.length}
        changes |= {
            "global_batch_size": workload.global_batch_size,
            "train_file": [CONVERSATION_FILE],
        } | dict(largest.method.changes)
        changes |= {"learning_rate": 2e-4 if "lora_rank" in changes else 2e-5, "num_train_epochs": 1}
        changes |= {"learning_rate_batch_size": workload.global_batch_size}
        words = ["plan", STARTING_RECIPE, *format_flags(changes), "--on", settings.what_fits]
        command = retype(words, network=settings.network, write_recipe="mine.yaml", write_config="launch.yaml")
    result |= {"command": command or None}
    if settings.html is not None:
        write_file("html", settings.html, fits_page(result, text.make_fits_table(result), text.explain_band([result])))
    print(json.dumps(result) if settings.json else "\n".join(text.write_fits(result, command)))
