"""Tests of recipes/metrics/texts.py, against values worked out by hand."""

import math

import evaluate
import pytest
from helpers import ROOT


def compute(name: str, **columns: list) -> dict[str, float]:
    return evaluate.load(str(ROOT / "recipes/metrics/texts.py"), name, keep_in_memory=True).compute(**columns)


@pytest.mark.parametrize("name", ["exact_match", "rouge", "bleu", "chrf", "gleu"])
def test_from_0_to_100(name):
    right, wrong = "the cat sat on the mat", "xyz uvw"
    sources = {"sources": ["the cat sit on the mat"]} if name == "gleu" else {}
    for text, wanted in ((right, 100.0), (wrong, 0.0)):
        found = compute(name, predictions=[text], references=[[right]], **sources)
        assert name in found or name == "rouge"
        assert all(value == pytest.approx(wanted, abs=1e-6) for value in found.values()), found


def test_exact_match():
    predictions = ["a b", " a\nb ", "a c", "A b"]
    references = [["a b"], ["a b"], ["a b", "a c"], ["a b"]]
    assert compute("exact_match", predictions=predictions, references=references) == {"exact_match": 75.0}


def test_rouge():
    """rouge1: 3 words match of 4 and of 5, F1 = 2 x 3 / 9. rouge2: only "a b" matches, of 3 and of 4. rougeL: a b d."""
    found = compute("rouge", predictions=["a b d x"], references=[["a b c d e"]])
    assert found["rouge1"] == pytest.approx(100 * 6 / 9)
    assert found["rouge2"] == pytest.approx(100 * 2 / 7)
    assert found["rougeL"] == pytest.approx(100 * 6 / 9)
    # Stems; and of several references the nearest.
    assert compute("rouge", predictions=["cats"], references=[["dog", "cat"]])["rouge1"] == 100
    # A mean over the texts; rougeLsum takes each line by itself, rougeL the text as one.
    found = compute("rouge", predictions=["c d\na b", "x"], references=[["a b\nc d"], ["y"]])
    assert found["rougeL"] == pytest.approx(25) and found["rougeLsum"] == pytest.approx(50)


def test_bleu():
    """For 6 words against 7, of 6, 5, 4, 3 n-grams 6, 4, 2, 1 are right; the penalty is exp(1 - 7/6)."""
    found = compute("bleu", predictions=["a b c d f g"], references=[["a b c d e f g"]])
    precision = (6 / 6 * 4 / 5 * 2 / 4 * 1 / 3) ** 0.25
    assert found["bleu"] == pytest.approx(100 * math.exp(1 - 7 / 6) * precision)
    # Counts are summed over the corpus; and texts may have unequally many references.
    predictions, references = ["a b c d f g", "h i j k"], [["a b c d e f g"], ["z", "h i j k"]]
    found = compute("bleu", predictions=predictions, references=references)
    precision = (10 / 10 * 7 / 8 * 4 / 6 * 2 / 4) ** 0.25
    assert found["bleu"] == pytest.approx(100 * math.exp(1 - 11 / 10) * precision)


def test_chrf():
    """abc against abd has 2 of 3 letters, 1 of 2 pairs, 0 of 1 triple, and nothing longer; F2 of equal values is that value."""
    found = compute("chrf", predictions=["abc"], references=[["abd"]])
    assert found["chrf"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    # Recall counts twice: ab against abab has precision 1, 1 and recall 2/4, 1/3.
    found = compute("chrf", predictions=["ab"], references=[["abab"]])
    precision, recall = (1 + 1) / 2, (2 / 4 + 1 / 3) / 2
    assert found["chrf"] == pytest.approx(100 * 5 * precision * recall / (4 * precision + recall))


def test_gleu():
    """Words of the source that should have been removed, but stayed, count against the prediction."""
    # Copied, with "e" for "f": of 5, 4, 3, 2 n-grams 4, 3, 2, 1 are right, and one of each order should have gone.
    copied = compute("gleu", predictions=["a b c d e"], references=[["a b c d f"]], sources=["a b c d e"])
    assert copied["gleu"] == 0  # 3, 2, 1, 0
    # Of 12, 11, 10, 9 n-grams 1, 2, 3, 4 hold "e".
    source, reference = (f"a b c d {word} g h i j k l m" for word in "ef")
    columns = {"references": [[reference]], "sources": [source]}
    precision = ((11 - 1) / 12 * (9 - 2) / 11 * (7 - 3) / 10 * (5 - 4) / 9) ** 0.25
    assert compute("gleu", predictions=[source], **columns)["gleu"] == pytest.approx(100 * precision)
    # Another wrong word that is not in the source has no extra penalty.
    precision = (11 / 12 * 9 / 11 * 7 / 10 * 5 / 9) ** 0.25
    found = compute("gleu", predictions=["a b c d x g h i j k l m"], **columns)
    assert found["gleu"] == pytest.approx(100 * precision)
    # Too short by a word.
    found = compute("gleu", predictions=["a b c d f g h i j k l"], **columns)
    assert found["gleu"] == pytest.approx(100 * math.exp(1 - 12 / 11))


def test_gleu_of_several_references_is_the_mean_of_draws():
    source, right, other = "a b c d e", "a b c d f", "v w x y z"
    columns = {"predictions": [right], "references": [[right, other]], "sources": [source]}
    found = compute("gleu", **columns)["gleu"]
    assert found == compute("gleu", **columns)["gleu"]
    assert found == pytest.approx(50, abs=7)  # 100 with the one, 0 with the other, 500 times
