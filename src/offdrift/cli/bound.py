"""`offdrift bound`: every error bound for given divergences, and the questions backwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.text import Text

from offdrift.cli.app import THEORY, Screen, app


@app.command(rich_help_panel=THEORY)
def bound(
    screen: Screen,
    horizon: Annotated[int | None, typer.Option("--T", help="Horizon: tokens of the longest sequence.")] = None,
    delta: Annotated[
        float | None, typer.Option(help="Largest token KL(rollout || current), nat; inf if it is not known.")
    ] = None,
    eps: Annotated[float | None, typer.Option(help="Largest token TV; default sqrt(delta/2).")] = None,
    kl_seq: Annotated[float | None, typer.Option(help="KL of whole sequences, nat; default T delta.")] = None,
    kl_rate: Annotated[
        float | None, typer.Option(help="Mean token KL, nat per token; KL of whole sequences is then T times it.")
    ] = None,
    tv_seq: Annotated[float | None, typer.Option(help="TV of whole sequences; default sqrt(kl-seq/2).")] = None,
    mean_tv: Annotated[float | None, typer.Option(help="Mean TV per position, for the adaptive rows.")] = None,
    chi2: Annotated[
        float | None, typer.Option(help="Largest token χ²(current || rollout), E[ratio²] − 1; adds the variance row.")
    ] = None,
    reward_sd: Annotated[
        float | None, typer.Option(help="Standard deviation of the reward, for --chi2; default half its range.")
    ] = None,
    hellinger_seq: Annotated[
        float | None,
        typer.Option(help="Squared Hellinger distance of a token, summed over a sequence: finite where KL is not."),
    ] = None,
    kl_rewarded: Annotated[
        float | None,
        typer.Option(help="k3 = ratio − 1 − log ratio, summed over a sequence and averaged with weight R, nat."),
    ] = None,
    kl_unrewarded: Annotated[
        float | None, typer.Option(help="The same with weight 1 − R. Both add up to the KL of whole sequences.")
    ] = None,
    reward_range: Annotated[float, typer.Option(help="Largest minus smallest possible reward.")] = 1.0,
    constants: Annotated[
        Literal["both", "paper", "sharp"],
        typer.Option(help="Constants of the bounds: as published, sharper ones, or both."),
    ] = "both",
    solve: Annotated[
        Literal["delta", "eps", "kl_seq", "T", "chi2", "reward_sd", "hellinger_seq", "kl_rewarded", "kl_unrewarded"]
        | None,
        typer.Option(help="Find the largest such value whose tightest bound B* is within the target."),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Largest acceptable error, for --solve; default the reward range.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="PATH",
            help="Take missing values from measured drift: a run, an arm of one, audit.json or check.json.",
        ),
    ] = None,
    chart: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw every bound for T from 1 to ten times --T: a .html, .svg or .png file."
        ),
    ] = None,
) -> None:
    """How far can the surrogate objective be from the true return? Every proved bound, and the tightest, B*.

    A bound above the range of the reward is rarely of use: it certifies only a surrogate gain that is larger still.

    The first example is Table 1 of the Trust Region Masking paper, and what halved constants make of it. --solve
    asks backwards: how small must the largest token KL be for an error of at most 0.1 at 8192 tokens, or how long
    may sequences be, with a mean token KL from the log? --from takes the drift from a run, an audit or a check, and
    --chart draws what each bound says of it, against the horizon.

    \b
    offdrift bound --T 4096 --delta 1e-4 --eps 5e-3 --kl-seq 0.01 --tv-seq 0.05
    offdrift bound --T 8192 --solve delta --target 0.1
    offdrift bound --delta 1e-4 --kl-rate 1e-6 --solve T
    offdrift bound --T 500 --delta inf --chi2 1e-4 --reward-sd 0.22
    offdrift bound --T 4096 --delta 0.03 --kl-rate 1.4e-3 --chart bounds.html
    """
    from offdrift.prove.bound import answer_rows, answer_table, bound_rows, bound_table, write_bound_chart
    from offdrift.prove.measured import measured_drift

    columns = ("paper", "sharp") if constants == "both" else (constants,)
    divergences: dict[str, Any] = {
        "delta": delta,
        "eps": eps,
        "kl_seq": kl_seq,
        "kl_rate": kl_rate,
        "tv_seq": tv_seq,
        "mean_tv": mean_tv,
        "chi2": chi2,
        "reward_sd": reward_sd,
        "hellinger_seq": hellinger_seq,
        "kl_rewarded": kl_rewarded,
        "kl_unrewarded": kl_unrewarded,
        "reward_range": reward_range,
    }
    source = ""
    if measured is not None:
        drift = measured_drift(measured)
        source, divergences = drift.source, drift.completed(divergences, solve)
        horizon = drift.horizon if horizon is None and solve != "T" else horizon
    given = {solve, *(name for name, x in {"T": horizon, **divergences}.items() if x is not None)}
    refusals = {
        "how many tokens has the longest sequence? give --T": "T" not in given,
        "give --delta, the largest token KL; inf if it is not known; or --from a run": "delta" not in given,
        "--reward-sd belongs to --chi2: only the variance row depends on it": reward_sd is not None
        and "chi2" not in given,
        "--target belongs to --solve": solve is None and target is not None,
        "--chart draws the bounds of given divergences; leave out --solve": chart is not None and solve is not None,
        "--T is given and solved for; leave one out": solve == "T" and horizon is not None,
    }
    for message, wrong in refusals.items():
        if wrong:
            raise typer.BadParameter(message)
    if chart is not None:
        from offdrift.show.figures import chart_kind

        chart_kind(chart)  # before the table, not after it
    notes = [Text(source, style="yellow")] if source else []
    if solve is not None:
        goal = reward_range if target is None else target
        rows = answer_rows(solve, target=goal, horizon=horizon, constants=columns, **divergences)
        if screen.as_json:
            screen.json(rows)
        else:
            screen.show(answer_table(rows, target=goal, horizon=horizon), *notes)
        screen.next("offdrift certify RUN/arms/NAME", "does a policy keep to it?")
        return
    assert horizon is not None
    if screen.as_json:
        rows = bound_rows(horizon=horizon, **divergences)
        rows[-1]["source"] = source or None
        screen.json(rows)
    else:
        screen.show(bound_table(horizon=horizon, **divergences, constants=columns, narrow=screen.width < 96), *notes)
    if chart is not None:
        screen.wrote(chart=write_bound_chart(chart, horizon=horizon, **divergences, constants=columns, source=source))
    screen.next(f"offdrift bound --T {horizon} --solve delta --target 0.1", "token KL for an error of 0.1")
