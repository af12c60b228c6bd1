"""The verdict of a zero-update check, and the method and thresholds that fit what was measured.

Rows of the threshold table are of three kinds. `glue` rows test the measurement itself, against what
probability theory demands of any engine: if one fails, the recorded log-probs are not those of the
distribution that was sampled. `size` rows hold the mismatch against the survey's thresholds. `budget`
rows say whether a correction could gain anything; they do not change the verdict.

Between engines with the same weights, whatever a gate rejects it rejects for nothing, so thresholds are
recommended from the measured mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from offdrift.check.calibrate import Calibrated, calibrated, settings
from offdrift.check.measure import Measured, Outcome
from offdrift.divergence.evidence import Divergence
from offdrift.errors import EvidenceError
from offdrift.judge import Evidence, Finding, load_rules
from offdrift.methods import METHODS
from offdrift.records.rollouts import Sampling

Level = Literal["ok", "watch", "act", "stop"]
LEVELS: tuple[Level, ...] = ("ok", "watch", "act", "stop")

TREE = "survey of off-policy RL for LLMs, 2026, decision tree, step 1"
CHOICE = "this library's reading of the decision tree"
BUDGET = "survey of off-policy RL for LLMs, 2026, problem 4 (conjecture): inside, a correction gains < 0.3 %"
CONTRACT = "engine contract: reported and sampled distribution are one"
PPL_NEAR, PPL_FAR = (load_rules().limits[name] for name in ("ppl_near", "ppl_far"))
"""The diagnosis' own thresholds: a ratio that is clean in a run is clean in a check."""

MAX_DEVIATION = 0.02
"""Mean nats by which reported log-probs may miss those of the recorded distribution: rounding of
bfloat16 logits stays below it, another temperature or another token's log-prob does not."""
MAX_Z = 5.0
"""Exceeded by chance in one of 130,000 checks at most, however sure of its tokens the policy is."""


ALIGNED = "At temperature 1 without filters raw and processed log-probs are the same, so these belong to other tokens: logits at position t score token t + 1, and an array was cut at the wrong end."
PROCESSED = "They were taken before the temperature or the filter, or after another one than was sampled from. Every ratio is then wrong, and clipping hides it."


@dataclass(frozen=True)
class Threshold:
    """One row: a number of the baseline, what it is held against, and how bad it is to miss it."""

    metric: str
    value: Callable[[Measured], float]
    relation: Literal["<", "<=", ">=", ">"]
    threshold: float
    level: Level
    """What a miss means for the verdict."""
    kind: Literal["glue", "size", "budget"]
    source: str
    missed: str
    """What a miss says, in a few words."""

    def holds(self, value: float) -> bool:
        """Whether the value keeps to the threshold; NaN does not."""
        return {
            "<": value < self.threshold,
            "<=": value <= self.threshold,
            ">=": value >= self.threshold,
            ">": value > self.threshold,
        }[self.relation]


def _metric(name: str) -> Callable[[Measured], float]:
    return lambda m: m.metrics.get(name, math.nan)


def _ppl_offset(m: Measured) -> float:
    return abs(m.metrics.get("mismatch/ppl_ratio", math.nan) - 1)


