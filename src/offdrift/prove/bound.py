"""Error bounds of the surrogate, with the paper's constants and the sharp ones: `bound_rows` and `bound_table`.

`write_bound_chart` draws them over horizons. `answer_rows` inverts the unified bound: how much drift, or how long a
horizon, keeps it below a target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from rich import box
from rich.table import Table
from rich.text import Text

from offdrift.certificate import Bound, Premises, all_bounds, premises, tightest
from offdrift.certificate.bounds import LABELS
from offdrift.certificate.inverse import (
    LONGEST,
    kl_of_sequences,
    largest,
    largest_possible,
    route_crossovers,
    vacuous_horizon,
)
from offdrift.errors import BadValueError
from offdrift.show.charts import Chart, Series
from offdrift.show.figures import write_chart
from offdrift.show.numbers import short

CONSTANTS = {"sharp": "sharp constants", "paper": "the paper's constants"}
OTHERS = {"sharp": "sharp ones", "paper": "the paper's"}
BEYOND = {
    "chi2": ("max χ²", ""),
    "reward_sd": ("sd(R)", ""),
    "hellinger_seq": ("ΣH²", ""),
    "kl_rewarded": ("E[RΣk3]", " nats"),
    "kl_unrewarded": ("E[(1−R)Σk3]", " nats"),
}
"""Symbol and unit of each premise of a bound that is not in the paper; shown where it is given."""
ROUTES = {"tv": "TV", "kl": "KL", "tv_seq": "TV_seq", "kl_seq": "KL_seq", "one": "the cap of 1"}


def title(limits: Premises, arguments: Mapping[str, Any], reward_range: float) -> Text:
    """The question and the premises; those that were not passed in are marked as derived."""

    def value(name: str, symbol: str, unit: str = "") -> str:
        number = getattr(limits, name)
        if math.isinf(number):
            return f"{symbol} unknown"
        passed = arguments.get(name) is not None and name not in limits.notes
        return f"{symbol} = {number:.4g}{unit}{'' if passed else ' (derived)'}"

    token = [value("delta", "max KL δ", " nats"), value("eps", "max TV ε")]
    sequence = [value("kl_seq", "KL_seq", " nats"), value("tv_seq", "TV_seq")]
    names = [name for name in BEYOND if getattr(limits, name) is not None]
    if limits.chi2 is None:
        names.remove("reward_sd")
    further = [value(name, *BEYOND[name]) for name in names]
    lines = [
        f"\n{' ' * 15 if i else 'beyond these   '}{'   '.join(further[i : i + 2])}" for i in range(0, len(further), 2)
    ]
    return Text.assemble(
        ("How far can the surrogate be from the true return?\n", "bold"),
        (f"horizon T = {limits.horizon:,} token{'s' * (limits.horizon > 1)}", "bold"),
        f"   rewards in a range of {reward_range:g}\n",
        f"per token      {'   '.join(token)}\n",
        f"per sequence   {'   '.join(sequence)}",
        *lines,
    )


def caption(
    rows: Sequence[dict[str, Any]],
    reward_range: float,
    constants: Sequence[str],
    arguments: Mapping[str, Any],
    kl_rate: float | None,
    *,
    narrow: bool,
) -> Text:
    """Text below the table: B*, at which horizon it reaches the reward's range, the routes, and notes."""
    unified, mean_tv = rows[-1], arguments["mean_tv"]
    lines = [_verdict(rows, reward_range, constants)]
    if unified["kl_per_token"] is not None:
        lines.append(Text(f"KL_seq = {arguments['kl_seq']:.4g} is {unified['kl_per_token']:.3g} nats per token."))
    if unified["from_delta"] is not None:
        alone = (f"{unified['from_delta'][c]:.4g} ({c})" for c in sorted(constants, reverse=True))
        lines.append(Text(f"From the largest token KL δ alone, B* = {', '.join(alone)}."))
    if not isinstance(mean_tv, Sequence) and not getattr(mean_tv, "ndim", 0):
        lines.append(Text(vacuous_words(unified["vacuous_from"], constants, arguments, kl_rate)))
    routes = ", ".join(f"{ROUTES[name]} to token {last:,}" for name, _, last in unified["routes"])
    lines.append(Text(f"Smallest route to the context shift (Lemma 3.2): {routes}."))
    lines += [Text(note, style="yellow") for note in dict.fromkeys(r["note"] for r in rows) if note]
    about = []
    if not narrow:
        about = ["closed form: eq. 14, Thm. 3.5; Table 1 prints it for Pinsker-Marginal, Adaptive."]
    if any(row["worst_case"] for row in rows):
        about.append("≤ adaptive: eps at every position, no mean TV given; not in the minimum.")
    lines += [Text(line, style="dim") for line in about]
    return Text("\n").join(lines)


