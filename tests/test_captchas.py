"""Captchas: every image decided by its number, drawn once, kept whole, the same wherever and however it is drawn."""

import hashlib
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import captcha.image
import numpy as np
import pytest
import torch
from hooks import list_calls
from torch.utils.data import DataLoader
from waiting import PATIENCE, until

from samestep.cut.layout import solve_layout
from samestep.cut.order import Order
from samestep.data import captchas
from samestep.data.captchas import Captcha, Captchas, build, draw_captcha
from samestep.data.steps import Steps
from samestep.errors import RunError, UsageError
from samestep.recipe.catalog import load
from samestep.recipe.tasks.captcha_recognition import CaptchaRecognition

SMALL = {
    "image_height": 30,
    "image_width": 80,
    "conv_channels": [4],
    "num_train_samples": 64,
    "num_validation_samples": 6,
}


FOR_LONG = 10**6
"""Captchas that are not drawn before what a test waits for."""


def make(**changes) -> CaptchaRecognition:
    return load("captcha_3xa100", SMALL | changes)


@pytest.fixture(autouse=True)
def cache(tmp_path, use_cache) -> Path:
    """Make an empty cache for each test; the folder of the captchas."""
    use_cache(tmp_path / "cache")
    return tmp_path / "cache" / "captchas"


@pytest.fixture
def draws(monkeypatch) -> list[tuple[str, int]]:
    """Record (split, sample id) of each captcha that this process draws."""
    calls = []

    def draw(recipe, sample_id, split):
        calls.append((split, sample_id))
        return draw_captcha(recipe, sample_id, split)

    monkeypatch.setattr(captchas, "draw_captcha", draw)
    return calls


