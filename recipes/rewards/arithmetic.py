"""Reward for sums: an example of what `--rewards FILE.py:FUNCTION` takes.

A function gets the prompts, the model's answers and the columns of the data that it names, and returns a number for
each answer, or None where it says nothing.
"""


def is_correct(completions: list[str], solution: list[str], **_) -> list[float]:
    """Give 1 to an answer that is exactly the solution, 0 to any other."""
    return [float(answer == right) for answer, right in zip(completions, solution, strict=True)]
