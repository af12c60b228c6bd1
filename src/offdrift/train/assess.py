"""What is known about a batch before its first update: the old policy, and what was it worth.

The old policy is the trainer as it is when the batch arrives. Everything that one forward pass can
say about it is taken in one: log-probs, entropies, sums of squared probabilities, divergences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.divergence.evidence import Divergence
from offdrift.engines.score import chunks, divergences, score
from offdrift.facts import Facts
from offdrift.kl import penalized_rewards
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.rollouts.records import Rollouts


@dataclass(frozen=True)
class Assessment:
    """The old policy's view of `n` response tokens; no gradient."""

    logp: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    sum_pi_squared: Float[Tensor, " n"]
    divergences: dict[str, Divergence] = field(default_factory=dict)
    """Of the old from the rollout policy, `..._rollout_old`."""

    def select(self, rows: Tensor) -> Assessment:
        """Some of the tokens."""
        cut = {k: d.map(lambda x: x[rows]) for k, d in self.divergences.items()}
        return Assessment(self.logp[rows], self.entropy[rows], self.sum_pi_squared[rows], cut)


@torch.no_grad()
def assess(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    token_budget: int,
    exact: bool = False,
    tail_log_ratio_cap: float | None = None,
) -> Assessment:
    """Score a batch with the weights the trainer has now. Gradient: none.

    Args:
        token_budget: padded tokens per forward pass.
        exact: also compute divergences from the recorded evidence.
        tail_log_ratio_cap: what top-k evidence may assume of its tail, nats; see `divergences`.
    """
    n = len(rollouts.tokens)
    columns = torch.empty(3, n)
    found: dict[str, list[tuple[Tensor, Divergence]]] = {}
    temperature = rollouts.provenance.sampling.temperature
    model.eval()
    for piece in chunks(rollouts, token_budget=token_budget):
        part, rows = rollouts.select(piece), rollouts.segments.rows(piece)
        said = score(model, part, temperature=temperature)
        columns[:, rows] = torch.stack([said.logp, said.entropy, said.sum_pi_squared]).float().cpu()
        if exact:
            cap = tail_log_ratio_cap
            for name, d in divergences(part, said.logits, tail_log_ratio_cap=cap).items():
                found.setdefault(name.replace("current", "old"), []).append((rows, d))
    logp, entropy, squared = columns
    joined = {name: _joined(name, parts, n) for name, parts in found.items()}
    return Assessment(logp, entropy, squared, joined)


def reference_logp(model: nn.Module, rollouts: Rollouts, *, token_budget: int) -> Tensor:
    """log pi_ref of every response token, under the frozen reference model."""
    return assess(model, rollouts, token_budget=token_budget).logp


def credit(
    rollouts: Rollouts,
    row: Method,
    *,
    how: str,
    baseline_over: str,
    old: Assessment | None,
    logp_ref: Tensor | None,
    version: int,
    total: Callable[[Tensor], Tensor],
) -> Float[Tensor, " n"]:
    """Advantage of every token, by the named estimator.

    Args:
        how: an estimator of `offdrift.advantages`.
        baseline_over: "sampled", or "kept": only sequences that the method's gates keep, as they
            decide before the batch's first update, count in their group's baseline.
        version: optimizer steps taken.
        total: sums a tensor over all processes.
    """
    assert rollouts.rewards is not None
    segments, rewards = rollouts.segments, rollouts.rewards
    if row.penalty is not None and row.penalty.place == "reward":
        assert old is not None
        assert logp_ref is not None
        kl = row.penalty(old.logp, logp_ref, log_ratio=old.logp - rollouts.logp_rollout)
        rewards = penalized_rewards(rewards, segments, kl, row.penalty.coef)
    options: dict = {"how": how, "baseline_over": baseline_over, "total": total}
    if old is not None:
        options |= {"logp_old": old.logp, "sum_pi_squared": old.sum_pi_squared}
    if reads_correction(how, baseline_over):
        assert old is not None
        lp = LogProbs.pack(rollouts.logp_rollout, old.logp, old.logp, segments=segments)
        flat = advantages(rollouts.rewards, segments, how="dr_grpo")
        facts = Facts(
            divergences={d: v for k, v in old.divergences.items() for d in (k, k.replace("old", "current"))},
            entropy=old.entropy,
            rewards=rollouts.rewards,
            version_lag=version - rollouts.rollout_version,
        )  # fmt: skip
        decided = row.correction(lp, flat, facts)
        options["weight"] = decided.weight
        options["keep"] = segments.sum(decided.keep.to(old.logp.dtype)) > 0
    return advantages(rewards, segments, **options)


def reads_correction(how: str, baseline_over: str) -> bool:
    """Whether the advantages depend on what gates and weights decide before the first update."""
    return baseline_over == "kept" or "weight" in ADVANTAGES[how].reads


def _joined(name: str, parts: list[tuple[Tensor, Divergence]], n: int) -> Divergence:
    return replace(Divergence.joined(parts, n).map(lambda x: x.cpu()), name=name)
