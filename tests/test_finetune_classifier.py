"""The classifier's program as a user meets it: what it leaves behind, what it starts from, when it stops, what it refuses."""

import csv
import json
import re
from functools import partial

import numpy as np
import pytest
import torch
from common import evaluations, metrics
from compare import same_weights, untimed_metrics
from PIL import Image
from rooms import PAGES, read_card
from safetensors.torch import load_file
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import AutoModelForSequenceClassification, BertForSequenceClassification, pipeline

from samestep.data import labelled_texts
from samestep.errors import UsageError
from samestep.models import text_classification
from samestep.recipe import run_settings as run
from samestep.recipe.catalog import load
from samestep.step import optim
from samestep.training.evaluation import find_best

LEARNING = "--global_batch_size 16 --max_train_steps 60 --learning_rate 5e-3"
SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


@pytest.fixture
def finetune(train):
    return partial(train, program="finetune_classifier")


@pytest.fixture
def learnable(tmp_path):
    """Write texts whose class is the word in them that the others lack."""
    rng = np.random.default_rng(0)
    path, words = tmp_path / "learnable.csv", ["red", "green", "blue"]
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(120):
            word = words[rng.integers(3)]
            text = ["and", "or", "the", "a", "of"] * 2
            rng.shuffle(text)
            text = text[: rng.integers(1, 10)]
            text.insert(rng.integers(len(text) + 1), word)
            rows.writerow([" ".join(text), f"is {word}"])
    return path


def test_what_a_run_leaves_behind(finetune, capsys, real_figures):
    output_dir = finetune("run", SMALL + " --eval_steps 5")
    assert {path.name for path in output_dir.iterdir()} == {
        *PAGES,
        *(
            ".lock",
            "all_results.json",
            "best",
            "checkpoint-10",
            "config.json",
            "confusion.png",
            "held_out.csv",
        ),
        *(
            "metrics.jsonl",
            "model.safetensors",
            "recipe.yaml",
            "settings.json",
            "tokenizer.json",
            "tokenizer_config.json",
        ),
    }
    names = ["step", "epoch", "loss", "learning_rate", "grad_norm", "samples", "tokens", "seconds"]
    assert list(metrics(output_dir)[0]) == names
    assert [line["step"] for line in evaluations(output_dir)] == [0, 5, 10]
    judged = ["step", "eval_loss", "eval_accuracy", "eval_f1", "eval_matthews_correlation"]
    assert list(evaluations(output_dir)[0]) == judged
    config = json.loads((output_dir / "config.json").read_text())
    assert config["id2label"] == {"0": "a", "1": "b", "2": "c"}
    card = read_card(output_dir)
    assert "![confusion](confusion.png)" in card
    assert "eval_matthews_correlation" in card
    assert Image.open(output_dir / "confusion.png").size[0] > 300
    assert "random weights" in capsys.readouterr().out


def test_the_saved_model_is_the_trained_one_and_metrics_count_every_sample_once(finetune, learnable):
    flags = f"{LEARNING} --per_device_eval_batch_size 5 --train_file {learnable}"
    output_dir = finetune("run", flags)
    recipe, _ = run.parse(["--recipe", str(output_dir / "recipe.yaml")], "text_classification", "")
    _, held_out = labelled_texts.build(recipe)
    classify = pipeline("text-classification", model=str(output_dir))
    predictions = [classify(row["text"])[0]["label"] for row in held_out.rows]
    labels, last = held_out.rows["label"][:], evaluations(output_dir)[-1]
    assert len(labels) == 12
    assert last["eval_accuracy"] == pytest.approx(accuracy_score(labels, predictions))
    assert last["eval_f1"] == pytest.approx(f1_score(labels, predictions, average="macro"))
    assert last["eval_matthews_correlation"] == pytest.approx(matthews_corrcoef(labels, predictions))
    assert last["eval_accuracy"] > 0.9, "it learns"
    model = AutoModelForSequenceClassification.from_pretrained(output_dir)
    samples = [held_out.draw(0, place) for place in range(12)]
    losses = [
        model(torch.from_numpy(sample.tokens)[None].long(), labels=torch.tensor([int(sample.label)])).loss.item()
        for sample in samples
    ]
    assert np.mean(losses) == pytest.approx(last["eval_loss"], rel=1e-5)