def vacuous_words(
    first: Mapping[str, int | None], constants: Sequence[str], arguments: Mapping[str, Any], kl_rate: float | None
) -> str:
    """Say at which horizon B* reaches the reward's range, and what is taken to hold at every horizon.

    Args:
        first: the shortest such horizon by constants; None where there is none.
    """
    at = {c: "no T" if first[c] is None else f"T = {first[c]:,}" for c in sorted(constants, reverse=True)}
    if not any(first[c] is not None for c in constants):
        return "B* stays below that range up to 10^12 tokens, if these divergences hold at every T."
    fixed = ["KL_seq = T kl_rate"] if kl_rate is not None else []
    if kl_rate is None and arguments["kl_seq"] is not None:
        fixed.append("KL_seq")
    sequences = {"tv_seq": "TV_seq"} | {name: BEYOND[name][0] for name in BEYOND if name not in ("chi2", "reward_sd")}
    fixed += [symbol for name, symbol in sequences.items() if arguments.get(name) is not None]
    premise = f", {', '.join([*fixed[:-2], ' and '.join(fixed[-2:])])} at every T" if fixed else ""
    return f"B* reaches that range at {', '.join(f'{t} ({c})' for c, t in at.items())}{premise}."


def _verdict(rows: Sequence[dict[str, Any]], reward_range: float, constants: Sequence[str]) -> Text:
    """The smallest bound, the rows that attain it, and whether it is below the reward's range."""
    best = min(constants, key=lambda c: rows[-1][c])
    value, color = rows[-1][best], "green"
    if value == 0:
        meaning = "The surrogate is exact: its gain is the gain of the true return."
    elif value < reward_range:
        meaning = (
            f"A surrogate gain above B* certifies an improvement. B* is below the reward's range, {reward_range:g}."
        )
    else:
        meaning = f"Not below the reward's range, {reward_range:g}: of use only for a surrogate gain larger still."
        color = "yellow"
    sentence = Text.assemble((f"B* = {value:.4g}", f"bold {color}"), f" with {CONSTANTS[best]}")
    sentence.append(f" ({_by(rows, best)})")
    if len(constants) > 1:
        other = next(c for c in constants if c != best)
        sentence.append(f", {rows[-1][other]:.4g} with {OTHERS[other]} ({_by(rows, other)})")
    below = [row for row in rows if row["below"] is not None and row["below"] < value and "sharp" in constants]
    if below:
        meaning += f"\nFrom below alone: J(π) − J(μ) ≥ L′ − {below[0]['below']:.4g} ({LABELS[below[0]['bound']]})."
    return sentence.append(f".\n{meaning}")


def _by(rows: Sequence[dict[str, Any]], constants: str) -> str:
    first, *others = [LABELS[row["bound"]] for row in rows if constants in row["attains"]]
    return f"{first}, {len(others)} more" if others else first


