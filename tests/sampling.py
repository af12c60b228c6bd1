"""Costly claims take turns: where SAMPLE is a number, a test that takes long is run in some commits, and so all in few.

`costs.txt` says how many seconds a test took, all its cases together (`make costs` measures). One of c seconds is spread
over ceil(c / SHARE) consecutive values of SAMPLE, at most `MOST`: each value takes some of its cases, or its one case in
its turn, and every case comes once. What is not in that file always runs: a new test, or one that was renamed.
`make test-all` gives the number of commits; without SAMPLE every case is run.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

COSTS = Path(__file__).with_name("costs.txt")
MOST = 10
"""Commits in which every case has been run."""
SHARE = 0.75
"""Seconds that one commit gives to a test, unless `MOST` of them are too few for all its cases."""


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def read_costs(path: Path = COSTS) -> dict[str, float]:
    """Seconds of a test, by its name without cases."""
    rows = (line.split(maxsplit=1) for line in path.read_text().splitlines())
    return {name: float(seconds) for seconds, name in rows}


def taking_turns(
    items: list[pytest.Item], turn: str | None, costs: dict[str, float]
) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The items that this run takes, in their order, and the others.

    Args:
        turn: SAMPLE; None or "" takes all.
    """
    if not turn:
        return items, []
    run, left_out = [], []
    cases = Counter[str]()
    for item in items:
        name = function_of(item.nodeid)
        turns = min(MOST, max(1, math.ceil(costs.get(name, 0) / SHARE)))
        first = zlib.crc32(name.encode()) + int(turn)  # tests of one case are not all run in the same commit
        (left_out if (first + cases[name]) % turns else run).append(item)
        cases[name] += 1
    return run, left_out


def of_files(items: list[pytest.Item], costs: dict[str, float]) -> Counter[str]:
    """Seconds of each file, had every case of its tests been taken."""
    seconds = Counter[str]()
    for name in {function_of(item.nodeid) for item in items}:
        seconds[file_of(name)] += costs.get(name, 0)
    return seconds


class Costs:
    """Adds up what tests take, and at the end writes those above a second."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds = path, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        lines = (f"{seconds:.0f} {name}\n" for name, seconds in sorted(self.seconds.items()) if seconds > 1)
        self.path.write_text("".join(lines))
