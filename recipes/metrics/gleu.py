"""GLEU for grammatical error correction, as an `evaluate` metric. `evaluate.load` takes this file's path.

BLEU of the correction, except that an n-gram of the source counts against the correction if the correction keeps it and the
reference does not. Over the whole corpus, n = 1 to 4, without smoothing; words are separated by white space. To compare with
published numbers, give text with separated punctuation, such as JFLEG. With several references, the result is the mean over
500 draws of one reference for each text.

This is not the GLEU of translation (google_bleu), which does not see the source.
"""

import math
import random
from collections import Counter

import datasets
import evaluate

CITATION = """
Napoles et al. 2015, Ground Truth for Grammatical Error Correction Metrics, section 3, as corrected in
Napoles et al. 2016, GLEU Without Tuning
"""

ORDER = 4
NUM_DRAWS = 500


class Gleu(evaluate.Metric):
    """Metric GLEU.

    Args:
        predictions: corrected texts.
        references: a list of right corrections for each prediction.
        sources: the texts to correct.
    Returns:
        gleu, from 0 to 100.
    """

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=__doc__,
            citation=CITATION,
            inputs_description=self.__doc__,
            features=datasets.Features({"predictions": text, "references": datasets.List(text), "sources": text}),
        )

    def _compute(self, predictions, references, sources):
        counts = [
            [gleu_counts(prediction.split(), text.split(), source.split()) for text in texts]
            for prediction, texts, source in zip(predictions, references, sources, strict=True)
        ]
        draw = random.Random(0).choice  # the same at every evaluation
        num_draws = NUM_DRAWS if any(len(texts) > 1 for texts in references) else 1
        scores = [corpus_gleu([draw(choices) for choices in counts]) for _ in range(num_draws)]
        return {"gleu": 100 * sum(scores) / num_draws}


def gleu_counts(prediction: list[str], reference: list[str], source: list[str]) -> list[int]:
    """Count the words of prediction and reference; then for each n the n-grams that count, and all n-grams."""
    counts = [len(prediction), len(reference)]
    for n in range(1, ORDER + 1):
        ours, theirs, before = (ngrams(words, n) for words in (prediction, reference, source))
        to_change = Counter({ngram: count for ngram, count in before.items() if ngram not in theirs})
        counts.append(max(0, (ours & theirs).total() - (ours & to_change).total()))
        counts.append(max(0, len(prediction) + 1 - n))
    return counts


def ngrams(words: list[str], n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) + 1 - n))


def corpus_gleu(counts_of_texts: list[list[int]]) -> float:
    """Return GLEU from 0 to 1; it is 0 if no n-gram of some order counts."""
    length, reference_length, *counts = (sum(column) for column in zip(*counts_of_texts, strict=True))
    if not all(counts):
        return 0.0
    precisions = [math.log(right / all_) for right, all_ in zip(counts[::2], counts[1::2], strict=True)]
    return math.exp(min(0, 1 - reference_length / length) + sum(precisions) / ORDER)
