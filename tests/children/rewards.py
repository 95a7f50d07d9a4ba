"""Reward that any chat template allows."""


def short(prompts: list, completions: list, **columns) -> list[float]:
    """Prefer short answers."""
    return [-float(len(str(completion))) for completion in completions]
