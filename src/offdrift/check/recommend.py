"""The verdict of a zero-update check, and the method and thresholds recommended for the measured mismatch.

Rows of the threshold table are of three kinds. `record` rows test the record itself: if one fails, the recorded
log-probs are not those of the distribution that was sampled. `size` rows compare the mismatch with the survey's
thresholds. `budget` rows tell whether a correction could help; they do not change the verdict.

`calibrated` finds the gate limits that accept a given share of clean data. Published thresholds fit their authors'
engines. Between two engines with the same weights, everything that a gate rejects is a false positive; the threshold
that accepts 99 % of such data shows where real drift begins.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.certificate.confidence import clopper_pearson
from offdrift.check.branches import STALE_METHOD
from offdrift.check.factors.base import Outcome
from offdrift.check.measure import Measured
from offdrift.correction.statistics import statistic
from offdrift.divergence.evidence import Divergence
from offdrift.errors import BadValueError, EvidenceError
from offdrift.judge import Evidence, Finding, decide, load_rules
from offdrift.judge.readings.shapes import AVERAGES
from offdrift.logprobs import LogProbs
from offdrift.methods import METHODS, override
from offdrift.methods.published import outside_ranges
from offdrift.ratios import stopped_log_ratio
from offdrift.records.provenance import Sampling

GATES = ("trm_max", "trm_max_tv", "trm_avg", "trm_max_k2", "trm_avg_k3", "decoupled_k3_rs", "bypass_ppo_clip_k3_rs")
"""Methods of one gate with an upper bound."""

BANDS = {"decoupled_geo_rs": "gate", "bypass_pg_geo_rs": "gate", "icepop": "weight", "bypass_pg_token_icepop": "weight"}
"""Methods with a band of ratios, and the part that has it."""

CAPS = ("decoupled_token_is", "token_tis")
"""Methods that truncate a token's weight."""

DIGITS = 3
"""Significant digits of a threshold, which is rounded outwards."""


@dataclass(frozen=True)
class Calibrated:
    """One setting of one method, and the share of data it accepts.

    A band is two of these: apply both. `acceptance` is a share of sequences for sequence gates, and a
    share of tokens for token bands and caps.
    """

    method: str
    setting: str
    """Path for `override`, such as "gate.high"."""
    value: float
    acceptance: float
    """Share of the measured data that the method accepts with it: unmasked, and not truncated."""
    low: float
    """Lower end of the share of fresh data that it accepts, without assuming any distribution."""
    high: float


def calibrated(
    logprobs: LogProbs, divergences: Mapping[str, Divergence], *, acceptance: float = 0.99, confidence: float = 0.95
) -> list[Calibrated]:
    """The tightest settings that accept a given share of the data, for the main methods.

    The value is an order statistic of the data, so the share of fresh data below it has a
    Beta(k, n + 1 - k) distribution whatever the data's own is; [low, high] is its Clopper-Pearson
    interval. Independent draws are prompts, not their sequences or tokens (the cautious count).

    Args:
        logprobs: of two engines with the same weights; the policies in it decide which methods are calibrated.
        divergences: of the same tokens, for gates on whole distributions.
        acceptance: share to be accepted, in (0, 1].
        confidence: of [low, high].

    Returns: settings of every method whose evidence is there: gates, then bands, then caps.

    Raises: `BadValueError` if acceptance or confidence lies outside its interval.

    Example:
        >>> import torch
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0, -1.0]), torch.tensor([-1.1, -1.0]),
        ...                    segments=Segments.from_lengths([1, 1]))
        >>> [(c.method, c.value) for c in calibrated(lp, {}) if c.method == "trm_max_k2"]
        [('trm_max_k2', 0.00501)]

    Reference: order statistics: S. Wilks, Annals of Mathematical Statistics 12 (1941), 91-96.
    """
    if not (0 < acceptance <= 1 and 0 < confidence < 1):
        raise BadValueError(f"acceptance = {acceptance} must lie in (0, 1], confidence = {confidence} in (0, 1)")
    data = _Data(logprobs, BatchInfo(divergences=divergences), acceptance, 1 - confidence)
    jobs: list[tuple[Callable[[str], list[Calibrated]], str]] = [
        *((data.gate, name) for name in GATES),
        *((data.band, name) for name in BANDS),
        *((data.cap, name) for name in CAPS),
    ]
    table = []
    for calibrate, name in jobs:
        with suppress(EvidenceError):  # the log-probs or divergences lack what this method reads
            table += calibrate(name)
    return table


