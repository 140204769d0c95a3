"""`ExactTrainer`: the same weights from any cut, for the heads that it knows and for a loss of one's own."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from common import fresh_accelerator
from run_own_trainer import HEADS, NUM_SAMPLES, Gradients, bert, collate, draw, evaluations, gpt2, make_arguments
from torch.utils.data import IterableDataset
from transformers import GPT2LMHeadModel, TrainingArguments

from samestep import ExactTrainer
from samestep.errors import UsageError
from samestep.training import trainer_settings


@pytest.fixture
def train(tmp_path):
    """Train one epoch: train(model, kind, b, k) -> trainer."""

    def run(model, kind: str, b: int, k: int, **more) -> ExactTrainer:
        fresh_accelerator()
        names = {field.name for field in dataclasses.fields(TrainingArguments)}
        options = {name: more.pop(name) for name in names & set(more)}
        arguments = make_arguments(tmp_path, per_device_train_batch_size=b, gradient_accumulation_steps=k, **options)
        data = [draw(kind, number) for number in range(NUM_SAMPLES)]
        trainer = ExactTrainer(model, arguments, **{"data_collator": collate, "train_dataset": data} | more)
        trainer.train()
        return trainer

    yield run
    fresh_accelerator()


def weights(trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def losses(trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("head", HEADS)
def test_every_cut_gives_the_same_weights(train, head):
    """11 samples in steps of 4: the last one has 3. And the loss that is logged is the step's."""
    build, kind = HEADS[head]
    trainers = []
    for b, k in ((4, 1), (1, 4), (3, 1)):
        torch.manual_seed(0)
        trainers.append(train(build(), kind, b, k))
    assert torch.allclose(weights(trainers[0]), weights(trainers[1]), atol=2e-6)
    assert losses(trainers[0]) == pytest.approx(losses(trainers[1]), rel=1e-3)
    assert not torch.allclose(weights(trainers[0]), weights(trainers[2]), atol=1e-4)


def test_the_loss_is_the_models_own(train):
    """On a step of one batch, without ragged targets: what Trainer would have done."""
    torch.manual_seed(0)
    model = bert("BertForPreTraining")
    batch = collate([draw("words", number) for number in range(NUM_SAMPLES)])
    loss = model(**batch).loss.item()
    assert losses(train(model, "words", NUM_SAMPLES, 1)) == pytest.approx([loss], rel=1e-3)
    torch.manual_seed(0)
    smooth = train(bert("BertForTokenClassification"), "tokens", NUM_SAMPLES, 1, label_smoothing_factor=0.2)
    torch.manual_seed(0)
    model = bert("BertForTokenClassification").train()
    batch = collate([draw("tokens", number) for number in range(NUM_SAMPLES)])
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.2)
    assert losses(smooth) == pytest.approx([expected.item()], rel=1e-3)


def test_a_loss_of_ones_own(train):
    """With and without targets; its weights count."""

    def loss(model, batch):
        logits = model(batch["input_ids"], batch["attention_mask"]).logits
        word = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        size = (logits.square() * batch["attention_mask"][..., None]).sum()
        return torch.stack([word, size]), targets(batch)

    def targets(batch):
        return torch.stack([(batch["labels"] != -100).sum(), torch.tensor(len(batch["labels"]))])

    trainers = []
    for b, k, count in ((4, 1, targets), (2, 2, None), (2, 2, targets)):
        torch.manual_seed(0)
        more = {"loss": loss, "targets": count, "loss_weights": [1.0, 0.01], "eval_dataset": [draw("tokens", 3)]}
        trainers.append(train(bert("BertForTokenClassification"), "tokens", b, k, **more))
    assert torch.equal(weights(trainers[1]), weights(trainers[2]))
    assert torch.allclose(weights(trainers[0]), weights(trainers[1]), atol=2e-6)
    evaluated = trainers[2].evaluate()
    model, batch = trainers[2].model.eval(), collate([draw("tokens", 3)])
    sums, counts = loss(model, batch)
    assert evaluated["eval_loss"] == pytest.approx((sums / counts * torch.tensor([1, 0.01])).sum().item(), rel=1e-4)


def test_what_is_refused(train):
    def refused(*parts: str, model=None, kind="class", **more):
        with pytest.raises(UsageError) as caught:
            train(model or bert("BertForSequenceClassification"), kind, 2, 2, **more)
        assert all(part in str(caught.value) for part in parts), caught.value

    def mean(model, batch):
        outputs = model(**batch)
        return outputs.loss, len(batch["labels"])

    class Stream(IterableDataset):
        def __len__(self):
            return 8

        def __iter__(self):
            return iter([])

    refused("loss returned a mean (NllLoss", "reduction", loss=mean, targets=lambda batch: len(batch["labels"]))
    refused("train_dataset is a Stream", "exact_windows", train_dataset=Stream())
    refused("compute_loss_func", "loss=...", compute_loss_func=lambda *_: None)
    refused("label_smoothing_factor is 0.1", loss=mean, label_smoothing_factor=0.1)
    refused("must have labels and next_sentence_label", model=bert("BertForPreTraining"), data_collator=drop_pair_label)
    refused("loss returned Tensor", "(sums, number of targets)", loss=lambda m, b: m(**b).loss, targets=len)


class TwiceTheLoss(GPT2LMHeadModel):
    def forward(self, input_ids=None, attention_mask=None, labels=None):
        outputs = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        outputs.loss = None if outputs.loss is None else 2 * outputs.loss
        return outputs


