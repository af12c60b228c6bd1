"""The named per-token quantities that a gate can look at.

`ratio`, `k2`, `k3`, `abs_log_ratio`, `exp_abs_log_ratio`, `ratio_error` and all that begin with `binary_` need only
the sampled token's log-probs (grade: sampled). `kl` and `tv` need divergences computed from
distributions, looked up by the policies they compare (grade: exact, or either end of a certified
interval). `version_lag` needs the version that drew each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.batch_info import NO_INFO, BatchInfo
from offdrift.divergence.evidence import Divergence, abs_log_ratio, k2, k3
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.numerics import LOG_RATIO_LIMIT, asked, blocks, blockwise, clamped
from offdrift.ratios import RatioName, stopped_log_ratio, swept

StatisticName = Literal[
    "ratio",
    "k2",
    "k3",
    "abs_log_ratio",
    "exp_abs_log_ratio",
    "ratio_error",
    "binary_tv",
    "binary_kl",
    "binary_kl_forward",
    "binary_kl_reverse",
    "binary_kl_max",
    "kl",
    "tv",
    "version_lag",
]


End = Literal["lower", "upper"]


def ratio_error(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """|e^l - 1|; its mean under *first* is twice the TV. Gradient: to `log_ratio`."""
    return clamped(log_ratio).expm1().abs()


def exp_abs_log_ratio(log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """e^|l|: the ratio or its inverse, whichever is larger; 1 where the policies agree. Gradient: to `log_ratio`.

    Example:
        >>> exp_abs_log_ratio(torch.tensor([2.0, 0.5]).log())
        tensor([2., 2.])

    Reference: NeMo-RL, `seq_logprob_error_threshold` (its mean over a sequence).
    """
    return clamped(log_ratio).abs().exp()


def binary_tv(logp_first: Float[Tensor, " n"], log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """second(token) - first(token), signed: TV of "this token or not", at most the full TV.

    Reference: DPPO, arXiv:2602.04879.
    """
    p = logp_first.exp()
    near = p * clamped(log_ratio).expm1()  # exact where the policies nearly agree
    return near.where(log_ratio <= LOG_RATIO_LIMIT, (logp_first + log_ratio).exp() - p)


def binary_kl(logp_first: Float[Tensor, " n"], log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """KL of "this token or not", first to second, with the sign of the move; at most the full KL.

        p (log p - log q) + (1 - p) log((1 - p + 1e-8) / (1 - q + 1e-8)),  q = second(token)

    Reference: DPPO, arXiv:2602.04879.
    """
    p, q = logp_first.exp(), (logp_first + log_ratio).exp()
    other = (1 - p) * ((1 - p + 1e-8) / (1 - q + 1e-8).clamp(min=1e-8)).log()
    return torch.sign(log_ratio) * (other - p * clamped(log_ratio))


TINIEST = 1e-8
"""Probabilities of "this token or not" are kept this far from 0 and 1."""


def binary_kl_forward(logp_first: Float[Tensor, " n"], log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """KL of "this token or not", first to second, never negative; nats.

        p log(p / q) + (1 - p) log((1 - p) / (1 - q)),   p, q the token's two probabilities within [1e-8, 1 - 1e-8]

    `binary_kl` is the same with the sign of the move, so that a mean over tokens lets opposite moves cancel; this one
    does not.

    Example:
        >>> p, q = torch.tensor([0.5]), torch.tensor([0.25])
        >>> binary_kl_forward(p.log(), (q / p).log())
        tensor([0.1438])

    Reference: AReaL, `compute_binary_kl_divergence`.
    """
    return _bernoulli_kl(logp_first, logp_first + log_ratio)


def binary_kl_reverse(logp_first: Float[Tensor, " n"], log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """`binary_kl_forward` with the two policies exchanged: KL of "this token or not", second to first; nats.

    Example:
        >>> p, q = torch.tensor([0.5]), torch.tensor([0.25])
        >>> binary_kl_reverse(p.log(), (q / p).log())
        tensor([0.1308])

    Reference: AReaL, `compute_binary_kl_divergence`.
    """
    return _bernoulli_kl(logp_first + log_ratio, logp_first)


def binary_kl_max(logp_first: Float[Tensor, " n"], log_ratio: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The larger of `binary_kl_forward` and `binary_kl_reverse`; nats. The same for both orders of the policies.

    Example:
        >>> p, q = torch.tensor([0.5]), torch.tensor([0.25])
        >>> binary_kl_max(p.log(), (q / p).log())
        tensor([0.1438])

    Reference: KPop of Ring-2.6, as in AReaL (`metric="binary_kl"`).
    """
    second = logp_first + log_ratio
    return torch.maximum(_bernoulli_kl(logp_first, second), _bernoulli_kl(second, logp_first))


