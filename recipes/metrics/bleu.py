"""BLEU by the package sacrebleu, as an `evaluate` metric. `evaluate.load` takes this file's path."""

from itertools import zip_longest

import datasets
import evaluate
from sacrebleu.metrics import BLEU

DESCRIPTION = """
The geometric mean of the shares of 1- to 4-grams that are in a reference, over the whole corpus, times a penalty for
brevity. Texts are tokenised by sacrebleu (13a): hand in plain text.
"""

INPUTS = """
Args:
    predictions: texts.
    references: for each a list of texts, not necessarily equally many.
Returns:
    bleu, from 0 to 100.
"""


class Bleu(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions, references):
        # sacrebleu wants the first reference of every text, then the second: None where there is no more.
        score = BLEU().corpus_score(predictions, list(zip_longest(*references)))
        return {"bleu": score.score}
