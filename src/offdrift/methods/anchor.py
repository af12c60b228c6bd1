"""Stand-ins for the old policy that cost no forward pass.

`Interpolated` (A-3PO) puts it between the rollout and the current policy, the closer to the current one the older a
token is; `RolloutAsOld` (bypass) takes the rollout policy itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.batch_info import BatchInfo
from offdrift.errors import check_choice
from offdrift.logprobs import LogProbs

AtZeroLag = Literal["current", "behaviour"]


def interpolated(
    logp_rollout: Float[Tensor, " n"],
    logp: Float[Tensor, " n"],
    version_lag: Float[Tensor, " n"] | Int[Tensor, " n"],
    *,
    at_zero_lag: AtZeroLag = "current",
) -> Float[Tensor, " n"]:
    """Log-probs of the policy one update back, interpolated in nats:

        log pi_old = log mu + alpha (log pi - log mu),    alpha = 1 - 1/d,  within [0, 1]

    The staleness ratio is then w^(1/d) and the mismatch ratio w^(1 - 1/d), w the full ratio: a clip
    on staleness acts on a tempered full ratio.

    Args:
        logp_rollout: log mu of the sampled tokens, nats.
        logp: log pi, nats.
        version_lag: d, updates between the weights that drew a token and the current ones.
        at_zero_lag: the anchor of tokens that the current weights drew (d <= 0): the current policy
            as in the paper, or the rollout policy as in AReaL's code.

    Gradient: none.

    Example:
        >>> mu, pi = torch.full((3,), -1.2), torch.full((3,), -0.8)
        >>> interpolated(mu, pi, torch.tensor([1, 2, 4]))
        tensor([-1.2000, -1.0000, -0.9000])

    Reference: A-3PO, arXiv:2512.06547; implemented in AReaL.
    """
    with torch.no_grad():
        d = version_lag.to(logp.dtype)
        alpha = (1 - 1 / d.where(d > 0, 1.0)).clamp(min=0)
        alpha = alpha.where(d > 0, 1.0 if at_zero_lag == "current" else 0.0)
        return torch.lerp(logp_rollout.to(logp.dtype), logp, alpha)


@dataclass(frozen=True, kw_only=True)
class Interpolated:
    """`interpolated` as the old policy of a batch; a recorded old policy is not read.

    Example:
        >>> Interpolated().formula
        'log pi_old = log mu + (1 - 1/d)(log pi - log mu), d = version lag; current policy at d = 0'
    """

    at_zero_lag: AtZeroLag = "current"
    needs = ("version_lag",)

    def __post_init__(self) -> None:
        check_choice("at_zero_lag", self.at_zero_lag, ("current", "behaviour"))

    @property
    def formula(self) -> str:
        """The anchor, in one line."""
        return (
            "log pi_old = log mu + (1 - 1/d)(log pi - log mu), d = version lag; "
            f"{'current' if self.at_zero_lag == 'current' else 'rollout'} policy at d = 0"
        )

    def __call__(self, logprobs: LogProbs, batch_info: BatchInfo) -> LogProbs:
        """The same batch with the interpolated policy as its old one. Gradient: none through it.

        Raises: `EvidenceError` if the batch carries no version lag.
        """
        lag = batch_info.required("version_lag")
        old = interpolated(logprobs.logp_rollout, logprobs.current, lag, at_zero_lag=self.at_zero_lag)
        # A new object: log-ratios that the given batch has cached are not those to the new anchor.
        return replace(logprobs, logp_old=old)


@dataclass(frozen=True, kw_only=True)
class RolloutAsOld:
    """The rollout policy as the old policy of a batch (bypass mode): `mismatch` is 1 at every token.

        log pi_old = log mu,    so staleness = full

    Example:
        >>> RolloutAsOld().formula
        'log pi_old = log mu'

    Reference: bypass mode of verl's rollout correction.
    """

    @property
    def formula(self) -> str:
        """The anchor, in one line."""
        return "log pi_old = log mu"

    def __call__(self, logprobs: LogProbs, batch_info: BatchInfo) -> LogProbs:
        """The same batch with the rollout policy as its old one. Gradient: none through it."""
        return replace(logprobs, logp_old=logprobs.logp_rollout)


Anchor = Interpolated | RolloutAsOld