def test_a_head_with_another_loss_than_its_kind_is_measured(train):
    """Twice the loss of a causal language model."""
    trainers = []
    for b, k in ((4, 1), (1, 4)):
        torch.manual_seed(0)
        trainers.append(train(TwiceTheLoss(gpt2().config), "text", b, k))
    assert torch.allclose(weights(trainers[0]), weights(trainers[1]), atol=2e-6)
    assert losses(trainers[0]) == pytest.approx(losses(trainers[1]), rel=1e-3)
    torch.manual_seed(0)
    plain = train(GPT2LMHeadModel(gpt2().config), "text", 4, 1)
    assert losses(trainers[0])[0] == pytest.approx(2 * losses(plain)[0], rel=1e-5)


def test_a_model_that_sees_padding_is_refused(train):
    """Unless all samples have one length."""

    def without_mask(samples):
        batch = collate(samples)
        del batch["attention_mask"]
        return batch

    with pytest.raises(
        UsageError, match="BertForSequenceClassification depends on which samples are in a batch: of 2 together"
    ):
        train(bert("BertForSequenceClassification"), "class", 2, 2, data_collator=without_mask)
    padded = [draw("class", 1)] * 8
    train(bert("BertForSequenceClassification"), "class", 2, 2, data_collator=without_mask, train_dataset=padded)


def drop_pair_label(samples):
    batch = collate(samples)
    del batch["next_sentence_label"]
    return batch | {"labels": batch["input_ids"]}


# ---------------------------------------------------------------------------------------------------------------------
# Settings


def test_every_setting_is_classified_once():
    """A field of a newer transformers fails here: try it, and put it where it belongs."""
    tables = [names.split() for names in trainer_settings.NO_EFFECT.values()]
    tables += [list(trainer_settings.HANDLED), list(trainer_settings.REFUSED)]
    classified = [name for names in tables for name in names]
    assert len(classified) == len(set(classified))
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= set(classified)


REFUSED = {
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "dataloader_drop_last": True,
    "train_sampling_strategy": "group_by_length",
    "optim": "galore_adamw_layerwise",
    "accelerator_config": {"dispatch_batches": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_change_the_step_are_refused(train, name):
    with pytest.raises(UsageError) as caught:
        train(gpt2(), "text", 2, 2, **{name: REFUSED[name]})
    (problem,) = str(caught.value).splitlines()
    assert problem.startswith(f"{name} is ")


def test_other_values_that_are_refused(tmp_path):
    def problem(**more):
        return trainer_settings.find_setting_problems(make_arguments(tmp_path, **more))

    assert problem() == problem(neftune_noise_alpha=0.0) == problem(train_sampling_strategy="random") == []
    assert "repeats" in problem(train_sampling_strategy="batch_rebalance")[0]
    assert [problem(optim=name)[0].split(",")[0] for name in ("lomo", "adalomo")] == [
        "optim is lomo",
        "optim is adalomo",
    ]
    for name, value in (("split_batches", True), ("use_seedable_sampler", False)):
        assert name in problem(accelerator_config={name: value})[0]
    arguments = make_arguments(tmp_path)
    arguments.use_liger_kernel = True  # TrainingArguments asks for its package
    assert "no logits" in trainer_settings.find_setting_problems(arguments)[0]
    assert len(problem(dataloader_drop_last=True, auto_find_batch_size=True)) == 2


def test_a_setting_of_a_newer_transformers_is_refused(tmp_path):
    """But where it has its default."""
    arguments = make_arguments(tmp_path, warmup_steps=3)
    problems = trainer_settings.find_setting_problems(arguments, trainer_settings.REFUSED)
    assert any(line.startswith("warmup_steps is 3, a setting that ExactTrainer does not know") for line in problems)
    assert not any(line.startswith(("eval_delay", "include_for_metrics")) for line in problems)


TRIED = {
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "use_cache": {"use_cache": True},
    "label smoothing": {"label_smoothing_factor": 0.2},
    "clipping": {"max_grad_norm": 0.01},
    "tokens": {"average_tokens_across_devices": False},
    "workers": {"dataloader_num_workers": 1},
    "memory": {"torch_empty_cache_steps": 1},
    "synchronised": {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
    "not even": {"accelerator_config": {"even_batches": False}},
    "random": {"train_sampling_strategy": "random", "data_seed": 3},
    "fused": {"optim": "adamw_torch_fused"},
    "eval": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 1, "eval_dataset": [draw("text", 3)]},
    "seen": {"include_num_input_tokens_seen": "all"},
}
if "activation_checkpointing" in {field.name for field in dataclasses.fields(TrainingArguments)}:
    TRIED["activation_checkpointing"] = {"activation_checkpointing": True}


@pytest.mark.parametrize("name", TRIED)
def test_settings_without_effect_have_none(train, name):
    """The gradients of both steps, of 8 and of 3 samples, for the cuts 1 x 8 and 2 x 4."""
    found = []
    for b, k in ((8, 1), (1, 8), (2, 4)):
        torch.manual_seed(0)
        gradients = Gradients()
        train(gpt2(), "text", b, k, callbacks=[gradients], **copy.deepcopy(TRIED[name]))
        found.append(gradients.all)
        assert len(gradients.all) == 2
    for step in range(2):
        for other in found[1:]:
            assert torch.dist(other[step], found[0][step]) <= 1e-6 * found[0][step].norm(), step


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path, head):
    losses = evaluations(tmp_path, head, (1, 2, 3, 8, 11))
    fresh_accelerator()
    assert losses == pytest.approx(losses[-1:] * len(losses), rel=2e-6)


@pytest.mark.distributed
def test_several_processes_train_and_evaluate_alike(run_processes):
    """With samples that do not come out even, which accelerate repeats."""
    (alone,), both = run_processes("run_own_trainer", 1), run_processes("run_own_trainer", 2)
    for process in both:
        for name, value in alone.items():
            bound = 2e-6 * value.norm()
            assert torch.dist(process[name], value) <= bound, name
