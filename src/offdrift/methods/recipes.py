"""Recipes that practitioners ask for by name: combinations as published with a model."""

from __future__ import annotations

from dataclasses import replace

from offdrift.correction import Correction, Gate, Weight
from offdrift.kl import KLPenalty
from offdrift.methods import clips, sequences, weighted
from offdrift.methods.method import Method
from offdrift.objectives import Clipped, ImportanceSampled

ROWS: dict[str, Method] = {
    "deepseek_v32": replace(
        sequences.ROWS["opsm"],
        penalty=KLPenalty(estimator="k3_corrected", coef=1e-3),
        summary="GRPO with OPSM and the importance-corrected k3 penalty; replay the sampling mask and routing in the engine",
        mechanism="sign-conditioned admission test, corrected KL",
        target="production stack",
        fails="without the replayed sampling mask, top-p mass counts as drift; coefficient and delta are not published",
        reference="DeepSeek-V3.2, arXiv:2512.02556, section 3, eqs. 7-9",
    ),
    "ring_1t": replace(
        weighted.ROWS["icepop"],
        aggregate="seq_mean_token_mean",
        advantage="grpo",
        summary="GRPO with IcePop's band [0.5, 5] and a mean over each response",
        target="trillion-parameter MoE",
        reference="Ring-1T, arXiv:2510.18855, section 2.3",
    ),
    "intellect3": Method(
        objective=ImportanceSampled(on="full"),
        correction=Correction(
            (
                Gate(statistic="ratio", on="full", unit="token", low=0.125, high=8.0),
                Gate(statistic="ratio", on="full", unit="seq_max", low=1e-5),
            )
        ),
        aggregate="token_mean",
        advantage="dr_grpo",
        summary="full-ratio surrogate, tokens outside [0.125, 8] masked, sequences with a ratio below 1e-5 rejected",
        mechanism="band mask and worst-token admission test",
        target="asynchronous rollouts, engines that differ",
        fails="biased for sequence rewards; the bias grows with length and drift",
        bias="O(drift)",
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
        correction=Correction(
            (Gate(statistic="ratio", on="mismatch", unit="seq_mean", low=0.99, high=1.01),)
        ),
        summary="PPO's clip with dual clip 3; a sequence whose geometric mean of the mismatch leaves [0.99, 1.01] is rejected",
        mechanism="ratio clip, two-sided admission test",
        target="synchronous pipelines of dense models: the survey's starting point",
        fails="opposite drifts cancel in a mean",
        reference="survey of off-policy RL for LLMs, 2026, heuristic for picking a row: PPO-clip + decoupled_geo_rs, band of its causes B and C",
    ),
    "decoupled_geo": replace(
        clips.ROWS["decoupled_ppo"],
        correction=Correction(
            (Gate(statistic="ratio", on="mismatch", unit="seq_mean", low=0.99, high=1.01),),
            (Weight(on="mismatch", cap=2.0),),
        ),
        objective=Clipped(eps_high=0.28, dual_clip=3.0),
        summary="decoupled PPO with DAPO's upper clip 0.28, token TIS at 2, geometric band [0.99, 1.01]",
        mechanism="ratio clip, two-sided admission test",
        fails="opposite drifts cancel in a mean",
        reference="verl's preset decoupled_geo_rs_token_tis with the survey's band and DAPO's eps_high (our combination)",
        status="implementation",
    ),
}
