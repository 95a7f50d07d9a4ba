"""Top-1 and top-5 accuracy and calibration of a classifier of images, as an `evaluate` metric. `evaluate.load` takes this
file's path.

Shares of the images whose label is the most probable class, and is among the five most probable ones; over all images, and
the first also by class. The calibration error is the mean distance between a prediction's probability and the share of
right predictions, over 15 bins of equal width, weighted by the number of predictions in each.
"""

import datasets
import evaluate
import numpy as np

NUM_BINS = 15


class ImageClasses(evaluate.Metric):
    """Metric of predicted classes.

    Args:
        predictions: the most probable classes of each image, the first five or all, from the most probable one on.
        references: the label of each image.
        probabilities: that of the first prediction.
    Returns:
        accuracy, top5_accuracy, calibration_error (shares of 1), and by_class: for each label that occurs, the accuracy.
    """

    def _info(self):
        number = datasets.Value("int64")
        features = {
            "predictions": datasets.List(number),
            "references": number,
            "probabilities": datasets.Value("float64"),
        }
        return evaluate.MetricInfo(
            description=__doc__,
            citation="Guo et al. 2017, On Calibration of Modern Neural Networks",
            inputs_description=self.__doc__,
            features=datasets.Features(features),
        )

    def _compute(self, predictions, references, probabilities):
        labels, probabilities = np.array(references), np.array(probabilities)
        right = np.array([classes[0] for classes in predictions]) == labels
        bins = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
        error = sum(abs((right[bins == i] - probabilities[bins == i]).sum()) for i in range(NUM_BINS)) / len(labels)
        return {
            "accuracy": right.mean().item(),
            "top5_accuracy": np.mean(
                [label in classes for label, classes in zip(references, predictions, strict=True)]
            ).item(),
            "calibration_error": float(error),
            "by_class": {int(label): right[labels == label].mean().item() for label in np.unique(labels)},
        }
