"""Labelled images: the same pixels in every micro-batch and worker, and bad files found before training."""

import errno
import itertools
import os
import pickle
import re
import shutil
import struct
import warnings
import zlib
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from hooks import before
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order, sample_rng
from samestep.data import images
from samestep.data.images import _centre_box, _random_box, _shift
from samestep.data.steps import Steps
from samestep.errors import RunError, UsageError
from samestep.recipe.catalog import load
from samestep.recipe.tasks.image_classification import ImageClassification

PLAIN = {"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0)}  # pixel values stay in [0, 1]
CHANGES = {"image_height": 16, "image_width": 16, "num_labels": 2, "augmentation": "none", "validation_fraction": 0.0}


def make_recipe(folder, **changes) -> ImageClassification:
    return load("resnet50_imagenet_4xt4", PLAIN | CHANGES | {"train_dir": str(folder)} | changes)


def digits(**changes) -> tuple[images.Images, images.Images]:
    return images.build(load("resnet_digits_cpu", changes))


def colours(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Make uint8 [height, width, 3] of smooth colours."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(256, size=(4, 4, 3), dtype=np.uint8))
    return np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))


def write(path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


@pytest.fixture
def folder(tmp_path):
    """Write two classes, cat and dog, of four JPEG images each, of different sizes."""
    for number, name in enumerate(["cat", "dog"] * 4):
        write(tmp_path / "data" / name / f"{number}.jpg", colours(24 + number, 40 - 3 * number, number))
    return tmp_path / "data"


def make_micro_batch(source: images.Images, epoch: int, ids) -> dict[str, torch.Tensor]:
    return source.collate([source.draw(epoch, number) for number in ids])


def pixels(source: images.Images, epoch: int, number: int) -> torch.Tensor:
    return make_micro_batch(source, epoch, [number])["pixel_values"][0]


def problem(call, kind=UsageError) -> str:
    with pytest.raises(kind) as error:
        call()
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches


def test_a_micro_batch():
    source, _ = digits()
    micro_batch = make_micro_batch(source, 0, [5, 2, 9])
    assert micro_batch["pixel_values"].shape == (3, 1, 32, 32)
    assert micro_batch["pixel_values"].dtype == torch.float32
    assert micro_batch["labels"].dtype == micro_batch["counts"].dtype == torch.int64
    assert micro_batch["counts"].tolist() == [3]
    assert micro_batch["labels"].tolist() == [int(source.store.labels[source.rows[number]]) for number in (5, 2, 9)]
    assert (source.max_length, source.draw(0, 5).length, source.longest().length) == (1, 1, 1)
    assert len(source.collate([source.longest()])["labels"]) == 1


def test_micro_batches_are_channels_last(folder):
    source, _ = images.build(make_recipe(folder))
    values = make_micro_batch(source, 0, range(3))["pixel_values"]
    assert values.shape == (3, 3, 16, 16)
    assert values.is_contiguous(memory_format=torch.channels_last)
    assert not values.is_contiguous()


def test_no_samples_make_a_micro_batch_without_a_target(folder):
    source, _ = images.build(make_recipe(folder))
    micro_batch = source.collate([])
    assert micro_batch["counts"].tolist() == [0]
    assert (micro_batch["labels"].tolist(), micro_batch["pixel_values"].shape) == ([], (0, 3, 16, 16))
    logits = torch.randn(0, 2, requires_grad=True)
    loss = cross_entropy(logits, micro_batch["labels"], reduction="sum", label_smoothing=0.1)
    loss.backward()
    assert (loss.item(), logits.grad.shape) == (0.0, (0, 2))


def test_pictures_are_what_was_normalised(folder):
    """In [0, 1] again, each channel by its own mean and standard deviation."""
    plain, _ = images.build(make_recipe(folder))
    normalised, _ = images.build(make_recipe(folder, image_mean=(0.5, 0.4, 0.3), image_std=(0.2, 0.3, 0.1)))
    expected = make_micro_batch(plain, 0, [0, 5])["pixel_values"].permute(0, 2, 3, 1).numpy()
    pictures = normalised.pictures(make_micro_batch(normalised, 0, [0, 5])["pixel_values"])
    assert np.allclose(pictures, expected, atol=1e-6)


def test_nothing_is_read_when_a_sample_is_drawn(folder):
    source, _ = images.build(make_recipe(folder))
    shutil.rmtree(folder)
    assert source.draw(3, 7) == (3, 7)


def test_each_channel_has_its_mean_and_deviation(folder):
    mean, std = (0.1, 0.5, 0.9), (0.5, 0.25, 2.0)
    plain, _ = images.build(make_recipe(folder))
    source, _ = images.build(make_recipe(folder, image_mean=mean, image_std=std))
    expected = (pixels(plain, 0, 1) - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert torch.allclose(pixels(source, 0, 1), expected, atol=1e-6)
    assert 0 <= pixels(plain, 0, 1).min() < 0.3 < 0.7 < pixels(plain, 0, 1).max() <= 1


@pytest.mark.parametrize("augmentation", ["none", "shift", "imagenet"])
def test_a_sample_has_the_same_pixels_in_any_micro_batch_order_and_process(folder, augmentation):
    source, _ = images.build(make_recipe(folder, augmentation=augmentation))
    together = make_micro_batch(source, 2, range(8))
    backward = make_micro_batch(pickle.loads(pickle.dumps(source)), 2, reversed(range(8)))
    for number in range(8):
        alone = pixels(source, 2, number)
        assert torch.equal(together["pixel_values"][number], alone)
        assert torch.equal(backward["pixel_values"][7 - number], alone)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_step_is_the_same_on_every_layout_and_in_workers(folder, num_workers):
    source, _ = images.build(make_recipe(folder, augmentation="imagenet"))
    order = Order(len(source), 6, seed=1)
    whole = {}
    for step in range(3):
        for epoch, number in zip(*order.samples(step), strict=True):
            whole[int(epoch), int(number)] = pixels(source, int(epoch), int(number))
    for processes, size in ((1, 6), (2, 2)):
        draws = []
        layout = solve_layout(num_processes=processes, global_batch_size=6, per_device_train_batch_size=size)
        for index in range(processes):
            steps = Steps(source, order, layout, process_index=index)
            for data in steps.stream(0, 3, num_workers, torch.device("cpu")):
                for micro_batch, samples in zip(data.micro_batches, data.samples, strict=True):
                    assert micro_batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)
                    for values, sample in zip(micro_batch["pixel_values"], samples, strict=True):
                        assert torch.equal(values, whole[sample])
                        draws.append((data.step, *sample))
        assert len(draws) == len(set(draws)) == 18


# ---------------------------------------------------------------------------------------------------------------------
# Augmentation


@pytest.mark.parametrize("augmentation", ["shift", "imagenet"])
def test_training_images_change_with_epoch_and_seed_held_out_ones_do_not(folder, augmentation):
    def build_sources(seed: int):
        return images.build(make_recipe(folder, augmentation=augmentation, validation_dir=str(folder), seed=seed))

    (train, held_out), (other, other_held_out) = build_sources(1), build_sources(2)
    for changed in (pixels(train, 1, 0), pixels(other, 0, 0), pixels(held_out, 0, 0)):
        assert not torch.equal(pixels(train, 0, 0), changed)
    assert torch.equal(pixels(held_out, 0, 0), pixels(held_out, 5, 0))
    assert torch.equal(pixels(held_out, 0, 0), pixels(other_held_out, 0, 0))
    draws = {pixels(train, epoch, 0).numpy().tobytes() for epoch in range(20)}
    assert len(draws) > 10


def test_samples_of_one_epoch_are_augmented_differently(tmp_path):
    for name in ("a/1.png", "a/2.png", "b/1.png"):
        write(tmp_path / name, colours(30, 30))
    source, _ = images.build(make_recipe(tmp_path, augmentation="imagenet"))
    assert not torch.equal(pixels(source, 0, 0), pixels(source, 0, 1))


def test_a_shift_moves_the_image_by_up_to_an_eighth_and_zeros_in():
    rows, columns = np.mgrid[:16, :24]
    image = np.stack([rows + 1, columns + 1], axis=-1).astype(np.uint8)
    shifts = set()
    for number in range(300):
        moved = _shift(image, sample_rng(0, images.AUGMENTATION, 0, number))
        (down, right) = (
            np.median((grid - moved[..., axis] + 1)[moved[..., axis] > 0]) for axis, grid in enumerate((rows, columns))
        )
        expected = np.zeros_like(image)
        for row, column in itertools.product(range(16), range(24)):
            if 0 <= row - down < 16 and 0 <= column - right < 24:
                expected[row, column] = image[int(row - down), int(column - right)]
        assert np.array_equal(moved, expected)
        shifts.add((int(down), int(right)))
    assert {down for down, _ in shifts} == set(range(-2, 3))
    assert {right for _, right in shifts} == set(range(-3, 4))


def test_random_crops_are_as_large_and_as_wide_as_torchvisions():
    boxes = [_random_box(400, 400, sample_rng(0, images.AUGMENTATION, 0, number)) for number in range(3000)]
    left, top, right, bottom = np.array(boxes).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert right.max() == 400
    assert bottom.max() == 400
    share, ratio = (right - left) * (bottom - top) / 160_000, (right - left) / (bottom - top)
    assert 0.078 < share.min() < 0.1
    assert 0.95 < share.max() <= 1
    assert 0.74 < ratio.min() < 0.77
    assert 1.3 < ratio.max() < 1.35
    assert np.mean(np.log(ratio)) == pytest.approx(0, abs=0.02), "as often wide as high"
    # Of 8 % to 100 %, uniform, about 0.5; what does not fit is drawn again, so that large ones are rarer.
    assert 0.45 < share.mean() < 0.54
    assert len(set(boxes)) > 2900


@pytest.mark.parametrize(
    ("width", "height", "box"), [(900, 90, (390, 0, 510, 90)), (90, 900, (0, 390, 90, 510)), (1, 1, (0, 0, 1, 1))]
)
def test_a_shape_that_no_crop_fits_is_cropped_in_the_middle(width, height, box):
    assert _random_box(width, height, sample_rng(0, 0, 0, 0), (1.0, 1.0)) == box


def test_half_of_the_crops_are_flipped(tmp_path):
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (64, 1, 3))
    for name in ("a/1.png", "b/1.png"):
        write(tmp_path / name, ramp)
    source, _ = images.build(make_recipe(tmp_path, augmentation="imagenet"))
    falling = [bool(row[0] > row[-1]) for row in (pixels(source, epoch, 0)[0, 8] for epoch in range(200))]
    assert 70 < sum(falling) < 130