def test_texts_to_predict_are_labelled_at_the_end(finetune, learnable, tmp_path):
    (tmp_path / "new.jsonl").write_text('{"text": "the red"}\n{"text": "of a blue and"}\n{"text": "green"}\n')
    flags = f"{LEARNING} --train_file {learnable} --predict_file {tmp_path}/new.jsonl"
    rows = list(csv.DictReader((finetune("run", flags) / "predictions.csv").open()))
    assert [row["prediction"] for row in rows] == ["is red", "is blue", "is green"]
    assert all(0.34 < float(row["probability"]) <= 1 for row in rows)
    assert [row["text"] for row in rows] == ["the red", "of a blue and", "green"]
    for row in rows:
        shares = {f"is {name}": float(row[f"probability_is {name}"]) for name in ("red", "green", "blue")}
        assert sum(shares.values()) == pytest.approx(1, abs=1e-5)
        assert shares[row["prediction"]] == float(row["probability"]) == max(shares.values())


def test_rows_without_a_text_are_left_out_of_what_is_predicted_too(finetune, learnable, tmp_path, capsys):
    """And held-out texts are judged in a table, the wrong ones first."""
    (tmp_path / "new.jsonl").write_text('{"text": "the red"}\n{"text": ""}\n{"text": "green"}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "", "label": "is red"}\n{"text": "a red", "label": "is red"}\n')
    flags = f"{SMALL} --max_train_steps 2 --predict_file {tmp_path}/new.jsonl --train_file {learnable}"
    with pytest.raises(UsageError, match=r"new.jsonl:2: 'text' is empty.*--on_bad_row skip leaves out this row of 3"):
        finetune("refused", flags)
    output_dir = finetune("run", f"{flags} {tmp_path}/bad.jsonl --on_bad_row skip")
    assert [row["text"] for row in csv.DictReader((output_dir / "predictions.csv").open())] == ["the red", "green"]
    listed = [json.loads(line)["place"] for line in (output_dir / "skipped_rows.jsonl").read_text().splitlines()]
    assert [place.rpartition("/")[2] for place in listed] == ["bad.jsonl:1", "new.jsonl:2"]
    assert "predict_file: 3 rows read, 2 used" in capsys.readouterr().out
    judged = list(csv.DictReader((output_dir / "held_out.csv").open()))
    is_wrong = [row["prediction"] != row["label"] for row in judged]
    assert is_wrong == sorted(is_wrong, reverse=True)
    assert any(is_wrong)
    assert evaluations(output_dir)[-1]["eval_accuracy"] == pytest.approx(1 - np.mean(is_wrong))


def test_numbers_are_learned_by_their_squared_error(finetune, tmp_path):
    rows = [("a " * place, place / 10 - 1) for place in range(1, 31)]
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps({"text": t, "score": s}) + "\n" for t, s in rows))
    flags = (
        f"--train_file {tmp_path}/numbers.jsonl --metrics pearsonr spearmanr --predict_file {tmp_path}/numbers.jsonl"
    )
    output_dir = finetune("run", f"{SMALL} {flags} --max_train_steps 40 --validation_fraction 0.2 --learning_rate 5e-3")
    last = evaluations(output_dir)[-1]
    assert last["eval_pearsonr"] > 0.8
    assert last["eval_loss"] < 0.3
    assert not (output_dir / "confusion.png").exists()
    predictions = list(csv.DictReader((output_dir / "predictions.csv").open()))
    assert [row["text"] for row in predictions] == [text for text, _ in rows]
    predicted = [float(row["prediction"]) for row in predictions]
    model = BertForSequenceClassification.from_pretrained(output_dir)
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    assert np.corrcoef(predicted, [score for _, score in rows])[0, 1] > 0.8
    assert np.mean((np.array(predicted) - [score for _, score in rows]) ** 2) < 0.3


def test_it_starts_from_what_pretraining_left(finetune, train, corpus, capsys):
    shape = "--vocab_size 600 --initializer_range 0.3"
    pretrained = train("pretrained", f"{SMALL} {shape} --max_train_steps 1")
    flags = f"{SMALL} --model_name_or_path {pretrained} --max_train_steps 1 --learning_rate 1e-12"
    started = finetune("run", flags)
    assert f"weights of {pretrained}" in capsys.readouterr().out
    initial, final = (load_file(folder / "model.safetensors") for folder in (pretrained, started))
    body = [name for name in final if name.startswith("bert.")]
    assert len(body) > 20
    assert all(torch.allclose(initial[name], final[name], atol=1e-6) for name in body)
    with pytest.raises(UsageError, match=r"has num_hidden_layers 2, but 1 was given: leave --num_hidden_layers out"):
        finetune("other", f"{flags} --num_hidden_layers 1")


