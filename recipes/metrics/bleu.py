"""BLEU from the package sacrebleu, as an `evaluate` metric. `evaluate.load` takes this file's path.

The geometric mean of the shares of 1- to 4-grams that are in a reference, over the whole corpus, times a penalty for
brevity. sacrebleu tokenises the texts (13a), so give plain text.
"""

from itertools import zip_longest

import datasets
import evaluate
from sacrebleu.metrics import BLEU


class Bleu(evaluate.Metric):
    """Metric BLEU.

    Args:
        predictions: texts.
        references: a list of texts for each prediction; the lists may differ in length.
    Returns:
        bleu, from 0 to 100.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Post 2018, A Call for Clarity in Reporting BLEU Scores",
            inputs_description=self.__doc__,
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions, references):
        # sacrebleu needs the first reference of every text, then the second, ...; None where a text has no more.
        score = BLEU().corpus_score(predictions, list(zip_longest(*references)))
        return {"bleu": score.score}
