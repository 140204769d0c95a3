"""Writes what starts a training on a cluster: a job for Slurm, a task for SkyPilot, a TrainJob for Kubeflow, torchrun's agents.

Each file holds the launch file of a plan and the command of the recipe's script, resumes from the newest checkpoint when it is
started again, and leaves starting, stopping and replacing machines to the program that it is for.
"""

import dataclasses
import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from samestep.errors import UsageError, nearest
from samestep.pages import make_environment
from samestep.recipe.reading import format_name
from samestep.recipe.settings import find_flag
from stepplan.page import TEMPLATES
from stepplan.placement import Placement

TIME_RESERVE = 1.2
"""Factor of the longest predicted time that a job asks for: evaluations and checkpoints are not predicted."""
NAME = 50
"""Characters of a job's name: Kubernetes has 63, of which it takes some itself."""
SKY_NAMES = {
    "2080ti": "RTX2080Ti",
    "3090": "RTX3090",
    "4080": "RTX4080",
    "4090": "RTX4090",
    "5090": "RTX5090",
    "a100-40-sxm": "A100",
    "a100-80": "A100-80GB",
    "a10g": "A10G",
    "a6000": "RTXA6000",
    "b200": "B200",
    "h100": "H100",
    "h200": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "rtx6000ada": "RTX6000-Ada",
    "t4": "T4",
    "v100-16": "V100",
    "v100-32": "V100-32GB",
}
"""Device -> its name in SkyPilot's catalog (`sky show-gpus`)."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """A program that starts others on a cluster.

    Attributes:
        template: file in templates/engines/.
        suffix: of the file that is written.
        submit: words of the command that takes the file, which comes last.
        rank, address, port: in a shell on a machine, its number, and where machine 0 waits for the others; empty: machines
            have no numbers, because they come and go.
    """

    template: str
    suffix: str
    submit: tuple[str, ...]
    rank: str
    address: str
    port: str


ENGINES = {
    "slurm": Engine("slurm.sbatch.j2", ".sbatch", ("sbatch",), '"$SLURM_NODEID"', '"$MAIN"', '"$PORT"'),
    "skypilot": Engine(
        "skypilot.yaml.j2",
        ".yaml",
        ("sky", "jobs", "launch"),
        '"$SKYPILOT_NODE_RANK"',
        '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"',
        "29500",
    ),
    "kubeflow": Engine(
        "kubeflow.yaml.j2",
        ".yaml",
        ("kubectl", "create", "-f"),
        '"$PET_NODE_RANK"',
        '"$PET_MASTER_ADDR"',
        '"$PET_MASTER_PORT"',
    ),
    "torchrun": Engine("torchrun.sh.j2", ".sh", ("bash",), "", "", ""),
    "ray": Engine("ray.py.j2", ".py", ("python",), "", "", ""),
}


def parse_target(target: str) -> tuple[str, str]:
    """Read ENGINE:HARDWARE.

    Returns:
        Name of the engine, and the hardware as `hardware.parse` reads it.

    Raises:
        UsageError: no such form, or no such engine.

    >>> parse_target("slurm:2x8xa100-80")
    ('slurm', '2x8xa100-80')
    """
    engine, colon, hardware = target.partition(":")
    if not colon or not hardware:
        raise UsageError(f"on is {format_name(target)}, must be ENGINE:HARDWARE, for example slurm:2x8xa100-80")
    if engine.lower() not in ENGINES:
        raise UsageError(f"on is {format_name(target)}: engine {format_name(engine)}: {nearest(engine, ENGINES)}")
    return engine.lower(), hardware


def _make_name(text: str) -> str:
    """Make the name of a job from a training's: at most `NAME` characters, whole words where they fit.

    >>> _make_name("Llama-2-7b on builtin/drawn_chats easy (sft_small_cpu)"), _make_name("é"), len(_make_name("a" * 99))
    ('llama-2-7b-on-builtin-drawn-chats-easy-sft-small', 'training', 50)
    """
    name = re.sub(r"[^a-z0-9-]+", "-", text.lower()).strip("-")
    if len(name) > NAME and name[NAME] != "-":
        name = name[:NAME].rpartition("-")[0] or name
    return name[:NAME].strip("-") or "training"


def write_job(engine_name: str, placement: Placement, run_words: Sequence[str], **values: Any) -> str:
    """Write the file that an engine starts a training with.

    Args:
        engine_name: one of `ENGINES`.
        placement: the recipe on the cluster's machines.
        run_words: flags of the script beside those of the recipe; `--output_dir` must be among them.
        values: `title` and `origin`, lines of comment; `file`, its name; `image` of the container, for kubeflow.

    Raises:
        UsageError: a recipe without a script, no output folder, or a device that the engine has no name for.
    """
    engine, hardware, workload = ENGINES[engine_name], placement.hardware, placement.workload
    if workload.script is None:
        raise UsageError(f"{workload.name} has no script of this repository, so that there is nothing to launch")
    output_dir = find_flag(run_words, "output_dir")
    if not output_dir:
        raise UsageError(
            "output_dir is missing: name a folder that all machines see: -- --output_dir /shared/runs/NAME"
        )
    device, is_cpu = hardware.device.name, bool(hardware.device.cores)
    if engine_name == "skypilot" and not is_cpu and device not in SKY_NAMES:
        raise UsageError(
            f"on is {hardware}, but SkyPilot's name of {device} is not known: take one of {', '.join(SKY_NAMES)}"
        )
    if engine_name == "kubeflow" and not values.get("image"):
        raise UsageError(
            "image is missing: kubeflow starts containers; give one that holds this repository, --image NAME"
        )
    launch_file = "launch.yaml"
    command = placement.command(launch_file, is_of_job=True)
    is_elastic = not engine.rank
    if is_elastic and find_flag(run_words, "fault_tolerance") is None:
        run_words = [*run_words, "--fault_tolerance", "restart"]
    elif "--resume_from_checkpoint" not in run_words:
        run_words = [*run_words, "--resume_from_checkpoint", "latest"]
    flags = '"$launch_file"'
    if hardware.num_nodes > 1 and not is_elastic:
        flags += f" --machine_rank {engine.rank} --main_process_ip {engine.address} --main_process_port {engine.port}"
    command = command.replace(f"--config_file {launch_file}", f"--config_file {flags}", 1)
    # One line for the launcher, one for the script and its recipe, one for the run
    command = re.sub(r" (\S*scripts/)", r" \\\n  \1", command, count=1) + f" \\\n  {shlex.join(run_words)}"
    script_command = re.sub(r"^.*?(?=\S*scripts/)", "", command, count=1, flags=re.DOTALL)
    program, *program_flags = shlex.split(script_command.replace("\\\n", " "))
    seconds = placement.seconds_to_end
    environment = make_environment(TEMPLATES / "engines", is_page=False)
    environment.filters["quote"] = shlex.quote
    job: str = environment.get_template(engine.template).render(
        name=_make_name(workload.name),
        num_nodes=hardware.num_nodes,
        devices_per_node=hardware.num_processes // hardware.num_nodes,
        num_gpus=0 if is_cpu else hardware.num_processes // hardware.num_nodes,
        sky_device=None if is_cpu else SKY_NAMES.get(device),
        launch_config=placement.config(launch_file, is_of_job=True),
        command=command,
        script_command=script_command.replace("\n  ", "\n      "),
        program=program,
        program_flags=program_flags,
        environment=_list_environment(placement),
        is_cpu=is_cpu,
        num_threads=hardware.device.cores,
        output_dir=output_dir,
        time_limit=None if seconds is None else _format_time(TIME_RESERVE * seconds),
        submit=shlex.join(engine.submit),
        **{"image": None} | values,
    )
    return job


def _list_environment(placement: Placement) -> dict[str, str]:
    """List the variables by which `accelerate launch` hands on a launch file, for engines that start the script by itself."""
    variables = {"ACCELERATE_MIXED_PRECISION": placement.mixed_precision}
    if cores := placement.hardware.device.cores:
        variables |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "-1,-1", "OMP_NUM_THREADS": str(cores)}
    if placement.sharded:
        variables |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        variables |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
        variables["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if placement.num_shards is not None:
        variables |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(placement.hardware.num_processes // placement.num_shards),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(placement.num_shards),
        }
    return variables


def _format_time(seconds: float) -> str:
    """Write a time limit as Slurm reads it, days-hours:minutes:seconds, rounded up to 10 minutes.

    >>> _format_time(3000), _format_time(254113)
    ('0-00:50:00', '2-22:40:00')
    """
    minutes = 10 * math.ceil(seconds / 600)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24}-{hours % 24:02}:{minutes:02}:00"