def test_held_out_images_are_resized_and_cropped_in_the_middle(tmp_path):
    """As torchvision's Resize(256) and CenterCrop(224)."""
    image = colours(300, 400)
    for name in ("a/1.png", "b/1.png"):
        write(tmp_path / name, image)
    recipe = make_recipe(
        tmp_path, augmentation="imagenet", validation_dir=str(tmp_path), image_height=224, image_width=224
    )
    source = images.build(recipe)[1]
    small = Image.fromarray(image).resize((341, 256), Image.Resampling.BILINEAR).crop((58, 16, 282, 240))
    ours = pixels(source, 0, 0).permute(1, 2, 0).numpy() * 255
    assert np.abs(ours - np.asarray(small)).mean() < 1
    assert _centre_box(400, 300, 224, 224, 224 / 256) == (68.75, 18.75, 331.25, 281.25)
    assert _centre_box(30, 90, 10, 20, 1.0) == (0, 15, 30, 75)
    for width, height in itertools.product(range(1, 60), repeat=2):
        left, top, right, bottom = _centre_box(width, height, 7, 13, 1.0)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


# ---------------------------------------------------------------------------------------------------------------------
# Sources


def test_digits_are_scikit_learns():
    train, held_out = digits(image_height=8, image_width=8, augmentation="none", image_mean=[0.0], image_std=[1.0])
    assert (len(train), len(held_out)) == (1438, 359)
    theirs = load_digits()
    assert sorted([*train.rows, *held_out.rows]) == list(range(1797))
    for source in (train, held_out):
        micro_batch = make_micro_batch(source, 0, range(len(source)))
        expected = torch.tensor(theirs.images[source.rows] / 16, dtype=torch.float32)
        assert torch.allclose(micro_batch["pixel_values"][:, 0], expected, atol=0.5 / 255 + 1e-6)
        assert micro_batch["labels"].tolist() == theirs.target[source.rows].tolist()


