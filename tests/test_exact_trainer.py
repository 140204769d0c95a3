"""`ExactTrainer`: the same weights from any cut, for the heads that it knows and for a loss of one's own."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from common import fresh_accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, TrainingArguments

from samestep import ExactTrainer
from samestep.errors import UsageError

SIZES = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NUM_SAMPLES = 11


def bert(head: str, **more):
    config = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **{"num_labels": 3} | more)
    return getattr(transformers, head)(config)


def gpt2(**more):
    config = GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    config.update(more)
    return GPT2LMHeadModel(config)


def draw(kind: str, number: int) -> dict[str, torch.Tensor]:
    ids = torch.arange(1, 4 + number * 5 % 8) * (number + 2) % 28 + 2
    labels = {
        "tokens": ids % 3,
        "words": ids.where(ids % 2 == number % 2, -100),
        "text": ids,
        "class": torch.tensor(number % 3),
        "number": torch.tensor(number / 4),
        "several": torch.arange(3) % (number % 2 + 1) * 1.0,
    }[kind]
    return {"input_ids": ids, "labels": labels, "next_sentence_label": torch.tensor(number % 2)}


def collate(samples):
    ids = pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = [sample["labels"] for sample in samples]
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    is_ragged = labels[0].ndim and not labels[0].is_floating_point()
    batch["labels"] = pad_sequence(labels, True, -100) if is_ragged else torch.stack(labels)
    if "next_sentence_label" in samples[0]:
        batch["next_sentence_label"] = torch.stack([sample["next_sentence_label"] for sample in samples])
    return batch


HEADS = {
    "causal": (gpt2, "text"),
    "masked": (lambda: bert("BertForMaskedLM"), "words"),
    "two terms": (lambda: bert("BertForPreTraining"), "words"),
    "tokens": (lambda: bert("BertForTokenClassification"), "tokens"),
    "classes": (lambda: bert("BertForSequenceClassification"), "class"),
    "regression": (lambda: bert("BertForSequenceClassification", num_labels=1), "number"),
    "several classes": (
        lambda: bert("BertForSequenceClassification", problem_type="multi_label_classification"),
        "several",
    ),
}


@pytest.fixture
def train(tmp_path):
    """Train one epoch: train(model, kind, b, k) -> trainer."""

    def run(model, kind: str, b: int, k: int, **more) -> ExactTrainer:
        fresh_accelerator()
        options = {name: more.pop(name) for name in ("label_smoothing_factor",) if name in more}
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=b,
            gradient_accumulation_steps=k,
            num_train_epochs=1,
            learning_rate=0.1,
            optim="sgd",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            **options,
        )
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

    class TwiceTheLoss(GPT2LMHeadModel):
        def forward(self, input_ids=None, attention_mask=None, labels=None):
            outputs = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
            outputs.loss = None if outputs.loss is None else 2 * outputs.loss
            return outputs

    refused("BertForMultipleChoice", "loss=...", model=bert("BertForMultipleChoice"))
    refused("loss returned a mean (NllLoss", "reduction", loss=mean, targets=lambda batch: len(batch["labels"]))
    refused("train_dataset is a Stream", "exact_windows", train_dataset=Stream())
    refused("compute_loss_func", "loss=...", compute_loss_func=lambda *_: None)
    refused("label_smoothing_factor is 0.1", loss=mean, label_smoothing_factor=0.1)
    refused("TwiceTheLoss", "other terms", model=TwiceTheLoss(gpt2().config), kind="text")
    refused("must have labels and next_sentence_label", model=bert("BertForPreTraining"), data_collator=drop_pair_label)
    refused("loss returned Tensor", "(sums, number of targets)", loss=lambda m, b: m(**b).loss, targets=len)


def drop_pair_label(samples):
    batch = collate(samples)
    del batch["next_sentence_label"]
    return batch | {"labels": batch["input_ids"]}
