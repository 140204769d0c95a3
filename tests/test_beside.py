"""benchmarks/seq2seq.py and image_text.py: a trainer that is measured beside ours takes our samples, and has our first loss."""

import importlib
import json

import pytest
import torch
from common import ROOT

from samestep.cut.order import Order
from samestep.recipe.catalog import load

TINY_SEQ2SEQ = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT |= {"num_key_value_heads": 1, "max_position_embeddings": 2048}
TEXT |= {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
TINY_IMAGE_TEXT = {"text_config": TEXT, "vision_config": VISION | {"window_size": 112, "fullatt_block_indexes": [0]}}
PROGRAMS = {"seq2seq": ["trainer", "padded"], "image_text": ["sft"]}


@pytest.fixture
def module(monkeypatch):
    """Load modules of benchmarks/ and benchmarks/peers/ by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "peers")
    return importlib.import_module


@pytest.fixture
def prepare(module, tmp_path, monkeypatch):
    """prepare("seq2seq") -> the folder of a workload with a tiny model and few samples, and what its samples are like."""

    def make(name: str):
        monkeypatch.chdir(tmp_path)
        benchmark, sizes = module(name), {"global_batch_size": 4, "learning_rate_batch_size": 4}
        if name == "seq2seq":
            benchmark.write_data(tmp_path, 12)
            values = benchmark.SHAPE | TINY_SEQ2SEQ
        else:
            benchmark.write_data(tmp_path, 12, TINY_IMAGE_TEXT)
            values = benchmark.WORKLOADS["qwen2_5_vl_1024"].values
        folder = module("harness").write_recipe(tmp_path / "tiny", values | sizes)
        return folder, benchmark.COMPARISON.prepare(folder)

    return make


def compute_first_loss(folder) -> tuple[int, float]:
    """Compute the first step in one micro-batch: its number of targets, and its loss."""
    recipe = load(str(folder / "recipe.yaml"))
    source, _ = recipe.parts.find("data")(recipe)
    torch.manual_seed(recipe.seed)
    model = recipe.parts.find("model").from_recipe(recipe, source)
    epochs, ids = Order(len(source), 4, recipe.seed, recipe.epoch_end).samples(0)
    batch = source.collate([source.draw(*pair) for pair in zip(epochs.tolist(), ids.tolist(), strict=True)])
    num_targets = int(batch.pop("counts"))
    return num_targets, model(**batch)[0].item() / num_targets


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_trainer_is_trained_on_our_samples(module, prepare, name):
    """The numbers of targets and the first loss are ours, and a trainer with others is refused."""
    folder, data = prepare(name)
    beside, clock, comparison = module("beside"), module("clock"), module(name).COMPARISON
    trainers = module(comparison.peers.removesuffix(".py"))
    memory = module("chat_trainers").Memory(folder / "base")
    arguments = PROGRAMS[name][1:]
    trainers.train(folder, clock.Clock(folder / "stamps"), memory, "no", *arguments, num_steps=2)
    _, stamps = clock.read(folder / "stamps")
    assert [stamp.units for stamp in stamps] == data["first_steps"][:2]
    num_targets, loss = compute_first_loss(folder)
    assert (stamps[0].units, stamps[0].loss) == (num_targets, pytest.approx(loss, rel=1e-5))
    title = next(title for title, words in comparison.programs.items() if list(words) == PROGRAMS[name])
    seen = {"ours": stamps, title: stamps}
    beside.check_same(comparison, seen, data["first_steps"][:2], "no")
    others = [stamps[0]._replace(loss=1.001 * stamps[0].loss), stamps[1]]
    for expected, series in (([1, 2], stamps), (data["first_steps"][:2], others)):
        with pytest.raises(SystemExit):
            beside.check_same(comparison, seen | {title: series}, expected, "no")
    assert int((folder / "base").read_text()) > 10_000


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_the_samples_are_like_is_on_the_page(module, prepare, name):
    """Beside speed and memory, of the whole process, too."""
    _, data = prepare(name)
    data.pop("first_steps")
    benchmark, other = module(name), {"seq2seq": "Seq2SeqTrainer", "image_text": "TRL"}[name]
    row = {"workload": next(iter(benchmark.WORKLOADS)), "precision": "no", "data": data, "first_memory": 0.3}
    row |= {"rates": {"ours": [100.0, 120.0, 90.0], other: [50.0, 40.0, 60.0]}}
    row |= {"memory": {"ours": 0.1, other: 0.4}, "peaks": {"ours": 0.6, other: 1.0}}
    row |= {"command": f"python benchmarks/{name}.py", "machine": "some machine", "load": 0.1}
    page = benchmark.markdown(json.loads(json.dumps({"rows": [row]})))
    assert f"| {row['workload']} | no | 100 (90 to 120) | 2.00 (1.50 to 3.00) |" in page
    assert "| 0.30 | 0.10 | 0.60 | 0.40 (0.25; 0.60) |" in page
    assert f"12 {'pairs' if name == 'seq2seq' else 'samples'}" in page
    assert "padding in a batch" in page
