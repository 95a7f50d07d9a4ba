"""Top-1 and top-5 accuracy and calibration of a classifier of images, as an `evaluate` metric. `evaluate.load` takes this
file's path.

Top-1 accuracy is the share of images whose label is the most probable class; top-5 accuracy, of images whose label is among
the five most probable classes. Top-1 accuracy is also given by class. For the calibration error, predictions are sorted into
15 bins of equal width by their probability. The error is the mean difference between a bin's mean probability and its share
of correct predictions, weighted by the number of predictions in the bin.
"""

import datasets
import evaluate
import numpy as np

NUM_BINS = 15


class ImageClasses(evaluate.Metric):
    """Metric of predicted classes.

    Args:
        predictions: the most probable classes of each image, five or all of them, the most probable first.
        references: the label of each image.
        probabilities: probability of the first prediction of each image.
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
