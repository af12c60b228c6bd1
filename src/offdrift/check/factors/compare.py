"""Comparisons that factors share: the same tokens scored twice, and small parts of the rollouts.

Shape suffixes: n tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from offdrift.check.factors.base import Setting
from offdrift.check.measure import Measured, measured
from offdrift.check.rescore import Scored, rescored
from offdrift.divergence.fused import exact_divergences
from offdrift.engines.base import Rescores
from offdrift.engines.spec import EngineSpec
from offdrift.errors import NotOfferedError
from offdrift.numerics import one_thread
from offdrift.records.rollouts import EvidenceKind, FullVocab, HiddenStates, Rollouts, Sampling

ENTRIES = 2**24
"""Log-probs of whole vocabularies that an experiment keeps at once: 64 MiB in float32."""
LISTED = 2**22
"""The same, where an engine hands each of them over as a Python object."""
ONE_BY_ONE = 8
"""Sequences that are run alone."""


def teacher_forced(
    setting: Setting, spec: EngineSpec, rollouts: Rollouts, *, sampling: Sampling | None = None
) -> Rollouts:
    """What another engine records for the same tokens.

    Raises: `NotOfferedError` if the engine cannot score tokens that it did not sample.
    """
    engine = setting.bench.engine(spec)
    if not isinstance(engine, Rescores):
        raise NotOfferedError(f"the {spec.kind} engine cannot score tokens that it did not sample")
    return engine.rescore(rollouts, evidence=evidence_of(rollouts), sampling=sampling)


def measured_by(setting: Setting, rollouts: Rollouts, *, train: EngineSpec | None = None) -> Measured:
    """Rollouts against the training engine: the setting's, or another one."""
    return measured(rollouts, setting.bench.score(rollouts, train or setting.train))


def evidence_of(rollouts: Rollouts) -> EvidenceKind:
    """The kind of evidence that the rollouts record."""
    if isinstance(rollouts.evidence, HiddenStates):
        return "hidden"
    return "full" if isinstance(rollouts.evidence, FullVocab) else "sampled"


def scores(rollouts: Rollouts, piece: slice = slice(None)) -> Float[Tensor, "n v"]:
    """Recorded log-probs, or tempered logits, of some tokens over the whole vocabulary.

    Raises: `NotOfferedError` if the rollouts do not record them.
    """
    evidence = rollouts.evidence
    if isinstance(evidence, FullVocab):
        return evidence.logp[piece]
    if isinstance(evidence, HiddenStates):
        head = evidence.head
        whole = head.scores(evidence.states[piece], slice(0, len(head.weight)))
        return whole / rollouts.provenance.sampling.temperature
    raise NotOfferedError("the engine records the log-prob of the drawn token alone")


def recorded_alike(one: Rollouts, other: Rollouts) -> bool:
    """Whether two records hold the same tokens, log-probs and distributions, bit for bit."""
    a, b = one.evidence, other.evidence
    if isinstance(a, FullVocab) and isinstance(b, FullVocab):
        same = torch.equal(a.logp, b.logp)
    elif isinstance(a, HiddenStates) and isinstance(b, HiddenStates):
        same = torch.equal(a.states, b.states) and a.head is b.head
    else:
        same = a is None and b is None
    fields = ("tokens", "cu_seqlens", "logp_rollout")
    return same and all(torch.equal(getattr(one, f), getattr(other, f)) for f in fields)


def self_difference(without: Rollouts, with_change: Rollouts) -> dict[str, object]:
    """An engine against itself under a change, on the same tokens: exact KL, largest |log-ratio|."""
    parts: list[Tensor] = []
    if recorded_alike(without, with_change):
        parts = [torch.zeros(len(without.tokens))]
    else:
        step = max(1, LISTED // scores(without, slice(0, 1)).shape[-1])
        for start in range(0, len(without.tokens), step):
            piece = slice(start, start + step)
            mu, pi = scores(without, piece), scores(with_change, piece)
            with one_thread():  # see `check.rescore`
                parts.append(exact_divergences(mu, pi).kl_rollout_current)
    kl = torch.cat(parts)
    moved = (with_change.logp_rollout - without.logp_rollout).abs()
    return {
        "self_kl_mean": float(kl.double().mean()),
        "self_kl_max": float(kl.max()),
        "self_abs_log_ratio_max": float(moved.max()),
        "self_changed_frac": float((moved > 0).double().mean()),
        "self_tokens": len(moved),
    }


def few(rollouts: Rollouts, *, sequences: int = 10**9, entries: int = ENTRIES, v: int) -> Rollouts:
    """The first sequences: as many as keep `tokens x vocabulary` within `entries`, at least one."""
    fits = int((rollouts.cu_seqlens[1:] * v <= entries).sum())
    return rollouts.select(torch.arange(max(1, min(sequences, fits, rollouts.num_sequences))))


def few_prompts(
    prompts: Sequence[Sequence[int]], sampling: Sampling, *, entries: int, v: int
) -> tuple[list[list[int]], Sampling]:
    """Prompts and a response length (8 or more) that keep `tokens x vocabulary` within `entries`."""
    tokens = max(8, entries // v)
    length = min(sampling.max_tokens, max(8, tokens // 8))
    count = max(1, min(len(prompts), tokens // length))
    return [list(p) for p in prompts[:count]], replace(sampling, max_tokens=length)


def scored_alone(model: nn.Module, rollouts: Rollouts) -> Scored:
    """Scores of each sequence in a forward pass of its own, without any padding."""
    return joined([rescored(model, one) for one in one_by_one(rollouts)])


def joined(parts: Sequence[Scored]) -> Scored:
    """Scores of consecutive pieces as one."""
    columns = [torch.cat(x) if x[0] is not None else None for x in zip(*parts)]
    return Scored(*columns)  # type: ignore[arg-type]


def one_by_one(rollouts: Rollouts) -> list[Rollouts]:
    """Every sequence as a batch of its own."""
    return [rollouts.select(torch.tensor([i])) for i in range(rollouts.num_sequences)]


def is_plain(sampling: Sampling) -> bool:
    """Whether tokens are drawn from the model's own distribution."""
    return sampling.temperature == 1 and sampling.top_k == 0 and sampling.top_p == 1
