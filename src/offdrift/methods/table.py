"""`METHODS`: every named method, family by family (trust region masking, recipes and verl's presets are here);
`SYSTEMS`: techniques outside the loss, as systems.toml has them.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offdrift.correction import Gate, LengthNeutralGate, Weight
from offdrift.correction.compose import GateLike, WeightLike
from offdrift.correction.gate import GateUnit
from offdrift.correction.statistics import StatisticName
from offdrift.errors import MethodError
from offdrift.methods import clips, sequences, weighted
from offdrift.methods.method import Method, Status, row
from offdrift.objectives import Clipped, ImportanceSampled, Objective, Reinforce
from offdrift.penalty import KLPenalty
from offdrift.ratios import RatioName

LENGTH_TRAP = "rejects long sequences at constant drift per token, and most sequences above a few hundred tokens"


def _token(on: RatioName) -> Weight:
    return Weight(on=on, unit="token", cap=2.0)


def _sequence(on: RatioName) -> Weight:
    return Weight(on=on, unit="sequence", cap=2.0)


def _icepop(on: RatioName) -> Weight:
    return Weight(on=on, unit="token", floor=0.5, cap=5.0, outside="mask")


def _geo(on: RatioName) -> Gate:
    return Gate(statistic="ratio", on=on, unit="seq_mean", low=0.999, high=1.001)


def _k3(on: RatioName) -> Gate:
    return Gate(statistic="k3", on=on, unit="seq_mean", high=0.01)


def _product(on: RatioName) -> Gate:
    return Gate(statistic="ratio", on=on, unit="seq_sum", low=0.5, high=2.0)


def _preset(objective: Objective, summary: str, *parts: GateLike | WeightLike, fails: str, **words: Any) -> Method:
    rejects = any(isinstance(part, Gate) for part in parts)
    return row(
        objective,
        *parts,
        aggregate="seq_mean_token_sum" if isinstance(objective, Reinforce) else "token_mean",
        summary=summary,
        mechanism="rejection" if rejects else "PPO clip" if objective.on else "none",
        target="mismatch of the engines" if objective.on != "full" else "off-policy data of any kind",
        fails=fails,
        reference="verl 0.9, rollout correction preset",
        status="implementation",
        **words,
    )


# The 19 presets of verl's rollout correction, by the same names and with its default thresholds. Decoupled presets
# correct the mismatch ratio and leave the objective to be configured ("any"): here PPO with dual clip on staleness,
# verl's default. Bypass presets call the rollout policy old and correct the full ratio.

PPO = Clipped(on="staleness", dual_clip=3.0)
BYPASS_PPO = Clipped(on="full", dual_clip=3.0)
BYPASS_PG = Reinforce()
TOKEN = "token-level correction is biased for sequence rewards"
SEQ = "the product of long sequences vanishes or explodes"
GEO = "opposite drifts cancel in a mean; rejects nearly everything unless the engines almost agree"
K3 = "an average hides one catastrophic token"
BAND = "a band that masks more than 10 to 25 % of tokens has met its limit"

PRESET_ROWS: dict[str, Method] = {
    "disabled": _preset(PPO, "metrics only: PPO, nothing corrected", fails="whenever the policies differ"),
    "decoupled_token_is": _preset(PPO, "token TIS at 2 on mismatch", _token("mismatch"), fails=TOKEN),
    "decoupled_seq_is": _preset(PPO, "sequence TIS at 2 on mismatch", _sequence("mismatch"), fails=SEQ),
    "decoupled_seq_is_rs": _preset(PPO, "sequence TIS at 2, product of ratios in [0.5, 2]",
        _sequence("mismatch"), _product("mismatch"), fails=LENGTH_TRAP),
    "decoupled_geo_rs": _preset(PPO, "geometric mean of the mismatch in [0.999, 1.001]", _geo("mismatch"), fails=GEO),
    "decoupled_geo_rs_seq_tis": _preset(PPO, "geometric band and sequence TIS",
        _geo("mismatch"), _sequence("mismatch"), fails=GEO),
    "decoupled_geo_rs_token_tis": _preset(PPO, "geometric band and token TIS",
        _geo("mismatch"), _token("mismatch"), fails=GEO),
    "decoupled_k3_rs": _preset(PPO, "mean k3 of the mismatch at most 0.01", _k3("mismatch"), fails=K3),
    "decoupled_k3_rs_seq_tis": _preset(PPO, "mean k3 and sequence TIS",
        _k3("mismatch"), _sequence("mismatch"), fails=K3),
    "decoupled_k3_rs_token_tis": _preset(PPO, "mean k3 and token TIS", _k3("mismatch"), _token("mismatch"), fails=K3),
    "decoupled_token_icepop": _preset(PPO, "IcePop band [0.5, 5] on mismatch", _icepop("mismatch"), fails=BAND),
    "bypass_ppo_clip": _preset(BYPASS_PPO, "PPO on the full ratio", fails=TOKEN),
    "bypass_ppo_clip_geo_rs": _preset(BYPASS_PPO, "PPO on the full ratio, geometric band", _geo("full"), fails=GEO),
    "bypass_ppo_clip_k3_rs": _preset(BYPASS_PPO, "PPO on the full ratio, mean k3 at most 0.01", _k3("full"), fails=K3),
    "bypass_pg_is": _preset(BYPASS_PG, "REINFORCE with sequence TIS at 2",
        _sequence("full"), fails=SEQ, bias="none inside limits"),
    "bypass_pg_geo_rs": _preset(BYPASS_PG, "REINFORCE, geometric band", _geo("full"), fails=GEO),
    "bypass_pg_geo_rs_seq_tis": _preset(BYPASS_PG, "REINFORCE with sequence TIS, geometric band",
        _geo("full"), _sequence("full"), fails=GEO, bias="none inside limits"),
    "bypass_pg_geo_rs_token_tis": _preset(BYPASS_PG, "REINFORCE with token TIS, geometric band",
        _geo("full"), _token("full"), fails=GEO),
    "bypass_pg_token_icepop": _preset(BYPASS_PG, "REINFORCE with the IcePop band [0.5, 5]",
        _icepop("full"), fails=BAND),
}  # fmt: skip


# Rows of the Trust Region Masking family: reject whole sequences, push the rest by the full ratio.


TRM = "Li et al., Trust Region Masking, arXiv:2512.23075v5"
FEW_ACCEPTED = "rejects almost everything once drift is strong; below 70 % acceptance nothing is learned reliably"
DETECTOR = "a detector, not a guarantee: rare tokens give false alarms, unsampled tokens none"


def _gate(statistic: StatisticName, unit: GateUnit, high: float) -> Gate:
    return Gate(statistic=statistic, on="full", unit=unit, high=high)


def _trm(*gates: GateLike, where: str = "section 4.3 and Algorithm 1", **words: Any) -> Method:
    return row(
        ImportanceSampled(on="full"),
        *gates,
        aggregate="seq_mean_token_sum",
        mechanism="admission test of the whole sequence",
        target="one bad token corrupts its sequence",
        reference=f"{TRM}, {where}",
        **words,
    )


TRM_ROWS: dict[str, Method] = {
    "trm_max": _trm(
        _gate("kl", "seq_max", 0.05),
        summary="reject a sequence if the exact KL of any token exceeds 0.05 nat",
        fails=FEW_ACCEPTED + "; long sequences are rejected more often",
    ),
    "trm_max_tv": _trm(
        _gate("tv", "seq_max", 0.1),
        summary="reject a sequence if the exact TV of any token exceeds 0.1 (no value is published)",
        fails=FEW_ACCEPTED + "; long sequences are rejected more often",
        where="section 4.3",
    ),
    "trm_avg": _trm(
        _gate("kl", "seq_mean", 0.001),
        summary="reject a sequence if its mean exact KL per token exceeds 0.001 nat",
        fails="one catastrophic token hides in a long sequence",
    ),
    "trm_max_avg": _trm(
        _gate("kl", "seq_max", 0.1),
        _gate("kl", "seq_mean", 0.002),
        summary="both criteria, each looser: worst token 0.1, mean 0.002 nat",
        fails=FEW_ACCEPTED,
    ),
    "trm_max_k2": _trm(
        _gate("k2", "seq_max", 0.05),
        summary="trm_max with the sampled stand-in k2 = (log w)^2 / 2; |log w| <= 0.316 is the same region",
        fails=DETECTOR,
    ),
    "trm_avg_k3": _trm(
        _gate("k3", "seq_mean", 0.001), summary="trm_avg with the sampled stand-in k3 = w - 1 - log w", fails=DETECTOR
    ),
    "trm_max_avg_k2_k3": _trm(
        _gate("k2", "seq_max", 0.1),
        _gate("k3", "seq_mean", 0.002),
        summary="trm_max_avg with the sampled stand-ins k2 and k3",
        fails=DETECTOR,
    ),
    "trm_ratio": _trm(
        _gate("abs_log_ratio", "seq_max", 0.1),
        summary=(
            "reject a sequence if |log w| of any token exceeds 0.1: discharges the bound G.2 without a precondition"
        ),
        fails="the bound grows exponentially in the limit times the tokens left",
        where="Remark G.2",
    ),
    "ln_trm": _trm(
        LengthNeutralGate(high=0.05),
        summary="reject by the mean of |w - 1|, weighted by how much each position can still matter",
        fails="the last token has weight 0: an outlier there is invisible; add a gate on the worst token",
        where="Appendix F.2, eqs. 98-99",
    ),
    "ser": _trm(
        _gate("ratio_error", "seq_mean", 0.1),
        summary="reject by the sequence-error ratio, the plain mean of |w - 1|",
        fails="an average hides one catastrophic token",
        where="Appendix F.3, eq. 100",
    ),
}


# Recipes that practitioners ask for by name: combinations as published with a model.


RECIPE_ROWS: dict[str, Method] = {
    "deepseek_v32": replace(
        sequences.ROWS["opsm"],
        penalty=KLPenalty(estimator="k3_corrected", coef=1e-3),
        summary="GRPO with OPSM and the importance-corrected k3 penalty; with replay.routes=rollout",
        mechanism="sign-conditioned admission test, corrected KL",
        target="production stack",
        fails="without the replayed sampling mask, top-p mass counts as drift; coefficient and delta are not published",
        reference="DeepSeek-V3.2, arXiv:2512.02556, section 3, eqs. 7-9",
    ),
    "ring_1t": replace(
        weighted.ROWS["icepop"],
        aggregate="seq_mean_token_mean",
        advantage="grpo",
        summary="GRPO with IcePop's band [0.5, 5] and a mean over each response; with replay.freeze_router_bias=true",
        target="trillion-parameter MoE",
        reference="Ring-1T, arXiv:2510.18855, section 2.3",
    ),
    "intellect3": row(
        ImportanceSampled(on="full"),
        Gate(statistic="ratio", on="full", unit="token", low=0.125, high=8.0),
        Gate(statistic="ratio", on="full", unit="seq_max", low=1e-5),
        advantage="dr_grpo",
        summary="full-ratio surrogate, tokens outside [0.125, 8] masked, sequences with a ratio below 1e-5 rejected",
        mechanism="band mask and worst-token admission test",
        target="asynchronous rollouts, engines that differ",
        fails=weighted.TOKEN_BIAS,
        reference="INTELLECT-3, 2025; prime-rl (token band of an early revision)",
        status="implementation",
    ),
    "minimax_m1": replace(
        weighted.ROWS["cispo"],
        advantage="grpo",
        summary="CISPO with group-normalized rewards",
        reference="MiniMax-M1, arXiv:2506.13585, eqs. 4-5",
    ),
    "ppo_clip_geo_rs": replace(
        clips.ROWS["dual_clip"],
        correction=sequences.ROWS["geo_mask"].correction,
        summary=(
            "PPO's clip with dual clip 3; a sequence whose geometric mean of the mismatch leaves [0.99, 1.01]"
            " is rejected"
        ),
        mechanism="ratio clip, two-sided admission test",
        target="synchronous pipelines of dense models: the survey's starting point",
        fails="opposite drifts cancel in a mean",
        reference=(
            "survey of off-policy RL for LLMs, 2026, heuristic for picking a row: PPO-clip + "
            "decoupled_geo_rs, band of its causes B and C"
        ),
    ),
    "decoupled_geo": replace(
        clips.ROWS["decoupled_ppo"],
        correction=sequences.ROWS["geo_mask"].correction & Weight(on="mismatch", cap=2.0),
        objective=Clipped(eps_high=0.28, dual_clip=3.0),
        summary="decoupled PPO with DAPO's upper clip 0.28, token TIS at 2, geometric band [0.99, 1.01]",
        mechanism="ratio clip, two-sided admission test",
        fails="opposite drifts cancel in a mean",
        reference=(
            "verl's preset decoupled_geo_rs_token_tis with the survey's band and DAPO's eps_high (our combination)"
        ),
        status="implementation",
    ),
}


# `METHODS`: every named method; rows hold published values, `override` changes them for one run.


FAMILIES: dict[str, dict[str, Method]] = {
    "weights": weighted.ROWS,
    "token clips": clips.ROWS,
    "units and sequences": sequences.ROWS,
    "trust region masking": TRM_ROWS,
    "recipes": RECIPE_ROWS,
    "presets": PRESET_ROWS,
}
"""The table in chapters, as it is printed."""

METHODS: dict[str, Method] = {n: row for rows in FAMILIES.values() for n, row in rows.items()}
"""Every method by its name (docs/methods.md); `method(name)` is the look-up that knows what is called alike."""


if TYPE_CHECKING:
    from offdrift.methods.names import MethodName  # an editor completes the names
else:
    MethodName = str


OF_A_FILE = "a method in a file is named with the file: {0}:NAME"
"""Way out where a file's name stands for a method."""