def test_frozen_embeddings_and_slower_layers(finetune, train):
    pretrained = train("pretrained", f"{SMALL} --max_train_steps 1")
    flags = f"{SMALL} --model_name_or_path {pretrained} --freeze_embeddings --max_train_steps 3 --weight_decay 0"
    initial, final = (load_file(folder / "model.safetensors") for folder in (pretrained, finetune("frozen", flags)))
    for name in [name for name in final if name.startswith("bert.") and "pooler" not in name]:
        is_still = "embeddings" in name or "layer.1.attention.self.key.bias" in name  # the last layer's, of gradient 0
        assert torch.equal(initial[name], final[name]) == is_still, name


def test_learning_rates_of_layers():
    recipe = load("finetune_small_cpu", {"layerwise_lr_decay": 0.5, "weight_decay": 0.1})
    model = text_classification.ClassificationSums(text_classification.build_model(recipe, ["a", "b"]))
    scales = {
        id(p): (group["lr_scale"], group["weight_decay"])
        for group in optim.from_recipe(model, recipe).param_groups
        for p in group["params"]
    }
    settings = {name: scales[id(p)] for name, p in model.named_parameters()}
    assert len(settings) == len(scales)
    expected = {
        "classifier": 1.0,
        "pooler": 1.0,
        "layer.2": 0.5,
        "layer.1": 0.25,
        "layer.0": 0.125,
        "embeddings": 0.0625,
    }
    for name, (scale, decay) in settings.items():
        assert scale == next(value for part, value in expected.items() if f"{part}." in name), name
        assert decay == (0.1 if model.get_parameter(name).ndim >= 2 else 0.0)
    flat = optim.from_recipe(model, load("finetune_small_cpu"))
    assert [group["lr_scale"] for group in flat.param_groups] == [1.0, 1.0]


def test_slower_layers_take_smaller_steps(finetune, train):
    pretrained = train("pretrained", f"{SMALL} --max_train_steps 1")
    flags = f"{SMALL} --model_name_or_path {pretrained} --max_train_steps 1 --warmup_ratio 0 --weight_decay 0"
    initial = load_file(pretrained / "model.safetensors")
    finals = [load_file(finetune(d, f"{flags} --layerwise_lr_decay {d}") / "model.safetensors") for d in ("1.0", "0.5")]
    for name, depth in (("layer.1.output.dense.weight", 1), ("layer.0.output.dense.weight", 2)):
        name = f"bert.encoder.{name}"
        usual, slow = ((weights[name] - initial[name]).norm() for weights in finals)
        assert (slow / usual).item() == pytest.approx(0.5**depth, rel=1e-3)


