"""Every error bound against the horizon: the paper's constants beside the sharp ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from offdrift.certificate import all_bounds, tightest
from offdrift.certificate.bounds import LABELS
from offdrift.certificate.inverse import kl_of_sequences, vacuous_horizon
from offdrift.errors import BadValueError
from offdrift.show.figure import Panel, Series, write_figure

TITLES = {"paper": "Constants of the paper", "sharp": "Sharp constants (half of the paper's)"}
POINTS = 121


def write_bound_figure(
    stem: Path,
    *,
    horizon: int,
    delta: float | int,
    eps: float | int | None = None,
    kl_seq: float | int | None = None,
    kl_rate: float | int | None = None,
    tv_seq: float | int | None = None,
    mean_tv: float | int | None = None,
    reward_range: float | int = 1.0,
    constants: tuple[str, ...] = ("paper", "sharp"),
) -> tuple[Path, Path]:
    """Draw every bound for horizons from 1 to ten times the given one, on logarithmic axes.

    Args:
        stem: path of the two files without their endings.
        horizon: tokens; marked in the figure.
        delta, eps, kl_seq, kl_rate, tv_seq, mean_tv, reward_range: as in `vacuous_horizon`.
        constants: one panel each.

    Returns, Raises: as in `offdrift.show.figure.write_figure` and `all_bounds`.
    """
    given: dict[str, Any] = {
        "delta": delta, "eps": eps, "kl_seq": kl_seq, "kl_rate": kl_rate,
        "tv_seq": tv_seq, "mean_tv": mean_tv, "reward_range": reward_range,
    }  # fmt: skip
    panels = bound_panels(horizon=horizon, **given, constants=constants)
    known = [f"{name} = {value:.4g}" for name, value in given.items() if value is not None]
    return write_figure(
        stem,
        panels,
        title="How far can the surrogate be from the true return?",
        caption=f"{', '.join(known)}. {_vacuous(given, constants)} {_premises(given)}",
    )


def bound_panels(
    *, horizon: int, reward_range: float | int, constants: tuple[str, ...], **given: Any
) -> list[Panel]:
    """One panel for each set of constants, with the same axes; the unified bound behind its rows."""
    if horizon < 1:
        raise BadValueError(f"horizon = {horizon}; a sequence has at least 1 token")
    horizons = sorted(
        {horizon, *np.geomspace(1, 10 * horizon, POINTS).round().astype(int).tolist()}
    )
    curves = {c: _curves(horizons, reward_range, c, **given) for c in constants}
    shown = [y for lines in curves.values() for line in lines.values() for y in line]
    drawn = [y for y in shown if 0 < y < math.inf] + [float(reward_range)]
    ends = (10.0 ** math.floor(math.log10(min(drawn))), 10.0 ** math.ceil(math.log10(max(drawn))))
    return [
        Panel(
            title=TITLES[c],
            x="horizon T (tokens)",
            y="bound on |J(π) − J(μ) − L′(π)| (reward)",
            series=[
                Series(LABELS[name], horizons, line, strong=name == "unified")
                for name, line in lines.items()
            ],
            log_x=True,
            log_y=True,
            marks=[(f"reward range {reward_range:g}", reward_range)],
            x_marks=[(f"T = {horizon:,}", horizon)],
            y_range=ends if ends[0] < ends[1] else (ends[0] / 10, ends[1] * 10),
        )
        for c, lines in curves.items()
    ]


def _curves(
    horizons: list[int], reward_range: float | int, constants: str, **given: Any
) -> dict[str, list[float]]:
    """The value of each bound at each horizon, by name; the unified one first."""
    rate = given.pop("kl_rate", None)
    lines: dict[str, list[float]] = {"unified": []}
    for tokens in horizons:
        known: dict[str, Any] = given | {
            "kl_seq": kl_of_sequences(tokens, given.get("kl_seq"), rate)
        }
        rows = all_bounds(horizon=tokens, constants=constants, reward_range=reward_range, **known)
        for row in rows:
            lines.setdefault(row.name, []).append(row.value)
        lines["unified"].append(tightest(rows).value)
    return lines


def _vacuous(given: dict[str, Any], constants: tuple[str, ...]) -> str:
    at = {c: vacuous_horizon(**given, constants=c) for c in constants}
    texts = [f"{'never' if t is None else f'from T = {t:,}'} ({c})" for c, t in at.items()]
    return f"The unified bound B*, drawn thick, is vacuous {', '.join(texts)}."


def _premises(given: dict[str, Any]) -> str:
    if given["kl_seq"] is None and given["tv_seq"] is None:
        rate = "kl_rate" if given["kl_rate"] is not None else "delta"
        return f"A sequence's KL grows as T {rate}."
    return "A given divergence of whole sequences is taken as a limit at every T."
