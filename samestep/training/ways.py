"""The one list of what is not the usual way; what `samestep.contrib` holds is imported here alone, when a run asks for it."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator

from samestep.cut.order import Order
from samestep.data.steps import Steps
from samestep.recipe.extras import is_there, load_way
from samestep.recipe.recipe import Recipe
from samestep.recipe.run_settings import RunSettings
from samestep.step.batch_norm import StepStatistics
from samestep.training.copies import Copies, Peers, Store
from samestep.training.output_folder import OutputFolder
from samestep.training.parts import Part, find_part
from samestep.training.reduction import Reduction
from samestep.training.whole_term import WholeTerm

if TYPE_CHECKING:
    from samestep.training.run import Run

WAYS: list[tuple[str, Callable[[Any, Any], bool]]] = [
    (
        "samestep.contrib.replication.reduction:ReplicatedExactSums",
        lambda recipe, settings: settings.fault_tolerance == "step" and settings.reproducible is not None,
    ),
    ("samestep.contrib.replication.reduction:Replicated", lambda recipe, settings: settings.fault_tolerance == "step"),
    (
        "samestep.contrib.communication.reductions:LocalSteps",
        lambda recipe, settings: recipe.communication is not None and recipe.communication.is_local,
    ),
    ("samestep.contrib.communication.reductions:Exchanging", lambda recipe, settings: recipe.communication is not None),
    ("samestep.contrib.folding:Folding", lambda recipe, settings: recipe.accumulation == "optimizer"),
    ("samestep.training.reduction:ExactSums", lambda recipe, settings: settings.reproducible is not None),
    ("samestep.training.reduction:Reduction", lambda recipe, settings: True),
]
"""MODULE:CLASS, and whether a recipe and its settings ask for it; the first that is asked for is taken."""

ANSWERS, DEVIATION = "samestep.contrib.generation:Answers", "samestep.contrib.whole_step:Deviation"
TARGETS = "samestep.contrib.generated_targets:Targets"
STRAGGLERS, PAGES = "samestep.contrib.stragglers:Stragglers", "samestep.contrib.publishing.pages:Pages"
ROUTERS = "samestep.contrib.whole_batch.router_loss:RouterLoad"
POSITION = "samestep.contrib.streaming.steps:StreamPosition"
BATCH_SIZE, REHEARSE = "samestep.contrib.host_memory:choose_batch_size", "samestep.contrib.rehearsing:rehearse_own_kind"
PARTS: list[tuple[str, Callable[[Any], bool]]] = [
    ("samestep.contrib.digests:Digests", lambda run: run.settings.digest_steps is not None),
    (STRAGGLERS, lambda run: run.accelerator.num_processes > 1 and is_there(STRAGGLERS)),  # nobody has asked for it
    ("samestep.contrib.noise.scale:NoiseScale", lambda run: run.settings.noise_scale_steps is not None),
    (DEVIATION, lambda run: _depends_on_cut(run.recipe) and is_there(DEVIATION)),  # nor for that
    (ROUTERS, lambda run: _balances_experts(run.recipe)),
    (POSITION, lambda run: is_streamed(run.recipe)),
    ("samestep.training.ledger:Ledger", lambda run: run.settings.record_samples),
    ("samestep.training.report:RunLog", lambda run: True),
    ("samestep.contrib.trackers:Trackers", lambda run: run.settings.report_to != "none"),
    ("samestep.contrib.noise.growth:Growth", lambda run: _follows_noise(run.recipe)),
    (ANSWERS, lambda run: _generates(run, has_targets=False) and is_there(ANSWERS)),  # by default
    (TARGETS, lambda run: _generates(run, has_targets=True) and is_there(TARGETS)),  # by default
    (PAGES, lambda run: run.settings.push_to_hub or is_there(PAGES)),
]
"""MODULE:CLASS, and whether a run asks for it; all that are asked for are made, and called, in this order."""


EXPERTS = "samestep.contrib.whole_batch.expert_term:ExpertTerm"
TRAINERS = {"sentence_transformers": "samestep.contrib.whole_batch.embedding_trainer:EmbeddingStep"}
"""Package of trainers -> MODULE:CLASS of what `exact` adds to them."""


def is_streamed(recipe: Any) -> bool:
    """Tell whether the samples of a recipe are read as the training goes."""
    return bool(getattr(recipe, "streaming", False))


def choose_build(recipe: Recipe, build: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Choose what builds the data of a recipe: `build`, or what streams them."""
    if is_streamed(recipe):
        build = _load("samestep.contrib.streaming.samples:build")
    return build


def find_list_folder(run: "Run") -> Path | None:
    """Find the folder for the list of skipped rows; None: others write it, of a stream a part of the run, as it meets them."""
    return run.output_dir if run.accelerator.is_main_process and not is_streamed(run.recipe) else None


def choose_order(recipe: Recipe) -> type[Order]:
    """Choose the class of the order of the samples."""
    kind: type[Order] = _load("samestep.contrib.streaming.streams:StreamOrder") if is_streamed(recipe) else Order
    return kind


def choose_steps(recipe: Recipe) -> type[Steps]:
    """Choose the class that cuts the steps."""
    kind: type[Steps] = _load("samestep.contrib.streaming.steps:StreamSteps") if is_streamed(recipe) else Steps
    return kind


