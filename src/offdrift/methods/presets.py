"""The 19 presets of verl's rollout correction, by the same names and with its default thresholds.

Decoupled presets correct the mismatch ratio and leave the objective to be configured ("any"): here
PPO with dual clip on staleness, verl's default. Bypass presets call the rollout policy old and
correct the full ratio.
"""

from __future__ import annotations

from offdrift.correction import Correction, Gate, Weight
from offdrift.correction.compose import GateLike, WeightLike
from offdrift.methods.method import Bias, Method
from offdrift.objectives import Clipped, Objective, Reinforce
from offdrift.ratios import RatioName

VERL = "verl 0.9, rollout correction preset"
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


def _preset(
    objective: Objective, summary: str, *parts: GateLike | WeightLike, fails: str, bias: Bias
) -> Method:
    correction = Correction()
    for part in parts:
        correction = correction & part
    return Method(
        objective=objective,
        correction=correction,
        aggregate="seq_mean_token_sum" if isinstance(objective, Reinforce) else "token_mean",
        summary=summary,
        mechanism="rejection" if correction.gates else "PPO clip" if objective.on else "none",
        target="mismatch of the engines"
        if objective.on != "full"
        else "off-policy data of any kind",
        fails=fails,
        bias=bias,
        reference=VERL,
        status="implementation",
    )


PPO = Clipped(on="staleness", dual_clip=3.0)
BYPASS_PPO = Clipped(on="full", dual_clip=3.0)
BYPASS_PG = Reinforce()
TOKEN = "token-level correction is biased for sequence rewards"
SEQ = "the product of long sequences vanishes or explodes"
GEO = "opposite drifts cancel in a mean; rejects nearly everything unless the engines almost agree"
K3 = "an average hides one catastrophic token"
BAND = "a band that masks more than 10 to 25 % of tokens has met its limit"

ROWS: dict[str, Method] = {
    "disabled": _preset(PPO, "metrics only: PPO, nothing corrected", fails="whenever the policies differ", bias="O(drift)"),
    "decoupled_token_is": _preset(PPO, "token TIS at 2 on mismatch", _token("mismatch"), fails=TOKEN, bias="O(drift)"),
    "decoupled_seq_is": _preset(PPO, "sequence TIS at 2 on mismatch", _sequence("mismatch"), fails=SEQ, bias="O(drift)"),
    "decoupled_seq_is_rs": _preset(PPO, "sequence TIS at 2, product of ratios in [0.5, 2]", _sequence("mismatch"), _product("mismatch"), fails=LENGTH_TRAP, bias="O(drift)"),
    "decoupled_geo_rs": _preset(PPO, "geometric mean of the mismatch in [0.999, 1.001]", _geo("mismatch"), fails=GEO, bias="O(drift)"),
    "decoupled_geo_rs_seq_tis": _preset(PPO, "geometric band and sequence TIS", _geo("mismatch"), _sequence("mismatch"), fails=GEO, bias="O(drift)"),
    "decoupled_geo_rs_token_tis": _preset(PPO, "geometric band and token TIS", _geo("mismatch"), _token("mismatch"), fails=GEO, bias="O(drift)"),
    "decoupled_k3_rs": _preset(PPO, "mean k3 of the mismatch at most 0.01", _k3("mismatch"), fails=K3, bias="O(drift)"),
    "decoupled_k3_rs_seq_tis": _preset(PPO, "mean k3 and sequence TIS", _k3("mismatch"), _sequence("mismatch"), fails=K3, bias="O(drift)"),
    "decoupled_k3_rs_token_tis": _preset(PPO, "mean k3 and token TIS", _k3("mismatch"), _token("mismatch"), fails=K3, bias="O(drift)"),
    "decoupled_token_icepop": _preset(PPO, "IcePop band [0.5, 5] on mismatch", _icepop("mismatch"), fails=BAND, bias="O(drift)"),
    "bypass_ppo_clip": _preset(BYPASS_PPO, "PPO on the full ratio", fails=TOKEN, bias="O(drift)"),
    "bypass_ppo_clip_geo_rs": _preset(BYPASS_PPO, "PPO on the full ratio, geometric band", _geo("full"), fails=GEO, bias="O(drift)"),
    "bypass_ppo_clip_k3_rs": _preset(BYPASS_PPO, "PPO on the full ratio, mean k3 at most 0.01", _k3("full"), fails=K3, bias="O(drift)"),
    "bypass_pg_is": _preset(BYPASS_PG, "REINFORCE with sequence TIS at 2", _sequence("full"), fails=SEQ, bias="none inside limits"),
    "bypass_pg_geo_rs": _preset(BYPASS_PG, "REINFORCE, geometric band", _geo("full"), fails=GEO, bias="O(drift)"),
    "bypass_pg_geo_rs_seq_tis": _preset(BYPASS_PG, "REINFORCE with sequence TIS, geometric band", _geo("full"), _sequence("full"), fails=GEO, bias="none inside limits"),
    "bypass_pg_geo_rs_token_tis": _preset(BYPASS_PG, "REINFORCE with token TIS, geometric band", _geo("full"), _token("full"), fails=GEO, bias="O(drift)"),
    "bypass_pg_token_icepop": _preset(BYPASS_PG, "REINFORCE with the IcePop band [0.5, 5]", _icepop("full"), fails=BAND, bias="O(drift)"),
}  # fmt: skip