def test_digits_are_enlarged_and_normalised():
    train, held_out = digits()
    values = make_micro_batch(held_out, 0, range(len(held_out)))["pixel_values"]
    assert values.shape == (359, 1, 32, 32)
    assert values.mean().item() == pytest.approx(0, abs=0.05)
    assert values.std().item() == pytest.approx(1, abs=0.05)
    assert len(train) == load("resnet_digits_cpu").num_train_samples


def test_what_is_held_out_depends_on_the_seed_and_the_share_only():
    first, second, other = digits()[1], digits(augmentation="none")[1], digits(seed=1)[1]
    assert np.array_equal(first.rows, second.rows)
    assert not np.array_equal(first.rows, other.rows)
    assert len(digits(validation_fraction=0.5)[1]) == 898
    assert digits(validation_fraction=0.0)[1] is None
    assert len(digits(validation_fraction=1e-9)[1]) == 1
    message = problem(lambda: digits(validation_fraction=0.9999))
    assert message.startswith("validation_fraction 0.9999 of 1797 images leaves none to train on: lower it")


def test_a_folder_is_read_in_sorted_order(folder, monkeypatch):
    (folder / "cat" / "0.jpg").rename(folder / "cat" / "9.jpg")
    write(folder / "cat" / "A.PNG", colours(8, 8))
    (folder / "cat" / "notes.txt").write_text("not an image")
    write(folder / ".hidden" / "1.png", colours(8, 8))
    (folder / "cat" / "._0.jpg").write_bytes(b"what a Mac leaves behind")
    scan = os.scandir

    def shuffled(path):
        entries = scan(path)
        return sorted(entries, key=lambda entry: entry.name[::-1]) if str(path).startswith(str(folder)) else entries

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", shuffled)
        source, held_out = images.build(make_recipe(folder))
    names = [source.store.name(row) for row in source.rows]
    assert names == [*(f"cat/{n}.jpg" for n in (2, 4, 6, 9)), "cat/A.PNG", *(f"dog/{n}.jpg" for n in (1, 3, 5, 7))]
    assert make_micro_batch(source, 0, range(9))["labels"].tolist() == [0] * 5 + [1] * 4
    assert (source.store.classes, held_out) == (["cat", "dog"], None)


def test_a_part_of_a_folder_can_be_held_out(folder):
    train, held_out = images.build(make_recipe(folder, validation_fraction=0.25))
    assert (len(train), len(held_out)) == (6, 2)
    assert not set(train.rows.tolist()) & set(held_out.rows.tolist())
    assert train.fingerprints != held_out.fingerprints


