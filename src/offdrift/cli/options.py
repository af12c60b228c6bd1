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
Of = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="K",
        help="This policy is one of K that you judge by these rollouts, or that you chose among by looking at them "
        "in any way: a table of checkpoints, the best of a sweep. Each of the K spends a K-th of the probability of "
        "error, so that the one you show is right. Say K also if you show only the best.",
    ),
]
Look = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="t",
        help="This is look t of a series, each at rollouts drawn after the one before, as for a checkpoint every day. "
        "It spends 6/(pi t)^2 of the probability of error (.61, .15, .07, ...): all looks hold together, however "
        "many there will be. Count every look, also those that certified nothing.",
    ),
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
