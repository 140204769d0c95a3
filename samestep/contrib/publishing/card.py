"""Writes the model card: what was trained on what, how, where, with which result; and uploads it with the model."""

import contextlib
import functools
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors import SafetensorError, safe_open

from samestep.errors import UsageError, reason
from samestep.printing import write_number
from samestep.recipe.reading import has_hub_form, read_text
from samestep.recipe.recipe import Recipe
from samestep.training.digest import read_cpuinfo
from samestep.training.launch import describe_reduce_dtype
from samestep.training.publishing import UNITS, ends_within_a_step, find_local_base, name_model
from samestep.training.run import Run

if TYPE_CHECKING:  # imported by who writes a card
    import jinja2

PACKAGES = ("transformers", "torch", "accelerate", "datasets", "tokenizers", "samestep")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}
"""Type in a file of safetensors -> its name in torch."""
MAX_EVALUATIONS = 20  # rows of the table of evaluations
FRONT = ["library_name", "license", "base_model", "pipeline_tag", "datasets", "tags"]  # order of the front matter
TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"


class Training:
    """Facts of a finished run, for its model card.

    Args:
        run: finished.
    """

    def __init__(self, run: Run):
        self.run, self.recipe, self.settings, self.accelerator = run, run.recipe, run.settings, run.accelerator
        self.title = name_model(run)

    @property
    def precision(self) -> str:
        """Precision of the files, and of weights and computation in training, in words."""
        mixed, found = self.accelerator.mixed_precision, read_dtypes(Path(self.settings.output_dir))
        files = f"files in {' and '.join(found)}; " if found else ""
        trained = f"trained in {self.settings.dtype}" + ("" if mixed == "no" else f", {mixed} computation (autocast)")
        return files + trained

    @property
    def hardware(self) -> str:
        """Number of processes, and the device of process 0; of a training that went on, which steps these did."""
        first = self.run.log.first_step
        steps = f", from step {first + 1:,} on; others did the steps before" if 0 < first < self.run.num_steps else ""
        return f"{self.accelerator.num_processes} x {device_name(self.accelerator.device)}{steps}"

    def hyperparameters(self) -> dict[str, Any]:
        """Return the hyperparameters under the names that Trainer's cards have."""
        recipe, layout = self.recipe, self.run.recovery.steps.layout  # the last step's
        numbers = recipe.scaled_hyperparameters()
        if recipe.optimizer_name == "sgd":
            optimizer = f"sgd with momentum {recipe.sgd_momentum:g}"
        else:
            betas = f"betas=({numbers.adam_beta1:g},{numbers.adam_beta2:g})"
            optimizer = f"{recipe.optimizer_name} with {betas} and epsilon={numbers.adam_epsilon:g}"
        if recipe.optimizer_name == "muon":
            rate = recipe.muon_learning_rate * numbers.learning_rate / recipe.learning_rate
            matrices = f"learning rate {rate:.6g}, momentum {recipe.muon_momentum:g}"
            optimizer = f"muon of matrices with {matrices}, weight decay {recipe.muon_weight_decay:g}; {optimizer}"
            optimizer = optimizer.replace("; muon with", "; adamw of the rest with")
        length = "num_epochs" if recipe.max_train_steps is None else "training_steps"
        return {
            "learning_rate": f"{numbers.learning_rate:.6g}",
            "train_batch_size": layout.per_device_train_batch_size,
            "eval_batch_size": self.settings.per_device_eval_batch_size,
            "seed": recipe.seed,
            "num_devices": self.accelerator.num_processes,
            "gradient_accumulation_steps": layout.gradient_accumulation_steps,
            "total_train_batch_size": str(recipe.batch_schedule or "") or layout.global_batch_size,
            "optimizer": f"{optimizer}, weight decay {recipe.weight_decay:g}",
            "max_grad_norm": recipe.max_grad_norm,
            "lr_scheduler_type": recipe.lr_scheduler_type,
            "lr_scheduler_warmup_steps": self.run.plan.schedule.num_warmup_steps,
            length: recipe.num_train_epochs if recipe.max_train_steps is None else recipe.max_train_steps,
            "mixed_precision_training": self.accelerator.mixed_precision,
        }

    def describe_communication(self) -> str | None:
        """Say what another algorithm than the exact step was, if one was."""
        if self.recipe.communication is not None:
            return self.recipe.communication.describe()
        if self.settings.reduce_dtype == "own":
            return None
        return describe_reduce_dtype(self.settings.reduce_dtype, self.accelerator.num_processes)

    def metadata(self, library: str) -> ModelCardData:
        """Return the front matter of the card, as the hub reads it.

        Args:
            library: that loads the model: transformers or pytorch.
        """
        recipe = self.recipe
        base, datasets = (getattr(recipe, name, None) for name in ("model_name_or_path", "dataset_name"))
        names = [datasets] if isinstance(datasets, str) else datasets or ()
        tag = "image-text-to-text" if getattr(recipe, "images", False) else recipe.parts.pipeline_tag
        return ModelCardData(
            library_name=library,
            license=self.settings.license,
            base_model=base if _is_on_hub(base) else None,
            pipeline_tag=tag if library == "transformers" else None,
            datasets=[name for name in (name.partition(":")[0] for name in names) if _is_on_hub(name)] or None,
            tags=[recipe.task, "samestep"],
        )


