"""Images: with text, for models that see, and with labels, for classifiers."""