def test_labels_of_held_out_images_are_those_of_training(folder, tmp_path):
    write(tmp_path / "held" / "dog" / "1.png", colours(8, 8))
    held_out = images.build(make_recipe(folder, validation_dir=str(tmp_path / "held")))[1]
    assert make_micro_batch(held_out, 0, [0])["labels"].tolist() == [1]
    write(tmp_path / "held" / "bird" / "1.png", colours(8, 8))
    message = problem(lambda: images.build(make_recipe(folder, validation_dir=str(tmp_path / "held"))))
    assert "validation_dir" in message
    assert "has classes that train_dir lacks: bird" in message


def test_a_dataset_as_the_hub_has_them(folder, tmp_path):
    """Read from a folder of Parquet files, which `datasets` loads as it loads a repository of the hub."""
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    files = sorted(folder.glob("*/*.jpg"))
    rows = {"image": [{"bytes": f.read_bytes(), "path": None} for f in files], "label": [f.parent.name for f in files]}

    def load_hub(name, parts):
        for split, columns in parts.items():
            (tmp_path / name / "data").mkdir(parents=True, exist_ok=True)
            table = datasets.Dataset.from_dict(columns, features if "label" in columns else None)
            table.to_parquet(tmp_path / name / "data" / f"{split}.parquet")
        return images.build(make_recipe(None, train_dir=None, dataset_name=str(tmp_path / name)))

    train, held_out = load_hub("both", {"train": rows, "test": {name: column[:3] for name, column in rows.items()}})
    ours, _ = images.build(make_recipe(folder))
    assert (len(train), len(held_out)) == (8, 3)
    for name, value in make_micro_batch(ours, 0, range(8)).items():
        assert torch.equal(make_micro_batch(train, 0, range(8))[name], value)
    assert len(pickle.loads(pickle.dumps(train))) == 8
    assert train.fingerprints == load_hub("moved", {"train": rows})[0].fingerprints != held_out.fingerprints
    rows["image"][3] = {"bytes": files[3].read_bytes()[:200], "path": None}
    assert "1 of 8 images cannot be decoded: row 3 (" in problem(lambda: load_hub("bad", {"train": rows}))
    assert "has no split train, only validation" in problem(lambda: load_hub("part", {"validation": rows}))
    message = problem(lambda: load_hub("none", {"train": {"text": ["a"]}}))
    assert "0 columns are Image (none), must be one" in message


def test_a_dataset_that_cannot_be_reached():
    recipe = make_recipe(None, train_dir=None, dataset_name="nobody/nothing")
    assert "dataset_name 'nobody/nothing' (config None, split None): " in problem(lambda: images.build(recipe))
    recipe = make_recipe(None, train_dir=None, dataset_name="builtin/digit")
    assert "'builtin/digit' does not exist: did you mean builtin/digits?" in problem(lambda: images.build(recipe))


@pytest.mark.parametrize("num_channels", [1, 3])
def test_every_kind_of_image_becomes_the_recipes_channels(tmp_path, num_channels):
    grey = Image.fromarray(np.full((8, 8), 100, np.uint8))
    clear = grey.convert("P")
    clear.info["transparency"] = bytes([0, 128])
    kinds = {
        "L": grey,
        "RGB": grey.convert("RGB"),
        "RGBA": grey.convert("RGBA"),
        "P": grey.convert("P"),
        "clear": clear,
    }
    kinds |= {"LA": grey.convert("LA"), "16": Image.fromarray(np.full((8, 8), 100 * 256 + 7, np.uint16))}
    for name, image in kinds.items():
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "1.png")
    (tmp_path / "CMYK").mkdir()
    grey.convert("CMYK").save(tmp_path / "CMYK" / "1.jpg", quality=100)
    shape = {"num_channels": num_channels, "image_mean": [0.0] * num_channels, "image_std": [1.0] * num_channels}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source, _ = images.build(make_recipe(tmp_path, num_labels=8, **shape), num_workers=1)
        values = make_micro_batch(source, 0, range(8))["pixel_values"] * 255
    assert values.shape == (8, num_channels, 16, 16)
    assert torch.allclose(values, torch.tensor(100.0), atol=2)
    assert values.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "suffix", [".png", ".tif", ".gif", ".jfif", ".ppm", ".tga", ".ico", ".webp", ".jp2", ".qoi", ".PCX"]
)
def test_images_of_every_suffix_are_read(tmp_path, suffix):
    grey = Image.fromarray(np.full((16, 16, 3), 100, np.uint8))
    for name in "ab":
        (tmp_path / name).mkdir()
        grey.save(tmp_path / name / f"1{suffix}")
    source, _ = images.build(make_recipe(tmp_path))
    assert len(source) == 2
    assert torch.allclose(pixels(source, 0, 1) * 255, torch.tensor(100.0), atol=3)


