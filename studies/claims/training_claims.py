"""What small trainings say about claims, at unchanged learning rates and at the best rate of each variant."""

import functools
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import training
from drawing import COLOURS, canvas, png
from training import MOST, PRETRAINING
from verdicts import Case, Claim, Experiment, at_best, at_least, column, less, named, near, so, spread, within

from samestep.contrib.optim import accumulating
from samestep.data import images, sentence_pairs

Result = dict[str, Any]
METRICS = {"end": "training loss", "held_out": "held-out loss"}
SAME = "1"  # factor of an unchanged rate
UNKNOWN = 99  # std / mean at most: beyond it 32 micro-batches say nothing of the mean
VARIANTS = {
    "baseline": "an update per micro-batch",
    "coefficient": "beta1 0.975 alone",
    "sparse": "sparse updates alone",
    "both": "both",
    "accumulated": "accumulation",
}
SECOND_MOMENTS = {
    "mean_of_squares": "mean of squares",
    "sum_of_squares": "sum of squares",
    "unbiased": "unbiased estimate",
}

# ---------------------------------------------------------------------------------------------------------------------
# Runs


def at_rate(results: Sequence[Result], variant: str, metric: str, rate: str = SAME) -> list[float]:
    """Of each seed."""
    return column(results, "runs", f"{variant}, rate {rate}", metric)


def rates_of(results: Sequence[Result], variant: str) -> list[str]:
    """The grid on which a variant ran."""
    beginning = f"{variant}, rate "
    return [name.removeprefix(beginning) for name in results[0]["runs"] if name.startswith(beginning)]


def best(results: Sequence[Result], variants: Sequence[str], metric: str) -> tuple[list[float], list[str]]:
    """The metric at the best of several variants and rates, chosen for each seed on the others."""
    return at_best(
        [
            {
                f"{variant}, rate {rate}" if len(variants) > 1 else rate: result["runs"][f"{variant}, rate {rate}"][
                    metric
                ]
                for variant in variants
                for rate in rates_of(results, variant)
            }
            for result in results
        ]
    )


def compared(results: Sequence[Result], ours: str, theirs: str, metrics: dict[str, str]) -> list[Case]:
    """Lower at the same rate, and each at its best."""
    cases = []
    for metric, text in metrics.items():
        cases.append(less(f"{text}, the same rate", at_rate(results, ours, metric), at_rate(results, theirs, metric)))
        own, other = best(results, [ours], metric)[0], best(results, [theirs], metric)[0]
        cases.append(less(f"{text}, each at its best rate", own, other))
    return cases


def chosen(results: Sequence[Result], names: dict[str, str], metric: str = "end") -> str:
    """Which rates were the best."""
    return "Best rates, as multiples of the unchanged one: " + "; ".join(
        f"{text} {named(best(results, [variant], metric)[1], rates_of(results, variant))}"
        for variant, text in names.items()
    )


def relative(results: Sequence[Result], ours: str, theirs: str, metric: str = "end") -> str:
    """The change, in percent, unchanged rates."""
    pairs = zip(at_rate(results, ours, metric), at_rate(results, theirs, metric), strict=True)
    return spread([100 * (a / b - 1) for a, b in pairs], " %")


# ---------------------------------------------------------------------------------------------------------------------
# Claims on both


def noise_claims(results: list[Result]) -> list[Claim]:
    def share(when: str) -> list[float]:
        """|mu|^2 / (|mu|^2 + tr Sigma); an estimate of |mu|^2 below zero counts as zero."""
        means = [max(0.0, each) for each in column(results, "noise", when, "all", "squared_mean")]
        return [
            mean / (mean + of)
            for mean, of in zip(means, column(results, "noise", when, "all", "variance"), strict=True)
        ]

    first, last = share("first"), share("last")
    layers = list(results[0]["noise"]["first"]["layers"])
    shallow, deep = layers[0], layers[-2]  # the last one is the head

    def per_parameter(when: str, layer: str) -> list[float]:
        return [of["variance"] / of["size"] for of in column(results, "noise", when, "layers", layer)]

    def signal(when: str, layer: str) -> list[float]:
        return [max(0.0, of["squared_mean"]) / of["variance"] for of in column(results, "noise", when, "layers", layer)]

    times = (("first", "early"), ("last", "at the end"))
    return [
        Claim(
            "C = |mean|^2 / mean of squares of the gradient is 0.3 to 0.5 early and 0.8 to 0.95 late.",
            (within("early", first, 0.3, 0.5), within("at the end", last, 0.8, 0.95)),
            f"Measured {spread(first)} and {spread(last)}, for micro-batches of this size.",
        ),
        Claim(
            "Gradients are noisier early than late (C is lower).",
            (less("C, early against late", first, last),),
            f"Between the two C goes from {fmean(first):.3g} to {fmean(last):.3g}.",
        ),
        Claim(
            "Shallow layers have noisier gradients than deep ones.",
            tuple(
                less(
                    f"variance per parameter, {text}: {deep} against {shallow}",
                    per_parameter(when, deep),
                    per_parameter(when, shallow),
                )
                for when, text in times
            )
            + tuple(
                less(
                    f"|mean|^2 / variance, {text}: {shallow} against {deep}", signal(when, shallow), signal(when, deep)
                )
                for when, text in times
            ),
        ),
    ]


