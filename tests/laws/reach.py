"""Rows whose limits are too far for random batches, with limits that they reach: what a law says holds at any limit."""

from offdrift.methods import METHODS, Method, override

NEARER = {"mu_grpo": {"gate.low": 0.7}, "negative_filter": {"gate.low": 0.8}}


def within_reach(name: str) -> Method:
    """The row, with a limit that some tokens of every few batches cross."""
    return override(METHODS[name], NEARER.get(name, {}))