def test_suffixes_are_those_that_pillow_reads():
    Image.init()
    kinds = {name for name in Image.OPEN if name in Image.registered_extensions().values()}
    assert kinds - set(images.FORMATS) == {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
    assert {".png", ".jpe", ".tiff", ".avif"} <= set(images._find_suffixes())
    assert not {".eps", ".ps", ".wmf", ".h5"} & set(images._find_suffixes())


@pytest.mark.parametrize("num_channels", [1, 3])
def test_levels_of_other_ranges_keep_their_shades(tmp_path, num_channels):
    ramp = np.tile(np.linspace(0, 1, 16), (16, 1))
    kinds = {
        "float": Image.fromarray(ramp.astype(np.float32)),
        "int": Image.fromarray((ramp * 255).round().astype(np.int32)),
        "short": Image.fromarray((ramp * 65535).round().astype(np.uint16)),
        "byte": Image.fromarray((ramp * 255).round().astype(np.uint8)),
    }
    for name, image in kinds.items():
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "1.tif")
    (tmp_path / "pgm").mkdir()
    kinds["short"].save(tmp_path / "pgm" / "1.pgm")
    (tmp_path / "bits").mkdir()
    Image.fromarray(ramp > 0.5).save(tmp_path / "bits" / "1.tif")
    shape = {"num_channels": num_channels, "image_mean": [0.0] * num_channels, "image_std": [1.0] * num_channels}
    source, _ = images.build(make_recipe(tmp_path, num_labels=6, **shape))
    values = dict(zip(source.classes, make_micro_batch(source, 0, range(6))["pixel_values"], strict=True))
    expected = torch.from_numpy(ramp).float().expand(num_channels, 16, 16)
    for name in ("float", "int", "short", "byte", "pgm"):
        assert torch.allclose(values[name], expected, atol=1 / 255), name
    assert torch.equal(values["bits"], (expected > 0.5).float())
    assert "images that have 16 bits, of which the upper 8 are taken: 1" in str(source.row_reports[0])


@pytest.mark.parametrize(
    ("levels", "message"),
    [
        (np.float32([[0, 1.5]]), r"floating numbers from 0 to 1.5, must be 0 \(black\) to 1 \(white\)"),
        (np.float32([[-0.5, 1]]), "floating numbers from -0.5 to 1, must be"),
        (np.float32([[np.nan, 1]]), "floating numbers from nan to nan, must be"),
        (np.int32([[0, 256]]), r"whole numbers of 32 bits from 0 to 256, must be 0 \(black\) to 255 \(white\)"),
        (np.int32([[-1, 5]]), "whole numbers of 32 bits from -1 to 5, must be"),
    ],
)
def test_levels_without_a_range_are_refused(tmp_path, folder, levels, message):
    Image.fromarray(np.tile(levels, (8, 4))).save(folder / "cat" / "odd.tif")
    with pytest.raises(UsageError, match=rf"1 of 9 images cannot be decoded: cat/odd.tif \({message}"):
        images.build(make_recipe(folder))
    source, _ = images.build(make_recipe(folder), on_bad_row="skip")
    (report,) = source.row_reports
    assert (report.num_read, report.num_used, report.bad[0].place) == (9, 8, "cat/odd.tif")


def test_images_of_12_bits_in_16_are_refused_unless_others_use_all(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((16, 16), 4095, np.uint16)).save(tmp_path / name / "1.png")
    with pytest.raises(
        UsageError, match=r"all 2 images of 16 bits have values up to 4,095 at most.*Multiply them by 16"
    ):
        images.build(make_recipe(tmp_path))
    Image.fromarray(np.full((16, 16), 4096, np.uint16)).save(tmp_path / "a" / "2.png")
    assert len(images.build(make_recipe(tmp_path))[0]) == 3


def test_what_is_not_taken_of_images_is_said(tmp_path, folder):
    frames = [Image.fromarray(np.full((16, 16), level, np.uint8)) for level in (100, 200)]
    for suffix in (".gif", ".tif", ".webp", ".png"):
        frames[0].save(folder / "cat" / f"film{suffix}", save_all=True, append_images=frames[1:])
    frames[0].convert("RGBA").save(folder / "dog" / "clear.png")
    exif = Image.Exif()
    exif[0x0112] = 3
    frames[0].save(folder / "dog" / "turned.jpg", exif=exif)
    for name in (
        "cat/notes.txt",
        "cat/.hidden.png",
        "dog/Thumbs.db",
        "dog/more.txt",
        "dog/none",
        "loose.jpg",
        ".DS_Store",
    ):
        (folder / name).write_bytes(b"something")
    for _ in range(2):  # the second time from the cache
        source, held_out = images.build(make_recipe(folder, validation_fraction=0.2))
        (report,) = source.row_reports
        assert (report.num_read, report.num_used, report.num_held_out) == (14, 14, len(held_out))
        lines = str(report).splitlines()
        assert "  images that have several frames: the first is taken: 4" in lines
        assert "  images that have transparency, which is dropped: 1" in lines
        assert "  images that are turned upright, as their EXIF data say: 1" in lines
        assert "  files read: 9 .jpg, 2 .png, 1 .gif, 1 .tif, 1 .webp" in lines
        (others,) = (line for line in lines if "NOT read" in line)
        for kind in ("2 .txt", "2 hidden", "1 .db", "1 without a suffix", "1 .jpg beside the class folders"):
            assert kind in others
    level = pixels(source, 0, list(source.rows).index(source.store.names.index("cat/film.gif"))).mean() * 255
    assert abs(level - 100) < 2


