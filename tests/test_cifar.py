"""CIFAR-10's binary files, drawn here: the pixels and labels that they hold, what is held out, and what is refused."""

import pickle

import numpy as np
import pytest
import torch
from common import evaluations, metrics

from samestep.data import cifar, images
from samestep.errors import UsageError
from samestep.recipe.catalog import load

PLAIN = {"image_mean": (0.0, 0.0, 0.0), "image_std": (1.0, 1.0, 1.0), "augmentation": "none"}
NUM_ROWS = 8


def draw(seed: int, num_rows: int = NUM_ROWS) -> tuple[np.ndarray, np.ndarray]:
    """Draw images, uint8 [rows, 32, 32, 3], and their labels, uint8 [rows]."""
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(num_rows, 32, 32, 3), dtype=np.uint8), rng.integers(
        10, size=num_rows, dtype=np.uint8
    )


def write(path, pixels: np.ndarray, labels: np.ndarray) -> None:
    planes = pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.concatenate([labels[:, None], planes], 1).tobytes())


@pytest.fixture
def folder(tmp_path):
    """Write two training files, of which the tenth comes behind the second, and the held-out one."""
    for name, seed in (("data_batch_2.bin", 2), ("data_batch_10.bin", 10), ("test_batch.bin", 11)):
        write(tmp_path / "cifar" / name, *draw(seed))
    (tmp_path / "cifar" / "batches.meta.txt").write_text("airplane\n")
    return tmp_path / "cifar"


def build(folder, **changes):
    return images.build(load("resnet18_cifar10", PLAIN | {"train_dir": str(folder)} | changes))


def refusal(folder, **changes) -> str:
    with pytest.raises(UsageError) as error:
        build(folder, **changes)
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


def whole(source: images.Images, epoch: int = 0) -> dict[str, torch.Tensor]:
    return source.collate([source.draw(epoch, number) for number in range(len(source))])


def test_the_pixels_are_those_of_the_files_in_the_order_of_their_numbers(folder):
    train, held_out = build(folder)
    for source, seeds in ((train, (2, 10)), (held_out, (11,))):
        pixels, labels = (np.concatenate(parts) for parts in zip(*map(draw, seeds), strict=True))
        batch = whole(source)
        found = (batch["pixel_values"].permute(0, 2, 3, 1).numpy() * 255).round()
        assert (found == pixels).all()
        assert (batch["labels"].numpy() == labels).all()
    assert train.classes[0] == "airplane"
    assert train.classes[9] == "truck"


def test_what_is_held_out(folder, tmp_path):
    """The file of that name in validation_dir, or else in train_dir; without one a fraction; or folders of the same classes."""
    write(tmp_path / "other" / "test_batch.bin", *draw(12, 3))
    assert len(build(folder, validation_dir=str(tmp_path / "other"))[1]) == 3
    assert len(build(folder)[1]) == NUM_ROWS
    cat = images.Image.fromarray(draw(13)[0][0])
    (tmp_path / "folders" / "cat").mkdir(parents=True)
    cat.save(tmp_path / "folders" / "cat" / "1.png")
    held_out = build(folder, validation_dir=str(tmp_path / "folders"))[1]
    assert whole(held_out)["labels"].tolist() == [3]
    (folder / "test_batch.bin").unlink()
    assert build(folder)[1] is None
    assert len(build(folder, validation_fraction=0.25)[1]) == 4


def test_a_fingerprint_knows_the_content_and_not_the_folder(folder, tmp_path):
    prints = build(folder)[0].fingerprints
    moved = folder.rename(tmp_path / "moved")
    assert build(moved)[0].fingerprints == prints
    pixels, labels = draw(2)
    pixels[5, 3, 3, 1] ^= 1
    write(moved / "data_batch_2.bin", pixels, labels)
    assert build(moved)[0].fingerprints != prints


def test_images_are_shifted_and_mirrored(folder):
    """Each is the image, or its mirror image, moved by up to four pixels; both come, and the draw is the sample's."""
    train, _ = build(folder, augmentation="shift_flip")
    pixels = np.concatenate([draw(2)[0], draw(10)[0]])
    mirrored = []
    for epoch in range(3):
        found = (whole(train, epoch)["pixel_values"].permute(0, 2, 3, 1).numpy() * 255).round()
        for number, image in enumerate(found):
            inner = image[4:-4, 4:-4]
            windows = {
                is_flipped: [
                    (inner == (pixels[number, :, ::-1] if is_flipped else pixels[number])[y : y + 24, x : x + 24]).all()
                    for y in range(9)
                    for x in range(9)
                ]
                for is_flipped in (False, True)
            }
            assert sum(map(sum, windows.values())) == 1
            mirrored.append(any(windows[True]))
        assert torch.equal(
            train.collate([train.draw(epoch, 5)])["pixel_values"][0], whole(train, epoch)["pixel_values"][5]
        )
    assert 10 < sum(mirrored) < 38


def test_what_is_refused(folder):
    name = folder / "data_batch_2.bin"
    content = name.read_bytes()
    name.write_bytes(content[:-1])
    assert "data_batch_2.bin has 24,583 bytes, must have 3,073 for each image" in refusal(folder)
    name.write_bytes(b"")
    assert "has 0 bytes" in refusal(folder)
    name.write_bytes(content[:3073] + b"\x0a" + content[3074:])
    assert "data_batch_2.bin, image 1 has the label 10, must be 0 to 9" in refusal(folder)
    name.unlink()
    name.mkdir()
    assert "data_batch_2.bin cannot be read" in refusal(folder)
    name.rmdir()
    name.write_bytes(content)
    assert "num_labels is 5" in refusal(folder, num_labels=5)


def test_the_pickled_edition_is_not_read(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": []}))
    assert "a pickle is a program: give the binary edition" in refusal(tmp_path)
    assert not cifar.is_cifar(str(tmp_path / "nosuch"))


def test_a_step_does_not_depend_on_k(train, folder):
    """Two steps of the recipe in a smaller shape, in 1 and in 4 micro-batches; with batch normalisation they differ."""
    shape = "--embedding_size 4 --hidden_sizes 4 8 --depths 1 1 --global_batch_size 8 --learning_rate 0.01"
    flags = f"--recipe resnet18_cifar10 --train_dir {folder} {shape} --num_train_samples 16 --num_train_epochs none"
    losses = {}
    for normalization in ("group", "batch"):
        for k in (1, 4):
            more = f"--max_train_steps 2 --normalization {normalization} --gradient_accumulation_steps {k}"
            run = train(f"{normalization}-{k}", f"{flags} {more}", program="train_image_classifier")
            losses[normalization, k] = [line["loss"] for line in metrics(run)]
            assert "eval_accuracy" in evaluations(run)[-1]
    assert losses["group", 1] == pytest.approx(losses["group", 4], rel=1e-5)
    assert losses["batch", 1] != pytest.approx(losses["batch", 4], rel=1e-3)