def bound_rows(
    *,
    horizon: int,
    delta: float,
    eps: float | None = None,
    kl_seq: float | None = None,
    tv_seq: float | None = None,
    mean_tv: Float[np.ndarray, " t"] | float | None = None,
    reward_range: float = 1.0,
    kl_rate: float | None = None,
    **beyond: float | None,
) -> list[dict[str, Any]]:
    """The numbers of `bound_table`, one dict per row, ready for JSON; the last row is unified.

    Without `mean_tv` the adaptive bound is that of eps at every position, its largest value, and
    does not enter the minimum. A number that is infinite or does not exist is None.

    Args, Raises: as in `offdrift.certificate.all_bounds`; `kl_rate` as in `vacuous_horizon`.

    Returns: for each row `bound`, `route`, `equation`, `scaling`, `paper`, `sharp`, `closed_form`
        (paper constants), `below` (where the gain falls short of L' by less than the error can be),
        `worst_case`, `attains` (which of "paper" and "sharp" have their minimum here), `vacuous` (not
        below the reward's range, with the sharper of the two constants) and `note`; for the last row
        also `vacuous_from`, the shortest horizon at which it is (None: never, or a mean TV per
        position), `kl_per_token`, nats, of a KL of sequences that was passed in, `from_delta`, B* from
        `delta` without what else was passed in, and `routes`, by which route the context shift is
        smallest, first to last token.

    Example:
        >>> rows = bound_rows(horizon=4096, delta=1e-4, eps=5e-3, kl_seq=0.01, tv_seq=0.05)
        >>> rows[-1]["bound"], round(rows[-1]["paper"], 3), round(rows[-1]["sharp"], 3)
        ('unified', 4.096, 0.01)
    """
    token: dict[str, Any] = {"delta": delta, "eps": eps, "tv_seq": tv_seq, "mean_tv": mean_tv, **beyond}
    given = GivenDrift(horizon, reward_range, kl_of_sequences(horizon, kl_seq, kl_rate), kl_rate, token)
    bounds = given.bounds()
    by_name = {b.name: b for b in bounds["paper"]}
    rows = [given.row(b, by_name.get(b.name)) for b in bounds["sharp"]]
    rows.append({**dict.fromkeys(rows[0], ""), "bound": "unified", "route": "minimum", "equation": "eq. 21"})
    rows[-1] |= given.smallest | {
        "closed_form": None,
        "below": None,
        "worst_case": False,
        "attains": [],
        "vacuous_from": given.vacuous_from,
        "kl_per_token": None if given.kl_seq is None else _finite(given.kl_seq / horizon),
        "from_delta": given.from_delta,
        "routes": given.routes,
    }
    for row in rows:
        row["vacuous"] = row["sharp"] is None or row["sharp"] >= reward_range
    return rows


