"""ROUGE-1, -2 and -L from the package rouge-score, as an `evaluate` metric. `evaluate.load` takes this file's path.

F1 of the words (rouge1), of the pairs of words (rouge2), of the longest common subsequence of a text (rougeL), and of its
sentences, one a line (rougeLsum), with Porter's stemmer, as a mean over the texts. Words are runs of a-z and 0-9, so this is
for English only.
"""

import datasets
import evaluate
from rouge_score.rouge_scorer import RougeScorer

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Rouge(evaluate.Metric):
    """Metric ROUGE.

    Args:
        predictions: texts; for rougeLsum with one sentence a line.
        references: a list of texts for each prediction; the nearest one counts.
    Returns:
        rouge1, rouge2, rougeL, rougeLsum, from 0 to 100.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Lin 2004, ROUGE: A Package for Automatic Evaluation of Summaries",
            inputs_description=self.__doc__,
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions, references):
        scorer = RougeScorer(NAMES, use_stemmer=True)
        scores = [scorer.score_multi(texts, text) for text, texts in zip(predictions, references, strict=True)]
        return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in NAMES}
