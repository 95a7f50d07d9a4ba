"""Prediction of what a run needs, by simulating one optimizer step without a GPU."""
