"""`offdrift bound`: every error bound for given divergences."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from offdrift.cli.app import app, console


@app.command()
def bound(
    horizon: Annotated[int, typer.Option("--T", help="Horizon: tokens of the longest sequence.")],
    delta: Annotated[float, typer.Option(help="Largest token KL(rollout || current), nat.")],
    eps: Annotated[
        float | None, typer.Option(help="Largest token TV; default sqrt(delta/2).")
    ] = None,
    kl_seq: Annotated[
        float | None, typer.Option(help="KL of whole sequences, nat; default T delta.")
    ] = None,
    tv_seq: Annotated[
        float | None, typer.Option(help="TV of whole sequences; default sqrt(kl-seq/2).")
    ] = None,
    mean_tv: Annotated[
        float | None, typer.Option(help="Mean TV per position, for the adaptive rows.")
    ] = None,
    reward_range: Annotated[
        float, typer.Option(help="Largest minus smallest possible reward.")
    ] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Every bound on how far the surrogate can be from the true return, with its minimum B*.

    Table 1 of the Trust Region Masking paper:
    offdrift bound --T 4096 --delta 1e-4 --eps 5e-3 --kl-seq 0.01 --tv-seq 0.05
    """  # fmt: skip
    from offdrift.report.bound_table import bound_rows, bound_table

    given = {"horizon": horizon, "delta": delta, "eps": eps, "kl_seq": kl_seq, "tv_seq": tv_seq, "mean_tv": mean_tv, "reward_range": reward_range}  # fmt: skip
    if as_json:
        typer.echo(json.dumps(bound_rows(**given), indent=1))
    else:
        console.print(bound_table(**given))
