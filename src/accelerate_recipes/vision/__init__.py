"""Classifiers of images, and their evaluation."""