def digest_of_draws(recipe: CaptchaRecognition, ids: list[int]) -> str:
    """Hash images and labels of both splits."""
    parts = [part.tobytes() for i in ids for split in captchas.SPLITS for part in draw_captcha(recipe, i, split)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# one captcha


def test_a_captcha_is_an_image_and_the_places_of_its_characters():
    image, label = draw_captcha(make(num_characters=5), 3, "train")
    assert (image.shape, image.dtype) == ((30, 80, 3), np.uint8)
    assert (label.shape, label.dtype) == ((5,), np.int64)
    assert image.min() < 200 < 230 < image.max(), "dark on light"


def test_it_is_the_same_again_whatever_was_drawn_before():
    first = digest_of_draws(make(), [5])
    digest_of_draws(make(), [0, 1])
    assert digest_of_draws(make(), [5]) == first


def test_it_is_the_same_in_another_process():
    program = "from test_captchas import digest_of_draws, make; print(digest_of_draws(make(), [7, 0, 123456]))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    other = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert other.stdout.strip() == digest_of_draws(make(), [7, 0, 123456]), other.stderr


def test_other_numbers_splits_and_seeds_give_other_captchas():
    recipe, texts, images = make(), set(), set()
    draws = [draw_captcha(recipe, i, split) for i in range(30) for split in captchas.SPLITS]
    draws += [draw_captcha(make(seed=recipe.seed + 1), i, "train") for i in range(30)]
    for image, label in draws:
        texts.add(label.tobytes())
        images.add(image.tobytes())
    assert len(texts) == len(images) == 90


def test_one_text_looks_different_every_time():
    """The image is drawn from the seed too, not the text alone."""
    recipe = make(alphabet="a")
    assert len({draw_captcha(recipe, i, "train")[0].tobytes() for i in range(20)}) == 20


def test_the_texts_are_the_ones_they_always_were():
    """Golden: what moves them makes other data of the same recipe. They depend on no version of captcha or pillow."""
    recipe = load("captcha_3xa100")
    texts = [
        "".join(recipe.alphabet[i] for i in draw_captcha(recipe, n, s)[1]) for s in captchas.SPLITS for n in (0, 9)
    ]
    assert texts == ["e6Qe", "3z0j", "Qd1A", "mzSh"]


def test_the_label_is_the_text_that_is_drawn():
    recipe = make()
    draw_captcha(recipe, 10, "train")  # draws others, too, to see that the package does what it should
    with list_calls(captcha.image.ImageCaptcha.generate_image) as calls:
        label = draw_captcha(recipe, 11, "train")[1]
    assert [arguments["chars"] for _, arguments in calls] == ["".join(recipe.alphabet[place] for place in label)]


def test_every_character_is_about_as_likely():
    recipe = make(alphabet="abcde", num_characters=20, image_width=20, image_height=8, conv_channels=[2])
    labels = np.concatenate([draw_captcha(recipe, i, "train")[1] for i in range(30)])
    assert np.bincount(labels, minlength=5).min() > 80, "120 expected, standard deviation 10"


def test_seeded_numbers_are_in_range():
    seeded = captchas.SeededSecrets(np.random.Philox(1))
    assert sorted({seeded.randbelow(3) for _ in range(100)}) == [0, 1, 2]
    bits = [seeded.randbits(32) for _ in range(200)]
    assert max(bits) < 2**32
    assert max(bits) > 2**31 > min(bits) >= 0
    assert {seeded.choice("xy") for _ in range(50)} == {"x", "y"}


def test_who_else_uses_the_package_keeps_unpredictable_numbers():
    import secrets

    draw_captcha(make(), 0, "train")
    assert captcha.image.secrets is secrets
    theirs = captcha.image.ImageCaptcha(80, 30)
    assert theirs.generate_image("abcd").tobytes() != theirs.generate_image("abcd").tobytes()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("secrets.", "", "the same numbers give two images"),
        ("secrets.randbelow(21)", "__import__('random').randrange(21)", "the same numbers give two images"),
        ("secrets.randbelow(21)", "secrets.token_bytes(1)[0] % 21", "it fails .AttributeError.*token_bytes"),
        ("class ImageCaptcha", "class PictureCaptcha", "it fails .AttributeError.*ImageCaptcha"),
    ],
)
def test_a_package_that_draws_from_elsewhere_is_refused(tmp_path, monkeypatch, old, new, message):
    folder = tmp_path / "captcha"
    shutil.copytree(Path(captcha.image.__file__).parent, folder)
    (folder / "__init__.py").write_text("__version__ = '9.8.7'\n")
    source = (folder / "image.py").read_text()
    assert old in source
    if old == "secrets.":
        source = source.replace("import secrets", "from secrets import choice, randbelow, randbits")
    (folder / "image.py").write_text(source.replace(old, new))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("captcha", "captcha.image"):
        monkeypatch.delitem(sys.modules, name)
    captchas._module.cache_clear()
    try:
        with pytest.raises(
            UsageError, match=rf"captcha 9\.8\.7 cannot be seeded: {message}.*pip install captcha==0\.7\.1"
        ):
            build(make(), 2)
    finally:
        captchas._module.cache_clear()


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "captcha", None)
    with pytest.raises(
        UsageError, match=r'captcha \(extra "images"\), which is not installed: pip install captcha==0\.7\.1$'
    ):
        build(make(), 1)


# ---------------------------------------------------------------------------------------------------------------------
# the source of samples


@pytest.fixture
def train() -> Captchas:
    return build(make(), 1)[0]


def test_a_micro_batch_holds_what_is_drawn(train):
    ids = [9, 0, 63, 9]
    micro_batch = train.collate([train.draw(epoch, i) for epoch, i in enumerate(ids)])
    assert micro_batch["pixel_values"].dtype == torch.float32
    assert micro_batch["pixel_values"].shape == (4, 3, 30, 80)
    assert micro_batch["pixel_values"].is_contiguous(memory_format=torch.channels_last)
    assert micro_batch["labels"].dtype == micro_batch["counts"].dtype == torch.int64
    assert micro_batch["counts"].tolist() == [16, 4]
    for i, pixels, label in zip(ids, micro_batch["pixel_values"], micro_batch["labels"], strict=True):
        image, text = draw_captcha(make(), i, "train")
        back = ((pixels.permute(1, 2, 0) + 1) * 127.5).round().to(torch.uint8)
        assert np.array_equal(back.numpy(), image)
        assert np.allclose(train.pictures(pixels[None])[0], image / 255, atol=1e-6)
        assert label.tolist() == text.tolist()


def test_pixels_lie_between_minus_one_and_one(tmp_path):
    rows = np.zeros(2, captchas._row((4, 5), 2))
    rows["image"][1] = 255
    (tmp_path / "two").write_bytes(bytes(captchas.DIGEST_SIZE) + rows.tobytes())
    pixels = Captchas(tmp_path / "two", 2, (4, 5), 2, "").collate([Captcha(0), Captcha(1)])["pixel_values"]
    assert (pixels[0] == -1).all()
    assert (pixels[1] == 1).all()


