"""Modules that keep a run alive, end it in good order, and report its state."""
