"""Law of safe lag: does the effective sample size say it, as the survey's fifth problem conjectures?

    L_max <= c ESS_seq^alpha,   c about 50, alpha about 1

A run with weights up to L updates old, whose sequences count as a share ESS of themselves when they are oldest, is
stable if and only if L <= c ESS^alpha: the boundary between stable and unstable runs is a line of slope alpha in
(log ESS, log L). Here that line is fitted to runs, and judged on runs that it was not fitted to, beside two simpler
rules: only the effective sample size, and only the lag.

Source: the survey of off-policy corrections, open problem 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from offdrift.errors import BadValueError, RecordError
from offdrift.show.json_access import items, mapping, number, read_lines, text
from offdrift.texts import read_json
from offdrift_lab.evidence.collapse import auroc

PUBLISHED = (50.0, 1.0)
"""c and alpha of the conjecture, for models of 4 to 70 billion parameters."""
STRETCH = 0.75
"""The effective sample size is that of updates whose lag is at least this share of the run's largest."""
EVALUATIONS = 2
"""Last evaluations whose mean is the reward that a run ended with."""
RIDGE = 0.05
"""Penalty on the squared slopes, that of a normal prior of spread 4.5: separable runs would push them to infinity."""
ALPHA_APART = 0.5
"""Difference of alpha between task families at which the conjecture says that it fails."""
RULES = ("law", "ess", "lag")
"""What predicts stability: ESS and lag together, ESS alone, lag alone."""


@dataclass(frozen=True)
class LagRun:
    """A run as the law sees it."""

    family: str
    """Name of its sweep: the task family."""
    setting: str
    """Arm and values: runs of one setting differ in their seeds."""
    arm: str
    seed: int
    lag: float
    """L: updates between two synchronizations, the largest version lag and 1."""
    ess: float
    """Effective share of sequences, untruncated weights, at the end of the first such stretch; in (0, 1]."""
    before: float
    """Held-out reward at the start."""
    after: float
    """Held-out reward at the end, the mean of the last two evaluations."""

    def stable(self, keep: float) -> bool:
        """Whether the run kept this share of its reward."""
        return self.after >= keep * self.before


@dataclass(frozen=True)
class Law:
    """A fitted boundary, log L = log c + alpha log ESS, and how sharply runs fall on its sides.

    log-odds(stable) = sharpness (log c + alpha log ESS - log L)
    """

    log_c: float
    alpha: float
    sharpness: float
    """Change of the log-odds per factor of e in lag; at most 0 means that longer lags were no less stable."""

    @property
    def inverse_alpha(self) -> float:
        """Weight of log L over that of log ESS: 1 by the conjecture, 0 if the lag adds nothing; nan if alpha is 0."""
        return 1 / self.alpha if self.alpha else math.nan

    @property
    def c(self) -> float:
        """The largest safe lag at ESS = 1, updates."""
        return math.exp(min(700.0, self.log_c))


