"""How often do rules that look for trends alarm on runs in which nothing changes, and how often do they not?

    python -m benchmarks.trend_alarms [--runs 500]

Runs of 200 steps whose metrics are stationary AR(1) series, log-normal around a level: nothing rises or
falls, but steps remember each other; "wander" is half phi = 0.95 and half fresh noise. Counted is each rule that fires at any step of a run. Then the same
noise around what each rule is about: a rise, a surge, a fall. Writes `results/trend_alarms.json` and the
table in docs/diagnosis.md, which is made from that file alone (`--render`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Float

from offdrift.judge import READINGS, Context, judge, load_rules
from offdrift.judge.readings.history import TRENDS
from offdrift.judge.readings.view import View, Window, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "trend_alarms.json"
PAGE = ROOT / "docs" / "diagnosis.md"
BEGIN, END = "<!-- trends: made by benchmarks/trend_alarms.py -->", "<!-- trends: end -->"
WANDER = "wander"
"""Half of the variance phi = 0.95, half fresh: less correlated at lag 1 than over ten steps."""
NOISES: tuple[float | str, ...] = (0.0, 0.5, 0.8, 0.95, WANDER)
SPREADS = (0.1, 0.3, 0.5)
"""Coefficients of variation of a step."""
POWER_SPREAD = 0.1
STEPS = 200
Series = Float[np.ndarray, " steps"]

LEVELS = {
    "variance_proxy/proxy3_pure_noise": 0.02,
    "objective/clip_frac_active": 0.3,
    "response/length_mean": 200.0,
    "optim/grad_norm": 0.4,
    "full/ess_seq_frac": 0.3,
    "reward/mean": 0.5,
}
"""Metrics that trends are read from, around what is typical, above what a rule asks for besides."""
RULES = (
    "weight_variance",
    "clip_saturation",
    "length_surge",
    "surge_without_guard",
    "surge_despite_guard",
    "grad_spike",
    "ess_collapse",
    "reward_collapse",
)
SOME = replace(load_rules(), rules={name: load_rules().rules[name] for name in RULES})
READ = {name: row for name, row in READINGS.items() if name in TRENDS or name == "weighted"}


def ramp(first: float, last: float, start: int, end: int) -> Series:
    """A line from one level to another between two steps."""
    return np.interp(np.arange(STEPS), [start, end], [first, last])


CHANGES: Mapping[str, tuple[str, Series, str]] = {
    "weight_variance": ("variance_proxy/proxy3_pure_noise", ramp(1, 3, 60, 140), "noise of the gradient times 3 in 80 steps"),
    "clip_saturation": ("objective/clip_frac_active", ramp(1, 2, 60, 140), "clip fraction from 0.3 to 0.6 in 80 steps"),
    "length_surge": ("response/length_mean", ramp(1, 2, 60, 120), "length times 2 in 60 steps"),
    "ess_collapse": ("full/ess_seq_frac", ramp(1, 0.1, 60, 100), "effective share from 0.3 to 0.03 in 40 steps"),
    "grad_spike": ("optim/grad_norm", np.where(np.arange(STEPS) == 120, 20.0, 1.0), "one norm times 20"),
    "reward_collapse": ("reward/mean", ramp(1, 0.3, 100, 110), "reward from 0.5 to 0.15 in 10 steps"),
}  # fmt: skip
"""What each rule is about: the metric, its course, and that in words."""


def ar1(phi: float, steps: int, seed: int) -> Series:
    """A stationary AR(1) series of mean 0 and variance 1: x_t = phi x_{t-1} + sqrt(1 - phi^2) e_t."""
    e = np.random.default_rng(seed).normal(size=steps)
    x = np.empty(steps)
    x[0] = e[0]
    for t in range(1, steps):
        x[t] = phi * x[t - 1] + np.sqrt(1 - phi * phi) * e[t]
    return x


def noise(kind: float | str, seed: int) -> Series:
    """A run's noise: AR(1) of that phi, or a slow wander under fresh noise."""
    if kind == WANDER:
        slow, fresh = ar1(0.95, STEPS, 2 * seed), ar1(0.0, STEPS, 2 * seed + 1)
        return np.sqrt(0.5) * (slow + fresh)
    return ar1(float(kind), STEPS, seed)


