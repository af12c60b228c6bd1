"""Where to begin: methods by what an audit said, and the ones that most frameworks have."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A method to begin with, and what speaks for it."""

    method: str
    evidence: str
    """Measured, with its size, or only claimed."""
    where: str
    """Page or paper in which to read it."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Finding of an audit or a check, three suggestions, and names of others that were made for it.

    Example:
        >>> [s.method for s in SITUATIONS["stale"].suggested]
        ['bypass_ppo_clip', 'gspo', 'm2po']
    """

    audit: str
    suggested: tuple[Suggestion, ...]
    also: tuple[str, ...]
    survey: tuple[str, ...]
    """What the survey of off-policy RL for LLMs (2026) begins with for such a stack."""
    survey_why: str
    differs: str
    """Why another method is suggested first; "" where none is."""

    @property
    def methods(self) -> tuple[str, ...]:
        """All names, the suggested ones first."""
        return tuple(dict.fromkeys([*(s.method for s in self.suggested), *self.survey, *self.also]))


_TABLES = tomllib.loads(Path(__file__).with_name("situations.toml").read_text(encoding="utf-8"))

SITUATIONS: dict[str, Situation] = {
    name: Situation(
        audit=table["audit"],
        suggested=tuple(Suggestion(**row) for row in table["suggested"]),
        also=tuple(table["also"]),
        survey=tuple(table["survey"]),
        survey_why=table["survey_why"],
        differs=table["differs"],
    )
    for name, table in _TABLES.items()
}
"""Situations by the names that `offdrift methods --for` takes."""

USED_BY: dict[str, tuple[str, ...]] = {
    "grpo": ("ms-swift", "AReaL", "NeMo-RL", "OpenRLHF", "prime-rl", "verl", "TRL"),
    "decoupled_token_is": ("ms-swift", "AReaL", "NeMo-RL", "OpenRLHF", "verl", "TRL"),
    "dapo": ("ms-swift", "AReaL", "NeMo-RL", "OpenRLHF", "verl", "TRL"),
    "gspo": ("ms-swift", "AReaL", "NeMo-RL", "OpenRLHF", "verl", "TRL"),
    "cispo": ("ms-swift", "AReaL", "NeMo-RL", "verl", "TRL"),
    "sapo": ("ms-swift", "AReaL", "verl", "TRL"),
    "dr_grpo": ("ms-swift", "OpenRLHF", "TRL"),
    "icepop": ("NeMo-RL", "OpenRLHF", "verl"),
}
"""The eight methods that at least three of seven frameworks have under a name of their own, and which: by their code
of August 2026, verl 0.9.1 and TRL 1.16."""