def fit(runs: Sequence[LagRun], *, keep: float = 0.7, rule: str = "law") -> Float[np.ndarray, " 3"]:
    """Weights of 1, log ESS and -log L in the log-odds of a stable run, by penalized maximum likelihood.

        maximize  sum_i log P(y_i) - (ridge / 2) (w_ess^2 + w_lag^2),   P(stable) = 1 / (1 + exp(-w x))

    Newton's method; a rule that looks at one of the two keeps the other's weight at 0.

    Args:
        keep: share of its reward that a stable run keeps.
        rule: "law", "ess" or "lag".

    Raises: `BadValueError` if all runs are stable, or all unstable: there is no boundary.

    Example:
        >>> make = lambda lag, ess, after: LagRun("f", f"{lag} {ess}", "a", 0, lag, ess, 1.0, after)
        >>> grid = [(L, e) for L in (2.0, 4.0, 8.0, 16.0, 32.0) for e in (0.1, 0.3, 1.0)]
        >>> runs = [make(L, e, 1.0 if L <= 20 * e else 0.0) for L, e in grid]
        >>> law = as_law(fit(runs))
        >>> 0.5 < law.alpha < 1.5, law.sharpness > 0
        (True, True)
    """
    _check_keep(keep)
    y = np.array([run.stable(keep) for run in runs], dtype=np.float64)
    if len(runs) == 0 or y.min() == y.max():
        kind = "no runs" if len(runs) == 0 else "only stable runs" if y[0] else "only unstable runs"
        raise BadValueError(f"{kind}: a boundary needs both kinds; sweep longer lags or other learning rates")
    used = np.array([True, rule != "lag", rule != "ess"])
    x = _features(runs)[:, used]
    penalty = np.diag([0.0, *[RIDGE] * (int(used.sum()) - 1)])
    w = np.zeros(x.shape[1])
    for _ in range(100):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        step = np.linalg.solve(
            (x * (p * (1 - p))[:, None]).T @ x + penalty + 1e-9 * np.eye(len(w)), x.T @ (y - p) - penalty @ w
        )
        w = w + step * min(1.0, 5.0 / max(1e-12, float(np.abs(step).max())))
        if float(np.abs(step).max()) < 1e-9:
            break
    weights = np.zeros(3)
    weights[used] = w
    return weights


def _features(runs: Sequence[LagRun]) -> Float[np.ndarray, "n 3"]:
    return np.array([[1.0, math.log(run.ess), -math.log(run.lag)] for run in runs])


def _check_keep(keep: float) -> None:
    if not 0 < keep <= 1:
        raise BadValueError(f"keep = {keep}: the share of its reward that a stable run keeps is in (0, 1]; take 0.7")


def as_law(weights: Float[np.ndarray, " 3"]) -> Law:
    """The boundary of fitted weights: alpha and log c are their ratios to the lag's, infinite where that is 0."""
    constant, ess, lag = map(float, weights)
    if lag == 0:
        return Law(math.copysign(math.inf, constant), math.copysign(math.inf, ess), 0.0)
    return Law(constant / lag, ess / lag, lag)


def scores(runs: Sequence[LagRun], weights: Float[np.ndarray, " 3"]) -> Float[np.ndarray, " n"]:
    """Log-odds that each run is stable."""
    return _features(runs) @ weights


def published(runs: Sequence[LagRun]) -> Float[np.ndarray, " n"]:
    """log(c ESS^alpha / L) of each run with the conjecture's c and alpha: at least 0 is stable.

    Example:
        >>> run = LagRun("f", "s", "a", 0, lag=45.0, ess=0.9, before=1.0, after=1.0)
        >>> abs(float(published([run])[0])) < 1e-12
        True
    """
    c, alpha = PUBLISHED
    return _features(runs) @ np.array([math.log(c), alpha, 1.0])


def quality(runs: Sequence[LagRun], score: Float[np.ndarray, " n"], *, keep: float) -> dict[str, float | None]:
    """Quality of scores that tell stable runs from unstable ones: AUROC, and the share whose sign is right."""
    y = [run.stable(keep) for run in runs]
    area = auroc(list(score), y)
    right = float(np.mean([(s >= 0) == stable for s, stable in zip(score, y, strict=True)])) if runs else math.nan
    return {"auroc": area if math.isfinite(area) else None, "accuracy": right if math.isfinite(right) else None}


def _interval(values: Iterable[float | None], confidence: float = 0.95) -> list[float] | None:
    """Percentile interval of what a bootstrap gave; None if a tenth of it gave nothing."""
    replicates = list(values)
    x = [v for v in replicates if v is not None and math.isfinite(v)]
    if not replicates or len(x) < 0.9 * len(replicates):
        return None
    edge = 50 * (1 - confidence)
    return [float(v) for v in np.percentile(x, [edge, 100 - edge])]


def _resampled(runs: Sequence[LagRun], rng: np.random.Generator) -> list[LagRun]:
    """Settings drawn with replacement, with all their seeds: runs of one setting are not independent."""
    by_setting: dict[tuple[str, str], list[LagRun]] = {}
    for run in runs:
        by_setting.setdefault((run.family, run.setting), []).append(run)
    groups = list(by_setting.values())
    return [run for i in rng.integers(0, len(groups), len(groups)) for run in groups[i]]


