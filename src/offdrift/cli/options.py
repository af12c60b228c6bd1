"""Options about a log and its judgement, which several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Columns = Annotated[
    str | None,
    typer.Option(
        help="Which column of the log holds which field: logp_old=lp,reward=score and so on. A "
        "field without a column, as in entropy=, is not read."
    ),
]
RulesFile = Annotated[Path | None, typer.Option(help="TOML with your own thresholds and rules; see docs/rules.md.")]
MethodName = Annotated[str | None, typer.Option(help="The row of `offdrift methods` that the run trains with.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature of the rollouts.")]
Experts = Annotated[bool | None, typer.Option("--moe/--dense", help="Whether the model routes tokens to experts.")]
FailOn = Annotated[
    Literal["watch", "act", "stop"] | None, typer.Option(help="End with exit status 3 at a finding this severe.")
]


def reaches(severity: str, fail_on: str | None) -> bool:
    """Whether a verdict is as severe as --fail-on asks.

    Example:
        >>> reaches("stop", "act"), reaches("watch", "act"), reaches("stop", None)
        (True, False, False)
    """
    from offdrift.judge.findings import URGENCY

    return fail_on is not None and severity in URGENCY[: URGENCY.index(fail_on) + 1]


def pairs(columns: str | None) -> dict[str, str]:
    """`a=b,c=d` as a mapping; `a=` maps to "". Raises: `typer.BadParameter` naming what is not a pair.

    Example:
        >>> pairs("logp_old=trainer.lp, reward=score, entropy=")
        {'logp_old': 'trainer.lp', 'reward': 'score', 'entropy': ''}
    """
    names = {}
    for pair in (columns or "").split(","):
        ours, equals, theirs = (x.strip() for x in pair.partition("="))
        if not pair.strip():
            continue
        if not (equals and ours):
            raise typer.BadParameter(
                f"--columns {pair!r}: write our name, =, and the log's column, or nothing behind the "
                "= to leave our field out"
            )
        names[ours] = theirs
    return names
