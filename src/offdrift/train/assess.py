"""What one forward pass says about a batch, and the advantages that follow from it.

`assess` scores a batch with the weights that a model has: log-probs, entropies, sums of squared
probabilities, divergences. `old_policy` decides whose weights those are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.advantages import ADVANTAGES, advantages
from offdrift.batch_info import Facts
from offdrift.correction import Corrected
from offdrift.divergence.evidence import Divergence
from offdrift.engines.score import chunks, divergences, score
from offdrift.logprobs import LogProbs
from offdrift.methods import Method
from offdrift.penalty import penalized_rewards
from offdrift.records.rollouts import OLD_STATUS, Rollouts


@dataclass(frozen=True)
class Assessment:
    """One policy's view of `n` response tokens; no gradient."""

    logp: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    sum_pi_squared: Float[Tensor, " n"]
    divergences: dict[str, Divergence] = field(default_factory=dict)
    """Of this policy from the rollout policy, `..._rollout_old`."""
    version: Int[Tensor, " n"] | None = None
    """Updates that the weights had seen which scored each token; None for averaged weights."""

    def at(self, version: int) -> Assessment:
        """The same, of weights that had seen `version` updates."""
        return replace(self, version=torch.full((len(self.logp),), version))

    def status(self, rollout_version: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Index into `OLD_STATUS` of each token, as an old policy of rollouts of these versions."""
        if self.version is None:
            return torch.full_like(rollout_version, OLD_STATUS.index("approximated"))
        stale = self.version != rollout_version
        return stale.long() * OLD_STATUS.index("stale")

    def to(self, device: torch.device) -> Assessment:
        """The same on another device."""
        moved = {k: d.map(lambda x: x.to(device)) for k, d in self.divergences.items()}
        logp, entropy, squared = (
            x.to(device) for x in (self.logp, self.entropy, self.sum_pi_squared)
        )
        return Assessment(logp, entropy, squared, moved, self.version)

    def select(self, rows: Tensor) -> Assessment:
        """Some of the tokens."""
        cut = {k: d.map(lambda x: x[rows]) for k, d in self.divergences.items()}
        version = None if self.version is None else self.version[rows]
        return Assessment(
            self.logp[rows], self.entropy[rows], self.sum_pi_squared[rows], cut, version
        )

    @staticmethod
    def joined(parts: Sequence[tuple[Tensor, Assessment]], n: int) -> Assessment:
        """The view of `n` tokens from views of parts, each with the tokens that it is about."""
        rows = torch.cat([r for r, _ in parts])

        def placed(name: str) -> Tensor:
            together = torch.cat([getattr(part, name) for _, part in parts])
            return together.new_empty(n).index_copy_(0, rows, together)

        first = parts[0][1]
        divergences = {
            k: _joined(k, [(r, part.divergences[k]) for r, part in parts], n)
            for k in first.divergences
        }
        version = None if first.version is None else placed("version")
        logp, entropy, squared = (placed(k) for k in ("logp", "entropy", "sum_pi_squared"))
        return Assessment(logp, entropy, squared, divergences, version)


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
    start: Assessment | None,
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
        start: the trainer before the batch's first update, where the estimator or the method asks.
        old: the old policy, where the method reads it.
        version: optimizer steps taken.
        total: sums a tensor over all processes.
    """
    assert rollouts.rewards is not None
    segments, rewards = rollouts.segments, rollouts.rewards
    if row.penalty is not None and row.penalty.place == "reward":
        assert start is not None
        assert logp_ref is not None
        kl = row.penalty(start.logp, logp_ref, log_ratio=start.logp - rollouts.logp_rollout)
        rewards = penalized_rewards(rewards, segments, kl, row.penalty.coef)
    options: dict = {"how": how, "baseline_over": baseline_over, "total": total}
    if start is not None:  # the policy whose gradients the estimator weighs
        options |= {"logp_old": start.logp, "sum_pi_squared": start.sum_pi_squared}
    if reads_correction(how, baseline_over):
        assert start is not None
        decided = _decisions(rollouts, row, start, start if old is None else old, version)
        options["weight"] = decided.weight
        options["keep"] = segments.sum(decided.keep.to(start.logp.dtype)) > 0
    return advantages(rewards, segments, **options)


def _decisions(
    rollouts: Rollouts, row: Method, start: Assessment, old: Assessment, version: int
) -> Corrected:
    """What gates and weights decide before the batch's first update."""
    assert rollouts.rewards is not None
    segments = rollouts.segments
    lp = LogProbs.pack(rollouts.logp_rollout, start.logp, old.logp, segments=segments)
    current = {k.replace("rollout_old", "rollout_current"): d for k, d in start.divergences.items()}
    facts = Facts(
        divergences={**current, **old.divergences},
        entropy=old.entropy,
        rewards=rollouts.rewards,
        version_lag=version - rollouts.rollout_version,
    )
    lp = lp if row.anchor is None else row.anchor(lp, facts)
    return row.correction(lp, advantages(rollouts.rewards, segments, how="dr_grpo"), facts)


def reads_correction(how: str, baseline_over: str) -> bool:
    """Whether the advantages depend on what gates and weights decide before the first update."""
    return baseline_over == "kept" or "weight" in ADVANTAGES[how].reads


def _joined(name: str, parts: list[tuple[Tensor, Divergence]], n: int) -> Divergence:
    return replace(Divergence.joined(parts, n).map(lambda x: x.cpu()), name=name)
