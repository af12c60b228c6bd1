"""One setting changed on the same tokens: of a running server by a request, or by another engine beside it.

A server that decodes given tokens (`engines.server.forced`) is compared with itself token by token: alone and in a
batch, with its prefix cache and without. What no request changes (tensor parallelism, chunked prefill, the dtype of the
cache, attention kernels, speculative decoding) another server changes: `--against`. Both sides then have the same
contexts, so that what remains between them is the setting.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from offdrift.check.bench import Bench, EngineSpec
from offdrift.check.factors.base import few
from offdrift.check.factors.rollout import LONG
from offdrift.check.measure import NAN, clustered_error
from offdrift.engines.generate import prompts_of
from offdrift.engines.server.engine import OpenAIEngine
from offdrift.engines.server.settings import SETTINGS, differing
from offdrift.errors import EngineError, NotOfferedError, OffdriftError
from offdrift.records.rollouts import EvidenceKind, FullVocab, Rollouts, TopK
from offdrift.segments import Segments

ALONE = 8
"""Sequences that are decoded alone."""
READ = "read at once, not decoded"
"""Label of log-probs that an engine gives to tokens of a prompt."""


@dataclass(frozen=True)
class Paired:
    """Log-probs of the same tokens without and with a change. NaN where nothing was measured."""

    factor: str
    changed: str
    """The change in words."""
    computed: str
    """How the log-probs came about, without and with the change."""
    tokens: int = 0
    equal_tokens: int = 0
    """Tokens whose log-probs have the same bits."""
    abs_log_ratio_max: float = NAN
    """Largest |log mu' - log mu|, nat."""
    self_kl: float = NAN
    """Mean of (log mu' - log mu)^2 / 2 over tokens, nat: KL of the engine to itself, to second order."""
    kl_change: float = NAN
    """Mean of D' - D with D = (log pi - log mu)^2 / 2, nat: how much nearer or further the trainer is."""
    kl_change_low: float = NAN
    kl_change_high: float = NAN
    """95 % interval of that mean over fresh prompts, clustered by sequence."""
    why: str = ""
    """Why it was not measured; "" if it was."""

    def as_dict(self) -> dict[str, Any]:
        """Entry of `check.json`."""
        return asdict(self)


def paired(
    name: str,
    changed: str,
    computed: str,
    before: Rollouts,
    after: Rollouts,
    logp_train: Float[Tensor, " n"],
) -> Paired:
    """Compare log-probs of the same tokens without and with a change.

    Args:
        logp_train: log pi of these tokens in the trainer, nat.

    Raises: `EngineError` if the tokens are not the same.
    """
    if not torch.equal(before.tokens, after.tokens):
        raise EngineError("the two sides have other tokens; a paired difference needs the same")
    mu, changed_mu, pi = (x.double() for x in (before.logp_rollout, after.logp_rollout, logp_train))
    moved = changed_mu - mu
    change = (pi - changed_mu).square() / 2 - (pi - mu).square() / 2
    mean, reach = float(change.mean()), 1.96 * clustered_error(change, Segments(before.cu_seqlens))
    return Paired(
        name,
        changed,
        computed,
        tokens=len(mu),
        equal_tokens=int(alike(before, after).sum()),
        abs_log_ratio_max=float(moved.abs().max()),
        self_kl=float(moved.square().mean() / 2),
        kl_change=mean,
        kl_change_low=mean - reach,
        kl_change_high=mean + reach,
    )


def alike(one: Rollouts, other: Rollouts) -> Bool[Tensor, " n"]:
    """Tokens whose log-probs have the same bits: also of the whole vocabulary, or of the likeliest tokens, where both
    sides recorded these."""
    same = one.logp_rollout.float() == other.logp_rollout.float()
    a, b = one.evidence, other.evidence
    if isinstance(a, FullVocab) and isinstance(b, FullVocab):
        same = same & (a.logp == b.logp).all(-1)
    elif isinstance(a, TopK) and isinstance(b, TopK) and a.ids.shape == b.ids.shape:
        same = same & (a.logp == b.logp).all(-1) & (a.ids == b.ids).all(-1)
    return same