@dataclass(frozen=True)
class GivenDrift:
    """Divergences that bounds are asked of, and the horizon and the reward's range."""

    horizon: int
    reward_range: float
    kl_seq: float | None
    kl_rate: float | None
    token: Mapping[str, Any]
    """The other premises: delta, eps, tv_seq, mean_tv and those of `BEYOND`."""

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """As `all_bounds` takes them."""
        return {"horizon": self.horizon, "kl_seq": self.kl_seq, "reward_range": self.reward_range, **self.token}

    @cached_property
    def proved(self) -> dict[str, list[Bound]]:
        """Every bound on the error, with either set of constants."""
        return {c: all_bounds(**self.arguments, constants=c) for c in ("paper", "sharp")}

    @cached_property
    def smallest(self) -> dict[str, float]:
        """B* with either set of constants."""
        return {c: tightest(bounds).value for c, bounds in self.proved.items()}

    @property
    def at_worst(self) -> bool:
        """Whether the adaptive bound is that of the largest TV at every position, for lack of a mean."""
        return self.token["mean_tv"] is None

    def bounds(self) -> dict[str, list[Bound]]:
        """Those `proved`, and without a mean TV the paper's adaptive bound at its largest value."""
        if not self.at_worst:
            return self.proved
        largest: dict[str, Any] = self.arguments | {"mean_tv": premises(**self.arguments).eps}
        paper, sharp = (all_bounds(**largest, constants=c) for c in ("paper", "sharp"))
        # At its worst the hybrid is below Pinsker-Marginal TV, as Table 1 notes.
        closed = next(b.closed_form for b in paper if b.name == "pinsker_marginal_tv")
        paper = [replace(b, closed_form=closed) if b.name == "adaptive" else b for b in paper]
        return {"paper": paper, "sharp": [b for b in sharp if b.name not in ("adaptive_kl", "adaptive_tv")]}

    def row(self, sharp: Bound, paper: Bound | None) -> dict[str, Any]:
        """One bound with both sets of constants; `paper` is None where the paper has no such bound."""
        worst_case = self.at_worst and sharp.name == "adaptive"
        values = {"paper": None if paper is None else paper.value, "sharp": sharp.value}
        candidate = sharp.unified and not worst_case
        return {
            "bound": sharp.name,
            "route": sharp.route,
            "equation": sharp.equation,
            "scaling": sharp.scaling,
            **{name: _finite(value) for name, value in values.items()},
            "closed_form": None if paper is None else _finite(paper.closed_form),
            "below": _finite(sharp.below),
            "worst_case": worst_case,
            "attains": [k for k, v in values.items() if candidate and v is not None and v == self.smallest[k]],
            "note": sharp.note,
        }

    @property
    def vacuous_from(self) -> dict[str, int | None]:
        """The shortest horizon at which B* is not below the reward's range."""
        if isinstance(self.token["mean_tv"], np.ndarray):
            return dict.fromkeys(self.smallest)
        sequence: dict[str, Any] = {"kl_seq": self.kl_seq} if self.kl_rate is None else {"kl_rate": self.kl_rate}
        about = {**self.token, **sequence, "reward_range": self.reward_range}
        return {c: vacuous_horizon(**about, constants=c) for c in self.smallest}

    @property
    def from_delta(self) -> dict[str, float] | None:
        """B* from delta alone; None where nothing else was passed in."""
        delta = self.token["delta"]
        others = [self.kl_seq, *(x for name, x in self.token.items() if name not in ("delta", "reward_sd"))]
        if not math.isfinite(delta) or all(x is None for x in others):
            return None
        alone: dict[str, Any] = {"horizon": self.horizon, "delta": delta, "reward_range": self.reward_range}
        return {c: tightest(all_bounds(**alone, constants=c)).value for c in self.smallest}

    @property
    def routes(self) -> list[list[Any]]:
        """By which route the context shift is smallest, first to last token."""
        divergences = {name: self.token[name] for name in ("delta", "eps", "tv_seq")}
        crossovers = route_crossovers(horizon=self.horizon, kl_seq=self.kl_seq, **divergences)
        return [[r.name, r.first, r.last] for r in crossovers]


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def bound_table(
    *,
    horizon: int,
    reward_range: float = 1.0,
    constants: Sequence[str] = ("paper", "sharp"),
    narrow: bool = False,
    **divergences: Any,
) -> Table:
    """Table 1 of the paper for these divergences, with the sharp constants beside it.

    Args:
        constants: which columns are shown, "paper", "sharp" or both.
        narrow: without equations, growth and closed forms; fits 80 columns.
        others: as in `bound_rows`.

    Raises: as in `offdrift.certificate.all_bounds`.

    Reference: Li et al., arXiv:2512.23075v5, Table 1.
    """
    rows = bound_rows(horizon=horizon, reward_range=reward_range, **divergences)
    kl_rate = divergences.get("kl_rate")
    arguments: dict[str, Any] = {name: x for name, x in divergences.items() if name not in ("kl_seq", "kl_rate")}
    arguments |= {name: divergences.get(name) for name in ("eps", "tv_seq", "mean_tv")}
    arguments |= {"horizon": horizon, "kl_seq": kl_of_sequences(horizon, divergences.get("kl_seq"), kl_rate)}
    table = Table(
        box=box.SIMPLE_HEAD,
        title=title(premises(**arguments, reward_range=reward_range), arguments, reward_range),
        title_justify="left",
        title_style="",
        caption=caption(rows, reward_range, constants, arguments, kl_rate, narrow=narrow),
        caption_justify="left",
        caption_style="",
        pad_edge=False,
    )
    left = ("bound", "route") if narrow else ("bound", "route", "equation", "growth")
    right = constants if narrow else ("closed form", *constants)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    # The paper's unified bound gets four digits; where that takes too many decimals, exponents.
    smallest = rows[-1]["paper"]
    needed = 3 - math.floor(math.log10(smallest)) if smallest else 3
    decimals = max(1, needed) if needed <= 6 else None
    visible_rows = [row for row in rows if any(row[c] is not None for c in constants)]
    for i, row in enumerate(visible_rows):
        cells = (_cell(row, column, decimals, reward_range) for column in (*left, *right))
        table.add_row(*cells, end_section=i == len(visible_rows) - 2)
    return table