THRESHOLDS: tuple[Threshold, ...] = (
    Threshold("record_deviation", lambda m: m.record_deviation, "<", MAX_DEVIATION, "stop", "glue", CONTRACT, "the engine reports other log-probs than those of the distribution it recorded: raw ones under a temperature, or another token's"),
    Threshold("drawn_z", lambda m: abs(m.drawn_z), "<", MAX_Z, "stop", "glue", CONTRACT, "the tokens were not drawn from the distribution that the engine recorded: raw log-probs under a temperature or a filter"),
    Threshold("mismatch/pearson", lambda m: m.pearson, ">=", 0.95, "stop", "size", TREE, "probabilities hardly correlate: the engines do not compute the same model"),
    Threshold("mismatch/pearson", lambda m: m.pearson, ">=", 0.99, "watch", "size", TREE, "probabilities correlate less than they should on one set of weights"),
    Threshold("kl_mean", lambda m: m.kl_mean, "<=", 0.05, "act", "size", TREE, "the engines differ by as much as policy drift should"),
    Threshold("kl_mean", lambda m: m.kl_mean, "<", 0.02, "watch", "size", TREE, "the mismatch is larger than that of a healthy pair"),
    Threshold("|mismatch/ppl_ratio - 1|", _ppl_offset, "<", PPL_FAR, "act", "size", CHOICE, "perplexities are far apart on one set of weights"),
    Threshold("|mismatch/ppl_ratio - 1|", _ppl_offset, "<", PPL_NEAR, "watch", "size", CHOICE, "perplexities differ on one set of weights"),
    Threshold("mismatch/prob_diff_max", _metric("mismatch/prob_diff_max"), "<", 0.5, "act", "size", CHOICE, "a token's probability moved by half: a kernel, a router or an alignment error, which means hide"),
    Threshold("mismatch/chi2_token", lambda m: m.chi2_token, "<=", 0.3, "watch", "size", TREE, "importance weights are noisy before anything was learned"),
    Threshold("mismatch/chi2_token", lambda m: m.chi2_token, "<=", 1.0, "act", "size", TREE, "importance weights are heavy-tailed before anything was learned"),
    Threshold("tv_p95", lambda m: m.tv_p95, "<", 1e-4, "ok", "budget", BUDGET, "outside the conjectured budget: a correction may gain"),
    Threshold("mismatch/chi2_seq_largest", _metric("mismatch/chi2_seq_largest"), "<", 0.1, "ok", "budget", BUDGET, "outside the conjectured budget: a correction may gain"),
    Threshold("delta_router", lambda m: m.delta_router, "<", 1e-3, "ok", "budget", BUDGET, "outside the conjectured budget: a correction may gain"),
)  # fmt: skip


def thresholds(found: Measured) -> list[dict[str, Any]]:
    """Every row that the measurement can answer, as it stands in `check.json`.

    Correlation is left out where there is nothing to correlate (a single token, or probabilities
    that are all alike).
    """
    rows = []
    for row in THRESHOLDS:
        value = row.value(found)
        if math.isnan(value):
            continue
        rows.append(
            {
                "metric": row.metric,
                "value": value,
                "relation": row.relation,
                "threshold": row.threshold,
                "holds": row.holds(value),
                "source": row.source,
                "level": row.level,
                "kind": row.kind,
                "missed": row.missed,
            }
        )
    return rows


def level_of(rows: Sequence[dict[str, Any]]) -> Level:
    """The worst level among the rows that do not hold."""
    missed: list[Level] = [r["level"] for r in rows if not r["holds"]]
    return worst(missed)


def worst(levels: Sequence[Level]) -> Level:
    """The worst of some levels; "ok" of none.

    Example:
        >>> worst(["ok", "act", "watch"])
        'act'
    """
    return LEVELS[max((LEVELS.index(level) for level in levels), default=0)]


def broken_record(
    found: Measured, rows: Sequence[Mapping[str, Any]], sampling: Sampling
) -> list[Finding]:
    """What a `glue` row that does not hold says: the log-probs are not those of what was sampled.

    Sampled ratios need thousands of tokens to show that; a record of whole distributions shows it in
    a few hundred. Without temperature and filters raw log-probs are right, so it must be alignment.
    """
    missed = [row for row in rows if row["kind"] == "glue" and not row["holds"]]
    if not missed:
        return []
    plain = sampling.temperature == 1 and sampling.top_k == 0 and sampling.top_p == 1
    evidence = tuple(
        Evidence(row["metric"], row["value"], ">=", row["threshold"], source=row["source"])
        for row in missed
    )
    return [
        Finding(
            rule="broken_record",
            cause="misaligned" if plain else "raw_logprobs",
            letter="A",
            severity="stop",
            confidence="high",
            symptom=_capital(missed[0]["missed"]) + ".",
            evidence=evidence,
            explanation=ALIGNED if plain else PROCESSED,
            fix="Take token t's log-prob from the logits at t - 1." if plain else "Record processed log-probs.",
            refuted_by="The deviation stays when whole distributions and log-probs come from one forward pass.",
            snippets={} if plain else {"vllm": 'LLM(model, logprobs_mode="processed_logprobs")'},
            source=CONTRACT,
        )
    ]  # fmt: skip


