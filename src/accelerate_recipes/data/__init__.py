"""Data: which rows a step trains on, and where these rows come from."""

NUM_ROWS = 3  # number of rows shown of each kind
