"""Texts: pretraining on streams of text, and pairs of texts."""