def evidence_like(rollouts: Rollouts) -> EvidenceKind:
    """The evidence that another engine has to record to be compared with these rollouts."""
    evidence = rollouts.evidence
    if isinstance(evidence, TopK):
        return int(evidence.ids.shape[1])
    return "full" if isinstance(evidence, FullVocab) else "sampled"


def along(bench: Bench, spec: EngineSpec, rollouts: Rollouts) -> tuple[Rollouts, str]:
    """Give the same tokens another engine's log-probs, and say how it computed them.

    A server that decodes no given tokens reads them.

    Raises: `NotOfferedError` for an engine that can do neither.
    """
    engine: Any = bench.engine(spec)
    kind = evidence_like(rollouts)
    if isinstance(engine, OpenAIEngine):
        try:
            way = engine.decoding(prompts_of(rollouts)[0])
        except NotOfferedError:
            return engine.forced(rollouts), READ
        return engine.decoded(rollouts, evidence=kind), f"decoded by {way}"
    if not hasattr(engine, "rescore"):
        raise NotOfferedError(f"the {spec.kind} engine cannot score tokens that it did not sample")
    return engine.rescore(rollouts, evidence="sampled" if isinstance(kind, int) else kind), "decoded in this process"


def paired_rows(
    bench: Bench,
    rollout: EngineSpec,
    drawn: Rollouts,
    logp_train: Float[Tensor, " n"],
    train: EngineSpec,
    against: EngineSpec | None = None,
) -> list[dict[str, Any]]:
    """Rows of `check.json` under `paired`: what requests change of a server, and the other engine.

    Args:
        drawn: tokens of the rollout engine.
        logp_train: their log pi in the trainer, nat.
        against: another engine or server with the same weights.
    """
    sampling = drawn.provenance.sampling
    if sampling.filtered or sampling.temperature != 1:
        why = "given tokens have log-probs of temperature 1 without filters, and these were drawn otherwise"
        return [Paired("all", "", "", why=why).as_dict()] if rollout.kind == "openai" or against else []
    rows: list[Paired] = []
    if rollout.kind == "openai":
        rows += _server(bench, rollout, drawn, logp_train, train)
    if against is not None:
        rows.append(_attempted("another engine", lambda: _other(bench, rollout, drawn, logp_train, against)))
    if rollout.kind == "openai":
        rows += _unasked(bench, rollout, {row.factor for row in rows})
    return [row.as_dict() for row in rows]


def _attempted(name: str, measure: Any) -> Paired:
    """A row, or why there is none."""
    try:
        return measure()
    except OffdriftError as error:
        return Paired(name, "", "", why=(str(error).strip().splitlines() or [""])[0][:500])


