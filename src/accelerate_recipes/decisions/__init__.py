"""Decisions: questions about a state, with the probability of each option, from rows to what an export is asked."""