@dataclass(frozen=True)
class FamilyFit:
    """The three rules fitted to the runs of one family, and the law again to samples of its settings."""

    runs: Sequence[LagRun]
    keep: float
    """Share of its reward that a stable run keeps."""
    weights: Mapping[str, Float[np.ndarray, " 3"]]
    """Of every rule of `RULES`, see `fit`."""
    samples: Sequence[Law]
    """The law of every bootstrap sample."""

    @classmethod
    def of(cls, runs: Sequence[LagRun], *, keep: float, draws: int, seed: int) -> FamilyFit:
        """Fit the rules, and the law to `draws` samples; those without both kinds of runs are drawn again."""
        rng, laws = np.random.default_rng(seed), []
        weights = {rule: fit(runs, keep=keep, rule=rule) for rule in RULES}
        for _ in range(20 * draws):
            sample = _resampled(runs, rng)
            if len({run.stable(keep) for run in sample}) == 2:
                laws.append(as_law(fit(sample, keep=keep)))
            if len(laws) == draws:
                break
        return cls(runs, keep, weights, laws)

    @cached_property
    def sharpness_interval(self) -> list[float] | None:
        return _interval(law.sharpness for law in self.samples)

    @cached_property
    def alphas(self) -> list[float]:
        """Alpha of every sample; none where the lag's weight beside ESS, which it is divided by, may be 0."""
        certain = self.sharpness_interval is not None and self.sharpness_interval[0] > 0
        return [law.alpha for law in self.samples] if certain else []

    def as_row(self) -> dict[str, Any]:
        """The fit in plain values."""
        law = as_law(self.weights["law"])
        # Lags of one length say nothing of the lag's weight.
        laws = (law, *self.samples) if len({run.lag for run in self.runs}) > 1 else ()
        inverse = [x.inverse_alpha for x in laws]
        return {
            "c": law.c,
            "c_interval": _interval(x.c for x in self.samples),
            "alpha": law.alpha,
            "alpha_interval": _interval(self.alphas),
            "inverse_alpha": inverse[0] if inverse and math.isfinite(inverse[0]) else None,
            "inverse_alpha_interval": _interval(inverse[1:]),
            "sharpness": law.sharpness,
            "sharpness_interval": self.sharpness_interval,
            "in_sample": {
                rule: quality(self.runs, scores(self.runs, w), keep=self.keep) for rule, w in self.weights.items()
            },
        }