def read_dtypes(folder: Path) -> list[str]:
    """Read in which types the files of a saved model or adapter hold their tensors, those with the most numbers first."""
    sizes: dict[str, int] = {}
    for path in sorted([*folder.glob("model*.safetensors"), *folder.glob("adapter_model*.safetensors")]):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, "numpy") as file:
            names = file.keys()
            for name in names:
                part = file.get_slice(name)
                kind = part.get_dtype()
                sizes[kind] = sizes.get(kind, 0) + math.prod(part.get_shape())
    return [DTYPES.get(kind, kind) for kind in sorted(sizes, key=lambda kind: -sizes[kind])]


def device_name(device: torch.device) -> str:
    """Return the name of a device: that of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({read_cpuinfo().get('model name') or platform.processor() or platform.machine()})"


def _is_on_hub(name: str | None) -> bool:
    if name is None or os.path.exists(name) or name.startswith("builtin/"):
        return False
    return has_hub_form(name)


@functools.cache  # each is read from a long file
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that took part, those that are installed."""
    numbers = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            numbers[name] = version(name)
    return numbers


@functools.cache  # `ModelCard.from_template` compiles it for every card
def _compile_template() -> "jinja2.Template":
    import jinja2

    return jinja2.Template(read_text(TEMPLATE, "the template of model cards"))