def test_a_micro_batch_of_no_samples(train):
    micro_batch = train.collate([])
    assert micro_batch["pixel_values"].shape == (0, 3, 30, 80)
    assert (micro_batch["labels"].shape, micro_batch["labels"].dtype) == ((0, 4), torch.int64)
    assert micro_batch["counts"].tolist() == [0, 0]


def test_micro_batches_are_copies(train):
    """What a training step does to a micro-batch must not reach the file, nor the next micro-batch."""
    micro_batch = train.collate([train.draw(0, 1)])
    micro_batch["pixel_values"].zero_()
    micro_batch["labels"].zero_()
    again = train.collate([train.draw(0, 1)])
    assert again["pixel_values"].any()
    assert again["labels"].tolist() == [draw_captcha(make(), 1, "train")[1].tolist()]


def test_a_sample_is_only_its_number(train):
    train.file.unlink()
    sample = train.draw(4, 33)
    assert (sample.sample_id, sample.length, train.max_length, train.longest().length) == (33, 1, 1, 1)
    with pytest.raises(RunError, match=r"cannot be read any more \(.*No such file.*\): start again"):
        train.collate([sample])


def test_numbers_and_lengths():
    sources = build(make(), 1)
    assert [len(source) for source in sources] == [64, 6]
    image, _ = draw_captcha(make(), 2, "validation")
    assert np.array_equal(sources[1].rows["image"][2], image), "the held-out ones are of their own split"


def test_a_copy_opens_the_file_itself(train):
    train.collate([train.draw(0, 0)])
    written = pickle.dumps(train)
    assert len(written) < 1000 < train.file.stat().st_size
    copy = pickle.loads(written)
    assert copy.fingerprints == train.fingerprints
    assert torch.equal(copy.collate([Captcha(5)])["pixel_values"], train.collate([Captcha(5)])["pixel_values"])


def test_steps_are_the_same_with_workers(train):
    train.collate([train.draw(0, 0)])  # the file is open when the workers are forked
    order = Order(len(train), 16, seed=1)
    layout = solve_layout(num_processes=1, global_batch_size=16, per_device_train_batch_size=5)
    steps = Steps(train, order, layout, process_index=0)
    workers = DataLoader(steps, batch_size=None, sampler=range(3), num_workers=1)
    for ours, theirs in zip((steps[0], steps[1], steps[2]), workers, strict=True):
        assert ours.counts.tolist() == theirs.counts.tolist() == [64, 16]
        for micro_batch, other in zip(ours.micro_batches, theirs.micro_batches, strict=True):
            assert torch.equal(micro_batch["pixel_values"], other["pixel_values"])
            assert torch.equal(micro_batch["labels"], other["labels"])


def test_the_fingerprints_are_of_the_content(train, cache):
    assert list(train.fingerprints) == ["captchas"]
    assert train.fingerprints["captchas"] == hashlib.sha256(train.file.read_bytes()[32:]).hexdigest()[:16]
    assert build(make(seed=3), 1)[0].fingerprints != train.fingerprints
    shutil.rmtree(cache)
    assert build(make(), 1)[0].fingerprints == train.fingerprints


# ---------------------------------------------------------------------------------------------------------------------
# the files


def test_it_is_drawn_once(draws):
    first = build(make(), 1)
    assert draws == [("train", i) for i in range(64)] + [("validation", i) for i in range(6)]
    draws.clear()
    assert [source.fingerprints for source in build(make(), 1)] == [source.fingerprints for source in first]
    build(make(learning_rate=1.0, hidden_size=7), 1)
    assert draws == []


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"image_height": 31},
        {"image_width": 79},
        {"alphabet": "abc"},
        {"num_characters": 3},
        {"num_train_samples": 40},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_decides_it_has_a_file_of_its_own(draws, cache, changes):
    build(make(), 1)
    draws.clear()
    build(make(**changes), 1)
    assert ("train", 0) in draws
    assert (("validation", 0) in draws) is ("num_train_samples" not in changes)
    draws.clear()
    build(make(), 1)
    assert draws == []


