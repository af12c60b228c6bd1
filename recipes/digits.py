"""A reward that a model without a warm start can climb: of recipes/sweep.toml."""


def digits(completion: str) -> float:
    """Share of the characters of an answer that are digits; 0 for an empty one."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))
