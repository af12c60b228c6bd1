"""Comparisons that factors share: the same tokens seen twice, and small pieces of a draw.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.check.factors.base import NotOffered, Setting
from offdrift.check.measure import Measured, measured
from offdrift.check.rescore import Scored, rescored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines.base import Rescores
from offdrift.engines.spec import EngineSpec
from offdrift.numerics import one_thread
from offdrift.records.rollouts import EvidenceKind, FullVocab, HiddenStates, Rollouts, Sampling

ENTRIES = 2**24
"""Log-probs of whole vocabularies that an experiment holds at once: 64 MiB in float32."""
LISTED = 2**22
"""The same, where an engine hands each of them over as a Python object."""
ONE_BY_ONE = 8
"""Sequences that are run alone."""


def led_by(
    setting: Setting, spec: EngineSpec, rollouts: Rollouts, *, sampling: Sampling | None = None
) -> Rollouts:
    """What another engine records of the same tokens.

    Raises: `NotOffered` if the engine cannot be led along given tokens.
    """
    engine = setting.bench.engine(spec)
    if not isinstance(engine, Rescores):
        raise NotOffered(f"the {spec.kind} engine cannot be led along given tokens")
    return engine.rescore(rollouts, evidence=evidence_of(rollouts), sampling=sampling)


def measured_by(
    setting: Setting, rollouts: Rollouts, *, train: EngineSpec | None = None
) -> Measured:
    """Rollouts against the training engine."""
    return measured(rollouts, setting.bench.score(rollouts, train or setting.train))


def evidence_of(rollouts: Rollouts) -> EvidenceKind:
    """The kind of evidence that a draw holds."""
    if isinstance(rollouts.evidence, HiddenStates):
        return "hidden"
    return "full" if isinstance(rollouts.evidence, FullVocab) else "sampled"


def scores(rollouts: Rollouts, piece: slice = slice(None)) -> Float[Tensor, "n v"]:
    """Recorded log-probs, or tempered logits, of some tokens over the whole vocabulary.

    Raises: `NotOffered` if the rollouts do not record them.
    """
    evidence = rollouts.evidence
    if isinstance(evidence, FullVocab):
        return evidence.logp[piece]
    if isinstance(evidence, HiddenStates):
        head = evidence.head
        whole = head.scores(evidence.states[piece], slice(0, len(head.weight)))
        return whole / rollouts.provenance.sampling.temperature
    raise NotOffered("the engine records the log-prob of the drawn token alone")


def recorded_alike(one: Rollouts, other: Rollouts) -> bool:
    """Whether two records hold the same tokens, log-probs and distributions, bit for bit."""
    if not torch.equal(one.tokens, other.tokens) or not torch.equal(one.cu_seqlens, other.cu_seqlens):  # fmt: skip
        return False
    a, b = one.evidence, other.evidence
    if isinstance(a, FullVocab) and isinstance(b, FullVocab):
        same = torch.equal(a.logp, b.logp)
    elif isinstance(a, HiddenStates) and isinstance(b, HiddenStates):
        same = torch.equal(a.states, b.states) and a.head is b.head
    else:
        same = a is None and b is None
    return same and torch.equal(one.logp_rollout, other.logp_rollout)


def self_difference(without: Rollouts, with_change: Rollouts) -> dict[str, object]:
    """An engine beside itself under a change, on the same tokens: exact KL, largest |log-ratio|."""
    whole = _self_kl(without, with_change)
    moved = (with_change.logp_rollout - without.logp_rollout).abs()
    return {
        "self_kl_mean": float(whole.double().mean()),
        "self_kl_max": float(whole.max()),
        "self_abs_log_ratio_max": float(moved.max()),
        "self_changed_frac": float((moved > 0).double().mean()),
        "self_tokens": len(moved),
    }


def _self_kl(without: Rollouts, with_change: Rollouts) -> Float[Tensor, " n"]:
    if recorded_alike(without, with_change):
        return torch.zeros(len(without.tokens))
    kl: list[Tensor] = []
    step = max(1, LISTED // scores(without, slice(0, 1)).shape[-1])
    for start in range(0, len(without.tokens), step):
        piece = slice(start, start + step)
        mu, pi = scores(without, piece), scores(with_change, piece)
        with one_thread():  # see `audit.rescore`
            kl.append(exact_divergences(mu, pi).kl_rollout_current)
    return torch.cat(kl)


def few(rollouts: Rollouts, *, sequences: int = 10**9, entries: int = ENTRIES, v: int) -> Rollouts:
    """The first sequences, so many that `tokens x vocabulary` stays within `entries`; at least one."""
    fits = int((rollouts.cu_seqlens[1:] * v <= entries).sum())
    return rollouts.select(torch.arange(max(1, min(sequences, fits, rollouts.num_sequences))))


def few_prompts(
    prompts: Sequence[Sequence[int]], sampling: Sampling, *, entries: int, v: int
) -> tuple[list[list[int]], Sampling]:
    """Prompts and a length whose whole draw stays within `entries`, at least 8 tokens long."""
    tokens = max(8, entries // v)
    length = min(sampling.max_tokens, max(8, tokens // 8))
    count = max(1, min(len(prompts), tokens // length))
    return [list(p) for p in prompts[:count]], replace(sampling, max_tokens=length)


def scored_alone(model: nn.Module, rollouts: Rollouts) -> Scored:
    """Scores of each sequence in a forward pass of its own, without any padding."""
    parts = [rescored(model, rollouts.select(torch.tensor([i]))) for i in _numbers(rollouts)]
    return joined(parts)


def joined(parts: Sequence[Scored]) -> Scored:
    """Scores of consecutive pieces as one."""
    columns = [torch.cat(x) if x[0] is not None else None for x in zip(*parts)]
    return Scored(*columns)  # type: ignore[arg-type]


def one_by_one(rollouts: Rollouts) -> list[Rollouts]:
    """Every sequence as a batch of its own."""
    return [rollouts.select(torch.tensor([i])) for i in _numbers(rollouts)]


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the model's own distribution."""
    return sampling.temperature == 1 and sampling.top_k == 0 and sampling.top_p == 1


def _numbers(rollouts: Rollouts) -> range:
    return range(rollouts.num_sequences)
