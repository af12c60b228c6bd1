"""What an audit of a planted run reports: the same reading, tally and rules that `offdrift audit` uses."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offdrift.audit.tally import Tally
from offdrift.judge import Context, Finding, diagnose
from offdrift.records.batch import Logged
from offdrift.records.readers import detect, pieces, read

CLEAN = "clean"
CAUSES = (
    "precision", "raw_logprobs", "one_sided_filter", "misaligned", "router_flips", "wrong_weights",
    "stale_engine", "token_drift", "weight_variance", "clip_saturation", "optimizer_amplification", "unexplained",
)  # fmt: skip


@dataclass(frozen=True)
class Reported:
    """The findings of one run, and how large its drift was."""

    findings: tuple[Finding, ...]
    overall: dict[str, Any]

    @property
    def cause(self) -> str:
        """The cause that stands first, "clean" if nothing was found."""
        return self.findings[0].cause if self.findings else CLEAN

    @property
    def causes(self) -> tuple[str, ...]:
        """Every cause, in order."""
        return tuple(dict.fromkeys(f.cause for f in self.findings))


def audited(batches: Iterable[Logged], context: Context) -> Reported:
    """An audit of these batches."""
    tally = functools.reduce(Tally.merge, (Tally.of(b, file="planted") for b in batches))
    told = tally.as_dict()
    steps = [{k: v for k, v in s.items() if isinstance(v, (int, float))} for s in told["steps"]]
    known = replace(context, overall=told["overall"], facets=told["facets"], shapes=told["shapes"])
    return Reported(tuple(diagnose(steps, context=known)), told["overall"])


def logged(folder: Path) -> Iterable[Logged]:
    """The batches of a folder of logs."""
    found = detect([str(folder)])
    for piece in pieces(found):
        batches, bad = read(piece, found)
        assert not bad
        yield from batches