def judge(
    runs: Sequence[LagRun],
    *,
    keep: float = 0.7,
    draws: int = 500,
    seed: int = 0,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Fit the law in each family, and judge it on every other.

    Intervals are of a bootstrap over settings; `verdict` says what they mean for the conjecture.

    Args:
        keep: share of its reward that a stable run keeps.
        draws: bootstrap samples.
        seed: of the bootstrap.
        tick: called after every fit of a family and every pair of families.

    Returns: plain values for JSON: "families" (fits), "across" (predictions out of sample), "runs".

    Raises: `BadValueError` without runs.
    """
    _check_keep(keep)
    if not runs:
        raise BadValueError(
            "no run with a lag, an effective sample size and two evaluations; name sweeps that have some"
        )
    families = list(dict.fromkeys(run.family for run in runs))
    rows, across = [], []
    fits: dict[str, FamilyFit] = {}
    for family in families:
        of_family = [run for run in runs if run.family == family]
        row: dict[str, Any] = {
            "family": family,
            "runs": len(of_family),
            "settings": len({run.setting for run in of_family}),
            "stable": sum(run.stable(keep) for run in of_family),
            "published": quality(of_family, published(of_family), keep=keep),
        }
        if 0 < row["stable"] < len(of_family):
            fits[family] = FamilyFit.of(of_family, keep=keep, draws=draws, seed=seed)
            row |= fits[family].as_row()
        rows.append(row)
        tick()
    for source, fitted in fits.items():
        for target in (f for f in families if f != source):
            other = [run for run in runs if run.family == target]
            across.append(
                {"fitted_on": source, "tested_on": target, **_tested(other, fitted.weights, keep, draws, seed)}
            )
            if fitted.alphas and target in fits and fits[target].alphas:
                # Families are independent: any order of the two bootstraps is a sample of their difference.
                pairs = zip(fitted.alphas, reversed(fits[target].alphas))
                across[-1]["alpha_difference"] = _interval(a - b for a, b in pairs)
            tick()
    return {"keep": keep, "seed": seed, "draws": draws, "families": rows, "across": across, "runs": _rows(runs, keep)}


def _tested(
    runs: Sequence[LagRun], weights: Mapping[str, Float[np.ndarray, " 3"]], keep: float, draws: int, seed: int
) -> dict[str, Any]:
    """Predictions of each rule for runs that it was not fitted to, with intervals over their settings."""
    rng = np.random.default_rng(seed)
    samples = [_resampled(runs, rng) for _ in range(draws)]
    rules: dict[str, Callable[[Sequence[LagRun]], Float[np.ndarray, " n"]]] = {
        rule: lambda some, w=w: scores(some, w) for rule, w in weights.items()
    }
    rules["published"] = published
    result: dict[str, Any] = {}
    areas: dict[str, list[float | None]] = {}
    for name, score in rules.items():
        areas[name] = [quality(sample, score(sample), keep=keep)["auroc"] for sample in samples]
        result[name] = {**quality(runs, score(runs), keep=keep), "auroc_interval": _interval(areas[name])}
    for rule in ("ess", "lag"):
        pairs = zip(areas["law"], areas[rule], strict=True)
        result[f"law_less_{rule}"] = _interval(a - b if a is not None and b is not None else None for a, b in pairs)
    return result


def supports(row: Mapping[str, Any]) -> bool:
    """Whether the law fitted to one family and tested on another tells more than chance and than each rule alone, with
    an alpha that cannot differ by more than `ALPHA_APART`."""
    area, difference = mapping(row["law"])["auroc_interval"], row.get("alpha_difference")
    gains = [row["law_less_ess"], row["law_less_lag"]]
    return (
        area is not None
        and area[0] > 0.5
        and difference is not None
        and max(map(abs, difference)) <= ALPHA_APART
        and all(gain is not None and gain[0] > 0 for gain in gains)
    )


def objections(row: Mapping[str, Any]) -> list[str]:
    """Reasons against the conjecture in the law fitted to one family and tested on another."""
    pair = f"fitted on {row['fitted_on']}, tested on {row['tested_on']}"
    difference, reasons = row.get("alpha_difference"), []
    # An interval that holds 0 comes as close to it as can be.
    if difference is not None and min(difference) * max(difference) > 0 and min(map(abs, difference)) > ALPHA_APART:
        reasons.append(f"alpha differs by more than {ALPHA_APART} ({pair})")
    for name, gain in (("ESS", row["law_less_ess"]), ("lag", row["law_less_lag"])):
        if gain is not None and gain[1] < 0:
            reasons.append(f"{name} alone tells more ({pair})")
    return reasons


def verdict(result: Mapping[str, Any]) -> str:
    """Verdict of `judge` on the conjecture: "holds here", "fails here" or "undecided", and why.

    It fails if alpha certainly differs by more than 0.5 between two families, or if, out of sample, ESS and lag
    together certainly tell less than one of them alone. It holds if the law tells more than chance in every other
    family, more than each alone, and no two families' alphas can differ by more than 0.5.
    """
    across = [mapping(row) for row in result["across"]]
    if not across:
        return "undecided: no family with stable and unstable runs, and another to test on"
    if reasons := [reason for row in across for reason in objections(row)]:
        return "fails here: " + "; ".join(reasons)
    if all(map(supports, across)):
        return "holds here"
    # Without an interval of alpha the lag's weight beside ESS is not certainly above 0.
    blunt = [row["family"] for row in result.get("families", ()) if "alpha" in row and row["alpha_interval"] is None]
    if blunt:
        return f"undecided: beside ESS the lag may have no weight in {', '.join(blunt)}, and alpha no value"
    return "undecided: intervals leave room for the law and for simpler rules"


def _rows(runs: Sequence[LagRun], keep: float) -> list[dict[str, Any]]:
    return [asdict(run) | {"stable": run.stable(keep)} for run in runs]


def read_runs(path: Path, *, arms: Sequence[str] = (), family: str = "") -> list[LagRun]:
    """Runs of a sweep's folder, or of a JSON file that `offdrift lab lag-law --json` wrote.

    Args:
        path: a folder with sweep.json and runs/, or the file.
        arms: these alone; empty for all.
        family: what the task family is called; empty, as the sweep, or as in the file.

    Raises: `RecordError` naming the path and what is missing there.
    """
    file = path / "sweep.json" if path.is_dir() else path
    try:
        content = mapping(read_json(file))
    except (OSError, ValueError) as e:
        raise RecordError(
            f"{file} cannot be read ({e}); give the folder of a finished `offdrift sweep`, or a file of "
            "`offdrift lab lag-law --json`"
        ) from e
    if path.is_dir():
        family_there = text(content.get("name"))
        try:
            runs = [run for row in items(content.get("runs")) if (run := _of_sweep(path, family_there, row))]
        except OSError as e:
            raise RecordError(f"{path}: a run that {file.name} names cannot be read: {e}") from e
    else:
        runs = [run for row in items(content.get("runs")) if (run := _of_row(mapping(row)))]
    chosen = [replace(run, family=family or run.family) for run in runs if not arms or run.arm in arms]
    if not chosen:
        of = f" of {', '.join(arms)}" if arms else ""
        raise RecordError(f"{path} has no finished run{of} with a lag, an effective sample size and two evaluations")
    return chosen


def _of_row(row: Mapping[str, Any]) -> LagRun | None:
    values = [number(row.get(key)) for key in ("seed", "lag", "ess", "before", "after")]
    if any(v is None for v in values):
        return None
    seed, lag, ess, before, after = (float(v) for v in values if v is not None)
    words = (text(row.get("family")), text(row.get("setting")), text(row.get("arm")))
    return LagRun(*words, int(seed), lag, ess, before, after)


def _of_sweep(folder: Path, family: str, row: Any) -> LagRun | None:
    """A finished run of a sweep; None if it is not finished, or lacks what the law is about."""
    row = mapping(row)
    arm, values = text(row.get("arm")), mapping(row.get("values"))
    files = folder / text(row.get("folder")) / "arms" / arm
    updates, rewards = read_lines(files / "metrics.jsonl")[0], read_lines(files / "eval.jsonl")[0]
    lags = [number(u.get("version_lag/max")) for u in updates]
    held_out = [x for u in rewards if (x := number(u.get("reward"))) is not None]
    if row.get("status") != "finished" or len(held_out) < 2 or not any(x is not None for x in lags):
        return None
    longest = max(x for x in lags if x is not None)
    logs: list[float] = []
    for lag, update in zip(lags, updates, strict=True):
        ess = number(update.get("full/ess_seq_frac"))
        if lag is not None and ess is not None and lag >= STRETCH * longest:
            logs.append(math.log(min(1.0, max(1e-12, ess))))
        elif logs and longest > 0:
            break  # the first stretch is over
    if not logs:
        return None
    after = held_out[-EVALUATIONS:] if len(held_out) > EVALUATIONS else held_out[-1:]
    setting = ", ".join([arm, *(f"{key}={value}" for key, value in values.items())])
    return LagRun(
        family,
        setting,
        arm,
        seed=int(number(row.get("seed")) or 0),
        lag=longest + 1,
        ess=math.exp(math.fsum(logs) / len(logs)),
        before=held_out[0],
        after=math.fsum(after) / len(after),
    )