def defects(outcomes: Sequence[Outcome]) -> list[str]:
    """What experiments found to be wrong with this very pair, in words; each is reason to stop."""
    found = []
    for row in outcomes:
        detail = row.as_dict().get("detail") or {}
        if stale := detail.get("stale"):
            found.append(f"a weight synchronization leaves {', '.join(map(str, stale))} behind")
        if row.factor == "off_by_one" and detail.get("detected"):
            found.append("log-probs are those of the neighboring token")
    return found


def sentence(
    found: Measured, rows: Sequence[dict[str, Any]], *, pair: str, wrong: Sequence[str] = ()
) -> str:
    """One or two sentences: how far apart the engines are, and what that means.

    Args:
        pair: the two engines, in words.
        wrong: of `defects`.
    """
    missed = [r for r in rows if not r["holds"] and r["kind"] != "budget"]
    spent = [r for r in rows if not r["holds"] and r["kind"] == "budget"]
    size = f"{pair} with the same weights: KL {found.kl_mean:.2g} nat per token on average, {found.kl_max:.2g} at most."
    if wrong:
        return f"{size} {_capital('; '.join(wrong))}."
    if not missed:
        which = "Every threshold of health" if spent else "Every threshold"
        return f"{size} {which} holds: an ordinary mismatch, nothing to repair.{_outside(spent)}"
    first = max(missed, key=lambda r: LEVELS.index(r["level"]))
    return f"{size} {_capital(first['missed'])} ({first['metric']} = {first['value']:.3g}, healthy: {first['relation']} {first['threshold']:g})."


def _outside(spent: Sequence[dict[str, Any]]) -> str:
    """What missed budgets mean: nothing is broken, but a correction may gain."""
    if not spent:
        return ""
    numbers = "; ".join(f"{r['metric']} = {r['value']:.2g}, not {r['relation']} {r['threshold']:g}" for r in spent)  # fmt: skip
    return f" It is outside the budget within which a correction is conjectured to gain nothing ({numbers})."


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


ACCEPTANCE = 0.99
DENSE, SPARSE = ("trm_max", "trm_max_k2"), ("icepop",)
"""By preference: a sequence is judged by its worst token, exactly if that can be; single tokens
where experts make outliers of single tokens."""

WHY = {
    "trm_max": "rejects a sequence for its worst token, by exact KL: never by chance",
    "trm_max_k2": "rejects a sequence for its worst token",
    "icepop": "masks single tokens, which is what differs where experts are routed differently",
}
LOWER = ("gate.low", "weight.floor")
"""Settings that reject what is below them; the others reject what is above."""


def recommended(
    found: Measured, *, level: Level, mixture_of_experts: bool = False
) -> dict[str, Any]:
    """The `recommended` entry of `check.json`.

    No correction is recommended for a pair that is to be repaired: it would hide what is wrong.
    Calibrated settings of all main methods are listed either way.

    Args:
        found: the baseline.
        level: of the verdict.
        mixture_of_experts: whether the model routes tokens.
    """
    table = _calibrated(found)
    nothing = {"method": None, "settings": {}, "acceptance": ACCEPTANCE, "snippets": {}, "calibrated": [asdict(c) for c in table]}  # fmt: skip
    if level in ("act", "stop"):
        return {**nothing, "why": "repair the pair first: a correction would hide what is wrong"}
    for name in SPARSE if mixture_of_experts else DENSE:
        rows = [c for c in table if c.method == name]
        if rows:
            return {
                **nothing,
                "method": name,
                "settings": fitting(name, table),
                "floor": settings(table, name),
                "published": published(name, settings(table, name)),
                "why": _why(name, rows, found),
                "snippets": snippets(name, table),
            }
    return {**nothing, "why": "nothing was recorded that a threshold could be calibrated on"}


