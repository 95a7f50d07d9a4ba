"""Share of texts that are right, as an `evaluate` metric. `evaluate.load` takes this file's path.

Percentage of predictions that equal one of their references, without white space, which tokenizers do not keep.
"""

import datasets
import evaluate


class ExactMatch(evaluate.Metric):
    """Metric of right texts.

    Args:
        predictions: texts.
        references: a list of right texts for each prediction.
    Returns:
        exact_match, from 0 to 100.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description=self.__doc__,
            features=datasets.Features({"predictions": text, "references": datasets.List(text)}),
        )

    def _compute(self, predictions, references):
        right = [
            prediction.split() in [text.split() for text in texts]
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {"exact_match": 100 * sum(right) / len(right)}
