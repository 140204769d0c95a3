"""Rules of what excludes replicas: launches that train together, of which some may be lost (fault_tolerance step)."""

import re
from urllib.parse import urlsplit

from samestep.recipe.rules import Rule, each

REPLICA_SETTINGS = (
    ("gradient_accumulation_steps", "k changes with the number of replicas", "give per_device_train_batch_size"),
    ("noise_scale_steps", "the noise of the gradient is measured on one quorum only", "leave it out"),
    ("checkpoint_store", "the replica that writes checkpoints may be another one each time", "leave it out"),
    ("replicate_checkpoints", "replicas share one output_dir", "leave it out"),
    ("load_best_model_at_end", "a replica that is lost may take the best model with it", "leave it out"),
)
"""Settings that replicas exclude, why, and what to do instead."""


def _is_address(text: str) -> bool:
    address = urlsplit(text)
    return bool(address.scheme == "http" and address.hostname and re.search(r":[0-9]+/?$", address.netloc))


RULES = [
    *each(
        REPLICA_SETTINGS,
        lambda name, why, remedy: Rule(
            lambda f: f.is_replica and f[name],
            f"fault_tolerance is step, and {name} is {{f[{name}]!r}}, but {why}",
            remedy,
        ),
    ),
    Rule(
        lambda f: f.is_replica and f.reduce_dtype != "own",
        "fault_tolerance is step, and reduce_dtype is {f.reduce_dtype!r}, but torch's hooks belong to "
        "DistributedDataParallel, not to replicas",
        "leave it out",
    ),
    Rule(
        lambda f: f.is_replica and f.report_to != "none",
        "fault_tolerance is step, and report_to is {f.report_to}, which wants one writer from begin to end",
        "leave it out, and look at metrics.jsonl with `samestep watch`",
    ),
    Rule(
        lambda f: f.is_replica and not _is_address(f.lighthouse) and (f.lighthouse or "not set"),
        "fault_tolerance is step, but TORCHFT_LIGHTHOUSE is {found}",
        "start torchft_lighthouse, and set it to http://HOST:PORT for every replica",
    ),
    *each(
        (("min_replicas", 1), ("replica_timeout", 60.0)),
        lambda name, default: Rule(
            lambda f: not f.is_replica and f[name] != default,
            f"{name} is {{f[{name}]:g}}, but fault_tolerance is {{f.fault_tolerance}}",
            "set it to step",
        ),
    ),
    Rule(
        lambda f: f.is_replica and f.is_folded,
        "fault_tolerance is step, but accumulation is optimizer, which cannot take a gradient out of its moments "
        "again when a replica is lost",
        "set accumulation to gradient",
    ),
    Rule(
        lambda f: f.is_replica and f.normalization == "batch",
        "fault_tolerance is step, but normalization is batch, whose statistics change in the forward, before the step "
        "is committed",
        "set normalization to group or frozen",
    ),
    Rule(
        lambda f: f.is_replica and f.num_copies > 1,
        "fault_tolerance is step, where a replica is one copy of the model, but the launch has {f.num_copies} (HSDP)",
        "start each copy by a launch of its own, without parallelism_config",
    ),
    Rule(
        lambda f: f.is_replica and f.num_processes > 1 and not f.is_sharded,
        "fault_tolerance is step, where a replica is one copy of the model, but the launch has {f.num_processes}",
        "start each by a launch of its own with --num_processes 1, or shard weights over its processes (FSDP2)",
    ),
    Rule(
        lambda f: f.is_replica and f.is_fp16,
        "fault_tolerance is step, but mixed_precision is fp16, whose loss scale would differ between replicas",
        "set mixed_precision to bf16 or no",
    ),
]
