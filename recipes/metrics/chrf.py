"""chrF from the package sacrebleu, as an `evaluate` metric. `evaluate.load` takes this file's path.

F-score of the 1- to 6-grams of characters, where recall counts twice; papers call it chrF2. It says more than BLEU for short
texts, and for languages with many forms of a word.
"""

from itertools import zip_longest

import datasets
import evaluate
from sacrebleu.metrics import CHRF


class Chrf(evaluate.Metric):
    """Metric chrF.

    Args:
        predictions: texts.
        references: a list of texts for each prediction; the lists may differ in length.
    Returns:
        chrf, from 0 to 100.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Popovic 2015, chrF: character n-gram F-score for automatic MT evaluation",
            inputs_description=self.__doc__,
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions, references):
        # sacrebleu needs the first reference of every text, then the second, ...; None where a text has no more.
        score = CHRF().corpus_score(predictions, list(zip_longest(*references)))
        return {"chrf": score.score}