@pytest.mark.parametrize("name", ["captcha", "PIL"])
def test_another_version_draws_anew(draws, monkeypatch, name):
    build(make(), 1)
    draws.clear()
    monkeypatch.setattr(sys.modules[name], "__version__", "0.0.1")
    build(make(), 1)
    assert len(draws) == 70


@pytest.mark.parametrize("num_workers", [2, None])
def test_processes_share_the_work(draws, cache, num_workers):
    recipe = make(num_train_samples=10 * captchas.PART_SIZE)  # more parts than are drawn ahead
    alone = build(recipe, 1)
    shutil.rmtree(cache)
    draws.clear()
    shared = build(recipe, num_workers)
    assert [source.fingerprints for source in shared] == [source.fingerprints for source in alone]
    if num_workers or os.cpu_count() > 1:
        assert draws == [("validation", i) for i in range(6)], "so few are drawn here, the others elsewhere"


def truncate(content: bytes) -> bytes:
    return content[:-1000]


def flip(content: bytes) -> bytes:
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


def empty(content: bytes) -> bytes:
    return b""


def unfinished(content: bytes) -> bytes:
    return bytes(32) + content[32:]


def extend(content: bytes) -> bytes:
    return content + b"more"


@pytest.mark.parametrize("damage", [truncate, flip, empty, unfinished, extend])
def test_a_damaged_file_is_drawn_anew(train, draws, damage):
    content = train.file.read_bytes()
    train.file.write_bytes(damage(content))
    assert build(make(), 1)[0].fingerprints == train.fingerprints
    assert draws == [("train", i) for i in range(64)]
    assert train.file.read_bytes() == content


def test_a_full_disk_is_one_message(cache):
    """A limit on the size of a file stands for the disk: the system refuses to write in the same way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(
            UsageError,
            match=r"captchas cannot be written to .*captchas \(File too large\): 0\.5 MB must fit there, or set HF_DATA",
        ):
            build(make(), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(cache.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_message(cache):
    cache.parent.write_text("a file")
    with pytest.raises(UsageError, match=r"captchas cannot be written to .*captchas \(.*\): 0\.5 MB must fit"):
        build(make(), 1)


def test_two_jobs_at_once(cache):
    context = multiprocessing.get_context("fork")
    barrier, answers = context.Barrier(2), context.Queue()

    def job() -> None:
        barrier.wait()
        answers.put([source.fingerprints for source in build(make(), 1)])

    jobs = [context.Process(target=job) for _ in range(2)]
    for process in jobs:
        process.start()
    first, second = answers.get(timeout=PATIENCE), answers.get(timeout=PATIENCE)
    for process in jobs:
        process.join()
    assert first == second == [source.fingerprints for source in build(make(), 1)]
    assert len(list(cache.iterdir())) == 2


def test_what_killed_jobs_left_goes_after_a_day(cache):
    cache.mkdir(parents=True)
    old, new = cache / "train-1.a.part", cache / "train-1.b.part"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (old.stat().st_mtime - 2 * captchas.DAY,) * 2)
    build(make(), 1)
    assert not old.exists()
    assert new.exists(), "somebody may be writing it"


def find_children(pid: int) -> list[int]:
    """Find the processes that a process has started, and that have not ended."""
    statuses = {path: path.read_text().rsplit(")", 1)[1].split() for path in Path("/proc").glob("[0-9]*/stat")}
    return [
        int(path.parent.name) for path, (state, parent, *_) in statuses.items() if parent == str(pid) != state != "Z"
    ]


def test_a_worker_that_is_killed_is_one_message(cache):
    def kill() -> None:
        worker = until(multiprocessing.active_children, "worker")[0]
        os.kill(worker.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunError, match="was killed, perhaps for its memory: lower --preprocessing_num_workers"):
        build(make(num_train_samples=FOR_LONG), 2)
    killer.join()
    assert list(cache.iterdir()) == []


def test_workers_end_with_a_job_that_is_killed():
    process = multiprocessing.get_context("fork").Process(target=build, args=(make(num_train_samples=FOR_LONG), 2))
    process.start()
    try:
        workers = until(lambda: len(found := find_children(process.pid)) == 2 and found, "two workers")
    finally:
        process.kill()
        process.join()
    try:
        until(lambda: not any(map(is_running, workers)), "end of the workers")
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
