"""The library that the recipes share. One script per task in `recipes/`; see README.md."""

__version__ = "0.1.0"