def _cell(row: dict[str, Any], column: str, decimals: int | None, reward_range: float) -> Text:
    last = row["bound"] == "unified"
    style = "bold" if row["attains"] or last else "dim" if row["vacuous"] else ""
    if column == "closed form":
        return Text(_shown(row["closed_form"], decimals), style="dim")
    if column not in CONSTANTS:
        words = {"bound": LABELS[row["bound"]], "growth": row["scaling"]}
        return Text(words.get(column) or row.get(column, ""), style=style)
    value, attained = row[column], last or column in row["attains"]
    color = "yellow" if value is None or value >= reward_range else "green"
    number = ("≤ " if row["worst_case"] else "") + _shown(value, decimals)
    text = Text(number if value is not None else "", style=f"bold {color}" if attained else style)
    return text.append(" ◂" if column in row["attains"] else "  ", style=f"bold {color}")


def _shown(value: float | None, decimals: int | None) -> str:
    """Aligned decimals where they give the value in nine characters, else an exponent."""
    if value is None:
        return ""
    plain = f"{value:,.{3 if decimals is None else decimals}f}"
    lost = decimals is None or value < 0.5 * 10**-decimals or len(plain) > 9
    return f"{value:.2e}" if value and lost else plain


POINTS = 121


def write_bound_chart(
    path: Path, *, horizon: int, constants: tuple[str, ...] = ("paper", "sharp"), source: str = "", **divergences: Any
) -> Path:
    """Draw every bound for horizons from 1 to ten times the given one, on logarithmic axes.

    Args:
        path: a .html, .svg or .png file.
        horizon: tokens; marked in the figure.
        constants: those of the rows; of the sharp ones, if both.
        source: where the divergences were measured, for the caption.
        divergences: delta, eps, kl_seq, kl_rate, tv_seq, mean_tv, reward_range and more as in `vacuous_horizon`.

    Returns: the path.

    Raises: as in `offdrift.show.figures.write_chart` and `all_bounds`.
    """
    arguments = {"reward_range": 1.0, **divergences}
    chart = bound_chart(horizon=horizon, **arguments, constants=constants)
    names = NAMES | {name: f"{symbol} =" for name, (symbol, _) in BEYOND.items()}
    words = [f"{names[name]} {value:.3g}" for name, value in arguments.items() if value is not None and name in names]
    first = {c: vacuous_horizon(**arguments, constants=c) for c in constants}
    at = [f"{'at no T' if t is None else f'at T = {t:,}'} ({CONSTANTS[c]})" for c, t in first.items()]
    premise = "A given divergence of whole sequences is taken as a limit at every T."
    if arguments.get("kl_seq") is None and arguments.get("tv_seq") is None:
        rate = "largest token KL" if arguments.get("kl_rate") is None else "mean token KL"
        premise = f"The KL of sequences is taken to grow as T times the {rate}."
    caption = (
        f"Given: {', '.join(words)}. The smallest bound B*, drawn thick, reaches the reward's range "
        f"{' and '.join(at)}; above it a bound certifies only a surrogate gain that is larger still. {premise}"
    )
    return write_chart(
        path,
        [chart],
        title="How far can the surrogate be from the true return?",
        caption="\n".join([caption, *([source] if source else [])]),
    )


