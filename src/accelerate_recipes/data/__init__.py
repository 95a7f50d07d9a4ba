"""Rows of any kind: where they come from, which rows a step trains on, and how they are prepared, packed and shown."""

NUM_ROWS = 3  # number of rows shown of each kind
PAD_MULTIPLE = 8  # of the lengths of source and target texts: suits tensor cores, and gives fewer shapes to compile
