"""Fault kinds and clean controls: `dev` may be looked at while rules are written, `held_out` may not."""

from __future__ import annotations

from benchmarks.field.kinds.base import CAUSES, FIXES, Kind, is_held_out

__all__ = ["CAUSES", "FIXES", "Kind", "chosen", "is_held_out"]


def chosen(half: str) -> dict[str, Kind]:
    """Kinds by name: of `dev`, of `held-out`, or `all`."""
    from benchmarks.field.kinds import dev, held_out, reported

    seen = dev.KINDS + reported.KINDS + reported.LATER
    halves = {"dev": seen, "held-out": held_out.KINDS, "all": seen + held_out.KINDS}
    return {kind.name: kind for kind in halves[half]}
