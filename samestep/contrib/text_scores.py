"""Scores generated texts beside those of the data, by the libraries of the field."""

from collections.abc import Callable, Sequence

from samestep.recipe import extras

Texts = Sequence[str]
ROUGE = ("rouge1", "rouge2", "rougeL")


def exact_match(generated: Texts, expected: Texts) -> dict[str, float]:
    """Return the share of the texts that are equal.

    >>> exact_match(["a b", "c"], ["a b", "C"])
    {'exact_match': 0.5}
    """
    return {"exact_match": sum(a == b for a, b in zip(generated, expected, strict=True)) / len(expected)}


def bleu(generated: Texts, expected: Texts) -> dict[str, float]:
    """Return BLEU of the whole corpus, 0 to 100, as sacrebleu computes it by default (Post 2018, 1804.08771)."""
    import sacrebleu

    return {"bleu": float(sacrebleu.corpus_bleu(list(generated), [list(expected)]).score)}


def chrf(generated: Texts, expected: Texts) -> dict[str, float]:
    """Return chrF2 of the whole corpus, 0 to 100, as sacrebleu computes it by default (Popovic 2015)."""
    import sacrebleu

    return {"chrf": float(sacrebleu.corpus_chrf(list(generated), [list(expected)]).score)}


def word_error_rate(generated: Texts, expected: Texts) -> dict[str, float]:
    """Return the words to insert, delete and replace, divided by the expected words; it may exceed 1."""
    import jiwer

    return {"word_error_rate": float(jiwer.wer(list(expected), list(generated)))}


def rouge(generated: Texts, expected: Texts) -> dict[str, float]:
    """Return the mean F1 of ROUGE-1, ROUGE-2 and ROUGE-L, 0 to 1, with stemmed words, as Google's rouge_score has them."""
    from rouge_score import rouge_scorer

    scorer = rouge_scorer.RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(b, a) for a, b in zip(generated, expected, strict=True)]
    return {name: sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}


METRICS: dict[str, Callable[[Texts, Texts], dict[str, float]]] = {
    "exact_match": exact_match,
    "bleu": bleu,
    "chrf": chrf,
    "word_error_rate": word_error_rate,
    "rouge": rouge,
}
"""Names of `generation_metrics` -> what computes their scores of generated and expected texts."""


def check_installed(names: Sequence[str]) -> None:
    """Check that what metrics need is installed. Raises UsageError where it is not."""
    others = [name for name in names if name != "exact_match"]
    if others:
        extras.require("scores", f"generation_metrics {' '.join(others)}")


def score(names: Sequence[str], generated: Texts, expected: Texts) -> dict[str, float]:
    """Compute the scores of some metrics."""
    scores: dict[str, float] = {}
    for name in dict.fromkeys(names):
        scores |= METRICS[name](generated, expected)
    return scores