def settings(table: list[Calibrated], name: str) -> dict[str, float]:
    """The calibrated settings of one method, for `override`."""
    return {c.setting: c.value for c in table if c.method == name}


@dataclass(frozen=True)
class _Data:
    """The data, the share of it to accept, and the error probability of the intervals."""

    logprobs: LogProbs
    batch_info: BatchInfo
    share: float
    alpha: float

    def gate(self, name: str) -> list[Calibrated]:
        """An upper bound on a sequence's largest or mean statistic."""
        gate: Any = METHODS[name].correction.gates[0]
        segments = self.logprobs.segments
        x = statistic(gate.statistic, self.logprobs, self.batch_info, on=gate.on)
        x = segments.max(x) if gate.unit == "seq_max" else segments.mean(x)
        high = self._quantile(x[segments.lengths > 0])
        return self._table(name, {"gate.high": rounded_up(high)})

    def band(self, name: str) -> list[Calibrated]:
        """A band [1/u, u] of ratios, u from the quantile of the absolute log-ratio."""
        kind = BANDS[name]
        correction: Any = METHODS[name].correction
        part = correction.gates[0] if kind == "gate" else correction.weights[0]
        log_ratio = stopped_log_ratio(self.logprobs, on=part.on)
        if kind == "gate":
            segments = self.logprobs.segments
            log_ratio = segments.mean(log_ratio)[segments.lengths > 0]
        u = _ratio_above(self._quantile(log_ratio.abs()))
        ends = ("gate.low", "gate.high") if kind == "gate" else ("weight.floor", "weight.cap")
        return self._table(name, {ends[0]: 1 / u, ends[1]: u})

    def cap(self, name: str) -> list[Calibrated]:
        """A cap on token weights, at least 1."""
        weight: Any = METHODS[name].correction.weights[0]
        log_ratio = stopped_log_ratio(self.logprobs, on=weight.on)
        return self._table(name, {"weight.cap": _ratio_above(max(0.0, self._quantile(log_ratio)))})

    def _quantile(self, x: Float[Tensor, " k"]) -> float:
        """The smallest number of `x` that the share of them does not exceed."""
        rank = math.ceil(self.share * len(x) - 1e-9)
        return float(x.kthvalue(max(rank, 1)).values)

    def _table(self, name: str, values: dict[str, float]) -> list[Calibrated]:
        """The settings with the acceptance that the method itself, so set, has on the data."""
        method = override(METHODS[name], values)
        decided = method.correction(self.logprobs, None, self.batch_info)
        accepted = decided.keep & ~decided.limited
        segments = self.logprobs.segments
        if method.correction.gates:  # which decide about whole sequences
            accepted = segments.sum(accepted.double())[segments.lengths > 0] > 0
        acceptance = float(accepted.double().mean())
        ids = segments.group_ids
        draws = int((segments.lengths > 0).sum()) if ids is None else len(ids.unique())
        # Rounded down: a share that no whole number of draws has must not look better than it is.
        events = math.floor(min(acceptance, 1.0) * draws + 1e-9)
        ends = clopper_pearson(events, draws, alpha=self.alpha)
        return [Calibrated(name, k, v, acceptance, low=ends.low, high=ends.high) for k, v in values.items()]


def _ratio_above(log_ratio: float) -> float:
    """A ratio above e^log_ratio, with few digits after 1."""
    # A float32 log-ratio must stay inside when it is compared with the log of this ratio.
    excess = math.expm1(log_ratio + 1e-6 * max(1.0, log_ratio))
    return 1 + rounded_up(excess)


