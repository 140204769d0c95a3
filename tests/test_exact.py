"""`exact(TrainerClass)`: what its own loss divides by is measured, and every cut takes the step of one large batch."""

import copy
import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
import trl_runs
from cases import keep
from common import fresh_accelerator
from run_own_trainer import Gradients, bert, make_arguments
from torch import nn
from transformers import Trainer

from samestep import ExactTrainer, exact
from samestep.errors import UsageError
from samestep.training import measured_loss
from samestep.training.loss_terms import Means
from samestep.training.measured_loss import count_things

CASES = trl_runs.make_cases()
EXACT = [name for name in CASES if name not in trl_runs.REFUSED]


@pytest.fixture(autouse=True)
def other_accelerators(monkeypatch):
    monkeypatch.setenv("CI", "1")  # trl tells nobody
    yield
    fresh_accelerator()


@pytest.fixture
def train(tmp_path):
    """Train one epoch by a trainer of TRL: train(case, b, k) -> trainer."""

    def run(name: str, b: int, k: int, *, resume: bool = False, **more):
        fresh_accelerator()
        trainer = trl_runs.make_trainer(name, tmp_path, b, k, **more)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    return run


def check(ours, true, bound: float = 2e-6) -> None:
    for step, (gradient, other) in enumerate(zip(ours.gradients.all, true.gradients.all, strict=True)):
        assert torch.dist(gradient, other) <= bound * other.norm(), step
    losses = [[line["loss"] for line in trainer.state.log_history if "loss" in line] for trainer in (ours, true)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", keep(EXACT, ["sft of texts", "sft without padding", "reward", "apo", "dpo and sft"]))
def test_every_cut_is_the_step_of_one_large_batch(train, name):
    """Of the trainer itself, in one micro-batch: steps of 4 samples, the last one of 3."""
    whole = train(name, 4, 1, is_exact=False)
    for b, k in ((2, 2), (1, 4)) if CASES[name][2] != "judged" else ((2, 2),):  # KTO's trainer wants two samples
        check(train(name, b, k), whole)
    assert torch.equal(torch.cat(train(name, 4, 1).gradients.all), torch.cat(whole.gradients.all)), (
        "nothing is left behind"
    )


def test_the_plain_trainer_fails_the_same_check(train):
    """Its last step, of 3 samples in micro-batches of 2 and 1, is a mean of means."""
    with pytest.raises(AssertionError):
        check(train("dpo", 2, 2, is_exact=False), train("dpo", 4, 1, is_exact=False))


@pytest.mark.parametrize("name", trl_runs.REFUSED)
def test_a_loss_that_is_no_sum_is_refused_before_the_first_step(train, name):
    """KTO's mean divergence and sorted differences are of a batch."""
    with pytest.raises(UsageError) as caught:
        train(name, 2, 2)
    assert f"the loss of {CASES[name][0].__name__} is not that of its samples" in str(caught.value)


def test_adapters_and_resumed_runs(train):
    """Adapters begin as nothing, so that the model is its own reference; two steps in one cut, two in another."""
    from peft import LoraConfig

    more = {"peft_config": LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"]), "num_samples": 15}
    whole = train("dpo", 4, 1, is_exact=False, **copy.deepcopy(more))
    saved = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    train("dpo", 2, 2, **copy.deepcopy(more), **saved, max_steps=2)
    resumed = train("dpo", 1, 4, resume=True, **copy.deepcopy(more), **saved)
    for gradient, other in zip(resumed.gradients.all, whole.gradients.all[2:], strict=True):
        assert torch.dist(gradient, other) <= 1e-5 * other.norm()


@pytest.mark.parametrize("how", [{"dtype": torch.bfloat16}, {"dtype": torch.float32, "bf16": True}])
def test_16_bits_hide_nothing(tmp_path, how):
    """Losses are asked in float32, where a term of 1 % is found; weights and autocast are what they were."""
    trainer = trl_runs.make_trainer("dpo", tmp_path, 2, 2, **how)
    kept = [parameter.clone() for parameter in trainer.model.parameters()]
    forward = trainer.model.forward
    trainer._measure(trainer.get_train_dataloader())
    assert trainer.loss_divisor.startswith("rows of")
    assert trainer.model.forward == forward
    for old, new in zip(kept, trainer.model.parameters(), strict=True):
        assert new.dtype == how["dtype"]
        assert torch.equal(old, new)
    fresh_accelerator()
    trainer = trl_runs.make_trainer("dpo and sft", tmp_path, 2, 2, loss_weights=[1.0, 0.01], **how)
    trainer._measure(trainer.get_train_dataloader())
    assert trainer.loss_divisor.count(";") == 1
    fresh_accelerator()
    with pytest.raises(UsageError, match="is not that of its samples"):
        trl_runs.make_trainer("aot", tmp_path, 2, 2, **how).train()


@pytest.mark.parametrize("name", keep(["sft", "dpo", "orpo"], ["orpo"]))
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path, name):
    losses = []
    for size in (1, 3, 11):
        fresh_accelerator()
        losses.append(
            trl_runs.make_trainer(name, tmp_path, 2, 2, per_device_eval_batch_size=size).evaluate()["eval_loss"]
        )
    assert losses == pytest.approx([losses[0]] * 3, rel=2e-6)


@pytest.mark.distributed
def test_processes_take_the_same_steps(run_processes):
    """Steps of 6 samples, the last one of 1 or 3: on 3 processes of which two have none, or all. And sharded."""
    (alone,) = run_processes("trl_runs", 1)
    for process in run_processes("trl_runs", 3):
        for name, gradients in alone.items():
            assert torch.dist(process[name], gradients) <= 2e-6 * gradients.norm(), name


# ---------------------------------------------------------------------------------------------------------------------
# Trainers and heads of transformers


class Questions(torch.utils.data.Dataset):
    """Places in texts of different lengths."""

    def __len__(self):
        return 11

    def __getitem__(self, number):
        ids = torch.arange(2, 6 + number % 4)
        ids = nn.functional.pad(ids, (0, 12 - len(ids)))
        places = {"start_positions": torch.tensor(number % 3), "end_positions": torch.tensor(1 + number % 3)}
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), **places}