def test_a_photograph_stands_upright(tmp_path):
    image = Image.fromarray(colours(16, 16))
    turned = image.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: to be turned by 90 degrees clockwise
    for name in "ab":
        (tmp_path / name).mkdir()
        turned.save(tmp_path / name / "1.png", exif=exif)
    source, _ = images.build(make_recipe(tmp_path))
    assert np.array_equal((pixels(source, 0, 0).permute(1, 2, 0) * 255).round().numpy(), np.asarray(image))


# ---------------------------------------------------------------------------------------------------------------------
# Fingerprints


def test_the_fingerprint_is_of_names_sizes_and_labels(folder, tmp_path):
    def fingerprint(**changes):
        return images.build(make_recipe(folder, **changes))[0].fingerprints["images"]

    first = fingerprint()
    assert len(first) == 16
    folder = folder.rename(tmp_path / "elsewhere")
    assert fingerprint() == first == fingerprint(seed=5), "neither where they lie nor the seed"
    (folder / "cat" / "0.jpg").rename(folder / "cat" / "00.jpg")
    renamed = fingerprint()
    (folder / "cat" / "00.jpg").rename(folder / "dog" / "00.jpg")
    moved = fingerprint()
    with (folder / "dog" / "00.jpg").open("ab") as file:
        file.write(b"0")
    assert len({first, renamed, moved, fingerprint()}) == 4
    first, other = (images.Files(str(folder), "train_dir", classes) for classes in (["cat", "dog"], ["dog", "cat"]))
    assert first.digest(np.arange(8)) != other.digest(np.arange(8)), "other labels"


def test_the_fingerprint_of_digits_is_of_their_content():
    first, held_out = digits()
    assert digits()[0].fingerprints == first.fingerprints != held_out.fingerprints
    digest = first.store.digest(first.rows)
    assert digest in str(first.fingerprints)
    first.store.images[first.rows[0], 3, 3] += 1
    assert first.store.digest(first.rows) != digest


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong with the data


def damage(folder) -> list[str]:
    """Write three bad files among the good ones; their names as in the messages."""
    whole = (folder / "cat" / "0.jpg").read_bytes()
    (folder / "cat" / "1_cut.jpg").write_bytes(whole[:-20])
    (folder / "dog" / "empty.png").write_bytes(b"")
    (folder / "dog" / "text.webp").write_text("not an image")
    return ["cat/1_cut.jpg (image file is truncated", "dog/empty.png (not an image)", "dog/text.webp (not an image)"]


def test_bad_images_stop_the_run_before_training(folder):
    bad = damage(folder)
    message = problem(lambda: images.build(make_recipe(folder)))
    assert f"train_dir {folder}: 3 of 11 images cannot be decoded: " in message
    assert all(name in message for name in bad)
    assert message.endswith("mend or remove them, or set on_bad_row to skip")


