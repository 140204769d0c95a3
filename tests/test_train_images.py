"""The programs of images as a user meets them: what they leave behind, what they refuse, how they go on."""

import csv
import json
import re
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from cases import thorough
from common import all_metrics, evaluations, fresh_accelerator, metrics
from compare import same_weights, untimed_metrics
from PIL import Image
from rooms import PAGES, read_card
from transformers import AutoImageProcessor, AutoModelForImageClassification

from samestep.data import captchas, images
from samestep.errors import UsageError
from samestep.models.networks import CaptchaReader, GroupNorm
from samestep.recipe.catalog import load

PROGRAMS = ["train_image_classifier", "train_captcha"]
SMALL = "--global_batch_size 8 --per_device_train_batch_size 4"


@pytest.fixture
def classify(train):
    return partial(train, program="train_image_classifier")


@pytest.fixture
def read(train):
    return partial(train, program="train_captcha")


@pytest.fixture
def folder(tmp_path):
    """Write two classes of eight images of different sizes: dark and bright."""
    rng = np.random.default_rng(0)
    for number in range(16):
        path = tmp_path / "images" / ("bright" if number % 2 else "dark") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(128, size=(20 + number, 30 - number, 3)) + 127 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "images"


def folder_flags(folder) -> str:
    return (
        f"--global_batch_size 4 --train_dir {folder} --num_labels 2 --num_channels 3 --image_mean 0 0 0 --image_std 1 1 1 "
        "--num_train_samples 12 --validation_fraction 0.25"
    )


def test_what_a_run_leaves_behind(classify, capsys, real_figures):
    output_dir = classify("run", SMALL + " --eval_steps 5")
    assert {path.name for path in output_dir.iterdir()} == {
        *PAGES,
        *(".lock", "all_results.json", "checkpoint-10", "config.json", "metrics.jsonl"),
        *(
            "held_out.csv",
            "model.safetensors",
            "predictions.png",
            "preprocessor_config.json",
            "recipe.yaml",
            "resnet.py",
            "settings.json",
        ),
    }
    names = ["step", "epoch", "loss", "learning_rate", "grad_norm", "samples", "seconds"]
    assert list(metrics(output_dir)[0]) == names
    results = json.loads((output_dir / "all_results.json").read_text())
    assert results["images_per_second"] > 0
    assert results["peak_memory_gb"] > 0.1
    assert [line["step"] for line in evaluations(output_dir)] == [0, 5, 10]
    output = capsys.readouterr()
    assert "1,438 images of 10 classes; random weights; global batch 8" in output.out
    assert "the learning rate rises" not in output.out, "in 1 of 10 steps"
    assert re.search(r"Training: 10/10 steps, .* images/s, .* GB", output.err)
    card = read_card(output_dir)
    assert "![predictions](predictions.png)" in card
    assert 'AutoModelForImageClassification.from_pretrained(".", trust_remote_code=True)' in card
    assert Image.open(output_dir / "predictions.png").size[0] > 1000


@pytest.mark.parametrize("normalization", [thorough("group"), "batch"])
def test_the_saved_classifier_is_the_trained_one(classify, normalization):
    """Loaded as the model card says, it sees what the program saw: the same pixels, the same accuracy."""
    output_dir = classify("run", f"{SMALL} --normalization {normalization}")
    model = AutoModelForImageClassification.from_pretrained(output_dir, trust_remote_code=normalization == "group")
    processor = AutoImageProcessor.from_pretrained(output_dir)
    _, held_out = images.build(load("resnet_digits_cpu", {"image_height": 16, "image_width": 16}))
    micro_batch = held_out.collate([held_out.draw(0, place) for place in range(len(held_out))])
    pictures = [held_out.store.open(row) for row in held_out.rows]
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    assert torch.allclose(pixels, micro_batch["pixel_values"], atol=1e-5)
    logits = model.eval()(pixels).logits
    loss = torch.nn.functional.cross_entropy(logits, micro_batch["labels"])
    assert loss.item() == pytest.approx(evaluations(output_dir)[-1]["eval_loss"], rel=1e-5)
    assert model.config.id2label == {place: str(place) for place in range(10)}


