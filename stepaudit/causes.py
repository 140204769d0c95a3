"""Holds the causes that the audit names, and the remedy of each."""

import dataclasses
from collections.abc import Iterable

GUIDE = "docs/audit.md"
_OR_TRAINER = (
    "; in a Trainer: exact(Trainer), with loss= and targets= where the loss is your own (docs/your-trainer.md)"
)
WINDOWS = (
    "; shortest with samestep: for step in exact_windows(accelerator, loader, gradient_accumulation_steps=k, targets=count), "
    "and accelerator.backward(step.loss(total)); a shuffled loader needs DataLoaderConfiguration(use_seedable_sampler=True) "
    "(docs/your-own-loop.md)" + _OR_TRAINER
)
STEPS = (
    "; shortest with samestep: for step in exact_steps(accelerator, dataset, collate, ...) (docs/your-own-loop.md)"
    + _OR_TRAINER
)
TRAINER = "; shortest with samestep: exact(Trainer) in the place of Trainer (docs/your-trainer.md)"


@dataclasses.dataclass(frozen=True)
class Cause:
    """One way in which a step comes to depend on the cut of its samples.

    Attributes:
        text: the fault.
        remedy: the lines to change.
    """

    text: str
    remedy: str


KINDS = {
    "batch_norm": Cause(
        "statistics of the micro-batch instead of the global batch",
        "use GroupNorm or LayerNorm, or freeze the statistics with module.eval()",
    ),
    "mixed_samples": Cause(
        "a sample's output depends on the other samples of its micro-batch",
        "compute statistics per sample: x.mean(dim=(1, 2)), not x.mean()",
    ),
    "mixed_loss": Cause(
        "the loss compares the samples of a micro-batch, or is no sum over them",
        "sum over samples before anything that is not linear. Compute targets and weights per sample, or once of the whole "
        "step. A contrastive loss needs the embeddings of the whole step first (gradient caching), as samestep's WholeBatch "
        "does",
    ),
    "gathered_without_gradient": Cause(
        "the loss compares the samples of all processes, but those of other processes come without a gradient",
        "gather with a gradient: torch.distributed.nn.functional.all_gather, not accelerator.gather or "
        "torch.distributed.all_gather",
    ),
    "expert_balance": Cause(
        "the balance loss of experts is computed from the tokens of a micro-batch",
        "set its coefficient to 0 (router_aux_loss_coef=0.0), or balance with counts of the whole step (with samestep: "
        "exact(Trainer), or WholeBatch with is_sum=True in a loop)",
    ),
    "dropout": Cause(
        "noise is another one for every cut (with a dropout of 0 the audit sees the rest)",
        "draw it by sample, a hash of (seed, epoch, sample id, place), from no generator; or audit with every dropout at 0.0",
    ),
    "state": Cause(
        "a module changes its own state or its parameters in the forward, so that the micro-batches of a step see other models",
        "let it change once per step, of all its micro-batches and processes. (A queue: keep their outputs, and push them "
        "behind optimizer.step().) Or not at all: module.eval()",
    ),
    "random_collate": Cause(
        "collate draws: the same samples do not give the same batch",
        "draw in the dataset, from a generator seeded by the sample: torch.Generator().manual_seed(hash of seed, epoch, index)",
    ),
    "padding": Cause(
        "what a sample gives depends on how far it is padded (is the padding masked, in the model and in the loss?)",
        "pass attention_mask, and pool with it: (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True); in the loss "
        "ignore_index=-100, lengths, or (loss * mask).sum(). A recurrent layer takes a packed sequence "
        "(torch.nn.utils.rnn.pack_padded_sequence)",
    ),
    "packing": Cause(
        "a sample of a packed row sees the one in front of it",
        "an attention whose mask takes position_ids (flash, flex or sdpa, where the model has one), or no packing for this "
        "model: packing=False, padding_free=False",
    ),
    "mean_of_means": Cause(
        "mean of the micro-batches' means, though they have different numbers of targets",
        'loss = F.cross_entropy(..., reduction="sum") / count, with count that of all micro-batches and processes of the step. '
        "Of weighted classes it is the sum of the weights of the labels. Times N under DDP, times k under "
        "accelerator.backward, which divide by them" + WINDOWS,
    ),
    "counts": Cause(
        "the numbers of targets of samples do not add up to that of their batch (is padding counted?)",
        "count = (labels != -100).sum(), not labels.numel(), added up over the whole step; and a sum over the same places: "
        "(losses * (labels != -100)).sum()",
    ),
    "not_summed": Cause(
        "the loss is no sum over samples (a mean?)",
        'use reduction="sum", and return the number of targets beside it',
    ),
    "ignores_num_items": Cause(
        "the model's loss ignores num_items_in_batch",
        'compute the loss yourself from the logits: F.cross_entropy(..., reduction="sum") / num_items_in_batch'
        + TRAINER,
    ),
    "shifted_labels": Cause(
        "num_items_in_batch counts labels that are never predicted",
        "labels[:, 0] = -100 in the collate function: the first label of a row is never predicted, and is not counted then"
        + TRAINER,
    ),
    "factor": Cause(
        "the gradient is too large or too small by a factor",
        "divide a sum by the count of the whole step, a mean by k, and once (accelerator.backward divides by k, too). Times N "
        "under DDP, which averages over the processes. A compute_loss of Trainer divides a sum by num_items_in_batch"
        + TRAINER,
    ),
    "tail": Cause(
        "a window that is not full is divided by the k of a full one",
        "divide by the micro-batches of this window: k = min(k, num_batches - first_of_window); better: sums over counts"
        + WINDOWS,
    ),
    "last_window": Cause(
        "the last window never steps",
        "step also at the end: if number % k == 0 or number == len(loader):. And divide the losses of that window by its own "
        "micro-batches, as for tail",
    ),
    "first_window": Cause(
        "the first step comes after a single micro-batch", "if (step + 1) % k == 0:, not step % k == 0"
    ),
    "duplicated": Cause(
        "samples are used twice",
        "even_batches=False in Accelerate, drop_last or a sampler without padding; idle processes take an empty micro-batch"
        + STEPS,
    ),
    "dropped": Cause(
        "samples are left out",
        "take every sample: drop_last=False, and a step after the last batch. No batch is skipped, and no order is cut to a "
        "multiple of the processes",
    ),
    "other_samples": Cause(
        "the samples of a step depend on the layout",
        "draw the order from a generator of its own, seeded by (seed, epoch), and deal it out by process: order[rank::N]; in "
        "Accelerate Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True)). With "
        "drop_last=True another b leaves out others: drop_last=False" + STEPS,
    ),
    "other_inputs": Cause(
        "what the model is given in a step depends on the layout (other samples, or masks drawn anew?)",
        "draw masks and augmentations from a generator seeded by (seed, epoch, sample), not from the global one",
    ),
    "not_sharded": Cause(
        "every process computes the same samples",
        "give each process its own: DistributedSampler, accelerator.prepare(loader), or samples[rank::N]",
    ),
    "batch_size": Cause(
        "a step has another number of samples than the reference's",
        "give all layouts one number of samples, batch x k x N. Is a flag per process? Name it: --per_process FLAG. Else let "
        "the script divide the global batch by k * N",
    ),
    "changed_between": Cause(
        "the gradient is changed before it is complete (clipped or decayed per micro-batch, or before the reduction?)",
        "clip once, after the last micro-batch and after the reduction: if accelerator.sync_gradients: clip_grad_norm_(...)",
    ),
    "gradient_hooks": Cause(
        "hooks change the gradient of every micro-batch",
        "do in front of optimizer.step(), once per step, what the hook does",
    ),
    "penalty": Cause(
        "a term that no samples of the micro-batch enter is added at every micro-batch",
        "divide it by the micro-batches of this window (and not by N under DDP), or use the optimizer's weight_decay",
    ),
    "low_precision": Cause(
        "gradients are added up in 16 bits",
        "keep float32 weights and let autocast compute in 16 bits; no fp16_compress_hook",
    ),
    "counted_again": Cause(
        "earlier micro-batches are computed backward again with later ones (a running total, retain_graph), and count again",
        "loss.backward() of this micro-batch alone, and total += loss.detach() for the log; or one backward of the total, at "
        "the end of the step",
    ),
    "emptied_between": Cause(
        "the gradient is emptied between micro-batches: only the last one counts",
        "optimizer.zero_grad() once per step, after optimizer.step(); model.requires_grad_(False) or "
        "torch.autograd.grad keeps the gradient of another loss out",
    ),
    "dropped_micro_batches": Cause(
        "micro-batches of a window are dropped, which nothing has emptied: what adds the gradients up keeps only some of them",
        "add every micro-batch to the sum (total += p.grad, no copy of one), or leave it in .grad until the step. Of DeepSpeed "
        "take 0.19.0 or newer: pip install -U deepspeed (docs/deepspeed.md)",
    ),
    "leak": Cause(
        "the gradient of the step before is still there (zero_grad is missing)",
        "optimizer.zero_grad() after optimizer.step()",
    ),
    "ticks_per_process": Cause(
        "the scheduler ticks once per process in every step (a prepared scheduler)",
        "do not prepare the scheduler, and let it tick once per step: if accelerator.sync_gradients: scheduler.step()",
    ),
    "ticks_per_micro_step": Cause(
        "the scheduler, of rates or of a number in the loss, ticks at every micro-batch",
        "scheduler.step() only where optimizer.step() is called, and numbers of the loss that grow with the optimizer's steps. "
        "In Accelerate, which calls it at every micro-batch, if accelerator.sync_gradients: scheduler.step()",
    ),
    "learning_rate": Cause(
        "the learning rate depends on the layout",
        "count optimizer steps in the schedule, not batches or samples per process. Scale a rate by the batch of a whole step, "
        "b * k * N, or not at all",
    ),
    "average": Cause(
        "an average of the weights is updated at every micro-batch",
        "ema.update(...) once per step, after optimizer.step()",
    ),
    "reductions": Cause(
        "the gradient is reduced more than once per step (no_sync is missing): exact, but slow",
        "with model.no_sync(): for all micro-batches but the last, forward and backward",
    ),
    "not_reduced": Cause(
        "the processes take different gradients: they are not reduced",
        "wrap the model (DistributedDataParallel, accelerator.prepare), call the wrapped one, and no_sync not around the last "
        "micro-batch of a window. Or before the step dist.all_reduce(p.grad) and p.grad /= N",
    ),
    "norm_counts_replicas": Cause(
        "the norm of the gradient counts weights that several processes have once for each of them",
        "squares of what is cut are added up over the processes that have the other parts, those of all else count once. Of "
        "DTensors torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm) does so",
    ),
    "norm_of_a_part": Cause(
        "the norm of the gradient is that of the parts that this process holds",
        "by hand dist.all_reduce(squares) over the processes that have the other parts, before the root. What "
        "clip_grad_norm_ returns for DTensors needs full_tensor()",
    ),
    "times_tensor_parallel": Cause(
        "the gradient is too large or too small by the number of tensor parallel processes",
        "multiply by the processes that have samples of their own, which undoes their mean, and not by all. Parts that each "
        "process has of a gradient (norms under sequence parallelism) are added up, and not averaged",
    ),
    "times_sequence_parallel": Cause(
        "the gradient is too large or too small by the number of processes that share a sequence",
        "divide by the targets of all parts of the sequences. Where gradients are added up over the parts, multiply by "
        "nothing; where they are averaged over data and parts, by both sizes",
    ),
    "times_expert_parallel": Cause(
        "the gradient of experts is too large or too small by the number of expert parallel processes",
        "divide the gradients of experts by all processes that have samples of their own, as those of all other weights. Those "
        "alone that have the same experts are too few",
    ),
    "dead_part": Cause(
        "parts of the model get no gradient, neither here nor in the reference: two layouts agree on nothing",
        "look for a detach, a no_grad, a stage whose input needs no gradient, or weights that are all 0. What shall stand "
        "still is frozen (requires_grad), and is not named",
    ),
    "num_steps": Cause(
        "another number of steps",
        "let every optimizer step once per window; count optimizer steps, not batches, and end at the same one on every layout",
    ),
    "rounding": Cause(
        "the rounding is larger than the tolerance",
        "nothing, where the verdict is exact: the step is the same in float32; else a tolerance that suits the precision",
    ),
    "not_finite": Cause(
        "the gradient is not finite",
        "divide sums by the count of the whole step, as a micro-batch may have none (0 / 0); look for overflow in 16 bits",
    ),
    "parameters": Cause(
        "other parameters are trained",
        "seed the program, build the model and freeze its parts in the same way on every layout. Whose turn it is follows from "
        "the number of optimizer steps, not of batches",
    ),
    "update": Cause(
        "the optimizer makes another step of the same gradients and rates",
        "give the optimizer the gradient of the whole step once (from a closure its loss, too). No state that grows with "
        "micro-batches, no option that depends on b, k or N alone",
    ),
    "resume_weights": Cause(
        "a resumed run does not begin with the parameters of a step of the run that was killed",
        "load the newest checkpoint into the model before the first step, and look whether the flag is read at all",
    ),
    "resume_samples": Cause(
        "a resumed run does not go on with the samples that come next",
        "draw the order from (seed, epoch), save how many samples of the epoch were used, and skip as many: in Accelerate "
        "DataLoaderConfiguration(use_seedable_sampler=True) and skip_first_batches",
    ),
    "resume_state": Cause(
        "in a resumed run the optimizer or the schedule does not go on where it was",
        "save and load optimizer.state_dict() and scheduler.state_dict() beside the parameters, and let the schedule count "
        "steps of the optimizer: a prepared scheduler ticks once per process",
    ),
    "no_targets": Cause(
        "every label is -100: nothing is trained",
        "mark what the assistant says in the chat template ({% generation %}), and do not cut samples before their answers",
    ),
    "untrained_stop": Cause(
        "no token that ends a text is trained: the model does not learn to stop",
        "a pad_token that is not the eos_token (collators mask what is padding), and the eos_token inside the trained part",
    ),
    "media_tokens": Cause(
        "tokens that stand for a picture or a sound are trained, as if they were words",
        "labels[labels == model.config.image_token_id] = -100 in the collate function, and so of videos and sounds",
    ),
    "label_shift": Cause(
        "labels are shifted twice, or not at all: a place is trained on another token than the next one",
        "give the model labels at the places of the tokens that they are, as it shifts them itself: a copy of input_ids. Of an "
        "encoder and a decoder without the decoder_start_token_id in front, labels = labels[:, 1:]. Or beside "
        "decoder_input_ids that are the labels one place later",
    ),
    "logged_loss": Cause(
        "the logged loss is not the loss of the step (the step itself is not concerned)",
        "log sum over count of the whole step, over all processes",
    ),
    "not_a_sum": Cause(
        "the gradient is no sum of the micro-batches' (samples are mixed, counts are several, or targets are others)",
        "compute nothing of a sample from the others of its micro-batch: no choice among them, scale_grad_by_freq=False. "
        "assert_same_step audits the loss by itself, and names the module where it can",
    ),
}
CAUSES = {name: cause.text for name, cause in KINDS.items()}
DRAWS = "which draws from"
"""Words of a place: a model draws from the generator of another library than torch."""
# For the step, which is the same on every layout
HARMLESS = {"reductions", "logged_loss", "no_targets", "untrained_stop", "media_tokens", "label_shift", "dead_part"}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault of a loop.

    Attributes:
        cause: see `KINDS`.
        where: modules, or steps.
        evidence: the numbers that show the fault.
        is_harmless: the step is the same on every layout nevertheless; None: as `HARMLESS` says of the cause.
    """

    cause: str
    where: str
    evidence: str
    is_harmless: bool | None = None

    def __post_init__(self) -> None:
        if self.is_harmless is None:
            object.__setattr__(self, "is_harmless", self.cause in HARMLESS)

    @property
    def remedy(self) -> str:
        """The lines to change, and the section of the guide about the cause."""
        return f"{KINDS[self.cause].remedy} ({GUIDE}#{self.cause})"

    def __str__(self) -> str:
        return join_parts(CAUSES[self.cause], self.where, self.evidence)


def select_first_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Select the first finding of each cause."""
    by_cause: dict[str, Finding] = {}
    for finding in findings:
        by_cause.setdefault(finding.cause, finding)
    return list(by_cause.values())


def join_parts(*parts: str) -> str:
    """Join the parts of a sentence that are not empty, from the general to the particular."""
    return ": ".join(filter(None, parts))


def list_names(names: list[str]) -> str:
    """List the first three names, and how many more there are.

    >>> list_names(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