def _server(
    bench: Bench, rollout: EngineSpec, drawn: Rollouts, logp_train: Float[Tensor, " n"], train: EngineSpec
) -> Iterator[Paired]:
    """Measure what a request can change of a running server."""
    engine: Any = bench.engine(rollout)
    prompt, count = prompts_of(drawn)[0], drawn.num_sequences

    def prefill() -> Paired:
        words = "tokens read as a prompt instead of drawn"
        return paired("prefill", words, READ, drawn, engine.forced(drawn), logp_train=logp_train)

    yield _attempted("prefill", prefill)
    try:
        way = f"decoded by {engine.decoding(prompt)}"
    except OffdriftError as error:
        yield Paired("repeats, batch, prefix_cache", "", "", why=str(error).splitlines()[0][:500])
        return

    def repeats() -> Paired:
        again = engine.decoded(drawn, evidence=evidence_like(drawn))
        return paired("repeats", "decoded again", way, drawn, again, logp_train=logp_train)

    def batch() -> Paired:
        some = few(drawn, sequences=ALONE, v=bench.vocab_size)
        alone = engine.decoded(some, concurrency=1, evidence=evidence_like(drawn))
        words = f"each sequence alone instead of {count} together"
        return paired("batch", words, way, some, alone, logp_train=logp_train[: len(some.tokens)])

    def prefix_cache() -> Paired:
        some = _long_prompts(bench, few(drawn, sequences=ALONE, v=bench.vocab_size))
        salts = [uuid.uuid4().hex for _ in range(some.num_sequences)]
        # One after the other: in a batch a request may find what another one of the same batch has computed.
        cold, before = engine.decoded(some, concurrency=1, salts=salts), engine.cached_tokens
        warm, after = engine.decoded(some, concurrency=1, salts=salts), engine.cached_tokens
        hits = "how many is not said: --enable-prompt-tokens-details"
        if before is not None and after is not None:
            hits = f"{after - before} tokens"
            if after == before:
                raise NotOfferedError("the server found no prefix in its cache; it is off, or its blocks are long")
        words = f"prompts of {LONG} tokens or more taken from the prefix cache ({hits}) instead of computed"
        return paired("prefix_cache", words, way, cold, warm, logp_train=bench.score(cold, train).logp)

    for name, measure in (("repeats", repeats), ("batch", batch), ("prefix_cache", prefix_cache)):
        yield _attempted(name, measure)


def _long_prompts(bench: Bench, rollouts: Rollouts) -> Rollouts:
    """The responses behind prompts that fill a block of the prefix cache: each prompt is repeated."""
    prompts = [p * math.ceil(LONG / len(p)) for p in prompts_of(rollouts)]
    cuts = torch.tensor([0, *(len(p) for p in prompts)]).cumsum(0)
    flat = torch.tensor([token for p in prompts for token in p], dtype=rollouts.prompt_tokens.dtype)
    return rollouts.with_(
        prompt_tokens=flat, prompt_cu_seqlens=cuts.to(rollouts.prompt_cu_seqlens.dtype), evidence=None
    )


UNASKED = "no request changes it: start a second server with it, and give that as --against"


def _unasked(bench: Bench, rollout: EngineSpec, measured: set[str]) -> Iterator[Paired]:
    """Name each setting that only another server changes, with the option and what that needs."""
    engine: Any = bench.engine(rollout)
    for setting in SETTINGS:
        option = setting.sglang if engine.served.software == "sglang" else setting.vllm
        if setting.name not in measured:
            needs = f" (needs {setting.needs})" if setting.needs else ""
            yield Paired(setting.name, f"{option}{needs}", "", why=UNASKED)


def _name_of(bench: Bench, rollout: EngineSpec, against: EngineSpec) -> tuple[str, str]:
    """The factor by which two engines differ, as far as both say, and the change in words."""
    words = f"{against} instead of {rollout}"
    one, other = (bench.engine(spec) for spec in (rollout, against))
    if not (isinstance(one, OpenAIEngine) and isinstance(other, OpenAIEngine)):
        return "another engine", words
    changed = differing(one.served.settings, other.served.settings)
    if changed:
        words = "; ".join(f"{name} {there} instead of {here}" for name, (here, there) in changed.items())
    return next(iter(changed)) if len(changed) == 1 else "another engine", words


def _other(
    bench: Bench, rollout: EngineSpec, drawn: Rollouts, logp_train: Float[Tensor, " n"], against: EngineSpec
) -> Paired:
    """Another engine along the same tokens, both decoding, or both reading."""
    other, computed = along(bench, against, drawn)
    before = beside(bench, rollout, drawn, computed)
    name, words = _name_of(bench, rollout, against)
    return paired(name, words, computed, before, other, logp_train=logp_train)


def beside(bench: Bench, rollout: EngineSpec, drawn: Rollouts, computed: str) -> Rollouts:
    """Choose what another engine's log-probs are held against: those drawn, or those read if it reads tokens."""
    if computed == READ and rollout.kind == "openai":
        engine: Any = bench.engine(rollout)
        return engine.forced(drawn)
    return drawn