def rounded_up(x: float) -> float:
    """The next larger number with `DIGITS` significant digits; 0 stays 0.

    Example:
        >>> rounded_up(0.012341), rounded_up(7.0)
        (0.0124, 7.0)
    """
    if x == 0 or not math.isfinite(x):
        return x
    scale = 10.0 ** (DIGITS - 1 - math.floor(math.log10(abs(x))))
    up = math.ceil(x * scale) / scale
    return up if up >= x else math.nextafter(x, math.inf)


Level = Literal["ok", "watch", "act", "stop"]
LEVELS: tuple[Level, ...] = ("ok", "watch", "act", "stop")

TREE = "survey of off-policy RL for LLMs, 2026, decision tree, step 1"
CHOICE = "this library's reading of the decision tree"
BUDGET = "survey of off-policy RL for LLMs, 2026, problem 4 (conjecture): inside, a correction gains < 0.3 %"
CONTRACT = "engine contract: reported and sampled distribution are one"
ALIGNED = (
    "At temperature 1 without filters raw and processed log-probs are the same, so these belong to other "
    "tokens: logits at position t score token t + 1, and an array was cut at the wrong end."
)
PROCESSED = (
    "They were taken before the temperature or the filter, or after another one than was sampled from. "
    "Every ratio is then wrong, and clipping hides it."
)
WIDE = "outside the conjectured budget, as bfloat16 alone is: nothing is broken"


RELATIONS = {"<": operator.lt, "<=": operator.le, ">=": operator.ge, ">": operator.gt}


@dataclass(frozen=True)
class HealthLimit:
    """One row: a number of the baseline, its limit, and the verdict if it is missed."""

    metric: str
    value: Callable[[Measured], float]
    relation: Literal["<", "<=", ">=", ">"]
    limit: str
    """Name of the threshold in the rules' table."""
    level: Level
    """Verdict of a miss."""
    kind: Literal["record", "size", "budget"]
    source: str
    missed: str
    """Meaning of a miss, in a few words."""


def _metric(name: str) -> Callable[[Measured], float]:
    return lambda m: m.metrics.get(name, math.nan)


_ppl_ratio = _metric("mismatch/ppl_ratio")

THRESHOLDS: tuple[HealthLimit, ...] = (
    HealthLimit(
        "record_deviation",
        lambda m: m.record_deviation,
        "<",
        "record_deviation",
        "stop",
        kind="record",
        source=CONTRACT,
        missed="the engine reports other log-probs than those of the distribution it recorded: raw ones under a "
        "temperature, or another token's",
    ),
    HealthLimit(
        "drawn_z",
        lambda m: abs(m.drawn_z),
        "<",
        "drawn_z",
        "stop",
        kind="record",
        source=CONTRACT,
        missed="the tokens were not drawn from the distribution that the engine recorded: raw log-probs under a "
        "temperature or a filter",
    ),
    HealthLimit(
        "mismatch/pearson",
        lambda m: m.pearson,
        ">=",
        "pearson_broken",
        "stop",
        kind="size",
        source=TREE,
        missed="probabilities hardly correlate: the engines do not compute the same model",
    ),
    HealthLimit(
        "mismatch/pearson",
        lambda m: m.pearson,
        ">=",
        "pearson_clean",
        "watch",
        kind="size",
        source=TREE,
        missed="probabilities correlate less than they should on one set of weights",
    ),
    HealthLimit(
        "kl_mean",
        lambda m: m.kl_mean,
        "<=",
        "kl_large",
        "act",
        kind="size",
        source=TREE,
        missed="the engines differ by as much as policy drift should",
    ),
    HealthLimit(
        "kl_mean",
        lambda m: m.kl_mean,
        "<",
        "kl_clean",
        "watch",
        kind="size",
        source=TREE,
        missed="the mismatch is larger than that of a healthy pair",
    ),
    HealthLimit(
        "|mismatch/ppl_ratio - 1|",
        lambda m: abs(_ppl_ratio(m) - 1),
        "<",
        "ppl_far",
        "act",
        kind="size",
        source=CHOICE,
        missed="perplexities are far apart on one set of weights",
    ),
    HealthLimit(
        "|mismatch/ppl_ratio - 1|",
        lambda m: abs(_ppl_ratio(m) - 1),
        "<",
        "ppl_near",
        "watch",
        kind="size",
        source=CHOICE,
        missed="perplexities differ on one set of weights",
    ),
    HealthLimit(
        "mismatch/prob_diff_max",
        _metric("mismatch/prob_diff_max"),
        "<",
        "prob_diff_large",
        "act",
        kind="size",
        source=CHOICE,
        missed="a token's probability moved by half: a kernel, a router or an alignment error, which means hide",
    ),
    HealthLimit(
        "mismatch/chi2_token",
        lambda m: m.chi2_token,
        "<=",
        "chi2_moderate",
        "watch",
        kind="size",
        source=TREE,
        missed="importance weights are noisy before anything was learned",
    ),
    HealthLimit(
        "mismatch/chi2_token",
        lambda m: m.chi2_token,
        "<=",
        "chi2_heavy",
        "act",
        kind="size",
        source=TREE,
        missed="importance weights are heavy-tailed before anything was learned",
    ),
    HealthLimit("tv_p95", lambda m: m.tv_p95, "<", "tv_budget", "ok", kind="budget", source=BUDGET, missed=WIDE),
    HealthLimit(
        "mismatch/chi2_seq_largest",
        _metric("mismatch/chi2_seq_largest"),
        "<",
        "chi2_seq_budget",
        "ok",
        kind="budget",
        source=BUDGET,
        missed=WIDE,
    ),
    HealthLimit(
        "delta_router", lambda m: m.delta_router, "<", "router_flip", "ok", kind="budget", source=BUDGET, missed=WIDE
    ),
)