def rows(
    phi: float | str, spread: float, seed: int, course: Callable[[str], Series | float] = lambda name: 1.0
) -> list[dict[str, float]]:
    """A run as it is logged: a weighted one of a small drift, each trend metric with noise of its own."""
    sigma = np.sqrt(np.log1p(spread**2))
    columns = {
        name: level * course(name) * np.exp(sigma * noise(phi, 1000 * seed + i) - sigma**2 / 2)
        for i, (name, level) in enumerate(LEVELS.items())
    }
    shares = ("objective/clip_frac_active", "full/ess_seq_frac", "reward/mean")
    columns |= {name: columns[name].clip(max=1.0) for name in shares}
    fixed = {"mismatch/k1": 1e-3, "mismatch/k3": 1e-3, "weight/std": 0.1, "weight/cap_frac": 0.01, "optim/lr": 1e-6}
    return [{"step": float(i + 1), **fixed, **{k: float(x[i]) for k, x in columns.items()}} for i in range(STEPS)]


def fired(run: list[dict[str, float]]) -> set[str]:
    """The rules, of `RULES`, that fired at any step of a run; only their readings are made."""
    limits, found = SOME.limits, set()
    long, level, trend = (int(limits[f"window_{x}"]) for x in ("long", "level", "trend"))
    window = Window(2 * long + level, trend, long)
    for row in run:
        window.add(row, same_weights=None)
        reading = read(View(window, Context(), limits), READ)
        if window.steps >= limits["patience"]:
            found |= {f.rule for f in judge(reading, SOME)}
    return found


def alarms(phi: float | str, spread: float, runs: int) -> dict[str, float]:
    """The share of runs in which each rule fires although nothing changes."""
    found = [fired(rows(phi, spread, seed)) for seed in range(runs)]
    return {rule: sum(rule in f for f in found) / runs for rule in RULES}


def power(rule: str, phi: float | str, runs: int) -> float:
    """The share of runs in which a rule finds the change that it is about."""
    metric, course, _ = CHANGES[rule]
    changed = lambda name: course if name == metric else 1.0  # noqa: E731
    return sum(rule in fired(rows(phi, POWER_SPREAD, seed, changed)) for seed in range(runs)) / runs


def render(found: Mapping[str, list]) -> str:
    """Both tables as Markdown."""
    about = f"Share of runs of {STEPS} steps in which a rule fires at any step although nothing changes; the largest over steps that scatter by {', '.join(f'{x:.0%}' for x in SPREADS[:-1])} and {SPREADS[-1]:.0%}, {found['runs']} runs each:"
    head = ["rule", *(phi if phi == WANDER else f"phi {phi:g}" for phi in NOISES)]
    lines = [_line(head), _line(["---", *["---:"] * len(NOISES)])]
    for rule in RULES:
        worst = [max(r["share"] for r in found["alarms"] if (r["rule"], r["phi"]) == (rule, phi)) for phi in NOISES]
        lines.append(_line([f"`{rule}`", *(f"{x:.1%}" for x in worst)]))
    told = f"Share of {max(found['runs'] // 4, 1)} runs in which it finds the change that it is about, under noise of {POWER_SPREAD:.0%}:"
    lines += ["", told, "", _line(["rule", "change", *head[1:]]), _line(["---", "---", *["---:"] * len(NOISES)])]
    for rule, (_, _, words) in CHANGES.items():
        shares = [r["share"] for r in found["power"] if r["rule"] == rule]
        lines.append(_line([f"`{rule}`", words, *(f"{x:.0%}" for x in shares)]))
    return "\n".join([about, "", *lines])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--render", action="store_true", help="only write the page again")
    given = parser.parse_args()
    if not given.render:
        found: dict[str, list] = {"runs": given.runs, "alarms": [], "power": []}  # type: ignore[dict-item]
        for phi in NOISES:
            for spread in SPREADS:
                shares = alarms(phi, spread, given.runs)
                found["alarms"] += [{"rule": r, "phi": phi, "spread": spread, "share": x} for r, x in shares.items()]
                print(phi, spread, shares, flush=True)
        for rule in CHANGES:
            for phi in NOISES:
                share = power(rule, phi, max(given.runs // 4, 1))
                found["power"].append({"rule": rule, "phi": phi, "share": share})
                print(rule, phi, share, flush=True)
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    table = render(json.loads(RESULTS.read_text(encoding="utf-8")))
    PAGE.write_text(before + BEGIN + "\n\n" + table + "\n\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
