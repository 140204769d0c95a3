"""Questions about drawn images, each decided by a seed and a number, with answers that are known before they are drawn.

A chat has 1 to 3 small images of figures or digits and one question: which colour, which figure, how many, which image has the
larger figure, what is written. Places, sizes and colours of the figures differ from image to image, so that who answers
questions about held-out images has not seen them.
"""

import base64
import io
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from samestep.cut.order import sample_rng
from samestep.recipe.extras import optional

if TYPE_CHECKING:
    from PIL import Image, ImageDraw
else:
    Image, ImageDraw = optional("PIL.Image"), optional("PIL.ImageDraw")

CHATS = 13  # stream of random numbers (see order.sample_rng)
SPLITS = ("train", "validation")
SIZE = 32  # pixels of a side
COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 70, 210),
    "yellow": (230, 200, 40),
    "black": (20, 20, 20),
}
FIGURES = ("circle", "square", "triangle")
MAX_FIGURES = 4
DIGITS = (
    "111101101101111 010110010010111 111001111100111 111001111001111 101101111001001 111100111001111 111100111101111 \
111001001001001 111101111101111 111101111001111".split()
)
"""Pixels of each digit, 5 rows of 3."""
LARGE, SMALL = (11, 14), (4, 7)  # half sides of figures that are compared: the least, the largest


class ImageChat(NamedTuple):
    """A question about images, and its answer.

    Attributes:
        images: data: URIs.
        question: text behind them.
        answer: the right one.
        task: name of the question's task.
    """

    images: tuple[str, ...]
    question: str
    answer: str
    task: str


def draw_chat(seed: int, split: str, sample_id: int) -> ImageChat:
    """Draw the chat of a number: a pure function of its arguments."""
    rng = sample_rng(seed, CHATS, SPLITS.index(split), sample_id)
    task = list(TASKS)[int(rng.integers(len(TASKS)))]
    pictures, question, answer = TASKS[task](rng)
    return ImageChat(tuple(map(_encode, pictures)), question, answer, task)


def _encode(picture: "Image.Image") -> str:
    content = io.BytesIO()
    picture.save(content, "PNG")
    return "data:image/png;base64," + base64.b64encode(content.getvalue()).decode()


def _choose(rng: np.random.Generator, names: "tuple[str, ...]") -> str:
    return names[int(rng.integers(len(names)))]


def _make_paper(rng: np.random.Generator) -> "Image.Image":
    return Image.new("RGB", (SIZE, SIZE), tuple(int(value) for value in rng.integers(225, 256, 3)))


def _draw_figure(
    rng: np.random.Generator, paper: "Image.Image", figure: str, colour: str, box: tuple[int, int, int, int], half: int
) -> None:
    """Draw a figure of `half` pixels to each side of its centre, anywhere within a box."""
    left, top, right, bottom = box
    x, y = (int(rng.integers(low + half, high - half)) for low, high in ((left, right), (top, bottom)))
    pen, corners = ImageDraw.Draw(paper), (x - half, y - half, x + half, y + half)
    fill = COLOURS[colour]
    if figure == "circle":
        pen.ellipse(corners, fill)
    elif figure == "square":
        pen.rectangle(corners, fill)
    else:
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill)


def _draw_one(rng: np.random.Generator, figure: str, colour: str, halves: tuple[int, int] = (5, 14)) -> "Image.Image":
    paper = _make_paper(rng)
    _draw_figure(rng, paper, figure, colour, (0, 0, SIZE, SIZE), int(rng.integers(*halves)))
    return paper


def _ask_colours(rng: np.random.Generator) -> tuple[list["Image.Image"], str, str]:
    names = [_choose(rng, tuple(COLOURS)) for _ in range(int(rng.integers(1, 4)))]
    return [_draw_one(rng, _choose(rng, FIGURES), name) for name in names], "Which colours?", " ".join(names)


def _ask_figures(rng: np.random.Generator) -> tuple[list["Image.Image"], str, str]:
    names = [_choose(rng, FIGURES) for _ in range(int(rng.integers(1, 4)))]
    return [_draw_one(rng, name, _choose(rng, tuple(COLOURS))) for name in names], "Which figures?", " ".join(names)


def _ask_number(rng: np.random.Generator) -> tuple[list["Image.Image"], str, str]:
    number, paper, half = int(rng.integers(1, MAX_FIGURES + 1)), _make_paper(rng), SIZE // 2
    for quarter in rng.permutation(MAX_FIGURES)[:number].tolist():
        left, top = quarter % 2 * half, quarter // 2 * half
        place, size = (left, top, left + half, top + half), int(rng.integers(4, 7))
        _draw_figure(rng, paper, _choose(rng, FIGURES), _choose(rng, tuple(COLOURS)), place, size)
    return [paper], "How many?", str(number)


def _ask_larger(rng: np.random.Generator) -> tuple[list["Image.Image"], str, str]:
    first = bool(rng.integers(2))
    figure = _choose(rng, FIGURES)
    papers = [
        _draw_one(rng, figure, _choose(rng, tuple(COLOURS)), LARGE if large else SMALL) for large in (first, not first)
    ]
    return papers, "Which is larger?", "first" if first else "second"


def _ask_digits(rng: np.random.Generator) -> tuple[list["Image.Image"], str, str]:
    paper, digits = np.array(_make_paper(rng)), rng.integers(10, size=2).tolist()
    colour, top = COLOURS[_choose(rng, tuple(COLOURS))], int(rng.integers(0, SIZE - 20))
    for place, digit in enumerate(digits):
        left = place * SIZE // 2 + int(rng.integers(0, 4))
        pixels = np.array(list(DIGITS[digit]), int).reshape(5, 3).repeat(4, 0).repeat(4, 1) == 1
        paper[top : top + 20, left : left + 12][pixels] = colour
    return [Image.fromarray(paper)], "What is written?", "".join(map(str, digits))


TASKS: dict[str, Callable[[np.random.Generator], tuple[list["Image.Image"], str, str]]] = {
    "colours": _ask_colours,
    "figures": _ask_figures,
    "number": _ask_number,
    "larger": _ask_larger,
    "digits": _ask_digits,
}


def iterate_turns(seed: int, split: str, num_samples: int) -> Iterator[tuple[list[dict], str, str]]:
    """Draw chats; yield of each the turns before its answer, the answer, and its task."""
    for sample_id in range(num_samples):
        chat = draw_chat(seed, split, sample_id)
        parts = [{"type": "image", "image": image} for image in chat.images]
        yield [{"role": "user", "content": [*parts, {"type": "text", "text": chat.question}]}], chat.answer, chat.task
