"""`BatchInfo`: what a method may need to know about a batch besides log-probs and advantages.

Gates, weights and objectives all take `(logprobs, advantages, batch_info)`. What a batch does not carry
is absent, and a part that needs it says so by name. `Observed` is the one mechanism by which a part
may look at a whole step rather than at its own piece of it: numbers add, logs of sums are joined by
`logaddexp`, vectors end to end, so any split of a step over micro-batches and ranks gives what one
pass gives.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, overload, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from offdrift.divergence.evidence import Distributions, Divergence
from offdrift.errors import BadValueError, EvidenceError, ShapeError
from offdrift.logprobs import LogProbs
from offdrift.numerics import check_tensor

StepSums = dict[str, Tensor]
"""What one part saw of one batch: scalars are summed over pieces, vectors joined end to end; a scalar
under a name that begins with `log_` is the log of what is summed (see `numerics.log_sums`)."""

LOGITS = (
    "where only log-probs of the drawn tokens exist (a framework's hook, a log), take ppo_clip or gspo, or dppo_kl, "
    "which bounds the KL of the drawn token against the rest; `offdrift train` projects"
)
"""Way out of a method that projects whole distributions."""
PER_SEQUENCE = ("rewards", "sample_weight")
"""Tensors of `BatchInfo` with a value for every sequence; the others have one for every token."""
WAY_OUT = {
    "entropy": "give BatchInfo(entropy=...) (nats per token, of the old policy; `engines.score` returns it)",
    "rewards": "give BatchInfo(rewards=...) (one per sequence)",
    "version_lag": "give BatchInfo(version_lag=...) (updates since the weights that drew each token)",
    "distributions": "give BatchInfo(distributions=Distributions(logits_old, logits, tokens)) with the logits of this "
    f"forward pass; {LOGITS}",
}


@dataclass(frozen=True)
class Observed:
    """Observations of a step by the parts of a method, mergeable over its pieces."""

    parts: Mapping[Hashable, StepSums] = field(default_factory=dict)

    def merge(self, other: Observed) -> Observed:
        """Merge two observations: numbers add, logs of sums by `logaddexp`, vectors are joined."""
        return Observed(
            {
                part: {name: _join(name, x, other.parts[part][name]) for name, x in statistics.items()}
                for part, statistics in self.parts.items()
            }
        )

    def to(self, device: torch.device | str) -> Observed:
        """Return the observations on another device."""
        moved = {p: {k: x.to(device) for k, x in s.items()} for p, s in self.parts.items()}
        return Observed(moved)

    def cpu(self) -> Observed:
        """Return the observations on the CPU, to be sent to another process."""
        return self.to("cpu")


@dataclass(frozen=True, kw_only=True)
class BatchInfo:
    """Optional side information about a batch, packed like its log-probs.

    Nothing carries gradient but `divergences["kl_old_current"]`, where a penalty differentiates it, and the current
    policy's logits in `distributions`.
    """

    divergences: Mapping[str, Divergence] = field(default_factory=dict)
    """Exact or interval divergences by name, such as `kl_rollout_current`."""
    entropy: Float[Tensor, " n"] | None = None
    """Entropy of the old policy at each token, nats."""
    vocab: int | None = None
    """Tokens in the vocabulary."""
    rewards: Float[Tensor, " b"] | None = None
    """Reward of each sequence, in the task's unit."""
    sample_weight: Float[Tensor, " b"] | None = None
    """Weight of each sequence's loss, whatever the method: what corrects for the probability with which a buffer
    picked it."""
    version_lag: Float[Tensor, " n"] | Int[Tensor, " n"] | None = None
    """Updates between the weights that drew each token and the current ones."""
    distributions: Distributions | None = None
    """Old and current policy over the whole vocabulary at each token, for methods that project (`troll`); the one
    field whose logits carry the gradient."""
    observed: Observed | Literal["this_batch"] | None = None
    """What `method.observe` saw, merged over all pieces and ranks of the step; "this_batch" if this batch
    is the whole step, as it is where `policy_loss` gets no `normalizer`."""

    def required(self, name: str) -> Any:
        """A field per token or sequence, by name. Raises: `EvidenceError` naming it and the way out."""
        value = getattr(self, name)
        if value is None:
            raise EvidenceError(f"this method needs {name}, which the batch lacks; {WAY_OUT[name]}")
        return value

    def inputs(self, logprobs: LogProbs, advantages: Tensor) -> dict[str, Tensor]:
        """Advantages and every tensor of the side information by name, checked to be about the batch of `logprobs`.

        Raises: `BadValueError` for what is not a tensor of numbers on the batch's device; `ShapeError` for one that has
            no value for each token (of `PER_SEQUENCE`: for each sequence).
        """
        inputs = {"advantages": advantages}
        for name in ("entropy", "version_lag", *PER_SEQUENCE):
            if (x := getattr(self, name)) is not None:
                inputs[name] = x
        inputs |= {name: d.lo for name, d in self.divergences.items()}
        if self.distributions is not None:
            inputs["distributions"] = self.distributions.tokens
        device, n, b = logprobs.logp_rollout.device, logprobs.logp_rollout.shape, (len(logprobs.segments),)
        for name, x in inputs.items():
            check_tensor(name, x)
            if x.device != device:
                raise BadValueError(f"{name} is on {x.device}, the log-probs on {device}; move it there")
            expected = b if name in PER_SEQUENCE else n
            if x.shape != expected:
                raise ShapeError(
                    f"{name} has shape {tuple(x.shape)}, expected {tuple(expected)}: the batch has "
                    f"{n[0]} tokens in {b[0]} sequences; spread per-sequence values with segments.spread, "
                    "pack padded ones with logprobs.like_caller"
                )
        return inputs

    def map(self, function: Callable[[Tensor], Tensor]) -> BatchInfo:
        """The side information of other tokens: `function` applied to every tensor per token."""
        per_token = {"entropy": self.entropy, "version_lag": self.version_lag}
        return replace(
            self,
            divergences={k: d.map(function) for k, d in self.divergences.items()},
            distributions=None if self.distributions is None else self.distributions.map(function),
            **{name: function(x) for name, x in per_token.items() if x is not None},
        )

    def seen_by(self, part: Observer, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None) -> StepSums:
        """Observations of the step by one part: merged if the caller did, else of this batch."""
        if isinstance(self.observed, Observed) and part in self.observed.parts:
            return self.observed.parts[part]
        return part.observe(logprobs, advantages, self)