def test_the_saved_reader_is_the_trained_one(read, real_figures):
    output_dir = read("run", SMALL)
    reader = CaptchaReader.from_pretrained(output_dir).eval()
    flags = {"num_train_samples": 61, "num_validation_samples": 20, "image_height": 40, "image_width": 96}
    _, held_out = captchas.build(load("captcha_cpu", flags))
    texts = reader.read(torch.from_numpy(np.array(held_out.rows["image"])))
    labels = reader.texts(torch.from_numpy(np.array(held_out.rows["label"])))
    last = evaluations(output_dir)[-1]
    characters = np.mean([a == b for x, y in zip(texts, labels, strict=True) for a, b in zip(x, y, strict=True)])
    assert characters == pytest.approx(last["eval_character_accuracy"])
    assert np.mean([x == y for x, y in zip(texts, labels, strict=True)]) == pytest.approx(last["eval_string_accuracy"])
    assert all(len(text) == 4 and text.isdigit() for text in texts)
    assert 'CaptchaReader.from_pretrained("' in read_card(output_dir)
    assert Image.open(output_dir / "predictions.png").size[0] > 1000


def test_the_loss_of_a_string_is_that_of_its_characters_and_only_logged(read):
    for line in metrics(read("run", SMALL)):
        assert line["string_loss"] == pytest.approx(4 * line["character_loss"], rel=1e-6)
        assert line["loss"] == line["character_loss"]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("more", ["", thorough(" --normalization batch"), " --normalization batch --exact_batch_norm"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(train, program, more):
    run = partial(train, program=program)
    whole = run("whole", SMALL + more)
    parts = run("parts", f"{SMALL}{more} --stop_after_step 4")
    run("parts", f"{SMALL}{more} --resume_from_checkpoint latest", output_dir=parts)
    assert untimed_metrics(parts) == untimed_metrics(whole)
    assert same_weights(parts, whole)


@pytest.mark.parametrize("program", PROGRAMS)
def test_in_channels_last_too(train, program, monkeypatch):
    """Files hold tensors in one order; optimizers that are fused need moments in the order of their parameters."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    run = partial(train, program=program)
    whole = run("whole", SMALL)
    parts = run("parts", f"{SMALL} --stop_after_step 4")
    run("parts", f"{SMALL} --resume_from_checkpoint latest", output_dir=parts)
    assert untimed_metrics(parts) == untimed_metrics(whole)
    assert same_weights(parts, whole)


def test_it_learns(classify, read):
    """Twenty steps of ten images, again and again: far better than chance on them."""
    flags = "--global_batch_size 32 --max_train_steps 60 --hidden_sizes 16 32 --max_grad_norm none"
    assert evaluations(classify("digits", flags))[-1]["eval_accuracy"] > 0.6
    flags = (
        "--num_train_samples 16 --global_batch_size 16 --max_train_steps 60 --conv_channels 8 8 16 16 --hidden_size 64"
    )
    lines = metrics(read("captchas", flags + " --max_grad_norm none"))
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]


def test_label_smoothing_changes_the_loss(classify):
    plain, smooth = (metrics(classify(name, f"{SMALL} --label_smoothing {name}"))[0]["loss"] for name in ("0.0", "0.5"))
    assert plain != smooth


def test_images_are_in_channels_last_where_that_is_faster(classify, monkeypatch, after_forward):
    layouts = []
    after_forward(GroupNorm, lambda norm, y: layouts.append(y.is_contiguous()))
    flags = SMALL + " --max_train_steps 1 --validation_fraction 0"
    classify("float32", flags)
    assert layouts
    assert all(layouts), "channels first"
    layouts.clear()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    classify("bf16", flags)
    assert layouts
    assert not any(layouts), "channels_last"


@pytest.mark.rooms
def test_batch_normalisation_says_by_how_much_the_cut_matters(classify, read, capsys):
    for name, run in (("classify", classify), ("read", read)):
        flags = f"{SMALL} --normalization batch --max_train_steps 1"
        events = [line for line in all_metrics(run(f"{name}-cut", flags)) if "event" in line]
        assert events[0]["micro_steps"] == 2
        assert 0.01 < events[0]["gradient_error"] < 2
        assert "--exact_batch_norm" in events[0]["event"]
        assert f"gradient_error {events[0]['gradient_error']}" in capsys.readouterr().err
        for more in (" --exact_batch_norm", " --per_device_train_batch_size 8"):
            lines = all_metrics(run(f"{name}{len(more)}", flags + more))
            assert [line["gradient_error"] for line in lines if "event" in line] == pytest.approx(
                [] if "exact" in more else [0], abs=1e-5
            )


def test_frozen_statistics_stay(classify):
    trained = classify("trained", f"{SMALL} --normalization batch")
    frozen = classify("frozen", f"{SMALL} --normalization frozen --model_name_or_path {trained}")
    initial, final = (AutoModelForImageClassification.from_pretrained(folder) for folder in (trained, frozen))
    ours, theirs = initial.state_dict(), final.state_dict()
    statistics = [name for name in ours if "running" in name]
    assert statistics
    assert all(torch.equal(ours[name], theirs[name]) for name in statistics)
    assert not torch.equal(ours["classifier.1.weight"], theirs["classifier.1.weight"])


def test_another_head_starts_anew_and_another_body_is_refused(classify, folder):
    trained = classify("trained", f"{SMALL} --normalization batch --num_channels 1")
    two = "--global_batch_size 4 --num_labels 2 --num_train_samples 12 --validation_fraction 0.25"
    start = f"--model_name_or_path {trained} --max_train_steps 1 --train_dir {folder} {two}"
    output_dir = classify("two", f"{start} --normalization batch")
    assert AutoModelForImageClassification.from_pretrained(output_dir).config.id2label == {0: "bright", 1: "dark"}
    with pytest.raises(UsageError, match=r"is another model than the recipe's: it has .*num_batches_tracked"):
        classify("groups", start)
    with pytest.raises(UsageError, match=r"has hidden_sizes \[4, 8\], but"):
        classify("wide", f"{start} --normalization batch --hidden_sizes 4 16")


def test_bad_images_end_the_run_or_are_left_out(classify, folder, capsys):
    """The flag's old name is still read."""
    (folder / "dark" / "bad.png").write_bytes(b"no image")
    with pytest.raises(
        UsageError, match=r"1 of 17 images cannot be decoded: dark/bad.png \(not an image\): mend or remove"
    ):
        classify("stop", folder_flags(folder))
    output_dir = classify("skip", folder_flags(folder) + " --on_bad_sample skip --max_train_steps 2")
    assert "left out: 1, not an image (dark/bad.png)" in capsys.readouterr().out
    assert metrics(output_dir)[0]["samples"] == 4


def test_data_that_are_not_what_the_recipe_says(classify, folder, capsys):
    with pytest.raises(UsageError, match=r"num_labels is 3, but train_dir .* has 2 classes \(bright, dark\)"):
        classify("labels", folder_flags(folder) + " --num_labels 3")
    classify("samples", folder_flags(folder) + " --num_train_samples 99 --max_train_steps 1")
    assert "12 images of 2 classes; num_train_samples is 99, but an epoch has 12; " in capsys.readouterr().out
    (folder / "none").mkdir()
    with pytest.raises(UsageError, match="class none holds no image"):
        classify("empty", folder_flags(folder))


def test_a_warm_up_of_a_longer_training_is_said(classify, capsys):
    classify("run", f"{SMALL} --max_train_steps 4 --num_warmup_steps 3")
    out = capsys.readouterr().out
    assert "the learning rate rises during 75% of the training: --num_warmup_steps or " in out
    assert "fewer than the global batch" not in out


def test_a_batch_that_is_larger_than_the_data_is_said(classify, folder, capsys):
    classify("run", f"{folder_flags(folder)} --global_batch_size 32 --learning_rate_batch_size 32 --max_train_steps 1")
    assert (
        "an epoch has 12 samples, fewer than the global batch: a step holds some more than once"
        in capsys.readouterr().out
    )


def test_what_a_folder_decides_is_counted_there(classify, folder, capsys):
    """Classes and images, where a recipe has those of its own data; and what becomes of the images is said."""
    for number in range(6):
        Image.new("RGB", (20, 10), (200, 0, 0)).save(folder / "bright" / f"red{number}.png")
    output_dir = classify(
        "run", f"--train_dir {folder} --validation_fraction 0.25 --global_batch_size 4 --max_train_steps 1"
    )
    recipe = yaml.safe_load((output_dir / "recipe.yaml").read_text())
    assert (recipe["num_labels"], recipe["num_train_samples"]) == (2, 22 - 6)  # round(22 / 4) are held out
    out = capsys.readouterr().out
    assert "  images in colour, which become grey (num_channels is 1): 22\n" in out
    assert (
        "  images of 17 sizes, 20 x 10 to 25 x 25: their middle becomes 16 x 16 (image_width x image_height)\n" in out
    )
    assert "  classes: bright (14), dark (8)\n" in out
    assert "num_train_samples" not in out


def test_images_that_come_twice_are_counted_and_those_of_two_classes(classify, folder, capsys):
    for copy in ("dark/again.png", "bright/other.png"):
        (folder / copy).write_bytes((folder / "dark" / "0.png").read_bytes())
    (folder / "bright" / "again.png").write_bytes((folder / "bright" / "1.png").read_bytes())
    classify("run", f"{folder_flags(folder)} --max_train_steps 1")
    out = capsys.readouterr().out
    assert "  images that come more than once: 2 (bright/1.png and bright/again.png)\n" in out
    assert "  equal images of several classes, of which one is right: 3 (bright/other.png and dark/0.png)\n" in out
    classify("leak", f"{folder_flags(folder)} --max_train_steps 1 --validation_dir {folder} --validation_fraction 0")
    assert "  held out AND trained on: 19 of 19 held-out images\n" in capsys.readouterr().out


def test_held_out_images_are_listed_the_surest_mistakes_first(classify, folder, real_figures):
    output_dir = classify("run", f"{folder_flags(folder)} --validation_fraction 0.5 --max_train_steps 3")
    with (output_dir / "held_out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    wrong = [row for row in rows if row["prediction"] != row["label"]]
    assert rows[: len(wrong)] == wrong
    sure = [float(row["probability"]) for row in rows]
    assert sure[: len(wrong)] == sorted(sure[: len(wrong)], reverse=True)
    assert sure[len(wrong) :] == sorted(sure[len(wrong) :])
    results = json.loads((output_dir / "all_results.json").read_text())
    assert results["eval_accuracy"] == pytest.approx(1 - len(wrong) / 8)
    assert results["eval_majority_accuracy"] == max(Counter(row["label"] for row in rows).values()) / 8
    for row in rows:
        assert row["image"].startswith(f"{row['label']}/")
        assert (folder / row["image"]).is_file()
        assert float(row[f"probability_{row['prediction']}"]) == float(row["probability"])


@pytest.mark.parametrize("program", PROGRAMS)
def test_sharding_is_refused(train, program, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    with pytest.raises(UsageError, match="which only programs of language models do"):
        train("sharded", SMALL, program=program)
    fresh_accelerator()