def thresholds(baseline: Measured, limits: Mapping[str, float] | None = None) -> list[dict[str, Any]]:
    """Every row whose number was measured, as it stands in `check.json`; NaN holds no threshold.

    Correlation is left out where it is undefined (a single token, or equal probabilities). `limits` are
    thresholds by name (`Rules.limits`), if not the built-in ones.
    """
    limits = load_rules().limits if limits is None else limits
    names = ("metric", "relation", "source", "level", "kind", "missed")
    return [
        {n: getattr(row, n) for n in names}
        | {"threshold": limits[row.limit], "value": value, "holds": RELATIONS[row.relation](value, limits[row.limit])}
        for row in THRESHOLDS
        if not math.isnan(value := row.value(baseline))
    ]


def level_of(rows: Sequence[dict[str, Any]]) -> Level:
    """The worst level among the rows that do not hold."""
    return worst([r["level"] for r in rows if not r["holds"]])


def worst(levels: Sequence[Level]) -> Level:
    """The worst of some levels; "ok" of none."""
    return LEVELS[max((LEVELS.index(level) for level in levels), default=0)]


def broken_record(rows: Sequence[Mapping[str, Any]], sampling: Sampling) -> list[Finding]:
    """Finding of the `record` rows that do not hold: the log-probs are not those of what was sampled.

    Sampled ratios need thousands of tokens to show that; a record of whole distributions shows it in
    a few hundred. Without temperature and filters raw log-probs are right, so it must be alignment.
    """
    missed = [row for row in rows if row["kind"] == "record" and not row["holds"]]
    if not missed:
        return []
    finding = Finding(
        rule="broken_record",
        cause="raw_logprobs",
        letter="A",
        severity="stop",
        confidence="high",
        symptom=_capital(missed[0]["missed"]) + ".",
        evidence=tuple(
            Evidence(row["metric"], row["value"], ">=", row["threshold"], source=row["source"]) for row in missed
        ),
        explanation=PROCESSED,
        fix="Record processed log-probs.",
        refuted_by=("The deviation stays when whole distributions and log-probs come from one forward pass."),
        snippets={"vllm": 'LLM(model, logprobs_mode="processed_logprobs")'},
        source=CONTRACT,
    )
    if sampling.temperature == 1 and not sampling.filtered:
        fix = "Take token t's log-prob from the logits at t - 1."
        finding = replace(finding, cause="misaligned", explanation=ALIGNED, fix=fix, snippets={})
    return [finding]


