"""The named per-token quantities that a gate can look at.

`ratio`, `k2`, `k3` and `abs_log_ratio` need only the sampled token's log-probs (grade: sampled).
`kl` and `tv` need divergences computed from distributions, passed in as `divergences` and looked up
by the policies they compare (grade: exact, or the lower end of a certified interval).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from offdrift.divergence.evidence import Divergence
from offdrift.divergence.sampled import abs_log_ratio, k2, k3
from offdrift.errors import EvidenceError, MethodError
from offdrift.logprobs import LogProbs
from offdrift.numerics import blockwise, clamped
from offdrift.ratios import RatioName, stopped_log_ratio

StatisticName = Literal["ratio", "k2", "k3", "abs_log_ratio", "kl", "tv"]

SAMPLED: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio": clamped,  # compared in log space: a bound itself is kept exactly
    "k2": k2,
    "k3": k3,
    "abs_log_ratio": abs_log_ratio,
}
EXACT = ("kl", "tv")
SECOND = {"full": "current", "mismatch": "old"}
"""Which policy a divergence of each ratio compares the rollout policy with."""


def divergence_name(statistic: str, on: RatioName) -> str:
    """The key of `divergences` that a gate on this statistic reads, as `kl_rollout_current`."""
    if on not in SECOND:
        raise MethodError(
            f"{statistic} on {on!r} is not defined: exact divergences compare the rollout policy "
            'with the current (on="full") or the old policy (on="mismatch")'
        )
    return f"{statistic}_rollout_{SECOND[on]}"


def statistic(
    name: str,
    logprobs: LogProbs,
    divergences: Mapping[str, Divergence] | None = None,
    *,
    on: RatioName,
) -> Float[Tensor, " n"]:
    """The quantity `name` per token; `ratio` is given as its log. Gradient: none.

    Args:
        name: one of `StatisticName`.
        logprobs: the batch.
        divergences: exact or interval divergences of this batch, by name.
        on: which two policies are compared.

    Raises:
        EvidenceError: the batch lacks the policy or the divergence that is needed.
        MethodError: no such statistic.

    Example:
        >>> import torch
        >>> from offdrift.segments import Segments
        >>> lp = LogProbs.pack(torch.tensor([-1.0]), torch.tensor([-0.8]), segments=Segments.from_lengths([1]))
        >>> statistic("k2", lp, on="full")
        tensor([0.0200])

    Reference: Li et al., arXiv:2512.23075v5, section 4.3 and Appendix E.
    """
    if name in SAMPLED:
        return blockwise(SAMPLED[name], stopped_log_ratio(logprobs, on=on))
    if name not in EXACT:
        raise MethodError(f"{name!r} is not a statistic; choose one of {[*SAMPLED, *EXACT]}")
    wanted = divergence_name(name, on)
    found = (divergences or {}).get(wanted)
    if found is None:
        raise EvidenceError(
            f"this gate needs {wanted}, and the batch has {sorted(divergences or {}) or 'none'}; "
            'record distributions in the rollout (evidence = "full" or a number of top log-probs), '
            "or use the sampled stand-ins (trm_max_k2, trm_avg_k3, trm_max_avg_k2_k3)"
        )
    return found.lo.detach()
