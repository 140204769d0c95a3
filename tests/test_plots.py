"""Pictures of predictions and of confusions: what is shown, and what is written above it."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from samestep.data import predictions
from samestep.training import plots
from samestep.training.evaluation import predict

pytestmark = pytest.mark.usefixtures("real_figures")


def titles(figure) -> list[tuple[str, str]]:
    return [(axes.get_title(), axes.title.get_color()) for axes in figure.axes if axes.get_title()]


def test_wrong_ones_first_and_at_most_sixteen_of_each():
    pictures = np.linspace(0, 1, 60)[:, None, None, None] * np.ones((60, 4, 6, 3))
    labels = [str(number) for number in range(60)]
    read = ["x" if number % 3 == 0 else name for number, name in enumerate(labels)]
    figure = plots.draw_predictions(pictures, labels, read, "a title", [f"{'d' * 40}/{n}" for n in labels])
    captions = titles(figure)
    assert figure.get_suptitle() == "a title"
    below = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert below[:2] == [f"…{'d' * 25}/0", f"…{'d' * 25}/3"], "the end of a name"
    assert [text for text, _ in captions[:3]] == ["x (is 0)", "x (is 3)", "x (is 6)"]
    assert [text for text, _ in captions[16:19]] == ["1", "2", "4"]
    assert len(captions) == 32
    assert [colour for _, colour in captions] == [plots.OUTCOMES["wrong"]] * 16 + [plots.OUTCOMES["right"]] * 16
    images = [axes.images[0].get_array() for axes in figure.axes if axes.images]
    assert np.array_equal(images[1], pictures[3])


@pytest.mark.parametrize("predictions", ["ab", "xx", "ax"])
def test_all_right_all_wrong_and_grey(predictions):
    file = io.BytesIO()
    plots.draw_predictions(np.zeros((2, 5, 5, 1)), ["a", "b"], list(predictions), "").savefig(file)
    assert Image.open(file).format == "PNG"


class Numbers:
    """Sample i is an image of i everywhere; its label is i."""

    def __len__(self) -> int:
        return 10

    def draw(self, epoch: int, sample_id: int) -> int:
        return sample_id

    def collate(self, samples: list[int]) -> dict[str, torch.Tensor]:
        labels = torch.tensor(samples)
        return {"pixel_values": labels.float()[:, None, None, None].expand(-1, 1, 2, 2), "labels": labels}


class Reads(torch.nn.Linear):
    """Says the number that it sees."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        assert pixel_values.dtype == self.weight.dtype
        return -((torch.arange(20.0) - pixel_values[:, 0, 0, :1]) ** 2)


@pytest.mark.parametrize(("limit", "expected"), [(4, [0, 3, 6, 9]), (10, list(range(10))), (99, list(range(10)))])
def test_samples_are_spread_over_the_dataset(limit, expected):
    micro_batch, places = predict(Reads(1, 1).double(), Numbers(), limit)
    assert micro_batch["labels"].tolist() == places.tolist() == expected


def confusion(counts, names):
    """Draw a confusion; the axes of the picture, and the title above them."""
    figure = plots.draw_confusion(np.asarray(counts), names)
    return figure.axes[0], figure.get_suptitle()


def test_a_row_of_a_confusion_is_a_true_class(monkeypatch):
    axes, title = confusion([[6, 2], [0, 992]], ["cat", "dog"])
    assert title == "accuracy 99.8%, 1,000 samples"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted", "true")
    assert axes.images[0].get_array().tolist() == [[0.75, 0.25], [0, 1]]
    assert axes.images[0].get_clim() == (0, 1)
    numbers = {text.get_position(): text.get_text() for text in axes.texts}
    assert numbers == {(0, 0): "6", (1, 0): "2", (0, 1): "0", (1, 1): "992"}
    assert [[tick.get_text() for tick in ticks] for ticks in (axes.get_xticklabels(), axes.get_yticklabels())] == [
        ["cat", "dog"],
        ["cat", "dog"],
    ]


def test_classes_without_samples_long_names_and_no_samples_at_all(monkeypatch):
    axes, title = confusion([[0, 0], [1, 3]], ["x" * 17, "y" * 16])
    assert title == "accuracy 75.0%, 4 samples"
    assert axes.images[0].get_array().tolist() == [[0, 0], [0.25, 0.75]]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["x" * 15 + "…", "y" * 16]
    assert confusion(np.zeros((3, 3), int), list("abc"))[1] == "accuracy 0.0%, 0 samples"


@pytest.mark.parametrize(("num_classes", "numbered"), [(20, 400), (21, 0)])
def test_numbers_stand_in_up_to_twenty_classes(monkeypatch, num_classes, numbered):
    axes, _ = confusion(np.eye(num_classes, dtype=int), [str(number) for number in range(num_classes)])
    assert len(axes.texts) == numbered
    assert len(axes.get_xticklabels()) == num_classes


@pytest.mark.parametrize("num_classes", [2, 30])
def test_a_confusion_is_a_picture(num_classes):
    counts = np.random.default_rng(0).integers(0, 10**6, (num_classes, num_classes))
    file = io.BytesIO()
    plots.draw_confusion(counts, ["any name at all that is long"] * num_classes).savefig(file)
    picture = Image.open(file)
    assert picture.format == "PNG"
    assert max(picture.size) < 2000


def test_the_noise_scale_has_a_panel_where_it_was_measured(monkeypatch):
    """Its intervals, cut off where they have no end, beside the batch."""
    from samestep.contrib.publishing import charts

    steps = [{"step": n, "loss": 1.0, "samples": 16} for n in range(1, 41)]
    figure = charts.draw_training(steps, [], ["lm"], "title")
    assert "gradient noise scale, samples" not in [axes.get_ylabel() for axes in figure.axes]
    for line in steps[::2]:
        line |= {"grad_signal": 1.0 if line["step"] < 21 else (-1.0) ** (line["step"] // 2), "grad_noise": 4.0}
    (axes,) = (
        axes
        for axes in charts.draw_training(steps, [], ["lm"], "title").axes
        if axes.get_ylabel() == "gradient noise scale, samples"
    )
    assert axes.get_visible()
    ranges = [line.get_ydata() for line in axes.lines if len(line.get_xdata()) == 2 and line.get_color() == "C0"]
    assert ranges[0] == pytest.approx([64, 64])
    assert ranges[-1][1] == 16_000
    assert axes.get_legend_handles_labels()[1] == ["global batch: 16"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("values", [[1.7e308, -1.7e308, 1.0], [None, 1.7e308, None], [5e-324, 0.0, -5e-324]])
def test_losses_at_the_ends_of_what_a_float_holds_are_drawn(values):
    from samestep.contrib.publishing import charts

    steps = [{"step": 2**53 - 4 + number, "loss": value} for number, value in enumerate(values)]
    evaluations = [{"step": 2, "eval_loss": 1.7e308, "eval_accuracy": -1.7e308}]
    file = io.BytesIO()
    charts.draw_training(steps, evaluations, ["lm"], "a run").savefig(file)
    assert Image.open(file).format == "PNG"


def test_a_table_of_many_classes_has_the_predicted_one_only():
    def columns(num_classes):
        logits = np.eye(3, num_classes)
        return list(predictions.list_columns([f"c{n}" for n in range(num_classes)], logits, {"text": "abc"}))

    assert columns(3) == ["prediction", "probability", "text", "probability_c0", "probability_c1", "probability_c2"]
    assert len(columns(100)) == 103
    assert columns(101) == ["prediction", "probability", "text"]
