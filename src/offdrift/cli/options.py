"""Options that several commands share, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offdrift.errors import BadValueError

INTERRUPTED = 130
FAILED = 2
"""Exit status of a run with a finding as severe as --fail-on."""

SEVERITIES = ("ok", "info", "watch", "act", "stop")

Columns = Annotated[
    str | None,
    typer.Option(
        help="Names of the log's columns: logp_rollout=my_lp,logp_old=trainer.lp,reward=score. A field without one, entropy=, is not read."
    ),
]
RulesFile = Annotated[
    Path | None, typer.Option(help="TOML with your own thresholds and rules; see docs/rules.md.")
]
MethodName = Annotated[
    str | None, typer.Option(help="The row of `offdrift methods` that the run trains with.")
]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature of the rollouts.")]
Experts = Annotated[
    bool | None, typer.Option("--moe/--dense", help="Whether the model routes tokens to experts.")
]
FailOn = Annotated[
    str | None,
    typer.Option(help="End with status 2 at a finding this severe: watch, act or stop."),
]


def severity(fail_on: str | None) -> int:
    """The place of --fail-on among severities; beyond the last if it is not given.

    Raises: `BadValueError` naming what is none of them.
    """
    if fail_on is None:
        return len(SEVERITIES)
    if fail_on not in SEVERITIES[2:]:
        raise BadValueError(f"--fail-on {fail_on}: give one of {', '.join(SEVERITIES[2:])}")
    return SEVERITIES.index(fail_on)


def pairs(columns: str | None) -> dict[str, str]:
    """`a=b,c=d` as a mapping; `a=` maps to "". Raises: `BadValueError` naming what is not a pair.

    Example:
        >>> pairs("logp_old=trainer.lp, reward=score, entropy=")
        {'logp_old': 'trainer.lp', 'reward': 'score', 'entropy': ''}
    """
    found = {}
    for pair in (columns or "").split(","):
        ours, equals, theirs = (x.strip() for x in pair.partition("="))
        if not pair.strip():
            continue
        if not (equals and ours):
            raise BadValueError(
                f"--columns {pair!r}: write our name, =, and the log's column, or nothing behind the "
                "= to leave our field out"
            )
        found[ours] = theirs
    return found
