"""Data: which rows a step trains on, and where these rows come from."""