def _bernoulli_kl(log_p: Float[Tensor, " n"], log_q: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """KL of two Bernoulli variables from the logs of their probabilities, in float64.

    1 - p by `expm1`, so that a token of probability 1 - 1e-9 does not round to one of probability 1.
    """
    dtype = log_p.dtype
    (log_p, not_p), (log_q, not_q) = (_both_sides(x) for x in (log_p, log_q))
    kl = log_p.exp() * (log_p - log_q) + not_p * (not_p / not_q).log()
    return kl.clamp(min=0).to(dtype)


def _both_sides(logp: Float[Tensor, " n"]) -> tuple[Tensor, Tensor]:
    """Log of a probability and its complement, both at least `TINIEST`."""
    logp = logp.double()
    return logp.clamp(math.log(TINIEST), math.log1p(-TINIEST)), (-torch.expm1(logp)).clamp(TINIEST, 1 - TINIEST)


OF_RATIO: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio": clamped,  # compared in log space: a bound itself is kept exactly
    "k2": k2,
    "k3": k3,
    "abs_log_ratio": abs_log_ratio,
    "exp_abs_log_ratio": exp_abs_log_ratio,
    "ratio_error": ratio_error,
}
COMPILED: dict[Callable[[Tensor], Tensor], Any] = {
    clamped: "ratio", k2: "k2", k3: "k3", abs_log_ratio: "abs_log_ratio", ratio_error: "ratio_error"
}  # fmt: skip
"""Statistics that compiled passes know, by function: a user's own under one of these names is not among them."""
OF_PROBABILITY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "binary_tv": binary_tv,
    "binary_kl": binary_kl,
    "binary_kl_forward": binary_kl_forward,
    "binary_kl_reverse": binary_kl_reverse,
    "binary_kl_max": binary_kl_max,
}
EXACT = ("kl", "tv")
SIGNED = {"ratio", "binary_tv", "binary_kl"}
"""Statistics that say which way a token moved."""
POLICIES = {"full": "rollout_current", "mismatch": "rollout_old", "staleness": "old_current"}
"""The two policies that a divergence of each ratio compares, the one that is averaged over first."""
WAY_OUT = {
    "rollout": 'record distributions in the rollout (evidence = "full", "hidden" or a number of top log-probs), '
    "or use the sampled stand-ins (trm_max_k2, trm_avg_k3, trm_max_avg_k2_k3)",
    "old": "keep the old policy's logits and give engines.score.old_divergences(logits_old, logits), or use "
    "the sampled stand-ins (binary_tv and binary_kl in gates, k2 and k3 in penalties)",
}
"""What to do where a divergence is missing, by the policy whose distributions are."""


def statistics() -> tuple[str, ...]:
    """Names of all statistics, with those of the user's own (`offdrift.statistic`)."""
    return (*OF_RATIO, *OF_PROBABILITY, *EXACT, "version_lag")


def divergence_name(statistic: str, on: RatioName) -> str:
    """The key of `divergences` that a gate on this statistic reads.

    Example:
        >>> divergence_name("kl", "full"), divergence_name("tv", "staleness")
        ('kl_rollout_current', 'tv_old_current')
    """
    return f"{statistic}_{POLICIES[on]}"


def divergence_of(batch_info: BatchInfo, statistic: str, *, on: RatioName) -> Divergence:
    """The divergence of whole distributions that a part reads, as the batch carries it.

    Raises: `EvidenceError` naming what is missing, what there is, and the way out.
    """
    key = divergence_name(statistic, on)
    if (divergence := batch_info.divergences.get(key)) is None:
        raise EvidenceError(
            f"this method needs {key}, and the batch has {sorted(batch_info.divergences) or 'none'}; "
            f"{WAY_OUT[POLICIES[on].partition('_')[0]]}"
        )
    return divergence


def statistic(
    name: str, logprobs: LogProbs, batch_info: BatchInfo = NO_INFO, *, on: RatioName, end: End = "lower"
) -> Float[Tensor, " n"]:
    """The quantity `name` per token; `ratio` is given as its log. Gradient: none.

    Args:
        name: one of `StatisticName`.
        logprobs: the batch.
        batch_info: divergences and versions of the batch.
        on: which two policies are compared.
        end: which end of a divergence known as an interval; both are the value of an exact one.

    Raises:
        EvidenceError: the batch lacks the policy or the divergence that is needed, or the upper end
            of a sampled estimate is asked for.
        MethodError: no such statistic.

    Example:
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0]), torch.tensor([-0.8]), segments=Segments.from_lengths([1]))
        >>> statistic("k2", lp, on="full")
        tensor([0.0200])

    Reference: Li et al., arXiv:2512.23075v5, section 4.3 and Appendix E; `ratio_error`: eq. 100.
    """
    if name in OF_RATIO:
        return blockwise(OF_RATIO[name], stopped_log_ratio(logprobs, on=on))
    if name in OF_PROBABILITY:
        first = logprobs.old if on == "staleness" else logprobs.logp_rollout
        raw = stopped_log_ratio(logprobs, on=on)
        return torch.cat([OF_PROBABILITY[name](p, x) for p, x in blocks(first, raw)])
    if name == "version_lag":
        return batch_info.required("version_lag").to(logprobs.logp_rollout.dtype)
    if name not in EXACT:
        raise MethodError(f"{name!r} is not a statistic; choose one of {list(statistics())}")
    divergence = divergence_of(batch_info, name, on=on)
    return (divergence.lo if end == "lower" else divergence.upper).detach()


def statistic_sums(name: str, logprobs: LogProbs, *, on: RatioName) -> Float[Tensor, " b"] | None:
    """Sum of the statistic over each sequence by a compiled pass, None where there is none. Gradient: none."""
    known = COMPILED.get(OF_RATIO[name]) if asked() and name in OF_RATIO else None
    if known is None:
        return None
    sweep = swept(logprobs, on=on)
    return None if sweep is None else sweep.segment_sums(known).to(sweep.log_ratio.dtype)


def statistic_inside(
    name: str, logprobs: LogProbs, *, on: RatioName, low: float | None, high: float | None
) -> Bool[Tensor, " n"] | None:
    """Mark tokens whose statistic is within the bounds by a compiled pass, None where there is none. Gradient: none."""
    known = COMPILED.get(OF_RATIO[name]) if asked() and name in OF_RATIO else None
    if known is None:
        return None
    from offdrift.compiled.passes import inside

    return inside(stopped_log_ratio(logprobs, on=on), known, low=low, high=high)
