"""Money, bytes, dates and interruptions of a placement."""

import dataclasses
import datetime
import math

import pytest

from samestep.recipe.catalog import load
from samestep.recipe.run_settings import MAX_SAVING, RunSettings
from stepplan.answer import describe_placement
from stepplan.costs import RESTART_SECONDS, Terms, describe_costs
from stepplan.hardware import parse
from stepplan.placement import place
from stepplan.workload import from_recipe


def make(recipe: str, hardware: str, **options):
    return place(from_recipe(load(recipe), **options), parse(hardware))


def test_dollars():
    placement = make("gpt2_124m", "8xa100-80", num_train_samples=480_000)
    costs = describe_costs(placement, Terms(price_per_hour=1.5))
    per_second = 8 * 1.5 / 3600
    assert costs["cost"] == pytest.approx(per_second * (placement.seconds_to_end + costs["saving_seconds"]))
    assert costs["seconds_per_epoch"] == pytest.approx(1000 * placement.time.total)
    assert costs["cost_per_epoch"] == pytest.approx(per_second * 1000 * placement.time.total)
    tokens = placement.time.tokens_per_second(480, 1024)
    assert costs["cost_per_billion_tokens"] == pytest.approx(per_second * 1e9 / tokens)
    assert costs["cost_per_million_samples"] == pytest.approx(costs["cost_per_billion_tokens"] * 1024 * 1e6 / 1e9)
    free = describe_costs(placement, Terms())
    assert {name for name, value in free.items() if value is None} >= {name for name in free if name.startswith("cost")}
    assert describe_placement(placement, None)["cost_range"] is None
    images = describe_costs(make("resnet50_1xv100", "1xv100-16"), Terms(price_per_hour=1))
    assert images["cost_per_billion_tokens"] is None
    assert images["cost_per_epoch"] > 0


def test_bytes():
    placement = make("gpt2_124m", "8xa100-80", num_train_samples=480_000)
    costs, n = describe_costs(placement, Terms()), placement.workload.model.num_parameters
    assert costs["data_bytes"] == 8 * 1024 * 480_000
    assert costs["disk_bytes"] == 2 * 12 * n + 4 * n + costs["data_bytes"]
    assert costs["download_bytes"] == 0
    unknown = describe_costs(make("gpt2_124m", "8xa100-80"), Terms())
    assert (unknown["data_bytes"], unknown["disk_bytes"]) == (None, 2 * 12 * n + 4 * n)
    photographs = describe_costs(make("resnet50_1xv100", "1xv100-16"), Terms())
    assert photographs["data_bytes"] == pytest.approx(138e9, rel=0.03)  # ImageNet's own size
    tuned = from_recipe(load("finetune_mnli_bert_base"))
    assert tuned.download_bytes == 4 * tuned.model.num_parameters


def test_an_adapter_is_small():
    """Checkpoints hold what is trained; the base is downloaded in 16 bits."""
    changes = {"model_name_or_path": "Qwen/Qwen3-8B", "lora_rank": 16, "lora_alpha": 32.0, "num_train_samples": None}
    changes |= {"train_file": ["chats.jsonl"], "max_seq_length": 512}
    workload = from_recipe(load("sft_small_cpu", changes))
    costs = describe_costs(place(workload, parse("1xa100-80")), Terms())
    num_adapter = 43_646_976  # of peft: rank 16 on the seven linear layers of 36
    assert costs["disk_bytes"] == (2 * 12 + 4) * num_adapter
    assert costs["checkpoint_seconds"] == pytest.approx(12 * num_adapter / 1e9)
    assert costs["download_bytes"] == 2 * 8_190_735_360


def test_interruptions():
    placement = make("gpt2_xl_8xa100", "8xa100-80")
    write = 12 * placement.workload.model.num_parameters / 1e9
    costs = describe_costs(placement, Terms(price_per_hour=1.0))
    assert costs["checkpoint_seconds"] == pytest.approx(write)
    assert costs["checkpointing_seconds"] == 60 * RunSettings.checkpointing_minutes
    lost = costs["checkpointing_seconds"] / 2 + RESTART_SECONDS
    assert costs["interruption_seconds"] == lost
    assert costs["interruption_cost"] == pytest.approx(8 * lost / 3600)
    assert costs["seconds_with_interruptions"] is None
    fast = describe_costs(placement, Terms(disk_gb_per_s=4.0))
    assert fast["checkpoint_seconds"] == pytest.approx(write / 4)