NAMES = {
    "delta": "largest token KL δ =",
    "eps": "largest token TV ε =",
    "kl_rate": "mean token KL",
    "mean_tv": "mean token TV",
    "kl_seq": "KL of sequences",
    "tv_seq": "TV of sequences",
}
"""Premises in the caption of the chart."""


def bound_chart(*, horizon: int, reward_range: float | int, constants: Sequence[str], **limits: Any) -> Chart:
    """Every row against the horizon, largest first by what it says at the given one, which its name ends in.

    With both sets of constants the rows are those of the sharp ones, and B* is drawn for the paper's too. The axis
    reaches two decades above the reward's range, or one above B*: what is beyond is of no use.
    """
    if horizon < 1:
        raise BadValueError(f"horizon = {horizon}; a sequence has at least 1 token")
    horizons = sorted({horizon, *np.geomspace(1, 10 * horizon, POINTS).round().astype(int).tolist()})
    rate, total = limits.pop("kl_rate", None), limits.pop("kl_seq", None)
    main = "sharp" if "sharp" in constants else "paper"
    lines: dict[str, list[float]] = {"unified": []}
    for tokens in horizons:
        premises = {**limits, "horizon": tokens, "reward_range": reward_range}
        premises["kl_seq"] = kl_of_sequences(tokens, total, rate)
        bounds = all_bounds(**premises, constants=main)
        for bound in bounds:
            lines.setdefault(bound.name, []).append(bound.value)
        lines["unified"].append(tightest(bounds).value)
        if main != constants[0]:
            lines.setdefault("paper", []).append(tightest(all_bounds(**premises, constants="paper")).value)
    at = horizons.index(horizon)
    smallest, best = min((y for line in lines.values() for y in line if y > 0), default=1.0), lines["unified"][at]
    low = max(smallest, 1e-4 * min(reward_range, best or reward_range))
    high = max(100 * reward_range, 10 * best if math.isfinite(best) else 0.0)
    order = sorted(lines, key=lambda name: (-lines[name][at], name == "unified"))
    return Chart(
        f"{CONSTANTS[main].capitalize()}; numbers at T = {horizon:,}",
        "bound on |J(π) − J(μ) − L′(π)| (reward)",
        [
            Series(
                f"{CURVES.get(name) or LABELS[name]}: {short(_finite(lines[name][at]))}",
                horizons,
                lines[name],
                strong=name == "unified",
                dash="dash" if name == "paper" else "solid",
                color="ink" if name in CURVES else "",
                group=name,
            )
            for name in order
        ],
        x_title="horizon T (tokens)",
        log_x=True,
        log=True,
        lines=[(reward_range, f"reward's range, {reward_range:g}")],
        upright=[(horizon, f"T = {horizon:,}")],
        y_range=(10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))),
        wide=True,
    )


CURVES = {"unified": "B*, the smallest", "paper": "B* with the paper's constants"}
"""Names of the curves that are no rows."""


