"""`offdrift bound`: every error bound for given divergences, and the questions backwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from offdrift.cli.app import app, console

EXAMPLES = """[bold]Examples[/]

Table 1 of the Trust Region Masking paper, and what halved constants make of it:

  offdrift bound --T 4096 --delta 1e-4 --eps 5e-3 --kl-seq 0.01 --tv-seq 0.05

How small must the largest token KL be for an error of at most 0.1 at 8192 tokens?

  offdrift bound --T 8192 --solve delta --target 0.1

How long may sequences be, with a mean token KL of 1e-6 nat from the log?

  offdrift bound --delta 1e-4 --kl-rate 1e-6 --solve T

Every bound against the horizon, as bounds.png and bounds.html:

  offdrift bound --T 4096 --delta 1e-4 --eps 5e-3 --plot bounds
"""


@app.command(epilog=EXAMPLES)
def bound(
    horizon: Annotated[int | None, typer.Option("--T", help="Horizon: tokens of the longest sequence.")] = None,
    delta: Annotated[float | None, typer.Option(help="Largest token KL(rollout || current), nat; inf if only TV is known.")] = None,
    eps: Annotated[float | None, typer.Option(help="Largest token TV; default sqrt(delta/2).")] = None,
    kl_seq: Annotated[float | None, typer.Option(help="KL of whole sequences, nat; default T delta.")] = None,
    kl_rate: Annotated[float | None, typer.Option(help="Mean token KL, nat per token; KL of whole sequences is then T times it.")] = None,
    tv_seq: Annotated[float | None, typer.Option(help="TV of whole sequences; default sqrt(kl-seq/2).")] = None,
    mean_tv: Annotated[float | None, typer.Option(help="Mean TV per position, for the adaptive rows.")] = None,
    reward_range: Annotated[float, typer.Option(help="Largest minus smallest possible reward.")] = 1.0,
    constants: Annotated[Literal["both", "paper", "sharp"], typer.Option(help="Which constants are shown.")] = "both",
    solve: Annotated[Literal["delta", "eps", "kl_seq", "T"] | None, typer.Option(help="Answer the inverse question: the largest such value with B* within the target.")] = None,
    target: Annotated[float | None, typer.Option(help="Largest acceptable error, for --solve; default the reward range.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="STEM", help="Draw every bound for T from 1 to ten times --T: STEM.png and STEM.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:  # fmt: skip
    """Every bound on how far the surrogate can be from the true return, with its minimum B*.

    A bound that is not below the range of the reward is vacuous: it says nothing.
    """
    wanted = ("paper", "sharp") if constants == "both" else (constants,)
    given = {"delta": delta, "eps": eps, "kl_seq": kl_seq, "kl_rate": kl_rate, "tv_seq": tv_seq, "mean_tv": mean_tv, "reward_range": reward_range}  # fmt: skip
    if horizon is None and solve != "T":
        raise typer.BadParameter("how many tokens has the longest sequence? give --T")
    if delta is None and solve != "delta":
        raise typer.BadParameter("give --delta, the largest token KL; inf if only TV is known")
    if solve is None and target is not None:
        raise typer.BadParameter("--target belongs to --solve delta, eps, kl_seq or T")
    if solve is not None and plot is not None:
        raise typer.BadParameter("--plot draws the bounds of given divergences; leave out --solve")
    if solve is not None:
        _solve(solve, horizon, reward_range if target is None else target, wanted, given, as_json)
        return
    assert horizon is not None
    _table(horizon, wanted, given, as_json)
    if plot is not None:
        _plot(plot, horizon, wanted, given, as_json)


def _solve(solve: str, horizon: int | None, target: float, wanted: tuple, given: dict, as_json: bool) -> None:  # fmt: skip
    from offdrift.prove.bound_answer import answer_rows, answer_table

    if solve == "T" and horizon is not None:
        raise typer.BadParameter("--T is given and solved for; leave one out")
    rows = answer_rows(solve, target=target, horizon=horizon, constants=wanted, **given)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        console.print(answer_table(rows, target=target, horizon=horizon))


def _table(horizon: int, wanted: tuple, given: dict, as_json: bool) -> None:
    from offdrift.prove.bound import bound_rows, bound_table

    if as_json:
        typer.echo(json.dumps(bound_rows(horizon=horizon, **given), indent=1))
    else:
        console.print(bound_table(horizon=horizon, **given, constants=wanted, narrow=console.width < 96))  # fmt: skip


def _plot(stem: Path, horizon: int, wanted: tuple, given: dict, as_json: bool) -> None:
    from offdrift.prove.bound import write_bound_figure

    for path in write_bound_figure(stem, horizon=horizon, **given, constants=wanted):
        if not as_json:
            console.print(f"wrote {path}", highlight=False, markup=False, soft_wrap=True)
