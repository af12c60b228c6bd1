"""Drawing, and following tokens that were drawn, as every engine does both: check, draw, pack.

How a backend samples is each engine's own (`_draws`); what is refused before, in which pieces it is
drawn, and what is said of the result afterwards is the same and stands here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from offdrift.engines.draws import (
    Draws,
    check_request,
    prompts_of,
    redrawn,
    responses_of,
    rollouts_from,
)
from offdrift.engines.heads import check_states
from offdrift.rollouts.records import (
    EvidenceKind,
    HiddenStates,
    Provenance,
    Rollouts,
    Sampling,
)

Tokens = Sequence[Sequence[int]]
"""Token ids of several prompts, or of several responses."""


class Drawing(ABC):
    """An engine's `generate` and `rescore`, made of what its backend can do.

    A subclass sets the attributes, draws, and says what drew.
    """

    name: str
    version: int
    dtype: str
    quantization: str | None
    vocab_size: int
    evidence_limit_mib: int
    _state_bytes: int  # of one hidden state

    def generate(
        self,
        prompts: Tokens,
        sampling: Sampling,
        *,
        seed: int,
        evidence: EvidenceKind = "sampled",
    ) -> Rollouts:
        """One response per prompt, in order; see `Engine.generate`.

        Raises: `EngineError` if the request makes no sense or does not fit this engine, if its
            evidence outgrows the limit, or if hidden states are asked of a model or a backend that
            does not show them.
        """
        self._check(prompts, sampling, evidence)
        draws = self._draws(prompts, sampling, evidence, seed=seed)
        provenance = self._provenance(sampling)
        return rollouts_from(draws, prompts, version=self.version, provenance=provenance)

    def rescore(
        self,
        rollouts: Rollouts,
        *,
        evidence: EvidenceKind = "full",
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """The same tokens as this engine would have recorded them; see `Rescores`.

        Raises: `EngineError` as `generate` does, if a filter excludes a token, or if the backend
            cannot be made to follow tokens.
        """
        prompts, responses = prompts_of(rollouts), responses_of(rollouts)
        sampling = sampling or rollouts.provenance.sampling
        sampling = replace(sampling, max_tokens=max(map(len, responses)))
        self._check(prompts, sampling, evidence)
        draws = self._draws(prompts, sampling, evidence, seed=0, given=responses)
        return redrawn(rollouts, draws, version=self.version, provenance=self._provenance(sampling))

    @abstractmethod
    def _draws(
        self,
        prompts: Tokens,
        sampling: Sampling,
        evidence: EvidenceKind,
        *,
        seed: int,
        given: Tokens | None = None,
    ) -> list[Draws]:
        """Draw, or follow the responses that are given; consecutive prompts in each part."""

    @property
    @abstractmethod
    def _source(self) -> tuple[str, str]:
        """The backend's version, and what the model is called."""

    def _check(self, prompts: Tokens, sampling: Sampling, evidence: EvidenceKind) -> None:
        check_request(
            prompts,
            sampling,
            evidence,
            vocab_size=self.vocab_size,
            state_bytes=self._state_bytes,
            limit_mib=self.evidence_limit_mib,
        )

    def _checked(self, draws: Draws, sampling: Sampling) -> Draws:
        """The same, once its hidden states have reproduced the log-probs beside them."""
        assert isinstance(draws.evidence, HiddenStates)
        check_states(
            draws.evidence,
            draws.tokens,
            draws.logp,
            temperature=sampling.temperature,
            engine=self.name,
        )
        return draws

    def _provenance(self, sampling: Sampling) -> Provenance:
        engine_version, model = self._source
        return Provenance(
            engine=self.name,
            engine_version=engine_version,
            model=model,
            dtype=self.dtype,
            quantization=self.quantization,
            sampling=sampling,
        )


def pieces(count: int, size: int) -> list[slice]:
    """Consecutive pieces of at most `size`, which together are `count`.

    Example:
        >>> pieces(5, 2)
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]
