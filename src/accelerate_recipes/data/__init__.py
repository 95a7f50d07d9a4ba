"""Data: which rows a step trains on, and where they come from."""
