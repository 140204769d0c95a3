"""Shows the samples of a recipe on one HTML page that needs no other file: trained tokens marked, lengths, sources.

No text of a sample is markup. The template and its style are in templates/; the charts and the rest of the style are those of a
plan's page.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from samestep import pages
from samestep.contrib.showing.texts import Source, find_place, read_sequences
from samestep.data.conversation_rows import name_sources
from samestep.data.seq2seq import Pairs
from samestep.recipe.recipe import Recipe

TEMPLATES = Path(__file__).parent / "templates"
NUM_BINS = 24  # of the chart of lengths, at most


class _Bin(NamedTuple):
    """Bar of the chart: samples of `first` to `last` tokens."""

    first: int
    last: int
    num_samples: int


def write_page(recipe: Recipe, train: Source, held_out: Source | None, num_samples: int) -> str:
    """Write the page.

    Args:
        recipe: of the samples.
        train, held_out: as `conversations.build` or `seq2seq.build` returns them.
        num_samples: training samples that are shown, at most.

    Returns:
        HTML, style inside, no script, no address outside.
    """
    lengths, num_trained = _count_tokens(train)
    is_pair = isinstance(train, Pairs) or train.is_pairs
    report = getattr(train, "mask_report", None)
    samples = [
        {
            "id": sample_id,
            "place": find_place(train, sample_id),
            "source": train.source_names[train.source_numbers[sample_id]],
            "sequences": read_sequences(train, sample_id, with_copies=True),
        }
        for sample_id in train.choose_samples(num_samples)
    ]
    bins = _count_lengths(lengths)
    return (
        pages.make_environment(TEMPLATES)
        .get_template("conversations.html.j2")
        .render(
            recipe=recipe,
            kind="pairs" if is_pair else "samples",
            report=report,
            num_tokens=int(lengths.sum()),
            num_trained=int(num_trained.sum()),
            train=train,
            held_out=held_out,
            samples=samples,
            has_images=any(part.image for sample in samples for each in sample["sequences"] for part in each.parts),
            bins=bins,
            x=pages.linear_axis(f"tokens of a {'pair' if is_pair else 'sample'}", max(5, bins[-1].last)),
            y=pages.linear_axis("samples", max(5, *(part.num_samples for part in bins))),
            quantiles=[int(value) for value in np.quantile(lengths, [0, 0.5, 1], method="nearest")],
            sources=_describe_sources(train, held_out, lengths, num_trained),
            mixture=[]
            if isinstance(train, Pairs) or not train.mixture
            else [*zip(name_sources([*train.weights]), train.list_mixture(), strict=True)],
        )
    )


def _count_lengths(lengths: np.ndarray) -> list[_Bin]:
    """Count samples by their length, in bins of equal width from 1 on.

    >>> _count_lengths(np.array([1, 3, 3, 30]))[:2], len(_count_lengths(np.array([1, 3, 3, 30])))
    ([_Bin(first=1, last=2, num_samples=1), _Bin(first=3, last=4, num_samples=2)], 15)
    """
    width = -(-int(lengths.max()) // NUM_BINS)
    counts = np.bincount((lengths - 1) // width)
    return [_Bin(width * place + 1, width * (place + 1), int(count)) for place, count in enumerate(counts)]


def _count_tokens(train: Source) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of each sample, of speech positions of its source, and those that are trained."""
    if isinstance(train, Pairs):
        samples = [train.draw(0, sample_id) for sample_id in range(len(train))]
        lengths = [(sample.length, len(sample.labels) - sample.num_given) for sample in samples]
        return np.array([length for length, _ in lengths]), np.array([count for _, count in lengths])
    num_trained = np.array([int(train.trained[place].sum()) for place in train.places.tolist()])
    return train.tokens.lengths()[train.places], num_trained


def _describe_sources(
    train: Source, held_out: Source | None, lengths: np.ndarray, num_trained: np.ndarray
) -> list[dict[str, Any]]:
    """Count samples, tokens and trained tokens of each source, and its held-out samples."""
    held_out_counts = {}
    if held_out is not None:
        counts = np.bincount(held_out.source_numbers, minlength=len(held_out.source_names)).tolist()
        held_out_counts = dict(zip(held_out.source_names, counts, strict=True))
    sources = []
    for number, name in enumerate(train.source_names):
        chosen = train.source_numbers == number
        tokens, trained = int(lengths[chosen].sum()), int(num_trained[chosen].sum())
        row = {"name": name, "num_samples": int(chosen.sum()), "num_tokens": tokens, "num_trained": trained}
        sources.append(row | {"num_held_out": held_out_counts.pop(name, 0)})
    nothing = dict.fromkeys(("num_samples", "num_tokens", "num_trained"), 0)
    return sources + [nothing | {"name": name, "num_held_out": count} for name, count in held_out_counts.items()]
