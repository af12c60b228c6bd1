"""Scores of sampled tokens under one policy: log-probs, entropies and divergences.

`score_batch` scores with the weights that a model has now; `old_policy` chooses the weights of the old policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from offdrift.divergence.evidence import Divergence
from offdrift.engines.score import chunks, divergences, score
from offdrift.records.rollouts import OLD_STATUS, Rollouts


@dataclass(frozen=True)
class PolicyScores:
    """Scores of `n` response tokens under one policy; no gradient."""

    logp: Float[Tensor, " n"]
    entropy: Float[Tensor, " n"]
    sum_pi_squared: Float[Tensor, " n"]
    divergences: dict[str, Divergence] = field(default_factory=dict)
    """Of this policy from the rollout policy, `..._rollout_old`."""
    version: Int[Tensor, " n"] | None = None
    """Updates that the weights had seen which scored each token; None for averaged weights."""

    def map(self, function: Callable[[Tensor], Tensor]) -> PolicyScores:
        """Scores of other tokens: `function` applied to every tensor."""
        divergences = {name: d.map(function) for name, d in self.divergences.items()}
        version = None if self.version is None else function(self.version)
        return PolicyScores(
            function(self.logp), function(self.entropy), function(self.sum_pi_squared), divergences, version
        )

    def select(self, rows: Tensor) -> PolicyScores:
        """Scores of some of the tokens."""
        return self.map(lambda x: x[rows])

    def status(self, rollout_version: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Index into `OLD_STATUS` of each token, as an old policy of rollouts of these versions."""
        if self.version is None:
            return torch.full_like(rollout_version, OLD_STATUS.index("approximated"))
        stale = self.version != rollout_version
        return stale.long() * OLD_STATUS.index("stale")

    @staticmethod
    def joined(parts: Sequence[tuple[Tensor, PolicyScores]], n: int) -> PolicyScores:
        """Scores of `n` tokens, on the host, from parts with the rows that each of them is about."""
        rows = torch.cat([r for r, _ in parts])
        first = parts[0][1]

        def placed(name: str) -> Tensor:
            column = torch.cat([getattr(part, name) for _, part in parts]).cpu()
            return column.new_empty(n).index_copy_(0, rows, column)

        joined_divergences = {
            name: Divergence.joined([(r, part.divergences[name]) for r, part in parts], n).map(lambda x: x.cpu())
            for name in first.divergences
        }
        version = None if first.version is None else placed("version")
        return PolicyScores(placed("logp"), placed("entropy"), placed("sum_pi_squared"), joined_divergences, version)


@torch.no_grad()
def score_batch(
    model: nn.Module,
    rollouts: Rollouts,
    *,
    token_budget: int,
    exact: bool = False,
    tail_log_ratio_cap: float | None = None,
) -> PolicyScores:
    """Score a batch with the weights that the model has now. Gradient: none.

    Args:
        token_budget: padded tokens per forward pass.
        exact: also compute divergences from the recorded evidence.
        tail_log_ratio_cap: what top-k evidence may assume of its tail, nats; see `divergences`.
    """
    temperature = rollouts.provenance.sampling.temperature
    parts = []
    model.eval()
    for sequences in chunks(rollouts, token_budget=token_budget):
        piece = rollouts.select(sequences)
        scored = score(model, piece, temperature=temperature)
        evidence = divergences(piece, scored.logits, tail_log_ratio_cap=tail_log_ratio_cap) if exact else {}
        logp, entropy, squares = (x.float().cpu() for x in (scored.logp, scored.entropy, scored.sum_pi_squared))
        scores = PolicyScores(logp, entropy, squares, named_as_old(evidence))
        parts.append((rollouts.segments.rows(sequences), scores))
    return PolicyScores.joined(parts, len(rollouts.tokens))


def named_as_old(from_rollout: Mapping[str, Divergence]) -> dict[str, Divergence]:
    """Divergences `..._rollout_current`, named `..._rollout_old`: the scoring policy is the old one."""
    renamed = (replace(d, name=d.name.replace("current", "old")) for d in from_rollout.values())
    return {d.name: d for d in renamed}
