"""Perplexity from summed losses, as a module of evaluate."""

import math

import datasets
import evaluate

FEATURES = {"predictions": datasets.Value("float64"), "references": datasets.Value("int64")}
LARGEST = 700.0  # exponent; exp(710) is above the largest float
CITATION = (
    "Jelinek, Mercer, Bahl and Baker (1977), Perplexity: a measure of the difficulty of speech recognition tasks, "
    "Journal of the Acoustical Society of America 62(S1), S63."
)


class Perplexity(evaluate.Metric):
    """How many equally likely tokens a language model is as uncertain between."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__, citation=CITATION, features=datasets.Features(FEATURES))

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        """perplexity = exp(min(sum_i nll_i / sum_i n_i, 700)); nan when there are no tokens.

        Args:
            predictions: nll_i, the summed negative log-likelihood of a sample's or dataset's tokens, in nats.
            references: n_i, the number of its tokens.
        """
        num_tokens = sum(references)
        mean = math.fsum(predictions) / num_tokens if num_tokens else math.nan
        return {"perplexity": math.exp(min(mean, LARGEST))}  # min in this order keeps a nan
