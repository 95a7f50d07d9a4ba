"""Classifiers of images, and what is measured of them."""