def png(width: int, height: int) -> bytes:
    """Make a small file that claims to hold so many pixels."""
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(9)))]
    chunks = [
        struct.pack(">I", len(data)) + (kind + data) + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_images_of_one_pixel_and_of_too_many(folder):
    write(folder / "cat" / "dot.png", colours(1, 1))
    for augmentation in ("none", "imagenet"):
        source, _ = images.build(make_recipe(folder, augmentation=augmentation))
        pixels = make_micro_batch(source, 0, [source.store.names.index("cat/dot.png")])["pixel_values"][0]
        assert (pixels == pixels[:, :1, :1]).all()
    (folder / "cat" / "bomb.png").write_bytes(png(100_000, 100_000))
    (folder / "dog" / "large.png").write_bytes(png(13_000, 13_000))
    message = problem(lambda: images.build(make_recipe(folder)))
    assert "cat/bomb.png (Image size (10000000000 pixels) exceeds limit" in message
    assert "dog/large.png (13,000 x 13,000 pixels, more than 89,478,485)" in message


@pytest.mark.parametrize("kind", ["zeros", "pipe", "itself", "its own folder"])
def test_images_without_an_end_are_not_opened(folder, kind):
    path = folder / "cat" / "x.png"
    match kind:
        case "zeros":
            path.symlink_to("/dev/zero")
        case "pipe":
            os.mkfifo(path)
        case "itself":
            path.symlink_to(path.name)
        case "its own folder":
            path = folder / "cow"
            path.symlink_to("cow")
    message = problem(lambda: images.build(make_recipe(folder)))
    rule = "is a device, a pipe or a socket" if kind in ("zeros", "pipe") else "cannot be read (Too many levels"
    assert f"train_dir {folder}: {path.relative_to(folder)} {rule}" in message


def test_names_that_are_not_utf8(folder):
    """Of files they are no matter; of classes the model could not hold them."""
    (folder / "cat" / "0.jpg").rename(folder / "cat" / os.fsdecode(b"\xff.jpg"))
    assert len(images.build(make_recipe(folder))[0]) == 8
    (folder / "dog").rename(folder / os.fsdecode(b"d\xf6g"))
    assert "has classes whose names are not UTF-8: d\udcf6g: rename them" in problem(
        lambda: images.build(make_recipe(folder))
    )


def test_one_class_teaches_nothing(folder):
    shutil.rmtree(folder / "dog")
    for num_labels in (1, 2):
        message = problem(lambda num_labels=num_labels: images.build(make_recipe(folder, num_labels=num_labels)))
        assert "has a single class, cat: nothing can be learned" in message


def test_bad_images_of_both_folders_are_named_at_once(folder):
    damage(folder)
    message = problem(lambda: images.build(make_recipe(folder, validation_dir=str(folder))))
    assert f"train_dir {folder}: 3 of 11" in message
    assert f"validation_dir {folder}: 3 of 11" in message


def test_skipped_images_are_as_if_they_had_never_been_there(folder):
    clean, _ = images.build(make_recipe(folder, augmentation="imagenet"))
    bad = damage(folder)
    source, held_out = images.build(
        make_recipe(folder, augmentation="imagenet", validation_dir=str(folder)), on_bad_row="skip"
    )
    assert len(source) == len(clean) == len(held_out) == 8
    assert source.fingerprints == clean.fingerprints
    for name, value in make_micro_batch(clean, 1, range(8)).items():
        assert torch.equal(make_micro_batch(source, 1, range(8))[name], value)
    for report, field in zip(source.row_reports, ("train_dir", "validation_dir"), strict=True):
        assert report.source.startswith(field)
        assert (report.num_read, report.num_used) == (11, 8)
        assert all(f"{row.place} ({row.reason})".startswith(text) for row, text in zip(report.bad, bad, strict=True))


def test_many_bad_images_are_counted(folder):
    for number in range(30):
        (folder / "cat" / f"bad{number:02}.png").write_bytes(b"bad")
    message = problem(lambda: images.build(make_recipe(folder)))
    assert "30 of 38 images" in message
    assert "bad09.png (not an image) and 20 more" in message
    assert "bad10" not in message


def test_a_class_of_bad_images_only(folder):
    (folder / "ant").mkdir()
    (folder / "ant" / "1.png").write_bytes(b"bad")
    message = problem(lambda: images.build(make_recipe(folder, num_labels=3), on_bad_row="skip"))
    assert "no image of ant can be decoded: mend some, or remove the class" in message


def opened_images(folder, changes=(), **settings) -> tuple[images.Images, set[str]]:
    """Build the source of a folder; it, and the names of the images that were opened for it."""
    opened = set()

    def note(path, *_):
        if Path(str(path)).is_relative_to(folder):
            opened.add(os.path.relpath(path, folder))

    with before("open", note):
        source, _ = images.build(make_recipe(folder, **dict(changes)), **settings)
    return source, opened


def test_an_image_is_verified_once_until_it_changes(folder):
    damage(folder)

    def build() -> set[str]:
        source, opened = opened_images(folder, on_bad_row="skip")
        assert len(source) + skipped == 11
        return opened

    skipped = 3
    assert len(build()) == 11
    assert build() == set(), "bad ones are remembered, too, so that every process leaves out the same"
    (folder / "dog" / "empty.png").write_bytes((folder / "dog" / "1.jpg").read_bytes())
    skipped = 2
    assert build() == {"dog/empty.png"}, "mended: its size has changed"
    os.utime(folder / "cat" / "0.jpg", ns=(1, 1))
    assert build() == {"cat/0.jpg"}, "its time has changed"
    for file in (datasets.config.HF_DATASETS_CACHE / "verified_images").glob("*.json"):
        file.write_text("{damaged")
    assert len(build()) == 11


def test_an_interrupted_verification_goes_on(folder):
    (folder / "ant").mkdir()
    for number in range(2 * images.CHUNK):
        shutil.copy(folder / "cat" / "0.jpg", folder / "ant" / f"{number:02}.jpg")

    def interrupt(path, *_):
        if str(path).endswith("cat/4.jpg"):
            raise OSError(errno.EIO, "the disk is gone")

    with before("open", interrupt), pytest.raises(UsageError, match="the disk is gone"):
        images.build(make_recipe(folder, num_labels=3), num_workers=1)
    source, opened = opened_images(folder, {"num_labels": 3})
    assert len(source) == 8 + 2 * images.CHUNK
    assert "cat/4.jpg" in opened
    assert "ant/00.jpg" not in opened


def test_an_image_that_cannot_be_read_is_not_a_bad_image(folder):
    """A disk that fails for a moment must not change the dataset."""

    def fail(path, *_):
        if str(path).endswith("cat/4.jpg"):
            raise OSError(errno.EIO, "Input/output error")

    with before("open", fail):
        message = problem(lambda: images.build(make_recipe(folder), on_bad_row="skip"))
    assert "cat/4.jpg cannot be read (Input/output error): check the file and its permissions" in message
    assert len(images.build(make_recipe(folder))[0]) == 8


def test_an_image_that_is_lost_during_training(folder):
    source, _ = images.build(make_recipe(folder))
    (folder / "cat" / "2.jpg").unlink()
    message = problem(lambda: make_micro_batch(source, 0, range(8)), RunError)
    assert "cat/2.jpg was an image at the start and is none now ([Errno 2] No such file" in message


def test_folders_that_cannot_be_used(tmp_path, folder):
    def message(path, **changes) -> str:
        return problem(lambda: images.build(make_recipe(path, **changes)))

    assert re.search(r"train_dir .*nowhere: it cannot be read \(No such file", message(tmp_path / "nowhere"))
    assert "it cannot be read (Not a directory)" in message(folder / "cat" / "0.jpg")
    assert "has no class folder (4 images lie in it directly)" in message(folder / "cat")
    assert "class data holds folders (cat, dog), but images must be CLASS/NAME" in message(tmp_path)
    pattern = "num_labels is 5, but train_dir .* has 2 classes \\(cat, dog\\): set num_labels to 2"
    assert re.search(pattern, message(folder, num_labels=5))
    (folder / "eel").mkdir()
    (folder / "eel" / "notes.txt").write_text("none yet")
    assert "class eel holds no image (1 other files): remove it, or add images (.png" in message(folder, num_labels=3)
    (folder / "eel" / "link.png").symlink_to(tmp_path / "gone.png")
    assert "eel/link.png cannot be read (No such file" in message(folder, num_labels=3)

    def forbid(path):
        if str(path).endswith("dog"):
            raise PermissionError(errno.EACCES, "Permission denied")

    (folder / "eel" / "link.png").unlink()
    with before("os.scandir", forbid):
        assert "dog cannot be read (Permission denied): check the path and its permis" in message(folder, num_labels=3)


def test_all_empty_classes_are_named_at_once(folder):
    for name in ("ant", "bee"):
        (folder / name).mkdir()
    with pytest.raises(UsageError) as error:
        images.build(make_recipe(folder, num_labels=4))
    assert ["ant" in line or "bee" in line for line in error.value.problems] == [True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_dir": None, "dataset_name": None},
            "of train_dir, dataset_name exactly one must be set, but none is set",
        ),
        (
            {"dataset_name": "a"},
            "of train_dir, dataset_name exactly one must be set, but train_dir and dataset_name are",
        ),
        (
            {"train_dir": None, "dataset_name": "a", "validation_dir": "b"},
            "validation_dir is b, but train_dir is not set: set both or neither",
        ),
        ({"image_mean": [0.5]}, "image_mean [0.5] must hold one number for each of num_channels 3"),
        ({"image_std": [0.5, 0.5]}, "image_std [0.5, 0.5] must hold one number for each of num_channels 3"),
        ({"image_std": [0.5, 0.5, 0.0]}, "image_std [0.5, 0.5, 0.0] must be positive numbers"),
        (
            {"num_channels": 2, "image_mean": [0.5, 0.5], "image_std": [0.5, 0.5]},
            "num_channels is 2, must be 1 (grey) or 3 (red, green, blue)",
        ),
        ({"augmentation": "flip"}, "augmentation is 'flip', must be one of none, shift, shift_flip, imagenet"),
    ],
)
def test_mistakes_in_a_recipe(tmp_path, changes, message):
    assert message in problem(lambda: make_recipe(tmp_path, **changes))