def write(
    training: Training,
    results: Mapping[str, Any],
    evaluations: Sequence[Mapping[str, Any]],
    usage: str,
    pictures: Iterable[str],
    repo_id: str | None = None,
) -> str:
    """Write the text of a model card.

    Args:
        training: what was trained.
        results: name -> number or text, as in all_results.json.
        evaluations: `step` and metrics of each, in order.
        usage: lines of Python that load the model; OUTPUT_DIR stands for its place.
        pictures: names of files beside the card.
        repo_id: repository on the hub, from which the model is loaded; None: the folder of the card, wherever it was copied to.
    """
    front = training.metadata("transformers" if "transformers" in usage else "pytorch")
    sources = _group_by_source(results)
    columns = [name for name in evaluations[-1] if "/" not in name] if evaluations else []
    every = -(-len(evaluations) // MAX_EVALUATIONS)
    local_base = find_local_base(training.run)
    text = _compile_template().render(
        front=front.to_yaml(original_order=FRONT),
        training=training,
        facts=_describe(training, results),
        usage=usage.replace(f'"{local_base}"', '"base"').replace("OUTPUT_DIR", repo_id or "."),
        is_local=repo_id is None,
        local_base=local_base and Path(local_base).name,
        results=results,
        pictures=list(pictures),
        sources=sources,
        metrics=list(dict.fromkeys(name for values in sources.values() for name in values)),
        columns=columns,  # those of sources are in a table of their own
        evaluations=[line for place, line in enumerate(reversed(evaluations)) if place % every == 0][::-1],
        versions=versions(),
        number=write_number,
    )
    return str(ModelCard(text))


def _describe(training: Training, results: Mapping[str, Any]) -> dict[str, str]:
    """Describe what was trained on what, how and where: name -> text."""
    recipe, (train, held_out) = training.recipe, training.run.data
    # Of a pair that is compared `max_length` counts both answers
    length, positions = getattr(recipe, "max_seq_length", train.max_length), _num_positions(recipe)
    base = getattr(recipe, "model_name_or_path", None)
    described = "nothing held out" if held_out is None else f"held out: {held_out}"
    amount = " and ".join(f"{results[f'{unit}_seen']:,} {unit}" for unit in UNITS if f"{unit}_seen" in results)
    end = ""
    if ends_within_a_step(training.run):
        end = f"; the last step was filled up with samples beyond {recipe.num_train_epochs:g} epochs"
    facts = {
        "Data": f"{recipe.data_name or 'made by the program'}; {train}; {described}",
        "Start": "random weights"
        if base is None
        else f"the weights of `{base if _is_on_hub(base) else Path(base).name}`",
        "Seen in training": f"{amount or 'not known'}, in {training.run.num_steps:,} optimizer steps{end}",
        "Precision": training.precision,
        "Communication": training.describe_communication(),
        "Hardware": training.hardware,
    }
    if positions is not None:
        untrained = f"; the positions beyond, up to {positions:,}, are untrained" if positions > length else ""
        facts["Length"] = f"at most {length:,} tokens{untrained}"
    return {name: text for name, text in facts.items() if text is not None}


def _num_positions(recipe: Recipe) -> int | None:
    return getattr(recipe, "max_position_embeddings", None) or getattr(recipe, "n_positions", None)


def _group_by_source(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group the results of each source of the data, whose names are SOURCE/NAME or eval_SOURCE/NAME."""
    sources: dict[str, dict[str, Any]] = {}
    for name, value in results.items():
        source, slash, metric = name.removeprefix("eval_").partition("/")
        if slash:
            sources.setdefault(source, {})[metric] = value
    return sources


def push_to_hub(output_dir: Path, repo_id: str | None, write_card: Callable[[str], None]) -> str:
    """Upload the results, without checkpoints, and return the URL of the commit.

    Args:
        output_dir: folder of the results.
        repo_id: repository on the hub; None: the folder's name, of the user who is logged in.
        write_card: called with the whole name of the repository before the upload.

    Raises:
        UsageError: the hub refuses it.
    """
    from huggingface_hub import HfApi

    name = repo_id or output_dir.resolve().name
    try:
        repository = HfApi().create_repo(name, exist_ok=True)
        write_card(repository.repo_id)
        return HfApi().upload_folder(
            repo_id=repository.repo_id, folder_path=output_dir, ignore_patterns=["checkpoint-*", "settings.json", ".*"]
        )
    except Exception as error:  # of any kind: network, rights, names
        raise UsageError(
            f"push_to_hub failed ({reason(error)}). All results are in {output_dir}. Log in with `hf auth login`, and upload "
            f"them: the same command with --resume_from_checkpoint latest, or hf upload {name} {output_dir}"
        ) from None


def check_login() -> None:
    """Check, before a training that is to be uploaded, that somebody is logged in to the hub.

    Raises:
        UsageError: nobody is.
    """
    from huggingface_hub import get_token

    if get_token() is None:
        raise UsageError(
            "push_to_hub is true, but nobody is logged in to the hub: run `hf auth login`, set HF_TOKEN, or leave it out"
        )
