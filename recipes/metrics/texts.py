"""Metrics of generated texts, as an `evaluate` module: `evaluate.load` takes this file's path, and a metric's name.

    evaluate.load("recipes/metrics/texts.py", "chrf").compute(predictions=["a b c"], references=[["a b d", "a b"]])

`references` holds a list of correct texts for each prediction; the lists may differ in length. `gleu` also takes `sources`,
the texts to correct. All values are from 0 to 100.
"""

import math
import random
from collections import Counter
from itertools import zip_longest

import datasets
import evaluate

ORDER = 4  # length of the longest n-grams of GLEU
NUM_DRAWS = 500


def exact_match(predictions, references):
    """Share of the texts whose words equal those of a reference; tokenizers do not keep white space exactly."""
    right = [
        prediction.split() in [text.split() for text in texts]
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    return {"exact_match": 100 * sum(right) / len(right)}


def bleu(predictions, references):
    """BLEU of the corpus, by sacrebleu, which tokenises the texts (13a): give plain text.

    It is the geometric mean of the shares of 1- to 4-grams that are in a reference, times a penalty for brevity.
    Source: Post, A Call for Clarity in Reporting BLEU Scores, 2018.
    """
    from sacrebleu.metrics import BLEU

    return {"bleu": BLEU().corpus_score(predictions, by_place(references)).score}


def chrf(predictions, references):
    """F-score of the 1- to 6-grams of characters, by sacrebleu; recall has a weight of two. Papers call it chrF2.

    It is more informative than BLEU for short texts, and for languages with many forms of a word.
    Source: Popovic, chrF: character n-gram F-score for automatic MT evaluation, 2015.
    """
    from sacrebleu.metrics import CHRF

    return {"chrf": CHRF().corpus_score(predictions, by_place(references)).score}


def by_place(references):
    """Return the first references of all texts, then the second ones, ..., for sacrebleu; None if a text has no more."""
    return list(zip_longest(*references))


def rouge(predictions, references):
    """ROUGE by rouge-score, with Porter's stemmer: a mean over the texts; for each text the best reference counts.

    The values are F1 of the words (rouge1), of the pairs of words (rouge2), of the longest common subsequence of a text
    (rougeL), and of that of its sentences, one on each line (rougeLsum). Words are runs of a-z and 0-9, so this is for
    English only.
    Source: Lin, ROUGE: A Package for Automatic Evaluation of Summaries, 2004.
    """
    from rouge_score.rouge_scorer import RougeScorer

    names = ("rouge1", "rouge2", "rougeL", "rougeLsum")
    scorer = RougeScorer(names, use_stemmer=True)
    scores = [scorer.score_multi(texts, text) for text, texts in zip(predictions, references, strict=True)]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in names}


def gleu(predictions, references, sources):
    """GLEU of the corpus, for grammatical error correction. (GLEU of translation, google_bleu, uses no source.)

    It is BLEU of the correction with one exception: an n-gram of the source counts against the correction if the correction
    keeps it and the reference does not. n is 1 to 4, without smoothing. White space separates words: to compare with
    published numbers, give text with separated punctuation, such as JFLEG. With several references, the result is the mean
    over 500 draws of one reference for each text.

    Source: Napoles et al., Ground Truth for Grammatical Error Correction Metrics, 2015, section 3, as corrected in
    Napoles et al., GLEU Without Tuning, 2016.
    """
    counts = [
        [gleu_counts(prediction.split(), text.split(), source.split()) for text in texts]
        for prediction, texts, source in zip(predictions, references, sources, strict=True)
    ]
    draw = random.Random(0).choice  # the same draws at every evaluation
    num_draws = NUM_DRAWS if any(len(texts) > 1 for texts in references) else 1
    scores = [corpus_gleu([draw(choices) for choices in counts]) for _ in range(num_draws)]
    return {"gleu": 100 * sum(scores) / num_draws}


def gleu_counts(prediction: list[str], reference: list[str], source: list[str]) -> list[int]:
    """Count the words of prediction and reference; then for each n the matching n-grams and all n-grams."""
    counts = [len(prediction), len(reference)]
    for n in range(1, ORDER + 1):
        ours, theirs, before = (ngrams(words, n) for words in (prediction, reference, source))
        # An n-gram of the source that is not in the reference should have changed: keeping it counts against the prediction.
        to_change = Counter({ngram: count for ngram, count in before.items() if ngram not in theirs})
        counts.append(max(0, (ours & theirs).total() - (ours & to_change).total()))
        counts.append(max(0, len(prediction) + 1 - n))
    return counts


def ngrams(words: list[str], n: int) -> Counter:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) + 1 - n))


def corpus_gleu(counts_of_texts: list[list[int]]) -> float:
    """Return GLEU from 0 to 1; it is 0 if for some n no n-gram matches."""
    length, reference_length, *counts = (sum(column) for column in zip(*counts_of_texts, strict=True))
    if not all(counts):
        return 0.0
    precisions = [math.log(right / all_) for right, all_ in zip(counts[::2], counts[1::2], strict=True)]
    return math.exp(min(0, 1 - reference_length / length) + sum(precisions) / ORDER)


METRICS = {function.__name__: function for function in (exact_match, rouge, bleu, chrf, gleu)}


class Texts(evaluate.Metric):
    """Metric whose name `evaluate.load` was given."""

    def _info(self):
        text = datasets.Value("string")
        features = {"predictions": text, "references": datasets.List(text)}
        return evaluate.MetricInfo(
            description=METRICS[self.config_name].__doc__ or "",
            citation="",
            inputs_description=__doc__,
            features=datasets.Features(features | ({"sources": text} if self.config_name == "gleu" else {})),
        )

    def _compute(self, **texts):
        return METRICS[self.config_name](**texts)