@pytest.mark.parametrize("rate", [0.1, 3, 40])
def test_the_interval_loses_the_least(rate):
    """Of intervals around Young's none takes less time; more interruptions take more."""
    placement = make("gpt2_xl_8xa100", "8xa100-80")
    costs = describe_costs(placement, Terms(interruptions_per_day=rate))
    write, interval, total = (
        costs[name] for name in ("checkpoint_seconds", "checkpointing_seconds", "seconds_with_interruptions")
    )

    def stretch(interval: float) -> float:
        return placement.seconds_to_end / (
            1 - write / (interval + write) - rate / 86400 * (interval / 2 + RESTART_SECONDS)
        )

    assert total == pytest.approx(stretch(interval))
    assert total > costs["seconds_to_end"]
    assert total <= 1.002 * min(stretch(factor * interval) for factor in (0.5, 0.8, 1.25, 2))
    more = describe_costs(placement, Terms(interruptions_per_day=2 * rate))
    assert more["seconds_with_interruptions"] > total > placement.seconds_to_end


@pytest.mark.parametrize("disk", [1.0, 0.02])
def test_checkpoints_take_time_and_dollars_but_at_most_a_twentieth(disk):
    """The default interval grows where a checkpoint takes long, and hours hold what is written."""
    placement = make("gpt2_xl_8xa100", "8xa100-80")
    costs = describe_costs(placement, Terms(price_per_hour=1.0, disk_gb_per_s=disk))
    write, interval = costs["checkpoint_seconds"], costs["checkpointing_seconds"]
    assert write == pytest.approx(12 * placement.workload.model.num_parameters / 1e9 / disk)
    assert write / (interval + write) <= MAX_SAVING + 1e-9
    assert (interval > 60 * RunSettings.checkpointing_minutes) == (disk < 1)
    assert costs["saving_seconds"] == write * math.ceil(placement.seconds_to_end / interval)
    assert costs["seconds_to_end"] == placement.seconds_to_end + costs["saving_seconds"]
    assert costs["cost"] == pytest.approx(8 / 3600 * costs["seconds_to_end"])


def test_hosts_hold_weights_checkpoints_and_the_last_model():
    changes = {"model_name_or_path": "meta-llama/Meta-Llama-3-70B"}
    large = from_recipe(load("llama3_8b_sft_8xa100", changes), num_train_samples=9000)
    n, placement = large.model.num_parameters, place(large, parse("8x8xh100"))
    whole = dataclasses.replace(placement, workload=dataclasses.replace(large, reads_shards=False))
    costs = describe_costs(whole, Terms())
    assert costs["host_memory"] == 8 * 4 * n > costs["memory_of_host"] == 8 * 275e9
    shards = dataclasses.replace(placement, workload=dataclasses.replace(large, reads_shards=True))
    # Process 0 reads a checkpoint where a run goes on; at the start a machine has the rows of its processes
    assert describe_costs(shards, Terms())["host_memory"] == 12 * n
    assert describe_costs(shards, Terms(host_gb=100.0))["memory_of_host"] == 100e9
    small = make("gpt2_124m", "1x3090")
    n = small.workload.model.num_parameters
    assert describe_costs(small, Terms())["host_memory"] == 12 * n
    assert describe_costs(small, Terms())["memory_of_host"] is None  # nobody says what a 3090 stands in


def test_too_many_interruptions_leave_nothing():
    placement = make("gpt2_xl_8xa100", "8xa100-80")
    costs = describe_costs(placement, Terms(interruptions_per_day=1000.0, price_per_hour=1.0))
    assert costs["seconds_with_interruptions"] is None
    assert costs["cost_with_interruptions"] is None


def test_dates():
    placement = make("gpt2_124m", "8xa100-80")
    start = datetime.datetime(2026, 11, 25, 17, 0)
    costs = describe_costs(placement, Terms(start=start))
    expected = start + datetime.timedelta(seconds=costs["seconds_to_end"])
    assert costs["end"] == expected.isoformat(timespec="minutes")
    endless = dataclasses.replace(placement, workload=dataclasses.replace(placement.workload, num_steps=10**12))
    assert describe_costs(endless, Terms(start=start))["end"] is None
