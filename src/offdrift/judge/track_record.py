"""`Track`: what became of training runs in which a rule was told, and the level that this supports.

While a run is going on, a finding's level is a forecast: `stop` says that most such runs lose their reward, `act` that
half of them do. So the live level of a rule is set by runs of this library's trainer, on tiny models, and tested on
others. `benchmarks/severity.py` trains them and writes `track_record.toml`; docs/diagnosis.md has the table.

An audit looks back: there a level says how wrong a log is, and it is the rule's own `severity`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from offdrift.judge.findings import Severity
from offdrift.texts import parse_toml, read_text

FILE = Path(__file__).parent / "track_record.toml"
FEWEST = 10
"""Runs from which on numbers are shown: fewer say nothing."""


@dataclass(frozen=True, kw_only=True)
class Track:
    """Runs in which a rule was told, and what became of them."""

    level: Severity
    """Level of the rule while a run is going on."""
    why: str = ""
    """What the level rests on."""
    told: int = 0
    """Runs that were told in time, with `within` updates left."""
    fell: int = 0
    """Of those, runs that lost more than 30 % of their best held-out reward within them."""
    late: int = 0
    """Runs that were told after such a loss."""
    still: int = 0
    """Of those, runs that had not recovered `within` updates later."""
    base: float = 0.0
    """Share of all runs, told or not, that lost so much in the same updates."""
    within: int = 20
    """Updates."""

    @property
    def sentence(self) -> str:
        """The numbers in words; "" where too few runs were told.

        Example:
            >>> print(Track(level="stop", told=25, fell=23, base=0.31).sentence)
            In 23 of 25 runs of tiny models, reward fell by over 30 % in 20 updates (all: 31 %). Yours may differ.
        """
        if self.told >= FEWEST:
            return (
                f"In {self.fell} of {self.told} runs of tiny models, reward fell by over 30 % in {self.within} updates "
                f"(all: {100 * self.base:.0f} %). Yours may differ."
            )
        if self.late >= FEWEST:
            return (
                f"In {self.late} runs of tiny models, reward had fallen by over 30 % before; {self.still} had not "
                f"recovered in {self.within} updates. Yours may differ."
            )
        return ""


@cache
def tracks() -> Mapping[str, Track]:
    """The record of every rule that was told in some of the runs, by the rule's name.

    Example:
        >>> tracks()["reward_collapse"].level in ("watch", "act", "stop")
        True
    """
    content = parse_toml(read_text(FILE))
    within = content.get("within", 20)
    return MappingProxyType({name: Track(**row, within=within) for name, row in content["rules"].items()})