class Choices(Questions):
    """Two texts, of which one is right."""

    def __getitem__(self, number):
        sample = super().__getitem__(number)
        pair = {name: torch.stack([sample[name], sample[name].flip(0)]) for name in ("input_ids", "attention_mask")}
        return pair | {"labels": torch.tensor(number % 2)}


class TwiceTheLoss(Trainer):
    """A trainer with a loss of its own, which notes what it does."""

    _noted: tuple = ()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        self._noted = [*self._noted, len(labels)]
        loss = 2 * nn.functional.cross_entropy(logits, labels)
        return (loss, {"logits": logits}) if return_outputs else loss


HEADS = {
    "questions": (Trainer, lambda: bert("BertForQuestionAnswering", num_labels=2), Questions()),
    "choices": (transformers.Seq2SeqTrainer, lambda: bert("BertForMultipleChoice"), Choices()),
    "own loss": (TwiceTheLoss, lambda: bert("BertForMultipleChoice"), Choices()),
}


def train_head(folder, made, build, data, b: int, k: int, **more):
    fresh_accelerator()
    torch.manual_seed(0)
    gradients = Gradients()
    arguments = make_arguments(folder, per_device_train_batch_size=b, gradient_accumulation_steps=k)
    if issubclass(made, transformers.Seq2SeqTrainer):
        fields = {field.name for field in dataclasses.fields(arguments) if field.init}
        given = {name: value for name, value in vars(arguments).items() if name in fields and value is not None}
        arguments = transformers.Seq2SeqTrainingArguments(**given)
    trainer = made(build().double(), arguments, train_dataset=data, callbacks=[gradients], **more)
    trainer.gradients = gradients
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_losses_that_nobody_told_it_of(tmp_path, name):
    made, build, data = HEADS[name]
    whole = train_head(tmp_path, made, build, data, 4, 1)
    ours = train_head(tmp_path, exact(made), build, data, 2, 2)
    check(ours, whole)
    with pytest.raises(AssertionError):
        check(train_head(tmp_path, made, build, data, 2, 2), whole)
    if made is TwiceTheLoss:
        assert ours._noted == [2, 2, 2, 2, 2, 1], "what it notes while it is measured is forgotten"