def oscillation_claim(results: list[Result], one: str, four: str) -> Claim:
    def reduction(ours: list[float], theirs: list[float]) -> list[float]:
        return [100 * (1 - a / b) for a, b in zip(ours, theirs, strict=True)]

    alone = at_rate(results, one, "oscillation")
    averaged = reduction(at_rate(results, one, "oscillation_of_4"), alone)
    best_of = [
        [
            result["runs"][f"{variant}, rate {rate}"]["oscillation"]
            for result, rate in zip(results, best(results, [variant], "end")[1], strict=True)
        ]
        for variant in (four, one)
    ]
    return Claim(
        "With k = 4 the loss oscillates 40 % less.",
        (
            at_least(
                "every micro-batch's loss, the same rate",
                reduction(at_rate(results, four, "oscillation"), alone),
                40,
                " %",
            ),
            at_least("every micro-batch's loss, each at its best rate", reduction(*best_of), 40, " %"),
            at_least("losses averaged over 4 micro-batches beside single ones, k = 1 in both", averaged, 40, " %"),
        ),
        "A loop with k = 4 may log the mean of 4 losses, which oscillates less whatever the training is: the last case changes "
        "nothing but what is averaged.",
    )


def second_moment_claims(results: list[Result]) -> list[Claim]:
    def off(variant: str, key: str) -> list[float]:
        pairs = zip(
            column(results, "second_moments", variant, key),
            column(results, "second_moments", "exact", key),
            strict=True,
        )
        return [a / b for a, b in pairs]

    distances = "; ".join(
        f"{text} {spread(column(results, 'second_moments', variant, 'distance'))}"
        for variant, text in SECOND_MOMENTS.items()
    )
    return [
        Claim(
            "AdamW that accumulates in its moments trains as AdamW on accumulated gradients: the same loss (2 %).",
            tuple(
                near(f"{text}, {METRICS[metric]}", off(variant, metric), 1.0, 0.02)
                for variant, text in SECOND_MOMENTS.items()
                for metric in METRICS
            ),
            f"Distance of the last weights from exact AdamW's, over its way from the first: {distances}.",
        ),
        Claim(
            "Among them, the unbiased estimate's curve is nearest to exact AdamW's.",
            tuple(
                less(
                    f"mean distance of the loss, against the {text}",
                    column(results, "second_moments", "unbiased", "curve_distance"),
                    column(results, "second_moments", variant, "curve_distance"),
                )
                for variant, text in SECOND_MOMENTS.items()
                if variant != "unbiased"
            ),
            f"Distances of weights: {distances}.",
        ),
    ]