@pytest.mark.parametrize("more", ["", " --early_stopping_patience 1 --learning_rate 1e-9"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(finetune, more):
    flags = f"{SMALL} --eval_steps 2 --load_best_model_at_end{more}"
    whole = finetune("whole", flags)
    parts = finetune("parts", f"{flags} --stop_after_step 3")
    finetune("parts", f"{flags} --resume_from_checkpoint latest", output_dir=parts)
    assert untimed_metrics(parts) == untimed_metrics(whole)
    if not more:
        assert same_weights(parts, whole)
    first, second = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_it_ends_when_evaluations_grow_no_better(finetune, capsys):
    """A learning rate of nothing changes nothing: evaluation 0 stays the best."""
    flags = f"{SMALL} --eval_steps 2 --early_stopping_patience 2 --learning_rate 1e-12 --metric_for_best_model accuracy"
    output_dir = finetune("run", flags)
    assert [line["step"] for line in evaluations(output_dir)] == [0, 2, 4]
    assert len(metrics(output_dir)) == 4
    assert (output_dir / "model.safetensors").exists()
    assert json.loads((output_dir / "all_results.json").read_text())["steps"] == 4
    finetune("run", f"{flags} --resume_from_checkpoint latest", output_dir=output_dir)
    assert len(metrics(output_dir)) == 4, "it is over"


def test_the_best_model_is_left_when_asked_for(finetune, learnable, capsys):
    """It learns, then a schedule that goes on far too fast spoils it: the last model is not the best."""
    flags = f"--global_batch_size 16 --train_file {learnable} --max_train_steps 40 --eval_steps 5 --warmup_ratio 0.9 "
    flags += "--learning_rate 0.1 --max_grad_norm none --metric_for_best_model loss"
    last, best = finetune("last", flags), finetune("best", flags + " --load_best_model_at_end")
    step, num_worse = find_best(evaluations(best), "loss")
    assert num_worse > 0
    results = json.loads((best / "all_results.json").read_text())
    assert results["best_step"] == step
    out = capsys.readouterr().out
    assert f"(of step {step}, the saved model's; from " in out
    assert re.search(r"\n  loss +[\d.]+  \(of the last step\)\n", out)
    lines = {line["step"]: line for line in evaluations(best)}
    assert results["eval_loss"] == lines[step]["eval_loss"]
    tensors = {folder: load_file(folder / "model.safetensors") for folder in (last, last / "best", best)}
    for name, value in tensors[best].items():
        assert torch.equal(value, tensors[last / "best"][name])
    assert any(not torch.equal(value, tensors[last][name]) for name, value in tensors[best].items())


def test_the_best_evaluation():
    lines = [{"step": s, "eval_loss": a, "eval_f1": b} for s, a, b in ((0, 2.0, 0.5), (5, 1.0, 0.9), (9, 1.5, 0.9))]
    assert find_best(lines, "loss") == (5, 1)
    assert find_best(lines, "f1") == (5, 1)
    assert find_best(lines[:1], "f1") == (0, 0)
    with pytest.raises(UsageError, match=r"metric_for_best_model is 'f2': .*f1"):
        find_best(lines, "f2")


@pytest.mark.parametrize("flags", ["--metrics acuracy", "--metric_for_best_model f2"])
def test_a_mistake_deletes_no_earlier_run(finetune, flags):
    output_dir = finetune("run", f"{SMALL} --max_train_steps 1")
    text = (output_dir / "metrics.jsonl").read_text()
    with pytest.raises(UsageError):
        finetune("run", f"{SMALL} --overwrite_output_dir {flags}", output_dir=output_dir)
    assert (output_dir / "metrics.jsonl").read_text() == text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--early_stopping_patience 2",
            "early_stopping_patience compares evaluations, but there is one only: set eval_steps",
        ),
        ("--load_best_model_at_end", "load_best_model_at_end compares evaluations"),
        ("--freeze_embeddings", "freeze_embeddings is true, but model_name_or_path is not set"),
        ("--text_pair_column other", "text_pair_column is set, but text_column is not"),
        ("--layerwise_lr_decay 0", r"layerwise_lr_decay is 0.*must lie in \(0, 1\]"),
        ("--metrics acuracy", r"metrics is 'acuracy', which is not local \(did you mean accuracy"),
        ("--metric_for_best_model f2 --eval_steps 5", "metric_for_best_model is 'f2'"),
        ("--num_labels 4", r"num_labels is 4, but the training texts have 3 classes \(a, b, c\)"),
        ("--label_column kind", "has no column 'kind', only 'text', 'other', 'label'"),
        ("--recipe bert_small_cpu", "is for the task bert_pretraining, this script trains text_classification"),
        ("--predict_file nothing.csv", "data file nothing.csv: no such file"),
    ],
)
def test_a_mistake_is_one_clear_line(finetune, flags, message):
    with pytest.raises(UsageError, match=message):
        finetune("run", f"{SMALL} {flags}")


def test_the_lines_of_a_card_run_with_pairs_of_texts(finetune, tmp_path):
    rows = "".join(f"one {n},two {n},{n % 2}\n" for n in range(12))
    (tmp_path / "pairs.csv").write_text(f"sentence1,sentence2,label\n{rows}")
    flags = f"--train_file {tmp_path / 'pairs.csv'} --validation_fraction 0 --global_batch_size 4 --max_train_steps 1"
    folder = finetune("run", flags)
    (lines,) = re.findall(r"```python\n(.*?)```", read_card(folder), re.DOTALL)
    assert '{"text": "a text", "text_pair": "another"}' in lines
    classifier = pipeline("text-classification", model=str(folder))
    answer = eval(lines.splitlines()[-1], {"classifier": classifier})
    assert set(np.atleast_1d(answer)[0]) == {"label", "score"}