class SumOfLosses(TwiceTheLoss):
    """A trainer whose loss is a sum: divided by nothing."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        size = len(inputs["labels"])
        loss = super().compute_loss(model, inputs, return_outputs)
        return (loss[0] * size, loss[1]) if return_outputs else loss * size


def test_a_loss_that_is_a_sum(tmp_path):
    def train(made, b, k):
        return train_head(tmp_path, made, lambda: bert("BertForMultipleChoice"), Choices(), b, k)

    whole = train(SumOfLosses, 4, 1)
    ours = [train(exact(SumOfLosses), *cut) for cut in ((2, 2), (1, 4))]
    assert ours[0].loss_divisor == "1"
    for trainer in ours:
        check(trainer, whole)
    losses = []
    for size in (2, 11):
        fresh_accelerator()
        arguments = make_arguments(tmp_path, per_device_eval_batch_size=size)
        torch.manual_seed(0)
        model = bert("BertForMultipleChoice").double()
        losses.append(exact(SumOfLosses)(model, arguments, eval_dataset=Choices()).evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_an_evaluation_with_metrics(tmp_path):
    """Of a measured loss: predictions come with it, and the loss is the mean over all samples."""
    evaluated = []
    for size in (2, 11):
        fresh_accelerator()
        torch.manual_seed(0)
        trainer = exact(Trainer)(
            bert("BertForMultipleChoice").double(),
            make_arguments(tmp_path, per_device_eval_batch_size=size),
            eval_dataset=Choices(),
            compute_metrics=lambda given: {"accuracy": (given.predictions.argmax(1) == given.label_ids).mean()},
        )
        evaluated.append(trainer.evaluate())
    assert evaluated[0]["eval_loss"] == pytest.approx(evaluated[1]["eval_loss"], rel=1e-9)
    assert evaluated[0]["eval_accuracy"] == evaluated[1]["eval_accuracy"]


def test_one_class_for_each_trainer():
    assert exact(Trainer) is ExactTrainer is exact(ExactTrainer)
    assert exact(TwiceTheLoss) is exact(TwiceTheLoss)
    assert exact(TwiceTheLoss).__name__ == "ExactTwiceTheLoss"
    assert issubclass(exact(TwiceTheLoss), TwiceTheLoss)


def test_what_cannot_be_made_exact():
    import trl

    for other in (nn.Linear, "Trainer"):
        with pytest.raises(UsageError, match=r"must be a class that inherits from transformers\.Trainer"):
            exact(other)
    with pytest.raises(UsageError, match="GRPOTrainer has its own _prepare_inputs, get_train_dataloader"):
        exact(trl.GRPOTrainer)


def test_a_trainer_of_an_older_trl_is_refused(monkeypatch):
    """Also one that inherits from it."""
    import trl

    class Mine(trl.SFTTrainer):
        pass

    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.11.0"))
    message = r"^exact\(Mine\) needs trl 1\.12 or newer, 1\.11\.0 is installed: pip install 'trl>=1\.12'$"
    with pytest.raises(UsageError, match=message):
        exact(Mine)
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.12.0"))
    assert issubclass(exact(Mine), Mine)


def test_what_is_refused_in_the_first_step(tmp_path):
    class OtherStep(TwiceTheLoss):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = TwiceTheLoss.compute_loss(self, model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()

    class Changed(TwiceTheLoss):
        def training_step(self, model, inputs, num_items_in_batch=None):
            inputs["labels"] = 1 - inputs["labels"]
            return super().training_step(model, inputs, num_items_in_batch)

    class Divided(TwiceTheLoss):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs) / self.args.gradient_accumulation_steps

    class Contrast(TwiceTheLoss):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            scores = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            return nn.functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))

    class Noise(TwiceTheLoss):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * torch.rand(())

    class Strict(TwiceTheLoss):
        def compute_loss(self, model, *args, **kwargs):
            if not model.training:
                raise RuntimeError("it only trains.")
            return super().compute_loss(model, *args, **kwargs)

    def normalised():
        model = bert("BertForMultipleChoice")
        model.classifier = nn.Sequential(nn.BatchNorm1d(16), model.classifier)
        return model

    class Ignored(Choices):
        def __getitem__(self, number):
            return super().__getitem__(number) | {"labels": torch.tensor(-100)}

    build = HEADS["choices"][1]
    with pytest.raises(UsageError, match="its gradient, is not finite on 3 samples together: do labels miss"):
        train_head(tmp_path, exact(TwiceTheLoss), build, Ignored(), 2, 2)
    with pytest.raises(UsageError, match="data_collator returned a list, must return a mapping"):
        train_head(tmp_path, exact(TwiceTheLoss), build, Choices(), 2, 2, data_collator=list)
    for made, model, message in (
        (OtherStep, build, "training_step of OtherStep asked compute_loss 0 times"),
        (Changed, build, "training_step of Changed changed labels of the batch that was read"),
        (Divided, build, r"training_step of Divided made \S+ of a loss of \S+, must leave it"),
        (Contrast, build, "the loss of Contrast is not that of its samples"),
        (Noise, build, "the loss of Noise draws at random"),
        (
            Strict,
            build,
            "in evaluation mode, and raised RuntimeError: it only trains. If it trains with them, give loss=",
        ),
        (TwiceTheLoss, normalised, "classifier.0 and 0 more of the model's modules normalise by the samples"),
    ):
        with pytest.raises(UsageError, match=message):
            train_head(tmp_path, exact(made), model, Choices(), 2, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The measurement


def test_things_that_are_counted():
    labels = torch.tensor([[5, 6, -100], [7, -100, -100]])
    batch = {
        "labels": labels,
        "attention_mask": (labels != -100).long(),
        "pixels": torch.ones(2, 3),
        "names": ["a", "b"],
    }
    batch["position_ids"] = torch.tensor([[0, 1, 0, 1, 2]])
    assert count_things(batch) == {
        "1": 1,
        "rows of labels": 2,
        "labels but -100": 3,
        "labels but -100, behind the first of a row": 1,
        "labels but -100, behind the first of a row, in the first half of the rows": 1,
        "labels but -100, behind the first of a row, in the second half of the rows": 0,
        "rows of attention_mask": 2,
        "ones of attention_mask": 3,
        "ones of attention_mask, behind the first of a row": 1,
        "ones of attention_mask, behind the first of a row, in the first half of the rows": 1,
        "ones of attention_mask, behind the first of a row, in the second half of the rows": 0,
        "rows of pixels": 2,
        "rows of position_ids": 1,
        "beginnings of position_ids": 2,
        "position_ids without beginnings": 3,
    }


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def forward(self, batch):
        return (batch["x"] @ self.weight).square()


def draw_rows(num_samples: int, num_ignored: int = 0):
    return [
        {
            "x": torch.tensor([n + 1.0, n % 3], dtype=torch.float64),
            "labels": torch.tensor(-100 if n < num_ignored else 1),
        }
        for n in range(num_samples)
    ]


def collate_rows(samples):
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def measure(ask, data, collate=collate_rows, model=None):
    model = model or Bias()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        return measured_loss.Measurement(
            lambda batch: ask(model, batch), collate, "It", watched=measured_loss.choose_small(model)
        ).find_divisor(data)
    finally:
        assert all(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))


def mean_of_counted(model, batch):
    rows, counts = model(batch), batch["labels"] != -100
    return (rows * counts).sum() / counts.sum()


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda model, batch: model(batch).sum(), "1"),
        (lambda model, batch: 3 * model(batch).mean(), "rows of labels"),
        (mean_of_counted, "labels but -100"),
    ],
)
def test_what_a_loss_divides_by(ask, name):
    divisor = measure(ask, draw_rows(9, num_ignored=4))
    assert divisor.name == name
    assert divisor.count(collate_rows(draw_rows(5, num_ignored=2))).tolist() == [
        {"1": 1, "rows of labels": 5}.get(name, 3)
    ]


def test_a_parameter_that_some_samples_leave_out():
    """As an expert that none of the tokens of a batch went to: it has no gradient there."""

    class Experts(Bias):
        def __init__(self):
            super().__init__()
            self.other = nn.Parameter(torch.tensor([0.5, 0.1, 0.2], dtype=torch.float64))

        def forward(self, batch):
            rows = super().forward(batch)
            takes = batch["x"][:, 0] > 5
            return rows + takes * (batch["x"][:, 0] * self.other.sum()) if takes.any() else rows

    assert measure(lambda model, batch: model(batch).mean(), draw_rows(9, 4), model=Experts()).name == "rows of labels"


def test_numbers_that_part_later_are_said():
    """Labels are counted, until one is ignored: then it is not known whether rows were meant."""
    divisor = measure(lambda model, batch: model(batch).mean(), draw_rows(9))
    assert divisor.count(collate_rows(draw_rows(4))).tolist() == [4]
    with pytest.raises(UsageError, match="a mean over labels but -100 or over rows of"):
        divisor.count(collate_rows(draw_rows(4, num_ignored=1)))


def test_a_gradient_that_the_value_does_not_show():
    """A term that is 0 and compares samples, as x - x.detach() is."""

    def ask(model, batch):
        rows = model(batch)
        return (
            rows.mean()
            + (rows - rows.detach()).square().mean()
            + (rows.std(correction=0) - rows.std(correction=0).detach())
        )

    with pytest.raises(UsageError, match="is not that of its samples"):
        measure(ask, draw_rows(9))


def test_a_mean_that_is_weighted_says_what_to_give():
    """As weights of classes do: it divides by a sum of weights, which no batch says."""

    def ask(model, batch):
        weights = 1.0 + 3.0 * (batch["x"][:, 1] > 0)
        return (model(batch) * weights).sum() / weights.sum()

    with pytest.raises(UsageError, match="or weights its classes: give loss= and targets= "):
        measure(ask, draw_rows(9))


def test_a_divergence_that_is_clamped():
    """Nothing where the model is its own reference, and on one side of it."""
    start = Bias().weight.detach().clone()

    def ask(model, batch):
        divergence = (batch["x"] @ (model.weight - start)).mean().clamp(min=0)
        return (model(batch) + divergence.detach()).square().mean()

    with pytest.raises(UsageError, match="is not that of its samples"):
        measure(ask, draw_rows(9))


def test_terms_with_numbers_of_their_own():
    """A mean over rows and twice one over labels, whose mean over rows is taken again, beside a mean that is only logged."""

    def ask(model, batch):
        rows, counts = model(batch), batch["labels"] != -100
        rows.sqrt().mean()
        term = rows[counts].mean()
        return nn.functional.mse_loss(rows, rows.detach() + 1) + 2 * term.expand(len(rows)).mean()

    def apart(model, batch):  # each sum by hand
        rows, counts = model(batch), batch["labels"] != -100
        return torch.stack([(rows - rows.detach() - 1).square().sum(), 2 * (rows * counts).sum()])

    data = draw_rows(9, num_ignored=1)
    terms = measure(ask, data)
    assert sorted(terms.name.split("; ")) == ["labels but -100", "rows of labels"]
    model, batch = Bias(), collate_rows(data[:4])
    counts = terms.count(batch)
    assert sorted(counts.tolist()) == [3, 4]
    sums = terms.take_sums(lambda: ask(model, batch), counts)
    order = [0, 1] if counts[0] == 4 else [1, 0]
    torch.testing.assert_close(sums[order], apart(model, batch))
    with pytest.raises(UsageError, match="had a term in line"):
        terms.take_sums(lambda: model(batch).sum(), counts)


def test_means_that_are_noted():
    from torch.nn import functional as F

    logits = torch.randn(4, 5, requires_grad=True)
    labels = torch.tensor([1, -100, 2, 3])
    with Means() as noted:
        F.cross_entropy(logits, labels)
        nn.CrossEntropyLoss(ignore_index=2)(logits, labels.clamp(min=0))
        F.cross_entropy(logits, logits.softmax(1).detach())
        F.mse_loss(logits, logits.detach())
        logits.mean(), torch.mean(logits[0])
        logits.mean(1), logits.sum(), F.cross_entropy(logits, labels, reduction="sum")  # of no interest, as the next
        F.cross_entropy(logits, labels, weight=torch.ones(5))
    assert [mean.count for mean in noted.found.values()] == [3, 3, 4, 20, 20, 5]


def test_collators_that_draw():
    """Rows of one batch are asked about; a batch that has no row for each sample is refused."""

    def noisy(samples):
        return collate_rows(samples) | {"noise": torch.rand(len(samples), dtype=torch.float64)}

    def ask(model, batch):
        return (model(batch) * batch["noise"]).mean()

    assert measure(ask, draw_rows(9), noisy).name == "labels but -100"
    with pytest.raises(UsageError, match="the data collator of It draws at random, and has no row"):
        measure(ask, draw_rows(9), lambda samples: noisy(samples) | {"one": torch.rand(1)})


def test_a_loss_of_padded_positions_is_explained():
    """As a softmax over the places of an answer is."""

    def collate(samples):
        width = max(len(sample["x"]) for sample in samples)
        return {"x": torch.stack([nn.functional.pad(sample["x"], (0, width - len(sample["x"]))) for sample in samples])}

    def ask(model, batch):
        return (batch["x"] * model.weight[0] + model.weight[1]).logsumexp(1).mean()

    data = [{"x": torch.arange(1.0, 2 + number % 4, dtype=torch.float64)} for number in range(9)]
    with pytest.raises(UsageError, match=r"Padded alike it is: it depends on the padding"):
        measure(ask, data, collate)


def test_few_samples():
    with pytest.raises(UsageError, match="the dataset has 2 samples, must have 3"):
        measure(mean_of_counted, draw_rows(2))
