"""Recipes that pretrain BERT: masked tokens and the next sentence."""

import dataclasses

from samestep.recipe.recipe import Parts, register
from samestep.recipe.rules import Rule, rows
from samestep.recipe.settings import NOT_NEGATIVE, PROBABILITY, setting
from samestep.recipe.tasks.bert import BertRecipe
from samestep.recipe.tasks.streamed import StreamedTexts
from samestep.recipe.tasks.text_pretraining import TextPretraining


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertPretraining(StreamedTexts, BertRecipe, TextPretraining):
    """BERT pretraining: masked language modelling and next-sentence prediction on pairs of segments."""

    # Data
    short_seq_probability: float = setting("share of the pairs cut to a random shorter length", PROBABILITY)
    next_sentence_probability: float = setting("share of the pairs whose second segment truly follows", PROBABILITY)
    mlm_probability: float = setting(
        "share of a sample's tokens to predict (80 % [MASK], 10 % random, 10 % kept)", PROBABILITY
    )

    # Loss
    mlm_loss_weight: float = setting(
        "weight of the masked-token loss (mean over the step's masked tokens)", NOT_NEGATIVE
    )
    nsp_loss_weight: float = setting("weight of the next-sentence loss (mean over the step's pairs)", NOT_NEGATIVE)

    rules = rows(
        Rule(
            lambda f: f.streaming and f.shuffle_buffer_size == 1 and f.next_sentence_probability < 1,
            "shuffle_buffer_size is 1, but the second segment of a pair may come from another document of the buffer",
            "raise it, or set next_sentence_probability to 1",
        ),
    )

    @property
    def loss_weights(self) -> dict[str, float]:
        """Name and weight of each loss term."""
        return {"mlm": self.mlm_loss_weight, "nsp": self.nsp_loss_weight}


register(
    "bert_pretraining",
    BertPretraining,
    Parts(
        settings="samestep.recipe.task_settings:LanguageModelSettings",
        data="samestep.data.sentence_pairs:build",
        model="samestep.models.bert_pretraining:PretrainingSums",
        shape="stepplan.memory:bert_pretraining",
        script="pretrain_bert.py",
        pipeline_tag="fill-mask",
    ),
)