def table(results: list[Result]) -> str:
    """All runs."""
    rows = "".join(
        f"| {name} | {spread(column(results, 'runs', name, 'end'))} | {spread(column(results, 'runs', name, 'held_out'))} | "
        f"{spread(column(results, 'runs', name, 'error'))} |\n"
        for name in results[0]["runs"]
    ) + "".join(
        f"| AdamW, k 4, {SECOND_MOMENTS.get(name, 'accumulated gradients')} | "
        + " | ".join(spread(column(results, "second_moments", name, key)) for key in ("end", "held_out", "error"))
        + " |\n"
        for name in results[0]["second_moments"]
    )
    return (
        "### All runs\n\nRates are multiples of the unchanged one. A training that diverged counts 100.\n\n"
        f"| run | training loss | held-out loss | held-out error |\n|---|---|---|---|\n{rows}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Images


def images_claims(results: list[Result]) -> list[Claim]:
    sizes = [int(name.split()[1].rstrip(",")) for name in results[0]["runs"] if name.startswith("k ")]
    sizes = sorted(set(sizes))
    names = {f"k {k}": f"k {k}" for k in sizes}
    constant = list(names)
    told = [
        less(f"{text}, the told code (its rate is also 1 - beta of the other's)", ours, at_rate(results, "k 1", metric))
        for metric, text in METRICS.items()
        for ours in [column(results, "runs", "k 4, as told", metric)]
    ]
    told_8 = [
        less(
            f"{text}, the told code",
            column(results, "runs", "k 4, as told", metric),
            column(results, "runs", "k 8, as told", metric),
        )
        for metric, text in METRICS.items()
    ]
    rates = chosen(results, names)
    return [
        Claim(
            "k = 4 ends lower than k = 1 (told: 7.7 % less loss).",
            (*told, *compared(results, "k 4", "k 1", METRICS)),
            f"Change of the training loss at the same rate: {relative(results, 'k 4', 'k 1')}. {rates}.",
        ),
        Claim(
            "k = 8 ends higher than k = 4.",
            (*told_8, *compared(results, "k 4", "k 8", METRICS)),
        ),
        Claim("k = 8 ends lower than k = 1.", tuple(compared(results, "k 8", "k 1", METRICS))),
        oscillation_claim(results, "k 1", "k 4"),
        *_best_k(results, sizes),
        *_adaptive(results, constant),
        *noise_claims(results),
        *second_moment_claims(results),
    ]


def _best_k(results: list[Result], sizes: list[int]) -> list[Claim]:
    """ceil(std / mean), and the table of small batches."""

    def variation(when: str) -> list[int]:
        return [
            min(UNKNOWN, math.ceil(math.sqrt(of["variance"] / max(1e-30, of["squared_mean"]))))
            for of in column(results, "noise", when, "all")
        ]

    found = {
        "the same rate": [min(sizes, key=lambda k: result["runs"][f"k {k}, rate {SAME}"]["end"]) for result in results],
        "each k at its best rate": [
            min(
                sizes,
                key=lambda k: min(result["runs"][f"k {k}, rate {rate}"]["end"] for rate in rates_of(results, f"k {k}")),
            )
            for result in results
        ],
    }
    cases, of_table = [], []
    for text, ks in found.items():
        for when, when_text in (("first", "early"), ("last", "at the end")):
            pairs = list(zip(variation(when), ks, strict=True))
            right = sum(min(told, max(sizes)) / 2 <= k <= 2 * told for told, k in pairs)
            shown = f"ceil(std / mean) {when_text} {spread([told for told, _ in pairs])}, best k {spread(ks)}"
            cases.append(
                so(f"{text}, noise {when_text}", f"{shown}; {right} of {len(pairs)} seeds", right == len(pairs))
            )
        of_table.append(so(text, f"best k {spread(ks)}", all(4 <= k <= 8 for k in ks)))
    return [
        Claim(
            f"The best k is about ceil(std / mean) of the gradient (within a factor of 2, k up to {max(sizes)}, by training "
            "loss).",
            tuple(cases),
        ),
        Claim("Micro-batches below 64 samples are best with k = 4 to 8 (16 samples here).", tuple(of_table)),
    ]


def _adaptive(results: list[Result], constant: list[str]) -> list[Claim]:
    """k per layer, k from the noise, beside the best constant k."""
    texts = {
        "per layer": "k_l = 2^((L - l) / 2), more for shallow layers, beats a constant k.",
        "told formula": f"k = ceil(1 + std / |momentum|), at most {MOST}, beats a constant k.",
        "noise scale": f"k from the measured noise scale, 2 to {MOST}, beats a constant k.",
    }
    claims = []
    for name, text in texts.items():
        cases = []
        for metric, metric_text in METRICS.items():
            same = at_best([{k: result["runs"][f"{k}, rate {SAME}"][metric] for k in constant} for result in results])[
                0
            ]
            cases.append(
                less(f"{metric_text}, the same rate, the best constant k", at_rate(results, name, metric), same)
            )
            own, other = best(results, [name], metric)[0], best(results, constant, metric)[0]
            cases.append(less(f"{metric_text}, each at its best rate, the best constant k", own, other))
        length = column(results, "runs", f"{name}, rate {SAME}", "mean_k")
        right = f"Mean k {spread(length)} at the unchanged rate. " if fmean(length) else ""
        claims.append(
            Claim(text, tuple(cases), right + "The best constant k and its rate are chosen on the other seeds.")
        )
    return claims


# ---------------------------------------------------------------------------------------------------------------------
# BERT


def bert_claims(results: list[Result]) -> list[Claim]:
    pairs = {"error": "next-sentence error"}

    def undecided(*names: str) -> str:
        """Said where no run learned more than chance."""
        learned = [error for name in names for error in at_rate(results, name, "error") if error < 0.4]
        return "" if learned else ": no run of this length learns the task, so that it is not decided here"

    def better(ours: str, theirs: str, text: str) -> list[Claim]:
        return [
            Claim(
                f"{text}: lower masked-token loss.",
                tuple(compared(results, ours, theirs, METRICS)),
                f"Change of the training loss at the same rate: {relative(results, ours, theirs)}. "
                f"{chosen(results, {name: VARIANTS[name] for name in (ours, theirs)})}.",
            ),
            Claim(
                f"{text}: better next-sentence accuracy.",
                tuple(compared(results, ours, theirs, pairs)),
                f"Error {spread(at_rate(results, ours, 'error'))} and {spread(at_rate(results, theirs, 'error'))} at the same "
                f"rate; 0.5 is chance{undecided(ours, theirs)}.",
            ),
        ]

    return [
        *better("coefficient", "baseline", "beta1 0.975 alone beats 0.9"),
        *better("sparse", "baseline", "Sparse updates alone, k = 4, beat an update per micro-batch"),
        *better("both", "sparse", "Sparse updates with beta1 0.975 beat those with 0.9"),
        Claim(
            "Sparse updates alone bring 77 % of what both bring (within 10 %).",
            tuple(_shares(results)),
            "A share of a gain takes a gain.",
        ),
        Claim(
            "Sparse updates end where accumulation does (training loss, 1 %).",
            (
                near(
                    "the same rate",
                    [
                        a / b
                        for a, b in zip(*(at_rate(results, v, "end") for v in ("sparse", "accumulated")), strict=True)
                    ],
                    1.0,
                    0.01,
                ),
                near(
                    "each at its best rate",
                    [
                        a / b
                        for a, b in zip(*(best(results, [v], "end")[0] for v in ("sparse", "accumulated")), strict=True)
                    ],
                    1.0,
                    0.01,
                ),
            ),
        ),
        oscillation_claim(results, "baseline", "sparse"),
        *noise_claims(results),
        *second_moment_claims(results),
    ]


def _shares(results: list[Result]) -> list[Case]:
    """The share of the gain, if there is one."""
    cases = []
    for metric, text in METRICS.items():
        for how in ("the same rate", "each at its best rate"):
            of = {
                name: at_rate(results, name, metric) if how == "the same rate" else best(results, [name], metric)[0]
                for name in PRETRAINING
            }
            gain = less("", of["both"], of["baseline"])
            name = f"{text}, {how}"
            if gain.holds:
                share = (fmean(of["baseline"]) - fmean(of["sparse"])) / (fmean(of["baseline"]) - fmean(of["both"]))
                cases.append(near(name, [100 * share], 77.0, 0.1, " %"))
            else:
                cases.append(so(name, f"both bring no gain: {gain.measured}", False))
    return cases


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def draw(results: list[Result], variants: dict[str, str], title: str) -> list[bytes]:
    """Training losses, means over the seeds: unchanged rate, best rate, Adam's second moments."""
    figure, (same, tuned, moments) = canvas(3, title)
    for (variant, text), colour in zip(variants.items(), COLOURS, strict=False):
        rates = rates_of(results, variant)
        lowest = min(rates, key=lambda rate: fmean(at_rate(results, variant, "end", rate)))
        for axes, rate in ((same, SAME), (tuned, lowest)):
            curve = np.array(at_rate(results, variant, "curve", rate)).mean(0)
            label = text if axes is same else f"{text}, {rate} x"
            axes.plot(np.linspace(0, 1, len(curve)), curve, color=colour, label=label, linewidth=1.1)
    for (variant, text), colour in zip({"exact": "exact", **SECOND_MOMENTS}.items(), COLOURS, strict=False):
        curve = np.array(column(results, "second_moments", variant, "curve")).mean(0)
        moments.plot(np.linspace(0, 1, len(curve)), curve, color=colour, label=text, linewidth=1.1)
    same.set(title="the same rate", ylabel="training loss")
    tuned.set(title="each at its best rate")
    moments.set(title="AdamW, k = 4, second moments")
    for axes in (same, tuned, moments):
        axes.set(xlabel="share of the micro-batches")
        axes.legend(fontsize="small")
        lines = np.concatenate([line.get_ydata() for line in axes.get_lines()])
        axes.set_ylim(top=float(np.quantile(lines[np.isfinite(lines)], 0.99)))
    return [png(figure)]


IMAGES: Result = {
    "recipe": {"hidden_sizes": [16, 32, 64], "embedding_size": 16},
    "b": 16,
    "micro_steps": 480,
    "k": [1, 2, 4, 8],
    "rate": 0.025,
    "factors": [0.5, 1.0, 2.0, 4.0, 8.0],
    "adaptive_factors": [1.0, 2.0, 4.0],
    "adam_rate": 2e-3,
    "noise_cells": 32,
}
BERT: Result = {
    "recipe": {
        "vocab_size": 2048,
        "max_seq_length": 64,
        "max_position_embeddings": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 256,
    },
    "b": 8,
    "micro_steps": 800,
    "rate": 1e-3,
    "factors": [0.5, 1.0, 2.0, 4.0],
    "held_out": 512,
    "noise_cells": 32,
}
EXPERIMENTS = [
    Experiment(
        "images",
        "Images",
        f"The recipe resnet_digits_cpu made smaller (channels {', '.join(map(str, IMAGES['recipe']['hidden_sizes']))}, group "
        f"normalisation): scikit-learn's digits with shifts, {IMAGES['micro_steps']} micro-batches of {IMAGES['b']}, SGD with "
        f"momentum 0.9. The unchanged rate is {IMAGES['rate']}, after a warm-up over the first tenth. The same samples in "
        "the same order, and the same first weights, for all runs of a seed. Training loss: "
        "the last tenth of the micro-batches, each before it is learned from; held-out: 359 digits. Oscillation: about a "
        "moving "
        "average of 32 micro-batches, second half. Best rates are chosen on the other seeds. Noise: 32 micro-batches, early "
        "is after "
        "a twentieth.",
        IMAGES,
        training.train_digits,
        images_claims,
        (training, accumulating, images),
        minutes=3,
        quick={
            "micro_steps": 80,
            "factors": [1.0, 2.0],
            "adaptive_factors": [1.0],
            "noise_cells": 4,
            "recipe": {"hidden_sizes": [8, 16, 16], "embedding_size": 8},
        },
        draw=functools.partial(draw, variants={f"k {k}": f"k = {k}" for k in IMAGES["k"]}, title="Digits, ResNet, SGD"),
        pictures=("images.png",),
        table=table,
    ),
    Experiment(
        "bert",
        "BERT pretraining",
        f"The recipe bert_small_cpu made smaller ({BERT['recipe']['num_hidden_layers']} layers x "
        f"{BERT['recipe']['hidden_size']}, "
        f"vocabulary {BERT['recipe']['vocab_size']}, length {BERT['recipe']['max_seq_length']}) on Python's own documentation, "
        f"{BERT['micro_steps']} micro-batches of {BERT['b']} pairs, AdamW with betas 0.9 and 0.999, no weight decay. The "
        "unchanged "
        f"rate is {BERT['rate']}, after a warm-up over the first tenth. The same pairs, masks and first weights for all runs "
        "of a seed. Training loss: "
        "masked tokens in the last tenth of the micro-batches, each before it is learned from; held-out: pairs of other "
        "documents. "
        "Best rates are chosen on the other seeds. Noise: 32 micro-batches, early is after a twentieth.",
        BERT,
        training.train_bert,
        bert_claims,
        (training, accumulating, sentence_pairs),
        minutes=4.5,
        quick={"micro_steps": 80, "factors": [1.0, 2.0], "held_out": 32, "noise_cells": 4},
        draw=functools.partial(draw, variants=VARIANTS, title="Python's documentation, BERT, AdamW"),
        pictures=("bert.png",),
        table=table,
    ),
]
