"""What every rollout engine promises, whatever is behind it.

An engine draws tokens from its own copy of the weights and says with which probability it drew
them. The contract (`tests/engines/contract.py` runs it on every engine):

- `logp_rollout` is the log-prob under the distribution that was sampled: after temperature, top-k
  and top-p, at the engine's own precision. So is the evidence. Hidden states are recorded only
  without filters; together with their head they reproduce `logp_rollout`.
- The response ends with the stop token it sampled, if it sampled one; its length is what was
  drawn, never what a comparison with a pad id says. A pad id that was sampled is a token.
- The same weights, prompts, sampling and seed give the same tokens; the host's random state is
  neither read nor changed.
- After `load_weights` the engine samples from those weights, all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from offdrift.records.rollouts import EvidenceKind, Rollouts, Sampling


@runtime_checkable
class Engine(Protocol):
    """A source of rollouts at a known policy version."""

    name: str
    vocab_size: int
    version: int
    """Trainer version (optimizer steps) of the weights this engine holds."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seed: int, evidence: EvidenceKind = "sampled"
    ) -> Rollouts:
        """One response per prompt, in order; repeat a prompt to draw several.

        Raises `EngineError` if the engine cannot give the evidence asked for.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Take these named weights (the trainer's `named_parameters`) and this version."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Idempotent."""
        ...


@runtime_checkable
class Rescores(Protocol):
    """An engine that can be forced along tokens that were drawn before (teacher forcing).

    Only the outcome of each draw is imposed: prompts are prefilled and tokens go through the engine's
    cache, kernels, head, temperature and filters exactly as when it draws. So two engines that differ
    in one setting can be compared token by token.
    """

    def rescore(
        self, rollouts: Rollouts, *, evidence: EvidenceKind = "full", sampling: Sampling | None = None
    ) -> Rollouts:
        """These rollouts with this engine's log-probs, evidence, version and provenance.

        Args:
            sampling: at which the log-probs are taken; that of the rollouts, if absent.

        Raises: `EngineError` if a token is impossible under the filters of `sampling`.
        """
        ...


@runtime_checkable
class CachesPrefixes(Protocol):
    """An engine that keeps keys and values of prompts between requests."""

    cached_tokens: int
    """Prompt tokens, so far, whose keys and values were taken from the cache."""

    def drop_prefixes(self) -> None:
        """Forget all that is kept."""
        ...
