"""Puts a recipe, or a model without one, on more and more devices: `samestep scale`."""

import dataclasses
import json

from samestep.cli.flags import OutputSettings, read_recipe, write_file
from samestep.recipe.extras import require
from samestep.recipe.settings import limit, setting
from stepplan import answer, text
from stepplan.base_models import find_config, may_be_decoder
from stepplan.cli.model import load_fine_tuning, make_workload, read_model
from stepplan.hardware import MAX_DEVICES, NETWORK, load_device, set_network
from stepplan.workload import from_recipe

DEFAULT_MAX_DEVICES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSettings(OutputSettings):
    """Choose the devices, all of one kind"""

    on: str = setting("device: a name (t4, a100-80, h100), or a .yaml file of your own")
    network: str | None = setting(NETWORK, default=None)
    up_to: int = setting("largest number of devices", limit(MAX_DEVICES), default=DEFAULT_MAX_DEVICES)
    plot: str | None = setting("PNG file to draw it in; needs matplotlib", default=None)


def scale(argv: list[str]) -> None:
    """Put a recipe, or a model without one, on more and more devices."""
    if argv and not argv[0].startswith("-"):
        recipe, settings, _, changes = read_recipe("scale", argv, ScaleSettings)
        workload = from_recipe(
            recipe, changes=changes, critical_batch_size=settings.critical_batch_size, may_trace=True
        )
    else:
        settings, training = read_model("scale", argv, ScaleSettings)
        config = find_config(training.model_name_or_path)
        if may_be_decoder(config):
            recipe, _ = load_fine_tuning(training)
            workload = from_recipe(recipe, critical_batch_size=settings.critical_batch_size, may_trace=True)
            workload = dataclasses.replace(workload, name=training.name)
        else:
            workload = make_workload(training, config, settings.critical_batch_size)
    if settings.plot is not None:
        require("plots", "--plot")
    result = answer.describe_growth(workload, set_network(load_device(settings.on), settings.network), settings.up_to)
    if settings.plot is not None:
        from stepplan.growth_plot import plot_growth  # here: it imports matplotlib

        write_file("plot", settings.plot, plot_growth(result))
    if settings.json:
        print(json.dumps(result))
    else:
        print("\n".join(text.write_scale(result)))