def method(name: MethodName | str) -> Method:
    """The row of that name, or the method of a user's code, "file.py:name" or "package.module:name".

    Code is run (`offdrift.methods.load.load_method`): never pass on a name that a log or a record of a run holds.

    Raises: `MethodError` naming rows that are called alike, or what is wrong with the code.

    Example:
        >>> method("trm_max").describe()
        'L = -A ratio(full); keep if seq_max kl(full) <= 0.05; seq_mean_token_sum'
    """
    if ":" in name:
        from offdrift.methods.load import load_method

        return load_method(name)
    if name.endswith(".py"):
        raise MethodError(f"no method {name!r}; {OF_A_FILE.format(name)}")
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise MethodError(f"no method {name!r}; {hint}`offdrift methods` lists all {len(METHODS)}")
    return METHODS[name]


# `SYSTEMS`: what belongs to drift and is no method.


@dataclass(frozen=True, kw_only=True)
class System:
    """A technique that acts in an engine, a kernel, a scheduler or an optimizer, and that no loss can contain.

    It shrinks the drift that methods correct, or bounds it. Its row in systems.toml says what it does, who has to do it
    (with the recipe's line, where this trainer does), and which numbers show that it works.

    Example:
        >>> from offdrift.methods.table import SYSTEMS
        >>> SYSTEMS["tbik"].target
        'engines with different tensor-parallel sizes'
    """

    title: str
    summary: str
    aggregation: str = "n/a"
    """At what level it works, where it works at one."""
    mechanism: str
    is_treatment: str = "none"
    target: str
    model_class: Literal["dense", "MoE", "both"] = "both"
    fails: str
    where: str
    """Who would have to implement it, and what part of it is here."""
    run: str = ""
    """What `offdrift train` takes to run it; empty where nothing here does."""
    here: tuple[str, ...] = ()
    """Functions of this library that compute a part of it."""
    watch: tuple[str, ...] = ()
    """Metrics that show whether it works."""
    related: tuple[str, ...] = ()
    """Methods that correct what it leaves."""
    reference: str
    status: Status = "stated"


WATCH = {
    "in the engine": ("mismatch/k3", "mismatch/abs_log_ratio_max"),
    "around the loss": ("version_lag/max", "staleness/k3"),
}
"""What most rows of a family are watched by."""

_TABLES = tomllib.loads(Path(__file__).with_name("systems.toml").read_text(encoding="utf-8"))


def _system(family: str, fields: dict[str, Any]) -> System:
    tuples = {k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()}
    return System(**{"watch": WATCH[family], **tuples})


SYSTEM_FAMILIES: dict[str, dict[str, System]] = {
    family: {name: _system(family, fields) for name, fields in rows.items()} for family, rows in _TABLES.items()
}
"""Rows that act in an engine (what is replayed, which kernels, which precision), and around the loss (asynchrony,
buffers, the optimizer, the model)."""

SYSTEMS: dict[str, System] = {n: row for rows in SYSTEM_FAMILIES.values() for n, row in rows.items()}
