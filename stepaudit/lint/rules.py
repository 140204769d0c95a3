"""Holds the rules of the lint: what each says, what to do, and how the audit confirms it."""

import dataclasses

GUIDE = "docs/lint.md"
CUTS, PROCESSES, HEAD, NOTHING = "cuts", "processes", "head", "nothing"
"""Kinds of confirmation of a rule: an audit of several k, of several processes; check-model; nothing that runs."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One way in which the step comes to depend on its cut, as the lines of a program show it.

    Attributes:
        name: in words, for lists.
        symptom: what happens.
        cure: the lines to change.
        confirmed_by: what runs to be sure, see `CUTS`.
        is_harmless: it is said, and is no failure: the step is right, or the program does not show what it depends on.
        causes: those of the audit that say the same.
    """

    name: str
    symptom: str
    cure: str
    confirmed_by: str = CUTS
    is_harmless: bool = False
    causes: tuple[str, ...] = ()


RULES = {
    "SA101": Rule(
        "mean of means",
        "the window's loss is a mean of the micro-batches' means, and these have different numbers of targets",
        'divide sums by the number of targets of the whole window. F.cross_entropy(..., reduction="sum") / count, with count '
        "added up over its micro-batches and processes before the first backward",
        causes=("mean_of_means", "counts"),
    ),
    "SA102": Rule(
        "divided twice",
        "the loss is divided by k here, and once more behind it: the gradient is k times too small",
        "divide once: leave the division out",
        causes=("factor",),
    ),
    "SA103": Rule(
        "not divided",
        "the losses of a window are means and are added up undivided: the gradient is k times too large",
        "divide the loss by k before its backward",
        causes=("factor",),
    ),
    "SA104": Rule(
        "tail divided by k",
        "the last window of an epoch has fewer micro-batches, where k does not divide the loader's length, and is divided by k "
        "all the same",
        "divide by the micro-batches of this window, min(k, len(loader) - first), or sums by the count of the window",
        is_harmless=True,
    ),
    "SA201": Rule(
        "clipping inside the window",
        "what has been added up so far is clipped at every micro-batch",
        "clip once, right before optimizer.step(), under the same condition (if accelerator.sync_gradients: in Accelerate)",
        causes=("changed_between",),
    ),
    "SA202": Rule(
        "zero_grad inside the window",
        "gradients are emptied between the micro-batches of a window: only the last one reaches the step",
        "call zero_grad right after optimizer.step(), under the same condition",
        causes=("emptied_between", "dropped_micro_batches"),
    ),
    "SA203": Rule(
        "average inside the window",
        "an average of the weights is updated at every micro-batch, not at every step",
        "update it after optimizer.step(), under the same condition",
        causes=("average",),
    ),
    "SA204": Rule(
        "optimizer not prepared",
        "this optimizer is not prepared: it steps at every micro-batch, accumulate() holds it back from nothing",
        "give it to accelerator.prepare, or call its step under if accelerator.sync_gradients:",
        causes=("leak", "num_steps"),
    ),
    "SA301": Rule(
        "first window",
        "the count begins at 0, so that the first window is not as long as the others",
        "count from 1: if (step + 1) % k == 0:",
        causes=("first_window",),
    ),
    "SA302": Rule(
        "tail without a step",
        "where k does not divide the loader's length, the last micro-batches of an epoch are followed by no step. They fall "
        "into the next epoch's first window, or are lost",
        "step at the end, too: if (step + 1) % k == 0 or step + 1 == len(loader):, and divide by that window's micro-batches",
        is_harmless=True,
    ),
    "SA401": Rule(
        "prepared scheduler",
        "a prepared scheduler ticks once per process at each step, and this length counts steps: on N processes it is over N "
        "times too early",
        "multiply the lengths by accelerator.num_processes, or do not prepare the scheduler and step it under "
        "if accelerator.sync_gradients:",
        PROCESSES,
        causes=("ticks_per_process",),
    ),
    "SA402": Rule(
        "schedule of micro-batches",
        "the scheduler ticks at optimizer steps, and this length counts micro-batches: it is k times too long",
        "count optimizer steps: divide the number of batches by k, or leave the factor k out",
        causes=("learning_rate",),
    ),
    "SA403": Rule(
        "scheduler inside the window",
        "the scheduler ticks at every micro-batch, not at every step",
        "call scheduler.step() right after optimizer.step(), under the same condition, and count its length in steps",
        causes=("ticks_per_micro_step",),
    ),
    "SA501": Rule(
        "no_sync missing",
        "gradients are reduced over the processes at every micro-batch: the step is the same, but slow",
        "with model.no_sync(): around forward and backward of all micro-batches of a window but the last",
        PROCESSES,
        is_harmless=True,
    ),
    "SA502": Rule(
        "no set_epoch",
        "DistributedSampler draws the same order in each epoch unless it is told the epoch",
        "sampler.set_epoch(epoch) at the head of each epoch",
        NOTHING,
        causes=("other_samples",),
    ),
    "SA503": Rule(
        "sharded twice",
        "the loader has a DistributedSampler already, and is prepared, which shards it once more: on N processes most samples "
        "are never seen",
        "leave the sampler to accelerator.prepare, or do not prepare the loader",
        PROCESSES,
        causes=("other_samples", "duplicated"),
    ),
    "SA601": Rule(
        "head that Trainer does not divide for",
        "Trainer leaves the division by k to this kind of head, which does not divide (transformers 5). Gradient and logged "
        "loss are k times too large",
        "exact(Trainer) of samestep, or a compute_loss_func that divides a sum by num_items_in_batch",
        HEAD,
        causes=("factor", "ignores_num_items"),
    ),
    "SA602": Rule(
        "compute_loss that ignores the count",
        "this compute_loss does not use num_items_in_batch. Trainer leaves the division to it where the model takes **kwargs, "
        "as most heads do. Gradient and logged loss are k times too large",
        "exact(TrainerOfYours) of samestep; or a sum, divided by num_items_in_batch where it is given",
        causes=("ignores_num_items",),
    ),
    "SA701": Rule(
        "mean of batch means reported",
        "what is reported is a mean of the batches' means: another number for another batch size, unless all batches have "
        "equally many targets",
        "add up sums and counts over all batches, and divide once",
        NOTHING,
        is_harmless=True,
    ),
}


@dataclasses.dataclass(frozen=True, order=True)
class Finding:
    """A line that a rule speaks of.

    Attributes:
        path, line, column: where it is; of a notebook the line inside its cell.
        code: see `RULES`.
        detail: what of this line: the name, the number.
        condition: when it holds, in words; empty where it always does.
        cell: number of a notebook's cell, from 1; 0 in a file.
        confirm: a command that runs the program to be sure; empty where there is none.
    """

    path: str
    line: int
    column: int
    code: str
    detail: str = ""
    condition: str = ""
    cell: int = 0
    confirm: str = ""

    @property
    def rule(self) -> Rule:
        return RULES[self.code]

    @property
    def is_harmless(self) -> bool:
        """Tell whether this is no failure: by its rule, or as Trainer is often used without accumulation."""
        return self.rule.is_harmless or (self.code == "SA601" and bool(self.condition))

    @property
    def message(self) -> str:
        """Text about the line, without its cure."""
        detail = f": {self.detail}" if self.detail else ""
        condition = f" ({self.condition})" if self.condition else ""
        return f"{self.rule.symptom}{detail}{condition}"