def _depends_on_cut(recipe: Any) -> bool:
    return getattr(recipe, "normalization", None) == "batch" and not recipe.exact_batch_norm


def _balances_experts(recipe: Any) -> bool:
    return bool(getattr(recipe, "balances_experts", False))


def _generates(run: "Run", has_targets: bool) -> bool:
    """Tell whether a run generates texts at its evaluations: targets of sources, or else answers of prompts."""
    has_metrics = hasattr(run.settings, "generation_metrics")
    return getattr(run.settings, "num_generations", 0) > 0 and has_metrics is has_targets


def _follows_noise(recipe: Recipe) -> bool:
    return recipe.batch_schedule is not None and recipe.batch_schedule.kind == "noise"


def make_parts(run: "Run", parts: list[Part]) -> None:
    """Make the parts of a run, and add them to `parts`, which those that come later may look at."""
    for place, is_wanted in PARTS:
        if is_wanted(run):
            parts.append(_load(place)(run))


def _load(place: str) -> Any:
    return load_way(place, "this run")


def make_statistics(run: "Run") -> StepStatistics:
    """Make what finds out about a run's whole steps: statistics of batch normalisation, loads of experts."""
    if _balances_experts(run.recipe):
        loss: StepStatistics = find_part(run.parts, _load(ROUTERS)).loss
        return loss
    if not getattr(run.recipe, "exact_batch_norm", False):
        return StepStatistics()
    whole: StepStatistics = _load("samestep.contrib.whole_step:WholeStep")(
        run.bare_model, is_canonical=run.reduction.is_exact
    )
    return whole


def make_whole_batch(run: "Run") -> Any:
    """Make what computes a loss that compares the samples of a run's steps."""
    return _load("samestep.contrib.whole_batch.run_loss:RunLoss")(run)


def choose_accelerator(settings: RunSettings) -> type[Accelerator]:
    """Find the class of a run's accelerator."""
    if settings.fault_tolerance != "step":
        return Accelerator
    kind: type[Accelerator] = _load("samestep.contrib.replication.replica_accelerator:ReplicaAccelerator")
    return kind


def rehearse(accelerator: Accelerator, recipe: Any, *arguments: Any) -> Any:
    """Find the recipe that a rehearsal trains: one with a small model of the kind that is fine-tuned, or `recipe`."""
    return _load(REHEARSE)(accelerator, recipe, *arguments) if is_there(REHEARSE) else recipe


def choose_batch_size(accelerator: Accelerator, recipe: Recipe, settings: RunSettings) -> int | None:
    """Choose the most samples in one forward (b): those of the settings, or what the memory of a host holds by the plan."""
    if not is_there(BATCH_SIZE):
        return settings.per_device_train_batch_size
    size: int | None = _load(BATCH_SIZE)(accelerator, recipe, settings)
    return size


def load_metrics(names: Sequence[str]) -> dict[str, Any]:
    """Load metrics that are programs of others, by their names on the hub or their paths."""
    modules: dict[str, Any] = _load("samestep.contrib.hub_metrics:load_metrics")(names)
    return modules


def add_reference(run: "Run", model_class: Any) -> None:
    """Give the pairs of a run's data their log-probabilities under the model with which the training begins."""
    _load("samestep.contrib.reference:add_reference")(run, model_class, *run.data)


def choose_folder(settings: RunSettings) -> OutputFolder:
    """Make the output folder of a run, which is on no disk yet."""
    place = "samestep.training.output_folder:OutputFolder"
    if settings.fault_tolerance == "step":
        place = "samestep.contrib.replication.shared_folder:SharedFolder"
    folder: OutputFolder = _load(place)(Path(settings.output_dir))
    return folder


def open_copies(accelerator: Accelerator, settings: RunSettings) -> Copies:
    """Open the places in which a run keeps copies of its checkpoints."""
    store, peers = Store(), Peers()
    if settings.checkpoint_store is not None:
        store = _load("samestep.contrib.copies.checkpoint_store:open_store")(accelerator, settings)
    if settings.replicate_checkpoints:
        peers = _load("samestep.contrib.copies.peer_copies:find_peers")(accelerator, settings)
    return Copies(store, peers)


def choose_reduction(accelerator: Accelerator, recipe: Recipe, settings: RunSettings) -> Reduction:
    """Make the reduction of a run."""
    place = next(way for way, is_wanted in WAYS if is_wanted(recipe, settings))
    reduction: Reduction = _load(place)(accelerator, recipe, settings)
    return reduction


def choose_trainer_step(packages: Collection[str]) -> Any:
    """Find the class of the exact step of a trainer that comes from some packages; None: the usual one."""
    place = next((place for package, place in TRAINERS.items() if package in packages and is_there(place)), None)
    return None if place is None else _load(place)


def make_whole_term(model: Any, weight: float) -> WholeTerm:
    """Make the term of a trainer's loss that depends on the whole step: of a model that balances experts by a weight."""
    if not weight or not is_there(EXPERTS):
        return WholeTerm()
    term: WholeTerm = _load(EXPERTS)(model, weight)
    return term


def make_small_model(recipe: Any, folder: Path) -> None:
    """Make the small model of random weights that a rehearsal trains in place of the one that a recipe fine-tunes."""
    _load("samestep.contrib.small_model:make")(recipe, folder)
