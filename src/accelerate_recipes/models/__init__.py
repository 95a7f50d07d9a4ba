"""Models: how they are made, loaded, sharded and adapted, and what each of them needs."""

IGNORE_INDEX = -100  # label of a position that is no target
