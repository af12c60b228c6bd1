"""The three ratios between the three policies, and the units they are taken over.

    full = mismatch + staleness        log w = log rho + log r

`mismatch` compares two engines at the same weights, `staleness` two versions of the weights in one engine, `full`
the policy being trained with the policy that sampled; every function takes `on=` and nothing guesses. All of it
happens in log space, exponentiated once at the end (`numerics.ratio`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from offdrift.errors import MethodError, check_choice
from offdrift.logprobs import LogProbs
from offdrift.numerics import asked, share, sharing, transformed
from offdrift.segments import Segments

if TYPE_CHECKING:
    from offdrift.compiled.passes import RatioSums

RatioName = Literal["full", "mismatch", "staleness"]
Unit = Literal[
    "token", "prefix", "prefix_min", "turn", "turn_product", "turn_arithmetic", "sequence", "geometric", "worst"
]


def log_ratio(logprobs: LogProbs, *, on: RatioName) -> Float[Tensor, " n"]:
    """Per-token log-ratio of two of the three policies, in nats.

        full       log w   = log pi     - log mu
        mismatch   log rho = log pi_old - log mu
        staleness  log r   = log pi     - log pi_old

    0 at a token that the engine did not score (`LogProbs.unscored`).

    Gradient: to `logprobs.logp` for full and staleness, none at unscored tokens; none for mismatch.

    Raises: `EvidenceError` if the batch lacks one of the two policies.

    Example:
        >>> import torch
        >>> lp = LogProbs.pack(torch.tensor([-1.0]), torch.tensor([-0.5]), segments=Segments.from_lengths([1]))
        >>> log_ratio(lp, on="full")
        tensor([0.5000])

    Reference: Li et al., Trust Region Masking, arXiv:2512.23075v5, eq. 2 (full); three-policy form:
    "From Two Policies to Three", 2025.
    """
    check_choice("on", on, get_args(RatioName))
    if sharing():
        return stopped_log_ratio(logprobs, on=on)
    return _log_ratio(logprobs, on)


def _log_ratio(logprobs: LogProbs, on: RatioName) -> Float[Tensor, " n"]:
    first, second = _policies(logprobs, on)
    difference = second - first
    if logprobs.unscored is None:
        return difference
    return difference.masked_fill(logprobs.unscored, 0.0)


def _policies(logprobs: LogProbs, on: RatioName) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    second = logprobs.old if on == "mismatch" else logprobs.current
    return (logprobs.old if on == "staleness" else logprobs.logp_rollout), second


def stopped_log_ratio(logprobs: LogProbs, *, on: RatioName) -> Float[Tensor, " n"]:
    """`log_ratio` without gradient, computed once per batch: gates, weights and statistics share it.

    Never write into it. Gradient: none.
    """
    if transformed():
        return _log_ratio(logprobs, on).detach()
    if on not in logprobs.detached_log_ratios:
        sweep = swept(logprobs, on=on)
        log_ratio = _log_ratio(logprobs, on).detach() if sweep is None else sweep.log_ratio
        logprobs.detached_log_ratios[on] = share(log_ratio)
    return logprobs.detached_log_ratios[on]


def swept(logprobs: LogProbs, *, on: RatioName) -> RatioSums | None:
    """The log-ratio with its sums, by a compiled pass, once per batch; None where there is none. Gradient: none.

    Whoever looks at a ratio first pays for what its statistics, weights and gates will read.
    """
    if not asked() or transformed() or logprobs.unscored is not None:
        return None
    if on not in logprobs.sweeps:
        from offdrift.compiled.passes import sweep

        logprobs.sweeps[on] = sweep(*_policies(logprobs, on), logprobs.segments.cu_seqlens)
    return logprobs.sweeps[on]


def per_unit(log_ratio: Float[Tensor, " n"], segments: Segments, *, unit: Unit) -> Float[Tensor, " n"]:
    """The log-ratio of each token's unit, given to every token of that unit.

        token            l_t
        prefix           sum_{s<=t} l_s                  unbiased for the term of token t
        prefix_min       l_t + min_{s<t} l_s             the minimum is 0 at the first token
        turn             mean of l over the turn         (geometric)
        turn_product     sum of l over the turn
        turn_arithmetic  log of the mean of e^l over the turn
        sequence         sum_t l_t                       product of ratios; unbiased for a sequence reward
        geometric        (1/T) sum_t l_t                 length-invariant; not an importance weight
        worst            l_t with the largest |l_t| of the sequence

    Without `segments.turns` a sequence is one turn.

    Gradient: to `log_ratio`.

    Example:
        >>> import torch
        >>> s = Segments.from_lengths([2])
        >>> per_unit(torch.tensor([0.1, -0.3]), s, unit="sequence")
        tensor([-0.2000, -0.2000])

    Reference: units of sections 3-4 of Li et al., arXiv:2512.23075v5; geometric: GSPO,
    arXiv:2507.18071, eq. 7; prefix: CTPO, arXiv:2605.07331; prefix_min: MinPRO, arXiv:2601.22718;
    turn: ST-PPO, arXiv:2511.20718 (sources differ on which mean; geometric is the default).
    """
    if unit not in UNITS:
        raise MethodError(f"unit={unit!r} is not a unit; choose one of {get_args(Unit)}")
    return UNITS[unit](log_ratio, segments)


def least_before(x: Float[Tensor, " n"], segments: Segments) -> Float[Tensor, " n"]:
    """Smallest value of the segment before each token; 0 at its first. Gradient: to `x`."""
    least = segments.prefix_min(x)
    return torch.cat([least.new_zeros(1), least[:-1]]).where(segments.position > 0, 0.0)


def discounted_future(x: Float[Tensor, " n"], segments: Segments, *, decay: float) -> Float[Tensor, " n"]:
    """Sum from each token to the end of its sequence, later tokens counting for less. Gradient: to `x`.

        F_t = sum_{s >= t} decay^(s - t) x_s

    A doubling scan in float64: log2(longest sequence) vector steps.

    Args:
        x: one number per token, such as a log-ratio, nats.
        decay: factor per token, in (0, 1].

    Example:
        >>> import torch
        >>> discounted_future(torch.tensor([1.0, 2.0, 4.0]), Segments.from_lengths([3]), decay=0.5)
        tensor([3., 4., 4.])

    Reference: FIPO, arXiv:2603.19835, its discounted future log-ratio.
    """
    future, reach = x.double(), 1
    left = segments.spread(segments.lengths) - segments.position
    while reach < segments.longest:
        later = torch.cat([future[reach:], future.new_zeros(reach)])
        future = future + (decay**reach * later).where(left > reach, 0.0)
        reach *= 2
    return future.to(x.dtype)


def turns_of(segments: Segments) -> Segments:
    """The turns of a batch; a sequence without recorded turns is one turn."""
    return segments if segments.turns is None else segments.turns


UNITS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "token": lambda x, s: x,
    "prefix": lambda x, s: s.prefix_sum(x),
    "prefix_min": lambda x, s: x + least_before(x, s),
    "turn": lambda x, s: turns_of(s).spread(turns_of(s).mean(x)),
    "turn_product": lambda x, s: turns_of(s).spread(turns_of(s).sum(x)),
    "turn_arithmetic": lambda x, s: turns_of(s).spread(turns_of(s).log_mean_exp(x)),
    "sequence": lambda x, s: s.spread(s.sum(x)),
    "geometric": lambda x, s: s.spread(s.mean(x)),
    "worst": lambda x, s: s.spread(worst(x, s)),
}


def worst(log_ratio: Float[Tensor, " n"], segments: Segments) -> Float[Tensor, " b"]:
    """Per sequence, the log-ratio of largest absolute value, with its sign. Gradient: to it."""
    high, low = segments.max(log_ratio), segments.min(log_ratio)
    return high.where(high.abs() >= low.abs(), low)
