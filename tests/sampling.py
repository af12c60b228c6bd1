"""Slow claims with many cases are sampled: each run takes a share of the cases, and the next runs take the others.

`@pytest.mark.sampled(n)` on a test: where SAMPLE is a number (`make test-all` gives the number of commits), about one
case in `len(cases) / n` is run, evenly spread; SAMPLE + 1 takes the next ones, so that in as many runs as a share is
small every case has been run. Without SAMPLE every case is run.
"""

from __future__ import annotations

from itertools import groupby

import pytest


def sampled(items: list[pytest.Item], turn: str | None) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that this run takes, in their order, and the others.

    Args:
        turn: SAMPLE; None or "" takes all.
    """
    if not turn:
        return items, []
    left_out = set()
    marked = [item for item in items if item.get_closest_marker("sampled")]
    for _, cases in groupby(marked, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(cases)
        (most,) = cases[0].get_closest_marker("sampled").args
        share = -(-len(cases) // most)
        left_out.update(item for i, item in enumerate(cases) if (i + int(turn)) % share)
    return [item for item in items if item not in left_out], [item for item in items if item in left_out]