def defects(outcomes: Sequence[Outcome]) -> list[str]:
    """Defects of this very pair that experiments detected, in words; each is reason to stop."""
    defects = []
    for row in outcomes:
        if stale := row.detail.get("stale"):
            names = ", ".join(map(str, stale))
            defects.append(f"a weight synchronization leaves {names} behind")
        if row.factor == "off_by_one" and row.detail.get("detected"):
            defects.append("log-probs are those of the neighboring token")
    return defects


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


TOKENS, SINGLE = "decoupled_token_is", "icepop"
"""Methods for a larger mismatch at the same weights, as docs/faq.md has them: truncated token weights; a band on
ratios where single tokens are far off, as where experts are routed differently."""

STALE = f"for rollouts of older weights: {STALE_METHOD} (docs/faq.md)"
"""Advice for stale rollouts, which a check of equal weights does not see."""

WHY = {
    TOKENS: "weights every token by its ratio, truncated",
    SINGLE: "masks single tokens, which is what differs here",
}
LOWER = ("gate.low", "weight.floor")
"""Settings that reject values below them; the others reject values above."""


def recommended(
    baseline: Measured,
    *,
    level: Level,
    findings: Sequence[Finding] = (),
    mixture_of_experts: bool = False,
    limits: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The `recommended` entry of `check.json`: what `judge.decide` makes of the findings and the numbers.

    No correction is recommended for a pair that needs repair, which it would hide, nor for one where nothing is to
    repair. While the mismatch is only to be watched, `method` is None and `then` holds what to begin with when it
    grows. Calibrated settings of all main methods are listed either way.

    Args:
        level: of the verdict.
        findings: of the check, in their order.
        limits: thresholds by name (`Rules.limits`), if not the built-in ones.
    """
    limits = load_rules().limits if limits is None else limits
    acceptance, table = limits["gate_acceptance"], list[Calibrated]()
    if (log := baseline.logged) is not None:
        divergences = {name: Divergence.exact(name, x) for name, x in log.divergences.items()}
        with suppress(EvidenceError):
            table = calibrated(log.logprobs(), divergences, acceptance=acceptance)
    tail = baseline.metrics.get("mismatch/k3_top_share", 0.0)
    name = SINGLE if mixture_of_experts or tail > limits["tail_heavy"] else TOKENS
    then = _with_settings(baseline, name, table) if level == "watch" else {}
    decided = decide(findings, _by_numbers(baseline, level, then))
    chosen = then if decided["method"] is not None and decided["method"] == then.get("method") else {}
    return {
        "settings": {},
        "snippets": {},
        "unit": unit_of_mismatch(baseline, name, limits=limits, mixture_of_experts=mixture_of_experts),
        **{key: x for key, x in chosen.items() if key != "method"},
        "method": decided["method"],
        "why": decided["why"],
        "rung": decided["rung"],
        "rule": decided["rule"],
        "then": then,
        "acceptance": acceptance,
        "calibrated": [asdict(c) for c in table],
    }


def unit_of_mismatch(
    baseline: Measured, name: str, *, limits: Mapping[str, float], mixture_of_experts: bool = False
) -> dict[str, Any]:
    """Compare the unit of a method with the source of the mismatch: the `unit` of `recommended`.

    At equal weights the source is arithmetic, and its unit is the token: all of them, or single ones that are far off.
    An average over a response hides single ones (`judge.readings.shapes.AVERAGES`).

    Args:
        name: a row of `METHODS`, which would be recommended.

    Returns: `source` in words, None without a mismatch; `evidence`, the number and the threshold that it was compared
        with; `method`; `units` in which it corrects for the engine; and `fits`, whether one of them shows the source.

    Reference: survey of off-policy RL for LLMs, 2026, "the correction unit must match the source of mismatch".
    """
    share, heavy = baseline.metrics.get("mismatch/k3_top_share"), limits["tail_heavy"]
    single = mixture_of_experts or (share or 0.0) > heavy
    units = METHODS[name].engine_units
    source = "single tokens that are far off" if single else "noise of every token"
    return {
        "source": None if baseline.same_bits else source,
        "evidence": {"metric": "mismatch/k3_top_share", "value": share, "threshold": heavy},
        "method": name,
        "units": sorted(units),
        "fits": bool(units) and not (single and units <= AVERAGES),
    }


def _by_numbers(baseline: Measured, level: Level, then: Mapping[str, Any]) -> dict[str, Any]:
    """Return the correction that the numbers alone ask for, as `judge.decide` takes it."""
    nothing: dict[str, Any] = {"method": None, "settings": {}, "row": None}
    if level in ("act", "stop"):
        why = "repair the pair first: a correction would hide what is wrong"
        return {**nothing, "why": why, "rung": "systems fix"}
    if level == "ok":
        same = "the engines give the same bits" if baseline.same_bits else "the mismatch is ordinary"
        return {**nothing, "why": f"{same}, so there is nothing to correct; {STALE}", "rung": "none"}
    if not then:
        why = "nothing was recorded that a threshold could be calibrated on"
        return {**nothing, "why": why, "rung": None}
    return {**nothing, **{key: then[key] for key in ("method", "settings", "why")}, "rung": "token TIS"}


def _with_settings(baseline: Measured, name: str, table: list[Calibrated]) -> dict[str, Any]:
    """A method with settings that spare clean data, and why; empty if nothing was calibrated."""
    floor = settings(table, name)
    if not floor:
        return {}
    # How much clean data it accepts, and the room to its published setting.
    last = next(c for c in reversed(table) if c.method == name)
    why = (
        f"{name} {WHY[name]}. The engines alone reach {last.setting} = {last.value:.3g}, which accepts "
        f"{last.acceptance:.1%} of these {baseline.tokens:,} clean tokens, and of fresh ones at least {last.low:.0%} "
        "(95 % confidence)"
    )
    x = published(name, floor).get(last.setting)
    if x is not None and x < last.value:
        why += f"; the published {x:g} would cut clean data"
    elif x is not None and last.value > 1:
        room = (x - 1) / (last.value - 1)
        why += f"; the published {x:g} is {room:.2g} times as far from 1, which is the room left for policy updates"
    fits = fitting(name, table)
    for words in outside_ranges(METHODS[name], fits):
        why += f"; {words}"
    return {
        "method": name,
        "settings": fits,
        "floor": floor,
        "published": published(name, floor),
        "why": why,
        "snippets": snippets(name, table),
    }


def published(name: str, paths: Iterable[str]) -> dict[str, float]:
    """The published values of these settings, from the table of methods."""
    correction: Any = METHODS[name].correction
    parts = {"gate": correction.gates, "weight": correction.weights}
    values = {}
    for path in paths:
        part, _, field = path.rpartition(".")
        value = getattr(parts[part][0], field)
        if value is not None:
            values[path] = float(value)
    return values


def fitting(name: str, table: list[Calibrated]) -> dict[str, float]:
    """The published or the calibrated value of each setting, whichever rejects less."""
    floor = settings(table, name)
    published_at = published(name, floor)
    laxer = {path: min if path in LOWER else max for path in floor}
    return {path: laxer[path](x, published_at.get(path, x)) for path, x in floor.items()}


def snippets(name: str, table: list[Calibrated]) -> dict[str, str]:
    """The recommendation, a cap or a band on token weights, as configuration of each framework."""
    limits = fitting(name, table)
    values = ", ".join(f'"{path}" = {x:.6g}' for path, x in limits.items())
    low, high = limits.get("weight.floor"), limits["weight.cap"]
    mode = "token_truncate" if low is None else "token_mask"
    ends = "" if low is None else f"    vllm_importance_sampling_clip_min={low:.6g},\n"
    return {
        "offdrift": f'method = "{name}"\noverride = {{ {values} }}',
        "verl": _verl(f"{high:.6g}" if low is None else f"{low:.6g}_{high:.6g}"),
        "trl": (
            "GRPOConfig(\n    vllm_importance_sampling_correction=True,\n"
            f'    vllm_importance_sampling_mode="{mode}",\n{ends}'
            f"    vllm_importance_sampling_clip_max={high:.6g},\n)"
        ),
    }


def _verl(threshold: str) -> str:
    return (
        "algorithm:\n  rollout_correction:\n"
        f"    rollout_is: token\n    rollout_is_threshold: {threshold}\n    rollout_rs: null"
    )
