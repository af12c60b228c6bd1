"""A plan: which route to a certificate takes fewer prompts, for the policies, lengths and prompts of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from offdrift.certificate.batch import BatchEvidence
from offdrift.certificate.certify import power
from offdrift.certificate.confidence import Looks
from offdrift.certificate.samples import ENOUGH, fresh_curve, has_control, power_curve, unit_rewards


@dataclass(frozen=True)
class Plan:
    """Prompts that each route to a certificate takes, for the policies, lengths and prompts of a batch."""

    curves: Mapping[str, Mapping[int, float]]
    """By route the probability of a certificate, by number of prompts: estimates. "direct" is rollouts by their ratios,
    "control" the same with control variates, which exact evidence allows, "fresh" answers of both policies."""
    kl_seq: float | None
    """Mean KL of sequences, upper end, nats; None without evidence."""
    length: float
    """Mean tokens of a response."""
    prompts: int
    """Prompts of the batch."""

    @property
    def needed(self) -> dict[str, int | None]:
        """Prompts from which on a route certifies with probability `ENOUGH`; None if no planned number does."""
        return {k: next((n for n, p in sorted(c.items()) if p >= ENOUGH), None) for k, c in self.curves.items()}

    @property
    def use(self) -> str | None:
        """The route that takes fewest prompts, "direct" where both take as many; None if neither is enough."""
        enough = {k: n for k, n in self.needed.items() if n is not None}
        return min(enough, key=enough.__getitem__, default=None)

    @property
    def words(self) -> str:
        """Say what was compared, and which to use."""
        kl = "KL of sequences not recorded" if self.kl_seq is None else f"KL of sequences {self.kl_seq:.3g} nat"
        about = f"{kl}, {self.length:.4g} tokens a response, {self.prompts:,} prompts"
        counts = {k: "no planned number of" if n is None else f"{n:,}" for k, n in self.needed.items()}
        routes = {
            "direct": "by ratios alone",
            "control": "with control variates",
            "fresh": "by fresh answers of both policies",
        }
        each = ", ".join(f"{counts[k]} prompts {words}" for k, words in routes.items() if k in counts)
        advice = {
            "direct": "Use rollouts like these: nothing else has to be drawn",
            "control": "Use rollouts like these, whole vocabulary recorded: `offdrift certify` takes control variates",
            "fresh": "Draw fresh answers of both policies to the same prompts, and `offdrift certify A B --fresh`",
            None: "None is enough: the gain that was seen is too small, or none",
        }[self.use]
        return f"For {about}: certified with probability {ENOUGH:g} from {each}. {advice}."

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        curves = {k: [{"prompts": n, "probability": p} for n, p in c.items()] for k, c in self.curves.items()}
        return {**vars(self), "curves": curves, "needed": self.needed, "use": self.use, "words": self.words}


def plan(
    batch: BatchEvidence,
    *,
    reward_range: tuple[float, float] = (0.0, 1.0),
    alpha: float = 0.05,
    looks: Looks | None = None,
) -> Plan | None:
    """Compare the routes to a certificate of this gain: rollouts like the batch's, or fresh answers of both policies.

    Where the evidence is exact, rollouts are planned for without and with control variates, which `certify` then mixes.
    All are estimates from the batch's own prompts, see `power` and `samples.fresh_curve`: what these prompts did not
    show is in none. The last is cautious. None without rewards.

    Args: as in `certify`, of the planned batch.

    Raises: `BadValueError` as `certify`, for rewards and alpha.
    """
    curve = power(batch, reward_range=reward_range, alpha=alpha, looks=looks)
    if not curve:
        return None
    host = batch.to_host()
    rewards, share = unit_rewards(host["reward"], reward_range), (looks or Looks()).share(alpha)
    kl = float(host["kl_total"].mean())
    control = {"control": power_curve(host, rewards, alpha=share, control=True)} if has_control(host) else {}
    return Plan(
        curves={"direct": curve, **control, "fresh": fresh_curve(host, rewards, alpha=share)},
        kl_seq=kl if np.isfinite(kl) else None,
        length=float(host["length"].mean()),
        prompts=len(batch) if host.group_ids is None else len(np.unique(host.group_ids)),
    )