def test_the_folder_replaces_the_dataset_and_does_not_decide(tmp_path):
    recipe = make_recipe(tmp_path)
    assert (recipe.train_dir, recipe.dataset_name) == (str(tmp_path), None)
    assert make_recipe(tmp_path / "other").fingerprint == recipe.fingerprint
    assert make_recipe(tmp_path, image_mean=[0.5, 0.5, 0.5]).fingerprint != recipe.fingerprint


@pytest.mark.parametrize(
    ("side", "augmentation", "num_channels"), [(32, "shift", 1), (48, "imagenet", 3), (400, "none", 3)]
)
def test_the_saved_processor_sees_the_pixels_that_were_evaluated(tmp_path, side, augmentation, num_channels):
    """Of images of odd shapes, too: to whole pixels, and beyond 384, where other processors do not crop."""
    rng = np.random.default_rng(0)
    for number, shape in enumerate([(7, 90), (41, 40), (300, 33), (side, side), (31, 64), (200, 301)]):
        folder = tmp_path / "ab"[number % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*shape, 3)).astype(np.uint8)).save(folder / f"{number}.png")
    shape = {"image_height": side, "image_width": side, "augmentation": augmentation, "num_channels": num_channels}
    levels = {"image_mean": (0.4,) * num_channels, "image_std": (0.25,) * num_channels}
    recipe = make_recipe(tmp_path, validation_dir=str(tmp_path), **shape, **levels)
    _, held_out = images.build(recipe)
    seen = held_out.collate([held_out.draw(0, place) for place in range(len(held_out))])["pixel_values"]
    files = [Image.open(tmp_path / held_out.name(place)) for place in range(len(held_out))]
    pictures = [file.convert("RGB" if num_channels == 3 else "L") for file in files]
    processed = images.make_processor(recipe)(pictures, return_tensors="pt")["pixel_values"]
    assert (processed - seen).abs().max() < 1e-5