def published(name: str, paths: Iterable[str]) -> dict[str, float]:
    """The values that the table of methods has at these paths.

    Example:
        >>> published("trm_max", ["gate.high"])
        {'gate.high': 0.05}
    """
    correction: Any = METHODS[name].correction
    parts = {"gate": correction.gates, "weight": correction.weights}
    found = {}
    for path in paths:
        part, _, field = path.rpartition(".")
        value = getattr(parts[part][0], field)
        if value is not None:
            found[path] = float(value)
    return found


def fitting(name: str, table: list[Calibrated]) -> dict[str, float]:
    """Of each published setting and its floor, the one that rejects less."""
    floor = settings(table, name)
    known = published(name, floor)
    laxer = {path: min if path in LOWER else max for path in floor}
    return {path: laxer[path](x, known.get(path, x)) for path, x in floor.items()}


def snippets(name: str, table: list[Calibrated]) -> dict[str, str]:
    """The recommendation as configuration, by framework; the nearest that each of them offers.

    verl has no gate on exact KL: its worst-token k2 gate stands in. TRL masks tokens, in a band.
    """
    found = {"offdrift": _offdrift(name, fitting(name, table))}
    k2, band = fitting("trm_max_k2", table), fitting("icepop", table)
    if name == "icepop" and band:
        low, high = band["weight.floor"], band["weight.cap"]
        found["verl"] = _verl(is_="token", is_threshold=f"{low:.6g}_{high:.6g}")
    elif k2:
        found["verl"] = _verl(rs="seq_max_k2", rs_threshold=f"{k2['gate.high']:.6g}")
    if band:
        found["trl"] = (
            "GRPOConfig(\n    vllm_importance_sampling_correction=True,\n"
            '    vllm_importance_sampling_mode="token_mask",\n'
            f"    vllm_importance_sampling_clip_min={band['weight.floor']:.6g},\n"
            f"    vllm_importance_sampling_clip_max={band['weight.cap']:.6g},\n)"
        )
    return found


def _calibrated(found: Measured) -> list[Calibrated]:
    if found.logged is None:
        return []
    divergences = {name: Divergence.exact(name, x) for name, x in found.logged.divergences.items()}
    try:
        return calibrated(found.logged.logprobs(), divergences, acceptance=ACCEPTANCE)
    except EvidenceError:
        return []


def _why(name: str, rows: Sequence[Calibrated], found: Measured) -> str:
    one = rows[-1]
    unit, count = ("tokens", found.tokens) if name == "icepop" else ("sequences", found.sequences)
    known = published(name, [one.setting]).get(one.setting)
    said = f"{WHY[name]}. The engines alone reach {one.setting} = {one.value:.3g}, which accepts {one.acceptance:.1%} of these {count:,} clean {unit}, and of fresh ones at least {one.low:.0%} (95 % confidence)"
    if known is None:
        return said
    if known >= one.value:
        return f"{said}; the published {known:g} is {known / one.value:.2g} times that, which is the room left for policy updates"
    return f"{said}; the published {known:g} would reject clean data"


def _offdrift(name: str, changes: Mapping[str, float]) -> str:
    values = ", ".join(f'"{path}" = {value:.6g}' for path, value in changes.items())
    return f'method = "{name}"\noverride = {{ {values} }}'


def _verl(
    *, is_: str = "null", is_threshold: str = "2.0", rs: str = "null", rs_threshold: str = "null"
) -> str:
    return (
        "algorithm:\n  rollout_correction:\n"
        f"    rollout_is: {is_}\n    rollout_is_threshold: {is_threshold}\n"
        f"    rollout_rs: {rs}\n    rollout_rs_threshold: {rs_threshold}"
    )