@runtime_checkable
class Observer(Hashable, Protocol):
    """A part that needs to see the whole step before it can act on any piece of it."""

    def observe(self, logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo) -> StepSums:
        """Mergeable statistics of one piece. Gradient: none."""
        ...


NO_INFO = BatchInfo()


@overload
def without_unscored(
    logprobs: LogProbs, advantages: Tensor, batch_info: BatchInfo
) -> tuple[LogProbs, Tensor, BatchInfo]: ...
@overload
def without_unscored(
    logprobs: LogProbs, advantages: None, batch_info: BatchInfo
) -> tuple[LogProbs, None, BatchInfo]: ...
def without_unscored(
    logprobs: LogProbs, advantages: Float[Tensor, " n"] | None, batch_info: BatchInfo
) -> tuple[LogProbs, Float[Tensor, " s"] | None, BatchInfo]:
    """Drop tokens without a rollout log-prob from the inputs of a gate, weight or objective.

    Gradient: to `logprobs.logp`.
    """
    if logprobs.scored_rows is None:
        return logprobs, advantages, batch_info
    scored = None if advantages is None else logprobs.select_scored(advantages)
    return logprobs.scored, scored, batch_info.map(logprobs.select_scored)


def _join(name: str, a: Tensor, b: Tensor) -> Tensor:
    if a.ndim:
        return torch.cat([a, b.to(a.device)])
    return torch.logaddexp(a, b) if name.startswith("log_") else a + b