QUESTIONS = {
    "delta": ("Largest token KL δ", "nats"),
    "eps": ("Largest token TV ε", ""),
    "kl_seq": ("Largest KL of whole sequences", "nats"),
    "chi2": ("Largest χ² of a token", ""),
    "reward_sd": ("Largest standard deviation of the reward", "reward"),
    "hellinger_seq": ("Largest ΣH² of sequences", ""),
    "kl_rewarded": ("Largest E[RΣk3], k3 of rewarded sequences", "nats"),
    "kl_unrewarded": ("Largest E[(1−R)Σk3], k3 of unrewarded sequences", "nats"),
    "T": ("Longest horizon T", "tokens"),
}
"""Name and unit of each parameter that can be solved for."""


def answer_rows(
    solve: str,
    *,
    target: float | int,
    horizon: int | None = None,
    kl_rate: float | int | None = None,
    constants: Sequence[str] = ("paper", "sharp"),
    **premises: Any,
) -> list[dict[str, Any]]:
    """The largest value of one parameter that keeps B* within a target, ready for JSON.

    Args:
        solve: one of `QUESTIONS`.
        target: largest acceptable error, in units of the reward; for T it is not reached.
        horizon: tokens; not needed for "T".
        kl_rate: mean token KL, nats per token, in place of `kl_seq`.
        constants: one row each.
        premises: the other premises and `reward_range`, as in `all_bounds`.

    Returns: dicts of `constants`, `solve`, `value` (None if there is no largest one), `any` (whether
        every value keeps the target) and `attained_by`, the row of B* there.

    Raises: as in `largest` and `vacuous_horizon`.

    Example:
        >>> answer_rows("T", target=1, delta=1e-4, constants=["sharp"])
        [{'constants': 'sharp', 'solve': 'T', 'value': 9999, 'any': False, 'attained_by': 'sequence_kl'}]
    """
    rows = []
    for c in constants:
        if solve == "T":
            first = vacuous_horizon(target=target, kl_rate=kl_rate, constants=c, **premises)
            every, value = first is None, LONGEST if first is None else first - 1
            kl_seq = kl_of_sequences(value, premises.get("kl_seq"), kl_rate)
            at = {**premises, "kl_seq": kl_seq, "horizon": value}
        else:
            assert horizon is not None
            others = {name: x for name, x in premises.items() if name != solve or x is not None}
            if solve == "kl_seq" and kl_rate is not None:
                raise BadValueError("kl_seq is solved for and kl_rate gives it; leave kl_rate out")
            if solve != "kl_seq":
                others["kl_seq"] = kl_of_sequences(horizon, premises.get("kl_seq"), kl_rate)
            value = largest(solve, target=target, horizon=horizon, constants=c, **others)
            every = value == largest_possible(solve, premises.get("reward_range", 1.0))
            at = {**others, solve: value, "horizon": horizon}
            if at.get("mean_tv") is not None and at.get("eps") is not None:
                at["mean_tv"] = min(at["mean_tv"], at["eps"])
        rows.append(
            {
                "constants": c,
                "solve": solve,
                "value": None if every else value,
                "any": every,
                "attained_by": tightest(all_bounds(constants=c, **at)).name,
            }
        )
    return rows


def answer_table(rows: Sequence[dict[str, Any]], *, target: float | int, horizon: int | None) -> Table:
    """The rows of `answer_rows` for a terminal."""
    words, unit = QUESTIONS[rows[0]["solve"]]
    at = "" if horizon is None or rows[0]["solve"] == "T" else f" at T = {horizon:,}"
    sign = "<" if rows[0]["solve"] == "T" else "≤"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=Text(f"{words} with B* {sign} {target:g}{at}", style="bold"),
        title_justify="left",
        title_style="",
        pad_edge=False,
    )
    table.add_column("constants")
    table.add_column(unit or "value", justify="right")
    table.add_column("B* there is")
    for row in rows:
        exact = row["solve"] == "T"
        if row["any"]:
            value = f"any up to {LONGEST:.0e}" if exact else "any"
        else:
            value = f"{row['value']:,}" if exact else f"{row['value']:.6g}"
        table.add_row(row["constants"], Text(value, "bold green"), LABELS[row["attained_by"]])
    return table
