"""The command `doctor`: what would fail or be slow on this machine, and proofs by small runs, written on a card."""
