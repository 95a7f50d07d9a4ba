"""chrF by the package sacrebleu, as an `evaluate` metric. `evaluate.load` takes this file's path."""

from itertools import zip_longest

import datasets
import evaluate
from sacrebleu.metrics import CHRF

DESCRIPTION = """
F-score of the 1- to 6-grams of characters, recall counting twice: for short texts and many forms of a word it says more
than BLEU. chrF2 in papers.
"""

INPUTS = """
Args:
    predictions: texts.
    references: for each a list of texts, not necessarily equally many.
Returns:
    chrf, from 0 to 100.
"""


class Chrf(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="Popovic 2015, chrF: character n-gram F-score for automatic MT evaluation",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions, references):
        # sacrebleu wants the first reference of every text, then the second: None where there is no more.
        score = CHRF().corpus_score(predictions, list(zip_longest(*references)))
        return {"chrf": score.score}
